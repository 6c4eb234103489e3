"""Stored: which fusible values are written to memory, all others being computed where they are
read.

takes: a Dataflow. returns: the storages that are there between kernels. guarantees: what is forced
is among them; a function of the graph alone, the same for every repetition of a layer but those at
the ends, in time that grows with the length of the run.

Statistics are stored where several kernels read them: computing one again reads all that it is made
of. Others are stored where that lowers the bytes that all kernels read and write, counted over the
kernels that come next. What is kept from forward to backward is not decided here: each kernel can
run again, and the planner says when.
"""

from __future__ import annotations

from collections.abc import Iterable

from rockplan.graph_builder.fusion.dataflow import Dataflow, Fusible

STATISTIC = 8
"""How much smaller than what is made from it a statistic is at least."""

USERS = 12
"""Kernels over which traffic is counted: those of about two layers."""

ROUNDS = 3

CALL_BYTES = {"cpu": 1 << 14, "cuda": 1 << 20}
"""What a memory moves in the time that it takes to call a kernel."""


def stored(flow: Dataflow, device_type: str) -> frozenset[int]:
    call_bytes = CALL_BYTES.get(device_type, CALL_BYTES["cuda"])
    statistics: set[int] = set()
    there = set(flow.forced)
    costly = _Costly(flow)
    for storage in flow.made:
        if storage in there:
            continue
        if _is_statistic(flow, storage, there, costly):
            statistics.add(storage)
            there.add(storage)
        elif _gain_bytes(flow, storage, there) > call_bytes:
            there.add(storage)
        costly.note(storage, storage in there)
    fixed = flow.forced | statistics
    for _ in range(ROUNDS):
        before = frozenset(there)
        for storage in sorted(there - fixed, key=lambda s: -flow.made[s].maker):
            there.discard(storage)
            if _gain_bytes(flow, storage, there) > call_bytes:
                there.add(storage)
        for storage in flow.made:
            if storage not in there and _gain_bytes(flow, storage, there) > call_bytes:
                there.add(storage)
        if before == there:
            break
    return frozenset(there)


class _Costly:
    """Which values have a reduction, or a sine, on the way from what is stored."""

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        self._known: dict[int, bool] = {}

    def of(self, storage: int) -> bool:
        one = self._flow.made[storage]
        return one.is_reduction or one.is_trigonometric or any(map(self._known.get, one.reads))

    def note(self, storage: int, is_stored: bool) -> None:
        self._known[storage] = not is_stored and self.of(storage)


def _is_statistic(flow: Dataflow, storage: int, there: set[int], costly: _Costly) -> bool:
    """A small value that takes long to compute, from which several kernels make large ones."""
    size_bytes = flow.made[storage].size_bytes
    of_it = (flow.made[r] for r in flow.readers.get(storage, ()))
    is_small = any(_elements_made(one) >= STATISTIC * size_bytes for one in of_it)
    return is_small and costly.of(storage) and len(flow.nearest_users(storage, there, 2)) == 2


def _elements_made(one: Fusible) -> int:
    return 0 if one.is_reduction else one.size_bytes


def _gain_bytes(flow: Dataflow, storage: int, there: set[int]) -> int:
    """Bytes that the next kernels need not read or write if `storage` is stored."""
    size_bytes = flow.made[storage].size_bytes
    own_bytes = _bytes(flow, flow.leaves([storage], there))
    if own_bytes <= size_bytes:
        return 0
    users = flow.nearest_users(storage, there, USERS)
    if len(users) < 2:
        return 0
    before = sum(_bytes(flow, flow.leaves([user], there)) for user in users)
    there.add(storage)
    after = sum(_bytes(flow, flow.leaves([user], there)) for user in users)
    there.discard(storage)
    return before - after - own_bytes - size_bytes


def _bytes(flow: Dataflow, storages: Iterable[int]) -> int:
    return sum(flow.sizes[s] for s in storages)
