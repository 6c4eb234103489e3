"""Exchanged schedules: legal, within the budget, no slower, the same on every run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from rockplan.search.local.prune import pruned

from rockplan.ilp.whole_graph.pebbles import pebbled_peak_bytes
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search.local import exchange
from rockplan.search.local.exchange import annealed, annealed_again, squeezed
from rockplan.search.local.greedy_eviction import thriftiest, within
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule, keep_all
from tests.exhaustive import stage_schedules
from tests.graphs import (
    Ranges,
    assert_improved,
    constrained_graph,
    random_chain,
    random_graph,
)

EFFORT = 5_000
RANGES = Ranges(pinned_percent=15)
NEVER = float("inf")

Draw = Callable[[random.Random, Ranges], CDGraph]


def chain(rng: random.Random, ranges: Ranges) -> CDGraph:
    return random_chain(rng, (2, 3, 2), ranges)[0]


def eight_nodes(rng: random.Random, ranges: Ranges) -> CDGraph:
    return random_graph(rng, 8, ranges)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("draw", [chain, constrained_graph])
def test_exchanged_schedules_are_legal_within_budget_and_no_slower(draw: Draw, seed: int) -> None:
    graph = draw(random.Random(seed), RANGES)
    least = thriftiest(graph)
    low = simulate(graph, least).peak_bytes
    for budget_bytes in (low, low * 21 // 20, low * 6 // 5):
        before = within(graph, budget_bytes) or least
        after = annealed(graph, before, budget_bytes, deadline=NEVER, effort=EFFORT)
        assert_improved(graph, before, after, budget_bytes)
        assert after == annealed(graph, before, budget_bytes, deadline=NEVER, effort=EFFORT)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("draw", [chain, constrained_graph])
def test_squeezed_schedules_are_legal_and_need_no_more(draw: Draw, seed: int) -> None:
    graph = draw(random.Random(seed), RANGES)
    before = keep_all(graph)
    after = squeezed(graph, before, effort=EFFORT)
    verify(graph, after)
    assert simulate(graph, after).peak_bytes <= simulate(graph, before).peak_bytes
    assert after == squeezed(graph, before, effort=EFFORT)


def test_squeezing_finds_most_least_peaks_of_small_graphs() -> None:
    """Of schedules that run forward nodes again only."""
    least = total = 0
    for seed in range(30):
        graph = random_graph(random.Random(seed), 3, RANGES)
        peaks = [found.peak_bytes for _, found in stage_schedules(graph)]
        found = simulate(graph, squeezed(graph, keep_all(graph), effort=EFFORT))
        least += found.peak_bytes <= min(peaks)
        total += 1
    assert least >= 0.9 * total


@pytest.mark.parametrize(("draw", "seed"), [(constrained_graph, 4), (eight_nodes, 57)])
def test_least_peaks_that_only_exchanges_lead_to(
    draw: Draw, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No schedule has a smaller one."""
    graph = draw(random.Random(seed), RANGES)
    everything = keep_all(graph)
    found_bytes = simulate(graph, squeezed(graph, everything, effort=EFFORT)).peak_bytes
    assert found_bytes == pebbled_peak_bytes(graph, simulate(graph, everything).peak_bytes)
    monkeypatch.setattr(exchange, "EXCHANGES", 0)
    assert simulate(graph, squeezed(graph, everything, effort=EFFORT)).peak_bytes > found_bytes


