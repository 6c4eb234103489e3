"""The stage formulation against a listing of all its schedules, priced by `simulate`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rockplan.ilp.blocks.decode import price, solve_stages
from rockplan.ilp.blocks.formulate import formulate
from rockplan.ilp.blocks.stages import find_stages
from rockplan.ilp.scaling import UNLIMITED, in_units
from rockplan.values.graph import CDGraph, DataKind, DataNode
from rockplan.values.order import Orders, keep_all_order, without_idle
from testing.exhaustive import assert_agrees, exact_model, listing_bits
from testing.graphs import (
    Ranges,
    attention_block,
    block_graphs,
    cd_graphs,
    graph_or_block,
    mlp_block,
    random_graph,
)

RANDOM_RANGES = Ranges(random_percent=60, max_rng_state_bytes=6, pinned_percent=15)


@pytest.mark.parametrize("ranges", [Ranges(), RANDOM_RANGES], ids=["default", "random"])
def test_optimum_is_that_of_the_listing(ranges: Ranges) -> None:
    graphs = [
        g for g in (graph_or_block(seed, ranges) for seed in range(90)) if 0 < listing_bits(g) <= 9
    ]
    assert len(graphs) >= 40
    for seed, graph in enumerate(graphs):
        assert_agrees(graph, random.Random(seed))


def test_transient_storages_cost_nothing() -> None:
    """The listing may keep them, the program may not; the optimum is the same."""
    graphs = []
    for seed in range(500):
        graph = graph_or_block(seed, Ranges(multi_output_percent=0), 6)
        if 8 <= listing_bits(graph) <= 12 and find_stages(in_units(graph, 0.0)).transient:
            graphs.append(graph)
    assert len(graphs) >= 10
    for seed, graph in enumerate(graphs[:10]):
        assert_agrees(graph, random.Random(seed))


def test_frees_at_the_start_of_backward_are_events() -> None:
    """Several outputs that the caller does not hold, and a tangent that nobody reads."""
    count = 0
    for seed in range(60):
        rng = random.Random(seed)
        graph = random_graph(rng, 3)
        made = [d for n in graph.forward for d in n.writes]
        unread = DataNode(len(graph.data), "unread", DataKind.TANGENT, rng.randint(1, 12))
        graph = replace(
            graph,
            data=(*graph.data, unread),
            outputs=tuple(sorted({*rng.sample(made, 2), made[-1]})),
            held=(),
        )
        if 0 < listing_bits(graph) <= 9:
            count += 1
            assert_agrees(graph, rng)
    assert count >= 20


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    graph=st.one_of(cd_graphs(7), block_graphs(7)), peak=st.floats(0.6, 1), saved=st.floats(0, 1)
)
def test_solutions_stay_within_their_budgets(graph: CDGraph, peak: float, saved: float) -> None:
    model = exact_model(graph)
    if model is None:
        return
    everything = price(graph, Orders(*keep_all_order(graph)))
    budgets = int(peak * everything.peak_bytes), int(saved * everything.saved_bytes)
    found = solve_stages(model, *budgets, time_limit_s=10, gap=0.0)
    if found.orders is not None:
        option = price(graph, found.orders)
        assert option.peak_bytes <= budgets[0]
        assert option.saved_bytes <= budgets[1]
        assert option.time_ns == found.bound_ns


def test_units_never_understate() -> None:
    """Sizes that share no divisor are rounded up, limits down."""
    rng = random.Random(0)
    for _ in range(20):
        graph = random_graph(rng, 6, Ranges(max_size_bytes=10**9, max_workspace_bytes=10**8))
        units = in_units(graph, tiny_share=0.0)
        sizes = [d.size_bytes for d in graph.data if not d.kind.resident]
        budget_bytes = sum(sizes) - 1
        assert sum(map(units.up, sizes)) > units.down(budget_bytes)
        assert units.up(sum(sizes)) <= 4 * 2**16


def test_tiny_storages_fit_their_reserve() -> None:
    """The problem with tiny storages needs at most their reserve more than without."""
    for problem in (mlp_block(), attention_block()):
        units = in_units(problem)
        names = {problem.data[d].name for d in units.tiny}
        assert names == {"mean", "rstd"}
        model = formulate(find_stages(units))
        found = solve_stages(model, UNLIMITED, 20_000_000, time_limit_s=60, gap=0.001)
        assert found.orders is not None
        with_tiny, without = price(problem, found.orders), price(units.graph, found.orders)
        assert 0 <= with_tiny.peak_bytes - without.peak_bytes <= units.reserve_bytes
        assert 0 <= with_tiny.saved_bytes - without.saved_bytes <= units.reserve_bytes


def test_idle_reexecutions_are_dropped() -> None:
    problem = mlp_block()
    orders = Orders(*keep_all_order(problem))
    backward = (0, 1, *orders.backward[:4], 5, *orders.backward[4:])
    idle = replace(orders, backward=backward)
    found = without_idle(problem, idle.forward, idle.backward)
    assert found == (orders.forward, (0, 1, *orders.backward))
