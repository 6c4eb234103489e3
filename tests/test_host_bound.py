"""No schedule that pages is faster than what is proven of those that may page."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from rockplan.errors import IllegalSchedule
from rockplan.ilp.highs import TIME_UNIT, SolveReport, SolverStatus, solve
from rockplan.ilp.whole_graph.intervals import Facts
from rockplan.ilp.whole_graph.program import Program, program
from rockplan.ilp.whole_graph.refine import proved_ns, refined
from rockplan.oracles.clock import clock
from rockplan.oracles.simulate import Simulation, simulate
from rockplan.oracles.verify import verify
from rockplan.values.copies import Host, HostLink, Paged, paged, with_copies, with_fetches
from rockplan.values.graph import CDGraph, required
from rockplan.values.order import Orders
from rockplan.values.schedule import Schedule, keep_all, with_frees
from testing.graphs import random_graph, random_schedule
from tests.moments import WITH_STATES, places, random_moments, solution_of
from tests.paging import pageable_of, placings

LINKS = (HostLink(10**9, 5 * 10**8), HostLink(3 * 10**8, 10**9))
"""A byte takes 1 to 3 ns, a node up to 20."""


# -- each schedule is a solution -------------------------------------------------------------------


def random_pages(rng: random.Random, graph: CDGraph, storages: list[int]) -> Schedule:
    """Of `with_copies`: nodes run again in both phases, copies are anywhere, some fetches twice."""
    made = with_copies(graph, storages, LINKS[0])
    turn, shift = len(graph.forward), 2 * len(storages)
    first, second = random_schedule(rng, graph).phases
    forward = list(first)
    backward = [i if i < turn else i + shift for i in second]
    for page in paged(made):
        if rng.random() < 0.2:
            continue
        born = min(p for p, i in enumerate(forward) if page.data in made.nodes[i].writes)
        forward.insert(rng.randint(born + 1, len(forward)), page.store)
        for _ in range(rng.choice((1, 1, 2))):
            backward.insert(rng.randint(0, len(backward)), page.fetch)
    return with_frees(made, *without_idle_copies(made, forward, backward))


def without_idle_copies(
    made: CDGraph, forward: Sequence[int], backward: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Without fetches of what nothing reads before it is made again, and stores of what is not
    fetched: they take up the link for nothing."""
    used: list[int] = []
    read: set[int] = set(made.held)
    for i in reversed(backward):
        node = made.nodes[i]
        if not node.optional or not read.isdisjoint(node.writes):
            used.append(i)
            read.difference_update(node.writes)
            read.update(node.reads)
    stores = {p.store for p in paged(made) if p.fetch not in used}
    return tuple(i for i in forward if i not in stores), tuple(used[::-1])


def without_stores(graph: CDGraph, storages: list[int], schedule: Schedule) -> Orders:
    """The computations as `with_fetches` numbers them."""
    turn, count = len(graph.forward), len(storages)

    def there(order: Sequence[int]) -> tuple[int, ...]:
        kept = (i for i in order if not turn <= i < turn + count)
        return tuple(i if i < turn else i - count for i in kept)

    forward, backward = schedule.phases
    return Orders(there(forward), there(backward))


def fetched(
    made: Program, at: Sequence[int], schedule: Orders, chosen: dict[int, float]
) -> dict[int, float]:
    """The columns of fetches: 1 where a storage is neither there where the interval begins nor made
    again in it, but fetched."""
    columns: dict[int, float] = {}
    happened = set(zip(schedule.computations, at, strict=True))
    for s, runs in enumerate(made.reruns):
        for i in (i for i in runs if made.facts.graph.nodes[i].optional):
            (d,) = made.facts.graph.nodes[i].writes
            others = [runs[k] for k in made.facts.view.makers[d] if k != i and k in runs]
            is_there = any(chosen[c] for c in (*others, made.keep[s, d]))
            columns[runs[i]] = float((i, s) in happened and not is_there)
    return columns


def cheapest(made: Program, chosen: dict[int, float]) -> SolveReport:
    """Of the solutions with these values."""
    lower, upper = made.linear.column_lower.copy(), made.linear.column_upper.copy()
    for column, value in chosen.items():
        lower[column] = upper[column] = value
    fixed = replace(made.relaxed, column_lower=lower, column_upper=upper)
    return solve(fixed, time_limit_s=60, absolute_gap=0.0)


