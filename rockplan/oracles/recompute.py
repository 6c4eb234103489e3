"""Recomputation: which storages making others again may read, and what that costs.

takes: a GraphView, storages, what is there. returns: sets of storages, nanoseconds, bytes. What
runs again so that a storage is there: `values.order.remade`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rockplan.oracles.graph_view import GraphView

NEVER = float("inf")
"""Cost of what cannot be made again."""

IsThere = Callable[[int], bool]


class TooDeep(Exception):
    """So many storages have to be made for one another that no cost is looked for."""


def closure(
    reads: Callable[[int], Iterable[int]],
    makers: Sequence[Iterable[int]],
    seeds: Iterable[int],
) -> set[int]:
    """`seeds`, and every storage that making them again may read, whatever is there. reads: of a
    node, storages that may be missing; makers: of a storage, nodes that make it again."""
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
    """Of making storages of one graph again, alone: what two others need counts twice.

    makers: of each storage the node that makes it again, None where none does. depth: storages
    that have to be made for one another, beyond which TooDeep is raised.
    """

    def __init__(self, view: GraphView, makers: Sequence[int | None], depth: int) -> None:
        nodes = view.graph.nodes
        self._sizes, self._depth = view.sizes, depth
        # Of each storage: nanoseconds of its maker, never 0, and what that reads.
        self._steps = [
            None if i is None else (1.0 + nodes[i].time_ns, view.reads[i]) for i in makers
        ]
        self._own_bytes = [
            0 if i is None else view.own_bytes(nodes[i]) - view.taken_bytes[i] for i in makers
        ]

    def time_ns(
        self,
        d: int,
        is_there: IsThere,
        known: dict[int, float],
        limit_ns: float = NEVER,
        depth: int = 0,
    ) -> float:
        """To make `d` with all that has to be made for it; NEVER if that is not less than the
        limit. known: of storages that are not there; what is looked at is added."""
        step = self._steps[d]
        if step is None:
            return NEVER
        if depth > self._depth:
            raise TooDeep
        time_ns, reads = step
        for r in reads:
            if time_ns >= limit_ns:
                return NEVER
            if not is_there(r):
                more_ns = known.get(r)
                if more_ns is None:
                    known[r] = NEVER
                    left_ns = limit_ns - time_ns
                    more_ns = known[r] = self.time_ns(r, is_there, known, left_ns, depth + 1)
                time_ns += more_ns
        return time_ns if time_ns < limit_ns else NEVER

    def needed_bytes(
        self, d: int, is_there: IsThere, known: dict[int, float], depth: int = 0
    ) -> float:
        """Beside what is there, to make `d`, if nothing of that goes (Sethi and Ullman, JACM
        1970); NEVER if it cannot be made. known: of storages, added to."""
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
            if not is_there(r):
                less = self._sizes[r] - self.needed_bytes(r, is_there, known, depth + 1)
                operands.append((less, self._sizes[r]))
        operands.sort()
        most: float = 0
        held_bytes = 0
        for less, size in operands:
            most = max(most, held_bytes + size - less)
            held_bytes += size
        known[d] = max(most, held_bytes + self._own_bytes[d])
        return known[d]
