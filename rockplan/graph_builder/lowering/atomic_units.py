"""Atomic units: which recorded calls run together.

takes: the view of a run. returns: units in execution order. guarantees: the allocation of a storage
and all its mutations are one unit, with every call that reads an intermediate state of it; dead
calls without side effects are in none of `needed_calls` (docs/model.md, Capture and lowering).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import networkx

from rockplan.errors import UnsupportedModel
from rockplan.graph_builder.operators.rows import Effect
from rockplan.graph_builder.recorded.run import RecordedCall, RunView, own_kind
from rockplan.values.graph import DataKind


def needed_calls(view: RunView) -> tuple[int, ...]:
    """Return the positions of the calls whose results somebody needs, or which act."""
    # The additions of contributions are left out: the engine of autograd makes them.
    roots = [gradient for _, several in view.contributions for gradient in several]
    return view.needed_for(view.storages((*view.outputs, *roots, *view.copies)))


def divided(view: RunView, taken: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the units of the calls `taken` of a recorded run (positions, ascending), groups of
    calls that become one node, in execution order; each as positions of its calls in program order.
    Raises UnsupportedModel for a change in place that no order of units allows."""
    for recorded in view.calls:
        for storage in sorted(view.storages(recorded.writes)):
            if not view.kinds[storage].resident:
                check_mutation(view.kinds[storage], own_kind(recorded), recorded)
    return _units(view, taken)


def check_mutation(kind: DataKind, own: DataKind, recorded: RecordedCall) -> None:
    """Raise UnsupportedModel for a call that changes a storage of the other phase, or an incoming
    gradient. kind: of the storage that it changes; own: kind of what calls of its phase make."""
    if kind is DataKind.TANGENT or kind is not own:
        raise UnsupportedModel.at(
            recorded.module,
            recorded.source,
            f"the backward of {recorded.call.op} modifies a tensor of the forward pass in place; "
            "return a new tensor from the backward instead",
        )


def _units(view: RunView, live: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return groups of calls that must run together, in execution order, each as positions of calls
    in program order. live: positions of needed calls, ascending; others are in no group. The calls
    that write one storage are one unit, with every call that reads an intermediate state of it, and
    with everything on a path from the unit back into it (a unit must be convex)."""
    is_live = set(live)
    union = networkx.utils.UnionFind(live)
    writers = {
        storage: [p for p in positions if p in is_live]
        for storage, positions in view.writers.items()
        if not view.kinds[storage].resident
    }
    for kept in writers.values():
        union.union(*kept[:1], *kept)
    dependencies: set[tuple[int, int]] = set()
    for position in live:
        for storage in view.storages(view.calls[position].reads):
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
    return _in_order(view, groups, dependencies)


def _in_order(
    view: RunView, groups: list[tuple[int, ...]], dependencies: set[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the groups in topological order, by their last call where there is a choice. Raises
    UnsupportedModel if there is none. Random draws and calls with side effects stay in program
    order, and so do calls that touch the same storage of the caller. dependencies: (position of a
    maker, position of a reader)."""
    group_of = {p: g for g, group in enumerate(groups) for p in group}
    edges = {(group_of[a], group_of[b]) for a, b in dependencies}
    sequences: dict[object, list[int]] = defaultdict(list)
    for position in sorted(group_of):
        recorded = view.calls[position]
        if not recorded.is_repeatable and recorded.effect is not Effect.WAITS:
            sequences["outside"].append(position)
        for storage in view.touched_outside(recorded):
            sequences[storage].append(position)
    for sequence in sequences.values():
        edges |= {(group_of[a], group_of[b]) for a, b in pairwise(sequence)}
    graph = networkx.DiGraph()
    graph.add_nodes_from(groups)
    graph.add_edges_from((groups[a], groups[b]) for a, b in edges if a != b)
    ordered: list[tuple[int, ...]] = []
    with contextlib.suppress(networkx.NetworkXUnfeasible):
        for group in networkx.lexicographical_topological_sort(graph, key=lambda g: g[-1]):
            ordered.append(group)
    if len(ordered) < len(groups):
        stuck = view.calls[min(group[0] for group in {*groups} - {*ordered})]
        raise UnsupportedModel.at(
            stuck.module,
            stuck.source,
            "in-place operations and random draws are interleaved in a way that a plan cannot "
            "separate; use the out-of-place operations there",
        )
    return tuple(ordered)
