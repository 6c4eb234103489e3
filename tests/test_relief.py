"""Relief: schedules with a smaller peak, legal, down to the least one of small graphs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from rockplan.search.relief import relieved

from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search import needs, relief
from rockplan.search.local.exchange import squeezed
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule, keep_all
from tests.graphs import Ranges, constrained_graph, random_chain, random_graph

RANGES = Ranges(pinned_percent=15)


def chain(rng: random.Random, ranges: Ranges) -> CDGraph:
    return random_chain(rng, (2, 3), ranges)[0]


def peak_bytes(graph: CDGraph, schedule: Schedule) -> int:
    return simulate(graph, schedule).peak_bytes


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("draw", [chain, constrained_graph])
def test_relieved_schedules_are_legal_and_need_no_more(
    draw: Callable[[random.Random, Ranges], CDGraph], seed: int
) -> None:
    graph = draw(random.Random(seed), RANGES)
    for before in (keep_all(graph), thriftiest(graph)):
        after = relieved(graph, before)
        verify(graph, after)
        assert peak_bytes(graph, after) <= peak_bytes(graph, before)
        assert after == relieved(graph, before)


def test_most_least_peaks_of_small_graphs_are_found_from_all_kept() -> None:
    """Those that the exact search proves."""
    least = total = 0
    for seed in range(40):
        graph = random_graph(random.Random(seed), 5, RANGES)
        proven = needs.thriftiest(graph)
        assert proven is not None
        found = peak_bytes(graph, relieved(graph, keep_all(graph)))
        assert found >= peak_bytes(graph, proven)
        least += found == peak_bytes(graph, proven)
        total += 1
    assert least >= 0.8 * total, least


def larger(seed: int) -> CDGraph:
    return random_graph(random.Random(seed), 16, RANGES)


def exchanged(graph: CDGraph) -> Schedule:
    return squeezed(graph, thriftiest(graph), effort=200_000)


@pytest.mark.parametrize("seed", [21, 27, 35, 37])
def test_relief_leads_below_where_exchanges_end(seed: int) -> None:
    graph = larger(seed)
    before = exchanged(graph)
    assert peak_bytes(graph, relieved(graph, before)) < peak_bytes(graph, before)


def test_something_else_goes_first_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that peaks are larger, taken together."""
    graphs = [larger(seed) for seed in range(60)]
    with_others = [peak_bytes(g, relieved(g, keep_all(g))) for g in graphs]
    lightened = relief._Relief._lightened

    def alone(
        self: relief._Relief, steps: list[int], at: int, over_bytes: float, *, is_first: bool
    ) -> list[int] | None:
        return lightened(self, steps, at, over_bytes, is_first=is_first) if is_first else None

    monkeypatch.setattr(relief._Relief, "_lightened", alone)
    without = [peak_bytes(g, relieved(g, keep_all(g))) for g in graphs]
    assert sum(with_others) < sum(without)


def test_at_the_deadline_relief_ends() -> None:
    graph = larger(21)
    kept = keep_all(graph)
    assert relieved(graph, kept, deadline=time.monotonic()) is kept


def test_effort_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relief, "OF_ONE", 0)
    graph = larger(21)
    assert relieved(graph, keep_all(graph)) == keep_all(graph)
