"""Lower: a recorded run -> CDGraph of storages and of the units that make them.

takes: Capture. returns: Lowered (the CDGraph and how its values meet the caller), before the passes
from graph to graph (`graph_builder.pipeline`).
guarantees: views and in-place results are members of one storage; a node that mutates storages of
the caller (buffers, inputs), or reads one that the run mutates, runs once (docs/model.md).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from rockplan.errors import InvalidInput
from rockplan.graph_builder.lowering.atomic_units import check_mutation, divided, needed_calls
from rockplan.graph_builder.lowering.reinplace import is_dense
from rockplan.graph_builder.operators.facts import facts_of, without_statistics
from rockplan.graph_builder.operators.rows import ViewKind, row_of
from rockplan.graph_builder.recorded.run import Capture, Gradients, RunView
from rockplan.graph_builder.recorded.specs import allocated_bytes, dtype_of
from rockplan.values import graph as graphs
from rockplan.values.interface import Interface
from rockplan.values.plan import PassTrace

# Number of scalars that the caller holds: a loss and its gradient.
_CALLER_SCALARS = 2


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph and how it meets the caller. graph: unpriced, with values and calls; interface: in
    the graph's numbering; samples: value of the graph -> real tensor, for measuring; run: what the
    graph was made from; trace: of the passes that made it."""

    graph: graphs.CDGraph
    interface: Interface
    samples: dict[int, torch.Tensor]
    run: Capture
    trace: tuple[PassTrace, ...] = ()


def assembled(
    capture: Capture,
    rng_state_bytes: int,
    released: Sequence[int] = (),
    reruns: bool = False,
    with_dead: bool = False,
) -> Lowered:
    """Build the graph of a recorded run, forward nodes first. Returned with it: which of its values
    are parameters, inputs, results and so on, and the real tensors of the sample by value.

    rng_state_bytes: size of one saved generator state on the device. released: positions of leaves
    of the result that the caller does not hold in the backward phase. reruns: collectives may run
    again. with_dead: what the forward computes and nobody needs is in the graph, too. Raises
    InvalidInput if a released leaf is not a tensor made by the forward,
    UnsupportedModel for changes in place that cannot be planned.
    """
    view = capture.view
    numbering = _Numbering(view)
    for name, value in (*capture.parameters, *capture.buffers):
        numbering.value(value, name)
    for position, value in capture.inputs:
        numbering.value(value, f"input_{position}")
    for number, (value, _) in enumerate(capture.constants):
        numbering.value(value, f"constant_{number}")
    nodes: list[graphs.ComputeNode] = []
    needed = frozenset(needed_calls(view))
    forward = [p for p, c in enumerate(capture.calls) if c.phase is graphs.Phase.FORWARD]
    dead = {p for p in forward if not view.is_view(p)} - needed if with_dead else set()
    units = sorted(
        divided(view, sorted(needed | dead)),
        key=lambda u: capture.calls[u[-1]].phase is graphs.Phase.BACKWARD,
    )
    for unit in units:
        if capture.calls[unit[0]].phase is not capture.calls[unit[-1]].phase:
            recorded = capture.calls[unit[0]]
            check_mutation(graphs.DataKind.TANGENT, graphs.DataKind.TANGENT, recorded)
        nodes.append(_node(view, numbering, unit, len(nodes), reruns))
    interface = _interface(capture, numbering)
    contributions = {
        target: [numbering.values[g].data for g in several]
        for target, several in interface.gradients
    }
    summed = _summed_in_place(nodes, numbering.values, interface.gradients)
    _keep_acting(nodes, numbering.values, interface)
    # What eager lets go after a call that is in no unit, such as a view, it does after the node.
    node_of = {position: index for index, unit in enumerate(units) for position in unit}
    ends, index = defaultdict[int, list[int]](list), 0
    for position, call in enumerate(capture.calls):
        index = node_of.get(position, index)
        ends[index] += (numbering.data_of[s] for s in call.ends if s in numbering.data_of)
    nodes = [
        replace(node, ends=tuple(ends[node.index]), is_dead=dead.issuperset(unit))
        for node, unit in zip(nodes, units, strict=True)
    ]
    held_tangents = _held_tangents(capture, numbering)
    of_outputs = {numbering.values[o.value].data for o in interface.outputs if o.value is not None}
    # Gradients of inputs are alive to the end of the backward pass: as `.grad` of a leaf, or in the
    # engine, which proceeds beyond the module only when the whole module is done.
    of_inputs = {
        d
        for target in contributions.keys() - {value for _, value in interface.parameters}
        for d in (contributions[target][:1] if target in summed else contributions[target])
    }
    of_copies = {numbering.values[copy].data for _, copy in interface.copies}
    held = _held_outputs(interface, numbering, released) | of_inputs | held_tangents | of_copies
    handed = {d for several in contributions.values() for d in several} - of_outputs - of_inputs

    def own(data: set[int]) -> tuple[int, ...]:
        return tuple(sorted(d for d in data if not numbering.data[d].kind.resident))

    graph = graphs.CDGraph(
        data=tuple(numbering.data),
        nodes=tuple(nodes),
        outputs=own(of_outputs),
        held=own(held),
        handed=own(handed),
        rng_state_bytes=rng_state_bytes,
        values=numbering.views_with_siblings(),
        kernels=capture.kernels,
        tiles=capture.tiles.parts,
    )
    of = numbering.value_of
    samples = {of[v]: t for v, t in capture.samples.items() if v in of}
    return Lowered(graph, interface, samples, capture)


