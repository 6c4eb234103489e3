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

from rockplan.graph_builder.costs.call_key import call_keys
from rockplan.graph_builder.costs.estimate import estimated_ns, fallback_rates, roofline
from rockplan.graph_builder.costs.price import price, with_measured_memory
from rockplan.values.graph import CDGraph, ComputeNode
from rockplan.values.profile import Profile

CALL_NS = 5_000
"""Least time of a call, in ns, on a machine of ordinary speed: below some size it is constant."""


def scaled(
    graph: CDGraph, values: Mapping[int, torch.Tensor], known: CDGraph, alike: Mapping[int, int]
) -> tuple[CDGraph, Profile]:
    """Return (`graph` with sizes, workspaces and times, the profile they come from), without
    measuring times: these are estimates, scaled as measured times of `known`, a priced graph of
    another size, relate to its estimates. values: as for `measure`. alike: index of a node of
    `graph` -> index of the same node in `known`; nodes without one are scaled as the sum of all."""
    keys = call_keys(graph)
    profile = roofline(graph, fallback_rates(graph), keys)
    profile = with_measured_memory(graph, values, profile, keys)
    profile = replace(profile, source="sizes measured, times scaled")
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
