"""Copies to the host are nodes like others: bytes go by order, time by the queues."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rockplan.errors import IllegalSchedule
from rockplan.graph_builder.digests import graph_digest, problem_digest
from rockplan.oracles.clock import clock
from rockplan.oracles.graph_rules import RULES, check
from rockplan.oracles.simulate import host_bytes, simulate, timeline
from rockplan.oracles.verify import verify
from rockplan.values.copies import HostLink, paged, with_copies, without_copies
from rockplan.values.graph import CDGraph, ComputeNode, DataKind, Queue, as_eager
from rockplan.values.schedule import Compute, Free, Schedule, keep_all, with_frees
from testing.graphs import gelu_of_product, random_graph, with_random_takes
from tests.paging import pageable_of

LINK = HostLink(1_000_000_000, 500_000_000)


def random_pages(seed: int) -> tuple[CDGraph, Schedule]:
    """A graph with copies, and a legal schedule in which each storage is kept, or paged, or made
    again by its copy more than once; stores and fetches stand wherever they may."""
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(2, 7))
    graph = with_random_takes(rng, graph) if seed % 2 else graph
    paged_graph = with_copies(graph, pageable_of(graph), LINK)
    forward = [n.index for n in paged_graph.forward if not n.optional]
    backward = [n.index for n in paged_graph.backward if not n.optional]
    for page in paged(paged_graph):
        if rng.random() < 0.3:
            continue
        nodes = paged_graph.nodes
        made = next(k for k, i in enumerate(forward) if page.data in nodes[i].writes)
        forward.insert(rng.randint(made + 1, len(forward)), page.store)
        reads = [k for k, i in enumerate(backward) if page.data in nodes[i].reads]
        fetched = sorted({rng.randint(0, k) for k in reads if rng.random() < 0.7})
        for position in reversed(fetched):
            backward.insert(position, page.fetch)
    return paged_graph, with_frees(paged_graph, forward, backward)


PAGES = [random_pages(seed) for seed in range(60)]


def test_copies_leave_the_rest_of_a_graph_alone() -> None:
    plain = gelu_of_product()
    graph = with_copies(plain, [2], LINK)
    check(RULES, graph, "with copies")
    rows = [" ".join(line.split()) for line in str(graph).splitlines()[3:5]]
    assert rows == [
        "2 forward store_h h -> host_h 64 B 64 ns copies out, optional",
        "3 backward fetch_h host_h -> h 64 B 128 ns copies in, optional",
    ]
    assert without_copies(graph) == plain
    assert without_copies(plain) is with_copies(plain, [], LINK) is plain
    assert graph.time_ns == plain.time_ns
    assert simulate(as_eager(graph), keep_all(as_eager(graph))) == simulate(
        as_eager(plain), keep_all(as_eager(plain))
    )
    assert keep_all(graph).computes == (0, 1, 4, 5)
    assert graph_digest(graph) != graph_digest(plain)
    assert problem_digest(graph) != problem_digest(plain)


def test_copies_stay_out_of_eagers_order() -> None:
    plain = replace(gelu_of_product(), eager_order=(0, 1, 3, 2))
    graph = with_copies(plain, [2], LINK)
    check(RULES, graph, "with copies")
    assert graph.eager_order == (0, 1, 5, 4)
    assert [n.name for n in as_eager(graph).nodes] == [n.name for n in as_eager(plain).nodes]
    assert without_copies(graph) == plain


def events(graph: CDGraph, schedule: Schedule) -> Iterator[tuple[int, ComputeNode]]:
    for position, event in enumerate(schedule.events):
        if isinstance(event, Compute):
            yield position, graph.nodes[event.node]


def live_bytes(graph: CDGraph, schedule: Schedule, kinds: set[DataKind]) -> list[int]:
    """Of storages of these kinds, after each event: no rule of memory but that."""
    alive: set[int] = set()
    counted: list[int] = []
    for position, event in enumerate(schedule.events):
        if position == schedule.forward_length:
            alive |= {d.index for d in graph.data if d.kind is DataKind.TANGENT}
        if isinstance(event, Compute):
            alive |= {*graph.nodes[event.node].writes}
        else:
            alive.discard(event.data)
        counted.append(sum(graph.data[d].size_bytes for d in alive if graph.data[d].kind in kinds))
    return counted


@pytest.mark.parametrize("seed", range(len(PAGES)))
def test_bytes_go_by_the_order_alone(seed: int) -> None:
    graph, schedule = PAGES[seed]
    verify(graph, schedule)
    there = {DataKind.ACTIVATION, DataKind.GRADIENT, DataKind.TANGENT}
    after = [step.after_bytes for step in timeline(graph, schedule)]
    if not any(n.random or n.takes for n in graph.nodes):
        assert after == live_bytes(graph, schedule, there)
    on_host = live_bytes(graph, schedule, {DataKind.HOST})
    found = simulate(graph, schedule)
    assert found.host_peak_bytes == max(on_host) == max(host_bytes(graph, schedule))
    slow = with_copies(without_copies(graph), [p.data for p in paged(graph)], HostLink(1, 1))
    assert simulate(slow, schedule).peak_bytes == found.peak_bytes
    assert simulate(slow, schedule).saved_bytes == found.saved_bytes


def finished_ns(graph: CDGraph, schedule: Schedule) -> tuple[int, dict[int, tuple[int, int]]]:
    """When all is done, and when each copy begins and ends: the longest path over what follows
    what, which knows no clock."""
    work: dict[tuple[str, int], tuple[int, list[tuple[str, int]]]] = {}
    last: dict[str, tuple[str, int] | None] = {"run": None, "out": None, "in": None}
    made: dict[int, tuple[str, int]] = {}
    opened: dict[int, int] = {}
    leaves: dict[int, int] = {}
    for position, node in events(graph, schedule):
        freed = {e.data for e in schedule.events[:position] if not isinstance(e, Compute)}
        for d in node.writes:
            if d not in opened or d in freed:
                born = [p for p, n in events(graph, schedule) if d in n.writes and p <= position]
                frees = [
                    p
                    for p, e in enumerate(schedule.events[:position])
                    if not isinstance(e, Compute) and e.data == d
                ]
                opened[d] = min(p for p in born if p > max(frees, default=-1))
        if node.queue is Queue.OUT:
            leaves[position] = opened[node.reads[0]]

    def add(kind: str, position: int, time_ns: int, after: list[tuple[str, int]]) -> None:
        before = last[kind]
        work[kind, position] = time_ns, [*after, *([before] if before else [])]
        last[kind] = kind, position

    for position, node in events(graph, schedule):
        reads = [made[d] for d in node.reads if d in made]
        if node.queue is Queue.IN:
            room = last["run"]
            add("in", position, node.time_ns, [*reads, *([room] if room else [])])
            made.update(dict.fromkeys(node.writes, ("in", position)))
        else:
            waits = [("out", position)] if node.queue is Queue.OUT else []
            time_ns = 0 if node.queue is Queue.OUT else node.time_ns
            add("run", position, time_ns, [*reads, *waits])
            made.update(dict.fromkeys(node.writes, ("run", position)))
        for store, maker in sorted(leaves.items()):
            if maker == position:
                event = schedule.events[store]
                assert isinstance(event, Compute)
                source = made[graph.nodes[event.node].reads[0]]
                add("out", store, graph.nodes[event.node].time_ns, [source])
    ends: dict[tuple[str, int], int] = {}

    def end(task: tuple[str, int]) -> int:
        if task not in ends:
            time_ns, after = work[task]
            ends[task] = max(map(end, after), default=0) + time_ns
        return ends[task]

    copies = {p: (end((k, p)) - work[k, p][0], end((k, p))) for k, p in work if k != "run"}
    return max((end(task) for task in work if task[0] == "run"), default=0), copies


@pytest.mark.parametrize("seed", range(len(PAGES)))
def test_the_clock_is_the_longest_path(seed: int) -> None:
    graph, schedule = PAGES[seed]
    found = clock(graph, schedule)
    time_ns, copies = finished_ns(graph, schedule)
    assert found.time_ns == simulate(graph, schedule).time_ns == time_ns
    assert {c.position: (c.begins_ns, c.ends_ns) for c in found.copies} == copies
    computing = sum(n.time_ns for _, n in events(graph, schedule) if n.queue is Queue.COMPUTE)
    assert time_ns == computing + sum(found.waits_ns.values())
    assert sum(step.time_ns for step in timeline(graph, schedule)) == time_ns


def test_waits_are_where_copies_are_late() -> None:
    """64 bytes leave for 64 ns and come back for 128; what follows the store takes 250."""
    graph = with_copies(gelu_of_product(), [2], LINK)
    (page,) = paged(graph)
    late = with_frees(graph, (0, 1, page.store), (page.fetch, 4, 5))
    verify(graph, late)
    found = clock(graph, late)
    assert list(found.waits_ns.values()) == [128]
    assert [(c.queue, c.begins_ns, c.ends_ns) for c in found.copies] == [
        (Queue.OUT, 100, 164),
        (Queue.IN, 350, 478),
    ]
    assert simulate(graph, late).time_ns == graph.time_ns + 128
    assert simulate(graph, late).saved_bytes == simulate(graph, keep_all(graph)).saved_bytes - 64


def test_a_fetch_needs_its_store() -> None:
    graph = with_copies(gelu_of_product(), [2], LINK)
    (page,) = paged(graph)
    with pytest.raises(IllegalSchedule, match="fetch_h reads host_h, which is not alive"):
        verify(graph, with_frees(graph, (0, 1), (page.fetch, 4, 5)))


def test_copies_of_what_is_there_are_illegal() -> None:
    """Code has nothing for them: no room is free for a fetch, and a store has ended."""
    graph = with_copies(gelu_of_product(), [2], LINK)
    (page,) = paged(graph)
    legal = with_frees(graph, (0, 1, page.store), (page.fetch, 4, 5))
    verify(graph, legal)
    kept = tuple(e for e in legal.events[: legal.forward_length] if e != Free(page.data))
    fetched = Schedule(kept + legal.events[legal.forward_length :], len(kept))
    with pytest.raises(IllegalSchedule, match="fetch_h makes what is alive"):
        verify(graph, fetched)
    at = legal.events.index(Compute(page.store))
    twice = (*legal.events[:at], Compute(page.store), *legal.events[at:])
    with pytest.raises(IllegalSchedule, match="store_h makes what is alive"):
        verify(graph, Schedule(twice, legal.forward_length + 1))
    again = with_frees(graph, (0, 1, page.store, page.store), (page.fetch, 4, 5))
    assert Free(page.host) in again.events[: again.forward_length]
    with pytest.raises(IllegalSchedule, match="store_h may run only once"):
        verify(graph, again)
