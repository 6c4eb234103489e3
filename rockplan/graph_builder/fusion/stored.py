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

from rockplan.graph_builder.fusion.dataflow import Dataflow

STATISTIC = 8
"""How much smaller than what is made from it a statistic is at least."""

USERS = 12
"""Kernels over which traffic is counted: those of about two layers."""

ROUNDS = 3

COMPUTED = 64
"""Values on the way to a result of a kernel, at most: compilers take longer than in proportion."""

READ = 32
"""Tensors that a kernel reads for a result, at most, where storing another makes it fewer."""

AGAIN = 256
"""Values that the next kernels compute for the sake of one that is not stored, at most."""

CALL_BYTES = {"cpu": 1 << 14, "cuda": 1 << 20}
"""What a memory moves in the time that it takes to call a kernel."""

BOOL_BYTES = {"cpu": 32}
"""What it moves in the time that it takes to write a bool: Inductor's C++ writes one at a time, 27
times slower than eager."""


def stored(flow: Dataflow, device_type: str) -> frozenset[int]:

    def call_bytes(storage: int) -> int:
        spec = flow.parts.values[flow.made[storage].value].spec
        elements = flow.sizes[storage] if spec.dtype == "torch.bool" else 0
        own_bytes = CALL_BYTES.get(device_type, CALL_BYTES["cuda"])
        return own_bytes + elements * BOOL_BYTES.get(device_type, 0)

    statistics: set[int] = set()
    there = set(flow.forced)
    for storage in flow.made:
        if storage not in there and _is_statistic(flow, storage, there):
            statistics.add(storage)
            there.add(storage)
        elif storage not in there and _is_to_be(flow, storage, there, call_bytes(storage)):
            there.add(storage)
        _store_operands(flow, storage, there)
    for _ in range(ROUNDS):
        before = frozenset(there)
        for storage in sorted(there - flow.forced, key=lambda s: -flow.made[s].maker):
            there.discard(storage)
            is_used = storage in statistics and len(flow.nearest_users(storage, there, 2)) == 2
            if is_used or _is_to_be(flow, storage, there, call_bytes(storage)):
                there.add(storage)
        for storage in flow.made:
            if storage not in there and _is_to_be(flow, storage, there, call_bytes(storage)):
                there.add(storage)
            _store_operands(flow, storage, there)
        if before == there:
            break
    return frozenset(there)


def _is_to_be(flow: Dataflow, storage: int, there: set[int], call_bytes: int) -> bool:
    return _is_computed_too_often(flow, storage, there) or _is_worth_it(
        flow, storage, there, call_bytes
    )


def _is_computed_too_often(flow: Dataflow, storage: int, there: set[int]) -> bool:
    computed = len(flow.interior([storage], there))
    if computed * USERS <= AGAIN:
        return False
    users = len(flow.nearest_users(storage, there, USERS))
    return users > 1 and computed * users > AGAIN


def _store_operands(flow: Dataflow, storage: int, there: set[int]) -> None:
    """Store of what `storage` is made of what makes its kernel compute, or read, too much."""

    def effort(one: int) -> tuple[int, int]:
        return len(flow.interior([one], there)), len(flow.leaves([one], there))

    computed, read = effort(storage)
    while computed > COMPUTED or read > READ:
        operands = [s for s in flow.made[storage].reads if s in flow.made and s not in there]
        efforts = {operand: effort(operand) for operand in operands}
        if max(efforts.values(), default=(1, 1)) <= (1, 1):
            return
        by = 0 if computed > COMPUTED else 1
        there.add(max(operands, key=lambda s: (efforts[s][by], efforts[s], s)))
        computed, read = effort(storage)


def _is_statistic(flow: Dataflow, storage: int, there: set[int]) -> bool:
    """A small value that takes long to compute, from which several kernels make large ones."""
    size_bytes = flow.made[storage].size_bytes
    made = (flow.made[r] for r in flow.readers.get(storage, ()))
    is_small = any(not m.is_reduction and m.size_bytes >= STATISTIC * size_bytes for m in made)
    is_shared = is_small and len(flow.nearest_users(storage, there, 2)) == 2
    return is_shared and _takes_long(flow, storage, there)


def _takes_long(flow: Dataflow, storage: int, there: set[int]) -> bool:
    """True if a reduction, or a sine, lies between what is stored and `storage`."""
    on_the_way = (flow.made[s] for s in flow.interior([storage], there))
    return any(m.is_reduction or m.is_trigonometric for m in on_the_way)


def _is_worth_it(flow: Dataflow, storage: int, there: set[int], call_bytes: int) -> bool:
    """True if the next kernels read and write less with `storage` stored, by more than it takes to
    call one more of them; or no more, where they would compute a reduction again."""
    size_bytes = flow.made[storage].size_bytes
    own_bytes = _bytes(flow, flow.leaves([storage], there))
    if own_bytes <= size_bytes:
        return False
    users = flow.nearest_users(storage, there, USERS)
    if len(users) < 2:
        return False
    before = sum(_bytes(flow, flow.leaves([user], there)) for user in users)
    there.add(storage)
    after = sum(_bytes(flow, flow.leaves([user], there)) for user in users)
    there.discard(storage)
    gain_bytes = before - after - own_bytes - size_bytes
    return gain_bytes > call_bytes or (gain_bytes >= 0 and _takes_long(flow, storage, there))


def _bytes(flow: Dataflow, storages: Iterable[int]) -> int:
    return sum(flow.sizes[s] for s in storages)
