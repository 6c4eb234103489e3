"""In flight: the plan of a call of which several are between forward and backward at once, as in
the schedules of a pipeline.

takes: a Problem, a Budget, Options whose `in_flight` is k. returns: Plan. guarantees: its peak plus
k - 1 times its saved bytes, as `simulate` finds them, is within the budget. Raises InfeasibleBudget
if no such plan is found.

The saved bytes of a call count k times and its peak once, which a budget of one call cannot say.
For several limits of saved bytes, the fastest schedule within the remaining peak is searched, as
for a block of a step (`search.boundary`), and again for limits near the best one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rockplan.budget import MOST_BYTES, Budget
from rockplan.errors import InfeasibleBudget
from rockplan.options import Options
from rockplan.oracles.simulate import Simulation
from rockplan.search import planning
from rockplan.search.boundary import SHARES, bounded_option, option_within, thriftiest
from rockplan.search.minimum_peak import LeastPeak
from rockplan.search.problem import Problem
from rockplan.values.plan import Plan
from rockplan.values.progress import report
from rockplan.values.schedule import keep_all

FINE = 0.25
"""Limits beside the best one lie at 1, 2 and 3 times this share of the distance to the next one."""


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
    count = options.in_flight
    candidates = [plan for plan in _end_plans(problem, options, least) if plan is not None]
    smallest = min(candidates, key=lambda plan: needed_bytes(plan, count))
    size_bytes = budget.within(needed_bytes(problem.unplanned, count))
    if size_bytes is None:
        size_bytes = needed_bytes(smallest, count)
    fitting = [plan for plan in candidates if needed_bytes(plan, count) <= size_bytes]
    most_saving = max(candidates, key=lambda plan: plan.saved_bytes)
    if most_saving not in fitting:
        shares = [*SHARES, 1.0]
        found = [*_within(problem, most_saving.saved_bytes, shares, size_bytes, options)]
        if found:
            best = min(found, key=lambda pair: pair[1].time_ns)[0]
            i = shares.index(best)
            beside = (shares[j] for j in (i - 1, i + 1) if 0 <= j < len(shares))
            fine = [best + FINE * k * (other - best) for other in beside for k in (1, 2, 3)]
            found += _within(problem, most_saving.saved_bytes, fine, size_bytes, options)
        fitting += [plan for _, plan in found]
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


def _end_plans(
    problem: Problem, options: Options, least: LeastPeak | None
) -> Iterator[Plan | None]:
    """Yield the plans that keep everything, that keep nothing, and that have the least peak; None
    for one that is not legal."""
    graph = problem.constrained
    for schedule in (keep_all(graph), thriftiest(graph, options)):
        yield planning.plan_of(problem, schedule, MOST_BYTES)
    yield planning.plan_within(problem, Budget(is_minimum=True), options, least)


def _within(
    problem: Problem, saved_bytes: int, shares: list[float], size_bytes: int, options: Options
) -> Iterator[tuple[float, Plan]]:
    """For each of `shares`: limit what a call saves to that share of saved_bytes, and yield (share,
    fastest plan) if one is found whose calls in flight fit together into size_bytes."""
    constrained = replace(problem, graph=problem.constrained)
    graph = constrained.graph
    # The saved bytes of a plan include the returned results, those of an option do not.
    keep_all_option = bounded_option(graph, keep_all(graph))
    returned_bytes = saved_bytes - keep_all_option.saved_bytes
    for number, share in enumerate(shares):
        report("solving for several calls in flight", number, len(shares))
        limit_bytes = int(share * keep_all_option.saved_bytes)
        left_bytes = size_bytes - (options.in_flight - 1) * (limit_bytes + returned_bytes)
        if left_bytes <= 0:
            continue
        option = option_within(
            constrained, limit_bytes, min(left_bytes, keep_all_option.peak_bytes), options
        )
        plan = None if option is None else planning.plan_of(problem, option.schedule, MOST_BYTES)
        if plan is not None and needed_bytes(plan, options.in_flight) <= size_bytes:
            yield share, plan
