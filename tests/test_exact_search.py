"""Exact search of benchmarks: the optimum of a small graph, or what is proven of it."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks import exact_search
from benchmarks.exact_search import EFFORT, Search
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import keep_all
from testing.exhaustive import Exhaustive
from testing.graphs import varied_graph, with_room


def least_bytes(graph: CDGraph) -> int:
    """Of schedules by eviction."""
    return simulate(graph, thriftiest(graph).schedule).peak_bytes


def test_small_graphs_get_their_proven_fastest_schedule() -> None:
    costly = impossible = 0
    for seed in range(60):
        graph = with_room(varied_graph(seed), 0)
        if len(graph.nodes) > 10:
            continue
        budget_bytes = max(least_bytes(graph) + random.Random(seed).choice((-1, 0, 1, 3)), 0)
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
    assert costly >= 10 and impossible >= 3


def test_what_must_be_spent_before_changes_no_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known of some first executions, at a few states each."""
    monkeypatch.setattr(exact_search, "OF_LEVEL", 20)
    learned = impossible = 0
    for seed in range(60):
        graph = with_room(varied_graph(seed), 20 if seed % 3 == 0 else 0)
        budget_bytes = max(least_bytes(graph) + random.Random(seed).choice((-1, 0, 1, 3)), 0)
        plain = Search(graph, budget_bytes)
        steps = plain.steps_within(EFFORT, math.inf)
        if steps is None and plain.queue:
            continue
        search = Search(graph, budget_bytes)
        best = search.fastest(EFFORT, deadline=math.inf)
        learned += any(search.spent_ns)
        if steps is None:
            assert best is None, seed
            impossible += 1
            continue
        assert best is not None and simulate(graph, best).peak_bytes <= budget_bytes
        assert simulate(graph, best).time_ns == search.proven_ns == plain.proven_ns, seed
        # From the end on no less is known of positions than before them, and no more than is so.
        assert search.spent_ns == sorted(search.spent_ns)
        assert search.spent_ns[-1] <= plain.proven_ns - plain.once_ns
    assert learned >= 7 and impossible >= 5


def test_only_what_is_faster_is_found() -> None:
    costly = 0
    for graph in map(varied_graph, range(30)):
        budget_bytes = least_bytes(graph)
        best = Search(graph, budget_bytes).fastest(EFFORT, deadline=math.inf)
        if best is None:
            continue
        best_ns = simulate(graph, best).time_ns
        for effort in (10, EFFORT):
            search = Search(graph, budget_bytes)
            for more_ns in (5, 0):
                found = search.fastest(effort, deadline=math.inf, below_ns=best_ns + more_ns)
                assert search.proven_ns <= best_ns
                if effort == EFFORT:
                    assert search.proven_ns == best_ns
                    assert (found is None) == (more_ns == 0)
                if found is not None:
                    assert simulate(graph, found).time_ns == best_ns
        costly += best_ns > graph.time_ns
    assert costly >= 5


def test_what_is_given_up_proves_nothing_false() -> None:
    given_up = 0
    for graph in map(varied_graph, range(40)):
        budget_bytes = least_bytes(graph)
        best = Search(graph, budget_bytes).fastest(EFFORT, deadline=math.inf)
        if best is None:
            continue
        search = Search(graph, budget_bytes)
        if search.fastest(10, deadline=math.inf) is None:
            given_up += 1
            assert graph.time_ns <= search.proven_ns <= simulate(graph, best).time_ns
        assert search.fastest(EFFORT, deadline=math.inf) == best
        assert search.proven_ns == simulate(graph, best).time_ns
    assert given_up >= 10
    search = Search(graph, budget_bytes)
    assert search.fastest(EFFORT, deadline=0.0) is None
    assert search.proven_ns == graph.time_ns


def test_the_least_peak_is_proven_from_below() -> None:
    below_keep_all = 0
    for seed in range(40):
        graph = with_room(varied_graph(seed), 0)
        if len(graph.nodes) > 10:
            continue
        least = exact_search.thriftiest(graph)
        assert least is not None
        verify(graph, least)
        peak_bytes = simulate(graph, least).peak_bytes
        below = Exhaustive(graph, peak_bytes - 1, None, is_free=True, in_order=True)
        assert below.fastest_ns() is None, seed
        below_keep_all += peak_bytes < simulate(graph, keep_all(graph)).peak_bytes
    assert below_keep_all >= 5


@pytest.mark.parametrize("seed", [12, 24, 50, 61, 68, 887, 931, 1783, 1883, 2383])
def test_reruns_before_the_turn_leave_the_loss_room(seed: int) -> None:
    """Where the room counts only in the last forward node, the fastest schedule uses it here."""
    room_bytes = 30
    graph = with_room(varied_graph(seed), room_bytes)
    budget_bytes = least_bytes(graph)
    found = Search(graph, budget_bytes).fastest(EFFORT, deadline=math.inf)
    assert found is not None and simulate(graph, found).time_ns > graph.time_ns
    assert simulate(graph, found).saved_bytes + room_bytes <= budget_bytes
