"""Keys of calls: calls with equal keys cost the same; and the device that a graph runs on."""

from __future__ import annotations

from rockplan.graph_builder.digests import canonical_literal, digest, spec_fields
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.recorded.specs import needed_bytes
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import Call, CDGraph, ValueRef, refs


def call_key(graph: CDGraph, call: Call) -> str:
    """Return a digest (hex) of all that a call's time and bytes depend on, the values of tensors
    aside; equal calls are measured once. It covers the operator, specs of tensors (shape, strides,
    dtype, device), literals, dtypes of results (or their specs, if shapes depend on values), and
    for a call that copies whole storages their sizes."""
    copies = copies_storages(graph, call)

    def described(argument: object) -> object:
        """An argument as JSON values, a tensor as its spec at offset 0 and, if `copies`, its
        bytes."""
        if isinstance(argument, ValueRef):
            value = graph.values[argument.index]
            spec = ["tensor", *spec_fields(value.spec, 0)]
            return [spec, graph.data[value.data].size_bytes] if copies else spec
        if isinstance(argument, tuple | list):
            return ["sequence", [described(item) for item in argument]]
        return canonical_literal(argument)

    arguments = [[name, described(value)] for name, value in call.kwargs]
    results: list[object] = [
        None if v is None else graph.values[v].spec.dtype for v in call.results
    ]
    if facts.facts_of(call.op).shape_by_values:
        results = [None if v is None else described(ValueRef(v)) for v in call.results]
    return digest([call.op, described(call.args), arguments, results])


Keys = tuple[tuple[str, ...], ...]
"""Keys of the calls of each node, by index."""


def call_keys(graph: CDGraph) -> Keys:
    """Return `call_key` of every call. Takes as long as all other work of pricing, so keep them."""
    return tuple(tuple(call_key(graph, call) for call in node.calls) for node in graph.nodes)


@paused_collection()
def calls_by_key(graph: CDGraph, keys: Keys) -> dict[str, list[Call]]:
    """Return key -> calls that cost the same, ordered by their first. keys: of `graph`."""
    calls: dict[str, list[Call]] = {}
    for node, own_keys in zip(graph.nodes, keys, strict=True):
        for key, call in zip(own_keys, node.calls, strict=True):
            calls.setdefault(key, []).append(call)
    return calls


def copies_storages(graph: CDGraph, call: Call) -> bool:
    """True if a result lies in a storage larger than its elements need, and not in that of an
    argument: the call copies the whole storage that an argument is part of (`slice_scatter`)."""
    made = [graph.values[v] for v in call.made]
    larger = {v.data for v in made if graph.data[v.data].size_bytes > needed_bytes(v.spec)}
    if not larger:
        return False
    return not larger.issubset(graph.values[ref.index].data for ref in refs(call))


def device_of(graph: CDGraph) -> str:
    """Return the accelerator that the graph's tensors are on, if any, else 'cpu'."""
    devices = sorted({v.spec.device for v in graph.values} - {"cpu"})
    return devices[0] if devices else "cpu"
