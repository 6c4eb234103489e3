"""In place: kernels that write results into the storages of operands that die.

takes: a lowered CDGraph. returns: the same graph, whose nodes list what their kernels may take over
(`ComputeNode.takes`), with the in-place variants of kernels added. guarantees: those of
`reinplace`; an operand that is taken over is as large as the result, and after an element is
overwritten nothing computes other elements from it; each variant is compiled, computes the same
bits as the plain kernel, and needs no more memory besides the saving, or slightly more
(`kernels.made`).

A node has at most one variant, which writes the most bytes. Variants for the case that not all of
its operands die would each have to be compiled, and make no plan smaller (docs/experiments.md).

In C++, Inductor does not check whether an overwritten tensor is read elsewhere in the same loop, so
`_aligned` does. The copy into the operand is put at the end of the kernel or, if that needs one
more tensor, as early as possible: then what is computed from a result reads the copy. A softmax
writes its exponentials over the scores, and the result over the exponentials. The copied tensor
keeps its shape and the operand is viewed in it: for Triton, Inductor makes one loop only of tensors
of one shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from rockplan.graph_builder.digests import canonical_literal, digest
from rockplan.graph_builder.fusion import kernels
from rockplan.graph_builder.fusion.indices import looks_of
from rockplan.graph_builder.fusion.parts import REDUCTIONS, words
from rockplan.graph_builder.lowering.reinplace import is_dense, is_ours, seen_by_others
from rockplan.graph_builder.operators import facts
from rockplan.values import graph as graphs

MOST = 16
"""Most variants of one graph, those that write the most bytes: each is compiled before planning,
whether the plan uses it or not."""

UNROLLED = 8
"""Reductions of up to so many elements may be unrolled into the loop that reads the result. Larger
ones finish reading before the result is read."""

_IN_ORDER = words("alias detach expand reshape squeeze unsqueeze view _unsafe_view")
_BY_ELEMENT = words("_to_copy clone convert_element_type masked_fill where")

Over = tuple[tuple[int, int], ...]
"""Pairs: position of a result, position of the input over which it is written."""

_Step = tuple[Sequence[graphs.Call], Mapping[int, int]]
"""Calls in order, and what is written after them: value -> operand."""


Way = tuple[str, Over]
"""An in-place variant: operator of the plain kernel, and the results written over inputs."""


def with_kernels_in_place(graph: graphs.CDGraph) -> graphs.CDGraph:
    """Return `graph` in which nodes list the takeovers that in-place variants of their kernels
    allow, with these variants in `kernels`. Compiles and checks the variants."""
    ways, found = tried(graph)
    made = {way: kernel for way, kernel in found.items() if isinstance(kernel, graphs.Kernel)}
    takes: dict[int, tuple[graphs.Takeover, ...]] = {}
    for way, kernel in made.items():
        more_bytes = kernels.more_bytes_of(kernel)
        for index, takeover in ways[way]:
            if takeover.call is not None:
                call = replace(takeover.call, op=kernel.op)
                takes[index] = (replace(takeover, call=call, more_bytes=more_bytes),)
    nodes = tuple(replace(n, takes=takes[n.index]) if n.index in takes else n for n in graph.nodes)
    return replace(graph, nodes=nodes, kernels=(*graph.kernels, *made.values()))


def tried(
    graph: graphs.CDGraph,
) -> tuple[Mapping[Way, Sequence[tuple[int, graphs.Takeover]]], Mapping[Way, graphs.Kernel | str]]:
    """Compile the `MOST` variants that write the most bytes. Return (each possible variant -> pairs
    of a node's index and its takeover, each variant tried -> its kernel, or the reason why it has
    none). A variant that fails when it writes at the end is tried once more writing early."""
    known = {kernel.op: KnownKernel(kernel) for kernel in graph.kernels}
    ways = ways_of(graph, known)
    written: Counter[Way] = Counter()
    for way, of_nodes in ways.items():
        written[way] = sum(graph.data[d].size_bytes for _, t in of_nodes for d in t.operands)
    chosen = {way: known[way[0]] for way, _ in written.most_common(MOST)}
    found = _made({way: one.at_the_end(way[1]) for way, one in chosen.items()})
    others = {way: chosen[way].at_once(way[1]) for way, k in found.items() if isinstance(k, str)}
    return ways, found | _made({way: kernel for way, kernel in others.items() if kernel})


def _made(wanted: Mapping[Way, graphs.Kernel]) -> dict[Way, graphs.Kernel | str]:
    failed = kernels.made(wanted.values())
    return {way: failed.get(kernel.op, kernel) for way, kernel in wanted.items()}


# -- of a graph --------------------------------------------------------------------------------


def ways_of(
    graph: graphs.CDGraph, known: Mapping[str, KnownKernel]
) -> dict[Way, list[tuple[int, graphs.Takeover]]]:
    """Return each possible variant -> the nodes that may use it, as (index of the node, its
    takeover). known: operator -> kernel; nodes of other calls have no variant."""
    seen = seen_by_others(graph)
    last = {d: node.index for node in graph.nodes for d in node.reads}
    ways: dict[Way, list[tuple[int, graphs.Takeover]]] = {}
    for node in graph.nodes:
        if len(node.calls) != 1 or node.calls != node.recalls or node.calls[0].op not in known:
            continue
        (call,) = node.calls
        over = tuple(sorted(_pairs(graph, node, known[call.op], seen, last)))
        if over:
            read = [graph.values[ref.index].data for ref in graphs.value_refs(call.args)]
            made = [None if r is None else graph.values[r].data for r in call.results]
            results = [d for place, _ in over if (d := made[place]) is not None]
            takeover = graphs.Takeover(
                tuple(read[place] for _, place in over), tuple(results), call
            )
            ways.setdefault((call.op, over), []).append((node.index, takeover))
    return ways


def _pairs(
    graph: graphs.CDGraph,
    node: graphs.ComputeNode,
    known: KnownKernel,
    seen: frozenset[int],
    last: Mapping[int, int],
) -> Iterator[tuple[int, int]]:
    """Yield (position of a result, position of the input to write it over), the largest result
    first.

    The input is one that no later node reads, from which least is computed: Inductor splits a loop
    where what is written over is read by another reduction. If later nodes read all fitting
    ones, the largest result still gets one, which dies in some schedules; other results get none.
    seen: data that the caller or autograd sees; last: data -> index of the last node that reads it.
    """
    (call,) = node.calls
    read = [graph.values[ref.index] for ref in graphs.value_refs(call.args)]
    count = Counter(value.data for value in read)
    free = {
        place: value
        for place, value in enumerate(read)
        if count[value.data] == 1 and is_ours(graph, value, seen)
    }
    results = [(p, graph.values[r]) for p, r in enumerate(call.results) if r is not None]
    is_first = True
    for place, result in sorted(results, key=lambda m: -graph.data[m[1].data].size_bytes):
        if result.data in graph.held or result.data in graph.outputs:
            continue
        fit = [p for p, operand in free.items() if may_hold(graph, operand, result)]
        fit = [p for p in fit if known.is_aligned(p)]
        dying = [p for p in fit if last[free[p].data] == node.index]
        dying.sort(key=known.derived_count)
        operand_place = next(iter(dying or fit[:is_first]), None)
        if operand_place is not None:
            is_first = False
            del free[operand_place]
            yield place, operand_place


def may_hold(graph: graphs.CDGraph, operand: graphs.Value, result: graphs.Value) -> bool:
    """Return whether `result` may be written where `operand` is: both have equal dtype, device,
    bytes and either equal strides or contiguous ones, and the result covers its storage."""
    a, b = operand.spec, result.spec
    if (a.dtype, a.device, prod(a.shape)) != (b.dtype, b.device, prod(b.shape)) or not is_dense(b):
        return False
    is_as_large = graph.data[operand.data].size_bytes == graph.data[result.data].size_bytes
    looks_same = (a.shape, a.stride) == (b.shape, b.stride)
    return is_as_large and (looks_same or (_is_contiguous(a) and _is_contiguous(b)))


def _is_contiguous(spec: graphs.TensorSpec) -> bool:
    steps = [prod(spec.shape[i + 1 :]) for i in range(len(spec.shape))]
    sizes = zip(spec.shape, spec.stride, steps, strict=True)
    return all(n == 1 or s == step for n, s, step in sizes)


# -- of a kernel -------------------------------------------------------------------------------


class KnownKernel:
    """A kernel, and facts about it that are computed when needed."""

    def __init__(self, kernel: graphs.Kernel) -> None:
        self.kernel = kernel
        self._tensors: dict[int, torch.Tensor] = {}
        self._same: dict[int, frozenset[int] | None] = {}

    def is_aligned(self, operand: int) -> bool:
        """Return whether results may be written over the operand, element by element."""
        return self._aligned(operand) is not None

    def derived_count(self, operand: int) -> int:
        """Return how many values are computed from the operand."""
        return len(self._derived(operand))

    def at_the_end(self, over: Over) -> graphs.Kernel:
        """Return the variant that writes when everything is computed."""
        return _Writing(self.kernel, over, self._looks()).kernel([(self.kernel.calls, {})])

    def at_once(self, over: Over) -> graphs.Kernel | None:
        """Return the variant that writes each result over its input as early as possible. An
        intermediate value that several calls read is written there before, if it may be. None if no
        result can be written before the end, or a later call would read an overwritten input."""
        early: dict[int, int] = {}
        at = {r: p for p, call in enumerate(self.kernel.calls) for r in call.results}
        for place, operand in over:
            written = self.kernel.results[place]
            candidates = [
                value
                for value in self._aligned(operand) or ()
                if at.get(value, -1) in range(at[written])
                and self._fits(value, operand)
                and sum(value in _read(call) for call in self.kernel.calls) > 1
            ]
            candidates = [value for value in candidates if self._covers(value, operand)]
            early |= dict.fromkeys(sorted(candidates, key=at.__getitem__)[-1:], operand)
            early |= {written: operand} if self._covers(written, operand) else {}
        steps = self._steps(early)
        is_right = bool(early) and self._reads_before(steps)
        return _Writing(self.kernel, over, self._looks()).kernel(steps) if is_right else None

    def _steps(self, early: Mapping[int, int]) -> Sequence[_Step]:
        """Split the calls into steps: step n has the calls that depend on n of the values `early`.
        early: value -> the input that it is written over at the end of the step that makes it."""
        derived = [self._derived(value) for value in early]
        steps: list[tuple[list[graphs.Call], dict[int, int]]] = [
            ([], {}) for _ in range(len(early) + 1)
        ]
        for call in self.kernel.calls:
            calls, written = steps[sum(not d.isdisjoint(_read(call)) for d in derived)]
            calls.append(call)
            written |= {r: early[r] for r in call.made if r in early}
        return steps

    def _reads_before(self, steps: Sequence[_Step]) -> bool:
        # No step reads an input that an earlier step overwrote, or another value aligned with it,
        # except what was computed from the value written there.
        gone: set[int] = set()
        for calls, written in steps:
            if any(not gone.isdisjoint(_read(call)) for call in calls):
                return False
            for value, operand in written.items():
                gone |= (self._aligned(operand) or frozenset()) - self._derived(value)
        return True

    def _covers(self, value: int, operand: int) -> bool:
        # Nothing computed from the value reads another value that is aligned with the operand.
        derived = self._derived(value)
        others = (self._aligned(operand) or frozenset()) - derived
        reads = map(_read, self.kernel.calls)
        return not any(derived & read and others & read for read in reads)

    def _derived(self, value: int) -> frozenset[int]:
        derived = {value}
        for call in self.kernel.calls:
            if not derived.isdisjoint(_read(call)):
                derived.update(call.made)
        return frozenset(derived)

    def _looks(self) -> dict[int, torch.Tensor]:
        if not self._tensors:
            self._tensors = looks_of(self.kernel)
        return self._tensors

    def _aligned(self, operand: int) -> frozenset[int] | None:
        if operand not in self._same:
            self._same[operand] = _aligned(self.kernel.calls, self._looks(), operand)
        return self._same[operand]

    def _fits(self, value: int, operand: int) -> bool:
        a, b = self._looks()[value], self._looks()[operand]
        both = a.is_contiguous() and b.is_contiguous()
        looks_same = a.shape == b.shape and a.stride() == b.stride()
        return a.dtype == b.dtype and (both or looks_same)


def _read(call: graphs.Call) -> frozenset[int]:
    return frozenset(ref.index for ref in graphs.refs(call))


def _aligned(
    calls: Sequence[graphs.Call], looks: Mapping[int, torch.Tensor], root: int
) -> frozenset[int] | None:
    """Return the values aligned with `root`, itself included: each element depends on the same
    element of `root` (in row-major order), on others only by reductions of more than `UNROLLED`
    elements. None if a value depends on `root` in another way. looks: value -> meta tensor."""
    same = {root}
    for call in calls:
        read = same & _read(call)
        if not read:
            continue
        operator = facts.resolve(call.op)
        packet = call.op.split(".")[1]
        sizes = {looks[v].numel() for v in read}
        if packet in REDUCTIONS:
            if any(size <= UNROLLED * looks[m].numel() for size in sizes for m in call.made):
                return None
            continue
        is_by_element = torch.Tag.pointwise in operator.tags or packet in _BY_ELEMENT
        made = {looks[m].numel() for m in call.made}
        if not (is_by_element or packet in _IN_ORDER) or sizes != made:
            return None
        same.update(call.made)
    return frozenset(same)


class _Writing:
    """Builds a variant: the calls of a kernel, with copies into its operands."""

    def __init__(
        self, kernel: graphs.Kernel, over: Over, looks: Mapping[int, torch.Tensor]
    ) -> None:
        self._kernel, self._over, self._looks = kernel, over, looks
        self._calls: list[graphs.Call] = []
        self._next = 1 + max(looks)
        self._names: dict[int, int] = {}

    def kernel(self, steps: Sequence[_Step]) -> graphs.Kernel:
        """Return the variant. Its calls are those of `steps`, each step followed by the copies that
        it asks for (value -> input); results that no step writes are copied at the end. Its
        operator's name has a digest of the calls."""
        kernel = self._kernel
        for calls, early in steps:
            for call in calls:
                self._calls.append(graphs.renamed(call, self._name, int))
            for value, operand in early.items():
                self._write(value, operand)
        for place, operand in self._over:
            if kernel.results[place] not in self._names:
                self._write(kernel.results[place], operand)
        calls, results = tuple(self._calls), tuple(map(self._name, kernel.results))
        name = kernel.name.rpartition("_")[0]
        content = [kernel.op, list(map(list, self._over)), list(results)]
        copies = [[c.op, canonical_literal(c.args), list(c.results)] for c in calls]
        op = f"{graphs.NAMESPACE}.{name}_over_{digest([content, copies])[:16]}.default"
        return replace(
            kernel, op=op, calls=calls, results=results, plain=kernel.op, over=self._over
        )

    def _name(self, value: int) -> int:
        return self._names.get(value, value)

    def _write(self, value: int, operand: int) -> None:
        shape, over = self._looks[value].shape, graphs.ValueRef(operand)
        if shape != self._looks[operand].shape:
            results = zip(self._kernel.results, self._kernel.result_specs, strict=True)
            of_results = {result: spec.shape for result, spec in results}
            over = self._call("aten.view.default", (over, of_results.get(value, tuple(shape))))
        given = graphs.ValueRef(self._name(value))
        self._names[value] = self._call("aten.copy_.default", (over, given)).index

    def _call(self, op: str, args: tuple[object, ...]) -> graphs.ValueRef:
        self._calls.append(graphs.Call(op, args, (), (self._next,)))
        self._next += 1
        return graphs.ValueRef(self._next - 1)
