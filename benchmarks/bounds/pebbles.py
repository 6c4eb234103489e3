"""The game of pebbles on a few storages: a lower bound on peaks, and where little else can be.

takes: a priced CDGraph, a budget. returns: bytes, Pinch. guarantees: of every schedule that
`verify` accepts and that executes every node for the first time in the order of the graph, whatever
it executes again, and however often: its peak as `simulate` finds it is not smaller than the bound,
and if it is within the budget, there is a time as each Pinch says.

Look at a few storages, and at the backward nodes from the first that makes one of them to a last
one. Before each first execution any earlier node may run again if those of the few that it reads
are alive; any may be dropped at any time. Which sets of them can be alive within a budget is found
exactly, all sets at once, as bits (a game of pebbles, Sethi 1975, with sizes). If none is left when
the last node has run, no schedule fits. The few are what that node reads and makes, and what it was
made of, nearest and largest first. Of all others so many bytes are alive as have to be: between
what runs only once and what is read later there is a cut of storages that are alive, and none has
fewer bytes than the smallest (Ford and Fulkerson 1956).

Storages of which each is read only to write the next in its place are one.

The same game tells how much else can be alive all the time from one first execution to the next
(`Pinches`): if it is lost with more, then there is a time with no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.bounds.program import Pinch
from rockplan.ilp.whole_graph.intervals import Facts
from rockplan.values.graph import CDGraph, ComputeNode, readers

STORAGES = 16
"""Looked at together: their sets are 65536."""

SMALLEST = 0.02
"""Of the largest storage: smaller ones are forgotten."""

FEW = 12
"""Storages looked at to find a pinch, among the NEAR nearest: the largest of them, and those as
large as the second largest size, and so on."""

NEAR = 40

STEP = 0.002
"""Of the bound: how finely it is searched."""

ROOM_STEP = 2**-12
"""Of the budget: how finely a room is searched."""

Integers = NDArray[np.int64]
Sets = NDArray[np.bool_]


def pebbled_peak_bytes(graph: CDGraph, most_bytes: int, *, storages: int = STORAGES) -> int:
    """No schedule has a smaller peak; most_bytes: of a schedule, where the search ends."""
    view = _View(graph)
    best = 0
    for last in range(view.first, len(view.nodes)):
        game = _Game(view, view.around(last, storages), last, with_others=True)
        # Most games do not raise the bound, which one look at them shows.
        low, high = best, most_bytes
        if low >= high or game.is_won(max(low, int(high * STEP))):
            continue
        while high - low > max(high * STEP, 1):
            middle = (low + high) // 2
            low, high = (low, middle) if game.is_won(middle) else (middle, high)
        best = low + 1
    return best


class Pinches:
    """Of one graph within a budget; each is looked for once."""

    def __init__(self, graph: CDGraph, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._view = _View(graph)
        self._found: dict[int, tuple[Pinch, ...]] = {}

    def before(self, end: int) -> tuple[Pinch, ...]:
        """Before the first execution of a backward node, but the first: for some few storages."""
        if end not in self._found:
            self._found[end] = tuple(self._all_before(end))
        return self._found[end]

    def _all_before(self, end: int) -> Iterator[Pinch]:
        view = self._view
        near = view.around(end, NEAR)
        for least_bytes in sorted({view.sizes[d] for d in near}, reverse=True):
            chosen = [d for d in near if view.sizes[d] >= least_bytes]
            if len(chosen) > FEW:
                break
            room_bytes = _Game(view, chosen, end, with_others=False).room_bytes(self.budget_bytes)
            few = frozenset(d for d, place in view.place.items() if place in chosen)
            yield Pinch(end, few, room_bytes)


@dataclass(frozen=True, slots=True)
class _Node:
    """reads, writes: places; takes: those of each takeover; workspace_bytes: beside them; again: it
    may run again."""

    reads: frozenset[int]
    writes: frozenset[int]
    takes: tuple[tuple[int, ...], ...]
    workspace_bytes: int
    again: bool


class _View:
    """What all games on a graph have in common. Storages that may be dropped are in places, which
    are named by the first of each; always_bytes: of the others, by node; made_bytes: of these, what
    the node makes; last_bytes: what is always there up to it, and not after it."""

    def __init__(self, graph: CDGraph) -> None:
        facts = Facts(graph)
        self.first = len(graph.forward)
        self.place = place = _places(graph, facts)
        # Sizes do not grow along a place.
        self.sizes = {
            place[d]: facts.sizes[d] for d in sorted(place, key=facts.producer.__getitem__)
        }
        self.maker = {p: facts.producer[p] for p in self.sizes}
        self.nodes = [_node(n, facts, place) for n in graph.nodes]
        self.last_read = {d: n for n, node in enumerate(self.nodes) for d in node.reads}
        self.always_bytes = facts.always_bytes
        self.made_bytes = [
            sum(facts.sizes[d] for d in n.writes if facts.is_always(d, n.index))
            for n in graph.nodes
        ]
        self.last_bytes = [0] * len(graph.nodes)
        for d, (_, high) in facts.always.items():
            self.last_bytes[high] += facts.sizes[d]
        self.least_bytes = SMALLEST * max(self.sizes.values(), default=0)

    def around(self, last: int, storages: int) -> tuple[int, ...]:
        """Places that a game up to the node is about, ascending."""
        chosen: list[int] = []
        seen: set[int] = set()
        front = self.nodes[last].reads | self.nodes[last].writes
        while front and len(chosen) < storages:
            seen |= front
            chosen += [d for d in sorted(front, key=self._largest) if self._is_large(d)]
            front = frozenset(r for d in front for r in self.nodes[self.maker[d]].reads) - seen
        return tuple(sorted(chosen[:storages]))

    def _largest(self, d: int) -> tuple[int, int]:
        return -self.sizes[d], d

    def _is_large(self, d: int) -> bool:
        return self.sizes[d] > self.least_bytes

    def least_beside(self, chosen: Collection[int], moment: int) -> int:
        """Bytes of the others that are alive at least when node `moment` runs for the first time,
        and from the first execution before it."""
        made = {d: maker for d, maker in self.maker.items() if maker < moment and d not in chosen}
        once = {d for d, maker in made.items() if not self.nodes[maker].again}
        wanted = {d for d in made if self.last_read.get(d, -1) >= moment}
        following: dict[int, list[int]] = {d: [] for d in made}
        for d, maker in made.items():
            if self.nodes[maker].again:
                for r in self.nodes[maker].reads.intersection(made):
                    following[r].append(d)
        both = once & wanted
        sizes = {d: self.sizes[d] for d in made if d not in both}
        return sum(self.sizes[d] for d in both) + _smallest_cut(
            sizes, following, once - both, wanted - both
        )


class _Game:
    """On the `chosen` places, up to the first execution of node `last`; with_others: what has to be
    alive besides counts."""

    def __init__(self, view: _View, chosen: Sequence[int], last: int, *, with_others: bool) -> None:
        self.view = view
        self.bits = {d: 1 << i for i, d in enumerate(chosen)}
        late = [view.maker[d] for d in chosen if view.maker[d] >= view.first]
        self.moments = range(min(late, default=last), last + 1)
        self.beside = [view.least_beside(self.bits, m) if with_others else 0 for m in self.moments]
        self.sets = np.arange(1 << len(chosen), dtype=np.int64)
        self.set_bytes = np.zeros_like(self.sets)
        for d, bit in self.bits.items():
            self.set_bytes[(self.sets & bit) != 0] += view.sizes[d]
        makers = sorted({view.maker[d] for d in chosen})
        self.makers = [n for n in makers if view.nodes[n].again]

    def is_won(self, budget_bytes: int) -> bool:
        """Can all nodes run, the last one included?"""
        alive = self._start()
        for moment, beside_bytes in zip(self.moments, self.beside, strict=True):
            alive = self._before(alive, moment, budget_bytes, beside_bytes)
            alive = self._after(alive, moment, budget_bytes, beside_bytes)
            if not alive.any():
                return False
        return True

    def room_bytes(self, budget_bytes: int) -> int:
        """More than this cannot be alive besides the few, what is always there not counted, all the
        time between the first executions of the last two nodes."""
        view = self.view
        *earlier, last = self.moments
        alive = self._start()
        for moment, beside_bytes in zip(earlier, self.beside, strict=False):
            alive = self._before(alive, moment, budget_bytes, beside_bytes)
            if moment < last - 1:
                alive = self._after(alive, moment, budget_bytes, beside_bytes)

        def fits(others_bytes: int) -> bool:
            now = alive
            if earlier:
                # What it makes is not there before it, and what is always there until it counts.
                new_bytes = self._own_bytes(view.nodes[last - 1].writes)
                there_bytes = others_bytes - new_bytes - view.last_bytes[last - 1]
                beside_bytes = max(there_bytes, self.beside[-2])
                now = self._after(alive, last - 1, budget_bytes, beside_bytes)
            beside_bytes = max(others_bytes, self.beside[-1])
            now = self._before(now, last, budget_bytes, beside_bytes)
            return bool(self._after(now, last, budget_bytes, beside_bytes).any())

        low, high = 0, budget_bytes + 1
        while high - low > max(budget_bytes * ROOM_STEP, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return high - 1

    def _start(self) -> Sets:
        """Any of what was made before the first of the moments."""
        later = sum(bit for d, bit in self.bits.items() if self.view.maker[d] >= self.moments.start)
        alive: Sets = (self.sets & later) == 0
        return alive

    def _before(self, alive: Sets, moment: int, budget_bytes: int, beside_bytes: int) -> Sets:
        """What can be alive before the first execution of node `moment`, when others ran again."""
        view = self.view
        left_bytes = budget_bytes - view.always_bytes[moment] + view.made_bytes[moment]
        alive = alive & (self.set_bytes + beside_bytes <= left_bytes)
        again = [n for n in self.makers if n < moment]
        is_new = True
        while is_new:
            is_new = False
            for n in again:
                is_new |= self._run(n, alive, left_bytes, beside_bytes)
        return alive

    def _after(self, alive: Sets, moment: int, budget_bytes: int, beside_bytes: int) -> Sets:
        """What can be alive after it."""
        left_bytes = budget_bytes - self.view.always_bytes[moment]
        ran = np.zeros_like(alive)
        self._run(moment, alive, left_bytes, beside_bytes, into=ran)
        return ran

    def _own_bytes(self, storages: Iterable[int]) -> int:
        """Of those that are not among the few."""
        return sum(self.view.sizes[d] for d in storages if d not in self.bits)

    def _run(
        self,
        index: int,
        alive: Sets,
        left_bytes: int,
        beside_bytes: int,
        into: Sets | None = None,
    ) -> bool:
        """Adds what can be alive after the node, and all of less, to `into`, or to `alive`; is
        anything new? With a storage for its result, or in that of an operand that dies."""
        node, bits = self.view.nodes[index], self.bits
        target = alive if into is None else into
        reads = sum(bits.get(d, 0) for d in node.reads)
        writes = sum(bits.get(d, 0) for d in node.writes)
        before = self.sets[alive & ((self.sets & reads) == reads)]
        own_bytes = self._own_bytes(node.reads | node.writes)
        needed_bytes = max(beside_bytes, own_bytes) + node.workspace_bytes
        ways = {0: 0}
        for taken in node.takes:
            gone = sum(bits.get(d, 0) for d in taken)
            taken_bytes = sum(self.view.sizes[d] for d in taken)
            ways[gone] = max(ways.get(gone, 0), taken_bytes)
        is_new = False
        for gone, taken_bytes in ways.items():
            during = self.set_bytes[before | writes] + needed_bytes - taken_bytes
            after = (before[during <= left_bytes] | writes) & ~gone
            if not target[after].all():
                target[after] = True
                is_new = True
        if is_new:
            _drop_any(target, len(bits))
        return is_new


def _drop_any(alive: Sets, storages: int) -> None:
    """Adds every subset of what can be alive."""
    for i in range(storages):
        halves = alive.reshape(-1, 2, 1 << i)
        halves[:, 0, :] |= halves[:, 1, :]


def _places(graph: CDGraph, facts: Facts) -> dict[int, int]:
    """Of each storage that may be dropped: the first of those in its place."""
    read_by = readers(graph)
    place = {d: d for d in facts.is_open if facts.producer[d] >= 0}
    for node in graph.nodes:
        reads = [d for d in node.reads if d in place]
        taken = [t.operands for t in node.takes]
        if len(reads) == 1 == len(node.writes) and (reads[0],) in taken:
            (d,), (e,) = reads, node.writes
            same_phase = graph.nodes[facts.producer[d]].phase is node.phase
            is_alone = e in place and len(read_by[d]) == 1
            if same_phase and is_alone and facts.sizes[e] <= facts.sizes[d]:
                place[e] = place[d]
    return place


def _node(node: ComputeNode, facts: Facts, place: dict[int, int]) -> _Node:
    reads = frozenset(place[d] for d in node.reads if d in place)
    writes = frozenset(place[d] for d in node.writes if d in place)
    takes = tuple(tuple(place[d] for d in t.operands if d in place) for t in node.takes)
    if reads & writes:
        # It writes in the place of what it reads.
        return _Node(reads, frozenset(), (), 0, again=False)
    return _Node(reads, writes, takes, node.workspace_bytes, node.index in facts.again)


def _smallest_cut(
    sizes: dict[int, int],
    following: dict[int, list[int]],
    sources: Collection[int],
    sinks: Collection[int],
) -> int:
    """Bytes of the smallest set of vertices that is on every path from a source to a sink: of the
    largest flow between them."""
    # Vertex d is an edge from 2 d to 2 d + 1.
    left: dict[int, dict[int, int]] = {vertex: {} for vertex in (_START, _END)}
    for d, size in sizes.items():
        left.setdefault(2 * d, {})[2 * d + 1] = size
        after = (2 * e for e in following[d] if e in sizes)
        left.setdefault(2 * d + 1, {}).update(dict.fromkeys(after, UNLIMITED))
    left[_START] = {2 * d: UNLIMITED for d in sources}
    for d in sinks:
        left[2 * d + 1][_END] = UNLIMITED
    flow = 0
    while path := _path(left):
        more = min(left[u][v] for u, v in path)
        for u, v in path:
            left[u][v] -= more
            left[v][u] = left[v].get(u, 0) + more
        flow += more
    return flow


_START, _END = -1, -2
UNLIMITED = 1 << 62


def _path(left: dict[int, dict[int, int]]) -> list[tuple[int, int]]:
    """Edges of a shortest path on which something is left; none if there is no such path."""
    came_from: dict[int, int] = {_START: _START}
    front = deque([_START])
    while front and _END not in came_from:
        u = front.popleft()
        for v, bytes_ in left[u].items():
            if bytes_ > 0 and v not in came_from:
                came_from[v] = u
                front.append(v)
    path: list[tuple[int, int]] = []
    v = _END
    while v in came_from and v != _START:
        path.append((came_from[v], v))
        v = came_from[v]
    return path
