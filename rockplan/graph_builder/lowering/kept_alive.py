"""Kept alive: reads added to nodes that do not compute with them, so that storages stay alive until
these nodes run.

takes: the nodes of a graph that is being assembled; they are replaced in place. guarantees:
autograd, and a backward pass in other strides than planned, find what they need, and schedules
count its memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rockplan.graph_builder.lowering.reinplace import is_dense
from rockplan.graph_builder.operators.facts import facts_of
from rockplan.graph_builder.recorded.gradient_sums import Gradients
from rockplan.values.graph import ComputeNode, Phase, Value
from rockplan.values.interface import Interface


def summed_in_place(
    nodes: list[ComputeNode], values: Sequence[Value], gradients: Gradients
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
        dense = is_ours and is_dense(values[parts[0]].spec)
        if dense and _sum_into_first(nodes, made_by, data):
            summed.append(target)
        else:
            _keep_until_last(nodes, made_by, data)
    return frozenset(summed)


def _sum_into_first(
    nodes: list[ComputeNode], made_by: dict[int, int], contributions: Sequence[int]
) -> bool:
    """Let the makers of later contributions to a gradient read the first one, which stays alive so:
    autograd adds each to it in place when it is handed over. Changes `nodes`; returns False, and
    changes nothing, if contributions are not made in order. made_by: storage -> node that makes it;
    contributions: storages."""
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
    """Let the maker of the last contribution to a gradient read the others, so that they stay
    alive: all are handed over together, and autograd never holds one that the plan does not count.
    Changes `nodes`. made_by: storage -> node that makes it; contributions: storages."""
    makers = {made_by[d] for d in contributions if d in made_by}
    if not makers:
        return
    last = nodes[max(makers)]
    reads = {*last.reads, *contributions} - set(last.writes)
    nodes[last.index] = replace(last, reads=tuple(sorted(reads)))


def keep_what_acts(nodes: list[ComputeNode], values: Sequence[Value], interface: Interface) -> None:
    """Let the first backward node read the results of forward operators that must not run again,
    for their side effects, so that they stay alive until it; `nodes` is changed. If incoming
    gradients have other strides than planned, the rest of the forward runs again. Nothing to do if
    backward starts from scalars only."""
    tangents = [o.tangent for o in interface.outputs if o.tangent is not None]
    if not any(values[t].spec.shape for t in tangents):
        return
    once = (n for n in nodes if not n.recomputable)
    acting = (n for n in once if any(facts_of(c.op).effect for c in n.calls))
    made = {d for n in acting if n.phase is Phase.FORWARD for d in n.writes}
    first = next((n for n in nodes if n.phase is Phase.BACKWARD), None)
    if made and first is not None:
        nodes[first.index] = replace(first, reads=tuple(sorted({*first.reads, *made})))