def _is_same_value(call: graphs.Call) -> bool:
    # A plan executes below autograd, where `alias` and `detach` do nothing.
    return row_of(call.op).view is ViewKind.SAME_VALUE


class _Numbering:
    """Numbers recorded storages and values for the graph, in order of first appearance."""

    def __init__(self, view: RunView) -> None:
        self._run = view
        self._names: dict[str, int] = defaultdict(int)
        self.data: list[graphs.DataNode] = []
        self.values: list[graphs.Value] = []
        self.data_of: dict[int, int] = {}
        self.value_of: dict[int, int] = {}

    def storage(self, ordinal: int, name: str, size_bytes: int) -> int:
        if ordinal not in self.data_of:
            index = len(self.data)
            self.data_of[ordinal] = index
            kind = self._run.kinds[ordinal]
            self.data.append(graphs.DataNode(index, name, kind, size_bytes))
        return self.data_of[ordinal]

    def value(self, recorded: int, name: str | None = None) -> int:
        """Return the graph's index of the value `recorded`, which is added with its storage if it
        is new; what it is a view of is added first. name: None for one by its operator."""
        if recorded in self.value_of:
            return self.value_of[recorded]
        value = self._run.values[recorded]
        position = self._run.views.get(recorded)
        derived = None if position is None else self._run.calls[position]
        if derived is not None:
            if _is_same_value(derived.call):
                self.value_of[recorded] = self.value(derived.reads[0])
                return self.value_of[recorded]
            for read in derived.reads:
                self.value(read)
            name = name or self.name(derived.call.op)
        name = name or self.name("value")
        size_bytes = allocated_bytes(value.storage_bytes, value.spec.device)
        data = self.storage(value.storage, name, size_bytes)
        index = len(self.values)
        self.value_of[recorded] = index
        view = None if derived is None else self.call(derived.call)
        self.values.append(graphs.Value(index, data, name, value.spec, view))
        return index

    def views_with_siblings(self) -> tuple[graphs.Value, ...]:
        """Return all values of the graph, in which the call of a view names every result that the
        graph uses, so that one execution of, say, `split` derives them all."""
        values = list(self.values)
        for recorded, index in self.value_of.items():
            position, view = self._run.views.get(recorded), values[index].view
            if view is None or position is None:
                continue
            call = self._run.calls[position].call
            if _is_same_value(call):
                continue
            named = tuple(None if r is None else self.value_of.get(r) for r in call.results)
            if named != view.results:
                values[index] = replace(values[index], view=replace(view, results=named))
        return tuple(values)

    def name(self, op: str) -> str:
        packet = graphs.stem(op).split(".")[1] if "." in op else op
        name = packet.strip("_") or packet
        number = self._names[name]
        self._names[name] += 1
        return f"{name}_{number}"

    def call(self, call: graphs.Call) -> graphs.Call:
        return graphs.renamed(call, self.value, self.value_of.get)


