"""Reorder: backward nodes in orders that need less memory than eager's.

takes: a CDGraph, priced or not. returns: the same graph with its backward nodes renumbered, and
eager's order in `CDGraph.eager_order`. guarantees: operands of a node are made before it; random
draws, and nodes that read or change outside state which the run changes, stay in order; with the
sizes of the graph no node needs more in the `keep_all` schedule than before, whatever the
workspaces are.

Autograd computes the gradient of an input before that of the weight of the same layer, so the
former waits while the latter is made. In the other order only the gradient of the weight is alive,
and autograd takes it at once. In general, a node moves before its neighbours if that raises the
bytes of none and lowers the most that any of them needs.

A move looks at neighbours only, so that equal blocks get equal orders, and stays short, so that the
graph can be cut into blocks as before. This is not the optimum: gradients of wide layers could all
wait until the activations of the whole model are freed, but then all their operands would wait too.
Forward nodes stay in place: what autograd saves of them is needed anyway, and generated code
follows the user's model. The first backward nodes stay too, up to the one that needs as much as the
caller's loss did just before: if all needed less, the peak of a step would be at that loss, which
is not known and not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import simulate, timeline
from rockplan.values import graph as graphs
from rockplan.values.schedule import Compute, Schedule, keep_all

REACH = 16
"""Most neighbours that a node may pass. In the models of `benchmarks.below_eager` none passes more
than two."""

WORTH = 0.01
"""Share of the largest result concerned that a move must save. Without it the sums that compute
gradients of biases move too, and nothing is gained."""


def reordered(graph: graphs.CDGraph) -> graphs.CDGraph:
    """Return `graph` with its backward nodes in an order in which no node needs more bytes, and
    often fewer are needed; all nodes are renumbered, and `eager_order` has the order they had.
    Returns `graph` itself if nothing moves."""
    first = len(graph.forward)
    after, memory = predecessors(graph), _Liveness(graph)
    # The first ones, beside which the caller's loss hides, stay.
    fixed = first + _beside_the_loss(graph)
    order = [*range(fixed)]
    for node in graph.nodes[first:fixed]:
        memory.run(node)
    for node in graph.nodes[fixed:]:
        before = _place(graph, memory, after[node.index], order[fixed:], node)
        order.insert(fixed + before, node.index)
        memory.run(node)
    if order == sorted(order):
        return graph
    place = {node: position for position, node in enumerate(order)}
    eager_order = tuple(place[node] for node in range(len(order)))
    return replace(renumbered(graph, order), eager_order=eager_order)


def renumbered(graph: graphs.CDGraph, order: Sequence[int]) -> graphs.CDGraph:
    """Return `graph` with its nodes in `order` (old indices), and without an `eager_order`."""
    nodes = tuple(replace(graph.nodes[old], index=new) for new, old in enumerate(order))
    return replace(graph, nodes=nodes, eager_order=())


def in_eager_order_of(graph: graphs.CDGraph, schedule: Schedule) -> Schedule:
    """Return `schedule` with the node numbers that the graph had before `reordered`."""
    if not graph.eager_order:
        return schedule
    eager = dict(zip(graph.eager_order, graphs.required(graph.nodes), strict=True))
    events = (
        Compute(eager.get(e.node, e.node)) if isinstance(e, Compute) else e for e in schedule.events
    )
    return replace(schedule, events=tuple(events))


def _beside_the_loss(graph: graphs.CDGraph) -> int:
    """How many backward nodes keep their places: up to and including the first one during which at
    least as many bytes are alive as beside the caller's loss, or else the one with most."""
    schedule = keep_all(graph)
    steps = zip(schedule.events, timeline(graph, schedule), strict=True)
    needs = [step.during_bytes for event, step in steps if isinstance(event, Compute)]
    needs = needs[len(graph.forward) :]
    loss_bytes = simulate(graph, schedule).saved_bytes + graphs.caller_bytes(graph)
    enough_bytes = min(loss_bytes, max(needs, default=0))
    return 1 + next((k for k, bytes_ in enumerate(needs) if bytes_ >= enough_bytes), 0)


