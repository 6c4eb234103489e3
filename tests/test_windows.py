"""Exact search: what it finds is legal and no slower, and of a small graph it is the optimum."""

from __future__ import annotations

import math
import random

import pytest

from rockplan import windows
from rockplan.eviction import thriftiest
from rockplan.graph import CDGraph
from rockplan.prune import pruned
from rockplan.schedule import Schedule
from rockplan.simulate import simulate
from rockplan.windows import searched
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


def found(graph: CDGraph, schedule: Schedule, budget_bytes: int) -> tuple[Schedule, int]:
    return searched(graph, schedule, budget_bytes, enough_ns=0, deadline=math.inf)


def test_a_small_graph_gets_its_fastest_schedule_with_the_proof() -> None:
    gains = costly = 0
    for seed in range(120):
        graph = draw(seed)
        if len(graph.nodes) > 12:
            continue
        start = thriftiest(graph)
        least = simulate(graph, start)
        budget_bytes = least.peak_bytes + random.Random(seed).choice((0, 1, 3))
        best, bound_ns = found(graph, start, budget_bytes)
        fastest = Exhaustive(graph, budget_bytes, None, is_free=True, in_order=True).fastest_ns()
        assert simulate(graph, best).peak_bytes <= budget_bytes
        assert simulate(graph, best).time_ns == bound_ns == fastest, seed
        gains += fastest < least.time_ns
        costly += fastest > graph.time_ns
    assert gains >= 10 and costly >= 20


@pytest.mark.parametrize("effort", [0, 3_000, 300_000])
def test_windows_of_a_larger_graph_gain_within_the_budget(
    effort: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "EFFORT", effort)
    monkeypatch.setattr(windows, "OF_WHOLE", effort)
    graph = attention_block()
    start = pruned(graph, thriftiest(graph), simulate(graph, thriftiest(graph)).peak_bytes)
    before = simulate(graph, start)
    best, bound_ns = found(graph, start, before.peak_bytes)
    after = simulate(graph, best)
    assert after.peak_bytes <= before.peak_bytes
    assert bound_ns <= after.time_ns <= before.time_ns
    assert (best, bound_ns) == found(graph, start, before.peak_bytes)


def test_nothing_is_searched_without_hope_or_time() -> None:
    graph = draw(0)
    start = thriftiest(graph)
    peak = simulate(graph, start)
    enough = searched(graph, start, peak.peak_bytes, enough_ns=peak.time_ns, deadline=math.inf)
    late = searched(graph, start, peak.peak_bytes, enough_ns=0, deadline=0.0)
    assert enough == (start, graph.time_ns)
    assert simulate(graph, late[0]).time_ns == peak.time_ns
    assert graph.time_ns <= late[1] <= peak.time_ns
