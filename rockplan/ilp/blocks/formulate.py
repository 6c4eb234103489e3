"""The stage formulation: which storages to keep and which nodes to run again, as an ILP.

takes: Stages. returns: StageModel, an integer program whose solutions are the schedules of the
class described in `stages` (a liveness refinement of Checkmate, MLSys 2020,
equations 1-7, and of Rockmate, ICML 2023, section 3.2).

Columns, for stage s, storage d, node i:
    keep[s, d]     binary: d is alive when stage s starts
    rerun[s, i]    binary: i runs again at stage s
    use[s, d, u]   in [0, 1]: d is used at s by node u or later (liveness after its producer)
    state[s, i]    in [0, 1]: random node i runs again at stage s or later: its generator state
                   is alive from its first execution to there

Frees are not columns: in a schedule that is written out by `with_frees` a storage is alive
exactly when its next event is a use, and this is what the rows charge.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace

from rockplan.ilp.blocks.stages import Stages
from rockplan.ilp.highs import INFINITY, TIME_UNIT, LinearProgram, ProgramBuilder
from rockplan.ilp.scaling import UNLIMITED

Terms = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Row `row` of a program: `step` times its terms, in units, and `constant_bytes` must stay
    within a budget. Terms move in whole steps, so the limit may be rounded down to one: this
    tightens the relaxation."""

    row: int
    constant_bytes: int
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class StageModel:
    """program: minimises the time of re-executions, in TIME_UNIT, without budgets.

    keep: (stage, data) -> column; rerun: (stage, node) -> column.
    peak: the rows that the peak budget limits; saved: the row of the save budget.
    """

    stages: Stages
    program: LinearProgram
    keep: dict[tuple[int, int], int]
    rerun: dict[tuple[int, int], int]
    peak: tuple[MemoryRow, ...]
    saved: MemoryRow

    def within(self, peak_bytes: int, saved_bytes: int) -> LinearProgram:
        """The fastest schedule within these budgets (tiny storages aside)."""
        upper = self.program.row_upper.copy()
        for rows, budget_bytes in ((self.peak, peak_bytes), ((self.saved,), saved_bytes)):
            for row in rows:
                if budget_bytes < UNLIMITED:
                    limit = self.stages.units.down(budget_bytes - row.constant_bytes)
                    upper[row.row] = limit // row.step
        return replace(self.program, row_upper=upper)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Builder and columns while rows are written; terms of absent columns are empty."""

    stages: Stages
    builder: ProgramBuilder
    keep: dict[tuple[int, int], int]
    rerun: dict[tuple[int, int], int]
    state: dict[tuple[int, int], int]
    peak: list[MemoryRow] = field(default_factory=list)

    def size(self, d: int) -> int:
        """Units of storage d."""
        return self.stages.units.up(self.bytes(d))

    def bytes(self, d: int) -> int:
        return self.stages.units.view.sizes[d]

    def memory_row(self, terms: Terms, constant_bytes: int) -> MemoryRow:
        step = max(math.gcd(*(weight for _, weight in terms)), 1)
        row = self.builder.at_most([(c, weight // step) for c, weight in terms], INFINITY)
        return MemoryRow(row, constant_bytes, step)

    def within_peak(self, terms: Terms, constant_bytes: int) -> None:
        self.peak.append(self.memory_row(terms, constant_bytes))

    def keep_terms(self, s: int, d: int, weight: int = 1) -> Terms:
        column = self.keep.get((s, d))
        return [] if column is None else [(column, weight)]

    def rerun_terms(self, s: int, i: int, weight: int = 1) -> Terms:
        column = self.rerun.get((s, i))
        return [] if column is None else [(column, weight)]

    def available(self, s: int, d: int) -> Terms:
        """Terms of: d can be read at stage s by what comes after its producer."""
        return self.keep_terms(s, d) + self.rerun_terms(s, self.stages.units.view.producer[d])

    def kept(self, s: int) -> Terms:
        """Units of free storages and generator states alive when stage s starts."""
        if s == len(self.stages.stages):
            return []
        terms: Terms = []
        for d in self.stages.stages[s].wanted:
            terms += self.keep_terms(s, d, self.size(d))
        return terms + self.states(s, -1)

    def states(self, s: int, after: int) -> Terms:
        """Units of generator states that node indices above `after` hold for stage s or later,
        and the others for later stages only."""
        return [
            (column, self.state_size(i))
            for (stage, i), column in self.state.items()
            if stage == (s if i > after else s + 1)
        ]

    def state_size(self, i: int) -> int:
        """Units of the generator state of node i."""
        return self.stages.units.up(self.stages.units.view.state_bytes[i])


def entries(stages: Stages) -> int:
    """About how many matrix entries the program has."""
    return sum(len(s.wanted) * (len(s.movable) + 1) for s in stages.stages)


def formulate(stages: Stages) -> StageModel:
    """Write the program for `stages`, of which there is at least one."""
    graph, view = stages.units.graph, stages.units.view
    builder = ProgramBuilder()
    time_unit_ns = max(graph.time_ns, 1) * TIME_UNIT
    columns = _Columns(
        stages=stages,
        builder=builder,
        keep={
            (s, d): builder.binary()
            for s, stage in enumerate(stages.stages)
            for d in stage.wanted
            if d not in stages.transient and (s > 0 or d not in view.dropped)
        },
        rerun={
            (s, i): builder.binary(graph.nodes[i].time_ns / time_unit_ns)
            for s, stage in enumerate(stages.stages)
            for i in stage.movable
        },
        state={
            (s, i): builder.fraction()
            for s, stage in enumerate(stages.stages)
            for i in stage.movable
            if view.state_bytes[i]
        },
    )
    for s in range(len(stages.stages)):
        _add_dependencies(columns, s)
        _add_backward_memory(columns, s)
        _add_rerun_memory(columns, s)
    columns.within_peak([], stages.tail)
    _add_forward_memory(columns)
    _add_start_memory(columns)
    saved = _add_saved(columns)
    return StageModel(
        stages=stages,
        program=builder.build(),
        keep=columns.keep,
        rerun=columns.rerun,
        peak=tuple(columns.peak),
        saved=saved,
    )


def _add_dependencies(columns: _Columns, s: int) -> None:
    """Rules 1 to 4: what is read is there, and what is kept was there before."""
    graph = columns.stages.units.graph
    stage = columns.stages.stages[s]
    add = columns.builder.at_least
    wanted = set(stage.wanted)
    for i in stage.movable:
        for d in graph.nodes[i].reads:
            if d in wanted:
                add(columns.available(s, d) + columns.rerun_terms(s, i, -1), 0.0)
    for d in stage.reads:
        add(columns.available(s, d), 1.0)
    for d in stage.wanted:
        following = columns.keep_terms(s + 1, d, -1)
        if following:
            add(columns.available(s, d) + following, 0.0)
        columns.builder.at_most(columns.available(s, d), 1.0)
    for i in stage.movable:
        state = columns.state.get((s, i))
        if state is not None:
            add([(state, 1), *columns.rerun_terms(s, i, -1)], 0.0)
            later = columns.state.get((s + 1, i))
            if later is not None:
                add([(state, 1), (later, -1)], 0.0)


def _add_backward_memory(columns: _Columns, s: int) -> None:
    """Rule 7, and the backward nodes before the stage and after the last one."""
    stage = columns.stages.stages[s]
    there = set(stage.reads)
    needed_bytes = sum(columns.bytes(d) for d in there)
    after: Terms = []
    if s + 1 < len(columns.stages.stages):
        for d in columns.stages.stages[s + 1].wanted:
            if d not in there:
                after += columns.keep_terms(s + 1, d, columns.size(d))
        after += columns.states(s + 1, -1)
    columns.within_peak(after, stage.during + needed_bytes)
    columns.within_peak(columns.kept(s), stage.gap)


def _add_rerun_memory(columns: _Columns, s: int) -> None:
    """Rules 5 and 6: memory while a node runs again at stage s."""
    stages = columns.stages
    graph, stage = stages.units.graph, stages.stages[s]
    lives = [_add_life(columns, s, d) for d in stage.wanted]
    wanted = set(stage.wanted)
    for i in stage.movable:
        node = graph.nodes[i]
        unlisted_bytes = sum(columns.bytes(d) for d in node.writes if d not in wanted)
        extra = stages.units.up(node.workspace_bytes + unlisted_bytes) + columns.state_size(i)
        terms = columns.rerun_terms(s, i, extra)
        constant_bytes = stage.before
        for life in lives:
            if i > life.made_by and life.is_read:
                constant_bytes += columns.bytes(life.data)
            else:
                terms += life.during(columns, s, i)
        columns.within_peak(terms + columns.states(s, i - 1), constant_bytes)


@dataclass(frozen=True, slots=True)
class _Life:
    """One storage within one stage.

    users: nodes that may run again here and read it, ascending; use: the column of each (none
    if the backward node reads the storage: then it is alive from its producer on).
    """

    data: int
    size: int
    made_by: int
    is_read: bool
    users: tuple[int, ...]
    use: tuple[int, ...]

    def during(self, columns: _Columns, s: int, i: int) -> Terms:
        """Units of the storage while i runs again."""
        kept = columns.keep_terms(s, self.data, self.size)
        if i < self.made_by:
            return kept
        if i == self.made_by:
            return kept + columns.rerun_terms(s, i, self.size)
        position = bisect_left(self.users, i)
        if position < len(self.use):
            return [(self.use[position], self.size)]
        return columns.keep_terms(s + 1, self.data, self.size)


def _add_life(columns: _Columns, s: int, d: int) -> _Life:
    """Rule 5: use[u] covers a re-execution of u and every later use."""
    graph = columns.stages.units.graph
    stage = columns.stages.stages[s]
    builder = columns.builder
    is_read = d in stage.reads
    users = tuple(i for i in stage.movable if d in graph.nodes[i].reads)
    later = columns.keep_terms(s + 1, d, -1)
    use: list[int] = []
    for u in () if is_read else reversed(users):
        column = builder.fraction()
        builder.at_least([(column, 1), *columns.rerun_terms(s, u, -1)], 0.0)
        if later:
            builder.at_least([(column, 1), *later], 0.0)
        later = [(column, -1)]
        use.append(column)
    made_by = columns.stages.units.view.producer[d]
    return _Life(d, columns.size(d), made_by, is_read, users, tuple(reversed(use)))


def _add_forward_memory(columns: _Columns) -> None:
    """Rule 8: what is kept although the forward phase is done with it, and generator states."""
    stages = columns.stages
    for i, during in enumerate(stages.forward_during):
        terms: Terms = []
        for d in stages.stages[0].wanted:
            last_use = stages.last_use[d]
            if last_use is not None and last_use < i:
                terms += columns.keep_terms(0, d, columns.size(d))
        terms += [
            (column, columns.state_size(node))
            for (s, node), column in columns.state.items()
            if s == 0 and node <= i
        ]
        columns.within_peak(terms, during)


def _add_start_memory(columns: _Columns) -> None:
    """When the backward phase starts all tangents and outputs are alive, kept or not."""
    outputs = columns.stages.units.graph.outputs
    not_free = set(columns.stages.units.graph.held)
    terms = [
        (column, columns.size(d))
        for (s, d), column in columns.keep.items()
        if s == 0 and d not in outputs
    ]
    outputs_bytes = sum(columns.bytes(d) for d in outputs if d not in not_free)
    columns.within_peak(terms + columns.states(0, -1), columns.stages.start_bytes + outputs_bytes)


def _add_saved(columns: _Columns) -> MemoryRow:
    """Rule 9: what is alive between the phases besides the outputs."""
    outputs = set(columns.stages.units.graph.outputs)
    terms: Terms = []
    for d in columns.stages.stages[0].wanted:
        if d not in outputs:
            terms += columns.keep_terms(0, d, columns.size(d))
    terms += columns.states(0, -1)
    return columns.memory_row(terms, columns.stages.held)
