"""Schedules by eviction: legal, within budget, mostly down to the least peak that there is."""

from __future__ import annotations

import random
import time

import pytest

from benchmarks.bounds.pebbles import pebbled_peak_bytes
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search.local.exchange import pruned, squeezed
from rockplan.search.local.greedy_eviction import thriftiest, within
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule, keep_all
from testing.exhaustive import Exhaustive
from testing.graphs import Ranges, attention_block, mlp_block, random_chain, random_graph

RANGES = Ranges(pinned_percent=15)


def draw(seed: int) -> CDGraph:
    rng = random.Random(seed)
    return random_graph(rng, 4, RANGES) if seed % 2 else random_chain(rng, (2, 3), RANGES)[0]


def eager_peak_bytes(graph: CDGraph) -> int:
    return simulate(graph, keep_all(graph)).peak_bytes


def check(graph: CDGraph, schedule: Schedule) -> None:
    verify(graph, schedule)
    computes = schedule.computes
    n_forward = len(graph.forward)
    assert computes[:n_forward] == tuple(range(n_forward))
    assert list(dict.fromkeys(computes)) == list(range(len(graph.nodes)))


def least_peak_bytes(graph: CDGraph) -> int:
    return simulate(graph, thriftiest(graph).schedule).peak_bytes


@pytest.mark.parametrize("seed", range(12))
def test_schedules_are_legal_and_within_budget(seed: int) -> None:
    graph = draw(seed)
    high = eager_peak_bytes(graph)
    least = thriftiest(graph).schedule
    check(graph, least)
    low = simulate(graph, least).peak_bytes
    assert low <= high
    for budget_bytes in (low, (low + high) // 2, high):
        found = within(graph, budget_bytes)
        if found is not None:
            check(graph, found)
            assert simulate(graph, found).peak_bytes <= budget_bytes


def test_searches_for_small_peaks_end_at_the_deadline() -> None:
    """With something that is found in no time."""
    late = time.process_time() - 1
    larger = 0
    for graph in map(draw, range(20)):
        found = thriftiest(graph, deadline=late)
        assert found.is_exhausted
        evicted = found.schedule
        check(graph, evicted)
        peak_bytes = simulate(graph, evicted).peak_bytes
        assert least_peak_bytes(graph) <= peak_bytes <= eager_peak_bytes(graph)
        larger += peak_bytes > least_peak_bytes(graph)
        assert squeezed(graph, evicted, deadline=late) is evicted
        assert pruned(graph, evicted, eager_peak_bytes(graph), deadline=late) is evicted
    assert larger < 5


def test_most_graphs_have_schedules_below_eagers_peak() -> None:
    """Down to the least peak that is found, where there is one below."""
    found = total = 0
    for graph in map(draw, range(40)):
        low, high = least_peak_bytes(graph), eager_peak_bytes(graph)
        for budget_bytes in {low, (low + high) // 2, high - 1} & set(range(low, high)):
            found += within(graph, budget_bytes) is not None
            total += 1
    assert total >= 60
    assert found >= 0.9 * total


@pytest.mark.parametrize(
    ("forward_nodes", "seed", "peak_bytes"),
    [
        pytest.param(4, 22, 43, id="a retried order"),
        pytest.param(6, 25, 71, id="by Sethi and Ullman, slightly"),
    ],
)
def test_least_peaks_of_graphs_needing_all_means(
    forward_nodes: int, seed: int, peak_bytes: int
) -> None:
    """No schedule of these needs less."""
    graph = random_graph(random.Random(seed), forward_nodes, RANGES)
    assert pebbled_peak_bytes(graph, eager_peak_bytes(graph)) == peak_bytes
    assert least_peak_bytes(graph) == peak_bytes


def test_the_least_peak_is_often_optimal() -> None:
    """Of any re-executions, in any order, forward nodes once in the forward phase or not."""
    exact = total = 0
    for seed in range(60):
        graph = random_graph(random.Random(seed), 3, RANGES)
        peak_bytes = simulate(graph, thriftiest(graph).schedule).peak_bytes
        below = Exhaustive(graph, peak_bytes - 1, None, is_free=True, in_order=True)
        exact += below.fastest_ns() is None
        total += 1
    assert exact >= 0.95 * total


def test_with_enough_memory_nothing_runs_again() -> None:
    for graph in (mlp_block(), attention_block()):
        found = within(graph, eager_peak_bytes(graph))
        assert found is not None
        assert simulate(graph, found).time_ns == graph.time_ns


def test_the_same_schedules_on_every_run() -> None:
    graph = attention_block()
    assert thriftiest(graph) == thriftiest(graph)
