"""One integer program for the whole graph, without blocks (Checkmate, Jain et al., MLSys 2020).

The stage formulation of `rockplan.ilp`: forward nodes run once, in order; before each backward
node any of them may run again. Backward nodes do not run again, which the T x T program of
Checkmate allows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.peers.orders import checked_schedule
from rockplan.ilp.blocks.decode import proven_ns, read_orders
from rockplan.ilp.blocks.formulate import StageModel, formulate
from rockplan.ilp.blocks.stages import find_stages
from rockplan.ilp.highs import TIME_UNIT, SolverStatus, solve
from rockplan.ilp.scaling import UNLIMITED, in_units
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule

NODES = 10**9
"""Of the search tree: no limit but the time."""


@dataclass(frozen=True, slots=True)
class Exact:
    """schedule: the best one found, if any; bound_ns: no schedule of the formulation takes less.
    status: OPTIMAL within the gap asked for, FEASIBLE or STOPPED at the time limit."""

    schedule: Schedule | None
    status: SolverStatus
    bound_ns: int
    seconds: float


def whole_graph_model(graph: CDGraph) -> StageModel:
    """The program, once for all budgets."""
    return formulate(find_stages(in_units(graph)))


def exact(
    graph: CDGraph, model: StageModel, budget_bytes: int, *, time_limit_s: float, gap: float
) -> Exact:
    """The fastest schedule within budget_bytes; gap: share of the iteration time that may stay
    unproven. The solver starts from nothing."""
    units = model.stages.units
    start = time.monotonic()
    program = model.within(budget_bytes - units.reserve_bytes, UNLIMITED)
    found = solve(
        program, time_limit_s=time_limit_s, absolute_gap=gap / TIME_UNIT, node_limit=NODES
    )
    schedule = None
    if found.values is not None:
        orders = read_orders(model, found.values)
        schedule = checked_schedule(graph, orders.forward, orders.backward)
    bound_ns = graph.time_ns + proven_ns(found.bound, graph.time_ns)
    return Exact(schedule, found.status, bound_ns, time.monotonic() - start)
