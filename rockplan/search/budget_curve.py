"""The curve: plans along all budgets.

takes: a Problem, Options. returns: Curve. guarantees: each point is the plan for its budget.
"""

from __future__ import annotations

from rockplan.budget import Budget
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.search.minimum_peak import LeastPeak
from rockplan.search.planning import least_peak_of, plan_within, profile_source
from rockplan.search.problem import Problem
from rockplan.values.curve import Curve, CurvePoint, useful
from rockplan.values.plan import Plan
from rockplan.values.progress import part
from rockplan.values.schedule import keep_all


def curve_of(problem: Problem, options: Options) -> Curve:
    """Return time against memory: plans for the smallest budget and for up to POINTS - 1 others,
    from the peak of keep-all down in equal ratios (most changes where memory is short). Points that
    are no faster than one with less memory are left out."""
    graph = problem.constrained
    least = least_peak_of(problem, options)
    with part(f"plan 1 of {POINTS}"):
        smallest = plan_within(problem, Budget(is_minimum=True), options, least)
    least_bytes, most_bytes = smallest.budget_bytes, simulate(graph, keep_all(graph)).peak_bytes
    plans = [smallest]
    covered_bytes = most_bytes + 1
    for step in range(POINTS - 1, 0, -1):
        budget_bytes = round(least_bytes * (most_bytes / least_bytes) ** (step / (POINTS - 1)))
        if budget_bytes < covered_bytes:
            with part(f"plan {POINTS - step + 1} of {POINTS}"):
                plans.append(_settled(problem, budget_bytes, smallest, options, least))
            covered_bytes = plans[-1].budget_bytes
    return Curve(
        points=useful(
            CurvePoint(p.budget_bytes, p.saved_bytes, p.certificate, problem.graph.time_ns)
            for p in plans
        ),
        unplanned_bytes=problem.unplanned.peak_bytes,
        graph_digest=problem.graph_digest,
        profile_digest=problem.profile_digest,
        profile_source=profile_source(problem.profile),
    )


POINTS = 16
"""Budgets of a curve, each of which is planned."""

SPARE = 0.05
"""Share of a budget on the curve: a plan that leaves more unused is planned again within the bytes
it needs. (On two layers of a transformer plans leave 1 to 3 %, and stay the same then.)"""


def _settled(
    problem: Problem, budget_bytes: int, smallest: Plan, options: Options, least: LeastPeak
) -> Plan:
    """As long as a plan leaves more than SPARE unused, ask again for the bytes that it needs;
    `smallest`, the plan for the smallest budget, ends that."""
    while budget_bytes > smallest.budget_bytes:
        plan = plan_within(problem, Budget(size_bytes=budget_bytes), options, least)
        if plan.peak_bytes >= (1 - SPARE) * budget_bytes:
            return plan
        budget_bytes = plan.peak_bytes
    return smallest
