"""Copies: nodes that bring storages to host memory and back.

takes: a priced CDGraph, storages, a HostLink. returns: the graph with two optional nodes for each
of these storages: a copy out after the node that makes it, and a copy in that makes it again.
guarantees: forward nodes, storages and values keep their indices; without the copies, which are
optional, it is the same graph.
In a schedule, a copy out stands where the memory of its operand may be freed; it begins as soon as
the operand is made. A copy in stands where the memory of its result is allocated
(`oracles.clock`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rockplan.values import graph as graphs

STORE, FETCH = "host.store.default", "host.fetch.default"
"""Operators of copies: from tensors that share one storage to all of its bytes, and back."""


@dataclass(frozen=True, slots=True)
class HostLink:
    """The link between device and host: bytes per second in each direction, both at once."""

    out_bytes_per_s: int
    in_bytes_per_s: int

    def share(self, part: float) -> HostLink:
        """Return a link with the share `part` (0 to 1) of both rates."""
        return HostLink(int(part * self.out_bytes_per_s), int(part * self.in_bytes_per_s))


@dataclass(frozen=True, slots=True)
class Host:
    """Host memory for paging. size_bytes: the most that paged storages may take of it."""

    size_bytes: int
    link: HostLink


@dataclass(frozen=True, slots=True)
class Paged:
    """A storage that may be paged. data, host: indices of the storage on the device and of its copy
    on the host; store, fetch: indices of the nodes that copy it out and in."""

    data: int
    host: int
    store: int
    fetch: int


@dataclass(frozen=True, slots=True)
class Trip:
    """The way of one paged storage to the host and back, in ns of the plan's clock. leaves_ns,
    gone_ns: begin and end of the copy out. comes_ns, back_ns: begin and end of the first copy in.
    times_back: number of copies in; waits_ns: how long computations wait for all its copies."""

    data: int
    size_bytes: int
    leaves_ns: int
    gone_ns: int
    comes_ns: int
    back_ns: int
    times_back: int
    waits_ns: int


def with_copies(graph: graphs.CDGraph, storages: Iterable[int], link: HostLink) -> graphs.CDGraph:
    """Return `graph` with two optional nodes more for each of `storages` (data that forward nodes
    make): a copy out to a storage on the host at the end of the forward, and a copy back at the
    begin of the backward, with times by `link`. Backward nodes are renumbered."""
    chosen = sorted(set(storages))
    if not chosen:
        return graph
    maker = graphs.producers(graph)
    data, values = list(graph.data), list(graph.values)
    stores: list[graphs.ComputeNode] = []
    fetches: list[graphs.ComputeNode] = []
    for d in chosen:
        storage, made = graph.data[d], graph.nodes[maker[d]]
        host = graphs.DataNode(
            len(data), f"host_{storage.name}", graphs.DataKind.HOST, storage.size_bytes
        )
        data.append(host)
        calls: tuple[tuple[graphs.Call, ...], tuple[graphs.Call, ...]] = (), ()
        tensors = [v.index for v in graph.values if v.data == d and v.view is None]
        if tensors:
            spec = graphs.TensorSpec((storage.size_bytes,), (1,), 0, "torch.uint8", "cpu")
            stored = graphs.Value(len(values), host.index, host.name, spec)
            values.append(stored)
            out = graphs.Call(STORE, tuple(map(graphs.ValueRef, tensors)), (), (stored.index,))
            back = graphs.Call(FETCH, (graphs.ValueRef(stored.index),), (), tuple(tensors))
            calls = (out,), (back,)
        store = graphs.ComputeNode(
            index=0,
            name=f"store_{storage.name}",
            phase=graphs.Phase.FORWARD,
            reads=(d,),
            writes=(host.index,),
            time_ns=_time_ns(storage.size_bytes, link.out_bytes_per_s),
            calls=calls[0],
            recalls=calls[0],
            module=made.module,
            source=made.source,
            queue=graphs.Queue.OUT,
            optional=True,
        )
        stores.append(store)
        fetches.append(
            replace(
                store,
                name=f"fetch_{storage.name}",
                phase=graphs.Phase.BACKWARD,
                reads=store.writes,
                writes=store.reads,
                time_ns=_time_ns(storage.size_bytes, link.in_bytes_per_s),
                calls=calls[1],
                recalls=calls[1],
                queue=graphs.Queue.IN,
            )
        )
    copied = replace(graph, data=tuple(data), values=tuple(values))
    return with_nodes(copied, (*stores, *fetches))


def with_nodes(graph: graphs.CDGraph, nodes: Iterable[graphs.ComputeNode]) -> graphs.CDGraph:
    """Return `graph` with `nodes`, of any index, at the turn: of the forward phase first."""
    turn = len(graph.forward)
    new = tuple(replace(n, index=i) for i, n in enumerate(nodes, turn))
    later = (replace(n, index=n.index + len(new)) for n in graph.backward)
    order = tuple(shifted(graph.eager_order, turn, len(new)))
    own = graphs.required(new) if order else ()
    order = (*order[:turn], *own, *order[turn:])
    return replace(graph, nodes=(*graph.forward, *new, *later), eager_order=order)


def with_inputs(graph: graphs.CDGraph, sizes: Mapping[int, int]) -> graphs.CDGraph:
    """Return `graph` with storages of the caller that it may let go of after the call (`sizes`:
    their bytes) as activations: a first node hands them over, and the last one of the forward
    phase, when the results are there, stands for the caller, who holds them until then. Neither
    has calls, and each runs once."""
    if not sizes:
        return graph
    data = (
        replace(d, kind=graphs.DataKind.ACTIVATION, size_bytes=sizes[d.index])
        if d.index in sizes
        else d
        for d in graph.data
    )
    taken = tuple(sorted(sizes))
    take = graphs.ComputeNode(0, _TAKE, graphs.Phase.FORWARD, (), taken, recomputable=False)
    nodes = (take, *(replace(n, index=n.index + 1) for n in graph.nodes))
    order = (0, *(i + 1 for i in graph.eager_order)) if graph.eager_order else ()
    made = {d for n in graph.forward for d in n.writes}.intersection(graph.outputs)
    reads = tuple(sorted(made.union(taken)))
    last = graphs.ComputeNode(0, "return", graphs.Phase.FORWARD, reads, (), recomputable=False)
    return with_nodes(replace(graph, data=tuple(data), nodes=nodes, eager_order=order), [last])


def inputs(graph: graphs.CDGraph) -> tuple[int, ...]:
    """Return the storages that `with_inputs` made activations."""
    return graph.nodes[0].writes if graph.nodes and graph.nodes[0].name == _TAKE else ()


_TAKE = "input"


def copy_of(node: graphs.ComputeNode) -> graphs.Call | None:
    """Return the call of a node that copies a storage to the host or back, None for other nodes."""
    return node.calls[0] if node.calls and node.calls[0].op in (STORE, FETCH) else None


def with_fetches(graph: graphs.CDGraph, storages: Iterable[int]) -> graphs.CDGraph:
    """Return `graph` with an optional backward node for each of `storages`, which makes it again
    from nothing in no time: so a search sees copies in that arrive in time. Nodes are numbered as
    by `with_copies`, but without the copies out."""
    fetches = (
        graphs.ComputeNode(0, f"fetch_{d}", graphs.Phase.BACKWARD, (), (d,), optional=True)
        for d in sorted(set(storages))
    )
    return with_nodes(graph, fetches)


def shifted(order: Iterable[int], turn: int, by: int) -> list[int]:
    """Renumber node indices after `by` nodes were inserted at index `turn`."""
    return [i if i < turn else i + by for i in order]


def paged(graph: graphs.CDGraph) -> tuple[Paged, ...]:
    """Return the storages that `with_copies` gave copies, ascending."""
    fetch_of = {n.reads: n for n in graph.nodes if n.queue is graphs.Queue.IN}
    stores = [n for n in graph.nodes if n.queue is graphs.Queue.OUT]
    return tuple(Paged(n.reads[0], n.writes[0], n.index, fetch_of[n.writes].index) for n in stores)


def with_copies_of(graph: graphs.CDGraph, planned: graphs.CDGraph) -> graphs.CDGraph:
    """Return `graph` with the copies of `planned`, the same graph captured in another process or at
    other sizes, and their times by bytes; unchanged if `planned` has none, or if a copied storage
    has no maker in `graph`."""
    storages = [p.data for p in paged(planned)]
    if not storages or not graphs.producers(graph).keys() >= set(storages):
        return graph
    copied = with_copies(graph, storages, HostLink(1, 1))
    nodes = [*copied.nodes]
    for known in (n for n in planned.nodes if n.queue is not graphs.Queue.COMPUTE):
        was, now = (g.data[known.reads[0]].size_bytes for g in (planned, copied))
        time_ns = -(-known.time_ns * now // max(was, 1))
        nodes[known.index] = replace(nodes[known.index], time_ns=time_ns)
    return replace(copied, nodes=tuple(nodes))


def without_copies(graph: graphs.CDGraph) -> graphs.CDGraph:
    """Return `graph` as it was before `with_copies`: without host storages and copies; the same
    object if it has none."""
    kept: Sequence[graphs.ComputeNode] = [n for n in graph.nodes if n.queue is graphs.Queue.COMPUTE]
    gone = len(graph.nodes) - len(kept)
    if not gone:
        return graph
    data = tuple(d for d in graph.data if d.kind is not graphs.DataKind.HOST)
    turn = sum(n.phase is graphs.Phase.FORWARD for n in kept)
    return replace(
        graph,
        data=data,
        values=tuple(v for v in graph.values if v.data < len(data)),
        nodes=tuple(replace(n, index=i) for i, n in enumerate(kept)),
        eager_order=tuple(shifted(graph.eager_order, turn, -gone)),
    )


def _time_ns(size_bytes: int, bytes_per_s: int) -> int:
    return -(-size_bytes * 1_000_000_000 // bytes_per_s)
