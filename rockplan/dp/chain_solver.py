"""Search: the fastest stitched schedule whose simulated peak fits a budget.

takes: graph, blocks, families, a budget. returns: a verified Schedule. guarantees: the simulated
peak of the whole graph is within the budget, whatever the chain believes; the answer depends on
the budget only, not on what was asked before.

The chain does not know everything: saved generator states raise the peak, storages that die
before their block is done lower it. So the recurrence is asked for limits around the budget, and
what it answers is stitched and simulated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property

from rockplan.dp.grid import bucket_count, grid, tables_at_once
from rockplan.dp.links import Operation, links
from rockplan.dp.recurrence import OutOfTime, Table, decode, fastest_need, minimum_needs, solve
from rockplan.dp.segments import intern_segments
from rockplan.dp.stitch import stitch
from rockplan.oracles.simulate import Simulation, simulate
from rockplan.oracles.verify import verify
from rockplan.values.block import Block, OptionFamily
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule, keep_all

Operations = tuple[Operation, ...]

SEARCH_ROUNDS = 8
"""Limits tried for one budget. On 45 budgets of GPT chains (2, 6, 12 layers) and 561 of random
chains 4 rounds find what 20 find, and limits next to the last ones add nothing."""

NEAR_MINIMUM = 8
"""Limits tried from the least one up. On 300 random chains the smallest peak of any sequence is
missed 12 times with 1, 7 times with 8 or 24."""


class ChainSolver:
    """Answers any number of budgets for one chain; keeps tables and simulations between them."""

    def __init__(
        self, graph: CDGraph, blocks: Sequence[Block], families: Sequence[OptionFamily]
    ) -> None:
        self._graph = graph
        self._blocks = tuple(blocks)
        self._families = tuple(families)
        self._segments = intern_segments(links(blocks, families))
        self._needs = minimum_needs(self._segments)
        self._least = int(self._needs[self._segments.whole])
        self._fastest = max(self._least, fastest_need(self._segments))
        self._tables: dict[int, Table] = {}
        self._simulations: dict[Operations, Simulation] = {}

    @cached_property
    def minimum_bytes(self) -> int:
        """The peak of the thriftiest schedule."""
        least = self.thriftiest()
        assert least is not None
        return simulate(self._graph, least).peak_bytes

    def thriftiest(self, *, deadline: float = math.inf) -> Schedule | None:
        """The schedule with the smallest simulated peak found for limits near the least that the
        chain needs; None without time for one. deadline: as of time.monotonic."""
        schedule = self._looked_at(self._least_sequences(deadline), deadline)
        best = min(schedule, key=lambda o: self._simulate(o).peak_bytes, default=None)
        if best is None:
            return None
        if self._simulate(best).peak_bytes > self._everything.peak_bytes:
            return keep_all(self._graph)
        return self._stitch(best)

    def best_schedule(self, budget_bytes: int, *, deadline: float = math.inf) -> Schedule | None:
        """The fastest schedule found whose simulated peak is within budget_bytes, or None.
        deadline: as of time.monotonic."""
        if self._everything.peak_bytes <= budget_bytes:
            return keep_all(self._graph)
        for sequences in (self._around(budget_bytes, deadline), self._least_sequences(deadline)):
            schedule = self._looked_at(sequences, deadline)
            fitting = [o for o in schedule if self._simulate(o).peak_bytes <= budget_bytes]
            if fitting:
                return self._stitch(min(fitting, key=self._time_and_peak))
        return None

    def _looked_at(self, sequences: Iterator[Operations], deadline: float) -> list[Operations]:
        """Those that are simulated before the deadline."""
        distinct: list[Operations] = []
        with suppress(OutOfTime):
            for operations in sequences:
                self._simulate(operations)
                distinct.append(operations)
                if time.monotonic() >= deadline:
                    break
        return distinct

    def _around(self, budget_bytes: int, deadline: float) -> Iterator[Operations]:
        """Sequences for limits that close in on the largest one whose schedule fits."""
        table = self._table(budget_bytes, deadline)
        while table.grid.limit_bytes < self._fastest:
            yield (operations := decode(table, table.grid.limit_bytes))
            if self._simulate(operations).peak_bytes > budget_bytes:
                break
            table = self._table(table.grid.limit_bytes, deadline)
        low, high = self._least, table.grid.limit_bytes
        limit = min(max(low, budget_bytes), high)
        for round_ in range(SEARCH_ROUNDS):
            operations = decode(table, limit)
            yield operations
            spare_bytes = budget_bytes - self._simulate(operations).peak_bytes
            low, high = (limit, high) if spare_bytes >= 0 else (low, limit)
            if high - low <= table.grid.unit_bytes:
                break
            # The peak moves about as much as the limit does; every other round halves.
            limit += spare_bytes
            if round_ % 2 or not low < limit < high:
                limit = (low + high) // 2

    def _least_sequences(self, deadline: float) -> Iterator[Operations]:
        """Sequences for the least limit and for those just above it."""
        table = self._table(self._least, deadline)
        for i in range(NEAR_MINIMUM):
            yield decode(table, self._least + i * table.grid.unit_bytes)

    @cached_property
    def _everything(self) -> Simulation:
        return simulate(self._graph, keep_all(self._graph))

    def _table(self, limit_bytes: int, deadline: float) -> Table:
        """The table of the smallest scale that reaches well above limit_bytes.

        Scales halve from the limit at which the chain gains nothing more, so that buckets are
        fine where memory is short, and every budget of one scale shares a table.
        """
        wanted = max(self._least, limit_bytes) * 5 // 4
        scale = self._fastest
        while scale // 2 >= wanted:
            scale //= 2
        if scale not in self._tables:
            segments = len(self._segments.spans)
            buckets = bucket_count(self._segments.blocks, segments)
            while len(self._tables) >= tables_at_once(segments, buckets):
                del self._tables[next(iter(self._tables))]
            self._tables[scale] = solve(
                self._segments, grid(scale, buckets), self._needs, deadline=deadline
            )
        return self._tables[scale]

    def _time_and_peak(self, operations: Operations) -> tuple[int, int]:
        simulation = self._simulate(operations)
        return simulation.time_ns, simulation.peak_bytes

    def _simulate(self, operations: Operations) -> Simulation:
        if operations not in self._simulations:
            schedule = self._stitch(operations)
            verify(self._graph, schedule)
            self._simulations[operations] = simulate(self._graph, schedule)
        return self._simulations[operations]

    def _stitch(self, operations: Operations) -> Schedule:
        return stitch(self._graph, self._blocks, self._families, operations)
