"""Lower: a recorded run -> CDGraph of storages and of the units that make them.

takes: Capture. returns: Lowered (the CDGraph and how its values meet the caller).
guarantees: views and in-place results are members of one storage; the allocation of a storage
and all its mutations run as one unit, together with whatever reads an intermediate state of it;
a node that reads what the run itself mutates outside (buffers, inputs), or mutates it, runs once;
dead computations without effect are gone. source: DESIGN, sections 2 and 3.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import networkx
import torch

from rockplan.errors import UnsupportedModel
from rockplan.graph import (
    Call,
    CDGraph,
    ComputeNode,
    DataKind,
    DataNode,
    Phase,
    Value,
    ValueRef,
    value_refs,
)
from rockplan.graph_builder.capture import Capture
from rockplan.graph_builder.operators import unread_statistics, without_statistics
from rockplan.graph_builder.record import RecordedCall
from rockplan.graph_builder.reorder import reordered
from rockplan.graph_builder.takeover import is_dense, with_takeovers
from rockplan.interface import Interface

# PyTorch's caching allocator rounds every request up to this.
_CUDA_BLOCK_BYTES = 512

# The caller's loss and its gradient.
_CALLER_SCALARS = 2

# A plan executes below autograd, where these return what they are given.
_SAME_VALUE = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"})


@dataclass(frozen=True, slots=True)
class Lowered:
    """graph: unpriced, with values and calls; interface: in the graph's numbering;
    samples: value of the graph -> real tensor, for measuring."""

    graph: CDGraph
    interface: Interface
    samples: dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Storages:
    """Facts about recorded storages, by ordinal."""

    of: tuple[int, ...]  # recorded value -> storage
    kind: dict[int, DataKind]
    writers: dict[int, tuple[int, ...]]  # storage -> positions of calls that allocate or mutate
    mutated_outside: frozenset[int]  # resident storages that some call mutates


def lower(capture: Capture, rng_state_bytes: int) -> Lowered:
    """Build the CDGraph. rng_state_bytes: size of one saved generator state on the device."""
    storages = _classify(capture)
    views = _views(capture, storages)
    gradients = _contributions(capture)
    live = _live_calls(capture, storages, views, gradients)
    units = _units(capture, storages, live)
    lowered = _assemble(capture, storages, views, gradients, units, rng_state_bytes)
    return replace(lowered, graph=reordered(with_takeovers(lowered.graph)))


Gradients = tuple[tuple[int, tuple[int, ...]], ...]


def _contributions(capture: Capture) -> Gradients:
    """For each target, the gradients that the engine sums up for it, in its order.

    Where a tensor is used several times, the engine adds what arrives to what is there. The sums
    are left to it: with several forwards in flight it sums in another association than any one
    of them alone, and the bits depend on that.
    """
    producer: dict[int, Call] = {}
    uses: Counter[int] = Counter()
    for recorded in capture.calls:
        uses.update(recorded.reads)
        if recorded.phase is Phase.BACKWARD:
            producer.update({r: recorded.call for r in recorded.call.results if r is not None})

    def is_engine_sum(gradient: int) -> bool:
        call = producer.get(gradient)
        if call is None or call.op != "aten.add.Tensor" or call.kwargs or uses[gradient]:
            return False
        terms = [a.index for a in call.args if isinstance(a, ValueRef)]
        spec = capture.values[gradient].spec
        return len(terms) == 2 and all(
            capture.values[t].spec.shape == spec.shape and uses[t] == 1 for t in terms
        )

    def split(gradient: int) -> tuple[int, ...]:
        if not is_engine_sum(gradient):
            return (gradient,)
        arrived, last = (r.index for r in _refs(producer[gradient]))
        uses[arrived] -= 1
        return (*split(arrived), last)

    return tuple((t, () if g is None else split(g)) for t, g in capture.gradients)


def _classify(capture: Capture) -> _Storages:
    of = tuple(v.storage for v in capture.values)
    kind: dict[int, DataKind] = {}
    leaves: list[tuple[DataKind, Iterable[int]]] = [
        (DataKind.PARAMETER, (v for _, v in capture.parameters)),
        (DataKind.BUFFER, (v for _, v in capture.buffers)),
        (DataKind.INPUT, (v for _, v in capture.inputs)),
        (DataKind.CONSTANT, (v for v, _ in capture.constants)),
        (DataKind.TANGENT, (o.tangent for o in capture.outputs if o.tangent is not None)),
    ]
    for leaf_kind, values in leaves:
        for value in values:
            kind.setdefault(of[value], leaf_kind)
    writers: dict[int, list[int]] = defaultdict(list)
    mutated_outside: set[int] = set()
    for position, recorded in enumerate(capture.calls):
        own = DataKind.ACTIVATION if recorded.phase is Phase.FORWARD else DataKind.GRADIENT
        written = {of[v] for v in recorded.writes}
        for result in recorded.call.results:
            if result is not None and of[result] not in kind:
                kind[of[result]] = own
                written.add(of[result])
        for storage in sorted(written):
            if kind[storage].resident:
                mutated_outside.add(storage)
            else:
                _check_mutation(kind[storage], own, recorded)
                writers[storage].append(position)
    positions = {s: tuple(p) for s, p in writers.items()}
    return _Storages(of, kind, positions, frozenset(mutated_outside))


def _check_mutation(kind: DataKind, own: DataKind, recorded: RecordedCall) -> None:
    if kind is DataKind.TANGENT or kind is not own:
        raise UnsupportedModel.at(
            recorded.module,
            recorded.source,
            f"the backward of {recorded.call.op} modifies a tensor of the forward pass in place; "
            "return a new tensor from the backward instead",
        )


def _views(capture: Capture, storages: _Storages) -> dict[int, int]:
    """recorded value -> position of the call that derives it as a view."""
    views: dict[int, int] = {}
    seen: set[int] = set()
    for position, recorded in enumerate(capture.calls):
        seen.update(recorded.reads)
        for result in recorded.call.results:
            if result is not None and result not in seen:
                seen.add(result)
                if storages.of[result] in {storages.of[v] for v in recorded.reads}:
                    views[result] = position
    return views


def _refs(call: Call) -> list[ValueRef]:
    return [*value_refs(call.args), *(r for _, a in call.kwargs for r in value_refs(a))]


def _is_pure_view(recorded: RecordedCall, views: dict[int, int], position: int) -> bool:
    """True if the call only derives views: no memory, no effect, no work."""
    results = [r for r in recorded.call.results if r is not None]
    return bool(results) and not recorded.writes and all(views.get(r) == position for r in results)


def _live_calls(
    capture: Capture, storages: _Storages, views: dict[int, int], gradients: Gradients
) -> tuple[int, ...]:
    """Positions of the calls that matter: what outputs, gradients, effects and the generator
    need; views excluded, since they are derived where they are read."""
    roots = [o.value for o in capture.outputs if o.value is not None]
    roots += [g for _, contributions in gradients for g in contributions]
    needed = {storages.of[v] for v in roots}
    live: list[int] = []
    for position in range(len(capture.calls) - 1, -1, -1):
        recorded = capture.calls[position]
        if _is_pure_view(recorded, views, position):
            continue
        written = {storages.of[r] for r in recorded.call.results if r is not None}
        written |= {storages.of[v] for v in recorded.writes}
        effect = recorded.random or bool(
            written & storages.mutated_outside & {storages.of[v] for v in recorded.writes}
        )
        if not effect and not written & needed:
            continue
        live.append(position)
        needed |= written
        needed |= {storages.of[v] for v in recorded.reads}
    return tuple(reversed(live))


def _units(
    capture: Capture, storages: _Storages, live: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Group calls that must run together; units in execution order, calls in program order.

    The calls that write one storage are one unit, with every call that reads an intermediate
    state of it, and with everything on a path from the unit back into it (a unit must be convex).
    """
    is_live = set(live)
    union = networkx.utils.UnionFind(live)
    writers = {
        storage: [p for p in positions if p in is_live]
        for storage, positions in storages.writers.items()
    }
    for kept in writers.values():
        union.union(*kept[:1], *kept)
    dependencies: set[tuple[int, int]] = set()
    for position in live:
        for storage in {storages.of[v] for v in capture.calls[position].reads}:
            made_by = writers.get(storage)
            if made_by and position < made_by[-1]:
                union.union(position, made_by[0])
            elif made_by:
                dependencies.add((made_by[0], position))
    graph = networkx.DiGraph()
    graph.add_nodes_from({union[p] for p in live})
    graph.add_edges_from((union[a], union[b]) for a, b in sorted(dependencies))
    members: dict[int, list[int]] = defaultdict(list)
    for position in live:
        members[union[position]].append(position)
    components = list(networkx.strongly_connected_components(graph))
    groups = [tuple(sorted(p for u in c for p in members[u])) for c in components]
    return _in_order(capture, groups, dependencies, storages)


