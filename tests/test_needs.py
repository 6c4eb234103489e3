"""Exact search backwards: the optimum of a small graph, or what is proven of it."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rockplan import Options, examples, planning
from rockplan.budget import Budget
from rockplan.codegen import random_state
from rockplan.eviction import thriftiest
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.lower import lower
from rockplan.graph_builder.measure import roofline
from rockplan.needs import EFFORT, Search, within
from rockplan.plan import Status
from rockplan.simulate import simulate
from tests.exhaustive import Exhaustive
from tests.test_windows import draw, with_room, without_room


def test_a_small_graph_gets_its_fastest_schedule_with_the_proof() -> None:
    costly = impossible = 0
    for seed in range(120):
        graph = without_room(draw(seed))
        if len(graph.nodes) > 12:
            continue
        least_bytes = simulate(graph, thriftiest(graph)).peak_bytes
        budget_bytes = max(least_bytes + random.Random(seed).choice((-1, 0, 1, 3)), 0)
        search = Search(graph, budget_bytes)
        best = search.fastest(EFFORT, deadline=math.inf)
        exhaustive = Exhaustive(graph, budget_bytes, None, is_free=True, in_order=True)
        optimum_ns = exhaustive.fastest_ns()
        if best is None:
            assert optimum_ns is None, seed
            impossible += 1
            continue
        assert simulate(graph, best).peak_bytes <= budget_bytes
        assert simulate(graph, best).time_ns == search.proven_ns == optimum_ns, seed
        costly += search.proven_ns > graph.time_ns
    assert costly >= 20 and impossible >= 5


@pytest.mark.parametrize("effort", [1, 10, 30])
def test_what_is_given_up_proves_no_more_than_is_true_and_goes_on(effort: int) -> None:
    given_up = 0
    for graph in map(draw, range(60)):
        least_bytes = simulate(graph, thriftiest(graph)).peak_bytes
        best = Search(graph, least_bytes).fastest(EFFORT, deadline=math.inf)
        if best is None:
            continue
        search = Search(graph, least_bytes)
        if search.fastest(effort, deadline=math.inf) is None:
            given_up += 1
            assert graph.time_ns <= search.proven_ns <= simulate(graph, best).time_ns
        assert search.fastest(EFFORT, deadline=math.inf) == best
        assert search.proven_ns == simulate(graph, best).time_ns
    assert given_up >= 10
    search = Search(graph, least_bytes)
    assert search.fastest(EFFORT, deadline=0.0) is None
    assert search.proven_ns == graph.time_ns


def test_a_small_graph_has_a_schedule_down_to_its_least_peak() -> None:
    gains = 0
    for graph in map(without_room, map(draw, range(60))):
        start = thriftiest(graph)
        peak_bytes = simulate(graph, start).peak_bytes
        least_bytes = peak_bytes
        while (less := within(graph, least_bytes - 1)) is not None:
            assert simulate(graph, less).peak_bytes < least_bytes
            least_bytes = simulate(graph, less).peak_bytes
        gains += least_bytes < peak_bytes
        if len(graph.nodes) <= 12:
            below = Exhaustive(graph, least_bytes - 1, None, is_free=True, in_order=True)
            assert below.fastest_ns() is None
    assert gains >= 3


@pytest.mark.parametrize("seed", [12, 24, 50, 61, 68, 887, 931, 1783, 1883, 2383])
def test_what_runs_again_before_the_turn_leaves_the_loss_its_room(seed: int) -> None:
    """Where the room counts only in the last forward node, the fastest schedule uses it here."""
    room_bytes = 30
    graph = with_room(draw(seed), room_bytes)
    budget_bytes = simulate(graph, thriftiest(graph)).peak_bytes
    found = Search(graph, budget_bytes).fastest(EFFORT, deadline=math.inf)
    assert found is not None and simulate(graph, found).time_ns > graph.time_ns
    assert simulate(graph, found).saved_bytes + room_bytes <= budget_bytes


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
