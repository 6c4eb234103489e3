"""Scaled: prices of a graph from those of a similar graph, without measuring times.

takes: a captured graph, a priced one, and which of their nodes do the same. returns: the graph with
its prices, and their profile. guarantees: bytes are those of the graph itself, as `measure` finds
them. Times are those of the priced graph, scaled by what the same operators read, write and compute
in this one: good enough to rank schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from rockplan.graph_builder.costs.call_costs import measure_memory
from rockplan.graph_builder.costs.call_key import (
    Keys,
    call_keys,
    calls_by_key,
    copies_storages,
    device_of,
)
from rockplan.graph_builder.costs.estimate import estimate, estimated_ns, fallback_rates
from rockplan.graph_builder.costs.execution import as_executed, inputs_of
from rockplan.graph_builder.costs.price import price, profile_of
from rockplan.graph_builder.operators import facts
from rockplan.values.graph import Call, CDGraph, ComputeNode, refs
from rockplan.values.profile import OpCost, Profile

CALL_NS = 5_000
"""Least time of a call, in ns, on a machine of ordinary speed: below some size it is constant."""


_OF_BLAS = {"torch.float32", "torch.float64"}

# Pointwise operators of several kernels, with intermediate results.
_IN_STEPS = (
    "aten.deg2rad.default",
    "aten.rad2deg.default",
    "aten.mvlgamma.default",
    "aten.ldexp.Tensor",
    "aten.native_dropout_backward.default",
)
_REAL = {*_OF_BLAS, "torch.bfloat16", "torch.float16"}

# Bytes of a number as a tensor, and of its copy in the dtype of the other operands.
_NUMBER_BYTES = 24


def scaled(
    graph: CDGraph, values: Mapping[int, torch.Tensor], known: CDGraph, alike: Mapping[int, int]
) -> tuple[CDGraph, Profile]:
    """Return (`graph` with sizes, workspaces and times, the profile they come from), without
    measuring times: these are estimates, scaled as measured times of `known`, a priced graph of
    another size, relate to its estimates. values: as for `measure`. alike: index of a node of
    `graph` -> index of the same node in `known`; nodes without one are scaled as the sum of all."""
    keys = call_keys(graph)
    profile = sized(graph, values, keys)
    return with_scaled_times(price(graph, profile, keys), known, alike), profile


def with_scaled_times(graph: CDGraph, known: CDGraph, alike: Mapping[int, int]) -> CDGraph:
    """Return `graph` with times as `scaled` finds them."""
    estimates_ns = [*map(_with_calls, known.nodes, estimated_ns(known))]
    usual_rate = known.time_ns / max(sum(estimates_ns), 1)
    nodes = []
    for node, now_ns in zip(graph.nodes, estimated_ns(graph), strict=True):
        same = alike.get(node.index)
        rate = usual_rate if same is None else known.nodes[same].time_ns / estimates_ns[same]
        nodes.append(replace(node, time_ns=round(rate * _with_calls(node, now_ns))))
    return replace(graph, nodes=tuple(nodes))


def _with_calls(node: ComputeNode, estimated_ns: int) -> int:
    return max(CALL_NS * len(node.calls), 1) + estimated_ns


def sized(
    graph: CDGraph, values: Mapping[int, torch.Tensor], keys: Keys, is_once: bool = False
) -> Profile:
    """Return costs with measured bytes, as `measure` finds them, and no times. A call runs only if
    its bytes do not follow from the specs of its arguments. values: as for `measure`; keys:
    those of the calls of `graph`; is_once: as for `measure_memory`."""
    calls = {key: call for key, (call, *_) in calls_by_key(graph, keys).items()}
    plain = {key: plain_workspace_bytes(graph, call) for key, call in calls.items()}
    waiting = {key: call for key, call in calls.items() if plain[key] is None}
    with as_executed(graph):
        memory = measure_memory(inputs_of(graph, values), waiting, is_once)
    costs = {k: OpCost(0, 0, m.workspace_bytes, m.result_bytes, 0) for k, m in memory.items()}
    rates = fallback_rates(graph)
    for key in calls.keys() - memory.keys():
        cost = estimate(graph, calls[key], rates)
        costs[key] = replace(cost, workspace_bytes=plain[key] or 0)
    return replace(profile_of("", device_of(graph), costs), source="sizes measured, times scaled")


def plain_workspace_bytes(graph: CDGraph, call: Call) -> int | None:
    """Return the workspace in bytes of a CPU call for which it follows from specs: an elementwise
    operator or a matrix product whose results hold just their elements. None for all other calls.
    Operands of another dtype than the rest, complex ones, or ones negated when read are converted
    or copied first, and so are those of products in a layout that BLAS does not take."""
    operands = [graph.values[ref.index].spec for ref in refs(call)]
    made = [graph.values[v].spec for v in call.made]
    dtypes = {spec.dtype for spec in (*operands, *made)}
    if {spec.device for spec in operands} != {"cpu"} or len(dtypes) != 1:
        return None
    if not dtypes <= _REAL or any(spec.is_neg for spec in operands):
        return None
    operator = facts.resolve(call.op)
    if operator._schema.is_mutable or copies_storages(graph, call):
        return None
    if call.op in facts.PRODUCTS:
        # BLAS takes rows, or columns, that lie side by side without overlap.
        for spec in operands[-2:]:
            (rows, columns), (down, across) = spec.shape[-2:], spec.stride[-2:]
            is_by_rows = across == 1 and down >= max(1, columns)
            is_by_columns = down == 1 and across >= max(1, rows)
            if 0 in spec.stride or not (is_by_rows or is_by_columns):
                return None
        return 0 if dtypes <= _OF_BLAS else None
    if torch.Tag.pointwise not in operator.tags or call.op in _IN_STEPS:
        return None
    return _NUMBER_BYTES * sum(isinstance(a, int | float | complex) for a in call.args)
