"""Exact search backwards: the optimum of a small graph, or what is proven of it."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rockplan import Options, examples, needs, planning
from rockplan.budget import Budget
from rockplan.codegen import random_state
from rockplan.eviction import thriftiest
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.lower import lower
from rockplan.graph_builder.measure import roofline
from rockplan.needs import fastest
from rockplan.plan import Status
from rockplan.simulate import simulate
from tests.exhaustive import Exhaustive
from tests.test_windows import draw, without_room


def test_a_small_graph_gets_its_fastest_schedule_with_the_proof() -> None:
    costly = impossible = 0
    for seed in range(120):
        graph = without_room(draw(seed))
        if len(graph.nodes) > 12:
            continue
        least_bytes = simulate(graph, thriftiest(graph)).peak_bytes
        budget_bytes = max(least_bytes + random.Random(seed).choice((-1, 0, 1, 3)), 0)
        best, proven_ns = fastest(graph, budget_bytes, deadline=math.inf)
        exhaustive = Exhaustive(graph, budget_bytes, None, is_free=True, in_order=True)
        optimum_ns = exhaustive.fastest_ns()
        if best is None:
            assert optimum_ns is None, seed
            impossible += 1
            continue
        assert simulate(graph, best).peak_bytes <= budget_bytes
        assert simulate(graph, best).time_ns == proven_ns == optimum_ns, seed
        costly += proven_ns > graph.time_ns
    assert costly >= 20 and impossible >= 5


@pytest.mark.parametrize("effort", [1, 10, 30])
def test_what_is_given_up_proves_no_more_than_is_true(
    effort: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = 0
    for graph in map(draw, range(60)):
        least_bytes = simulate(graph, thriftiest(graph)).peak_bytes
        best, optimum_ns = fastest(graph, least_bytes, deadline=math.inf)
        with monkeypatch.context() as patch:
            patch.setattr(needs, "EFFORT", effort)
            found, proven_ns = fastest(graph, least_bytes, deadline=math.inf)
        if best is not None and found is None:
            given_up += 1
            assert graph.time_ns <= proven_ns <= optimum_ns
    assert given_up >= 10
    assert fastest(graph, least_bytes, deadline=0.0) == (None, graph.time_ns)


def test_the_smallest_budget_of_an_mlp_is_planned_at_the_proven_optimum() -> None:
    """53 operations; programs of moments left 76 % of an iteration open at the smallest budget."""
    model, args, kwargs = examples.mlp()
    lowered = lower(capture(model, args, kwargs), random_state.state_bytes(torch.device("cpu")))
    options = Options(cache=False)
    problem = planning.problem_of(lowered.graph, roofline(lowered.graph, 1e11, 2e12), options)
    smallest = planning.plan_anew(problem, Budget(is_minimum=True), options)
    more = Budget(size_bytes=smallest.budget_bytes * 7 // 6)
    for plan in (smallest, planning.plan_anew(problem, more, options)):
        assert plan.certificate.status is Status.OPTIMAL
        assert plan.certificate.bound_ns == plan.time_ns > problem.graph.time_ns