def _in_order(
    capture: Capture,
    groups: list[tuple[int, ...]],
    dependencies: set[tuple[int, int]],
    storages: _Storages,
) -> tuple[tuple[int, ...], ...]:
    """Topological order of the groups, by last call where there is a choice.

    Random draws stay in program order, and so do calls that touch the same storage outside.
    """
    group_of = {p: g for g, group in enumerate(groups) for p in group}
    edges = {(group_of[a], group_of[b]) for a, b in dependencies}
    sequences: dict[object, list[int]] = defaultdict(list)
    for position in sorted(group_of):
        if capture.calls[position].random:
            sequences["generator"].append(position)
        for storage in _touched_outside(capture.calls[position], storages):
            sequences[storage].append(position)
    for sequence in sequences.values():
        edges |= {(group_of[a], group_of[b]) for a, b in pairwise(sequence)}
    edges = {(a, b) for a, b in edges if a != b}
    followers: dict[int, list[int]] = defaultdict(list)
    waiting = [0] * len(groups)
    for a, b in edges:
        followers[a].append(b)
        waiting[b] += 1
    ready = [(groups[g][-1], g) for g in range(len(groups)) if not waiting[g]]
    heapq.heapify(ready)
    ordered: list[tuple[int, ...]] = []
    while ready:
        _, g = heapq.heappop(ready)
        ordered.append(groups[g])
        for follower in followers[g]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (groups[follower][-1], follower))
    if len(ordered) < len(groups):
        stuck = capture.calls[min(groups[g][0] for g in range(len(groups)) if waiting[g])]
        raise UnsupportedModel.at(
            stuck.module,
            stuck.source,
            "in-place operations and random draws are interleaved in a way that a plan cannot "
            "separate; use the out-of-place operations there",
        )
    return tuple(ordered)


