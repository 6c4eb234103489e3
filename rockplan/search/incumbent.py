"""Incumbent: the best schedule so far, what is proven, and which stage did what."""

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
    """schedule: legal, within the budget of the goal, of `time_ns` and `peak_bytes`; None at first.
    bound_ns: no schedule within the budget is faster whose first executions come in `order`, which
    is that of the schedule; () where it is the order of the graph. relaxation: the last one that
    was solved in that order. starts: schedules from which the least peak may be reached.
    is_complete: the deadline cut nothing short; is_exhausted: the last
    construction ended for want of effort. trace: of the stages that ran. paged: a schedule in which
    storages go to the host, faster than `schedule`, or where there is none; of it nothing is
    proven but that every node takes its time."""

    bound_ns: int
    order: tuple[int, ...] = ()
    schedule: Schedule | None = None
    paged: Placed | None = None
    time_ns: int = 0
    peak_bytes: int = 0
    relaxation: Refined | None = None
    starts: tuple[Schedule, ...] = ()
    is_complete: bool = True
    is_exhausted: bool = False
    trace: tuple[StageTrace, ...] = ()

    def improved(self, goal: Goal, schedule: Schedule | None) -> Incumbent:
        """With `schedule` where it is within the budget and better: faster, or, where the goal is
        the least peak, smaller."""
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
        order = _moved(goal.graph, schedule)
        if order == self.order:
            return better
        # Nothing is proven in this order but that every node takes its time.
        return replace(better, order=order, bound_ns=goal.graph.time_ns, relaxation=None)

    def is_near(self, goal: Goal, limits: Limits) -> bool:
        """Is no schedule that is faster by more than the nearness of the limits? Where the goal is
        the least peak, that ends nothing."""
        if goal.budget_bytes is None:
            return False
        enough_ns = self.enough_ns(goal, limits)
        if self.paged is not None and self.paged.time_ns <= enough_ns:
            return True
        return self.schedule is not None and self.time_ns <= enough_ns

    def enough_ns(self, goal: Goal, limits: Limits) -> int:
        return self.bound_ns + int(limits.nearness * goal.graph.time_ns)


def _moved(graph: CDGraph, schedule: Schedule) -> tuple[int, ...]:
    """The order of first executions; () where it is that of the graph."""
    order = tuple(i for i in first_executions(schedule) if not graph.nodes[i].optional)
    return () if order == required(graph.nodes) else order
