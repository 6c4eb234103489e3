"""What PyTorch's shape rules do not say of a call: strides of real results, compared with those of
the capture; and whether indices are within the size of what they index (positions beyond the last
one that a model has).

takes: a CDGraph, real tensors for some of its values. raises UnsupportedModel, ForwardRaises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rockplan.errors import ForwardRaises, UnsupportedModel
from rockplan.graph_builder.costs.call_key import call_key
from rockplan.graph_builder.costs.execution import Inputs, as_executed, inputs_of
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.layouts import SEEN, form
from rockplan.graph_builder.operators.rows import ViewKind, row_of
from rockplan.graph_builder.recorded.evaluate import flat_results, substitute
from rockplan.values.graph import Call, CDGraph, ComputeNode, ValueRef, refs


def check_layouts(graph: CDGraph, values: Mapping[int, torch.Tensor]) -> None:
    """Raise UnsupportedModel if a real call gives other strides than the capture has, and a view by
    strides depends on them: it would fail or read other elements. (PyTorch's shape rules are wrong
    for a few operators.)

    Runs each unique call whose results are viewed so. Not products, those with side effects, nor
    those checked at another size (`operators.layouts.SEEN`). values: value -> real tensor.
    """
    viewed = _viewed_by_layout(graph)
    at_other_sizes = SEEN.get()
    seen: set[object] = set() if at_other_sizes is None else at_other_sizes.checked
    with as_executed(graph):
        inputs = inputs_of(graph, values)
        for node in graph.nodes:
            for call in node.calls:
                is_viewed = bool(viewed & set(call.results)) and call.op not in facts.PRODUCTS
                if not is_viewed or facts.facts_of(call.op).effect:
                    continue
                key: object = call_key(graph, call)
                if at_other_sizes is not None:
                    given = call.args, [a for _, a in call.kwargs]
                    key = form(call.op, substitute(given, lambda v: graph.values[v].spec))
                if key not in seen:
                    seen.add(key)
                    _check_layout(graph, inputs, node, call)


def _viewed_by_layout(graph: CDGraph) -> set[int | None]:
    layouts: set[int | None] = set()
    for value in graph.values:
        view = value.view
        if view is None or row_of(view.op).view is not ViewKind.BY_STRIDES:
            continue
        while view is not None:
            base = refs(view)[0].index
            if base in layouts:
                break
            layouts.add(base)
            view = graph.values[base].view
    return layouts


def _check_layout(graph: CDGraph, inputs: Inputs, node: ComputeNode, call: Call) -> None:
    """Run `call` and raise UnsupportedModel if a result has other strides than captured, in
    dimensions of more than one element. A call that fails is not checked."""
    try:
        results = flat_results(inputs.execution(call).run())
    except facts.CALL_ERRORS:
        return
    for index, real in zip(call.results, results, strict=True):
        if index is None or not isinstance(real, torch.Tensor) or real.numel() < 2:
            continue
        spec = graph.values[index].spec
        strides = [
            (s, t) for n, s, t in zip(spec.shape, spec.stride, real.stride(), strict=True) if n > 1
        ]
        if any(s != t for s, t in strides):
            raise UnsupportedModel.at(
                node.module,
                node.source,
                f"{call.op} returns strides {tuple(real.stride())} where PyTorch's shape rule "
                f"says {spec.stride}, so views of its result cannot be planned; put .contiguous() "
                "before the operation",
            )


_LOOKUPS = {
    "aten.embedding.default": (None, 1),
    "aten.gather.default": (1, 2),
    "aten.index.Tensor": (None, 1),
    "aten.index_select.default": (1, 2),
}
"""Operator -> (position of the argument that names the indexed dimension, None if dimension i is
indexed by the i-th index; position of the indices). The first argument is the indexed tensor."""


def check_index_ranges(graph: CDGraph, values: Mapping[int, torch.Tensor]) -> None:
    """Raise ForwardRaises, which names module and line, if a call looks up an index that is out of
    range. values: value -> real tensor, for the indices that are known."""
    for node in graph.nodes:
        for call in node.calls:
            for size, index in _lookups(graph, call, values):
                if index.numel() and not -size <= int(index.min()) <= int(index.max()) < size:
                    raise ForwardRaises.at(
                        node.module,
                        node.source,
                        f"index {int(index.max())} is out of range: {call.op} looks it up among "
                        f"{size}",
                    )


def _lookups(
    graph: CDGraph, call: Call, values: Mapping[int, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    if call.op not in _LOOKUPS:
        return
    dimension, position = _LOOKUPS[call.op]
    table, indices = call.args[0], call.args[position]
    assert isinstance(table, ValueRef)
    shape = graph.values[table.index].spec.shape
    first = 0 if dimension is None else call.args[dimension]
    for number, index in enumerate(indices if isinstance(indices, tuple) else (indices,)):
        known = values.get(index.index) if isinstance(index, ValueRef) else None
        if known is not None and not known.dtype.is_floating_point and known.dtype != torch.bool:
            assert isinstance(first, int)
            yield shape[first + number], known