def _interface(capture: Capture, numbering: _Numbering) -> Interface:
    of, view = numbering.value, capture.view
    changed = (v for v in view.given if view.storage(v) in view.changed_outside)
    return Interface(
        parameters=tuple((name, of(v)) for name, v in capture.parameters),
        buffers=tuple((name, of(v)) for name, v in capture.buffers),
        inputs=tuple((position, of(v)) for position, v in capture.inputs),
        constants=tuple(of(v) for v, _ in capture.constants),
        outputs=tuple(
            replace(
                o,
                value=None if o.value is None else of(o.value),
                tangent=None if o.tangent is None else of(o.tangent, f"tangent_{position}"),
            )
            for position, o in enumerate(capture.outputs)
        ),
        gradients=tuple((of(t), tuple(of(g) for g in parts)) for t, parts in view.contributions),
        copies=tuple((of(buffer), of(copy)) for buffer, copy in capture.copies),
        mutated=tuple(map(of, changed)),
        guards=capture.guards,
        questions=capture.questions,
        backward_ignores_autocast=capture.backward_ignores_autocast,
        distributed=tuple((of(value), spec) for value, spec in capture.distributed),
        reads=capture.reads,
        sizes=capture.sizes,
        numbers=capture.numbers,
        unread=capture.unread,
        idle=capture.idle,
    )


def _held_outputs(interface: Interface, numbering: _Numbering, released: Sequence[int]) -> set[int]:
    """Return the storages of results that the caller holds during the backward phase: all but the
    `released` ones (positions of leaves) from which backward does not start. Raises InvalidInput
    for a position that is no tensor's."""
    leaves = {i: o for i, o in enumerate(interface.outputs) if o.value is not None}
    if not leaves.keys() >= set(released):
        raise InvalidInput(
            f"released is {tuple(released)}, but the leaves of the result that are tensors are "
            f"{tuple(leaves)}"
        )
    return {
        numbering.values[o.value].data
        for i, o in leaves.items()
        if o.value is not None and (o.tangent is not None or i not in released)
    }


def _held_tangents(capture: Capture, numbering: _Numbering) -> set[int]:
    """Return the storages of scalars that the caller or autograd's engine holds throughout the
    backward: gradients of scalar results, and one storage more, which is added to the data here,
    for the value and gradient of the loss that the caller computes from the result."""
    tangents = [o.tangent for o in capture.outputs if o.tangent is not None]
    scalars = [t for t in tangents if not capture.values[t].spec.shape]
    held = {numbering.values[numbering.value(t)].data for t in scalars}
    first = numbering.values[numbering.value(tangents[0])]
    index = len(numbering.data)
    scalar_bytes = allocated_bytes(dtype_of(first.spec).itemsize, first.spec.device)
    numbering.data.append(
        graphs.DataNode(
            index, graphs.CALLER_LOSS, graphs.DataKind.TANGENT, _CALLER_SCALARS * scalar_bytes
        )
    )
    return held | {index}


