"""Copies: nodes that bring storages to the memory of the host and back.

takes: a priced CDGraph, storages, a HostLink. returns: the graph in which each of them may be
copied out after it is made, and made again by a copy in. guarantees: forward nodes, storages and
values keep their indices; without the copies, which are optional, it is the same graph.

A copy out stands where the room of what it reads may be given back; it begins when that is made. A
copy in stands where the room of what it makes is taken (`oracles.clock`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rockplan.values.graph import (
    Call,
    CDGraph,
    ComputeNode,
    DataKind,
    DataNode,
    Phase,
    Queue,
    TensorSpec,
    Value,
    ValueRef,
    producers,
)

STORE, FETCH = "host.store.default", "host.fetch.default"
"""What copies call: of tensors that lie in one storage, to all of its bytes, and back."""


@dataclass(frozen=True, slots=True)
class HostLink:
    """Between device and host: bytes a second each way, both ways at once."""

    out_bytes_per_s: int
    in_bytes_per_s: int

    def share(self, part: float) -> HostLink:
        return HostLink(int(part * self.out_bytes_per_s), int(part * self.in_bytes_per_s))


@dataclass(frozen=True, slots=True)
class Host:
    """size_bytes: of its memory, that paged storages may take at most."""

    size_bytes: int
    link: HostLink


@dataclass(frozen=True, slots=True)
class Paged:
    """A storage that may be paged. host: where it goes; store, fetch: nodes that copy it."""

    data: int
    host: int
    store: int
    fetch: int


@dataclass(frozen=True, slots=True)
class Trip:
    """Of a paged storage to the host and back, by the clock of the plan: from when to when it
    leaves, from when it comes back first, and when it is there. times_back: how often it comes
    back; waits_ns: how long computations wait for all its copies."""

    data: int
    size_bytes: int
    leaves_ns: int
    gone_ns: int
    comes_ns: int
    back_ns: int
    times_back: int
    waits_ns: int


def with_copies(graph: CDGraph, storages: Iterable[int], link: HostLink) -> CDGraph:
    """`graph` with a copy out and a copy in of each of `storages`, which a forward node makes."""
    chosen = sorted(set(storages))
    if not chosen:
        return graph
    turn, count = len(graph.forward), len(chosen)
    maker = producers(graph)
    data, values = list(graph.data), list(graph.values)
    stores: list[ComputeNode] = []
    fetches: list[ComputeNode] = []
    for number, d in enumerate(chosen):
        there, made = graph.data[d], graph.nodes[maker[d]]
        host = DataNode(len(data), f"host_{there.name}", DataKind.HOST, there.size_bytes)
        data.append(host)
        calls: tuple[tuple[Call, ...], tuple[Call, ...]] = (), ()
        tensors = [v.index for v in graph.values if v.data == d and v.view is None]
        if tensors:
            spec = TensorSpec((there.size_bytes,), (1,), 0, "torch.uint8", "cpu")
            stored = Value(len(values), host.index, host.name, spec)
            values.append(stored)
            out = Call(STORE, tuple(map(ValueRef, tensors)), (), (stored.index,))
            back = Call(FETCH, (ValueRef(stored.index),), (), tuple(tensors))
            calls = (out,), (back,)
        store = ComputeNode(
            index=turn + number,
            name=f"store_{there.name}",
            phase=Phase.FORWARD,
            reads=(d,),
            writes=(host.index,),
            time_ns=_time_ns(there.size_bytes, link.out_bytes_per_s),
            calls=calls[0],
            recalls=calls[0],
            module=made.module,
            source=made.source,
            queue=Queue.OUT,
            optional=True,
        )
        stores.append(store)
        fetches.append(
            replace(
                store,
                index=turn + count + number,
                name=f"fetch_{there.name}",
                phase=Phase.BACKWARD,
                reads=store.writes,
                writes=store.reads,
                time_ns=_time_ns(there.size_bytes, link.in_bytes_per_s),
                calls=calls[1],
                recalls=calls[1],
                queue=Queue.IN,
            )
        )
    later = (replace(n, index=n.index + 2 * count) for n in graph.backward)
    return replace(
        graph,
        data=tuple(data),
        values=tuple(values),
        nodes=(*graph.forward, *stores, *fetches, *later),
        eager_order=tuple(shifted(graph.eager_order, turn, 2 * count)),
    )


def copy_of(node: ComputeNode) -> Call | None:
    """The call of a node that copies a storage to the host or back, None of others."""
    return node.calls[0] if node.calls and node.calls[0].op in (STORE, FETCH) else None


def with_fetches(graph: CDGraph, storages: Iterable[int]) -> CDGraph:
    """`graph` in which each of `storages` may be made again of nothing and for nothing: what a
    search sees of copies that come when they are needed. Nodes are numbered as by `with_copies`,
    but for the copies out, of which there are none."""
    chosen = sorted(set(storages))
    turn = len(graph.forward)
    fetches = (
        ComputeNode(turn + k, f"fetch_{d}", Phase.BACKWARD, (), (d,), optional=True)
        for k, d in enumerate(chosen)
    )
    later = (replace(n, index=n.index + len(chosen)) for n in graph.backward)
    return replace(
        graph,
        nodes=(*graph.forward, *fetches, *later),
        eager_order=tuple(shifted(graph.eager_order, turn, len(chosen))),
    )


def shifted(order: Iterable[int], turn: int, by: int) -> list[int]:
    """Indices of nodes before which others were put at `turn`."""
    return [i if i < turn else i + by for i in order]


def paged(graph: CDGraph) -> tuple[Paged, ...]:
    """What `with_copies` put there, ascending."""
    fetch_of = {n.reads: n for n in graph.nodes if n.queue is Queue.IN}
    stores = [n for n in graph.nodes if n.queue is Queue.OUT]
    return tuple(Paged(n.reads[0], n.writes[0], n.index, fetch_of[n.writes].index) for n in stores)


def with_copies_of(graph: CDGraph, planned: CDGraph) -> CDGraph:
    """`graph` with the copies of `planned`, the same graph from elsewhere, and their times."""
    storages = [p.data for p in paged(planned)]
    if not storages or not producers(graph).keys() >= set(storages):
        return graph
    made = with_copies(graph, storages, HostLink(1, 1))
    times = {n.index: n.time_ns for n in planned.nodes if n.queue is not Queue.COMPUTE}
    nodes = tuple(replace(n, time_ns=times.get(n.index, n.time_ns)) for n in made.nodes)
    return replace(made, nodes=nodes)


def without_copies(graph: CDGraph) -> CDGraph:
    """`graph` before `with_copies`."""
    kept: Sequence[ComputeNode] = [n for n in graph.nodes if n.queue is Queue.COMPUTE]
    gone = len(graph.nodes) - len(kept)
    if not gone:
        return graph
    data = tuple(d for d in graph.data if d.kind is not DataKind.HOST)
    turn = sum(n.phase is Phase.FORWARD for n in kept)
    return replace(
        graph,
        data=data,
        values=tuple(v for v in graph.values if v.data < len(data)),
        nodes=tuple(replace(n, index=i) for i, n in enumerate(kept)),
        eager_order=tuple(shifted(graph.eager_order, turn, -gone)),
    )


def _time_ns(size_bytes: int, bytes_per_s: int) -> int:
    return -(-size_bytes * 1_000_000_000 // bytes_per_s)
