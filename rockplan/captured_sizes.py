"""Sized: one kind of call in many batches, from two captures and a check by a third.

takes: a module, a sample, rates of a device. returns: priced graphs at any batch. guarantees: where
storages are affine in the batch, as a third capture of another batch finds to the byte, graphs in
between are those of the captures with other sizes; else each batch is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rockplan.captured_calls import captured_call
from rockplan.errors import InvalidInput
from rockplan.graph_builder.costs.estimate import roofline
from rockplan.graph_builder.costs.price import price
from rockplan.options import Options
from rockplan.python_state import trees
from rockplan.runtime.planned_state import original_forward
from rockplan.runtime.program import ModuleCall
from rockplan.runtime.switches import outside_of_initialization
from rockplan.sizes import sized_calls
from rockplan.values.graph import CDGraph
from rockplan.values.interface import Interface
from rockplan.values.profile import Profile

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PricedCall:
    graph: CDGraph
    interface: Interface
    profile: Profile
    input_bytes: int


def priced_call(
    module: nn.Module, arguments: Arguments, options: Options, rates: tuple[float, float]
) -> PricedCall:
    """One capture, with times of a device of these bytes and operations a second."""
    with outside_of_initialization():
        source = captured_call(ModuleCall(module, *arguments), options, is_asked=False)
    graph = source.lowered.graph
    tensors = [t for t in trees.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    profile = roofline(graph, *rates)
    interface = source.lowered.interface
    return PricedCall(price(graph, profile), interface, profile, sum(storages.values()))


def resized(module: nn.Module, arguments: Arguments, sizes: dict[int, int]) -> Arguments:
    """The arguments with these sizes of dimensions, as `Options.sizes` finds the tensors that have
    them."""
    args, kwargs = arguments
    for dimension, size in sizes.items():
        own = size_of((args, kwargs), dimension)
        ranges: Any = {dimension: (min(own, size), max(own, size))}
        calls = sized_calls(original_forward(module), args, kwargs, Options(sizes=ranges))
        made = calls[0] if size >= own else calls[-1]
        args, kwargs = made.args, made.kwargs
    return args, kwargs


def size_of(tree: Any, dimension: int) -> int:
    """Of the first tensor that has the dimension. Raises InvalidInput."""
    for leaf in trees.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dimension:
            return leaf.shape[dimension]
    raise InvalidInput(f"no tensor of the sample has a dimension {dimension}")


@dataclass(slots=True)
class Batches:
    """Calls of one length in batches from `least` to `most`. capture: of one batch; is_affine: None
    where there is nothing in between."""

    capture: Callable[[int], PricedCall]
    least: int
    most: int
    is_affine: bool | None = field(init=False, default=None)
    _known: dict[int, PricedCall] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # A batch of one has strides and operators of its own: it is captured.
        first = max(self.least, 2)
        if self.most > first + 2:
            self._known = {b: self.capture(b) for b in (first, first + 1, first + 2)}
            lines = _line(self._known[first], self._known[first + 1])
            self.is_affine = lines is not None and _is_on(lines, self._known[first + 2])

    def at(self, batch: int) -> PricedCall:
        if batch not in self._known:
            is_between = self.is_affine and batch > 1
            self._known[batch] = self._between(batch) if is_between else self.capture(batch)
        return self._known[batch]

    def _between(self, batch: int) -> PricedCall:
        first = max(self.least, 2)
        a, b = self._known[first], self._known[first + 1]
        more = batch - first

        def at(x: int, y: int) -> int:
            return x + more * (y - x)

        data = tuple(
            replace(one, size_bytes=at(one.size_bytes, other.size_bytes))
            for one, other in zip(a.graph.data, b.graph.data, strict=True)
        )
        nodes = tuple(
            replace(
                one,
                time_ns=max(at(one.time_ns, other.time_ns), 0),
                workspace_bytes=at(one.workspace_bytes, other.workspace_bytes),
            )
            for one, other in zip(a.graph.nodes, b.graph.nodes, strict=True)
        )
        graph = replace(a.graph, data=data, nodes=nodes)
        return replace(a, graph=graph, input_bytes=at(a.input_bytes, b.input_bytes))


def _line(a: PricedCall, b: PricedCall) -> tuple[int, ...] | None:
    """Bytes of the call one batch beyond `b`; None where the two are not alike."""
    if form_of(a.graph) != form_of(b.graph):
        return None
    return tuple(2 * y - x for x, y in zip(_bytes(a), _bytes(b), strict=True))


def _is_on(expected: tuple[int, ...], found: PricedCall) -> bool:
    return expected == _bytes(found)


def form_of(graph: CDGraph) -> object:
    """All that a schedule looks at but sizes and times."""
    nodes = tuple((n.name, n.reads, n.writes, n.random, n.recomputable) for n in graph.nodes)
    takes = tuple((t.operands, t.results) for n in graph.nodes for t in n.takes)
    kinds = tuple((d.name, d.kind) for d in graph.data)
    return nodes, takes, kinds, graph.outputs, graph.held, graph.handed, graph.dropped


def _bytes(call: PricedCall) -> tuple[int, ...]:
    data = (d.size_bytes for d in call.graph.data)
    return (*data, *(n.workspace_bytes for n in call.graph.nodes), call.input_bytes)
