"""Orders of computations, and which re-executions in them are needed.

takes: a CDGraph and an order of computations. returns: that of keep-all, or the order without the
re-executions whose results nobody reads. guarantees: first executions stay, so a legal order stays
legal; no storage lives longer, so the peak does not rise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rockplan.values.graph import CDGraph, producers


@dataclass(frozen=True, slots=True)
class Orders:
    """Node indices in order of execution, by phase; `backward` also holds forward nodes that run
    again."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def computations(self) -> tuple[int, ...]:
        return self.forward + self.backward

    @property
    def is_first(self) -> list[bool]:
        """Of each computation: does its node run for the first time?"""
        executed: set[int] = set()
        flags: list[bool] = []
        for i in self.computations:
            flags.append(i not in executed)
            executed.add(i)
        return flags


def keep_all_order(graph: CDGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The computations of `keep_all`, by phase."""
    producer = producers(graph)
    missing = set(graph.dropped)

    def again(reads: Sequence[int]) -> list[int]:
        """Nodes to run so that `reads` are there; marks what they make as there."""
        ran: set[int] = set()
        pending = [d for d in reads if d in missing]
        while pending:
            node = graph.nodes[producer[pending.pop()]]
            if node.index not in ran:
                ran.add(node.index)
                missing.difference_update(node.writes)
                pending += [d for d in node.reads if d in missing]
        return sorted(ran)

    forward = tuple(n.index for n in graph.forward)
    backward = [i for n in graph.backward for i in (*again(n.reads), n.index)]
    return forward, tuple(backward)


def without_idle(
    graph: CDGraph, forward: Sequence[int], backward: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both orders without re-executions of which nothing is read before it is made again; without
    these a schedule needs no more of anything."""
    order = (*forward, *backward)
    kept = needed(graph, forward, backward)
    n_forward = bisect_left(kept, len(forward))
    return tuple(order[p] for p in kept[:n_forward]), tuple(order[p] for p in kept[n_forward:])


def needed(graph: CDGraph, forward: Sequence[int], backward: Sequence[int]) -> list[int]:
    """Positions, in `forward` followed by `backward`, of what `without_idle` keeps."""
    order = (*forward, *backward)
    executed: set[int] = set()
    is_first: list[bool] = []
    for i in order:
        is_first.append(i not in executed)
        executed.add(i)
    used_next: set[int] = set()
    kept: list[int] = []
    for position in reversed(range(len(order))):
        if position == len(forward) - 1:
            used_next.update(graph.outputs)
        node = graph.nodes[order[position]]
        if is_first[position] or not used_next.isdisjoint(node.writes):
            kept.append(position)
            used_next.difference_update(node.writes)
            used_next.update(node.reads)
    return kept[::-1]


def drop_dead(
    graph: CDGraph,
    order: Orders,
    *,
    executed: Collection[int] = (),
    kept: Collection[int] = (),
) -> Orders:
    """`order` without dead re-executions.

    A re-execution is dead if the node may run only once (what it made is still there), or if
    every storage that it writes is `kept`, or computed again before it is read.
    executed: nodes that ran before the order starts. kept: data that stay alive once made.
    """
    lasting = {*kept, *graph.held}
    seen = set(executed)
    again = [[_visit(seen, n) for n in part] for part in (order.forward, order.backward)]
    used_next: set[int] = set()

    def scan(part: Sequence[int], is_again: Sequence[bool]) -> tuple[int, ...]:
        needed: list[int] = []
        for index, repeated in zip(reversed(part), reversed(is_again), strict=True):
            node = graph.nodes[index]
            if repeated and not (
                node.recomputable and any(d in used_next and d not in lasting for d in node.writes)
            ):
                continue
            needed.append(index)
            used_next.difference_update(node.writes)
            used_next.update(node.reads)
        return tuple(reversed(needed))

    backward = scan(order.backward, again[1])
    used_next.update(graph.outputs)
    return Orders(scan(order.forward, again[0]), backward)


def _visit(seen: set[int], node: int) -> bool:
    """Whether `node` was seen before; it has been now."""
    if node in seen:
        return True
    seen.add(node)
    return False
