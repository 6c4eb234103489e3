"""Stored: which fusible values are written to memory; all others are recomputed inside each kernel
that reads them.

takes: a Dataflow. returns: the storages in memory between kernels. guarantees: forced storages are
among them; the result depends on the graph only, is the same for every repetition of a layer except
at the ends, and takes time linear in the length of the run.
A statistic (a small value from a reduction) is stored if several kernels read it: recomputing it
reads all its operands again. Other values are stored if that lowers the bytes that the next kernels
read and write together. What is kept from forward to backward is not decided here: each kernel can
be recomputed, and the planner decides when.
"""

from __future__ import annotations

from collections.abc import Iterable

from rockplan.graph_builder.fusion.dataflow import Dataflow

STATISTIC = 8
"""A statistic is at least so many times smaller than what is computed from it."""

USERS = 12
"""How many next kernels are considered: those of about two layers."""

ROUNDS = 3

COMPUTED = 64
"""Most values that a kernel computes for one result: compile time grows faster than linearly."""

READ = 32
"""Most tensors that a kernel reads for one result, if storing another value can reduce them."""

AGAIN = 256
"""Most values that the next kernels together recompute because one value is not stored."""

CALL_BYTES = {"cpu": 1 << 14, "cuda": 1 << 20}
"""Bytes that memory moves in the time of one kernel call."""

BOOL_BYTES = {"cpu": 32}
"""Bytes that memory moves in the time of writing one bool: Inductor's C++ writes one at a time, 27
times slower than eager."""


def stored(flow: Dataflow, device_type: str) -> frozenset[int]:
    """Return the storages that kernels write to memory. One pass decides in execution order; up to
    `ROUNDS` further passes reconsider each choice until none changes. device_type ('cpu', 'cuda')
    decides what a kernel call costs."""

    def call_bytes(storage: int) -> int:
        """Bytes that memory could move in the time of one more kernel, which stores `storage`."""
        spec = flow.parts.values[flow.made[storage].value].spec
        elements = flow.size_bytes[storage] if spec.dtype == "torch.bool" else 0
        own_bytes = CALL_BYTES.get(device_type, CALL_BYTES["cuda"])
        return own_bytes + elements * BOOL_BYTES.get(device_type, 0)

    statistics: set[int] = set()
    in_memory = set(flow.forced)
    for storage in flow.made:
        if storage not in in_memory and _is_statistic(flow, storage, in_memory):
            statistics.add(storage)
            in_memory.add(storage)
        elif storage not in in_memory and _should_store(
            flow, storage, in_memory, call_bytes(storage)
        ):
            in_memory.add(storage)
        _store_operands(flow, storage, in_memory)
    for _ in range(ROUNDS):
        before = frozenset(in_memory)
        for storage in sorted(in_memory - flow.forced, key=lambda s: -flow.made[s].maker):
            in_memory.discard(storage)
            is_used = storage in statistics and len(flow.nearest_users(storage, in_memory, 2)) == 2
            if is_used or _should_store(flow, storage, in_memory, call_bytes(storage)):
                in_memory.add(storage)
        for storage in flow.made:
            if storage not in in_memory and _should_store(
                flow, storage, in_memory, call_bytes(storage)
            ):
                in_memory.add(storage)
            _store_operands(flow, storage, in_memory)
        if before == in_memory:
            break
    return frozenset(in_memory)


def _should_store(flow: Dataflow, storage: int, in_memory: set[int], call_bytes: int) -> bool:
    """call_bytes: by so many the traffic of kernels must fall to be worth a call."""
    computed = len(flow.interior([storage], in_memory))
    if computed * USERS > AGAIN:
        users = len(flow.nearest_users(storage, in_memory, USERS))
        if users > 1 and computed * users > AGAIN:
            return True
    return _is_worth_it(flow, storage, in_memory, call_bytes)


def _store_operands(flow: Dataflow, storage: int, in_memory: set[int]) -> None:
    """Add operands of `storage` to `in_memory`, those of the largest kernels first, until the
    kernel of `storage` computes at most `COMPUTED` values and reads at most `READ` tensors."""

    def effort(one: int) -> tuple[int, int]:
        return len(flow.interior([one], in_memory)), len(flow.leaves([one], in_memory))

    computed, read = effort(storage)
    while computed > COMPUTED or read > READ:
        operands = [s for s in flow.made[storage].reads if s in flow.made and s not in in_memory]
        efforts = {operand: effort(operand) for operand in operands}
        if max(efforts.values(), default=(1, 1)) <= (1, 1):
            return
        by = 0 if computed > COMPUTED else 1
        in_memory.add(max(operands, key=lambda s: (efforts[s][by], efforts[s], s)))
        computed, read = effort(storage)


def _is_statistic(flow: Dataflow, storage: int, in_memory: set[int]) -> bool:
    """Return whether `storage` is small (`STATISTIC` times) beside what is computed from it, at
    least two kernels read it, and computing it takes a reduction, a sine or a cosine."""
    size_bytes = flow.made[storage].size_bytes
    made = (flow.made[r] for r in flow.readers.get(storage, ()))
    is_small = any(not m.is_reduction and m.size_bytes >= STATISTIC * size_bytes for m in made)
    is_shared = is_small and len(flow.nearest_users(storage, in_memory, 2)) == 2
    return is_shared and _takes_long(flow, storage, in_memory)


def _takes_long(flow: Dataflow, storage: int, in_memory: set[int]) -> bool:
    on_the_way = (flow.made[s] for s in flow.interior([storage], in_memory))
    return any(m.is_reduction or m.is_trigonometric for m in on_the_way)


def _is_worth_it(flow: Dataflow, storage: int, in_memory: set[int], call_bytes: int) -> bool:
    """Return whether storing `storage` lowers the bytes that the next `USERS` kernels read and
    write by more than `call_bytes`; or does not raise them, if these would recompute a reduction, a
    sine or a cosine. `in_memory` is changed for a moment and restored."""
    size_bytes = flow.made[storage].size_bytes
    own_bytes = _bytes(flow, flow.leaves([storage], in_memory))
    if own_bytes <= size_bytes:
        return False
    users = flow.nearest_users(storage, in_memory, USERS)
    if len(users) < 2:
        return False
    before = sum(_bytes(flow, flow.leaves([user], in_memory)) for user in users)
    in_memory.add(storage)
    after = sum(_bytes(flow, flow.leaves([user], in_memory)) for user in users)
    in_memory.discard(storage)
    gain_bytes = before - after - own_bytes - size_bytes
    return gain_bytes > call_bytes or (gain_bytes >= 0 and _takes_long(flow, storage, in_memory))


def _bytes(flow: Dataflow, storages: Iterable[int]) -> int:
    return sum(flow.size_bytes[s] for s in storages)
