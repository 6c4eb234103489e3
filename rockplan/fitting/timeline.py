"""Timeline: the memory of whole training steps, from one to the next.

takes: what exists before, the changes of forward and backward, those of an optimizer. returns:
Timeline, with its peak and the owners of its bytes. guarantees: it is one sequence of changes, so
that memory counts together only if it is alive together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rockplan.fitting.allocator import Usage
from rockplan.fitting.changes import (
    Changes,
    Holding,
    MemoryChange,
    Peak,
    left_alive,
    replayed_steps,
)
from rockplan.fitting.exchange import NCCL, Transport, gathers, sums_of_gradients
from rockplan.fitting.optimizer import OptimizerSteps
from rockplan.fitting.scheduled import all_gradients, first_gradients, scheduled_changes
from rockplan.fitting.shards import GatheredGroup
from rockplan.values.graph import CDGraph
from rockplan.values.interface import Interface
from rockplan.values.schedule import Schedule
from rockplan.values.sizes import at_sizes


@dataclass(frozen=True, slots=True)
class Passes:
    """Changes of forward and backward. first: parameters have no `.grad`; later: they have, and
    gradients are added to it; () if they never have. again: the first of a later step, where it is
    another one: optimizers that step in backward have their state, parameters that no optimizer has
    their gradients."""

    first: tuple[MemoryChange, ...]
    later: tuple[MemoryChange, ...]
    again: tuple[MemoryChange, ...] | None = None


def passes_of(
    graph: CDGraph,
    schedule: Schedule,
    interface: Interface,
    optimizer: OptimizerSteps,
    groups: Sequence[GatheredGroup] = (),
    transport: Transport = NCCL,
    *,
    adding: bool = True,
    is_eager: bool = False,
) -> Passes:
    """Return the allocations and frees of forward and backward by `schedule`: of the first pass of
    a step, of one that adds to existing gradients, and, with optimizers that step inside backward,
    of the first and of later steps.

    adding: True if in some pass gradients are added to existing ones; groups: parameters that are
    gathered, over `transport`; is_eager: True if the schedule stands for what autograd does, which
    adds up the gradients of a parameter before they become its `.grad`.
    """
    gradients = first_gradients(graph, interface)
    made = functools.partial(scheduled_changes, graph, schedule)
    if groups:
        asked = functools.partial(gathers, graph, schedule, interface, groups, transport)
        return Passes(*(made(gradients, before=asked(adds=adds)) for adds in (False, True)))
    if not optimizer.each:
        sums = sums_of_gradients(graph, schedule, interface) if is_eager else {}
        emptied = {name: d for name, d in gradients.items() if name not in optimizer.kept}
        again = made(emptied, before=sums) if optimizer.kept else None
        return Passes(made(gradients, before=sums), made({}) if adding else (), again)
    handed = all_gradients(graph, interface)

    def stepping(changes: Mapping[str, tuple[MemoryChange, ...]]) -> tuple[MemoryChange, ...]:
        return made(gradients, inside={name: (handed[name], own) for name, own in changes.items()})

    first = stepping({name: steps.first for name, steps in optimizer.each.items()})
    again = stepping({name: steps.later for name, steps in optimizer.each.items()})
    return Passes(first, (), again)


@dataclass(frozen=True)
class Timeline:
    """Two steps, beginning with the model alone: the first makes the state of the optimizer, the
    second is like all later ones. resident: bytes of each storage that exists before; recorded: the
    changes of each step; paged: bytes of each storage that is paged to the host; known: as for
    `values.sizes.at_sizes`, where sizes are expressions."""

    resident: Mapping[Holding, tuple[int, ...]]
    recorded: tuple[tuple[MemoryChange, ...], tuple[MemoryChange, ...]]
    paged: tuple[int, ...] = ()
    known: Mapping[str, int | float] | None = None

    @property
    def host_bytes(self) -> int:
        return sum(at_sizes(size, self.known) for size in self.paged)

    def at_sizes(self, known: Mapping[str, int | float]) -> Timeline:
        """Return the memory over time of another call, with what is known of all of them."""
        other = replace(self, known=known)
        vars(other).update(both=self.both, replayed=self.replayed)
        return other

    @property
    def steps(self) -> tuple[tuple[MemoryChange, ...], tuple[MemoryChange, ...]]:
        """The changes of each step."""
        first, later = (
            tuple(c._replace(size_bytes=at_sizes(c.size_bytes, self.known)) for c in step)
            for step in self.recorded
        )
        return first, later

    @property
    def changes(self) -> tuple[MemoryChange, ...]:
        return tuple(itertools.chain(*self.steps))

    @functools.cached_property
    def both(self) -> Changes:
        """The changes of both steps, at any sizes."""
        return Changes(itertools.chain(*self.recorded))

    @functools.cached_property
    def replayed(self) -> Changes:
        """Those of several steps, as the allocator sees them."""
        return Changes(replayed_steps(*self.recorded))

    @functools.cached_property
    def peak(self) -> Peak:
        return self.both.peak(self.resident_bytes, self.known)

    @property
    def resident_bytes(self) -> dict[Holding, int]:
        rows = self.resident.items()
        return {owner: sum(at_sizes(n, self.known) for n in sizes) for owner, sizes in rows}

    @functools.cached_property
    def _usages(self) -> dict[int | None, Usage]:
        return {}

    def usage(self, capacity_bytes: int | None = None) -> Usage:
        """Return what the allocator holds over several steps, on a device with so many bytes for
        it."""
        if capacity_bytes not in self._usages:
            self._usages[capacity_bytes] = self.replayed.usage(
                itertools.chain(*self.resident.values()),
                capacity_bytes=capacity_bytes,
                known=self.known,
            )
        return self._usages[capacity_bytes]


def timeline_of(
    resident: Mapping[Holding, tuple[int, ...]],
    passes: Passes,
    optimizer: OptimizerSteps,
    *,
    accumulate: int = 1,
    set_to_none: bool = True,
    paged: tuple[int, ...] = (),
) -> Timeline:
    """Return the memory over time of two training steps: each `zero_grad(set_to_none)`, then
    `accumulate` times forward and backward, then a step of the optimizer. resident: owner -> bytes
    of each storage that exists before; paged: as in Timeline."""
    first = (
        *optimizer.before,
        *_accumulated(passes, accumulate, has_gradients=False),
        *optimizer.first,
    )
    kept = {("gradient", name) for name in optimizer.kept}
    gradients = [c for c in left_alive(first).values() if c.owner is Holding.GRADIENTS]
    emptied = tuple(c.freed for c in gradients if c.key not in kept) if set_to_none else ()
    if passes.again is not None:
        passes = replace(passes, first=passes.again)
    later = _accumulated(passes, accumulate, has_gradients=not set_to_none)
    return Timeline(resident, (first, (*emptied, *later, *optimizer.later)), paged)


def _accumulated(passes: Passes, times: int, *, has_gradients: bool) -> Iterator[MemoryChange]:
    for number in range(times):
        yield from passes.later if number or has_gradients else passes.first
