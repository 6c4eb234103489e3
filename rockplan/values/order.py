"""Orders of computations: what must run again to restore storages, and which re-executions are
needed.

takes: a CDGraph and an order of computations. returns: the order of keep-all, or the order without
re-executions whose results nobody reads. guarantees: first executions stay, so a legal order
stays legal; no storage lives longer, so the peak does not rise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rockplan.values.graph import CDGraph, producers, required


@dataclass(frozen=True, slots=True)
class Orders:
    """Node indices in order of execution; `backward` also holds forward nodes that run again."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def computations(self) -> tuple[int, ...]:
        return self.forward + self.backward

    @property
    def is_first(self) -> list[bool]:
        """Return for each execution of both phases, in order, whether it is the first of its
        node."""
        executed: set[int] = set()
        flags: list[bool] = []
        for i in self.computations:
            flags.append(i not in executed)
            executed.add(i)
        return flags


def remade(
    graph: CDGraph, producer: Mapping[int, int], needed: Iterable[int], missing: Container[int]
) -> list[int]:
    """Return the nodes to run again, ascending, so that all storages `needed` are alive: producers
    of those that are `missing`, and of the missing operands of these. Raises KeyError where a
    missing storage has no producer."""
    nodes: set[int] = set()
    pending = [d for d in needed if d in missing]
    while pending:
        node = producer[pending.pop()]
        if node not in nodes:
            nodes.add(node)
            pending += [d for d in graph.nodes[node].reads if d in missing]
    return sorted(nodes)


class BackwardPhase:
    """A backward phase under construction. nodes: node indices so far, in order; missing: storages
    that were freed and must be made again before they are read."""

    def __init__(self, graph: CDGraph, producer: Mapping[int, int], missing: Iterable[int]) -> None:
        self.graph, self.producer = graph, producer
        self.nodes: list[int] = []
        self.missing = set(missing)

    def execute(self, index: int) -> None:
        """Append the node, after the nodes that restore its missing operands."""
        self.run([*self.makers(self.graph.nodes[index].reads), index])

    def makers(self, wanted: Iterable[int]) -> list[int]:
        """Return the nodes that restore those of `wanted` that are missing, in order."""
        return remade(self.graph, self.producer, wanted, self.missing)

    def run(self, nodes: Iterable[int]) -> None:
        for i in nodes:
            self.nodes.append(i)
            self.missing.difference_update(self.graph.nodes[i].writes)


def keep_all_order(graph: CDGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the forward and the backward node indices of `schedule.keep_all`."""
    phase = BackwardPhase(graph, producers(graph), graph.dropped)
    for node in required(graph.backward):
        phase.execute(node)
    return required(graph.forward), tuple(phase.nodes)


def without_idle(
    graph: CDGraph,
    forward: Sequence[int],
    backward: Sequence[int],
    *,
    executed: Collection[int] = (),
    kept: Collection[int] = (),
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return both orders (node indices) without re-executions whose results nothing reads, and
    without those that only these need: neither peak nor time increases.

    A re-execution, or an execution of an optional node, is idle if the node may run only once (its
    results are still alive), or if every storage that it writes is `kept`, or made again before it
    is read. executed: nodes that ran before the order starts. kept: storages that stay alive once
    made.
    """
    order = (*forward, *backward)
    seen = set(executed)
    is_again: list[bool] = []
    for i in order:
        is_again.append(i in seen or graph.nodes[i].optional)
        seen.add(i)
    lasting = {*kept, *graph.held}
    used_next: set[int] = set()
    needed: list[int] = []
    for position in reversed(range(len(order))):
        if position == len(forward) - 1:
            used_next.update(graph.outputs)
        node = graph.nodes[order[position]]
        if is_again[position] and not (
            node.recomputable and any(d in used_next and d not in lasting for d in node.writes)
        ):
            continue
        needed.append(position)
        used_next.difference_update(node.writes)
        used_next.update(node.reads)
    needed.reverse()
    turn = bisect_left(needed, len(forward))
    return tuple(order[p] for p in needed[:turn]), tuple(order[p] for p in needed[turn:])
