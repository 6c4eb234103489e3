"""The stage formulation: which storages to keep and which nodes to re-execute, as a PuLP model.

takes: Stages. returns: StageModel, an integer program whose solutions are the schedules of the
class described in `stages` (a liveness refinement of Checkmate, MLSys 2020, and of Rockmate, ICML
2023). `rockplan solve --write-lp` writes it to a file.

Variables, of storage d and node i before backward node n, which ends a stage:
    keep_d_before_n          binary: d is alive when the stage starts
    again_i_before_n         binary: i is re-executed in the stage
    use_d_from_i_before_n    in [0, 1]: d is used in the stage by i or later (liveness after its
                             producer)

The saved state of a generator is a storage that the first execution of a node makes, later
executions of the node read, and nothing makes again.

Frees are not variables: `with_frees` frees each storage after its last use, so that a storage is
alive exactly when its next event is a use; the constraints count just that.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pulp import LpAffineExpression, LpConstraint, LpMinimize, LpProblem, LpVariable, lpSum

from rockplan.ilp.blocks.stages import Stages
from rockplan.ilp.highs import INFINITY, TIME_UNIT, LinearProgram
from rockplan.ilp.pulp_models import arrays_of
from rockplan.ilp.scaling import UNLIMITED

Terms = list[tuple[LpVariable, int]]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRow:
    """A constraint on memory: `step` times its terms, in units, plus `constant_bytes` must stay
    within a budget. Terms change in whole steps, so the limit may be rounded down to one: this
    tightens the relaxation. row: index in the arrays of the model; free: a limit that no solution
    reaches."""

    constraint: LpConstraint
    row: int
    constant_bytes: int
    step: int
    free: int


@dataclass(frozen=True, slots=True, eq=False)
class StageModel:
    """The integer program. problem: minimises the time of re-executions, in TIME_UNIT; program: the
    same as arrays, without budgets, so that another budget is another right-hand side.

    variables: in the order of the columns of the arrays; keep: (stage, data) -> column; rerun:
    (stage, node) -> column. peak: rows limited by the peak budget; saved: the row limited by the
    budget of saved bytes.
    """

    stages: Stages
    problem: LpProblem
    variables: tuple[LpVariable, ...]
    program: LinearProgram
    keep: dict[tuple[int, int], int]
    rerun: dict[tuple[int, int], int]
    peak: tuple[MemoryRow, ...]
    saved: MemoryRow

    def within(self, peak_bytes: int, saved_bytes: int) -> LinearProgram:
        """Return the program under these budgets (tiny storages aside)."""
        upper = self.program.row_upper.copy()
        for memory, limit in self._limits(peak_bytes, saved_bytes):
            upper[memory.row] = INFINITY if limit is None else limit
        return replace(self.program, row_upper=upper)

    def limited(self, peak_bytes: int, saved_bytes: int) -> LpProblem:
        """Return the PuLP model under these budgets. (There is one model; its right-hand sides are
        changed.)"""
        for memory, limit in self._limits(peak_bytes, saved_bytes):
            memory.constraint.changeRHS(memory.free if limit is None else limit)
        return self.problem

    def _limits(self, peak_bytes: int, saved_bytes: int) -> Iterable[tuple[MemoryRow, int | None]]:
        """None without a budget."""
        budgets = (*((row, peak_bytes) for row in self.peak), (self.saved, saved_bytes))
        for row, budget_bytes in budgets:
            units = self.stages.units.down(budget_bytes - row.constant_bytes)
            yield row, units // row.step if budget_bytes < UNLIMITED else None


@dataclass(slots=True)
class _Model:
    """The model while it is written. Methods return empty terms for variables that do not exist."""

    stages: Stages
    problem: LpProblem
    variables: list[LpVariable] = field(default_factory=list)
    rows: list[LpConstraint] = field(default_factory=list)
    keep: dict[tuple[int, int], LpVariable] = field(default_factory=dict)
    rerun: dict[tuple[int, int], LpVariable] = field(default_factory=dict)
    peak: list[MemoryRow] = field(default_factory=list)

    def before(self, s: int) -> str:
        stages = self.stages.stages
        return f"before_n{stages[s].node}" if s < len(stages) else "at_the_end"

    def variable(self, name: str, category: str) -> LpVariable:
        made = self.problem.add_variable(name, 0, 1, category)
        self.variables.append(made)
        return made

    def require(self, name: str, constraint: LpConstraint) -> int:
        self.problem += constraint, name
        self.rows.append(constraint)
        return len(self.rows) - 1

    def size(self, d: int) -> int:
        return self.stages.units.up(self.bytes(d))

    def bytes(self, d: int) -> int:
        return self.stages.units.view.sizes[d]

    def memory(self, name: str, terms: Terms, constant_bytes: int) -> MemoryRow:
        step = max(math.gcd(*(weight for _, weight in terms)), 1)
        merged: dict[LpVariable, int] = {}
        for variable, weight in terms:
            merged[variable] = merged.get(variable, 0) + weight // step
        alive = LpAffineExpression(merged)
        free = int(sum(alive.values()))
        constraint = alive <= free
        return MemoryRow(constraint, self.require(name, constraint), constant_bytes, step, free)

    def within_peak(self, name: str, terms: Terms, constant_bytes: int) -> None:
        self.peak.append(self.memory(name, terms, constant_bytes))

    def kept(self, s: int, d: int) -> Terms:
        variable = self.keep.get((s, d))
        return [] if variable is None else [(variable, self.size(d))]

    def available(self, s: int, d: int) -> LpAffineExpression:
        """1 if d can be read at stage s by nodes after its producer."""
        made = (self.rerun.get((s, i)) for i in self.stages.units.view.makers[d])
        return lpSum(v for v in (self.keep.get((s, d)), *made) if v is not None)

    def kept_units(self, s: int) -> Terms:
        if s == len(self.stages.stages):
            return []
        return [term for d in self.stages.stages[s].wanted for term in self.kept(s, d)]


def entries(stages: Stages) -> int:
    """Estimate the matrix entries of the program."""
    return sum(len(s.wanted) * (len(s.movable) + 1) for s in stages.stages)


def formulate(stages: Stages) -> StageModel:
    """Write the integer program for `stages`, which has at least one stage: minimise the time of
    re-executions, with rows for memory whose limits `StageModel.within` sets."""
    model = _Model(stages, LpProblem("time_of_what_runs_again", LpMinimize))
    _add_variables(model)
    for s in range(len(stages.stages)):
        _add_reads(model, s)
        _add_survival(model, s)
        _add_backward_memory(model, s)
        _add_rerun_memory(model, s)
    model.within_peak("memory_after_the_last_stage", [], stages.tail_bytes)
    _add_forward_memory(model)
    _add_start_memory(model)
    # Bytes alive between the phases besides outputs have a budget of their own.
    kept_apart = [d for d in stages.stages[0].wanted if d not in stages.units.graph.outputs]
    terms = [term for d in kept_apart for term in model.kept(0, d)]
    saved = model.memory("saved_at_the_turn", terms, stages.held_bytes)
    columns = {variable: k for k, variable in enumerate(model.variables)}
    return StageModel(
        stages=stages,
        problem=model.problem,
        variables=tuple(model.variables),
        program=arrays_of(model.problem, columns, model.rows),
        keep={key: columns[variable] for key, variable in model.keep.items()},
        rerun={key: columns[variable] for key, variable in model.rerun.items()},
        peak=tuple(model.peak),
        saved=saved,
    )


def _add_variables(model: _Model) -> None:
    """Times in the objective are in TIME_UNITs of the iteration."""
    graph, view = model.stages.units.graph, model.stages.units.view
    time_unit_ns = max(graph.time_ns, 1) * TIME_UNIT
    stages = tuple(enumerate(model.stages.stages))
    for s, stage in stages:
        for d in stage.wanted:
            if d not in model.stages.transient and (s > 0 or d not in view.dropped):
                model.keep[s, d] = model.variable(f"keep_d{d}_{model.before(s)}", "Binary")
    for s, stage in stages:
        for i in stage.movable:
            model.rerun[s, i] = model.variable(f"again_n{i}_{model.before(s)}", "Binary")
    model.problem += LpAffineExpression(
        {v: graph.nodes[i].time_ns / time_unit_ns for (_, i), v in model.rerun.items()}
    )


def _add_reads(model: _Model, s: int) -> None:
    """What one of the nodes reads is kept to the stage or made again in it."""
    reads_again, stage = model.stages.units.view.reads_again, model.stages.stages[s]
    before, wanted = model.before(s), set(stage.wanted)
    for i in stage.movable:
        for d in reads_again[i]:
            if d in wanted:
                is_available = model.available(s, d) >= model.rerun[s, i]
                model.require(f"n{i}_again_{before}_reads_d{d}", is_available)
    for d in stage.reads:
        model.require(f"n{stage.node}_reads_d{d}", model.available(s, d) >= 1)


def _add_survival(model: _Model, s: int) -> None:
    """Kept to the next stage only if kept to this one or made again in it; never both."""
    before = model.before(s)
    for d in model.stages.stages[s].wanted:
        following = model.keep.get((s + 1, d))
        if following is not None:
            was_available = model.available(s, d) >= following
            model.require(f"d{d}_kept_{model.before(s + 1)}_is_there_{before}", was_available)
        model.require(f"d{d}_{before}_is_kept_or_made_again", model.available(s, d) <= 1)


def _add_backward_memory(model: _Model, s: int) -> None:
    """One row for the node that ends the stage, one for those before it, which read nothing
    free."""
    stage = model.stages.stages[s]
    read = set(stage.reads)
    needed_bytes = sum(model.bytes(d) for d in read)
    kept_after: Terms = []
    if s + 1 < len(model.stages.stages):
        for d in model.stages.stages[s + 1].wanted:
            if d not in read:
                kept_after += model.kept(s + 1, d)
    model.within_peak(f"memory_at_n{stage.node}", kept_after, stage.during_bytes + needed_bytes)
    model.within_peak(f"memory_up_to_n{stage.node}", model.kept_units(s), stage.gap_bytes)


def _add_rerun_memory(model: _Model, s: int) -> None:
    """What is alive while a node runs again, with its workspace and results."""
    stages = model.stages
    graph, stage = stages.units.graph, stages.stages[s]
    state_bytes = stages.units.view.state_bytes
    lives = [_add_life(model, s, d) for d in stage.wanted]
    wanted = set(stage.wanted)
    for i in stage.movable:
        node = graph.nodes[i]
        unlisted_bytes = sum(model.bytes(d) for d in node.writes if d not in wanted)
        extra_units = sum(
            map(stages.units.up, (node.workspace_bytes + unlisted_bytes, state_bytes[i]))
        )
        terms: Terms = [(model.rerun[s, i], extra_units)]
        constant_bytes = stage.before_bytes
        for life in lives:
            if i > life.made_by and life.is_read:
                constant_bytes += model.bytes(life.data)
            else:
                terms += life.during(model, s, i)
        model.within_peak(f"memory_at_n{i}_again_{model.before(s)}", terms, constant_bytes)


@dataclass(frozen=True, slots=True)
class _Life:
    """The life of one storage within one stage.

    users: nodes that may be re-executed here and read it, ascending; use: the variable of each
    (none if the backward node reads the storage: then it is alive from its producer on).
    """

    data: int
    size: int
    made_by: int
    is_read: bool
    users: tuple[int, ...]
    use: tuple[LpVariable, ...]

    def during(self, model: _Model, s: int, i: int) -> Terms:
        """(Variable, units): up to its maker it counts if kept, after that while something reads
        it."""
        if i < self.made_by:
            return model.kept(s, self.data)
        if i == self.made_by:
            return [*model.kept(s, self.data), (model.rerun[s, i], self.size)]
        position = bisect_left(self.users, i)
        if position < len(self.use):
            return [(self.use[position], self.size)]
        return model.kept(s + 1, self.data)


def _add_life(model: _Model, s: int, d: int) -> _Life:
    """A variable for each node that may read d: 1 if d is used by that node, or later. None if the
    node that ends the stage reads d, which is alive all the time then."""
    reads_again, before = model.stages.units.view.reads_again, model.before(s)
    stage = model.stages.stages[s]
    is_read = d in stage.reads
    users = tuple(i for i in stage.movable if d in reads_again[i])
    later = model.keep.get((s + 1, d))
    use: list[LpVariable] = []
    for u in () if is_read else reversed(users):
        alive = model.variable(f"use_d{d}_from_n{u}_{before}", "Continuous")
        model.require(f"d{d}_is_used_by_n{u}_again_{before}", alive >= model.rerun[s, u])
        if later is not None:
            model.require(f"d{d}_is_used_after_n{u}_again_{before}", alive >= later)
        later = alive
        use.append(alive)
    made_by = model.stages.units.view.producer.get(d, -1)
    return _Life(d, model.size(d), made_by, is_read, users, tuple(reversed(use)))


def _add_forward_memory(model: _Model) -> None:
    """What is alive anyway, and storages whose last use in the forward is over, if kept."""
    stages = model.stages
    for i, during_bytes in enumerate(stages.forward_during_bytes):
        terms: Terms = []
        for d in stages.stages[0].wanted:
            last_use = stages.last_use[d]
            if last_use is not None and last_use < i:
                terms += model.kept(0, d)
        model.within_peak(f"memory_at_n{i}_first", terms, during_bytes)


def _add_start_memory(model: _Model) -> None:
    """Tangents and outputs in any case, other storages if kept."""
    outputs = model.stages.units.graph.outputs
    not_free = set(model.stages.units.graph.held)
    terms = [
        (variable, model.size(d))
        for (s, d), variable in model.keep.items()
        if s == 0 and d not in outputs
    ]
    outputs_bytes = sum(model.bytes(d) for d in outputs if d not in not_free)
    model.within_peak("memory_at_the_turn", terms, model.stages.start_bytes + outputs_bytes)