def test_exchanges_find_most_optima_of_small_graphs() -> None:
    """From the schedule with the least peak; what is listed runs forward nodes again only."""
    optimal = total = 0
    for seed in range(30):
        graph = random_graph(random.Random(seed), 3, RANGES)
        points = [(found.peak_bytes, found.time_ns) for _, found in stage_schedules(graph)]
        least = thriftiest(graph)
        low = simulate(graph, least).peak_bytes
        high = simulate(graph, keep_all(graph)).peak_bytes
        for budget_bytes in sorted({low, (low + high) // 2, high - 1} & set(range(low, high))):
            after = annealed(graph, least, budget_bytes, deadline=NEVER, effort=EFFORT)
            fitting = [t for p, t in points if p <= budget_bytes]
            optimal += simulate(graph, after).time_ns <= min(fitting, default=1 << 60)
            total += 1
    assert total >= 20
    assert optimal >= 0.9 * total


def test_without_time_what_can_be_left_out_is_all_that_goes() -> None:
    graph = chain(random.Random(1), RANGES)
    least = thriftiest(graph)
    budget_bytes = simulate(graph, keep_all(graph)).peak_bytes
    after = annealed(graph, least, budget_bytes, deadline=time.monotonic() - 1)
    verify(graph, after)
    assert simulate(graph, after).time_ns <= simulate(graph, least).time_ns


def test_with_time_exchanges_go_further_than_leaving_out() -> None:
    graph = random_graph(random.Random(19), 10, RANGES)
    least = thriftiest(graph)
    low, high = (simulate(graph, s).peak_bytes for s in (least, keep_all(graph)))
    budget_bytes = (low + high) // 2
    assert annealed(graph, least, budget_bytes, deadline=time.monotonic() - 1) is least
    hurried = pruned(graph, least, budget_bytes)
    after = annealed(graph, least, budget_bytes, deadline=NEVER, effort=EFFORT)
    assert simulate(graph, after).time_ns < simulate(graph, hurried).time_ns


@pytest.mark.parametrize("seed", range(30))
def test_what_other_searches_find_is_legal_within_budget_and_no_slower(seed: int) -> None:
    graph = constrained_graph(random.Random(seed), RANGES)
    least = thriftiest(graph)
    low = simulate(graph, least).peak_bytes
    for budget_bytes in (low, low * 6 // 5):
        before = within(graph, budget_bytes) or least
        after = searched_again(graph, before, budget_bytes)
        assert_improved(graph, before, after, budget_bytes)
        assert after == searched_again(graph, before, budget_bytes)


def test_other_searches_leave_what_one_cannot() -> None:
    faster = 0
    for seed in range(80):
        graph = random_graph(random.Random(seed), 10, RANGES)
        least = thriftiest(graph)
        low, high = (simulate(graph, s).peak_bytes for s in (least, keep_all(graph)))
        for budget_bytes in (low, (3 * low + high) // 4):
            once = annealed(graph, least, budget_bytes, deadline=NEVER, effort=EFFORT)
            once_ns = simulate(graph, once).time_ns
            again_ns = simulate(graph, searched_again(graph, once, budget_bytes)).time_ns
            faster += again_ns < once_ns
            assert searched_again(graph, once, budget_bytes, enough_ns=once_ns) is once
            late = searched_again(graph, once, budget_bytes, deadline=time.monotonic() - 1)
            assert late is once
    assert faster >= 5


@pytest.mark.parametrize(("percent", "searches"), [(0, 0), (0.5, 2), (2.25, 5), (40, 8)])
def test_the_less_might_be_gained_the_fewer_searches_fail(
    percent: float, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = chain(random.Random(1), RANGES)
    once = thriftiest(graph)
    seeds: list[int] = []

    def without_gain(_: CDGraph, schedule: Schedule, *__: int, seed: int, **___: float) -> Schedule:
        seeds.append(seed)
        return schedule

    monkeypatch.setattr(exchange, "annealed", without_gain)
    found = simulate(graph, once)
    enough_ns = round(found.time_ns - percent / 100 * graph.time_ns)
    assert searched_again(graph, once, found.peak_bytes, enough_ns=enough_ns) is once
    assert seeds == list(range(1, searches + 1))


def searched_again(
    graph: CDGraph,
    before: Schedule,
    budget_bytes: int,
    *,
    enough_ns: int = 0,
    deadline: float = NEVER,
) -> Schedule:
    return annealed_again(
        graph, before, budget_bytes, enough_ns=enough_ns, deadline=deadline, effort=EFFORT
    )
