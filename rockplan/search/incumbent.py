"""Incumbent: the best schedule so far, the proven bound, and a trace of the stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rockplan.ilp.whole_graph.refine import Refined
from rockplan.oracles.simulate import simulate
from rockplan.search.limits import Limits
from rockplan.search.local.placing import Placed
from rockplan.search.problem import Goal
from rockplan.values.graph import CDGraph, required
from rockplan.values.plan import StageTrace
from rockplan.values.schedule import Schedule, first_executions


@dataclass(frozen=True, slots=True, eq=False)
class Incumbent:
    """The best of a search so far. schedule: legal, within the budget of the goal, of `time_ns` and
    `peak_bytes`; None at first.

    bound_ns: lower bound on the time of schedules within the budget whose first executions come in
    `order`; order: the order of first executions of the schedule, () if it is that of the graph.
    relaxation: the last one that was solved in that order. starts: schedules from which the search
    for the least peak may begin. is_complete: the deadline cut nothing short; is_exhausted: the
    last construction ran out of effort. trace: of the stages that ran. paged: a schedule with
    storages on the host; paged_bound_ns: lower bound on the time of schedules that may page, in the
    order of the faster of both schedules, 0 if none was proven.
    """

    bound_ns: int
    order: tuple[int, ...] = ()
    schedule: Schedule | None = None
    paged: Placed | None = None
    paged_bound_ns: int = 0
    time_ns: int = 0
    peak_bytes: int = 0
    relaxation: Refined | None = None
    starts: tuple[Schedule, ...] = ()
    is_complete: bool = True
    is_exhausted: bool = False
    trace: tuple[StageTrace, ...] = ()

    @property
    def fastest_paged(self) -> Placed | None:
        """The schedule that pages, if it is faster than `schedule`, or if there is no other."""
        is_faster = self.schedule is None or (self.paged and self.paged.time_ns < self.time_ns)
        return self.paged if is_faster else None

    def improved(self, goal: Goal, schedule: Schedule | None) -> Incumbent:
        """Return the incumbent with `schedule` and its time and peak, if that is within the goal's
        budget and better: faster, or with a smaller peak if the goal is the least peak. Else, or if
        it is None, return self. In a new order of first executions the proven bound falls back to
        the time of all nodes once."""
        if schedule is None:
            return self
        simulation = simulate(goal.graph, schedule)
        if goal.budget_bytes is not None and simulation.peak_bytes > goal.budget_bytes:
            return self
        if self.schedule is not None:
            is_least = goal.budget_bytes is None
            new, old = (simulation.peak_bytes, simulation.time_ns), (self.peak_bytes, self.time_ns)
            if (new if is_least else new[::-1]) >= (old if is_least else old[::-1]):
                return self
        better = replace(
            self, schedule=schedule, time_ns=simulation.time_ns, peak_bytes=simulation.peak_bytes
        )
        order = moved(goal.graph, schedule)
        if order == self.order:
            return better
        # In another order the only proven bound is the time of all nodes, once each.
        return replace(better, order=order, bound_ns=goal.graph.time_ns, relaxation=None)

    def is_near(self, goal: Goal, limits: Limits) -> bool:
        """True if it is proven that no schedule is faster by more than `limits.nearness` of an
        iteration. Always False if the goal is the least peak."""
        if goal.budget_bytes is None:
            return False
        enough_ns = self.enough_ns(goal, limits)
        if self.paged is not None and self.paged.time_ns <= enough_ns:
            return True
        return self.schedule is not None and self.time_ns <= enough_ns

    def enough_ns(self, goal: Goal, limits: Limits) -> int:
        """Return the time from which on a schedule counts as near the bound."""
        return self.bound_ns + int(limits.nearness * goal.graph.time_ns)


def moved(graph: CDGraph, schedule: Schedule) -> tuple[int, ...]:
    """Return the order of first executions; () if it is that of the graph."""
    order = tuple(i for i in first_executions(schedule) if not graph.nodes[i].optional)
    return () if order == required(graph.nodes) else order
