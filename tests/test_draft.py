"""Drafts know the memory of every computation after any change, as the simulator finds it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from rockplan.errors import IllegalSchedule
from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import simulate, timeline
from rockplan.oracles.verify import verify
from rockplan.search.local.editable_schedule import EMPTY, Draft
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.graph import CDGraph, DataKind, movable
from rockplan.values.order import without_idle
from rockplan.values.schedule import Compute, with_frees
from testing.graphs import (
    Ranges,
    constrained_graph,
    random_graph,
    random_schedule,
    repeated_chain,
    with_random_takes,
)

SEEDS = range(12)
MUCH = 1 << 40
RANGES = Ranges(pinned_percent=15)


def draw(rng: random.Random) -> CDGraph:
    graph = random_graph(rng, 6, RANGES) if rng.random() < 0.5 else constrained_graph(rng, RANGES)
    return with_random_takes(rng, graph)


def check(graph: CDGraph, draft: Draft) -> None:
    """What the draft knows is what is simulated; what must not be kept is too much."""
    schedule = with_frees(graph, *draft.orders)
    try:
        verify(graph, schedule)
    except IllegalSchedule as error:
        assert "to be dropped" in str(error)
        assert draft.worst()[1] > MUCH
        return
    steps = zip(schedule.events, timeline(graph, schedule), strict=True)
    assert draft.during_bytes() == [s.during_bytes for e, s in steps if isinstance(e, Compute)]
    found = simulate(graph, schedule)
    assert draft.worst()[1] == found.peak_bytes
    assert draft.time_ns == found.time_ns


Start = Callable[[random.Random, CDGraph], tuple[tuple[int, ...], tuple[int, ...]]]


def thriftiest_phases(_: random.Random, graph: CDGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return thriftiest(graph).schedule.phases


def random_phases(rng: random.Random, graph: CDGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # What has to be dropped would have to be by chance.
    schedule = thriftiest(graph).schedule if graph.dropped else random_schedule(rng, graph)
    return without_idle(graph, *schedule.phases)


@pytest.mark.parametrize("start", [thriftiest_phases, random_phases])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("slots", [4, 64])
@pytest.mark.parametrize("seed", SEEDS)
def test_memory_is_the_simulators_after_every_change(
    seed: int, slots: int, moved: bool, start: Start
) -> None:
    """Few positions: all move apart again and again. moved: first executions, too. From random
    schedules: what runs again in the forward phase, too."""
    rng = random.Random(seed)
    graph = draw(rng)
    draft = Draft(graph, *start(rng, graph), movable(graph) if moved else frozenset(), slots)
    check(graph, draft)
    for _ in range(12):
        before, during = draft.orders, draft.during_bytes()
        changes = draft.changes
        change(draft, rng, start)
        check(graph, draft)
        check_gaps(draft)
        if rng.random() < 0.5:
            draft.undo(changes)
            assert (draft.orders, draft.during_bytes()) == (before, during)
            check_gaps(draft)


def change(draft: Draft, rng: random.Random, start: Start) -> None:
    """Makes a random storage again where it is next read, or leaves something out."""
    reruns = draft.reruns()
    if reruns and rng.random() < 0.5:
        draft.leave_out(rng.choice(reruns))
        return
    if draft.movable and rng.random() < 0.5 and hasten_any(draft, rng):
        return
    gaps = sorted({g for p in range(draft.boundary, draft.end) for g in gaps_around(draft, p)})
    if gaps:
        d, next_read = rng.choice(gaps)
        maker = draft.view.producer[d]
        delayed = draft.is_delayed(maker, next_read)
        count = draft.nodes.count(maker)
        draft.insert(draft.slot_before(next_read), maker)
        draft.delay(maker)
        came_later = draft.nodes.count(maker) == count
        # Of the first execution nothing may have been read before, in a schedule drawn at random.
        assert came_later == delayed or (came_later and start is random_phases)


def hasten_any(draft: Draft, rng: random.Random) -> bool:
    """Moves a random first execution to before a random other one; False if none can be."""
    used = [p for p, n in enumerate(draft.nodes) if n != EMPTY and p > draft.boundary]
    found = [(p, q, draft.hastened_bytes(p, q)) for q in used for p in used if p > q]
    can = [(p, q, bytes_) for p, q, bytes_ in found if bytes_ != 0]
    if not can:
        return False
    first, position, bytes_ = rng.choice(can)
    place = position - draft.nodes[:position].count(EMPTY)
    before = draft.during_bytes()[place]
    draft.hasten(first, position)
    assert draft.during_bytes()[place + 1] <= before - bytes_
    return True


def gaps_around(draft: Draft, position: int) -> list[tuple[int, int]]:
    data, next_read = draft.around(position)
    return list(zip(data.tolist(), next_read.tolist(), strict=True))


def check_gaps(draft: Draft) -> None:
    """Around all that runs, and beside it: the gaps that the order of computations has."""
    last_use: dict[int, int] = {}
    gaps: list[tuple[int, int, int]] = []
    used = [p for p, n in enumerate(draft.nodes) if n != EMPTY or p == draft.boundary]
    for position in used:
        node = draft.nodes[position]
        reads = draft.graph.outputs if node == EMPTY else draft.graph.nodes[node].reads
        for d in set(reads).intersection(GraphView(draft.graph).may_go):
            if position > draft.boundary:
                gaps.append((d, last_use[d], position))
            last_use[d] = position
        writes = () if node == EMPTY else draft.graph.nodes[node].writes
        last_use |= dict.fromkeys(writes, position)
    for position in sorted({q for p in used for q in (p, p + 1)}):
        expected = sorted((d, end) for d, start, end in gaps if start < position < end)
        assert gaps_around(draft, position) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_left_out_leaves_nothing_idle(seed: int) -> None:
    rng = random.Random(seed)
    graph = draw(rng)
    draft = Draft(graph, *thriftiest(graph).schedule.phases)
    while reruns := draft.reruns():
        budget_bytes = draft.worst()[1]
        position = rng.choice(reruns)
        seems_to_fit = draft.fits_without(position, budget_bytes)
        draft.leave_out(position)
        assert seems_to_fit or draft.worst()[1] > budget_bytes
        assert without_idle(graph, *draft.orders) == draft.orders


def test_many_storages_that_must_be_dropped() -> None:
    """2 ** 4 and more of them: what forbids them does not overflow."""
    rng = random.Random(0)
    graph, _ = repeated_chain(rng, 24)
    own = {d.index for d in graph.data if d.kind is DataKind.ACTIVATION} - {*graph.outputs}
    read_later = {d for node in graph.backward for d in node.reads} & own
    assert len(read_later) >= 24
    for count in range(1, len(read_later) + 1):
        constrained = replace(graph, dropped=tuple(sorted(read_later)[:count]))
        forward = tuple(n.index for n in graph.forward)
        backward = tuple(n.index for n in graph.backward)
        assert Draft(constrained, forward, backward).worst()[1] > MUCH
