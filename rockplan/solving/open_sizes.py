"""Open sizes: a call whose sizes are symbols -> a captured call for all sizes.

takes: two kinds of call that differ in sizes alone, each captured as it is. returns: the second
one, recorded once more with symbols for these sizes. guarantees: with the sizes of either call, the
recorded program is that call's own, operator by operator: what Python decides by a size unseen
(`isinstance(n, int)`, a shortcut at one size) shows as a difference, and raises StaticSizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from rockplan.graph_builder.fusion.in_place import may_hold
from rockplan.graph_builder.fusion.kinds import static_kernel
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.graph_builder.operators.symbols import are_for, function_of
from rockplan.graph_builder.pipeline import lower
from rockplan.graph_builder.tracing.free_sizes import StaticSizes
from rockplan.options import Options
from rockplan.runtime.program import ModuleCall, PlannedProgram
from rockplan.solving.captured_calls import CapturedCall, captured_call
from rockplan.values import graph as graphs
from rockplan.values.copies import without_copies
from rockplan.values.interface import Interface
from rockplan.values.sizes import resized, text_of, texts_in


def unfused(options: Options) -> Options:
    """Return options with which a call is captured to be compared, and fused later."""
    passes = ("fuse", "copy-buffers") if options.compile else ()
    return replace(options, without=(*options.without, *passes))


def with_open_sizes(
    call: ModuleCall,
    source: CapturedCall,
    known: PlannedProgram,
    options: Options,
    adjusted: Callable[[Lowered], Lowered],
) -> CapturedCall:
    """Return `call` captured with symbols in place of the sizes in which it differs from the call
    of `known`. source: the same call captured as it is; adjusted: what is done to it
    before it is planned. Raises StaticSizes, which says why not."""
    if source.in_parts is not None:
        reason = "parts of the head (Options(tile=...)) are of constant sizes: pad to few lengths"
        raise StaticSizes(reason)
    unread, planned_graph = source.run.unread, without_copies(known.plan.graph)
    earlier = known.interface.call_in(planned_graph).without(unread)
    plain = replace(unfused(options), tile=False)
    if source.run.kernels:
        source = captured_call(call, plain, is_asked=False)
    # It may have been planned before it was known what is unread.
    kept = unread - known.interface.unread
    opened = captured_call(call, plain, is_asked=False, earlier=earlier, kept=kept)
    as_known, state_bytes = opened, opened.lowered.graph.rng_state_bytes
    if kept:
        opened = replace(opened, lowered=lower(opened.run.without(kept), state_bytes, plain))
    own, static = (
        (graphs.in_eager_order(adjusted(one.lowered).graph), one.lowered.interface)
        for one in (opened, source)
    )
    _refuse(_program_differences(frozenset(), own, static), "this call")
    names = opened.run.sizes.names
    at = tuple(symbol.of(earlier) for symbol in opened.run.sizes.symbols)

    def lowered_again(one: CapturedCall) -> Lowered:
        return adjusted(_fused(one, at, options) if options.compile else one.lowered)

    lowered = lowered_again(opened)
    graph, interface = lowered.graph, lowered.interface
    texts = texts_in((graph, interface))
    numbers = dict(zip(texts, function_of(names, texts)(at), strict=True))
    if not all(are_for(interface.sizes, one) for one in (interface.call_in(graph), earlier)):
        message = "the forward decides by these sizes, and otherwise than for the call before"
        raise StaticSizes(message, ranges=(interface.sizes,))
    other = lowered_again(as_known) if kept else lowered
    then = resized((_static(graphs.in_eager_order(other.graph)), other.interface), numbers)
    planned = (graphs.in_eager_order(planned_graph), known.interface)
    _refuse(_program_differences(unread, then, planned), "the call before")
    workspaces = tuple(n.workspace_bytes for n in graphs.in_eager_order(planned_graph).nodes)
    nodes = _with_takeovers_of_all_sizes(graph)
    lowered = replace(lowered, graph=replace(graph, nodes=nodes))
    return replace(opened, lowered=lowered, earlier_workspaces=workspaces)


def _fused(opened: CapturedCall, at: tuple[int, ...], options: Options) -> Lowered:
    """Return the graph with kernels for all sizes, which are chosen and compiled as at the sizes
    `at`: those are the kernels that the module has. Raises StaticSizes."""
    run, names = opened.run, opened.run.sizes.names
    texts = texts_in((run.values, run.calls, run.numbers, run.guards, run.outputs))
    numbers = dict(zip(texts, function_of(names, texts)(at), strict=True))
    lowered = lower(resized(run, numbers), opened.lowered.graph.rng_state_bytes, options)
    here = texts_in((lowered.graph, lowered.interface))
    sizes = tuple(map(int, opened.lowered.interface.sizes_in(opened.lowered.graph)))
    numbers = dict(zip(here, function_of(names, here)(sizes), strict=True))
    graph, interface = resized((lowered.graph, lowered.interface), numbers)
    return replace(lowered, graph=graph, interface=interface)


def _static(graph: graphs.CDGraph) -> graphs.CDGraph:
    """Return the graph with the names that its kernels have for the sizes they are compiled for."""
    kernels = {k.op: (static_kernel(k).op, len(k.sizes)) for k in graph.kernels if not k.over}

    def called(call: graphs.Call) -> graphs.Call:
        op, count = kernels.get(call.op, (call.op, 0))
        return replace(call, op=op, args=call.args[count:])

    nodes = (
        replace(n, calls=tuple(map(called, n.calls)), recalls=tuple(map(called, n.recalls)))
        for n in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _refuse(different: Sequence[str], which: str) -> None:
    if different:
        message = f"with the sizes of {which} it is not its program: {different[0]}"
        raise StaticSizes(message, is_of_pair=True)


def _program_differences(
    unread: frozenset[int],
    opened: tuple[graphs.CDGraph, Interface],
    static: tuple[graphs.CDGraph, Interface],
) -> list[str]:
    """List in what two lowered programs, in eager's order, differ beside prices, takeovers, the
    offsets of arguments and all that is of the leaves at `unread` positions."""
    (graph, interface), (other, planned) = opened, static
    found = [
        f"node {a.name} in place of {b.name} at {b.source}"
        for a, b in zip(graph.nodes, other.nodes, strict=False)
        if _unpriced(a) != _unpriced(b)
    ]
    if len(graph.nodes) != len(other.nodes):
        found.append(f"{len(graph.nodes)} nodes in place of {len(other.nodes)}")
    others = {value for position, value in interface.inputs if position in unread}
    storages = {graph.values[value].data for _, value in interface.inputs}
    read = (
        (a, b) for a, b in zip(graph.values, other.values, strict=False) if a.index not in others
    )
    for a, b in read:
        moved = _offset(other, b) - _offset(graph, a)
        if replace(a, spec=replace(a.spec, offset=a.spec.offset + moved)) != b:
            found.append(f"value {a.name}, {a.spec} in place of {b.spec}")
            break
    # What a kernel keeps beside its results follows no expression.
    found += [
        f"{d.name} of {d.size_bytes} bytes in place of {n.size_bytes}"
        for d, n in zip(graph.data, other.data, strict=False)
        if d.index not in storages and d.size_bytes != n.size_bytes
    ]
    names = ("outputs", "held", "handed", "dropped", "rng_state_bytes")
    found += [name for name in names if getattr(graph, name) != getattr(other, name)]
    kept = tuple(g for g in interface.guards if not g.is_of_sizes)
    mine = replace(interface, guards=kept, sizes=planned.sizes, numbers=planned.numbers)
    own, planned_ones = (
        [(i, n) for i, n in one.numbers if i not in unread] for one in (interface, planned)
    )
    found += ["numbers"] * (own != planned_ones)
    found += [
        field.name
        for field in fields(Interface)
        if field.compare and getattr(mine, field.name) != getattr(planned, field.name)
    ]
    return found


def _unpriced(node: graphs.ComputeNode) -> graphs.ComputeNode:
    return replace(node, time_ns=0, workspace_bytes=0, takes=(), source="")


def _offset(graph: graphs.CDGraph, value: graphs.Value) -> int:
    """Return the offset of the argument that a value is part of; 0 for any other value."""
    if graph.data[value.data].kind is not graphs.DataKind.INPUT:
        return 0
    return next(v.spec.offset for v in graph.values if v.data == value.data and v.view is None)


def _with_takeovers_of_all_sizes(graph: graphs.CDGraph) -> tuple[graphs.ComputeNode, ...]:
    """Return the nodes with the takeovers whose operands have the layouts of the results at every
    size, not just at those of the captured call. (What a kernel views otherwise, its compiler has
    looked at.)"""
    own = {v.data: v for v in graph.values if v.view is None}

    def layout(data: int) -> object:
        spec = own[data].spec
        return (*map(text_of, (*spec.shape, *spec.stride, spec.offset)), spec.dtype)

    def is_same(take: graphs.Takeover, operand: int, result: int) -> bool:
        if take.call is None or not graphs.is_kernel(take.call.op):
            return layout(operand) == layout(result)
        operand_bytes, result_bytes = (text_of(graph.data[d].size_bytes) for d in (operand, result))
        return operand_bytes == result_bytes and may_hold(graph, own[operand], own[result])

    def is_of_all(take: graphs.Takeover) -> bool:
        return all(is_same(take, *p) for p in zip(take.operands, take.results, strict=True))

    return tuple(replace(n, takes=tuple(filter(is_of_all, n.takes))) for n in graph.nodes)