def _touched_outside(recorded: RecordedCall, storages: _Storages) -> frozenset[int]:
    """Storages of the model or the caller that the run mutates, and that this call touches."""
    touched = {storages.of[v] for v in recorded.writes}
    touched |= {storages.of[v] for v in recorded.reads}
    return storages.mutated_outside & touched


class _Numbering:
    """Recorded storages and values -> indices of the graph, in order of first appearance."""

    def __init__(self, capture: Capture, storages: _Storages, views: dict[int, int]) -> None:
        self._capture = capture
        self._storages = storages
        self._views = views
        self._names: dict[str, int] = defaultdict(int)
        self.data: list[DataNode] = []
        self.values: list[Value] = []
        self.data_of: dict[int, int] = {}
        self.value_of: dict[int, int] = {}

    def storage(self, ordinal: int, name: str, size_bytes: int) -> int:
        if ordinal not in self.data_of:
            index = len(self.data)
            self.data_of[ordinal] = index
            kind = self._storages.kind[ordinal]
            self.data.append(DataNode(index, name, kind, size_bytes))
        return self.data_of[ordinal]

    def value(self, recorded: int, name: str | None = None) -> int:
        """Index of a recorded value; its chain of views is numbered first."""
        if recorded in self.value_of:
            return self.value_of[recorded]
        found = self._capture.values[recorded]
        position = self._views.get(recorded)
        derived = None if position is None else self._capture.calls[position]
        if derived is not None:
            if derived.call.op in _SAME_VALUE:
                self.value_of[recorded] = self.value(derived.reads[0])
                return self.value_of[recorded]
            for read in derived.reads:
                self.value(read)
            name = name or self.name(derived.call.op)
        name = name or self.name("value")
        size_bytes = _allocated_bytes(found.storage_bytes, found.spec.device)
        data = self.storage(found.storage, name, size_bytes)
        index = len(self.values)
        self.value_of[recorded] = index
        view = None if derived is None else self.call(derived.call)
        self.values.append(Value(index, data, name, found.spec, view))
        return index

    def views_with_siblings(self) -> tuple[Value, ...]:
        """All values; a view names every result of its call that the graph uses, so that one
        execution derives them all."""
        found = list(self.values)
        for recorded, index in self.value_of.items():
            call = self._capture.calls[self._views.get(recorded, 0)].call
            view = found[index].view
            if view is None or recorded not in self._views or call.op in _SAME_VALUE:
                continue
            named = tuple(None if r is None else self.value_of.get(r) for r in call.results)
            if named != view.results:
                found[index] = replace(found[index], view=replace(view, results=named))
        return tuple(found)

    def name(self, op: str) -> str:
        stem = op.split(".")[1] if "." in op else op
        stem = stem.strip("_") or stem
        number = self._names[stem]
        self._names[stem] += 1
        return f"{stem}_{number}"

    def call(self, call: Call) -> Call:
        """`call` with references to values of the graph."""

        def translate(argument: object) -> object:
            if isinstance(argument, ValueRef):
                return ValueRef(self.value(argument.index))
            if isinstance(argument, tuple):
                return tuple(translate(item) for item in argument)
            return argument

        return Call(
            call.op,
            tuple(translate(a) for a in call.args),
            tuple((k, translate(a)) for k, a in call.kwargs),
            tuple(None if r is None else self.value_of.get(r) for r in call.results),
        )


