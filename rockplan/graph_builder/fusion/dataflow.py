"""Dataflow: which storages are computed from which, among parts that can be fused.

takes: Parts. returns: Dataflow. guarantees: it has an element for each needed storage that a
fusible part makes; storages that opaque parts, the caller and autograd get are `forced`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rockplan.graph_builder.fusion.parts import PartKind, Parts
from rockplan.graph_builder.recorded.run import RecordedValue, Step, needed
from rockplan.values.graph import Phase


@dataclass(frozen=True, slots=True)
class Fusible:
    """A storage that a fusible part makes. maker: position of the part; value: number of the tensor
    that the part makes; reads: storages that the part reads."""

    storage: int
    maker: int
    value: int
    size_bytes: int
    reads: tuple[int, ...]
    is_reduction: bool
    is_trigonometric: bool


@dataclass(frozen=True, slots=True)
class Dataflow:
    """Dependences between storages. Positions are those of parts.

    made: storage -> how a fusible part makes it, in execution order; readers: storage -> storages
    computed from it, in order; forced: storages of `made` that must be in memory; forward: those
    that the forward phase needs; size_bytes: of all storages; views: value -> position of the part
    that derives it; opaque: positions of needed opaque parts; whole: storage that an opaque part
    makes or changes -> position of the last one that does; opaque_readers: storage -> positions of
    opaque parts that read it, in order.
    """

    parts: Parts
    made: dict[int, Fusible]
    readers: dict[int, tuple[int, ...]]
    forced: frozenset[int]
    forward: frozenset[int]
    size_bytes: dict[int, int]
    views: dict[int, int]
    whole: dict[int, int]
    opaque_readers: dict[int, tuple[int, ...]]
    opaque: tuple[int, ...]

    def storage(self, value: int) -> int:
        return self.parts.values[value].storage

    def is_given(self, storage: int) -> bool:
        """Return whether the storage comes from the caller."""
        return storage not in self.made and storage not in self.whole

    def leaves(self, storages: Iterable[int], stored: Collection[int]) -> frozenset[int]:
        """Return the storages that a kernel computing `storages` reads from memory: those in
        `stored`, and those that no fusible part makes."""
        pending = list(storages)
        seen, leaves = set(pending), set()
        while pending:
            for read in self.made[pending.pop()].reads:
                if read in seen:
                    continue
                if read in self.made and read not in stored:
                    seen.add(read)
                    pending.append(read)
                else:
                    leaves.add(read)
        return frozenset(leaves)

    def interior(self, storages: Iterable[int], stored: Collection[int]) -> list[int]:
        """Return the numbers of `storages` and of all storages that a kernel computes on the way to
        them because they are not in `stored` (those in memory), in execution order."""
        pending = list(storages)
        seen = set(pending)
        while pending:
            for read in self.made[pending.pop()].reads:
                if read in self.made and read not in stored and read not in seen:
                    seen.add(read)
                    pending.append(read)
        return sorted(seen, key=lambda s: (self.made[s].maker, s))

    def nearest_users(self, storage: int, stored: Collection[int], most: int) -> list[int]:
        """Return the first `most` (or fewer) storages of `stored`, in execution order, that a
        kernel computes from `storage` directly or through storages that are not in `stored`."""
        waiting = [(self.made[r].maker, r) for r in self.readers.get(storage, ())]
        heapq.heapify(waiting)
        seen = {r for _, r in waiting}
        users: list[int] = []
        while waiting and len(users) < most:
            _, user = heapq.heappop(waiting)
            if user in stored:
                users.append(user)
                continue
            for reader in self.readers.get(user, ()):
                if reader not in seen:
                    seen.add(reader)
                    heapq.heappush(waiting, (self.made[reader].maker, reader))
        return users


def dataflow_of(parts: Parts, roots: frozenset[int], kept: Collection[int]) -> Dataflow:
    """Return the dataflow of `parts`. roots: numbers of storages that the caller or autograd gets;
    kept: positions of opaque parts that run even if nothing reads their results."""
    values = parts.values
    running, needed_storages = needed(_steps(parts), roots, kept.__contains__)
    opaque = tuple(p for p in running if parts.parts[p].kind is PartKind.OPAQUE)
    forced = _storages(values, (v for p in opaque for v in parts.parts[p].reads)) | roots
    made: dict[int, Fusible] = {}
    for position, part in enumerate(parts.parts):
        if part.kind not in (PartKind.POINTWISE, PartKind.REDUCTION):
            continue
        reads = tuple(dict.fromkeys(values[v].storage for v in part.reads))
        for value in part.makes:
            storage = values[value].storage
            if storage in needed_storages:
                made[storage] = Fusible(
                    storage,
                    position,
                    value,
                    values[value].storage_bytes,
                    reads,
                    part.kind is PartKind.REDUCTION,
                    part.is_trigonometric,
                )
    readers: dict[int, list[int]] = defaultdict(list)
    for one in made.values():
        for read in one.reads:
            readers[read].append(one.storage)
    steps = _steps(parts)
    phase = {s: parts.parts[position].phase for position, own, _ in steps for s in own}
    outputs = {s for s in roots if phase.get(s) is Phase.FORWARD}
    forward = (step for step in steps if parts.parts[step[0]].phase is Phase.FORWARD)
    return Dataflow(
        parts,
        made,
        {s: tuple(nodes) for s, nodes in readers.items()},
        frozenset(forced & made.keys()),
        needed(forward, outputs, frozenset(opaque).__contains__)[1] & made.keys(),
        {v.storage: v.storage_bytes for v in values},
        {v: p for p, one in enumerate(parts.parts) if one.kind is PartKind.VIEW for v in one.makes},
        *_memory_of_opaque(parts, opaque),
        opaque,
    )


def _memory_of_opaque(
    parts: Parts, opaque: Iterable[int]
) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    whole: dict[int, int] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    for position in opaque:
        part = parts.parts[position]
        whole |= dict.fromkeys(_storages(parts.values, part.makes), position)
        for storage in _storages(parts.values, part.reads):
            readers[storage].append(position)
    return whole, {s: tuple(nodes) for s, nodes in readers.items()}


def _steps(parts: Parts) -> list[Step]:
    values = parts.values
    return [
        (position, _storages(values, part.makes), _storages(values, part.reads))
        for position, part in enumerate(parts.parts)
        if part.kind is not PartKind.VIEW
    ]


def _storages(values: Sequence[RecordedValue], of: Iterable[int]) -> frozenset[int]:
    return frozenset(values[v].storage for v in of)
