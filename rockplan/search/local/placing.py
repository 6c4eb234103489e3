"""Placing: the positions of copies to and from the host in a schedule, so that computations wait
little.

takes: a graph, storages that may be paged, orders of `with_fetches` of both, a link, a budget.
returns: the orders of `with_copies`. guarantees: legal; no more bytes than the given orders need,
or than the budget; one pass, without a search.

At first a copy out stands before the last read of the forward phase, and a copy in before the read
it is for: that needs no extra byte. Then copies out, in the order in which they begin, move later,
up to when they are done and as far as there is room; copies in, the last one first, move earlier,
until they are in time and as far as there is room. Copies that are late even so are waited for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rockplan.oracles.graph_view import view_of
from rockplan.oracles.lifetimes import taken_over
from rockplan.oracles.simulate import simulate, timeline
from rockplan.values.copies import HostLink, paged, with_copies
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Compute, Schedule, with_frees

Orders = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Placed:
    """A schedule with copies. storages: the paged ones, ascending; schedule: of `graph`, the graph
    with their copies (`with_copies`); time_ns: as `simulate` finds it."""

    storages: tuple[int, ...]
    graph: CDGraph
    schedule: Schedule
    time_ns: int


def placed(
    graph: CDGraph, storages: Sequence[int], orders: Orders, link: HostLink, budget_bytes: int
) -> Placed:
    """Return the schedule `orders` with copies of paged storages to the host and back placed in it.
    storages: those that may be paged; orders: executions of both phases, as nodes of
    `with_fetches(graph, storages)`, in which a fetch says that a storage is paged. Copies are
    placed where budget_bytes leaves room, so that computations wait least for the link."""
    turn, pageable = len(graph.forward), sorted(set(storages))
    fetched = sorted({i - turn for i in orders[1] if turn <= i < turn + len(pageable)})
    paged_storages = [pageable[k] for k in fetched]
    paged_graph = with_copies(graph, paged_storages, link)
    pages = {p.data: p for p in paged(paged_graph)}

    def renumbered(i: int) -> int:
        if i < turn:
            return i
        if i < turn + len(pageable):
            return pages[pageable[i - turn]].fetch
        return i - len(pageable) + 2 * len(paged_storages)

    forward, backward = (tuple(map(renumbered, order)) for order in orders)
    if paged_storages:
        forward, backward = _Placing(paged_graph, forward, backward, budget_bytes).orders()
    schedule = with_frees(paged_graph, forward, backward)
    return Placed(
        tuple(paged_storages), paged_graph, schedule, simulate(paged_graph, schedule).time_ns
    )


class _Placing:
    """The copies of one schedule. A position is an index into the computations (`computed`); a copy
    stands before the computation of its position. bytes: alive at each position; starts_ns: when
    each computation begins, as far as copies are placed."""

    def __init__(
        self, graph: CDGraph, forward: Sequence[int], backward: Sequence[int], budget_bytes: int
    ) -> None:
        self.graph, self.budget_bytes = graph, budget_bytes
        self.sizes = view_of(graph).sizes
        self.pages = {p.data: p for p in paged(graph)}
        self.computed = [i for i in (*forward, *backward) if not graph.nodes[i].optional]
        self.turn = len(forward)
        # (storage, position) of each copy in, in order.
        self.fetches: list[tuple[int, int]] = []
        done = len(forward)
        for i in backward:
            if graph.nodes[i].optional:
                self.fetches.append((graph.nodes[i].writes[0], done))
            else:
                done += 1
        self.made, self.read = self._uses()
        self.stores = {d: self._first_place(d) for d in self.pages}
        self.bytes, self.takes = self._memory()
        times = [graph.nodes[i].time_ns for i in self.computed]
        self.starts_ns: NDArray[np.int64] = np.cumsum([0, *times])

    def orders(self) -> Orders:
        self._place_stores()
        self._place_fetches()
        return self._written()

    def _uses(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        made: dict[int, int] = {}
        used: dict[int, list[int]] = {d: [] for d in self.pages}
        for position, i in enumerate(self.computed):
            node = self.graph.nodes[i]
            for d in node.writes:
                if d in used:
                    made.setdefault(d, position)
                    used[d].append(position)
            for d in node.reads:
                if d in used:
                    used[d].append(position)
        return made, used

    def _first_place(self, d: int) -> int:
        """At the last read before it is fetched, if that is in the forward phase, so that it needs
        no byte more; else at the turn."""
        fetched = min(position for storage, position in self.fetches if storage == d)
        used = [p for p in self.read[d] if p < fetched]
        if used[-1] >= self.turn:
            return self.turn
        return max(used[-1], self.made[d] + 1)

    def _written(self) -> Orders:
        before: dict[int, list[int]] = {}
        for d in sorted(self.stores, key=lambda d: (self.made[d], d)):
            before.setdefault(self.stores[d], []).append(self.pages[d].store)
        after: dict[int, list[int]] = {}
        for d, position in self.fetches:
            after.setdefault(position, []).append(self.pages[d].fetch)
        forward: list[int] = []
        backward: list[int] = []
        for position in range(len(self.computed) + 1):
            if position <= self.turn:
                forward += before.get(position, ())
            backward += after.get(position, ())
            if position < len(self.computed):
                (forward if position < self.turn else backward).append(self.computed[position])
        return tuple(forward), tuple(backward)

    def _memory(self) -> tuple[NDArray[np.int64], dict[int, frozenset[int]]]:
        graph = self.graph
        schedule = with_frees(graph, *self._written())
        taken = taken_over(graph, schedule)
        during_bytes: list[int] = []
        takes: dict[int, frozenset[int]] = {}
        for position, (event, step) in enumerate(
            zip(schedule.events, timeline(graph, schedule), strict=True)
        ):
            if isinstance(event, Compute) and not graph.nodes[event.node].optional:
                if position in taken:
                    takes[len(during_bytes)] = frozenset(taken[position].operands)
                during_bytes.append(step.during_bytes)
        return np.array(during_bytes), takes

    def _place_stores(self) -> None:
        """As far as room allows, up to where the link has carried each, in the order in which they
        begin. Where one stands too early, computations wait: `starts_ns` from there on grows."""
        free_ns = 0
        for d in sorted(self.stores, key=lambda d: (self.made[d], d)):
            page = self.pages[d]
            begins_ns = max(free_ns, int(self.starts_ns[self.made[d] + 1]))
            free_ns = begins_ns + self.graph.nodes[page.store].time_ns
            done = int(np.searchsorted(self.starts_ns, free_ns, side="left"))
            self.stores[d] = place = self._later(d, min(done, self.turn))
            late_ns = free_ns - int(self.starts_ns[place])
            if late_ns > 0:
                self.starts_ns[place:] += late_ns

    def _later(self, d: int, latest: int) -> int:
        """The last place, at most `latest`, up to which there is room to keep d for its copy out;
        its bytes are added to `bytes` up to there."""
        first, size_bytes = self.stores[d], self.sizes[d]
        last = max(p for p in self.read[d] if p < self.turn)
        # Up to its last use the storage is alive anyway, unless a result is written over it there.
        longer = last if d in self.takes.get(last, ()) else last + 1
        if latest <= longer:
            return max(first, latest)
        full = np.flatnonzero(self.bytes[longer:latest] + size_bytes > self.budget_bytes)
        end = longer + int(full[0]) if len(full) else latest
        self.bytes[longer:end] += size_bytes
        return max(first, end)

    def _place_fetches(self) -> None:
        """As far as room allows, until the link has carried each before it is read; the one that is
        read last first, since it leaves the link to those before it."""
        next_ns = 1 << 62
        for k in reversed(range(len(self.fetches))):
            d, read = self.fetches[k]
            time_ns = self.graph.nodes[self.pages[d].fetch].time_ns
            latest_ns = min(int(self.starts_ns[read]), next_ns) - time_ns
            earliest = max(int(np.searchsorted(self.starts_ns, latest_ns, side="right")) - 1, 0)
            place = self._earlier(d, read, earliest)
            next_ns = max(latest_ns, int(self.starts_ns[place]))
            self.fetches[k] = d, place
        self.fetches.sort(key=lambda f: f[1])

    def _earlier(self, d: int, read: int, earliest: int) -> int:
        """The first place, at least `earliest`, from which there is room for d up to its read; its
        bytes are added to `bytes` from there. Never before the turn or the last use of d."""
        used = self.read[d]
        last = bisect_right(used, read - 1) - 1
        least = max(self.turn, used[last] + 1 if last >= 0 else 0, earliest)
        size_bytes = self.sizes[d]
        full = np.flatnonzero(self.bytes[least:read] + size_bytes > self.budget_bytes)
        place = least + int(full[-1]) + 1 if len(full) else min(least, read)
        self.bytes[place:read] += size_bytes
        return place
