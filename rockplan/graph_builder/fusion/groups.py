"""Groups: which stored values one kernel computes, and when it runs.

takes: a Dataflow and the stored storages. returns: groups of these, each storage in one group, in
the order in which they run. guarantees: what a group reads is made before it runs, and what it
makes is read later; only in the backward phase has a group a second large result, so that
recomputing what the planner drops is cheap.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from rockplan.graph_builder.fusion.dataflow import Dataflow
from rockplan.graph_builder.fusion.stored import COMPUTED
from rockplan.values.graph import Phase

SMALL = 8
"""A result is small if it is at least so many times smaller than its kernel's largest operand."""

SHARED = 2 / 3
"""Least share of the bytes that two kernels read which both must read to be joined."""

NEAR = 24
"""How many neighbouring groups are considered for joining."""

MOST_LARGE = 3
"""Most large results of a kernel of the backward phase."""


MOST_READ = 64
"""Most tensors that an operator takes: a limit of PyTorch's schemas."""


MOST_COMPUTED = 2 * COMPUTED
"""Most values that a kernel of several results computes."""


@dataclass(frozen=True, slots=True)
class Group:
    """Storages that one kernel makes. targets: the storages, in order; reads: storages that the
    kernel reads; at: when it runs, relative to the positions of parts."""

    targets: tuple[int, ...]
    reads: frozenset[int]
    phase: Phase
    at: float


def groups_of(flow: Dataflow, stored: Collection[int]) -> tuple[Group, ...]:
    """Return the groups in execution order."""
    merging = _Merging(flow, stored)
    merging.run()
    return tuple(sorted(merging.groups.values(), key=lambda g: (g.at, g.targets)))


class _Merging:
    """Joins groups. A group's number is the rank of its first target among all stored storages."""

    def __init__(self, flow: Dataflow, stored: Collection[int]) -> None:
        self._flow = flow
        self._stored = stored
        self.groups: dict[int, Group] = {}
        self._maker: dict[int, int] = {}
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        for number, storage in enumerate(s for s in flow.made if s in stored):
            phase = Phase.FORWARD if storage in flow.forward else Phase.BACKWARD
            at = flow.made[storage].maker
            self._add(number, Group((storage,), flow.leaves([storage], stored), phase, at))
        # What the recording made in the forward phase, but only the backward phase reads, runs just
        # before its first reader.
        for number, group in sorted(self.groups.items(), reverse=True):
            if flow.parts.parts[flow.made[group.targets[0]].maker].phase is not group.phase:
                before = math.nextafter(self._due(group, ()), -math.inf)
                self.groups[number] = replace(group, at=before)

    def run(self) -> None:
        """Join groups in two passes: groups of small results with a group that reads all that they
        read; then groups of the backward phase that read mostly the same bytes."""
        for number in sorted(self.groups):
            if number in self.groups:
                self._join(number, self._reads_as_much)
        for number in sorted(self.groups):
            if number in self.groups and self.groups[number].phase is Phase.BACKWARD:
                self._join(number, self._reads_mostly_the_same)

    def _add(self, number: int, group: Group) -> None:
        self.groups[number] = group
        for target in group.targets:
            self._maker[target] = number
        for read in group.reads:
            self._readers[read].add(number)

    def _join(self, number: int, fits: Callable[[Group, Group], bool]) -> None:
        """Join the group with the nearest neighbour that `fits` accepts, if they can be one kernel,
        then the joint group likewise. number: the group's number. At most `NEAR` neighbours are
        tried: groups that read or make what the group reads, or read what it makes."""
        group = self.groups[number]
        makers = {self._maker[s] for s in group.reads if s in self._maker}
        beside = {r for s in (*group.reads, *group.targets) for r in self._readers[s]} | makers
        near = sorted(beside - {number}, key=lambda n: (n in makers, abs(n - number), n))[:NEAR]
        for other in near:
            neighbour = self.groups[other]
            if neighbour.phase is not group.phase or not fits(group, neighbour):
                continue
            joint = self._merged(number, other)
            if joint is not None:
                self._replace(number, other, joint)
                self._join(min(number, other), fits)
                return

    def _replace(self, number: int, other: int, made: Group) -> None:
        for gone in (number, other):
            for read in self.groups.pop(gone).reads:
                self._readers[read].discard(gone)
        self._add(min(number, other), made)

    def _merged(self, number: int, other: int) -> Group | None:
        """Return the groups `number` and `other` as one, which runs where the later ran, or else
        the earlier; None if neither is possible within the limits on what it reads and computes."""
        one, two = self.groups[number], self.groups[other]
        targets = tuple(sorted((*one.targets, *two.targets), key=self._order))
        reads = (one.reads | two.reads) - frozenset(targets)
        if ((one.reads | two.reads) - reads) & self._flow.whole.keys():
            return None  # one group reads the other's result through a view made by an opaque part
        if len(reads) > MOST_READ:
            return None
        if len(self._flow.interior(targets, self._stored)) > MOST_COMPUTED:
            return None
        makers = (self._maker[read] for read in reads if read in self._maker)
        ready = max((self.groups[maker].at for maker in makers), default=-1)
        ready = max([ready, *(self._flow.whole.get(read, -1) for read in reads)])
        for at in sorted((one.at, two.at), reverse=True):
            joint = Group(targets, reads, one.phase, at)
            if ready < at < self._due(joint, (number, other)):
                return joint
        return None

    def _order(self, storage: int) -> tuple[int, int]:
        return self._flow.made[storage].maker, storage

    def _due(self, group: Group, members: Collection[int]) -> float:
        """Return the position of the first part or group that reads a result of `group`, infinity
        if none does. members: numbers of groups whose reads do not count."""
        positions = [math.inf]
        for target in group.targets:
            positions += self._flow.opaque_readers.get(target, ())
            positions += [self.groups[r].at for r in self._readers[target] if r not in members]
        return min(positions)

    # -- which groups fit together -----------------------------------------------------------

    def _reads_as_much(self, group: Group, other: Group) -> bool:
        size_bytes = self._flow.size_bytes
        largest_bytes = max((size_bytes[r] for r in group.reads), default=0)
        is_small = all(SMALL * size_bytes[t] <= largest_bytes for t in group.targets)
        return is_small and bool(group.reads) and group.reads <= other.reads | {*other.targets}

    def _reads_mostly_the_same(self, group: Group, other: Group) -> bool:
        size_bytes, targets = self._flow.size_bytes, (*group.targets, *other.targets)
        reads = (group.reads | other.reads) - frozenset(targets)
        largest_bytes = max((size_bytes[r] for r in reads), default=0)
        large_count = sum(SMALL * size_bytes[t] > largest_bytes for t in targets)
        shared_bytes = sum(size_bytes[r] for r in group.reads & other.reads)
        return (
            large_count <= MOST_LARGE
            and 0 < SHARED * sum(size_bytes[r] for r in reads) <= shared_bytes
        )
