"""The lower bound never exceeds the fastest legal schedule, and says something on real blocks."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import exact_search
from benchmarks.bounds import prove
from benchmarks.bounds.prove import lower_bound_ns, peak_lower_bound_bytes
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.costs.estimate import roofline
from rockplan.graph_builder.costs.price import price as price_with
from rockplan.graph_builder.pipeline import lower
from rockplan.ilp.blocks.decode import price, proven_ns
from rockplan.ilp.blocks.pareto_search import Settings, option_family
from rockplan.ilp.highs import SolverStatus, solve
from rockplan.ilp.whole_graph.intervals import Facts
from rockplan.ilp.whole_graph.program import program
from rockplan.ilp.whole_graph.refine import proved_ns, refined
from rockplan.oracles.simulate import simulate
from rockplan.search.local.exchange import pruned
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.graph import CDGraph
from rockplan.values.order import Orders, keep_all_order
from rockplan.values.schedule import keep_all
from testing.exhaustive import Exhaustive
from testing.graphs import (
    Ranges,
    attention_block,
    mlp_block,
    random_block,
    random_graph,
    random_schedule,
    with_more_held,
)
from testing.priced import RATES
from tests.moments import random_moments


def draw(seed: int) -> CDGraph:
    rng = random.Random(seed)
    ranges = Ranges(random_percent=40, max_rng_state_bytes=5) if seed % 3 == 0 else Ranges()
    if seed % 4 == 1:
        return with_more_held(rng, random_graph(rng, rng.randint(2, 4), ranges))
    if seed % 2:
        return random_graph(rng, rng.randint(2, 4), ranges)
    return random_block(rng, rng.randint(2, 3), ranges).problem


def in_planning_ns(graph: CDGraph, budget_bytes: int) -> int:
    """What a plan would state, had it the time."""
    found = refined(graph, budget_bytes, deadline=math.inf)
    return graph.time_ns if found is None else proved_ns(found, deadline=time.process_time() + 60)


def test_no_legal_schedule_is_faster() -> None:
    """Against any re-executions: out of order, of backward nodes too, several times."""
    tight = planned_tight = costly = 0
    for seed in range(40):
        graph = draw(seed)
        rng = random.Random(seed)
        options = option_family(graph, settings=Settings(effort=2_000)).options
        for _ in range(2):
            budget = rng.choice(options).peak_bytes - rng.choice((0, 0, 1))
            fastest = Exhaustive(graph, budget, None, is_free=True, in_order=True).fastest_ns()
            if fastest is None:
                continue
            bound = lower_bound_ns(graph, budget, time_limit_s=60)
            planned = in_planning_ns(graph, budget)
            assert graph.time_ns <= bound <= fastest
            assert graph.time_ns <= planned <= fastest
            costly += fastest > graph.time_ns
            tight += fastest > graph.time_ns and bound == fastest
            planned_tight += fastest > graph.time_ns and planned == fastest
    assert costly >= 12
    assert tight >= costly // 3
    assert planned_tight >= costly // 3


def test_no_legal_schedule_beats_programs_at_moments() -> None:
    """In either phase, drawn at random, with the rows of spans that one moment split."""
    tight = costly = forward = 0
    for seed in range(60):
        graph, rng = draw(seed), random.Random(seed)
        facts = Facts(graph)
        option = rng.choice(option_family(graph, settings=Settings(effort=2_000)).options)
        budget = option.peak_bytes - rng.choice((0, 0, 1))
        fastest = Exhaustive(graph, budget, None, is_free=True, in_order=True).fastest_ns()
        if fastest is None:
            continue
        moments = random_moments(rng, facts)
        made = program(facts, moments, budget)
        found = solve(made.linear, time_limit_s=60, absolute_gap=0.0)
        assert found.status is SolverStatus.OPTIMAL
        bound = graph.time_ns + proven_ns(found.bound, graph.time_ns)
        assert solve(made.relaxed, time_limit_s=60, absolute_gap=0.0).bound <= found.bound + 1e-6
        assert bound <= fastest
        costly += fastest > graph.time_ns
        tight += fastest > graph.time_ns and bound == fastest
        forward += min(moments.ends) < len(graph.forward)
    assert forward >= 30
    assert costly >= 12
    assert tight >= 8


class Stacked(nn.Module):
    """Only the end of the forward phase is short of memory: all states at once, twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, states = x, []
        for _ in range(4):
            h = torch.sigmoid(h * x) * torch.tanh(h)
            states.append(h)
        return torch.stack(states, 1).softmax(1).sum(1)