def predecessors(graph: graphs.CDGraph) -> list[set[int]]:
    """Return for each node the nodes that must run before it: makers of what it reads, the node
    before in a fixed order (random, with effects), earlier readers of a gradient that autograd adds
    to. What follows from those of other nodes is left out."""
    producer = graphs.producers(graph)
    before = [{producer[d] for d in n.reads if d in producer} for n in graph.nodes]
    last: int | None = None
    for node in graph.nodes:
        if node.random or not node.recomputable or node.calls != node.recalls:
            if last is not None:
                before[node.index].add(last)
            last = node.index
    reading = graphs.readers(graph)
    for data in graphs.added_to(graph):
        for earlier, later in pairwise(reading[data]):
            before[later].add(earlier)
    return before


@dataclass(frozen=True, slots=True)
class _ByteEffect:
    """Bytes of running a node, without workspace. rise: needed above what is alive before it; net:
    change of what is alive from before to after it."""

    rise: int
    net: int


class _Liveness:
    """Counts the remaining readers of each storage, while nodes run and are undone."""

    def __init__(self, graph: graphs.CDGraph) -> None:
        view = GraphView(graph)
        self._view, self._sizes, self._made = view, view.sizes, view.made_bytes
        first = len(graph.forward)
        self._readers_left = [0] * len(graph.data)
        for data, nodes in view.readers.items():
            self._readers_left[data] = sum(n >= first for n in nodes) + (data in graph.held)

    def run(self, node: graphs.ComputeNode) -> None:
        for d in node.reads:
            self._readers_left[d] -= 1

    def undo(self, node: graphs.ComputeNode) -> None:
        for d in node.reads:
            self._readers_left[d] += 1

    def effect(self, node: graphs.ComputeNode) -> _ByteEffect:
        """Return by how many bytes memory rises while `node` runs now, and by how many it differs
        after it, takeovers counted."""
        dying = [d for d in node.reads if self._readers_left[d] == 1]
        made = self._made[node.index]
        unread = sum(self._sizes[d] for d in node.writes if not self._readers_left[d])
        taken = self._view.taken(node.index, dying.__contains__)
        taken_bytes = self._view.bytes_of(taken.operands) if taken else 0
        freed = unread + sum(self._sizes[d] for d in dying)
        return _ByteEffect(rise=made - taken_bytes, net=made - freed)


def _place(
    graph: graphs.CDGraph,
    memory: _Liveness,
    after: set[int],
    order: Sequence[int],
    node: graphs.ComputeNode,
) -> int:
    """Return the index in `order` (node indices) at which to insert `node`: as far to the front as
    lowers memory enough.

    after: nodes that it must follow. `memory` is in the state after all of `order`, before and
    after the call. Bytes are relative to what is alive before the neighbours in question: `in_hand`
    is the most that any of them and `node` need in the current order, `passed` after `node` ran
    first.
    """
    best = place = len(order)
    last = memory.effect(node)
    in_hand = largest = last.rise
    passed = 0
    undone: list[graphs.ComputeNode] = []
    while place and len(undone) < REACH and order[place - 1] not in after:
        neighbour = graph.nodes[order[place - 1]]
        memory.undo(neighbour)
        undone.append(neighbour)
        before, first = memory.effect(neighbour), memory.effect(node)
        memory.run(node)
        second = memory.effect(neighbour)
        memory.undo(node)
        if first.rise > before.net + last.rise or first.net + second.rise > before.rise:
            break
        place -= 1
        last = first
        in_hand = max(before.rise, before.net + in_hand)
        passed = max(second.rise, second.net + passed)
        largest = max(largest, before.rise, first.rise)
        if in_hand - max(first.rise, first.net + passed) > WORTH * largest:
            best = place
    for neighbour in reversed(undone):
        memory.run(neighbour)
    return best
