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
    """Keep contributions to one gradient alive as long as autograd needs them. Return the targets
    whose contributions are added to the first one as they are made; for other targets all
    contributions wait for the last."""
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
    """Keep the first contribution to a gradient alive until the last is made: autograd adds each of
    the others to it in place when it is handed over. Return False if they are not made in order."""
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
    """Keep all contributions to one gradient alive until the last is made: they are handed over
    together, so that autograd never holds one that the plan does not count."""
    makers = {made_by[d] for d in contributions if d in made_by}
    if not makers:
        return
    last = nodes[max(makers)]
    reads = {*last.reads, *contributions} - set(last.writes)
    nodes[last.index] = replace(last, reads=tuple(sorted(reads)))


def keep_what_acts(nodes: list[ComputeNode], values: Sequence[Value], interface: Interface) -> None:
    """Keep results of forward operators with side effects alive until the backward phase starts. If
    incoming gradients have other strides than planned, the rest of the forward runs again, but
    these operators must not. Nothing to do if backward starts from scalars only."""
    tangents = [o.tangent for o in interface.outputs if o.tangent is not None]
    if not any(values[t].spec.shape for t in tangents):
        return
    acting = (n for n in nodes if any(facts_of(c.op).effect for c in n.calls))
    made = {d for n in acting if n.phase is Phase.FORWARD for d in n.writes}
    first = next((n for n in nodes if n.phase is Phase.BACKWARD), None)
    if made and first is not None:
        nodes[first.index] = replace(first, reads=tuple(sorted({*first.reads, *made})))