def test_the_bound_knows_of_the_forward_phase() -> None:
    lowered = lower(capture(Stacked(), (torch.randn(64, 64, requires_grad=True),), {}), 0)
    profile = roofline(lowered.graph, RATES)
    graph = price_with(lowered.graph, profile)
    kept = simulate(graph, keep_all(graph))
    assert kept.peak_bytes == kept.forward_peak_bytes
    budget_bytes = int(0.7 * kept.peak_bytes)
    fastest = exact_search.Search(graph, budget_bytes).fastest(
        exact_search.EFFORT, deadline=math.inf
    )
    assert fastest is not None
    time_ns = simulate(graph, fastest).time_ns
    assert graph.time_ns < lower_bound_ns(graph, budget_bytes, time_limit_s=60) == time_ns
    assert graph.time_ns < in_planning_ns(graph, budget_bytes) == time_ns


def test_no_schedule_that_is_known_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a large share of the storages is left out at first."""
    tight = 0
    for seed in range(60):
        monkeypatch.setattr(prove, "SMALL", (0.005, 0.15, 0.4)[seed % 3])
        rng = random.Random(seed)
        graph = draw(seed)
        for schedule in (thriftiest(graph).schedule, random_schedule(rng, graph)):
            found = simulate(graph, pruned(graph, schedule, simulate(graph, schedule).peak_bytes))
            bound = lower_bound_ns(graph, found.peak_bytes, time_limit_s=60)
            assert bound <= found.time_ns
            tight += graph.time_ns < bound == found.time_ns
    assert tight >= 10


def test_no_legal_schedule_has_a_smaller_peak() -> None:
    above_single = 0
    for seed in range(40):
        graph = draw(seed)
        bound = peak_lower_bound_bytes(graph, time_limit_s=60)
        single = peak_lower_bound_bytes(graph, time_limit_s=0)
        assert single == max(Facts(graph).forced_bytes)
        assert single <= bound <= price(graph, Orders(*keep_all_order(graph))).peak_bytes
        below = Exhaustive(graph, bound - 1, None, is_free=True, in_order=True)
        assert below.fastest_ns() is None
        above_single += bound > single
    assert above_single >= 3


def test_bound_of_transformer_blocks() -> None:
    """Below every option's time at its own peak; above keep-all's where the budget is tight."""
    for problem in (mlp_block(), attention_block()):
        family = option_family(problem, settings=Settings(effort=4_000))
        for option in family.options[::4]:
            bound = lower_bound_ns(problem, option.peak_bytes, time_limit_s=60)
            assert problem.time_ns <= bound <= option.time_ns
        least = min(o.peak_bytes for o in family.options)
        assert lower_bound_ns(problem, least, time_limit_s=60) > problem.time_ns


def test_the_bound_knows_of_generator_states() -> None:
    """One layer of an encoder on CPU, whose states take 5056 bytes and most activations 8192."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    lowered = lower(capture(layer, (torch.randn(4, 16, 32),), {}), rng_state_bytes=5056)
    profile = roofline(lowered.graph, RATES)
    graph = price_with(lowered.graph, profile)
    budget_bytes = int(0.65 * simulate(graph, keep_all(graph)).peak_bytes)
    fastest = exact_search.Search(graph, budget_bytes).fastest(
        exact_search.EFFORT, deadline=math.inf
    )
    assert fastest is not None
    bound_ns = lower_bound_ns(graph, budget_bytes, time_limit_s=60)
    assert bound_ns == simulate(graph, fastest).time_ns
    without_states = replace(graph, rng_state_bytes=0)
    assert lower_bound_ns(without_states, budget_bytes, time_limit_s=60) < bound_ns


def test_without_need_the_bound_is_keep_all() -> None:
    problem = mlp_block()
    enough = price(problem, Orders(*keep_all_order(problem))).peak_bytes
    assert lower_bound_ns(problem, enough // 2, time_limit_s=0.0) == problem.time_ns
    assert lower_bound_ns(problem, enough, time_limit_s=60) == problem.time_ns
