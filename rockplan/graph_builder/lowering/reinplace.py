"""Takeover: which results may be written into the storage of an operand that dies.

takes: a CDGraph with calls. returns: the same graph whose nodes list what they may take over
(`ComputeNode.takes`), and by which call. guarantees: not one bit of any result depends on whether a
storage is taken over; a storage that may be taken over holds exactly one tensor, of the shape,
strides and dtype of the result, and only the plan sees it: it is no parameter, buffer, input,
constant or tangent, no output, no gradient that autograd or the caller gets.
Whether the operand dies depends on the schedule: `lifetimes.taken_over`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch

from rockplan.graph_builder.operators import facts, rows
from rockplan.values import graph as graphs

_FLOATING = ("torch.float32", "torch.float64", "torch.bfloat16", "torch.float16")


def with_takeovers(graph: graphs.CDGraph) -> graphs.CDGraph:
    """Return `graph` whose nodes list the operands that they may take over."""
    seen = seen_by_others(graph)
    nodes = [*graph.nodes]
    for node in graph.nodes:
        if takes := {t.operands: t for t in _takeovers(graph, node, seen)}:
            nodes[node.index] = replace(node, takes=tuple(takes.values()))
    return replace(graph, nodes=tuple(nodes))


def seen_by_others(graph: graphs.CDGraph) -> frozenset[int]:
    """Return the storages that the caller or autograd sees."""
    return frozenset((*graph.outputs, *graph.held, *graph.handed))


def _takeovers(
    graph: graphs.CDGraph, node: graphs.ComputeNode, seen: frozenset[int]
) -> Iterator[graphs.Takeover]:
    if node.random or not node.calls or node.recalls != node.calls or len(node.writes) != 1:
        return
    (call, *rest), (written,) = node.calls, node.writes
    if written in graph.held or written in graph.outputs or len(call.results) != 1:
        return
    (result,) = call.results
    if result is None or graph.values[result].data != written:
        return
    spec = graph.values[result].spec
    admitted = rows.row_of(call.op).may_write_into
    is_admitted = admitted in (rows.OPERAND, rows.FIRST_OPERAND)
    if not is_admitted and not (admitted == rows.OPERAND_ON_CPU and spec.device == "cpu"):
        return
    operands = _operands(graph, call)
    may_be_taken = operands[:1] if admitted == rows.FIRST_OPERAND else operands
    read_later = {operand.data for other in rest for operand in _operands(graph, other)}
    # An operator that may take over only its first operand may have indices among the others.
    of_numbers = may_be_taken if admitted == rows.FIRST_OPERAND else operands
    if not all(o.spec.dtype in (spec.dtype, "torch.bool") for o in of_numbers):
        return
    for operand in may_be_taken:
        alone = sum(o.data == operand.data for o in operands) == 1
        alone = alone and operand.data not in read_later
        if alone and operand.spec == spec and is_ours(graph, operand, seen):
            variant = _variant(call, operand.index)
            if variant is not None:
                yield graphs.Takeover((operand.data,), node.writes, variant)


def _operands(graph: graphs.CDGraph, call: graphs.Call) -> list[graphs.Value]:
    return [graph.values[i] for i in dict.fromkeys(r.index for r in graphs.refs(call))]


def is_ours(graph: graphs.CDGraph, operand: graphs.Value, seen: frozenset[int]) -> bool:
    """Return whether the tensor covers all of a storage that only the plan sees."""
    kind = graph.data[operand.data].kind
    if kind not in (graphs.DataKind.ACTIVATION, graphs.DataKind.GRADIENT) or operand.data in seen:
        return False
    return is_dense(operand.spec) and not _is_reinterpreted(graph, operand)


def is_dense(spec: graphs.TensorSpec) -> bool:
    """Return whether a tensor of floating dtype has its elements without gaps from the start of the
    storage on, in any order of dimensions."""
    if spec.dtype not in _FLOATING or spec.offset or 0 in spec.shape:
        return False
    pairs = sorted((t, n) for n, t in zip(spec.shape, spec.stride, strict=True) if n > 1)
    return all(t == prod(n for _, n in pairs[:i]) for i, (t, _) in enumerate(pairs))


def _is_reinterpreted(graph: graphs.CDGraph, value: graphs.Value) -> bool:
    if value.view is None:
        return False
    bases = [graph.values[r.index] for r in graphs.refs(value.view)]
    kind = rows.row_of(value.view.op).view
    return kind is rows.ViewKind.OTHER_NUMBERS or any(_is_reinterpreted(graph, b) for b in bases)


def _variant(call: graphs.Call, operand: int) -> graphs.Call | None:
    """None if no operator writes its result into `operand`, by `out=` or in place."""
    target = graphs.ValueRef(operand)
    if rows.row_of(call.op).writes_as and len(call.args) > 2:  # `add.Scalar` with a factor
        return None
    name, argument = _writing_operator(call.op)
    if argument is not None:
        return replace(call, op=name, kwargs=(*call.kwargs, (argument, target)))
    if name and call.args[0] == target:
        return replace(call, op=name)
    return None


@functools.cache
def _writing_operator(op: str) -> tuple[str, str | None]:
    """Return (name of the overload of `op` that writes its result into an operand, name of the
    argument for it; None if it is the first one). ('', None) if there is no such overload."""
    functional = facts.resolve(rows.row_of(op).writes_as or op)
    packet = functional.overloadpacket
    namespace, name, overload = op.split(".")
    for candidate in packet.overloads():
        operator = getattr(packet, candidate)
        results = [a.name for a in operator._schema.arguments if a.is_out]
        is_own = len(results) == 1 and torch.Tag.generated not in operator.tags
        if is_own and facts.takes(operator) == facts.takes(functional):
            return f"{namespace}.{name}.{candidate}", results[0]
    in_place = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    if in_place is not None and overload in in_place.overloads():
        return f"{namespace}.{name}_.{overload}", None
    return "", None


@functools.cache
def out_of_place(op: str) -> str | None:
    """Return the name of the operator whose result has the bits that `op` writes into its first
    argument, and may be written there: 'aten.add.Tensor' for 'aten.add_.Tensor'. None if `op` is
    not in place, or nothing says so of that operator."""
    namespace, name, overload = op.split(".")
    functional = f"{namespace}.{name.removesuffix('_')}.{overload}"
    row = rows.row_of(functional)
    if not name.endswith("_") or row.may_write_into != rows.OPERAND or row.writes_as:
        return None
    same = facts.takes(facts.resolve(op)) == facts.takes(facts.resolve(functional))
    return functional if same and _writing_operator(functional)[0] else None
