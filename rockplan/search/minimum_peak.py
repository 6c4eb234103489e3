"""The smallest budget: the schedule with the least peak that is found.

takes: a problem. returns: an Incumbent. guarantees: the schedule is legal; the same on every run
unless the deadline strikes: it uses the times of a reference machine, not measured ones, which
differ from run to run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rockplan.graph_builder.costs.estimate import Rates, roofline
from rockplan.graph_builder.costs.price import price
from rockplan.graph_builder.digests import problem_digest
from rockplan.ilp.blocks.decode import price as option_of
from rockplan.ilp.whole_graph.intervals import Facts
from rockplan.search.block_families import family_key, is_legal
from rockplan.search.incumbent import Incumbent
from rockplan.search.limits import Limits
from rockplan.search.pipeline import LEAST_PEAK, Stage, run
from rockplan.search.problem import Goal
from rockplan.values.block import OptionFamily
from rockplan.values.order import Orders
from rockplan.values.progress import report
from rockplan.values.schedule import Schedule, with_frees

REFERENCE = Rates(1e11, 4e12)
"""The reference machine, whose times the search for the smallest peak uses."""


@dataclass
class LeastPeak:
    """The schedule with the least peak of one problem: searched when it is first asked for, stored
    in the cache, and no larger than the peak of any plan that was made (`reach`)."""

    goal: Goal
    without: frozenset[str] = frozenset()
    known: Incumbent | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.goal.budget_bytes is not None:
            raise ValueError("the least peak has no budget")
        self.known = self._stored()

    def find(self, limits: Limits) -> Incumbent:
        """Return the schedule with the least peak that this search or an earlier one found;
        searches unless one was complete, and keeps the result, in the cache too."""
        if self.known is None or not self.known.is_complete:
            found = least_peak(self.goal, limits)
            known = self.known
            if known is not None and known.peak_bytes <= found.peak_bytes:
                found = replace(known, is_complete=found.is_complete, trace=found.trace)
            self._keep(found)
        assert self.known is not None
        return self.known

    def reach(self, schedule: Schedule) -> None:
        """Keep `schedule`, which a plan for some budget found, if its peak is smaller than the
        least known one."""
        start = self.known or Incumbent(bound_ns=self.goal.graph.time_ns, is_complete=False)
        better = start.improved(self.goal, schedule)
        if better.schedule is not None and (
            start.schedule is None or better.peak_bytes < start.peak_bytes
        ):
            self._keep(better)

    def is_below(self, size_bytes: int) -> bool:
        """True if a schedule is known whose peak is less than `size_bytes`."""
        return self.known is not None and self.known.peak_bytes < size_bytes

    def _key(self) -> dict[str, str]:
        # A search with fewer stages finds another least peak.
        settings = " ".join(("the least peak without", *sorted(self.without)))
        return family_key(problem_digest(self.goal.graph), settings)

    def _stored(self) -> Incumbent | None:
        """None if the cache has none that is legal for this graph."""
        graph, cache = self.goal.graph, self.goal.cache
        stored = cache.family(self._key(), functools.partial(is_legal, graph)) if cache else None
        if stored is None:
            return None
        option = stored.options[0]
        schedule = with_frees(graph, option.forward, option.backward)
        start = Incumbent(bound_ns=graph.time_ns, is_complete=stored.is_complete)
        return start.improved(self.goal, schedule)

    def _keep(self, incumbent: Incumbent) -> None:
        self.known = incumbent
        if self.goal.cache:
            assert incumbent.schedule is not None
            option = option_of(self.goal.graph, Orders(*incumbent.schedule.phases))
            family = OptionFamily((option,), solves=0, is_complete=incumbent.is_complete)
            self.goal.cache.put_family(self._key(), family)


def least_peak(goal: Goal, limits: Limits, stages: Sequence[Stage] = LEAST_PEAK) -> Incumbent:
    """Search the schedule with the smallest peak, or one near what every schedule needs (as near as
    `Limits.nearness`)."""
    report("looking for the smallest peak")
    forced_bytes = max(Facts(goal.graph).forced_bytes, default=0)
    enough_bytes = max(limits.enough_bytes, int(forced_bytes / (1 - limits.nearness)))
    limits = replace(limits, enough_bytes=enough_bytes)
    times = [n.time_ns for n in price(goal.graph, roofline(goal.graph, REFERENCE)).nodes]
    nodes = tuple(replace(n, time_ns=times[n.index]) for n in goal.graph.nodes)
    reference_goal = replace(goal, graph=replace(goal.graph, nodes=nodes))
    first = run(stages, reference_goal, limits)
    start = Incumbent(bound_ns=goal.graph.time_ns, is_complete=first.is_complete)  # trivial bound
    # Times and bounds of the reference machine mean nothing on this one.
    trace = tuple(replace(t, time_ns=None, bound_ns=start.bound_ns) for t in first.trace)
    return replace(start.improved(goal, first.schedule), trace=trace)
