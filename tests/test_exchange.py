"""Exchanged schedules: legal, within the budget, no slower, the same on every run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.bounds.pebbles import pebbled_peak_bytes
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search.local.exchange import (
    ExchangeLimits,
    annealed,
    exchanged,
    fitted,
    pruned,
    squeezed,
)
from rockplan.search.local.greedy_eviction import thriftiest, within
from rockplan.values.graph import CDGraph
from rockplan.values.order import Orders, keep_all_order
from rockplan.values.schedule import keep_all
from testing.exhaustive import stage_schedules
from testing.graphs import (
    Ranges,
    assert_improved,
    constrained_graph,
    mlp_block,
    random_chain,
    random_graph,
)

QUICK = ExchangeLimits(effort=5_000)
RANGES = Ranges(pinned_percent=15)

Draw = Callable[[random.Random, Ranges], CDGraph]


def chain(rng: random.Random, ranges: Ranges) -> CDGraph:
    return random_chain(rng, (2, 3, 2), ranges)[0]


def eight_nodes(rng: random.Random, ranges: Ranges) -> CDGraph:
    return random_graph(rng, 8, ranges)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("draw", [chain, constrained_graph])
def test_exchanged_schedules_are_legal_and_no_slower(draw: Draw, seed: int) -> None:
    graph = draw(random.Random(seed), RANGES)
    least = thriftiest(graph).schedule
    low = simulate(graph, least).peak_bytes
    for budget_bytes in (low, low * 21 // 20, low * 6 // 5):
        before = within(graph, budget_bytes) or least
        for search in (annealed, exchanged):
            after = search(graph, before, budget_bytes, limits=QUICK)
            assert_improved(graph, before, after, budget_bytes)
            assert after == search(graph, before, budget_bytes, limits=QUICK)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("draw", [chain, constrained_graph])
def test_squeezed_schedules_are_legal_and_need_no_more(draw: Draw, seed: int) -> None:
    graph = draw(random.Random(seed), RANGES)
    before = keep_all(graph)
    after = squeezed(graph, before, limits=QUICK)
    verify(graph, after)
    assert simulate(graph, after).peak_bytes <= simulate(graph, before).peak_bytes
    assert after == squeezed(graph, before, limits=QUICK)


def test_squeezing_finds_most_least_peaks_of_small_graphs() -> None:
    """Of schedules that run forward nodes again only."""
    least = total = 0
    for seed in range(30):
        graph = random_graph(random.Random(seed), 3, RANGES)
        peaks = [found.peak_bytes for _, found in stage_schedules(graph)]
        found = simulate(graph, squeezed(graph, keep_all(graph), limits=QUICK))
        least += found.peak_bytes <= min(peaks)
        total += 1
    assert least >= 0.9 * total


@pytest.mark.parametrize(("draw", "seed"), [(constrained_graph, 4), (eight_nodes, 57)])
def test_least_peaks_that_only_exchanges_lead_to(draw: Draw, seed: int) -> None:
    """No schedule has a smaller one."""
    graph = draw(random.Random(seed), RANGES)
    everything = keep_all(graph)
    limits = replace(QUICK, effort=20_000)
    found_bytes = simulate(graph, squeezed(graph, everything, limits=limits)).peak_bytes
    assert found_bytes == pebbled_peak_bytes(graph, simulate(graph, everything).peak_bytes)
    alone = squeezed(graph, everything, limits=replace(limits, between=0))
    assert simulate(graph, alone).peak_bytes > found_bytes


def test_exchanges_find_most_optima_of_small_graphs() -> None:
    """From the schedule with the least peak; what is listed runs forward nodes again only."""
    optimal = total = 0
    for seed in range(30):
        graph = random_graph(random.Random(seed), 3, RANGES)
        points = [(found.peak_bytes, found.time_ns) for _, found in stage_schedules(graph)]
        least = thriftiest(graph).schedule
        low = simulate(graph, least).peak_bytes
        high = simulate(graph, keep_all(graph)).peak_bytes
        for budget_bytes in sorted({low, (low + high) // 2, high - 1} & set(range(low, high))):
            after = annealed(graph, least, budget_bytes, limits=QUICK)
            fitting = [t for p, t in points if p <= budget_bytes]
            optimal += simulate(graph, after).time_ns <= min(fitting, default=1 << 60)
            total += 1
    assert total >= 20
    assert optimal >= 0.9 * total


def test_room_is_made_or_nothing_is_returned() -> None:
    """`fitted` begins with more than the budget."""
    made = 0
    for seed in range(12):
        graph = chain(random.Random(seed), RANGES)
        everything = keep_all(graph)
        low, high = (
            simulate(graph, s).peak_bytes for s in (thriftiest(graph).schedule, everything)
        )
        for budget_bytes in {low, (low + high) // 2, high - 1}:
            found = fitted(graph, *everything.phases, budget_bytes, limits=QUICK)
            if found is not None:
                verify(graph, found)
                assert simulate(graph, found).peak_bytes <= budget_bytes
                made += 1
    assert made >= 20
    graph = mlp_block()
    orders = Orders(*keep_all_order(graph))
    assert fitted(graph, orders.forward, orders.backward, 1) is None
    least_bytes = simulate(graph, thriftiest(graph).schedule).peak_bytes
    assert fitted(graph, orders.forward, orders.backward, least_bytes * 6 // 5) is not None
    late = time.process_time() - 1
    assert (
        fitted(graph, orders.forward, orders.backward, least_bytes * 6 // 5, deadline=late) is None
    )


def test_exchanges_go_further_than_leaving_out() -> None:
    graph = random_graph(random.Random(5), 16, RANGES)
    least = thriftiest(graph).schedule
    low, high = (simulate(graph, s).peak_bytes for s in (least, keep_all(graph)))
    further = 0
    for budget_bytes in (low, (3 * low + high) // 4):
        assert annealed(graph, least, budget_bytes, deadline=time.process_time() - 1) is least
        hurried = pruned(graph, least, budget_bytes)
        after = annealed(graph, least, budget_bytes, limits=QUICK)
        further += simulate(graph, after).time_ns < simulate(graph, hurried).time_ns
    assert further >= 1


def test_other_rounds_leave_what_one_cannot() -> None:
    faster = 0
    for seed in (17, 22, 24, 28):
        graph = random_graph(random.Random(seed), 16, RANGES)
        least = thriftiest(graph).schedule
        low, high = (simulate(graph, s).peak_bytes for s in (least, keep_all(graph)))
        for budget_bytes in (low, (3 * low + high) // 4):
            once = exchanged(
                graph, least, budget_bytes, limits=replace(QUICK, rounds=0, most_rounds=0)
            )
            assert once == annealed(graph, least, budget_bytes, limits=QUICK)
            once_ns = simulate(graph, once).time_ns
            more = exchanged(graph, least, budget_bytes, limits=QUICK)
            faster += simulate(graph, more).time_ns < once_ns
            enough = exchanged(graph, least, budget_bytes, enough_ns=once_ns, limits=QUICK)
            assert enough == once
            late = time.process_time() - 1
            assert exchanged(graph, least, budget_bytes, deadline=late, limits=QUICK) is least
    assert faster >= 3
