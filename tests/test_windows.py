"""Exact search: what it finds is legal and no slower, and of a small graph it is the optimum."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from rockplan.search.local.prune import pruned
from rockplan.search.windows import searched

from benchmarks.priced import prepared
from rockplan import Options
from rockplan.oracles.simulate import simulate
from rockplan.search import windows
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule
from tests.graphs import (
    Ranges,
    attention_block,
    constrained_graph,
    random_block,
    random_graph,
    with_more_held,
    with_random_takes,
)

RANDOM = Ranges(random_percent=40, max_rng_state_bytes=5)


def draw(seed: int) -> CDGraph:
    rng = random.Random(seed)
    match seed % 4:
        case 0:
            return with_more_held(rng, random_graph(rng, rng.randint(2, 4), RANDOM))
        case 1:
            return with_random_takes(rng, random_graph(rng, rng.randint(2, 4)))
        case 2:
            return random_block(rng, rng.randint(2, 3), RANDOM).problem
        case _:
            return constrained_graph(rng)


def without_room(graph: CDGraph) -> CDGraph:
    """Without a caller's loss, of which exhaustive search knows nothing."""
    return with_room(graph, 0)


def with_room(graph: CDGraph, room_bytes: int) -> CDGraph:
    last = len(graph.forward) - 1
    nodes = [replace(n, workspace_bytes=room_bytes) if n.index == last else n for n in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


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
    graph = draw(0)
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