def _node(
    view: RunView, numbering: _Numbering, unit: Sequence[int], index: int, reruns: bool
) -> graphs.ComputeNode:
    recorded = [view.calls[p] for p in unit]
    reads: set[int] = set()
    writes: set[int] = set()
    calls: list[graphs.Call] = []
    names: list[str] = []
    for entry in recorded:
        for read in entry.reads:
            reads.add(numbering.values[numbering.value(read)].data)
        name = numbering.name(entry.call.op)
        names.append(name)
        for place, result in enumerate(entry.call.results):
            if result is not None and result not in numbering.value_of:
                suffix = "" if len(entry.call.results) == 1 else f"_{place}"
                value = numbering.value(result, name + suffix)
                if numbering.values[value].view is None:
                    writes.add(numbering.values[value].data)
        calls.append(numbering.call(entry.call))
    main = recorded[0]
    effect = any(view.changes_outside(e) for e in recorded)
    recalls = []
    for call in calls:
        plain = without_statistics(call.op, call.args)
        recalls.append(call if plain is None else replace(call, op=plain[0], args=plain[1]))
    pure_again = all(
        not view.changes_outside(e) or again is not call
        for e, call, again in zip(recorded, calls, recalls, strict=True)
    )
    acts = any(e.effect and not (reruns and e.effect.is_exchange) for e in recorded)
    unstable = acts or any(map(view.reads_changed, recorded))
    return graphs.ComputeNode(
        index=index,
        name=next((n for n in names if "empty" not in n), names[0]),  # what fills it says more
        phase=main.phase,
        reads=tuple(sorted(reads - writes)),
        writes=tuple(sorted(writes)),
        random=any(e.random for e in recorded),
        recomputable=(not effect or pure_again) and not unstable,
        calls=tuple(calls),
        recalls=tuple(recalls),
        module=main.module,
        source=main.source,
        function=main.function,
        was_in_place=main.was_in_place,
    )


# Reads added to nodes that do not compute with them, so that storages stay alive until these run:
# autograd, and a backward pass in other strides than planned, find what they need, and schedules
# count its memory


def _summed_in_place(
    nodes: list[graphs.ComputeNode], values: Sequence[graphs.Value], gradients: Gradients
) -> frozenset[int]:
    """Let nodes read contributions to one gradient, so that these stay alive as long as autograd
    needs them; `nodes` is changed. Returns the values whose gradient is summed into its first
    contribution as others are made; for other values all contributions wait for the last.
    gradients: pairs (value, its contributions)."""
    made_by = {d: n.index for n in nodes for d in n.writes}
    read = {d for node in nodes for d in node.reads}
    times_handed = Counter(values[g].data for _, parts in gradients for g in parts)
    summed = []
    for target, parts in gradients:
        data = [values[g].data for g in parts]
        if len(data) < 2:
            continue
        is_ours = times_handed[data[0]] == 1 and data[0] not in read
        makers = [made_by.get(d, -1) for d in data]
        is_in_order = makers == sorted(makers) and makers[0] >= 0
        if is_ours and is_in_order and is_dense(values[parts[0]].spec):
            # Autograd adds each to the first in place when it is handed over.
            for maker in {*makers} - {makers[0]}:
                _keep(nodes, maker, data[:1])
            summed.append(target)
        elif max(makers) >= 0:
            # All are handed over together: autograd never holds one that the plan does not count.
            _keep(nodes, max(makers), data)
    return frozenset(summed)


def _keep(nodes: list[graphs.ComputeNode], index: int, alive: Iterable[int]) -> None:
    node = nodes[index]
    nodes[index] = replace(node, reads=tuple(sorted({*node.reads, *alive} - {*node.writes})))


def _keep_acting(
    nodes: list[graphs.ComputeNode], values: Sequence[graphs.Value], interface: Interface
) -> None:
    """Let the first backward node read the results of forward operators that must not run again,
    for their side effects, so that they stay alive until it; `nodes` is changed. If incoming
    gradients have other strides than planned, the rest of the forward runs again. Nothing to do if
    backward starts from scalars only."""
    tangents = [o.tangent for o in interface.outputs if o.tangent is not None]
    if not any(values[t].spec.shape for t in tangents):
        return
    once = (n for n in nodes if not n.recomputable)
    acting = (n for n in once if any(facts_of(c.op).effect for c in n.calls))
    made = {d for n in acting if n.phase is graphs.Phase.FORWARD for d in n.writes}
    first = next((n for n in nodes if n.phase is graphs.Phase.BACKWARD), None)
    if made and first is not None:
        _keep(nodes, first.index, made)
