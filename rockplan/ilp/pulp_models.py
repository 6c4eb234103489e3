"""PuLP models: as arrays for HiGHS, or solved by another solver that PuLP finds.

takes: an LpProblem. returns: LinearProgram, or a SolveReport as `highs.solve` does.

HiGHS is run by `highs`, not through PuLP: PuLP returns no bound, and calls a solution optimal when
the time limit ended the solve. For other solvers, the bound is what they were asked to prove, and a
solution found when time was up does not count as finished.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import pulp

from rockplan.errors import InvalidInput, SolverError
from rockplan.ilp.highs import INFINITY, LinearProgram, SolveReport, SolverStatus, rounded

for _solver in vars(pulp).values():  # PuLP keeps why it has no other solver,
    if isinstance(_error := getattr(_solver, "err", None), Exception):
        _error.with_traceback(None)  # and whatever is alive in functions of whoever came here first

HIGHS = "HiGHS"
"""Our name of HiGHS (run through highspy), beside the names of PuLP's solvers."""

RELATIVE_GAP = 1e-4
"""Share of the objective that other solvers may leave unproven: the one gap that all of them
know."""


def arrays_of(
    problem: pulp.LpProblem,
    columns: Mapping[pulp.LpVariable, int],
    rows: Sequence[pulp.LpConstraint],
) -> LinearProgram:
    """Convert a PuLP problem to arrays. columns: variable -> index, for all variables of `problem`,
    in order of the index; rows: its constraints, in the order that the rows get."""
    lower, upper = {pulp.LpConstraintGE, pulp.LpConstraintEQ}, {pulp.LpConstraintLE}
    upper.add(pulp.LpConstraintEQ)
    costs = np.zeros(len(columns))
    for variable, cost in problem.objective.items():
        costs[columns[variable]] = cost
    starts = np.cumsum([0, *(len(row) for row in rows)])
    return LinearProgram(
        costs=costs,
        column_lower=np.array([v.lowBound for v in columns], dtype=np.float64),
        column_upper=np.array([v.upBound for v in columns], dtype=np.float64),
        integral=np.array([v.cat == pulp.LpInteger for v in columns], dtype=np.bool_),
        row_lower=np.array([-r.constant if r.sense in lower else -INFINITY for r in rows]),
        row_upper=np.array([-r.constant if r.sense in upper else INFINITY for r in rows]),
        starts=starts.astype(np.int32),
        columns=np.array([columns[v] for row in rows for v in row], dtype=np.int32),
        coefficients=np.array([c for row in rows for c in row.values()], dtype=np.float64),
    )


def at_hand() -> list[str]:
    """List the names of the solvers that can run here."""
    return sorted({HIGHS, *pulp.listSolvers(onlyAvailable=True)})


def check_solver(name: str) -> None:
    """Raise InvalidInput if PuLP does not find the solver."""
    if name != HIGHS and name not in (names := at_hand()):
        known = "is not installed" if name in pulp.listSolvers() else "is none that PuLP knows"
        raise InvalidInput(f"the solver {name!r} {known}; at hand are {', '.join(names)}")


def solve_by(
    name: str, problem: pulp.LpProblem, variables: Sequence[pulp.LpVariable], *, time_limit_s: float
) -> SolveReport:
    """Minimise `problem` by the solver that PuLP knows as `name`. `values` of the report are those
    of `variables`, in that order; the bound is what RELATIVE_GAP allows if the solver finished in
    time, else minus infinity. Raises SolverError if the solver fails."""
    started = time.monotonic()
    solver = pulp.getSolver(name, msg=False, timeLimit=time_limit_s, gapRel=RELATIVE_GAP)
    try:
        status = problem.solve(solver)
    except pulp.PulpError as error:
        raise SolverError(f"{name} failed: {error}") from error
    is_late = time.monotonic() - started >= time_limit_s
    is_solved = problem.sol_status == pulp.LpSolutionOptimal and not is_late
    if status == pulp.LpStatusInfeasible and not is_late:
        return SolveReport(SolverStatus.INFEASIBLE, INFINITY, None, 0)
    # A solver that found nothing may leave the variables with values of an earlier solve.
    found = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    if not found or any(v.varValue is None for v in variables):
        return SolveReport(SolverStatus.STOPPED, -INFINITY, None, 0)
    values = np.array([v.varValue for v in variables], dtype=np.float64)
    integral = np.array([v.cat == pulp.LpInteger for v in variables])
    values[integral] = rounded(values[integral])
    if not is_solved:
        return SolveReport(SolverStatus.FEASIBLE, -INFINITY, values, 0)
    bound = float(pulp.value(problem.objective)) * (1 - RELATIVE_GAP)
    return SolveReport(SolverStatus.OPTIMAL, bound, values, 0)
