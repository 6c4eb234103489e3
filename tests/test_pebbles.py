"""No schedule has a smaller peak than the bound, which sees what has to be alive together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from benchmarks.bounds.pebbles import Pinches, pebbled_peak_bytes
from benchmarks.bounds.program import ProofFacts, alive_before
from benchmarks.bounds.prove import without_small
from rockplan.oracles.simulate import simulate
from rockplan.search.local.exchange import ExchangeLimits, squeezed
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.graph import CDGraph, ComputeNode, DataKind, DataNode, Phase
from rockplan.values.order import Orders
from rockplan.values.schedule import keep_all, with_frees
from testing.exhaustive import Exhaustive, stage_schedules
from testing.graphs import (
    Ranges,
    random_chain,
    random_graph,
    random_schedule,
    with_more_held,
    with_random_takes,
)

RANGES = Ranges(pinned_percent=0)
WITH_PINNED = Ranges(pinned_percent=40)
QUICK = ExchangeLimits(effort=3000)


def draw(seed: int, ranges: Ranges = RANGES) -> CDGraph:
    rng = random.Random(seed)
    graph = random_graph(rng, 3, ranges) if seed % 2 else random_chain(rng, (1, 2), ranges)[0]
    return with_random_takes(rng, graph) if seed % 3 == 0 else graph


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_goes_below(seed: int) -> None:
    """Also where games are about one or two storages, and the others count by a cut."""
    graph = draw(seed, WITH_PINNED)
    most_bytes = simulate(graph, keep_all(graph)).peak_bytes
    for storages in (1, 2, 3):
        assert not fits(graph, pebbled_peak_bytes(graph, most_bytes, storages=storages) - 1)


@pytest.mark.parametrize("seed", range(12))
def test_what_the_caller_holds_stays(seed: int) -> None:
    graph = with_more_held(random.Random(seed), draw(2 * seed + 1))
    most_bytes = simulate(graph, keep_all(graph)).peak_bytes
    for storages in (2, 16):
        assert not fits(graph, pebbled_peak_bytes(graph, most_bytes, storages=storages) - 1)


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_that_is_known_goes_below(seed: int) -> None:
    graph = draw(seed)
    peaks = [found.peak_bytes for _, found in stage_schedules(graph)]
    peaks.append(simulate(graph, thriftiest(graph).schedule).peak_bytes)
    peaks.append(simulate(graph, squeezed(graph, keep_all(graph), limits=QUICK)).peak_bytes)
    bound_bytes = pebbled_peak_bytes(graph, max(peaks))
    assert bound_bytes <= min(peaks)
    assert not fits(graph, bound_bytes - 1)


def test_it_is_mostly_the_least_peak() -> None:
    """Beside what is looked at, what runs only once counts."""
    graphs = [draw(seed) for seed in range(60)]
    assert all(graph.handed for graph in graphs)
    peaks = [simulate(graph, thriftiest(graph).schedule).peak_bytes for graph in graphs]
    bounds = [pebbled_peak_bytes(g, most) for g, most in zip(graphs, peaks, strict=True)]
    assert sum(map(fits, graphs, bounds)) >= 0.75 * len(graphs)


def test_somewhere_no_more_than_a_pinch_is_held() -> None:
    """In every schedule within the budget: those of stages, and ones drawn at random; also where
    the game leaves small storages out."""
    narrow = 0
    for seed in range(40):
        rng = random.Random(seed)
        graph = draw(seed, WITH_PINNED)
        if seed % 4 == 3:
            graph = with_more_held(rng, graph)
        facts = ProofFacts(graph)
        drawn = [random_schedule(rng, graph) for _ in range(8)]
        staged = [with_frees(graph, s.forward, s.backward) for s, _ in stage_schedules(graph)]
        for schedule in (*drawn, thriftiest(graph).schedule, *staged):
            budget_bytes = simulate(graph, schedule).peak_bytes
            pinches = Pinches(graph, budget_bytes)
            coarse = Pinches(without_small(graph, rng.randint(1, 9)), budget_bytes)
            for end, states in between_first_executions(graph, Orders(*schedule.phases)):
                for pinch in (*pinches.before(end), *coarse.before(end)):
                    beside = [facts.beside_bytes(there, pinch) for there in states]
                    assert min(beside) <= pinch.room_bytes
                    narrow += max(beside) > pinch.room_bytes
    assert narrow >= 40


def between_first_executions(
    graph: CDGraph, found: Orders
) -> Iterator[tuple[int, list[frozenset[int]]]]:
    """Before each first execution but the first one: what is alive after the one before it, and
    before each computation from there on."""
    alive = alive_before(ProofFacts(graph), found)
    turn = len(found.forward)
    at = [place for place, first in enumerate(found.is_first) if first and place >= turn]
    for before, place in itertools.pairwise(at):
        yield found.computations[place], alive[before + 1 : place + 1]


def fits(graph: CDGraph, budget_bytes: int) -> bool:
    """Of all schedules with first executions in the order of the graph, does any?"""
    found = Exhaustive(graph, budget_bytes, None, is_free=True, in_order=True)
    return budget_bytes >= 0 and found.fastest_ns() is not None


def test_what_has_to_be_alive_together_is_found() -> None:
    """A node that reads two results of two operands each: the first waits for the second. No node
    needs more than 12 bytes by itself."""
    kinds = [DataKind.INPUT, DataKind.ACTIVATION, *[DataKind.GRADIENT] * 7]
    sizes = [1, 0, *[4] * 7]
    data = tuple(
        DataNode(i, f"d{i}", *pair) for i, pair in enumerate(zip(kinds, sizes, strict=True))
    )
    reads = [(0,), (0,), (0,), (2, 3), (0,), (0,), (5, 6), (4, 7)]
    nodes = tuple(
        ComputeNode(i, f"n{i}", Phase.BACKWARD if i else Phase.FORWARD, r, (i + 1,), time_ns=1)
        for i, r in enumerate(reads)
    )
    graph = CDGraph(data, nodes, outputs=(1,), held=(1,))
    found = simulate(graph, keep_all(graph)).peak_bytes
    assert pebbled_peak_bytes(graph, found) == found == 16
