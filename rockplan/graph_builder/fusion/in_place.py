"""In place: kernels that write results where operands die.

takes: a lowered CDGraph. returns: the same graph, whose nodes say what their kernels may take over
(`ComputeNode.takes`), with the kernels that do so beside the others. guarantees: of `reinplace`;
what is taken over is dense, and as large as the result; each such kernel is compiled, computes what
the other computes bit for bit, and needs no more memory beside that (`kernels.made`).

A node has one way at most, that which writes the most. Fewer results where not all of its operands
die would be another kernel to compile, and make no plan smaller (docs/experiments.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from rockplan.graph_builder.digests import digest
from rockplan.graph_builder.fusion import kernels
from rockplan.graph_builder.lowering.reinplace import is_dense, is_ours, seen_by_others
from rockplan.values.graph import (
    NAMESPACE,
    Call,
    CDGraph,
    ComputeNode,
    Kernel,
    Takeover,
    TensorSpec,
    Value,
    value_refs,
)

MOST = 16
"""Kernels in place of a graph, those that write the most: each is compiled before the plan is made,
whether it uses it or not."""


@dataclass(frozen=True, slots=True)
class _Way:
    """Of a node. written_bytes: of what it takes over."""

    kernel: Kernel
    takeover: Takeover
    written_bytes: int


def with_kernels_in_place(graph: CDGraph) -> CDGraph:
    """`graph` with what its kernels may take over. Compiles what is not compiled yet."""
    known = {kernel.op: kernel for kernel in graph.kernels}
    last = {d: node.index for node in graph.nodes for d in node.reads}
    found = (_way(graph, node, known, last) for node in graph.nodes if known)
    ways = {node.index: way for node, way in zip(graph.nodes, found, strict=False) if way}
    written: Counter[Kernel] = Counter()
    for way in ways.values():
        written[way.kernel] += way.written_bytes
    wanted = [kernel for kernel, _ in written.most_common(MOST)]
    failed = kernels.made(wanted)
    made = {kernel.op: kernel for kernel in wanted if kernel.op not in failed}
    takes = {index: (way.takeover,) for index, way in ways.items() if way.kernel.op in made}
    nodes = tuple(replace(n, takes=takes[n.index]) if n.index in takes else n for n in graph.nodes)
    return replace(graph, nodes=nodes, kernels=(*graph.kernels, *made.values()))


def _way(
    graph: CDGraph, node: ComputeNode, known: Mapping[str, Kernel], last: Mapping[int, int]
) -> _Way | None:
    """The one that writes the most, if any; last: storage -> the last node that reads it."""
    if len(node.calls) != 1 or node.calls != node.recalls or node.calls[0].op not in known:
        return None
    (call,) = node.calls
    pairs = dict(_pairs(graph, node, call, last))
    if not pairs:
        return None
    over = tuple(sorted(pairs.items()))
    kernel = in_place(known[call.op], over)
    operands = [graph.values[_operand(call, place)].data for _, place in over]
    results = [graph.values[_result(call, place)].data for place, _ in over]
    takeover = Takeover(
        tuple(operands), tuple(results), Call(kernel.op, call.args, (), call.results)
    )
    return _Way(kernel, takeover, sum(graph.data[d].size_bytes for d in operands))


def _pairs(
    graph: CDGraph, node: ComputeNode, call: Call, last: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Places of results, the largest first, and of the operands over which they are written: of
    those that look alike the first that nothing reads later. Where something does, the first result
    may wait for a schedule in which it dies; what comes after it is not worth waiting for."""
    seen = seen_by_others(graph)
    read = [graph.values[ref.index] for ref in value_refs(call.args)]
    count = Counter(value.data for value in read)
    free = {
        place: value
        for place, value in enumerate(read)
        if count[value.data] == 1 and is_ours(graph, value, seen)
    }
    made = [(p, graph.values[r]) for p, r in enumerate(call.results) if r is not None]
    is_first = True
    for place, result in sorted(made, key=lambda m: -graph.data[m[1].data].size_bytes):
        if result.data in graph.held or result.data in graph.outputs:
            continue
        alike = [p for p, operand in free.items() if _may_hold(graph, operand, result)]
        dying = [p for p in alike if last[free[p].data] == node.index]
        taken = min(dying or alike[:is_first], default=None)
        if taken is not None:
            is_first = False
            del free[taken]
            yield place, taken


def _operand(call: Call, place: int) -> int:
    return value_refs(call.args)[place].index


def _result(call: Call, place: int) -> int:
    result = call.results[place]
    assert result is not None
    return result


def _may_hold(graph: CDGraph, operand: Value, result: Value) -> bool:
    """May the one be written where the other lies? Both are all of their storages."""
    a, b = operand.spec, result.spec
    if (a.dtype, a.device) != (b.dtype, b.device) or not is_dense(b):
        return False
    is_as_large = graph.data[operand.data].size_bytes == graph.data[result.data].size_bytes
    looks_same = (a.shape, a.stride) == (b.shape, b.stride)
    return is_as_large and (looks_same or (_is_contiguous(a) and _is_contiguous(b)))


def _is_contiguous(spec: TensorSpec) -> bool:
    steps = [prod(spec.shape[i + 1 :]) for i in range(len(spec.shape))]
    return all(
        n == 1 or s == step for n, s, step in zip(spec.shape, spec.stride, steps, strict=True)
    )


def in_place(kernel: Kernel, over: tuple[tuple[int, int], ...]) -> Kernel:
    """What computes the same, over its operands."""
    name = kernel.name.rpartition("_")[0]
    op = f"{NAMESPACE}.{name}_over_{digest([kernel.op, list(map(list, over))])[:16]}.default"
    return replace(kernel, op=op, plain=kernel.op, over=over)