@pytest.mark.parametrize("link", LINKS)
def test_every_paging_schedule_solves_at_no_more_cost(link: HostLink) -> None:
    """At moments of either phase, with split spans, also where nodes run again in both phases."""
    paging = charged = 0
    for seed in range(100):
        rng = random.Random(seed)
        graph = random_graph(rng, rng.randint(2, 5), WITH_STATES)
        storages = pageable_of(graph)
        if not storages:
            continue
        schedule = random_pages(rng, graph, storages)
        priced = with_copies(graph, storages, link)
        verify(priced, schedule)
        found = simulate(priced, schedule)
        facts = Facts(with_fetches(graph, storages), Host(found.host_peak_bytes, link))
        made = program(facts, random_moments(rng, facts), found.peak_bytes)
        orders = without_stores(graph, storages, schedule)
        at = places(made, orders)
        chosen = solution_of(made, at, orders)
        solved = cheapest(made, chosen | fetched(made, at, orders, chosen))
        assert solved.status is SolverStatus.OPTIMAL, seed
        beyond_ns = solved.bound * TIME_UNIT * graph.time_ns
        assert beyond_ns <= found.time_ns - graph.time_ns + 1e-3, seed
        paging += found.host_peak_bytes > 0
        waited_ns = sum(clock(priced, schedule).waits_ns.values())
        again_ns = found.time_ns - waited_ns - graph.time_ns
        charged += beyond_ns > again_ns + 1e-3
    assert paging >= 50 and charged >= 10


# -- brute force -----------------------------------------------------------------------------------


def small_graphs(count: int) -> Iterator[tuple[CDGraph, list[int]]]:
    """With one or two storages that may be paged."""
    for seed in itertools.count():
        rng = random.Random(seed)
        graph = random_graph(rng, 3)
        storages = pageable_of(graph)[:2]
        if storages and len(graph.nodes) <= 7 and not any(n.random for n in graph.nodes):
            yield graph, storages
            count -= 1
        if not count:
            return


def subsets(of: Sequence[Paged]) -> Iterator[tuple[Paged, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(of, k) for k in range(len(of) + 1))


def fastest_ns(graph: CDGraph, storages: list[int], host: Host, budget_bytes: int) -> int | None:
    """Of all schedules that page each storage or not, and in which one node runs again at most, in
    the backward phase: listed, and priced by `simulate`, which knows no row."""
    made = with_copies(graph, storages, host.link)
    handed = set(graph.handed)
    able = (n for n in required(made.nodes) if handed.isdisjoint(made.nodes[n].writes))
    again = [i for i in able if made.nodes[i].recomputable]
    best: int | None = None

    def priced(first: tuple[int, ...], second: tuple[int, ...]) -> Simulation | None:
        schedule = with_frees(made, first, second)
        with contextlib.suppress(IllegalSchedule):
            verify(made, schedule)
            found = simulate(made, schedule)
            is_within = found.peak_bytes <= budget_bytes
            return found if is_within and found.host_peak_bytes <= host.size_bytes else None
        return None

    for nodes, pages in itertools.product([(), *((i,) for i in again)], subsets(paged(made))):
        least_ns = graph.time_ns + sum(made.nodes[i].time_ns for i in nodes)
        forward = list(required(made.forward))
        for page in pages:
            forward.insert(forward.index(made_by(made, page.data)) + 1, page.store)
        for second in set(placings(required(made.backward), [*nodes, *(p.fetch for p in pages)])):
            # Where copies out stand as soon as can be, the least is alive.
            if (best is not None and least_ns >= best) or not priced(tuple(forward), second):
                continue
            for first in placings(required(made.forward), [p.store for p in pages]):
                found = priced(first, second)
                if found is not None:
                    best = found.time_ns if best is None else min(best, found.time_ns)
    return best


def made_by(graph: CDGraph, d: int) -> int:
    return next(n.index for n in graph.forward if d in n.writes)


def test_no_schedule_is_faster_than_what_is_proven() -> None:
    costly = tight = faster = 0
    for graph, storages in small_graphs(12):
        rng = random.Random(len(graph.data))
        everything_bytes = simulate(graph, keep_all(graph)).peak_bytes
        host = Host(rng.choice((8, 1 << 20)), rng.choice(LINKS))
        for budget_bytes in (everything_bytes - 1, int(0.8 * everything_bytes)):
            best_ns = fastest_ns(graph, storages, host, budget_bytes)
            if best_ns is None:
                continue
            asked = with_fetches(graph, storages)
            found = refined(asked, budget_bytes, deadline=math.inf, host=host)
            assert found is not None
            proven_ns = proved_ns(found, deadline=time.process_time() + 60)
            assert graph.time_ns <= found.bound_ns <= proven_ns <= best_ns
            without = fastest_ns(graph, [], host, budget_bytes)
            print(graph.time_ns, found.bound_ns, proven_ns, best_ns, without)
            costly += best_ns > graph.time_ns
            tight += best_ns == proven_ns > graph.time_ns
            faster += without is None or best_ns < without
    assert costly >= 6 and faster >= 3
    assert tight >= costly // 3
