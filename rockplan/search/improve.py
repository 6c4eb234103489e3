"""Improve a schedule of a whole graph: what it and the relaxation do not agree on, decided anew.

takes: Refined, a legal schedule within its budget. returns: a schedule. guarantees: legal, within
the budget as `simulate` finds it, no slower; the same on every run unless the deadline strikes: the
work that was done ends a search.

The program of `moments` is solved in the manner of RINS (Danna, Rothberg, Le Pape 2005): columns
are fixed where the linear relaxation and the schedule in hand agree, and the rest is a small
integer program. What its solution needs above the budget is made room for by exchanges (`anneal`),
and the program learns of it.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rockplan.ilp.blocks.decode import Orders
from rockplan.ilp.blocks.pareto_search import SOLVE_EFFORT
from rockplan.ilp.highs import TIME_UNIT, solve
from rockplan.ilp.whole_graph.program import Program, orders_of, program, solution_of
from rockplan.ilp.whole_graph.refine import COLUMNS, Refined, looking_closer
from rockplan.oracles.simulate import simulate
from rockplan.search.local.exchange import annealed, fitted
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule

GAP = 5e-4
"""Share of the iteration time that may stay unproven."""

NODES = 20
"""Of the search tree of one integer program."""

WHOLE = 1000
"""Columns of programs that are solved as a whole when nothing else helps: in some seconds."""

EFFORT = 10_000
"""Iterations of the simplex method after which no other program is solved: some seconds."""

EXCHANGES = 100_000
"""Effort for exchanges on what one of them finds."""


def improve(start: Refined, schedule: Schedule, *, deadline: float) -> Schedule:
    """`schedule`, which is within the budget of `start`, or a faster one; deadline: as of
    time.monotonic."""
    facts, budget_bytes = start.program.facts, start.budget_bytes
    graph = facts.graph
    made, moments, relaxed = start.program, start.moments, start.relaxed.values
    best, best_ns = schedule, simulate(graph, schedule).time_ns
    effort = 0
    while relaxed is not None and effort < EFFORT and len(made.linear.costs) <= 2 * COLUMNS:
        found, iterations = _solved(made, best, relaxed, deadline)
        if found is None and len(made.linear.costs) <= WHOLE:
            found, more = _solved(made, best, None, deadline)
            iterations += more
        effort += SOLVE_EFFORT + iterations
        if found is None:
            break
        candidate = _exchanged(graph, found, budget_bytes, deadline) or best
        candidate_ns = simulate(graph, candidate).time_ns
        is_faster = candidate_ns < best_ns
        if is_faster:
            best, best_ns = candidate, candidate_ns
        closer = looking_closer(made, moments, found, budget_bytes, at_reruns=True)
        if closer is not None:
            moments, made = closer, program(facts, closer, budget_bytes)
            relaxed = _relaxed(made, deadline)
        elif not is_faster:
            break
    return best


def _exchanged(
    graph: CDGraph, found: Orders, budget_bytes: int, deadline: float
) -> Schedule | None:
    fits = fitted(graph, found.forward, found.backward, budget_bytes, deadline=deadline)
    if fits is None:
        return None
    return annealed(graph, fits, budget_bytes, deadline=deadline, effort=EXCHANGES)


def _relaxed(made: Program, deadline: float) -> NDArray[np.float64] | None:
    remaining_s = max(deadline - time.monotonic(), 0.0)
    return solve(made.relaxed, time_limit_s=remaining_s, absolute_gap=0.0).values


def _solved(
    made: Program,
    schedule: Schedule,
    relaxed: NDArray[np.float64] | None,
    deadline: float,
) -> tuple[Orders | None, int]:
    """Faster than `schedule`, as far as the program sees it, None if nothing is found; and how
    many iterations it took. relaxed: where it agrees with the schedule, that is settled."""
    start = solution_of(made, Orders(*schedule.phases))
    linear = made.linear
    current = np.zeros(len(linear.costs))
    current[list(start)] = list(start.values())
    if relaxed is not None:
        fixed = linear.integral & (np.abs(current - relaxed) < 1e-6)
        linear = replace(
            linear,
            column_lower=np.where(fixed, current, linear.column_lower),
            column_upper=np.where(fixed, current, linear.column_upper),
        )
    found = solve(
        linear,
        time_limit_s=max(deadline - time.monotonic(), 0.0),
        absolute_gap=GAP / TIME_UNIT,
        start=start,
        node_limit=NODES,
    )
    cost = float(linear.costs @ current)
    if found.values is None or float(linear.costs @ found.values) >= cost - GAP / TIME_UNIT:
        return None, found.iterations
    return orders_of(made, found.values), found.iterations
