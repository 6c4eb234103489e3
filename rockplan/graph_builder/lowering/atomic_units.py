"""AtomicUnits: which recorded calls run together, and what they change outside.

takes: Capture. returns: Storages, views, live calls, units in execution order. guarantees: the
allocation of a storage and all its mutations are one unit, with whatever reads an intermediate
state of it; dead computations that do not act are in none. (docs/model.md, Capture and lowering)
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx

from rockplan.errors import UnsupportedModel
from rockplan.graph_builder.operators.effects import Effect
from rockplan.graph_builder.operators.facts import unread_arguments
from rockplan.graph_builder.recorded.gradient_sums import contributions
from rockplan.graph_builder.recorded.run import Capture, RecordedCall
from rockplan.values.graph import DataKind, Phase, value_refs


@dataclass(frozen=True, slots=True)
class Storages:
    """Facts about recorded storages, by ordinal."""

    of: tuple[int, ...]  # recorded value -> storage
    kind: dict[int, DataKind]
    writers: dict[int, tuple[int, ...]]  # storage -> positions of calls that allocate or mutate
    mutated_outside: frozenset[int]  # resident storages that some call mutates


@dataclass(frozen=True, slots=True)
class AtomicUnits:
    """units: positions of calls that run together, in execution order, calls in program order;
    views: recorded value -> position of the call that derives it as a view."""

    storages: Storages
    views: dict[int, int]
    units: tuple[tuple[int, ...], ...]


def divided(capture: Capture) -> AtomicUnits:
    """The units of `capture`."""
    storages = _classify(capture)
    views = _views(capture, storages)
    roots = [o.value for o in capture.outputs if o.value is not None]
    roots += [gradient for _, several in contributions(capture) for gradient in several]
    roots += [copy for _, copy in capture.copies]
    live = _live_calls(capture, storages, views, roots)
    return AtomicUnits(storages, views, _units(capture, storages, live))


def _classify(capture: Capture) -> Storages:
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
                check_mutation(kind[storage], own, recorded)
                writers[storage].append(position)
    positions = {s: tuple(p) for s, p in writers.items()}
    return Storages(of, kind, positions, frozenset(mutated_outside))


def check_mutation(kind: DataKind, own: DataKind, recorded: RecordedCall) -> None:
    if kind is DataKind.TANGENT or kind is not own:
        raise UnsupportedModel.at(
            recorded.module,
            recorded.source,
            f"the backward of {recorded.call.op} modifies a tensor of the forward pass in place; "
            "return a new tensor from the backward instead",
        )


def _views(capture: Capture, storages: Storages) -> dict[int, int]:
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


def _is_pure_view(recorded: RecordedCall, views: dict[int, int], position: int) -> bool:
    """True if the call only derives views: no memory, no effect, no work."""
    made = recorded.call.made
    return bool(made) and not recorded.writes and all(views.get(r) == position for r in made)


def _live_calls(
    capture: Capture, storages: Storages, views: dict[int, int], roots: Iterable[int]
) -> tuple[int, ...]:
    """Positions of the calls that matter: what the roots (outputs, gradients), effects and the
    generator need; views excluded, since they are derived where they are read."""
    needed = {storages.of[v] for v in roots}
    live: list[int] = []
    for position in range(len(capture.calls) - 1, -1, -1):
        recorded = capture.calls[position]
        if _is_pure_view(recorded, views, position):
            continue
        written = {storages.of[r] for r in recorded.call.made}
        written |= {storages.of[v] for v in recorded.writes}
        effect = not recorded.is_repeatable or bool(
            written & storages.mutated_outside & {storages.of[v] for v in recorded.writes}
        )
        if not effect and not written & needed:
            continue
        live.append(position)
        needed |= written
        needed |= {storages.of[v] for v in recorded.reads}
    return tuple(reversed(live))


def _units(
    capture: Capture, storages: Storages, live: Sequence[int]
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
    storages: Storages,
) -> tuple[tuple[int, ...], ...]:
    """Topological order of the groups, by last call where there is a choice.

    Random draws, and calls that do something beside their results, stay in program order, and so do
    calls that touch the same storage outside.
    """
    group_of = {p: g for g, group in enumerate(groups) for p in group}
    edges = {(group_of[a], group_of[b]) for a, b in dependencies}
    sequences: dict[object, list[int]] = defaultdict(list)
    for position in sorted(group_of):
        recorded = capture.calls[position]
        if not recorded.is_repeatable and recorded.effect is not Effect.WAITS:
            sequences["outside"].append(position)
        for storage in touched_outside(recorded, storages):
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


def touched_outside(recorded: RecordedCall, storages: Storages) -> frozenset[int]:
    """Storages of the model or the caller that the run mutates, and that this call touches."""
    touched = {storages.of[v] for v in recorded.writes}
    touched |= {storages.of[v] for v in recorded.reads}
    return storages.mutated_outside & touched


def mutates_outside(recorded: RecordedCall, storages: Storages) -> bool:
    return any(storages.of[v] in storages.mutated_outside for v in recorded.writes)


def reads_mutated(recorded: RecordedCall, storages: Storages) -> bool:
    """True if the call uses the content of a storage that the run mutates outside."""
    ignored = unread_arguments(recorded.call.op, recorded.call.args)
    args = [a for i, a in enumerate(recorded.call.args) if i not in ignored]
    used = [*value_refs(args), *(r for _, a in recorded.call.kwargs for r in value_refs(a))]
    return any(storages.of[r.index] in storages.mutated_outside for r in used)
