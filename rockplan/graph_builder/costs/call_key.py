"""Which calls cost the same, and where they run.

takes: a CDGraph, a call. returns: a digest, a device.
"""

from __future__ import annotations

from rockplan.graph_builder.digests import canonical_literal, digest, spec_fields
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.recorded.specs import needed_bytes
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import Call, CDGraph, ValueRef, value_refs


def call_key(graph: CDGraph, call: Call) -> str:
    """Digest of operator, argument specs (shape, strides, dtype, device), literals and dtypes of
    results, which may be the default one (of results whose shapes depend on values, their specs);
    of a call that copies storages, their sizes: equal for calls that cost the same."""
    copies = copies_storages(graph, call)

    def described(argument: object) -> object:
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
"""Of the calls of each node."""


def call_keys(graph: CDGraph) -> Keys:
    """As `call_key`: to make them takes as long as all else that pricing does."""
    return tuple(tuple(call_key(graph, call) for call in node.calls) for node in graph.nodes)


@paused_collection()
def calls_by_key(graph: CDGraph, keys: Keys) -> dict[str, list[Call]]:
    """The calls that cost the same, in order of their first. keys: of `graph`."""
    calls: dict[str, list[Call]] = {}
    for node, own_keys in zip(graph.nodes, keys, strict=True):
        for key, call in zip(own_keys, node.calls, strict=True):
            calls.setdefault(key, []).append(call)
    return calls


def copies_storages(graph: CDGraph, call: Call) -> bool:
    """True if a result lives in more memory than its elements need, as in a copy of the storage
    that an argument is a part of (`slice_scatter` of rows)."""
    made = [graph.values[v] for v in call.made]
    larger = {v.data for v in made if graph.data[v.data].size_bytes > needed_bytes(v.spec)}
    if not larger:
        return False
    refs = value_refs((call.args, [a for _, a in call.kwargs]))
    return not larger.issubset(graph.values[ref.index].data for ref in refs)


def device_of(graph: CDGraph) -> str:
    """The accelerator that the graph's tensors live on, if any, else the CPU."""
    devices = sorted({v.spec.device for v in graph.values} - {"cpu"})
    return devices[0] if devices else "cpu"
