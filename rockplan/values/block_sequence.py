"""A step as blocks that are planned one by one, and what runs beside them.

The rest of the model runs as it is, so of it nothing is known but what was measured: how many bytes
are alive at each moment of a step beside what the blocks keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rockplan.values.schedule import Schedule


@dataclass(frozen=True, slots=True)
class BoundedOption:
    """One way to run a block of a step.

    saved_bytes: alive between the phases beside what the forward returns, which the step holds or
    not; returned_bytes: of that, what the backward phase reads, whether the step holds it or not.
    forward_peak_bytes, backward_peak_bytes: the most at one time within a phase, with the results
    of the forward and with the gradients that come in.
    """

    schedule: Schedule
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    time_ns: int
    returned_bytes: int = 0

    @property
    def needs(self) -> tuple[int, int, int, int]:
        """What another option may be no worse in."""
        return (
            self.time_ns,
            self.saved_bytes,
            self.forward_peak_bytes,
            self.backward_peak_bytes,
        )


@dataclass(frozen=True, slots=True)
class StepMoment:
    """A part of a step, from when a block begins or ends to when the next does.

    outside_bytes: the most that is alive beside what blocks keep; while a block runs, beside what
    that one needs as well. keeping: as many blocks, the first ones by when their forwards run, may
    keep something meanwhile. running: the block that runs, None between blocks; is_backward: it
    runs backward.
    """

    outside_bytes: int
    keeping: int
    running: int | None = None
    is_backward: bool = False

    def peak_bytes(self, options: Sequence[BoundedOption]) -> int:
        """Of a step in which each block runs as its option says."""
        saved = sum(o.saved_bytes for i, o in self._kept(options))
        return self.outside_bytes + saved + self.own_bytes(options)

    def own_bytes(self, options: Sequence[BoundedOption]) -> int:
        """What the block that runs needs."""
        if self.running is None:
            return 0
        option = options[self.running]
        return option.backward_peak_bytes if self.is_backward else option.forward_peak_bytes

    def _kept(self, options: Sequence[BoundedOption]) -> list[tuple[int, BoundedOption]]:
        kept = enumerate(options[: self.keeping])
        return [(i, o) for i, o in kept if i != self.running]


def step_peak_bytes(moments: Sequence[StepMoment], options: Sequence[BoundedOption]) -> int:
    """The most at one time of a step."""
    return max((m.peak_bytes(options) for m in moments), default=0)


def held_like(option: BoundedOption, measured: BoundedOption) -> BoundedOption:
    """`option`, for a step that was measured with another one of the same block: what it holds of
    the results beyond that one, it keeps."""
    more_bytes = max(option.returned_bytes - measured.returned_bytes, 0)
    return replace(option, saved_bytes=option.saved_bytes + more_bytes)


def useful_options(options: Sequence[BoundedOption]) -> tuple[BoundedOption, ...]:
    """Those that no other one beats or equals in everything, fastest first."""
    kept: list[BoundedOption] = []
    for option in sorted(options, key=lambda o: o.needs):
        if not any(all(map(int.__le__, other.needs, option.needs)) for other in kept):
            kept.append(option)
    return tuple(kept)
