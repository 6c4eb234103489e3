"""Exact search: what it finds is legal and no slower, and of a small graph it is the optimum."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rockplan.search.local.prune import pruned
from rockplan.search.windows import searched

from benchmarks.priced import prepared
from rockplan import Options
from rockplan.oracles.simulate import simulate
from rockplan.search import windows
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.schedule import Schedule
from tests.graphs import attention_block, small_graph


@pytest.mark.parametrize("effort", [0, 3_000, windows.EFFORT])
def test_a_larger_graph_gains_within_the_budget(
    effort: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_enough = effort == windows.EFFORT
    monkeypatch.setattr(windows, "EFFORT", effort)
    graph = attention_block()
    start = pruned(graph, thriftiest(graph), simulate(graph, thriftiest(graph)).peak_bytes)
    before = simulate(graph, start)

    def in_windows() -> Schedule:
        return searched(graph, start, before.peak_bytes, enough_ns=0, deadline=math.inf)

    best = in_windows()
    after = simulate(graph, best)
    assert after.peak_bytes <= before.peak_bytes
    assert after.time_ns <= before.time_ns
    assert (after.time_ns < before.time_ns) == is_enough
    assert best == in_windows()


def test_nothing_is_searched_without_hope_or_time() -> None:
    graph = small_graph(0)
    start = thriftiest(graph)
    peak = simulate(graph, start)
    enough = searched(graph, start, peak.peak_bytes, enough_ns=peak.time_ns, deadline=math.inf)
    assert enough == start
    timeless = replace(graph, nodes=tuple(replace(n, time_ns=0) for n in graph.nodes))
    assert searched(timeless, start, peak.peak_bytes, enough_ns=0, deadline=math.inf) == start
    late = searched(graph, start, peak.peak_bytes, enough_ns=0, deadline=0.0)
    assert simulate(graph, late).time_ns == peak.time_ns


def test_a_search_is_given_up_amid_the_ways_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of many small storages go is a choice among more sets than memory holds."""
    limit = 2_000
    monkeypatch.setattr(windows, "OF_ONE", limit)
    efforts: list[int] = []
    run = windows._Search.run

    def counted(search: windows._Search) -> list[int] | None:
        found = run(search)
        efforts.append(search.effort)
        return found

    monkeypatch.setattr(windows._Search, "run", counted)
    graph = prepared("densenet", Options(cache=False)).constrained
    start = thriftiest(graph)
    budget_bytes = simulate(graph, start).peak_bytes
    searched(graph, start, budget_bytes, enough_ns=0, deadline=math.inf)
    assert limit < max(efforts) < limit * 1.1
