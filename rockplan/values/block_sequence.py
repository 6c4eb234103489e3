"""A step as blocks that are planned one by one, and the unplanned rest of the model.

The rest of the model runs as in eager. All that is known of it was measured: how many bytes are
alive at each moment of a step in addition to what the blocks keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rockplan.values.block import Option, undominated
from rockplan.values.schedule import Schedule


@dataclass(frozen=True, slots=True)
class BoundedOption(Option):
    """One way to run a block of a step.

    saved_bytes: bytes alive between the phases, the forward's results not counted (the step may
    hold these or not).
    forward_peak_bytes, backward_peak_bytes: the peak within a phase, results of the forward and
    incoming gradients included.
    """

    schedule: Schedule
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class StepMoment:
    """A part of a step, from where a block begins or ends to where the next one does.

    outside_bytes: peak of what is alive beyond what the blocks keep and beyond what the running
    block needs. keeping: how many blocks may hold saved bytes meanwhile: the first ones in the
    order of their forwards. running: index of the block that runs, None between blocks;
    is_backward: the running block is in its backward phase.
    """

    outside_bytes: int
    keeping: int
    running: int | None = None
    is_backward: bool = False

    def peak_bytes(self, options: Sequence[BoundedOption]) -> int:
        """Return the peak of this moment if each block i runs as `options[i]`."""
        kept = (o for i, o in enumerate(options[: self.keeping]) if i != self.running)
        return self.outside_bytes + sum(o.saved_bytes for o in kept) + self.own_bytes(options)

    def own_bytes(self, options: Sequence[BoundedOption]) -> int:
        """Return the bytes that the running block needs while it runs; 0 between blocks."""
        if self.running is None:
            return 0
        option = options[self.running]
        return option.backward_peak_bytes if self.is_backward else option.forward_peak_bytes


def step_peak_bytes(moments: Sequence[StepMoment], options: Sequence[BoundedOption]) -> int:
    """Return the peak of a step in which each block i runs as `options[i]`."""
    return max((m.peak_bytes(options) for m in moments), default=0)


def useful_options(options: Sequence[BoundedOption]) -> tuple[BoundedOption, ...]:
    """Return the Pareto-optimal options, fastest first: no other is as good in everything."""
    return undominated(sorted(options, key=lambda o: o.needs), lambda o: o.needs)
