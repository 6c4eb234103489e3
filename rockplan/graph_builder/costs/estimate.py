"""Estimates: cost of calls from their specs, without execution.

takes: a CDGraph, Rates of a machine. returns: OpCost of a call (`estimate`), a Profile
(`roofline`); estimated costs have `repeats` 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from rockplan.graph_builder.costs.call_key import Keys, call_keys, device_of
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.rows import Effect
from rockplan.graph_builder.recorded.evaluate import substitute
from rockplan.graph_builder.recorded.specs import distinct_bytes, needed_bytes
from rockplan.values.graph import Call, CDGraph, ComputeNode, refs
from rockplan.values.profile import OpCost, Profile


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes read and written, and floating-point operations, a second."""

    bytes_per_s: float
    flops_per_s: float

    def ns(self, call: Call, dtype: str, flops: int, moved_bytes: float) -> float:
        """The larger of what its bytes and its operations take. dtype: of its first operand."""
        return 1e9 * max(moved_bytes / self.bytes_per_s, flops / self.flops_per_s)

    def __str__(self) -> str:
        return f"{self.bytes_per_s:g} B/s, {self.flops_per_s:g} flop/s"


# For an operator that cannot be run: one ordinary core, or accelerator.
CPU_RATES = Rates(10e9, 50e9)
CUDA_RATES = Rates(1e12, 50e12)

# Bandwidth between processes as a share of that of memory.
_LINK_SHARE = 0.1


def roofline(graph: CDGraph, rates: Rates, keys: Keys | None = None) -> Profile:
    """Return the profile of `graph` on a machine with these rates, without running anything and
    without workspaces. keys: of the calls of `graph`, None to compute them."""
    costs: dict[str, OpCost] = {}
    for node, own_keys in zip(graph.nodes, keys or call_keys(graph), strict=True):
        for call, key in zip(node.calls, own_keys, strict=True):
            cost = estimate(graph, call, rates)
            # Calls of one key can name different results, and only named ones have a size.
            known = costs.get(key, cost)
            sizes = tuple(map(max, known.result_bytes, cost.result_bytes))
            time_ns = max(known.time_ns, cost.time_ns)
            costs[key] = replace(known, time_ns=time_ns, result_bytes=sizes)
    return Profile(
        source="roofline",
        device=str(rates),
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        costs=tuple(sorted(costs.items())),
    )


def fallback_rates(graph: CDGraph) -> Rates:
    return CUDA_RATES if torch.device(device_of(graph)).type == "cuda" else CPU_RATES


def estimate(graph: CDGraph, call: Call, rates: Rates) -> OpCost:
    """Return the cost of a call from the specs of its arguments and results: time in ns by the
    rates, no workspace, for each result the bytes of its storage; 0 for results that are unnamed or
    in a storage counted before. Its `repeats` is 0, which marks an estimate."""
    seen = {graph.values[ref.index].data for ref in refs(call)}
    sizes: list[int] = []
    for value in call.results:
        if value is None or graph.values[value].data in seen:
            sizes.append(0)
            continue
        seen.add(graph.values[value].data)
        spec = graph.values[value].spec
        sizes.append(needed_bytes(spec))
    return OpCost(_estimated_ns(graph, call, rates), 0, 0, tuple(sizes), 0)


def estimated_ns(graph: CDGraph) -> tuple[int, ...]:
    """Return the time in ns of each node on an ordinary machine, from specs of its calls."""
    rates = fallback_rates(graph)
    return tuple(sum(_estimated_ns(graph, c, rates) for c in n.calls) for n in graph.nodes)


def _estimated_ns(graph: CDGraph, call: Call, rates: Rates) -> int:
    specs = [
        graph.values[v].spec for v in dict.fromkeys((*(r.index for r in refs(call)), *call.made))
    ]
    moved: float = sum(map(distinct_bytes, specs))
    if facts.facts_of(call.op).effect is Effect.COMMUNICATES:
        moved /= _LINK_SHARE
    return round(rates.ns(call, specs[0].dtype if specs else "", flops_of(graph, call), moved))


def flops_of(graph: CDGraph, call: Call) -> int:
    """Return the number of floating-point operations of a call by PyTorch's own formulas
    (torch.utils.flop_counter); 0 for operators without one."""
    known = facts.facts_of(call.op)
    like = f"{known.flops_like}.default" if known.flops_like else call.op
    formula = flop_registry.get(facts.resolve(like).overloadpacket)
    if formula is None:
        return 0

    def shape(index: int) -> Any:
        return torch.Size(graph.values[index].spec.shape)

    results = [None if v is None else shape(v) for v in call.results]
    arguments = [substitute(a, shape) for a in call.args]
    return int(
        formula(
            *(_with_equal_heads(arguments) if known.repeats_heads else arguments),
            **{name: substitute(a, shape) for name, a in call.kwargs},
            out_val=results[0] if len(results) == 1 else results,
        )
    )


def _with_equal_heads(arguments: Sequence[Any]) -> list[Any]:
    """Shapes (batch, heads, length, size) with as many heads as the largest: kernels repeat those
    of keys and values, and the formulas of torch 2.11 accept no others."""

    def is_tensor(argument: object) -> bool:
        return isinstance(argument, torch.Size) and len(argument) == 4

    heads = max((a[1] for a in arguments if is_tensor(a)), default=0)
    return [torch.Size((a[0], heads, *a[2:])) if is_tensor(a) else a for a in arguments]


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
