"""Open workspaces: what operators take inside, at sizes that nobody has measured.

takes: a priced graph whose sizes are symbols, and the workspaces of the same nodes at another size.
returns: the graph with a symbol of its own for each workspace that differs; its value at given
sizes. A workspace that was the same at both sizes is taken to be the same at all, which is an
assumption; that of a kernel only if it is none: then its code allocates nothing. guarantees: any
other is measured at the size that is asked for, by running the node's calls once, or bounded by
what it takes with larger operands: temporaries grow with their operands, but for those of
convolutions, recurrent layers and kernels, which choose their way by size.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rockplan.graph_builder.costs.call_key import call_keys
from rockplan.graph_builder.costs.estimate import fallback_rates, roofline
from rockplan.graph_builder.costs.price import price, with_measured_memory
from rockplan.graph_builder.recorded.specs import is_floating
from rockplan.values import graph as graphs
from rockplan.values.sizes import Size, resized, text_of

PREFIX = "workspace_"


def with_open_workspaces(graph: graphs.CDGraph, earlier: Sequence[int]) -> graphs.CDGraph:
    """Return `graph` in which workspaces that differ from those in `earlier` (of the same nodes, in
    eager's order) are symbols, one for all nodes that do the same."""
    order = graph.eager_order or range(len(graph.nodes))
    before = dict(zip(order, earlier, strict=True))
    kinds = {n.index: _kind(graph, n) for n in graph.nodes}
    open_kinds = {
        kinds[n.index]
        for n in graph.nodes
        if n.workspace_bytes != before[n.index]
        or (n.workspace_bytes and any(graphs.is_kernel(call.op) for call in n.calls))
    }
    return _opened(graph, kinds, open_kinds)


def with_workspaces_open(graph: graphs.CDGraph) -> graphs.CDGraph:
    """Return an unpriced graph in which the workspace of each node is a symbol, one for all nodes
    that do the same. What nodes of several calls take follows no expression: here it is a byte, as
    a mark that there may be any."""
    kinds = {n.index: _kind(graph, n) for n in graph.nodes}
    marked = (replace(n, workspace_bytes=int(len(n.calls) > 1)) for n in graph.nodes)
    graph = replace(graph, nodes=tuple(marked))
    return _opened(graph, kinds, {*kinds.values()})


def _opened(
    graph: graphs.CDGraph, kinds: Mapping[int, str], opened: Iterable[str]
) -> graphs.CDGraph:
    names = {kind: f"{PREFIX}{i}" for i, kind in enumerate(sorted(opened))}
    nodes = tuple(
        replace(n, workspace_bytes=Size(n.workspace_bytes, names[kinds[n.index]]))
        if kinds[n.index] in names
        else n
        for n in graph.nodes
    )
    return replace(graph, nodes=nodes)


def _kind(graph: graphs.CDGraph, node: graphs.ComputeNode) -> str:
    def described(argument: object) -> object:
        if isinstance(argument, graphs.ValueRef):
            spec = graph.values[argument.index].spec
            layout = [*map(text_of, spec.shape), "/", *map(text_of, spec.stride)]
            return layout, spec.dtype, spec.device
        if isinstance(argument, tuple):
            return [*map(described, argument)]
        return text_of(argument) if isinstance(argument, int | float) else repr(argument)

    calls = [(c.op, described(c.args), described(c.kwargs)) for c in node.calls]
    return repr((calls, [text_of(graph.data[d].size_bytes) for d in node.writes]))


@dataclass(frozen=True, slots=True)
class OpenWorkspaces:
    """Measures the workspaces that are symbols in a graph. of: symbol -> the node that is run for
    it; on: symbol -> positions of the sizes that its operands follow from; known: symbol -> these
    sizes -> bytes, of those measured so far."""

    graph: graphs.CDGraph
    of: Mapping[str, int]
    on: Mapping[str, tuple[int, ...]]
    known: Mapping[str, dict[tuple[int, ...], int]]

    @classmethod
    def in_graph(
        cls, graph: graphs.CDGraph, sizes: tuple[int, ...], names: Sequence[str]
    ) -> OpenWorkspaces:
        """Return those of a graph, which was measured at `sizes`. names: of these."""
        of: dict[str, int] = {}
        for node in graph.nodes:
            if isinstance(node.workspace_bytes, Size):
                of.setdefault(node.workspace_bytes.text, node.index)
        read = {n: {*re.findall(r"\w+", _kind(graph, graph.nodes[i]))} for n, i in of.items()}
        on = {n: tuple(i for i, name in enumerate(names) if name in read[n]) for n in of}
        known = {
            name: {tuple(sizes[i] for i in on[name]): int(graph.nodes[index].workspace_bytes)}
            for name, index in of.items()
        }
        return cls(graph, of, on, known)

    def bounds(self, sizes: tuple[int, ...]) -> tuple[dict[str, int], dict[str, int]]:
        """Return symbol -> bytes that the workspaces take at least at `sizes`, and at most, the
        latter for those of which that is known, without running anything."""
        least: dict[str, int] = {}
        most: dict[str, int] = {}
        for name, on in self.on.items():
            own = tuple(sizes[i] for i in on)
            calls = self.graph.nodes[self.of[name]].calls
            known = [*self.known[name].items()]
            chooses = any(word in call.op for call in calls for word in _CHOOSE_BY_SIZE)
            if own in self.known[name] or chooses:
                known = [(at, size_bytes) for at, size_bytes in known if at == own]
            smaller = (b for at, b in known if all(map(operator.le, at, own)))
            larger = [b for at, b in known if all(map(operator.ge, at, own))]
            least[name] = max(smaller, default=0)
            most |= {name: min(larger)} if larger else {}
        return least, most

    def graph_at(self, numbers: Mapping[str, int | float], names: Iterable[str]) -> graphs.CDGraph:
        """Return the graph with those nodes only that are run for the symbols `names`, at other
        sizes, without prices. numbers: as for `measured`."""
        known = {**numbers, **dict.fromkeys(self.of, 0)}
        nodes, named = _executed(self.graph, (self.of[name] for name in names))
        values, data = [*self.graph.values], [*self.graph.data]
        for v in named:
            values[v] = resized(values[v], known)
            data[values[v].data] = resized(data[values[v].data], known)
        nodes = tuple(resized(n, known) for n in nodes)
        return replace(self.graph, values=tuple(values), data=tuple(data), nodes=nodes)

    def measured(
        self,
        sizes: tuple[int, ...],
        numbers: Mapping[str, int | float],
        given: Mapping[int, torch.Tensor],
        names: Iterable[str],
    ) -> dict[str, int]:
        """Return symbol -> bytes at `sizes` for those of `names`. numbers: expression -> its value
        there; given: value -> real tensor, of integer arguments."""
        own = {name: tuple(sizes[i] for i in self.on[name]) for name in names}
        missing = [name for name, at in own.items() if at not in self.known[name]]
        if missing:
            graph = self.graph_at(numbers, missing)
            keys = call_keys(graph)
            profile = roofline(graph, fallback_rates(graph), keys)
            profile = with_measured_memory(graph, given, profile, keys, is_once=True)
            priced = price(graph, profile, keys)
            found = {n.index: n.workspace_bytes for n in priced.nodes}
            for name in missing:
                self.known[name][own[name]] = found[self.of[name]]
        return {name: self.known[name][at] for name, at in own.items()}


_CHOOSE_BY_SIZE = ("conv", "rnn", "lstm", "gru", "rockplan")
"""In names of operators whose kernels may take more for less."""


def _executed(
    graph: graphs.CDGraph, wanted: Iterable[int]
) -> tuple[tuple[graphs.ComputeNode, ...], frozenset[int]]:
    """Return the nodes `wanted` with those that make integers for them, in order, and the values
    that the calls of all take and make, with what those are views of."""
    maker = graphs.producers(graph)
    nodes: set[int] = set()
    values: set[int] = set()
    left = [*wanted]
    while left:
        index = left.pop()
        if index in nodes:
            continue
        nodes.add(index)
        waiting = [
            v for c in graph.nodes[index].calls for v in (*map(_index, graphs.refs(c)), *c.made)
        ]
        while waiting:
            value = waiting.pop()
            if value in values:
                continue
            values.add(value)
            named = graph.values[value]
            waiting += map(_index, graphs.refs(named.view)) if named.view else ()
            if not is_floating(named.spec) and named.data in maker:
                left.append(maker[named.data])
    return tuple(graph.nodes[i] for i in sorted(nodes)), frozenset(values)


def _index(ref: graphs.ValueRef) -> int:
    return ref.index


def given_integers(
    graph: graphs.CDGraph, inputs: Sequence[tuple[int, int]], leaves: Sequence[object]
) -> dict[int, torch.Tensor]:
    """Return value -> real tensor for integer arguments. inputs: (leaf position, value)."""
    tensors = ((value, leaves[position]) for position, value in inputs)
    return {
        value: tensor
        for value, tensor in tensors
        if isinstance(tensor, torch.Tensor)
        and not (tensor.is_floating_point() or tensor.is_complex())
        and graph.data[graph.values[value].data].kind is graphs.DataKind.INPUT
    }
