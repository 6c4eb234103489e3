"""Run HiGHS on an integer program and report exactly what it proved.

takes: a LinearProgram. returns: a SolveReport whose status and bound are HiGHS' own
(`getModelStatus`, `getInfo`). A solve stopped by the time limit is never called optimal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import highspy
import numpy as np
from numpy.typing import NDArray

from rockplan.errors import SolverError

Result = TypeVar("Result")

INFINITY = float("inf")

_ASKS = highspy.cb.HighsCallbackType
"""Where HiGHS asks whether to go on: at each iteration of the simplex method, about 3 us."""

INTEGRALITY_TOLERANCE = 1e-6
"""How far from an integer HiGHS may leave an integer column (its own default)."""

TIME_UNIT = 1e-3
"""Costs count time in this share of the iteration time: large against HiGHS' tolerances."""

MAX_NODE_ENTRIES = 300_000
"""A solve stops after this many nodes of the search tree times entries of the matrix: 200 nodes
for an attention half, which needs below 100. Unlike a time limit it strikes at the same place on
every run."""

PATIENCE_S = 1.0
"""Seconds by which a solve may exceed its time limit. HiGHS does not look at the clock while it
separates cuts: 25 s on a program of 4,000 columns for a loop (HiGHS 1.15.1, HighsModkSeparator)."""


