"""Intervals of a whole graph between moments, and what its programs have in common.

takes: a CDGraph, Moments. returns: Facts, Intervals. guarantees: what they call alive is alive in
every schedule.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.recompute import closure
from rockplan.values.copies import Host
from rockplan.values.graph import CDGraph, ComputeNode
from rockplan.values.order import BackwardPhase

BEGINNING, TURN = -2, -1
"""Stand for a moment: the start of the forward phase, and that of the backward phase."""


@dataclass(frozen=True, slots=True)
class Moments:
    """First executions at which the program limits memory.

    ends: nodes, the last one among them. spans: unions of intervals, as (end of the interval
    before, end of the last one); if there is none before, TURN or BEGINNING.
    """

    ends: frozenset[int]
    spans: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Interval:
    """The nodes from `first` to before `stop`, which run for the first time in this interval. It
    ends at the first execution of the last of them, `end`, or at the turn (which some re-executions
    may precede).

    wanted: open storages (see `Facts`) made before `first` that these or later nodes read, or that
    re-executions making those may read; reads: those read by nodes of the interval.
    """

    first: int
    stop: int
    end: int
    reads: frozenset[int]
    wanted: tuple[int, ...]


class Facts:
    """What the programs of one graph have in common.

    is_open: storages that may be freed while still needed: results that are not held, tangents, and
    generator states; storages of no size only if they have to be dropped at the turn. producer:
    storage -> the node that makes it, -1 for tangents and states. born: the same, but for a state
    the node that draws from it first. again: nodes that may be re-executed. host: where the
    storages may go that have fetches, with the rows of `host_rows`.
    """

    def __init__(self, graph: CDGraph, host: Host | None = None) -> None:
        self.graph, self.host = graph, host
        self.view = GraphView(graph)
        self.again = self.view.again
        self.tangents, self.sizes = self.view.tangents, self.view.sizes
        born = {state: i for i, state in self.view.states.items()}
        once = dict.fromkeys((*self.tangents, *born), -1)
        self.producer = self.view.producer | once
        self.born = self.producer | born
        weighing = {d for d, size in enumerate(self.sizes) if size}
        self.is_open = frozenset((weighing | self.view.dropped) - self.view.held)

    @functools.cached_property
    def always(self) -> dict[int, tuple[int, int]]:
        """Storage -> (first, last) node at whose first execution it is alive in every schedule.
        Tangents, from the turn to their last reader, and held storages, to the end, have one;
        others have not."""
        read_by, start = self.view.readers, len(self.graph.forward)
        alive = {d: (start, max(read_by[d])) for d in self.tangents if read_by[d]}
        last = len(self.graph.nodes) - 1
        for d in self.graph.held:
            alive[d] = (self.producer[d] if self.producer[d] >= 0 else start, last)
        return alive

    @functools.cached_property
    def always_bytes(self) -> list[int]:
        """Bytes that are always alive at the first execution of each node."""
        changes = [0] * (len(self.graph.nodes) + 1)
        for d, (low, high) in self.always.items():
            changes[low] += self.sizes[d]
            changes[high + 1] -= self.sizes[d]
        return list(itertools.accumulate(changes))[:-1]

    @functools.cached_property
    def forced_bytes(self) -> list[int]:
        """Bytes alive in every schedule at the first execution of each node: the always alive ones,
        its workspace, its inputs and results, less the operands that a result may take over."""
        return [
            b + (0 if n.optional else self.own_bytes(n, n.reads, n.index))
            for b, n in zip(self.always_bytes, self.graph.nodes, strict=True)
        ]

    def own_bytes(self, node: ComputeNode, reads: Iterable[int], moment: int) -> int:
        """Return the bytes alive in every schedule while `node` runs, besides those always alive at
        `moment`."""
        own = {d for d in (*reads, *node.writes) if not self.is_always(d, moment)}
        taken_bytes = self.view.taken_bytes[node.index]
        return sum(self.sizes[d] for d in own) + node.workspace_bytes - taken_bytes

    def is_always(self, d: int, moment: int) -> bool:
        """True if d is alive at `moment` in every schedule."""
        low, high = self.always.get(d, (1, 0))
        return low <= moment <= high

    def closure(self, seeds: Iterable[int]) -> set[int]:
        """Return `seeds`, and every open storage that making them again may read."""

        def open_reads(node: int) -> list[int]:
            return [r for r in self.view.reads_again[node] if r in self.is_open]

        return closure(open_reads, self.view.makers, seeds)

    def backward_phase(self) -> BackwardPhase:
        """Begin the backward phase, without the storages that must be dropped."""
        return BackwardPhase(self.graph, self.view.remaker, self.view.dropped)

    def intervals(self, moments: Moments) -> list[Interval]:
        """Return the intervals between the moments, in order. Without a moment in the forward phase
        the first interval begins at the turn; with one it begins at node 0, and one interval ends
        at the turn."""
        turn = len(self.graph.forward)
        stops = [(end + 1, end) for end in sorted(moments.ends)]
        first = turn
        if stops[0][1] < turn:
            first = 0
            stops.insert(sum(stop <= turn for stop, _ in stops), (turn, TURN))
        firsts = [first, *(stop for stop, _ in stops)]
        intervals: list[Interval] = []
        wanted: set[int] = set()
        unborn: frozenset[int] = frozenset()
        for first, (stop, end) in reversed(list(zip(firsts, stops, strict=False))):
            if end == TURN:
                unborn = self.tangents
            nodes = [n for n in self.graph.nodes[first:stop] if not n.optional]
            read = {d for n in nodes for d in n.reads if d in self.is_open}
            # A storage first made from here on is available to later nodes: only older ones count.
            older = {d for d in wanted | read if self.born[d] < first} - unborn
            wanted = self.closure(older)
            reads = frozenset(read & older)
            intervals.append(Interval(first, stop, end, reads, tuple(sorted(wanted))))
        return intervals[::-1]


def turn_of(intervals: Sequence[Interval]) -> int:
    """Return the number of the first interval in the backward phase."""
    return next((s + 1 for s, part in enumerate(intervals) if part.end == TURN), 0)