def _assemble(
    capture: Capture,
    storages: _Storages,
    views: dict[int, int],
    gradients: Gradients,
    units: Sequence[tuple[int, ...]],
    rng_state_bytes: int,
) -> Lowered:
    numbering = _Numbering(capture, storages, views)
    for name, value in (*capture.parameters, *capture.buffers):
        numbering.value(value, name)
    for position, value in capture.inputs:
        numbering.value(value, f"input_{position}")
    for number, (value, _) in enumerate(capture.constants):
        numbering.value(value, f"constant_{number}")
    nodes: list[ComputeNode] = []
    for unit in sorted(units, key=lambda u: capture.calls[u[-1]].phase is Phase.BACKWARD):
        if capture.calls[unit[0]].phase is not capture.calls[unit[-1]].phase:
            recorded = capture.calls[unit[0]]
            _check_mutation(DataKind.TANGENT, DataKind.TANGENT, recorded)
        nodes.append(_node(capture, storages, numbering, unit, len(nodes)))
    interface = _interface(capture, numbering, gradients)
    contributions = {
        target: [numbering.values[g].data for g in found] for target, found in interface.gradients
    }
    summed = _summed_in_place(nodes, numbering.values, interface.gradients)
    held_tangents = _held_tangents(capture, numbering)
    of_outputs = {numbering.values[o.value].data for o in interface.outputs if o.value is not None}
    # Gradients of inputs are alive to the end of the backward pass: as `.grad` of a leaf, or in the
    # engine, which goes on beyond the module only when all of the module is done.
    of_inputs = {
        d
        for target in contributions.keys() - {value for _, value in interface.parameters}
        for d in (contributions[target][:1] if target in summed else contributions[target])
    }
    handed = {d for found in contributions.values() for d in found} - of_outputs - of_inputs

    def own(data: set[int]) -> tuple[int, ...]:
        return tuple(sorted(d for d in data if not numbering.data[d].kind.resident))

    graph = CDGraph(
        data=tuple(numbering.data),
        nodes=tuple(nodes),
        outputs=own(of_outputs),
        held=own(of_outputs | of_inputs | held_tangents),
        handed=own(handed),
        rng_state_bytes=rng_state_bytes,
        values=numbering.views_with_siblings(),
    )
    of = numbering.value_of
    samples = {of[v]: t for v, t in capture.samples.items() if v in of}
    return Lowered(graph, interface, samples)


def _interface(capture: Capture, numbering: _Numbering, gradients: Gradients) -> Interface:
    """The roles of the values, in the numbering of the graph."""
    of = numbering.value
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
        gradients=tuple((of(t), tuple(of(g) for g in found)) for t, found in gradients),
        guards=capture.guards,
        backward_ignores_autocast=capture.backward_ignores_autocast,
    )


def _summed_in_place(
    nodes: list[ComputeNode], values: Sequence[Value], gradients: Gradients
) -> frozenset[int]:
    """Keep contributions to one gradient alive as long as autograd needs them: those of the
    targets returned are added to the first as they are made, of others all wait for the last."""
    made_by = {d: n.index for n in nodes for d in n.writes}
    read = {d for node in nodes for d in node.reads}
    times_handed = Counter(values[g].data for _, found in gradients for g in found)
    summed = []
    for target, found in gradients:
        data = [values[g].data for g in found]
        if len(data) < 2:
            continue
        is_ours = times_handed[data[0]] == 1 and data[0] not in read
        dense = is_ours and is_dense(values[found[0]].spec)
        if dense and _sum_into_first(nodes, made_by, data):
            summed.append(target)
        else:
            _keep_until_last(nodes, made_by, data)
    return frozenset(summed)


