"""The rules of memory, as planners see them: the one place that says what a storage weighs, what
makes it, who reads it, what may run again, in whose storage a result may be written.

takes: a priced CDGraph. guarantees: `simulate` and `lifetimes` weigh storages by it, `verify` has
rules of its own, and what a planner makes is judged by those. Nothing else looks at sizes, makers
or takeovers of a graph to plan (`tests/test_rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

from rockplan.values.graph import (
    CDGraph,
    ComputeNode,
    DataKind,
    Queue,
    Takeover,
    may_run_again,
    producers,
    readers,
)


class GraphView:
    """Of one graph; each fact is found when it is asked for first."""

    def __init__(self, graph: CDGraph) -> None:
        self.graph = graph

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of each storage in bytes, 0 where it is resident or on the host; then of `states`."""
        sizes = (d.size_bytes if d.kind.weighs else 0 for d in self.graph.data)
        return (*sizes, *(self.graph.rng_state_bytes for _ in self.states))

    @cached_property
    def on_host(self) -> frozenset[int]:
        """Storages in the memory of the host: of `DataNode.size_bytes` there."""
        return frozenset(d.index for d in self.graph.data if d.kind is DataKind.HOST)

    @cached_property
    def has_copies(self) -> bool:
        """Does a node run on another queue than that of computations?"""
        return any(n.queue is not Queue.COMPUTE for n in self.graph.nodes)

    @cached_property
    def states(self) -> dict[int, int]:
        """Node that draws -> the generator's state before it, a storage numbered beyond those of
        the graph. Nothing makes it but the node's first execution, if it runs more than once; the
        others read it."""
        drawing = (n.index for n in self.graph.nodes if n.random)
        return {i: k for k, i in enumerate(drawing, len(self.graph.data))}

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Of each node: what is kept from its first execution to its last, and set aside at each
        one, if it runs more than once."""
        states, sizes = self.states, self.sizes
        return tuple(sizes[states[n.index]] if n.random else 0 for n in self.graph.nodes)

    @cached_property
    def producer(self) -> dict[int, int]:
        """Storage -> the first node that makes it; resident storages and tangents have none."""
        return producers(self.graph)

    @cached_property
    def remaker(self) -> dict[int, int]:
        """The same, with `maker` where there is one."""
        again = ((d, self.maker(d)) for d in self.producer)
        return self.producer | {d: i for d, i in again if i is not None}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Storage -> nodes, ascending."""
        return readers(self.graph)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, storages that are not resident: they may be missing."""
        data = self.graph.data
        return tuple(
            tuple(d for d in n.reads if not data[d].kind.resident) for n in self.graph.nodes
        )

    @cached_property
    def reads_again(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, the same where it runs again."""
        states = self.states
        return tuple(
            (*reads, states[i]) if i in states else reads for i, reads in enumerate(self.reads)
        )

    @cached_property
    def again(self) -> frozenset[int]:
        """Nodes that may run more than once."""
        return may_run_again(self.graph)

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """Of each node, what it writes."""
        return tuple(self.bytes_of(n.writes) for n in self.graph.nodes)

    @cached_property
    def takes(self) -> tuple[tuple[Takeover, ...], ...]:
        """Of each node, ways to write results where operands die that are as large, those that
        take more first."""
        return tuple(tuple(filter(self._fits, n.takes)) for n in self.graph.nodes)

    def _fits(self, takeover: Takeover) -> bool:
        pairs = zip(takeover.operands, takeover.results, strict=True)
        return all(self.sizes[operand] == self.sizes[result] for operand, result in pairs)

    def taken(self, node: int, dies: Callable[[int], bool]) -> Takeover | None:
        """How it writes results where operands die: the first way whose operands all do."""
        for takeover in self.takes[node]:
            if all(map(dies, takeover.operands)):
                return takeover
        return None

    @cached_property
    def taken_bytes(self) -> tuple[int, ...]:
        """Of each node, what it may save by that at most."""
        return tuple(
            max((self.bytes_of(t.operands) for t in takes), default=0) for takes in self.takes
        )

    @cached_property
    def tangents(self) -> frozenset[int]:
        """Storages that are alive from where the backward phase starts."""
        return frozenset(d.index for d in self.graph.data if d.kind is DataKind.TANGENT)

    @cached_property
    def held(self) -> frozenset[int]:
        """Storages that stay to the end."""
        return frozenset(self.graph.held)

    @cached_property
    def dropped(self) -> frozenset[int]:
        """Storages that must not be alive between the phases."""
        return frozenset(self.graph.dropped)

    @cached_property
    def may_go(self) -> frozenset[int]:
        """Storages of some size that can be made again, hence dropped."""
        return frozenset(
            d
            for d, size in enumerate(self.sizes)
            if size > 0 and d not in self.held and self.maker(d) is not None
        )

    @cached_property
    def makers(self) -> tuple[tuple[int, ...], ...]:
        """Of each storage and state, nodes that make it again."""
        makers: list[tuple[int, ...]] = [()] * len(self.sizes)
        for i in sorted(self.again):
            for d in self.graph.nodes[i].writes:
                makers[d] = (*makers[d], i)
        return tuple(makers)

    def maker(self, d: int) -> int | None:
        """The fastest of them; None where nothing makes it again."""
        makers = self.makers[d]
        if len(makers) > 1:
            return min(makers, key=lambda i: (self.graph.nodes[i].time_ns, i))
        return makers[0] if makers else None

    def bytes_of(self, storages: Iterable[int]) -> int:
        return sum(map(self.sizes.__getitem__, storages))

    def own_bytes(self, node: ComputeNode) -> int:
        """What the node takes beside its operands."""
        return node.workspace_bytes + self.made_bytes[node.index]


_latest: tuple[GraphView, ...] = ()


def view_of(graph: CDGraph) -> GraphView:
    """One of those of the latest graphs, or a new one: schedules of one graph are simulated one
    after another, and its facts take as long as a simulation."""
    global _latest
    known = _latest
    known_view = next((view for view in known if view.graph is graph), None)
    if known_view is None:
        known_view = GraphView(graph)
        _latest = (known_view, *known[: _MOST - 1])
    return known_view


_MOST = 4
"""A graph, the same as eager runs it, and with what is asked of a plan."""
