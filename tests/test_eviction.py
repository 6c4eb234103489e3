"""Schedules by eviction: legal, within budget, mostly down to the least peak that there is."""

from __future__ import annotations

import random

import pytest

from rockplan.eviction import thriftiest, within
from rockplan.graph import CDGraph
from rockplan.schedule import Schedule, keep_all
from rockplan.simulate import simulate
from rockplan.verify import verify
from tests.exhaustive import Exhaustive
from tests.graphs import Ranges, attention_block, mlp_block, random_chain, random_graph

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


@pytest.mark.parametrize("seed", range(40))
def test_schedules_are_legal_and_within_budget(seed: int) -> None:
    graph = draw(seed)
    high = eager_peak_bytes(graph)
    least = thriftiest(graph)
    check(graph, least)
    low = simulate(graph, least).peak_bytes
    assert low <= high
    for budget_bytes in (low, (low + high) // 2, high):
        found = within(graph, budget_bytes)
        if found is not None:
            check(graph, found)
            assert simulate(graph, found).peak_bytes <= budget_bytes


def test_the_least_peak_is_often_the_least_there_is() -> None:
    """Of any re-executions, in any order, forward nodes once in the forward phase or not."""
    exact = total = 0
    for seed in range(60):
        graph = random_graph(random.Random(seed), 3, RANGES)
        peak_bytes = simulate(graph, thriftiest(graph)).peak_bytes
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
