"""Open workspaces: what operators take inside, at sizes that nobody has measured.

takes: a priced graph whose sizes are symbols, and the workspaces of the same nodes at another size.
returns: the graph with a symbol of its own for each workspace that differs; its value at given
sizes. A workspace that was the same, or none, at both sizes is taken to be the same at all, which
is an assumption. guarantees: any other is measured at the size that is asked for, by running the
node's calls once, or bounded by what it takes with larger operands: temporaries grow with their
operands, but for those of convolutions and recurrent layers, whose kernels choose their way by
size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from rockplan.graph_builder.costs.call_key import call_keys
from rockplan.graph_builder.costs.price import price
from rockplan.graph_builder.costs.scaled import plain_workspace_bytes, sized
from rockplan.graph_builder.recorded.specs import is_floating
from rockplan.values.graph import CDGraph, ComputeNode, DataKind, ValueRef, producers, refs
from rockplan.values.sizes import Size, resized, text_of

PREFIX = "workspace_"


def with_open_workspaces(graph: CDGraph, earlier: Sequence[int]) -> CDGraph:
    """Return `graph` in which workspaces that differ from those in `earlier` (of the same nodes, in
    eager's order) are symbols, one for all nodes that do the same."""
    order = graph.eager_order or range(len(graph.nodes))
    before = dict(zip(order, earlier, strict=True))
    kinds = {n.index: _kind(graph, n) for n in graph.nodes}
    open_kinds = {
        kinds[n.index]
        for n in graph.nodes
        if n.workspace_bytes != before[n.index]
        and any(plain_workspace_bytes(graph, call) is None for call in n.calls)
    }
    return _opened(graph, kinds, open_kinds)


def with_workspaces_open(graph: CDGraph) -> CDGraph:
    """Return an unpriced graph in which the workspace of each node is a symbol, one for all nodes
    that do the same. What nodes of several calls take follows no expression: here it is a byte, as
    a mark that there may be any."""
    kinds = {n.index: _kind(graph, n) for n in graph.nodes}
    marked = (replace(n, workspace_bytes=int(len(n.calls) > 1)) for n in graph.nodes)
    graph = replace(graph, nodes=tuple(marked))
    return _opened(graph, kinds, {*kinds.values()})


def _opened(graph: CDGraph, kinds: Mapping[int, str], opened: Iterable[str]) -> CDGraph:
    names = {kind: f"{PREFIX}{i}" for i, kind in enumerate(sorted(opened))}
    nodes = tuple(
        replace(n, workspace_bytes=Size(n.workspace_bytes, names[kinds[n.index]]))
        if kinds[n.index] in names
        else n
        for n in graph.nodes
    )
    return replace(graph, nodes=nodes)


def _kind(graph: CDGraph, node: ComputeNode) -> str:
    def described(argument: object) -> object:
        if isinstance(argument, ValueRef):
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
    it; on: symbol -> positions of the sizes that its operands follow from; nodes: those of `of`,
    and those that make the integers that they take; values: those that all these calls take and
    make; known: sizes -> symbol -> bytes, of those measured so far."""

    graph: CDGraph
    of: Mapping[str, int]
    on: Mapping[str, tuple[int, ...]]
    nodes: tuple[ComputeNode, ...]
    values: frozenset[int]
    known: dict[tuple[int, ...], dict[str, int]] = field(default_factory=dict)

    @classmethod
    def in_graph(
        cls, graph: CDGraph, sizes: tuple[int, ...], names: Sequence[str]
    ) -> OpenWorkspaces:
        """Return those of a graph, which was measured at `sizes`. names: of these."""
        of: dict[str, int] = {}
        for node in graph.nodes:
            if isinstance(node.workspace_bytes, Size):
                of.setdefault(node.workspace_bytes.text, node.index)
        known = {name: int(graph.nodes[index].workspace_bytes) for name, index in of.items()}
        read = {n: {*re.findall(r"\w+", _kind(graph, graph.nodes[i]))} for n, i in of.items()}
        on = {n: tuple(i for i, name in enumerate(names) if name in read[n]) for n in of}
        return cls(graph, of, on, *_executed(graph, of.values()), {sizes: known})

    def bounds(self, sizes: tuple[int, ...]) -> tuple[dict[str, int], dict[str, int] | None]:
        """Return symbol -> bytes that the workspaces take at least at `sizes`, and at most (None if
        that is not known), without running anything."""
        if sizes in self.known:
            return self.known[sizes], self.known[sizes]
        if not all(_grows(self.graph.nodes[i]) for i in self.of.values()):
            return dict.fromkeys(self.of, 0), None
        least: dict[str, int] = {}
        most: dict[str, int] = {}
        for name, on in self.on.items():
            pairs = [([(at[i], sizes[i]) for i in on], b[name]) for at, b in self.known.items()]
            least[name] = max((b for at, b in pairs if all(a <= s for a, s in at)), default=0)
            larger = [b for at, b in pairs if all(a >= s for a, s in at)]
            most |= {name: min(larger)} if larger else {}
        return least, most if most.keys() == least.keys() else None

    def graph_at(self, numbers: Mapping[str, int | float]) -> CDGraph:
        """Return the graph with those nodes only that are run, at other sizes, without prices.
        numbers: as for `measured`."""
        known = {**numbers, **dict.fromkeys(self.of, 0)}
        values, data = [*self.graph.values], [*self.graph.data]
        for v in self.values:
            values[v] = resized(values[v], known)
            data[values[v].data] = resized(data[values[v].data], known)
        nodes = tuple(resized(n, known) for n in self.nodes)
        return replace(self.graph, values=tuple(values), data=tuple(data), nodes=nodes)

    def measured(
        self,
        sizes: tuple[int, ...],
        numbers: Mapping[str, int | float],
        given: Mapping[int, torch.Tensor],
    ) -> dict[str, int]:
        """Return symbol -> bytes at `sizes`. numbers: expression -> its value there; given: value
        -> real tensor, of integer arguments."""
        if sizes not in self.known:
            graph = self.graph_at(numbers)
            keys = call_keys(graph)
            priced = price(graph, sized(graph, given, keys), keys)
            found = {n.index: n.workspace_bytes for n in priced.nodes}
            self.known[sizes] = {name: found[index] for name, index in self.of.items()}
        return self.known[sizes]


def _grows(node: ComputeNode) -> bool:
    return not any(word in call.op for call in node.calls for word in _CHOOSE_BY_SIZE)


_CHOOSE_BY_SIZE = ("conv", "rnn", "lstm", "gru", "rockplan")
"""In names of operators whose kernels may take more for less."""


def _executed(
    graph: CDGraph, wanted: Iterable[int]
) -> tuple[tuple[ComputeNode, ...], frozenset[int]]:
    """Return the nodes `wanted` with those that make integers for them, in order, and the values
    that the calls of all take and make, with what those are views of."""
    maker = producers(graph)
    nodes: set[int] = set()
    values: set[int] = set()
    left = [*wanted]
    while left:
        index = left.pop()
        if index in nodes:
            continue
        nodes.add(index)
        waiting = [v for c in graph.nodes[index].calls for v in (*map(_index, refs(c)), *c.made)]
        while waiting:
            value = waiting.pop()
            if value in values:
                continue
            values.add(value)
            named = graph.values[value]
            waiting += map(_index, refs(named.view)) if named.view else ()
            if not is_floating(named.spec) and named.data in maker:
                left.append(maker[named.data])
    return tuple(graph.nodes[i] for i in sorted(nodes)), frozenset(values)


def _index(ref: ValueRef) -> int:
    return ref.index


def given_integers(
    graph: CDGraph, inputs: Sequence[tuple[int, int]], leaves: Sequence[object]
) -> dict[int, torch.Tensor]:
    """Return value -> real tensor for integer arguments. inputs: (leaf position, value)."""
    tensors = ((value, leaves[position]) for position, value in inputs)
    return {
        value: tensor
        for value, tensor in tensors
        if isinstance(tensor, torch.Tensor)
        and not (tensor.is_floating_point() or tensor.is_complex())
        and graph.data[graph.values[value].data].kind is DataKind.INPUT
    }
