"""A lower bound on the time of legal schedules within a budget, and a schedule near it.

takes: a CDGraph, a budget. returns: Refined, nanoseconds. guarantees: no schedule that `verify`
accepts, whose first executions are in the order of the graph, and that `simulate` finds within the
budget is faster, whatever it re-executes, in either phase, however often and in whatever order.

The program (`program`) begins with one moment. The schedule of its solution is simulated, and the
first execution that exceeds the budget most becomes a moment of the next program: first of
relaxations, then of integer programs. It ends with a schedule that keeps the budget at all first
executions.

Few moments suffice, four to eight here. Bound over one execution of every node (roofline prices,
operations in eager's order), against moments in equal parts of the backward phase without the rows
of spans, integer programs for 40 s in both: 2 layers of GPT-2 at 34 % of keep-all's peak +22.3
instead of +17.2 %, with fused attention at 35 % +24.8 instead of +18.0 %, Llama at 34 % +20.1
instead of +16.2 %, 2+2 layers of T5 at 24 % +25.8 instead of +22.6 %, ResNet-18 at 48 % +17.3
instead of +15.7 %. Relaxations alone: +21.7, +22.7, +18.4, +25.6 and +15.7 % in 0.2 to 0.6 s; 12
layers of GPT-2 at 30 % +21.2 % in 0.4 s, where the other had +11.1 % after 2, +16.4 % after 20 s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from rockplan.ilp.blocks.decode import proven_ns
from rockplan.ilp.highs import TIME_UNIT, SolveReport, SolverStatus, solve
from rockplan.ilp.whole_graph.intervals import Facts, Moments
from rockplan.ilp.whole_graph.program import Program, orders_of, program
from rockplan.oracles.simulate import timeline
from rockplan.values.copies import Host
from rockplan.values.graph import CDGraph
from rockplan.values.order import Orders
from rockplan.values.schedule import Compute, with_frees

ITERATIONS = 4000
"""A relaxation that took more iterations of the simplex method (a quarter of a second on
transformers) is the last one. The number of columns says less: the first relaxation of a loop of
300 steps has 6,000 and takes 0.04 s."""

PATIENCE = 3
"""After so many moments in a row that do not raise the bound, no relaxation follows."""

GAP = 1e-4
"""Share of the iteration time that an integer program may leave unproven."""

NODE_LIMIT = 1 << 30
"""Practically none: the time limit ends the search."""


@dataclass(frozen=True, slots=True, eq=False)
class Refined:
    """The last relaxation that was solved. bound: the largest of all, in TIME_UNIT; 0 if the
    relaxations see no schedule that fits."""

    budget_bytes: int
    moments: Moments
    program: Program
    relaxed: SolveReport
    bound: float

    @property
    def orders(self) -> Orders | None:
        """A fast schedule that may exceed the budget; None if there is no solution."""
        return None if self.relaxed.values is None else orders_of(self.program, self.relaxed.values)

    @property
    def bound_ns(self) -> int:
        return _proven_ns(self.program.facts.graph, self.bound)


def refined(
    graph: CDGraph, budget_bytes: int, *, deadline: float, host: Host | None = None
) -> Refined | None:
    """Solve linear relaxations, each with a row of memory at one moment more, until the schedule of
    the last one keeps the budget or PATIENCE of them gain nothing. None if nothing need or may run
    again, or no time is left. deadline: as of process_time. host: where storages may go for which
    `graph` has fetches."""
    facts = Facts(graph, host)
    moments = Moments(frozenset({len(graph.nodes) - 1})) if graph.backward else None
    best: Refined | None = None
    without_gain = 0
    while moments is not None and time.process_time() < deadline:
        written = program(facts, moments, budget_bytes)
        if not written.linear.costs.any():
            break
        report = solve(
            written.relaxed, time_limit_s=max(deadline - time.process_time(), 0.0), absolute_gap=0.0
        )
        if report.status is SolverStatus.STOPPED:
            break
        known = 0.0 if best is None else best.bound
        bound = report.bound if report.values is not None else 0.0
        without_gain = without_gain + 1 if bound <= known + GAP / TIME_UNIT else 0
        best = Refined(budget_bytes, moments, written, report, max(bound, known))
        if best.orders is None or without_gain == PATIENCE or report.iterations > ITERATIONS:
            break
        moments = looking_closer(written, moments, best.orders, budget_bytes)
    return best


def proved_ns(start: Refined, *, deadline: float) -> int:
    """Return a lower bound (ns) on the time of schedules within the budget: the best that integer
    programs prove before the deadline (as of process_time), the first of them with the moments of
    `start`, later ones with more; at least the bound of `start`."""
    graph, facts = start.program.facts.graph, start.program.facts
    bound, moments = start.bound, None if start.bound == 0 else start.moments
    while moments is not None and (remaining_s := deadline - time.process_time()) > 0:
        written = program(facts, moments, start.budget_bytes)
        report = solve(
            written.linear,
            time_limit_s=remaining_s,
            absolute_gap=GAP / TIME_UNIT,
            node_limit=NODE_LIMIT,
        )
        if report.status is SolverStatus.INFEASIBLE:
            break
        bound = max(bound, report.bound)
        if report.status is not SolverStatus.OPTIMAL or report.values is None:
            break
        orders = orders_of(written, report.values)
        moments = looking_closer(written, moments, orders, start.budget_bytes)
    return _proven_ns(graph, bound)


def looking_closer(
    written: Program, moments: Moments, orders: Orders, budget_bytes: int
) -> Moments | None:
    """Return `moments` and one more: the first execution, not yet among them, at which the schedule
    `orders` exceeds the budget most. None if the budget is kept at all others. written: the program
    with these moments, whose intervals become unions of the next one."""
    graph = written.facts.graph
    schedule = with_frees(graph, orders.forward, orders.backward)
    steps = zip(schedule.events, timeline(graph, schedule), strict=True)
    during = (step.during_bytes for event, step in steps if isinstance(event, Compute))
    firsts = zip(during, orders.computations, orders.is_first, strict=True)
    must = (f for f in firsts if not graph.nodes[f[1]].optional)
    new = [(b, i) for b, i, is_first in must if is_first and i not in moments.ends]
    most_bytes, worst = max(new, default=(0, 0))
    if most_bytes <= budget_bytes:
        return None
    return replace(moments, ends=moments.ends | {worst}, spans=moments.spans | written.spans)


def _proven_ns(graph: CDGraph, bound: float) -> int:
    return graph.time_ns + proven_ns(bound, graph.time_ns)