class SolverStatus(Enum):
    """OPTIMAL: within the gap asked for; FEASIBLE: stopped at a limit with a solution;
    STOPPED: stopped without one; INFEASIBLE: proven to have none."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, eq=False)
class LinearProgram:
    """Minimise costs @ x; rows in compressed form: row r owns entries starts[r]:starts[r + 1]."""

    costs: NDArray[np.float64]
    column_lower: NDArray[np.float64]
    column_upper: NDArray[np.float64]
    integral: NDArray[np.bool_]
    row_lower: NDArray[np.float64]
    row_upper: NDArray[np.float64]
    starts: NDArray[np.int32]
    columns: NDArray[np.int32]
    coefficients: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SolveReport:
    """What a solve found and proved. values: of the best solution, None without one; those of
    integer columns are rounded. bound: no solution costs less (infinite if infeasible). iterations:
    of the simplex method, a measure of work that is the same on every run."""

    status: SolverStatus
    bound: float
    values: NDArray[np.float64] | None
    iterations: int


@dataclass
class ProgramBuilder:
    """Collects the columns and rows of a LinearProgram."""

    costs: list[float] = field(default_factory=list)
    column_lower: list[float] = field(default_factory=list)
    column_upper: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)

    def binary(self, cost: float = 0.0) -> int:
        """Add a column that is 0 or 1; return its index."""
        return self._column(cost, True)

    def fraction(self) -> int:
        """Add a continuous column in [0, 1], which the rows must drive to the integer it stands
        for."""
        return self._column(0.0, False)

    def amount(self, cost: float = 0.0) -> int:
        """Add a continuous column, 0 or more, that costs something or is bounded by a row."""
        column = self._column(cost, False)
        self.column_upper[column] = INFINITY
        return column

    def _column(self, cost: float, integral: bool) -> int:
        self.costs.append(cost)
        self.column_lower.append(0.0)
        self.column_upper.append(1.0)
        self.integral.append(integral)
        return len(self.costs) - 1

    def at_most(self, terms: Sequence[tuple[int, float]], upper: float) -> int:
        """Add the row `terms` (column, coefficient) <= upper; return its index."""
        return self._row(terms, -INFINITY, upper)

    def at_least(self, terms: Sequence[tuple[int, float]], lower: float) -> int:
        """Add the row `terms` >= lower; return its index."""
        return self._row(terms, lower, INFINITY)

    def _row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> int:
        merged = dict(terms)
        if len(merged) < len(terms):
            merged = dict.fromkeys(merged, 0.0)
            for column, coefficient in terms:
                merged[column] += coefficient
        self.columns += merged.keys()
        self.coefficients += merged.values()
        self.starts.append(len(self.columns))
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        return len(self.row_lower) - 1

    def build(self) -> LinearProgram:
        """Return the columns and rows so far as arrays."""
        return LinearProgram(
            costs=np.array(self.costs, dtype=np.float64),
            column_lower=np.array(self.column_lower, dtype=np.float64),
            column_upper=np.array(self.column_upper, dtype=np.float64),
            integral=np.array(self.integral, dtype=np.bool_),
            row_lower=np.array(self.row_lower, dtype=np.float64),
            row_upper=np.array(self.row_upper, dtype=np.float64),
            starts=np.array(self.starts, dtype=np.int32),
            columns=np.array(self.columns, dtype=np.int32),
            coefficients=np.array(self.coefficients, dtype=np.float64),
        )


def solve(
    program: LinearProgram,
    *,
    time_limit_s: float,
    absolute_gap: float,
    node_limit: int | None = None,
) -> SolveReport:
    """Minimise `program`, with HiGHS in a thread of its own. OPTIMAL means within `absolute_gap`
    (in units of the objective) of the bound. time_limit_s: of CPU time; node_limit: nodes of the
    search tree, None for MAX_NODE_ENTRIES. If HiGHS goes on PATIENCE_S beyond the time, it is left
    running and the report says STOPPED. Raises SolverError when HiGHS neither solves nor refutes
    the program."""
    nodes = MAX_NODE_ENTRIES // max(len(program.columns), 1) if node_limit is None else node_limit
    try:
        return in_own_thread(
            lambda: _solve(program, time_limit_s, absolute_gap, nodes),
            patience_s=max(time_limit_s, 0.0) + PATIENCE_S,
        )
    except TimeoutError:
        return SolveReport(SolverStatus.STOPPED, -INFINITY, None, 0)


def in_own_thread(run: Callable[[], Result], patience_s: float) -> Result:
    """Call `run`, which uses HiGHS, in a new thread, and return its result. Raises TimeoutError if
    the process takes more than `patience_s` of CPU time: the thread then ends when HiGHS does, and
    the process waits for it at its end. HiGHS keeps one scheduler for each thread, and its first
    run there fixes the scheduler's size: a thread of our own neither meets nor leaves a scheduler
    of another size."""
    thread = ThreadPoolExecutor(max_workers=1)
    until = time.process_time() + patience_s
    try:
        made = thread.submit(run)
        while not wait([made], PATIENCE_S).done and time.process_time() < until:
            pass
        return made.result(0)
    finally:
        thread.shutdown(wait=False)


def _solve(
    program: LinearProgram, time_limit_s: float, absolute_gap: float, node_limit: int
) -> SolveReport:
    """In the calling thread, within time_limit_s of its CPU time. Raises SolverError when HiGHS
    neither solves nor refutes the program."""
    highs = highspy.Highs()
    options = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": absolute_gap,
        "mip_max_nodes": max(node_limit, 1),
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    until = time.thread_time() + time_limit_s  # the limit of HiGHS itself is one of wall time

    def ask(kind: Any, message: str, found: Any, given: Any, data: Any) -> None:
        given.user_interrupt = time.thread_time() >= until

    highs.setCallback(ask, None)
    for kind in (_ASKS.kCallbackSimplexInterrupt, _ASKS.kCallbackMipInterrupt):
        highs.startCallback(kind)
    if highs.passModel(_highs_model(program)) == highspy.HighsStatus.kError:
        raise SolverError("HiGHS refused the model")
    if highs.run() == highspy.HighsStatus.kError:
        raise SolverError(f"HiGHS failed: {highs.modelStatusToString(highs.getModelStatus())}")
    return _report(highs, program.integral)


def _report(highs: highspy.Highs, integral: NDArray[np.bool_]) -> SolveReport:
    model_status = highs.getModelStatus()
    kinds = highspy.HighsModelStatus
    info = highs.getInfo()
    iterations = max(info.simplex_iteration_count, 0)
    # Every column is bounded or costs what it adds, so no program here is unbounded.
    if model_status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return SolveReport(SolverStatus.INFEASIBLE, INFINITY, None, iterations)
    is_solved = model_status in (kinds.kOptimal, kinds.kModelEmpty)
    if not is_solved and model_status not in (kinds.kInterrupt, kinds.kSolutionLimit):
        raise SolverError(f"HiGHS stopped with: {highs.modelStatusToString(model_status)}")
    if integral.any():
        bound = info.mip_dual_bound
    else:
        bound = info.objective_function_value if is_solved else -INFINITY
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return SolveReport(SolverStatus.STOPPED, bound, None, iterations)
    values = np.array(highs.getSolution().col_value, dtype=np.float64)
    values[integral] = rounded(values[integral])
    status = SolverStatus.OPTIMAL if is_solved else SolverStatus.FEASIBLE
    return SolveReport(status, bound, values, iterations)


def rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round values to integers. Raises SolverError if one is not near an integer."""
    nearest = np.rint(values)
    if np.abs(values - nearest).max(initial=0.0) > 2 * INTEGRALITY_TOLERANCE:
        raise SolverError("HiGHS returned a solution that is not integral")
    return nearest


def _highs_model(program: LinearProgram) -> highspy.HighsLp:
    model = highspy.HighsLp()
    model.num_col_ = len(program.costs)
    model.num_row_ = len(program.row_lower)
    model.col_cost_ = program.costs
    model.col_lower_ = program.column_lower
    model.col_upper_ = program.column_upper
    model.row_lower_ = program.row_lower
    model.row_upper_ = program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = program.starts
    model.a_matrix_.index_ = program.columns
    model.a_matrix_.value_ = program.coefficients
    model.integrality_ = [
        highspy.HighsVarType.kInteger if i else highspy.HighsVarType.kContinuous
        for i in program.integral
    ]
    return model
