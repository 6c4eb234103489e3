"""Scaled: times of a graph from those of a similar graph, without measuring them.

takes: a graph, a priced one, and which of their nodes do the same. returns: the graph with times of
the priced one, scaled by what the same operators read, write and compute in this one. guarantees:
good enough to rank schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rockplan.graph_builder.costs.estimate import estimated_ns
from rockplan.values.graph import CDGraph, ComputeNode

CALL_NS = 5_000
"""Least time of a call, in ns, on a machine of ordinary speed: below some size it is constant."""


def with_scaled_times(graph: CDGraph, known: CDGraph, alike: Mapping[int, int]) -> CDGraph:
    """Return `graph` with times that are estimates, scaled as measured times of `known` relate to
    its estimates. alike: index of a node of `graph` -> index of the same node in `known`; nodes
    without one are scaled as the sum of all."""
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
