"""Search: the fastest stitched schedule whose simulated peak fits a budget.

takes: graph, blocks, families, a budget. returns: a verified Schedule. guarantees: the simulated
peak of the whole graph is within the budget, whatever the chain predicts; the answer depends on the
budget only, not on earlier questions.

The chain's prediction is not exact: saved generator states raise the peak, storages that die before
the end of their block lower it. So the recurrence is asked for limits around the budget, and its
answers are stitched and simulated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property

from rockplan.dp import recurrence
from rockplan.dp.links import Operation, RunForward, links
from rockplan.dp.segments import intern_segments
from rockplan.oracles.simulate import Simulation, simulate
from rockplan.oracles.verify import verify
from rockplan.values.block import Block, OptionFamily
from rockplan.values.graph import CDGraph, Phase
from rockplan.values.order import without_idle
from rockplan.values.schedule import Schedule, keep_all, with_frees

Operations = tuple[Operation, ...]

SEARCH_ROUNDS = 8
"""Limits tried for one budget. On 45 budgets of GPT chains (2, 6, 12 layers) and 561 of random
chains 4 rounds find what 20 find, and limits next to the last ones add nothing."""

NEAR_MINIMUM = 8
"""Limits tried from the least one up. On 300 random chains the smallest peak of any sequence is
missed 12 times with 1, 7 times with 8 or 24."""


class ChainSolver:
    """Solves one chain for any number of budgets; keeps tables and simulations between them."""

    def __init__(
        self, graph: CDGraph, blocks: Sequence[Block], families: Sequence[OptionFamily]
    ) -> None:
        self._graph = graph
        self._blocks = tuple(blocks)
        self._families = tuple(families)
        self._segments = intern_segments(links(blocks, families))
        self._needs = recurrence.minimum_needs(self._segments)
        self._least = int(self._needs[self._segments.whole])
        self._fastest = max(self._least, recurrence.fastest_need(self._segments))
        self._tables: dict[int, recurrence.Table] = {}
        self._simulations: dict[Operations, Simulation] = {}

    @cached_property
    def minimum_bytes(self) -> int:
        """The peak of the thriftiest schedule."""
        least = self.thriftiest()
        assert least is not None
        return simulate(self._graph, least).peak_bytes

    def thriftiest(self, *, deadline: float = math.inf) -> Schedule | None:
        """Return the schedule with the smallest simulated peak, of those that the chain finds for
        limits from the least one up; keep-all if that needs less. None if there was no time for
        one. deadline: as of time.process_time."""
        simulated = self._simulated(self._least_sequences(deadline), deadline)
        best = min(simulated, key=lambda o: self._simulate(o).peak_bytes, default=None)
        if best is None:
            return None
        if self._simulate(best).peak_bytes > self._everything.peak_bytes:
            return keep_all(self._graph)
        return self._stitch(best)

    def best_schedule(self, budget_bytes: int, *, deadline: float = math.inf) -> Schedule | None:
        """Return the fastest schedule found whose simulated peak is within budget_bytes; of equal
        times, the one with the smaller peak. None if none was found before the deadline (as of
        time.process_time)."""
        if self._everything.peak_bytes <= budget_bytes:
            return keep_all(self._graph)
        for sequences in (self._around(budget_bytes, deadline), self._least_sequences(deadline)):
            simulated = self._simulated(sequences, deadline)
            fitting = [o for o in simulated if self._simulate(o).peak_bytes <= budget_bytes]
            if fitting:
                needs = {o: self._simulate(o) for o in fitting}
                return self._stitch(
                    min(fitting, key=lambda o: (needs[o].time_ns, needs[o].peak_bytes))
                )
        return None

    def _simulated(self, sequences: Iterator[Operations], deadline: float) -> list[Operations]:
        distinct: list[Operations] = []
        with suppress(recurrence.OutOfTime):
            for operations in sequences:
                self._simulate(operations)
                distinct.append(operations)
                if time.process_time() >= deadline:
                    break
        return distinct

    def _around(self, budget_bytes: int, deadline: float) -> Iterator[Operations]:
        """Limits of the chain's own memory, which differs a little from the simulated peak, close
        in on the largest one whose schedule fits. The caller simulates each at once."""
        table = self._table(budget_bytes, deadline)
        while table.grid.limit_bytes < self._fastest:
            yield (operations := recurrence.decode(table, table.grid.limit_bytes))
            if self._simulate(operations).peak_bytes > budget_bytes:
                break
            table = self._table(table.grid.limit_bytes, deadline)
        low, high = self._least, table.grid.limit_bytes
        limit = min(max(low, budget_bytes), high)
        for round_ in range(SEARCH_ROUNDS):
            operations = recurrence.decode(table, limit)
            yield operations
            spare_bytes = budget_bytes - self._simulate(operations).peak_bytes
            low, high = (limit, high) if spare_bytes >= 0 else (low, limit)
            if high - low <= table.grid.unit_bytes:
                break
            # The peak changes about as much as the limit; every other round halves the interval.
            limit += spare_bytes
            if round_ % 2 or not low < limit < high:
                limit = (low + high) // 2

    def _least_sequences(self, deadline: float) -> Iterator[Operations]:
        table = self._table(self._least, deadline)
        for i in range(NEAR_MINIMUM):
            yield recurrence.decode(table, self._least + i * table.grid.unit_bytes)

    @cached_property
    def _everything(self) -> Simulation:
        return simulate(self._graph, keep_all(self._graph))

    def _table(self, limit_bytes: int, deadline: float) -> recurrence.Table:
        """A table reaches to the limit beyond which the chain gains nothing, divided by a power of
        two: so buckets are fine where memory is short, and budgets near each other share a table.
        Raises OutOfTime."""
        needed_bytes = max(self._least, limit_bytes) * 5 // 4
        reach_bytes = self._fastest
        while reach_bytes // 2 >= needed_bytes:
            reach_bytes //= 2
        if reach_bytes not in self._tables:
            segments = len(self._segments.spans)
            buckets = recurrence.bucket_count(self._segments.blocks, segments)
            while len(self._tables) >= recurrence.tables_at_once(segments, buckets):
                del self._tables[next(iter(self._tables))]
            self._tables[reach_bytes] = recurrence.solve(
                self._segments,
                recurrence.grid(reach_bytes, buckets),
                self._needs,
                deadline=deadline,
            )
        return self._tables[reach_bytes]

    def _simulate(self, operations: Operations) -> Simulation:
        if operations not in self._simulations:
            schedule = self._stitch(operations)
            verify(self._graph, schedule)
            self._simulations[operations] = simulate(self._graph, schedule)
        return self._simulations[operations]

    def _stitch(self, operations: Operations) -> Schedule:
        return stitch(self._graph, self._blocks, self._families, operations)


def stitch(
    graph: CDGraph,
    blocks: Sequence[Block],
    families: Sequence[OptionFamily],
    operations: Iterable[Operation],
) -> Schedule:
    """Convert operations on blocks to a schedule of the whole graph that frees every storage as
    early as possible. The backward phase begins with the first backward of the last block;
    executions whose results nothing reads are left out. families: the options of each block, to
    which operations refer."""
    forward: list[int] = []
    backward: list[int] = []
    phase = forward
    for operation in operations:
        block = blocks[operation.block]
        if isinstance(operation, RunForward):
            phase += block.forward
            continue
        is_backward = operation.phase is Phase.BACKWARD
        if is_backward and operation.block == len(blocks) - 1:
            phase = backward
        option = families[operation.block].options[operation.option]
        nodes = (*block.forward, *block.backward)
        phase += [nodes[i] for i in (option.backward if is_backward else option.forward)]
    kept = pinned_storages(graph, blocks)
    return with_frees(graph, *without_idle(graph, forward, backward, kept=kept))


def pinned_storages(graph: CDGraph, blocks: Sequence[Block]) -> frozenset[int]:
    """Return the storages made in the forward that some block reads although another one made them
    and they are not its input (the separator before it). A schedule of blocks keeps them from their
    first computation to their last use."""
    block_of = {n: b.index for b in blocks for n in (*b.forward, *b.backward)}
    made_in = {d: block_of[n.index] for n in graph.forward for d in n.writes}
    return frozenset(
        d
        for node in graph.nodes
        for d in node.reads
        if d in made_in
        and block_of[node.index] != made_in[d]
        and d != blocks[block_of[node.index]].input
    )
