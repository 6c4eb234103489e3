"""Layouts: compare the strides of real results with those of the capture.

takes: a CDGraph, real tensors for some of its values. raises UnsupportedModel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rockplan.errors import UnsupportedModel
from rockplan.graph_builder.costs.call_key import call_key
from rockplan.graph_builder.costs.execution import Inputs, as_executed, inputs_of
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.layouts import SEEN, form
from rockplan.graph_builder.operators.rows import ViewKind, row_of
from rockplan.graph_builder.recorded.evaluate import flat_results, substitute
from rockplan.values.graph import Call, CDGraph, ComputeNode, refs


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
                key = call_key(graph, call) if at_other_sizes is None else _form(graph, call)
                if key not in seen:
                    seen.add(key)
                    _check_layout(graph, inputs, node, call)


def _form(graph: CDGraph, call: Call) -> object:
    """Return the form of a call: equal for calls that differ in sizes only."""
    arguments = substitute((call.args, [a for _, a in call.kwargs]), lambda v: graph.values[v].spec)
    return form(call.op, arguments)


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
    dimensions of more than one element. A call that fails is not checked. node: what names module
    and line."""
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
