"""Exact search: what it finds is legal and no slower, and of a small graph it is the optimum."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from benchmarks.priced import prepared
from rockplan import Options, windows
from rockplan.eviction import thriftiest
from rockplan.graph import CDGraph
from rockplan.needs import fastest
from rockplan.prune import pruned
from rockplan.schedule import Schedule
from rockplan.simulate import simulate
from rockplan.windows import searched, searched_whole, within
from tests.exhaustive import Exhaustive
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


def test_a_small_graph_gets_its_fastest_schedule_with_the_proof() -> None:
    gains = costly = 0
    for seed in range(120):
        graph = without_room(draw(seed))
        if len(graph.nodes) > 12:
            continue
        start = thriftiest(graph)
        least = simulate(graph, start)
        budget_bytes = least.peak_bytes + random.Random(seed).choice((0, 1, 3))
        best, bound_ns = searched_whole(graph, start, budget_bytes, deadline=math.inf)
        fastest = Exhaustive(graph, budget_bytes, None, is_free=True, in_order=True).fastest_ns()
        assert simulate(graph, best).peak_bytes <= budget_bytes
        assert simulate(graph, best).time_ns == bound_ns == fastest, seed
        gains += fastest < least.time_ns
        costly += fastest > graph.time_ns
    assert gains >= 10 and costly >= 20


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
    """Where the room counts only in the last forward node, one of the searches uses it here."""
    room_bytes = 30
    graph = with_room(draw(seed), room_bytes)
    start = thriftiest(graph)
    budget_bytes = simulate(graph, start).peak_bytes
    forwards, proven_ns = searched_whole(graph, start, budget_bytes, deadline=math.inf)
    backwards, optimum_ns = fastest(graph, budget_bytes, deadline=math.inf)
    assert backwards is not None and optimum_ns == proven_ns > graph.time_ns
    for found in (forwards, backwards):
        assert simulate(graph, found).time_ns == optimum_ns
        assert simulate(graph, found).saved_bytes + room_bytes <= budget_bytes


@pytest.mark.parametrize("effort", [0, 3_000, 300_000])
def test_a_larger_graph_gains_within_the_budget(
    effort: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "EFFORT", effort)
    monkeypatch.setattr(windows, "OF_WHOLE", effort)
    graph = attention_block()
    start = pruned(graph, thriftiest(graph), simulate(graph, thriftiest(graph)).peak_bytes)
    before = simulate(graph, start)

    def in_windows() -> Schedule:
        return searched(graph, start, before.peak_bytes, enough_ns=0, deadline=math.inf)

    def in_whole() -> tuple[Schedule, int]:
        return searched_whole(graph, start, before.peak_bytes, deadline=math.inf)

    (whole, bound_ns), part = in_whole(), in_windows()
    for best in (whole, part):
        after = simulate(graph, best)
        assert after.peak_bytes <= before.peak_bytes
        assert bound_ns <= after.time_ns <= before.time_ns
    assert (whole, bound_ns) == in_whole()
    assert part == in_windows()


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
    late, bound_ns = searched_whole(graph, start, peak.peak_bytes, deadline=0.0)
    assert simulate(graph, late).time_ns == peak.time_ns
    assert graph.time_ns <= bound_ns <= peak.time_ns


def test_a_search_is_given_up_amid_the_ways_to_make_room() -> None:
    """Which of many small storages go is a choice among more sets than memory holds."""
    graph = prepared("densenet", Options(cache=False)).constrained
    least = simulate(graph, thriftiest(graph))
    assert within(graph, least.peak_bytes * 21 // 20) is None


def test_a_search_that_rises_too_slowly_is_given_up_with_what_is_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows, "DOUBLINGS", 0)
    monkeypatch.setattr(windows, "NEAR", 0.0)
    given_up = 0
    for graph in map(draw, range(60)):
        start = thriftiest(graph)
        before = simulate(graph, start)
        if len(graph.nodes) > 12:
            continue
        monkeypatch.setattr(windows, "LOOKS", ())
        fastest, optimum_ns = searched_whole(graph, start, before.peak_bytes, deadline=math.inf)
        monkeypatch.setattr(windows, "LOOKS", (windows.OF_WHOLE, windows.OF_WHOLE // 4))
        found, bound_ns = searched_whole(graph, start, before.peak_bytes, deadline=math.inf)
        if (found, bound_ns) != (fastest, optimum_ns):
            given_up += 1
            assert found == start and bound_ns <= optimum_ns <= before.time_ns
    assert given_up >= 10
