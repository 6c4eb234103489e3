"""The smallest budget: the schedule with the least peak that is found.

takes: a problem. returns: an Incumbent. guarantees: the schedule is legal; the same on every run
unless the deadline strikes. What was measured counts only in the last stage, which looks where a
plan for less would begin: times differ from run to run, and the smallest budget shall not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rockplan.graph_builder.costs.estimate import roofline
from rockplan.graph_builder.costs.price import price
from rockplan.graph_builder.digests import problem_digest
from rockplan.ilp.blocks.decode import price as option_of
from rockplan.search.block_families import family_key, is_legal
from rockplan.search.incumbent import Incumbent
from rockplan.search.limits import Limits
from rockplan.search.pipeline import LEAST_PEAK, Stage, run
from rockplan.search.problem import Goal
from rockplan.values.block import OptionFamily
from rockplan.values.graph import CDGraph
from rockplan.values.order import Orders
from rockplan.values.progress import report
from rockplan.values.schedule import Schedule, with_frees

BYTES_PER_S, FLOPS_PER_S = 1e11, 4e12
"""Of the machine on which the smallest peak is looked for."""


@dataclass
class LeastPeak:
    """The schedule with the least peak of one problem: looked for when it is asked for first, kept
    in the cache, and no larger than that of any plan that was made (`reach`)."""

    goal: Goal
    without: frozenset[str] = frozenset()
    known: Incumbent | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.goal.budget_bytes is not None:
            raise ValueError("the least peak has no budget")
        self.known = self._stored()

    def find(self, limits: Limits) -> Incumbent:
        """The best of this search, and of earlier ones that were cut short."""
        if self.known is None or not self.known.is_complete:
            made = least_peak(self.goal, limits)
            known = self.known
            if known is not None and known.peak_bytes <= made.peak_bytes:
                made = replace(known, is_complete=made.is_complete, trace=made.trace)
            self._keep(made)
        assert self.known is not None
        return self.known

    def reach(self, schedule: Schedule) -> None:
        """A plan has this schedule: the smallest budget is no larger."""
        start = self.known or Incumbent(bound_ns=self.goal.graph.time_ns, is_complete=False)
        better = start.improved(self.goal, schedule)
        if better.schedule is not None and (
            start.schedule is None or better.peak_bytes < start.peak_bytes
        ):
            self._keep(better)

    def is_below(self, size_bytes: int) -> bool:
        """Is a schedule known that needs less?"""
        return self.known is not None and self.known.peak_bytes < size_bytes

    def _key(self) -> dict[str, str]:
        # What a search without some stages calls the least is not that of another one.
        settings = " ".join(("the least peak without", *sorted(self.without)))
        return family_key(problem_digest(self.goal.graph), settings)

    def _stored(self) -> Incumbent | None:
        graph, cache = self.goal.graph, self.goal.cache
        stored = cache.family(self._key(), functools.partial(is_legal, graph)) if cache else None
        if stored is None:
            return None
        option = stored.options[0]
        schedule = with_frees(graph, option.forward, option.backward)
        start = Incumbent(bound_ns=graph.time_ns, is_complete=stored.is_complete)
        return start.improved(self.goal, schedule)

    def _keep(self, made: Incumbent) -> None:
        self.known = made
        if self.goal.cache:
            assert made.schedule is not None
            option = option_of(self.goal.graph, Orders(*made.schedule.phases))
            family = OptionFamily((option,), solves=0, is_complete=made.is_complete)
            self.goal.cache.put_family(self._key(), family)


def least_peak(
    goal: Goal, limits: Limits, tuple_of_stages: Sequence[Stage] = LEAST_PEAK
) -> Incumbent:
    """Stages that see what was measured after all others, which go by the times of another
    machine."""
    report("looking for the smallest peak")
    there = replace(goal, graph=elsewhere(goal.graph))
    first = run([s for s in tuple_of_stages if not s.sees_measured], there, limits)
    start = Incumbent(bound_ns=goal.graph.time_ns, is_complete=first.is_complete)
    # Times and bounds of the other machine say nothing here.
    trace = tuple(replace(t, time_ns=None, bound_ns=start.bound_ns) for t in first.trace)
    here = replace(start.improved(goal, first.schedule), trace=trace)
    return run([s for s in tuple_of_stages if s.sees_measured], goal, limits, here)


def elsewhere(graph: CDGraph) -> CDGraph:
    """The graph with the times of the machine on which the smallest peak is looked for."""
    times = [n.time_ns for n in price(graph, roofline(graph, BYTES_PER_S, FLOPS_PER_S)).nodes]
    return replace(graph, nodes=tuple(replace(n, time_ns=times[n.index]) for n in graph.nodes))
