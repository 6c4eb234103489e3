"""The rules of memory for planners: the one place that says what a storage weighs, which nodes make
and read it, what may run again, and where a result may take over a storage.

takes: a priced CDGraph. guarantees: `simulate` and `lifetimes` take sizes from it; `verify`, which
judges what planners make, has rules of its own. No planner reads sizes, makers or takeovers from a
graph directly (`tests/test_rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

from rockplan.values import graph as graphs


class GraphView:
    """Facts of one graph, each computed at its first use. Tuples are indexed by node or storage."""

    def __init__(self, graph: graphs.CDGraph) -> None:
        self.graph = graph

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each storage, 0 if it is resident or on the host; then those of `states`."""
        sizes = (d.size_bytes if d.kind.weighs else 0 for d in self.graph.data)
        return (*sizes, *(self.graph.rng_state_bytes for _ in self.states))

    @cached_property
    def on_host(self) -> frozenset[int]:
        """Storages in host memory, where they take `DataNode.size_bytes`."""
        return frozenset(d.index for d in self.graph.data if d.kind is graphs.DataKind.HOST)

    @cached_property
    def has_copies(self) -> bool:
        """True if a node runs on another queue than that of computations."""
        return any(n.queue is not graphs.Queue.COMPUTE for n in self.graph.nodes)

    @cached_property
    def states(self) -> dict[int, int]:
        """Random node -> index of the storage of the generator's state before it, numbered beyond
        the graph's storages. The first execution makes it, if the node runs more than once; others
        read it."""
        drawing = (n.index for n in self.graph.nodes if n.random)
        return {i: k for k, i in enumerate(drawing, len(self.graph.data))}

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """For each node, bytes of the generator state that is saved from its first execution to its
        last, and set aside during each re-execution, if it runs more than once."""
        states, sizes = self.states, self.sizes
        return tuple(sizes[states[n.index]] if n.random else 0 for n in self.graph.nodes)

    @cached_property
    def producer(self) -> dict[int, int]:
        """Storage -> the first node that makes it; resident storages and tangents have none."""
        return graphs.producers(self.graph)

    @cached_property
    def remaker(self) -> dict[int, int]:
        """Storage -> the node that makes it again (`maker`), or else its producer."""
        again = ((d, self.maker(d)) for d in self.producer)
        return self.producer | {d: i for d, i in again if i is not None}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Storage -> the nodes that read it, ascending."""
        return graphs.readers(self.graph)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each node, storages that it reads and that are not resident: they may be missing."""
        data = self.graph.data
        return tuple(
            tuple(d for d in n.reads if not data[d].kind.resident) for n in self.graph.nodes
        )

    @cached_property
    def reads_again(self) -> tuple[tuple[int, ...], ...]:
        """For each node, what a re-execution reads: `reads`, and the saved generator state."""
        states = self.states
        return tuple(
            (*reads, states[i]) if i in states else reads for i, reads in enumerate(self.reads)
        )

    @cached_property
    def again(self) -> frozenset[int]:
        """Nodes that may run more than once, which none may that hands a gradient to autograd."""
        nodes, handed = self.graph.nodes, frozenset(self.graph.handed)
        return frozenset(n.index for n in nodes if n.recomputable and handed.isdisjoint(n.writes))

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """For each node, the bytes that it writes."""
        return tuple(self.bytes_of(n.writes) for n in self.graph.nodes)

    @cached_property
    def takes(self) -> tuple[tuple[graphs.Takeover, ...], ...]:
        """For each node, takeovers with results as large as operands, those that take more
        first."""
        return tuple(tuple(filter(self._fits, n.takes)) for n in self.graph.nodes)

    def _fits(self, takeover: graphs.Takeover) -> bool:
        pairs = zip(takeover.operands, takeover.results, strict=True)
        return all(self.sizes[operand] == self.sizes[result] for operand, result in pairs)

    def taken(self, node: int, dies: Callable[[int], bool]) -> graphs.Takeover | None:
        """Return the takeover that is used: the first whose operands all die; None if none does."""
        for takeover in self.takes[node]:
            if all(map(dies, takeover.operands)):
                return takeover
        return None

    @cached_property
    def taken_bytes(self) -> tuple[int, ...]:
        """For each node, the most bytes that a takeover may save."""
        return tuple(
            max((self.bytes_of(t.operands) for t in takes), default=0) for takes in self.takes
        )

    @cached_property
    def tangents(self) -> frozenset[int]:
        """Storages that come alive where the backward phase starts."""
        return frozenset(d.index for d in self.graph.data if d.kind is graphs.DataKind.TANGENT)

    @cached_property
    def held(self) -> frozenset[int]:
        """Storages that stay alive to the end once made."""
        return frozenset(self.graph.held)

    @cached_property
    def dropped(self) -> frozenset[int]:
        """Storages that must not be alive between the phases."""
        return frozenset(self.graph.dropped)

    @cached_property
    def may_go(self) -> frozenset[int]:
        """Storages that a schedule may free and make again: not empty, not held by the caller, and
        with a node that may run again to make them."""
        return frozenset(
            d
            for d, size in enumerate(self.sizes)
            if size > 0 and d not in self.held and self.maker(d) is not None
        )

    @cached_property
    def makers(self) -> tuple[tuple[int, ...], ...]:
        """For each storage and state, the nodes that make it again."""
        makers: list[tuple[int, ...]] = [()] * len(self.sizes)
        for i in sorted(self.again):
            for d in self.graph.nodes[i].writes:
                makers[d] = (*makers[d], i)
        return tuple(makers)

    def maker(self, d: int) -> int | None:
        """Return the fastest node that makes storage `d` again; None if there is none."""
        makers = self.makers[d]
        if len(makers) > 1:
            return min(makers, key=lambda i: (self.graph.nodes[i].time_ns, i))
        return makers[0] if makers else None

    def bytes_of(self, storages: Iterable[int]) -> int:
        return sum(map(self.sizes.__getitem__, storages))

    def own_bytes(self, node: graphs.ComputeNode) -> int:
        """Return the bytes that the node takes in addition to its operands."""
        return node.workspace_bytes + self.made_bytes[node.index]


_latest: tuple[GraphView, ...] = ()


def view_of(graph: graphs.CDGraph) -> GraphView:
    """Return the GraphView of `graph`; the latest `_MOST` are cached, by identity of the graph:
    many schedules of one graph are simulated in a row."""
    global _latest
    latest = _latest
    known_view = next((view for view in latest if view.graph is graph), None)
    if known_view is None:
        known_view = GraphView(graph)
        _latest = (known_view, *latest[: _MOST - 1])
    return known_view


_MOST = 4
"""Number of cached views: a graph, the same as eager runs it, and with constraints of a plan."""
