"""In flight: the plan of a call of which several are between forward and backward at once, as in
the schedules of a pipeline.

takes: a Problem, a Budget, Options whose `in_flight` is k. returns: Plan. guarantees: its peak plus
k - 1 times its saved bytes, as `simulate` finds them, is within the budget. Raises InfeasibleBudget
if no such plan is found.

The saved bytes of a call count k times and its peak once, which a budget of one call cannot say.
For several limits of saved bytes, the fastest schedule within the remaining peak is searched, as
for a block of a step (`search.boundary`), and again for limits nearer and nearer to the best one,
all within one time limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from rockplan.budget import MOST_BYTES, Budget
from rockplan.errors import InfeasibleBudget
from rockplan.options import Options
from rockplan.oracles.simulate import Simulation
from rockplan.search import planning
from rockplan.search.boundary import bounded_option, option_within, thriftiest
from rockplan.search.minimum_peak import LeastPeak
from rockplan.search.problem import Problem
from rockplan.values.plan import Plan
from rockplan.values.progress import report
from rockplan.values.schedule import keep_all

SHARES = (0.0, 0.1, 0.2, 0.4, 0.6, 1.0)
"""The first limits, as shares of the bytes saved with everything kept."""

ROUNDS = 5
"""Rounds of limits: each after the first halves the distances beside the best one."""


def needed_bytes(one: Plan | Simulation, in_flight: int) -> int:
    """Return the bytes that so many calls like this one need at once, one of which runs."""
    return one.peak_bytes + (in_flight - 1) * one.saved_bytes


def plan_in_flight(
    problem: Problem, budget: Budget, options: Options, least: LeastPeak | None = None
) -> Plan:
    """Return the fastest plan found with which one call runs while `options.in_flight - 1` others
    wait between forward and backward, all within the budget. Raises InfeasibleBudget.

    A budget in percent is a share of what as many calls need that keep everything; the smallest
    budget is the least for which a plan is found. least: the search of the least peak, shared with
    other plans; None for a new one.
    """
    count, until = options.in_flight, time.process_time() + options.time_limit_s
    everything = planning.plan_of(problem, keep_all(problem.constrained), MOST_BYTES)
    assert everything is not None
    candidates = [everything]
    size_bytes = budget.within(needed_bytes(problem.unplanned, count))
    if size_bytes is None:
        candidates += _smallest_plans(problem, options, least)
        size_bytes = min(needed_bytes(plan, count) for plan in candidates)
    if needed_bytes(everything, count) > size_bytes:
        asked: tuple[float, ...] = SHARES
        tried, found = asked, dict[float, Plan]()
        for _ in range(ROUNDS):
            left = replace(options, time_limit_s=max(until - time.process_time(), 0.0))
            found |= _within(problem, everything.saved_bytes, asked, size_bytes, left)
            if not found:
                break
            i = tried.index(min(found, key=lambda share: found[share].time_ns))
            beside = tried[max(i - 1, 0) : i + 2]
            asked = tuple((a + b) / 2 for a, b in pairwise(beside))
            tried = tuple(sorted((*tried, *asked)))
        candidates += found.values()
        if not found and not budget.is_minimum:
            candidates += _smallest_plans(problem, options, least)
    fitting = [plan for plan in candidates if needed_bytes(plan, count) <= size_bytes]
    smallest = min(candidates, key=lambda plan: needed_bytes(plan, count))
    if not fitting:
        raise InfeasibleBudget(
            size_bytes,
            needed_bytes(smallest, count),
            f"that of one call, while {count - 1} more keep {smallest.saved_bytes} bytes each "
            f"(Options(in_flight={count}))",
            unplanned_bytes=needed_bytes(problem.unplanned, count),
        )
    fastest = min(fitting, key=lambda plan: plan.time_ns)
    return replace(fastest, budget_bytes=size_bytes, in_flight=count)


def _smallest_plans(problem: Problem, options: Options, least: LeastPeak | None) -> Iterator[Plan]:
    quarter = replace(options, time_limit_s=options.time_limit_s / 4)
    thrifty, _ = thriftiest(problem.constrained, quarter)
    if (plan := planning.plan_of(problem, thrifty, MOST_BYTES)) is not None:
        yield plan
    yield planning.plan_within(problem, Budget(is_minimum=True), quarter, least)


def _within(
    problem: Problem, saved_bytes: int, shares: Sequence[float], size_bytes: int, options: Options
) -> dict[float, Plan]:
    """Share of saved_bytes that a call may save -> fastest plan, if one is found whose calls in
    flight fit together into size_bytes. Each share has an equal part of the time that is left."""
    constrained = replace(problem, graph=problem.constrained)
    graph = constrained.graph
    # The saved bytes of a plan include the returned results, those of an option do not.
    keep_all_option = bounded_option(graph, keep_all(graph))
    returned_bytes = saved_bytes - keep_all_option.saved_bytes
    found: dict[float, Plan] = {}
    until = time.process_time() + options.time_limit_s
    for number, share in enumerate(shares):
        report("solving for several calls in flight", number, len(shares))
        limit_bytes = int(share * keep_all_option.saved_bytes)
        left_bytes = size_bytes - (options.in_flight - 1) * (limit_bytes + returned_bytes)
        if left_bytes <= 0:
            continue
        left_s = max(until - time.process_time(), 0.0) / (len(shares) - number)
        option = option_within(
            constrained,
            limit_bytes,
            min(left_bytes, keep_all_option.peak_bytes),
            replace(options, time_limit_s=left_s),
        )
        plan = None if option is None else planning.plan_of(problem, option.schedule, MOST_BYTES)
        if plan is not None and needed_bytes(plan, options.in_flight) <= size_bytes:
            found[share] = plan
    return found
