"""Rules of memory live once: a made-up one, written into `GraphView` alone, holds everywhere.

Here each storage takes a multiple of 512 bytes. What `simulate` finds is by that rule then, and
what planners make of it is judged by `simulate`, and by exhaustive searches.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rockplan.dp.chain_solver import ChainSolver
from rockplan.ilp.blocks.pareto_search import Settings, option_family
from rockplan.ilp.whole_graph.refine import proved_ns, refined
from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.lifetimes import alive_at, lifetimes
from rockplan.oracles.simulate import simulate, timeline
from rockplan.search.local.editable_schedule import Draft
from rockplan.search.local.exchange import ExchangeLimits, exchanged, squeezed
from rockplan.search.local.greedy_eviction import thriftiest, within
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Compute, keep_all
from testing.exhaustive import Exhaustive, assert_agrees, listing_bits
from testing.graphs import (
    Ranges,
    random_block,
    random_chain,
    random_graph,
    random_schedule,
    with_random_takes,
)

PACKAGE = Path(__file__).parent.parent / "rockplan"
ROOM = 512
RANGES = Ranges(max_size_bytes=1500, random_percent=30, max_rng_state_bytes=600)


@pytest.fixture(autouse=True)
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one place that says what a storage weighs says something else."""

    plain = GraphView.sizes.func  # type: ignore[attr-defined]

    def sizes(view: GraphView) -> tuple[int, ...]:
        return tuple(-(-size // ROOM) * ROOM for size in plain(view))

    monkeypatch.setattr(GraphView, "sizes", property(sizes))


def graphs(count: int, nodes: int) -> Iterator[tuple[random.Random, CDGraph]]:
    for seed in range(count):
        rng = random.Random(seed)
        graph = random_graph(rng, rng.randint(2, nodes), RANGES)
        yield rng, with_random_takes(rng, graph) if seed % 2 else graph


def test_drafts_and_lifetimes_weigh_what_the_simulator_weighs() -> None:
    rounded_up = 0
    for rng, graph in graphs(30, 8):
        least = thriftiest(graph).schedule
        during = [step.during_bytes for step in timeline(graph, least)]
        computing = [b for b, e in zip(during, least.events, strict=True) if isinstance(e, Compute)]
        assert Draft(graph, *least.phases).during_bytes() == computing
        schedule = random_schedule(rng, graph)
        found = lifetimes(graph, schedule)
        for position, step in enumerate(timeline(graph, schedule)):
            alive = alive_at(found, position)
            assert sum(lifetime.size_bytes for lifetime in alive) == step.during_bytes
        rounded_up += any(size % ROOM for size in (d.size_bytes for d in graph.data))
        assert not any(size % ROOM for size in GraphView(graph).sizes)
    assert rounded_up == 30


def test_local_searches_keep_budgets_by_the_rule() -> None:
    shorter = 0
    for _, graph in graphs(30, 8):
        everything = keep_all(graph)
        most_bytes = simulate(graph, everything).peak_bytes
        least = thriftiest(graph).schedule
        least_bytes = simulate(graph, least).peak_bytes
        smaller = squeezed(graph, everything, limits=ExchangeLimits(effort=20_000))
        assert simulate(graph, smaller).peak_bytes <= most_bytes
        budget_bytes = (least_bytes + most_bytes) // 2
        for schedule in (within(graph, budget_bytes), least):
            if schedule is not None:
                faster = exchanged(
                    graph, schedule, budget_bytes, limits=ExchangeLimits(effort=5_000)
                )
                assert simulate(graph, faster).peak_bytes <= budget_bytes
                shorter += simulate(graph, faster).time_ns < simulate(graph, schedule).time_ns
    assert shorter >= 3


def test_integer_programs_find_the_rules_optimum() -> None:
    agreed = 0
    for seed in range(40):
        rng = random.Random(seed)
        graph = random_block(rng, rng.randint(2, 4), RANGES).problem
        if 2 <= listing_bits(graph) <= 9:
            assert_agrees(graph, rng)
            agreed += 1
    assert agreed >= 15


def test_bounds_hold_by_the_rule() -> None:
    tight = 0
    for _, graph in graphs(30, 3):
        for schedule in (thriftiest(graph).schedule, keep_all(graph)):
            budget_bytes = simulate(graph, schedule).peak_bytes
            fastest = Exhaustive(graph, budget_bytes, None, is_free=True, in_order=True)
            fastest_ns = fastest.fastest_ns()
            start = refined(graph, budget_bytes, deadline=math.inf)
            if start is None or fastest_ns is None:
                continue
            bound_ns = proved_ns(start, deadline=time.process_time() + 60)
            assert bound_ns <= fastest_ns
            tight += graph.time_ns < bound_ns == fastest_ns
    assert tight >= 3


def test_chains_keep_budgets_by_the_rule() -> None:
    again = 0
    for seed in range(12):
        rng = random.Random(seed)
        graph, blocks = random_chain(rng, (1, 2, 2), RANGES)
        settings = Settings(effort=1_500)
        families = [option_family(block.problem, settings=settings) for block in blocks]
        solver = ChainSolver(graph, blocks, families)
        most = simulate(graph, keep_all(graph))
        for share in (0.7, 0.85):
            found = solver.best_schedule(int(share * most.peak_bytes))
            if found is not None:
                assert simulate(graph, found).peak_bytes <= share * most.peak_bytes
                again += simulate(graph, found).time_ns > most.time_ns
    assert again >= 5


ASKED_OF_THE_GRAPH = re.compile(
    r"\.data\[[^]]*\]\.size_bytes|\bd\.size_bytes|\.rng_state_bytes|\bproducers\(|\breaders\(|\bmay_run_again\("
)

ALLOWED = {"adapt.py", "scaling.py"}
"""The first asks whether two nodes are the same, not what they weigh; the other makes a graph in
which what is tiny weighs nothing."""


@pytest.mark.parametrize("folder", ["search", "ilp", "dp"])
def test_planners_ask_the_view(folder: str) -> None:
    asked = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if path.name not in ALLOWED
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if ASKED_OF_THE_GRAPH.search(line)
    ]
    assert asked == []
