"""The graph as planners see it: what storages weigh, what makes and reads them, what may run again.

takes: a priced CDGraph. guarantees: sizes, readers and makers are those that `verify` and
`simulate` go by. Planners ask this view what a storage weighs and what brings it back. What is
taken over (`schedule.taken_over`), who owns the bytes (`lifetimes`), states of generators and what
has to be dropped have code of their own still: a rule of memory that touches these is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rockplan.values.graph import CDGraph, ComputeNode, may_run_again, producers, readers


@dataclass(frozen=True, slots=True, eq=False)
class GraphView:
    """sizes: of each storage in bytes, 0 where it is resident. producer: storage -> the node that
    makes it; resident storages and tangents have none. readers: storage -> nodes, ascending.
    again: nodes that may run more than once. reads: of each node, storages that are not resident:
    they may be missing. made_bytes: of each node, what it writes. held: to the end."""

    graph: CDGraph
    sizes: tuple[int, ...] = field(init=False)
    producer: dict[int, int] = field(init=False)
    readers: dict[int, tuple[int, ...]] = field(init=False)
    again: frozenset[int] = field(init=False)
    reads: tuple[tuple[int, ...], ...] = field(init=False)
    made_bytes: tuple[int, ...] = field(init=False)
    held: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        graph, data = self.graph, self.graph.data
        sizes = tuple(0 if d.kind.resident else d.size_bytes for d in data)
        reads = (tuple(d for d in n.reads if not data[d].kind.resident) for n in graph.nodes)
        computed = {
            "sizes": sizes,
            "producer": producers(graph),
            "readers": readers(graph),
            "again": may_run_again(graph),
            "reads": tuple(reads),
            "made_bytes": tuple(sum(sizes[d] for d in n.writes) for n in graph.nodes),
            "held": frozenset(graph.held),
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)

    def maker(self, d: int) -> int | None:
        """The node that makes storage `d` again; None where nothing does."""
        node = self.producer.get(d)
        return node if node in self.again else None

    def takes(self, node: ComputeNode) -> tuple[int, ...]:
        """Operands in whose storage the node may write its result (`schedule.taken_over`)."""
        made = self.made_bytes[node.index]
        return tuple(d for d in node.takes if self.sizes[d] == made)

    def may_go(self) -> frozenset[int]:
        """Storages of some size that can be made again, hence dropped."""
        return frozenset(
            d
            for d, size in enumerate(self.sizes)
            if size > 0 and d not in self.held and self.maker(d) is not None
        )


def rematerialization(
    reads: Callable[[int], Iterable[int]],
    producer: Callable[[int], int],
    is_there: Callable[[int], bool],
    wanted: Iterable[int],
) -> list[int]:
    """Nodes that run again, in order, so that all of `wanted` are there: their makers, and those of
    whatever these read that is not. reads: of a node; producer: of a storage."""
    nodes: set[int] = set()
    pending = [d for d in wanted if not is_there(d)]
    while pending:
        node = producer(pending.pop())
        if node not in nodes:
            nodes.add(node)
            pending += [d for d in reads(node) if not is_there(d)]
    return sorted(nodes)


def closure(
    reads: Callable[[int], Iterable[int]],
    producer: Callable[[int], int],
    may_run: Callable[[int], bool],
    seeds: Iterable[int],
) -> set[int]:
    """`seeds`, and every storage that making them again may read, whatever is there. reads: of a
    node, storages that may be missing."""
    closed: set[int] = set()
    pending = list(seeds)
    while pending:
        d = pending.pop()
        if d not in closed:
            closed.add(d)
            maker = producer(d)
            if may_run(maker):
                pending += reads(maker)
    return closed
