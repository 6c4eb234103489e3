"""Decode: a solution of the integer program -> an option of a block, priced by the simulator.

takes: a StageModel and budgets, or a problem and an order of computations. returns: Solution,
BlockOption. guarantees: an option is legal (`verify`); its bytes and time are the simulator's, on
the true sizes, never the solver's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rockplan.ilp.blocks.formulate import StageModel
from rockplan.ilp.highs import INFINITY, TIME_UNIT, SolverStatus, solve
from rockplan.ilp.pulp_models import HIGHS, solve_by
from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.block import BlockOption, undominated
from rockplan.values.graph import CDGraph
from rockplan.values.order import Orders, without_idle
from rockplan.values.schedule import with_frees


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solve found and proved.

    orders: None without a schedule. bound_ns: no schedule of the formulation within the budgets
    takes less time. iterations: of the simplex method.
    """

    status: SolverStatus
    orders: Orders | None
    bound_ns: int
    iterations: int


def solve_stages(
    model: StageModel,
    peak_bytes: int,
    saved_bytes: int,
    *,
    time_limit_s: float,
    gap: float,
    solver: str = HIGHS,
) -> Solution:
    """Find the fastest schedule of the stage formulation (which nodes run again before which
    backward node) within both budgets; tiny storages are not counted.

    peak_bytes, saved_bytes: limits of the peak and of what is alive between the phases; UNLIMITED
    for none. gap: share of the iteration time that the solver may leave unproven. solver: HIGHS or
    a name of PuLP's, for which PuLP's own gap holds. `orders` of the result is None if no schedule
    was found.
    """
    if solver == HIGHS:
        program = model.within(peak_bytes, saved_bytes)
        report = solve(program, time_limit_s=time_limit_s, absolute_gap=gap / TIME_UNIT)
    else:
        problem = model.limited(peak_bytes, saved_bytes)
        report = solve_by(solver, problem, model.variables, time_limit_s=time_limit_s)
    orders = None if report.values is None else read_orders(model, report.values)
    graph = model.stages.units.graph
    return Solution(
        status=report.status,
        orders=orders,
        bound_ns=graph.time_ns + proven_ns(report.bound, graph.time_ns),
        iterations=report.iterations,
    )


def proven_ns(bound: float, time_ns: int) -> int:
    """Convert a lower bound in units of TIME_UNIT * time_ns to ns, rounded up, since times are
    integers; 0 for a bound that is negative or infinite."""
    if not 0 < bound < INFINITY:
        return 0
    return max(math.ceil((bound * TIME_UNIT - 1e-6) * time_ns), 0)


def read_orders(model: StageModel, values: NDArray[np.float64]) -> Orders:
    """Return the executions (node indices) that a solution stands for. Forward: every node once.
    Backward: before each backward node that ends a stage the nodes that run again there, ascending.
    Re-executions whose results nothing reads are left out. values: of the variables, by column of
    `model.program`."""
    graph = model.stages.units.graph
    n_forward = len(graph.forward)
    backward: list[int] = []
    start = n_forward
    for s, stage in enumerate(model.stages.stages):
        backward += range(start, stage.node)
        backward += [i for i in stage.movable if values[model.rerun[s, i]] > 0.5]
        backward.append(stage.node)
        start = stage.node + 1
    backward += range(start, len(graph.nodes))
    # A solution within the gap may have re-executions whose results are unused.
    return Orders(*without_idle(graph, range(n_forward), backward))


def price(problem: CDGraph, orders: Orders) -> BlockOption:
    """Return the executions `orders` as an option of the block `problem`, with bytes and time by
    `simulate`; `saved_bytes` leaves the block's outputs out. Raises IllegalSchedule."""
    schedule = with_frees(problem, orders.forward, orders.backward)
    verify(problem, schedule)
    simulation = simulate(problem, schedule)
    output_bytes = GraphView(problem).bytes_of(problem.outputs)
    return BlockOption(
        forward=orders.forward,
        backward=orders.backward,
        output_bytes=output_bytes,
        saved_bytes=simulation.saved_bytes - output_bytes,
        forward_peak_bytes=simulation.forward_peak_bytes,
        backward_peak_bytes=simulation.backward_peak_bytes,
        time_ns=simulation.time_ns,
    )


def pareto(options: Sequence[BlockOption]) -> tuple[BlockOption, ...]:
    """Return the options that no other dominates, fastest first. Of those with equal bytes and time
    the one whose node indices come first stays."""
    ranked = sorted(set(options), key=lambda o: (*o.needs, o.forward, o.backward))
    return undominated(ranked, lambda o: o.needs)
