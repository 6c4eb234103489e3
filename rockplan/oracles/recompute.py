"""Recomputation: which storages a recomputation may read, and what it costs.

takes: a GraphView, storages, and which storages are alive. returns: sets of storages, nanoseconds,
bytes. `values.order.remade` says which nodes run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rockplan.oracles.graph_view import GraphView

NEVER = float("inf")
"""Cost of a storage that cannot be made again."""

IsAlive = Callable[[int], bool]


class TooDeep(Exception):
    """Raised where a chain of recomputations is too long to compute its cost."""


def closure(
    reads: Callable[[int], Iterable[int]],
    makers: Sequence[Iterable[int]],
    seeds: Iterable[int],
) -> set[int]:
    """Return `seeds` and every storage that making them again may read, transitively, if nothing
    else is alive. reads: node -> storages that it reads and that may be missing; makers: for each
    storage, the nodes that make it again."""
    closed: set[int] = set()
    pending = list(seeds)
    while pending:
        d = pending.pop()
        if d not in closed:
            closed.add(d)
            for maker in makers[d]:
                pending += reads(maker)
    return closed


class RecomputeCosts:
    """Costs of recomputing single storages of one graph. A storage that two others need counts
    twice.

    makers: for each storage, the node that makes it again, None if there is none. depth: the
    longest chain of recomputations; TooDeep is raised beyond it.
    """

    def __init__(self, view: GraphView, makers: Sequence[int | None], depth: int) -> None:
        nodes = view.graph.nodes
        self._sizes, self._depth = view.sizes, depth
        # For each storage: time of its maker in ns, never 0, and what the maker reads.
        self._steps = [
            None if i is None else (1.0 + nodes[i].time_ns, view.reads[i]) for i in makers
        ]
        self._own_bytes = [
            0 if i is None else view.own_bytes(nodes[i]) - view.taken_bytes[i] for i in makers
        ]

    def time_ns(
        self,
        d: int,
        is_alive: IsAlive,
        known: dict[int, float],
        limit_ns: float = NEVER,
        depth: int = 0,
    ) -> float:
        """Return the ns to make storage `d` again, with all missing storages that this needs; NEVER
        if nothing can, or if it takes limit_ns or more. Raises TooDeep beyond a chain of `depth`
        storages. is_alive: tells of a storage whether it is; known: results for missing storages,
        new ones are added."""
        step = self._steps[d]
        if step is None:
            return NEVER
        if depth > self._depth:
            raise TooDeep
        time_ns, reads = step
        for r in reads:
            if time_ns >= limit_ns:
                return NEVER
            if not is_alive(r):
                more_ns = known.get(r)
                if more_ns is None:
                    known[r] = NEVER
                    left_ns = limit_ns - time_ns
                    more_ns = known[r] = self.time_ns(r, is_alive, known, left_ns, depth + 1)
                time_ns += more_ns
        return time_ns if time_ns < limit_ns else NEVER

    def needed_bytes(
        self, d: int, is_alive: IsAlive, known: dict[int, float], depth: int = 0
    ) -> float:
        """Return the least bytes, beyond what is alive, in which storage `d` can be made again if
        nothing is freed meanwhile (Sethi and Ullman, JACM 1970); NEVER if nothing can make it.
        Raises TooDeep beyond a chain of `depth` storages. is_alive: tells of a storage whether it
        is; known: results by storage, new ones are added."""
        if d in known:
            return known[d]
        step = self._steps[d]
        if step is None:
            return NEVER
        if depth > self._depth:
            raise TooDeep
        _, reads = step
        operands: list[tuple[float, int]] = []
        for r in reads:
            if not is_alive(r):
                less = self._sizes[r] - self.needed_bytes(r, is_alive, known, depth + 1)
                operands.append((less, self._sizes[r]))
        operands.sort()
        most: float = 0
        held_bytes = 0
        for less, size in operands:
            most = max(most, held_bytes + size - less)
            held_bytes += size
        known[d] = max(most, held_bytes + self._own_bytes[d])
        return known[d]
