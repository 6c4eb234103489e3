"""The full model, the reference of the stage formulation, against an exhaustive search."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.full_model import solve_full
from rockplan.ilp.blocks.decode import keep_all_orders, peak_bytes, price, solve_stages
from rockplan.ilp.blocks.families import option_family
from rockplan.ilp.blocks.formulate import formulate
from rockplan.ilp.blocks.pareto_search import Settings
from rockplan.ilp.blocks.stages import find_stages
from rockplan.ilp.highs import SolverStatus
from rockplan.ilp.scaling import UNLIMITED, in_units
from rockplan.values.graph import CDGraph, DataKind, may_run_again
from tests.exhaustive import Exhaustive
from tests.graphs import Ranges, cd_graphs, random_block, random_graph, with_more_held

RANDOM_RANGES = Ranges(random_percent=50, max_rng_state_bytes=5)


def draw(seed: int, ranges: Ranges, forward_nodes: int = 3) -> CDGraph:
    rng = random.Random(seed)
    size = rng.randint(2, forward_nodes)
    if seed % 2:
        return random_graph(rng, size, ranges)
    return random_block(rng, size, ranges).problem


def random_budgets(graph: CDGraph, rng: random.Random) -> tuple[int, int]:
    """At or just below what some good schedule needs."""
    options = option_family(graph).options
    peak = peak_bytes(rng.choice(options)) - rng.choice((0, 0, 1))
    return peak, rng.choice((UNLIMITED, rng.choice(options).saved_bytes - rng.choice((0, 0, 1))))


@pytest.mark.parametrize("ranges", [Ranges(), RANDOM_RANGES], ids=["default", "random"])
def test_optimum_is_that_of_an_exhaustive_search(ranges: Ranges) -> None:
    feasible = 0
    for seed in range(14):
        graph = draw(seed, ranges)
        units = in_units(graph, tiny_share=0.0)
        rng = random.Random(seed)
        for _ in range(3):
            peak, saved = random_budgets(graph, rng)
            expected = Exhaustive(graph, peak, saved).fastest_ns()
            found = solve_full(units, peak, saved, time_limit_s=60, gap=0.0)
            if expected is None:
                assert found.status is SolverStatus.INFEASIBLE
                continue
            feasible += 1
            assert found.status is SolverStatus.OPTIMAL
            assert found.orders is not None
            option = price(graph, found.orders)
            assert peak_bytes(option) <= peak
            assert option.saved_bytes <= saved
            assert option.time_ns == found.bound_ns == expected
    assert feasible >= 20


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=cd_graphs(4), peak=st.floats(0.7, 1), saved=st.floats(0, 1))
def test_never_slower_than_the_stage_formulation(graph: CDGraph, peak: float, saved: float) -> None:
    """Its class holds the other; so it is faster, or infeasible only with it."""
    units = in_units(graph, tiny_share=0.0)
    stages = find_stages(units)
    if not stages.stages:
        return
    everything = price(graph, keep_all_orders(graph))
    budgets = int(peak * peak_bytes(everything)), int(saved * everything.saved_bytes)
    staged = solve_stages(formulate(stages), *budgets, time_limit_s=30, gap=0.0)
    full = solve_full(units, *budgets, time_limit_s=30, gap=0.0)
    if staged.orders is not None:
        assert full.orders is not None
        assert price(graph, full.orders).time_ns <= price(graph, staged.orders).time_ns


def test_what_takes_no_time_and_no_memory_need_not_be_solved() -> None:
    """Nothing of the program is about a node that reads nothing that may go, and costs nothing."""
    weightless = 0
    for seed in range(20):
        graph = draw(seed, Ranges(random_percent=0))
        first = graph.nodes[0]
        data = [replace(d, size_bytes=0) if d.index in first.writes else d for d in graph.data]
        nodes = (replace(first, time_ns=0, workspace_bytes=0), *graph.nodes[1:])
        graph = replace(graph, nodes=nodes, data=tuple(data))
        weightless += may_run_again(graph).issuperset({0})
        peak = min(peak_bytes(o) for o in option_family(graph).options)
        found = solve_full(in_units(graph), peak, UNLIMITED, time_limit_s=60, gap=0.0)
        assert found.orders is not None
        expected = Exhaustive(graph, peak, UNLIMITED).fastest_ns()
        assert price(graph, found.orders).time_ns == expected
    assert weightless >= 10


def test_what_the_caller_holds_counts_to_the_end() -> None:
    """Tangents too: a search for the least peak asked for what did not fit again and again."""
    held_tangents = 0
    for seed in range(24):
        graph = with_more_held(random.Random(seed), draw(seed, Ranges(), 3))
        held_tangents += any(graph.data[d].kind is DataKind.TANGENT for d in graph.held)
        family = option_family(graph, settings=Settings(effort=2_000, time_limit_s=5.0))
        assert family.is_complete
        budget = min(peak_bytes(o) for o in family.options)
        for peak in (budget, budget + 3):
            found = solve_full(in_units(graph), peak, UNLIMITED, time_limit_s=30, gap=0.0)
            assert found.orders is not None
            option = price(graph, found.orders)
            assert peak_bytes(option) <= peak
            assert option.time_ns == Exhaustive(graph, peak, UNLIMITED).fastest_ns()
    assert held_tangents >= 6


def test_it_reaches_peaks_that_the_stage_formulation_does_not() -> None:
    """Some small problems need less memory if backward nodes run again."""
    helped = 0
    for seed in range(24):
        graph = draw(seed, Ranges(), 4)
        least = min(peak_bytes(o) for o in option_family(graph).options)
        found = solve_full(in_units(graph), least - 1, UNLIMITED, time_limit_s=30, gap=1.0)
        helped += found.orders is not None
    assert helped >= 2