def _sum_into_first(
    nodes: list[ComputeNode], made_by: dict[int, int], contributions: Sequence[int]
) -> bool:
    """The first contribution to a gradient is alive until the last is made: autograd adds each of
    the others to it in place as it is handed over. False where they are not made in order."""
    makers = [made_by.get(d, -1) for d in contributions]
    if makers != sorted(makers) or makers[0] < 0:
        return False
    for maker in {*makers} - {makers[0]}:
        reads = {*nodes[maker].reads, contributions[0]}
        nodes[maker] = replace(nodes[maker], reads=tuple(sorted(reads)))
    return True


def _keep_until_last(
    nodes: list[ComputeNode], made_by: dict[int, int], contributions: Sequence[int]
) -> None:
    """All contributions to one gradient are alive until the last of them is made: they are
    handed over together, so that autograd never holds one that the plan does not count."""
    makers = {made_by[d] for d in contributions if d in made_by}
    if not makers:
        return
    last = nodes[max(makers)]
    reads = {*last.reads, *contributions} - set(last.writes)
    nodes[last.index] = replace(last, reads=tuple(sorted(reads)))


def _allocated_bytes(size_bytes: int, device: str) -> int:
    """What the allocator of `device` gives out for a storage."""
    if not device.startswith("cuda"):
        return size_bytes
    return -(-size_bytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES


def _held_tangents(capture: Capture, numbering: _Numbering) -> set[int]:
    """Scalars that the caller's backward() holds from its start to its end: the gradient of a
    loss that the module returns, which is the root of the engine's run; and the value and
    gradient of what the caller computes from the result (a loss, or a loss that it scales)."""
    tangents = [o.tangent for o in capture.outputs if o.tangent is not None]
    scalars = [t for t in tangents if not capture.values[t].spec.shape]
    held = {numbering.values[numbering.value(t)].data for t in scalars}
    first = numbering.values[numbering.value(tangents[0])]
    element_bytes = getattr(torch, first.spec.dtype.removeprefix("torch.")).itemsize
    index = len(numbering.data)
    size_bytes = _CALLER_SCALARS * _allocated_bytes(element_bytes, first.spec.device)
    numbering.data.append(DataNode(index, "caller_loss", DataKind.TANGENT, size_bytes))
    return held | {index}


def _node(
    capture: Capture,
    storages: _Storages,
    numbering: _Numbering,
    unit: Sequence[int],
    index: int,
) -> ComputeNode:
    recorded = [capture.calls[p] for p in unit]
    reads: set[int] = set()
    writes: set[int] = set()
    calls: list[Call] = []
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
    effect = any(_mutates_outside(e, storages) for e in recorded)
    recalls = tuple(_again(call) for call in calls)
    pure_again = all(
        not _mutates_outside(e, storages) or again is not call
        for e, call, again in zip(recorded, calls, recalls, strict=True)
    )
    unstable = any(_reads_mutated(e, storages) for e in recorded)
    return ComputeNode(
        index=index,
        name=_title(names),
        phase=main.phase,
        reads=tuple(sorted(reads - writes)),
        writes=tuple(sorted(writes)),
        random=any(e.random for e in recorded),
        recomputable=(not effect or pure_again) and not unstable,
        calls=tuple(calls),
        recalls=recalls,
        module=main.module,
        source=main.source,
    )


def _title(names: Sequence[str]) -> str:
    """The first of the calls' names that is not an allocation: 'bernoulli_0' says what fills the
    storage that 'empty_strided_0' makes."""
    return next((name for name in names if "empty" not in name), names[0])


def _again(call: Call) -> Call:
    """How `call` runs again: without touching running statistics."""
    plain = without_statistics(call.op, call.args)
    return call if plain is None else replace(call, op=plain[0], args=plain[1])


def _mutates_outside(recorded: RecordedCall, storages: _Storages) -> bool:
    return any(storages.of[v] in storages.mutated_outside for v in recorded.writes)


def _reads_mutated(recorded: RecordedCall, storages: _Storages) -> bool:
    """True if the call uses the content of a storage that the run mutates outside."""
    ignored = unread_statistics(recorded.call.op, recorded.call.args)
    args = [a for i, a in enumerate(recorded.call.args) if i not in ignored]
    used = [*value_refs(args), *(r for _, a in recorded.call.kwargs for r in value_refs(a))]
    return any(storages.of[r.index] in storages.mutated_outside for r in used)
