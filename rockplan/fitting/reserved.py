"""Reserved: what PyTorch's caching allocator takes from a CUDA device for the steps of a plan.

takes: a Plan. returns: the plan, which says so. guarantees: a replay of three steps by the model of
the allocator (`fitting.allocator`), with segments that expand where the process asks for them.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from rockplan.fitting.allocator import Request, replay
from rockplan.fitting.gpus import gpu
from rockplan.fitting.scheduled import scheduled_changes
from rockplan.values.graph import CDGraph
from rockplan.values.plan import Plan

STEPS = 3
"""The first one finds no segments; the third one mostly takes none."""

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def with_reserved(plan: Plan) -> Plan:
    """With `reserved_bytes`, for a plan of a CUDA device: beyond parameters, buffers, inputs and
    the parameters' `.grad`, as `peak_bytes`."""
    device = _device(plan.graph)
    if device is None or plan.reserved_bytes is not None:
        return plan
    graph = plan.graph
    held = [
        *(d.size_bytes for d in graph.data if d.kind.resident),
        *(graph.data[index].size_bytes for index in graph.handed),
    ]
    cublas_bytes = gpu(device).cublas_bytes
    first = scheduled_changes(graph, plan.schedule, {}, cublas_bytes)
    later = scheduled_changes(graph, plan.schedule, {})
    requests = [Request(("held", number), size_bytes) for number, size_bytes in enumerate(held)]
    requests += (change.request for change in (*first, *later * (STEPS - 1)))
    usage = replay(requests, is_expandable())
    return replace(plan, reserved_bytes=usage.reserved_peak_bytes - sum(held))


def is_expandable() -> bool:
    """Whether segments of this process expand."""
    return any("expandable_segments:True" in os.environ.get(name, "") for name in SETTINGS)


def _device(graph: CDGraph) -> torch.device | None:
    """The CUDA device that a graph runs on."""
    names = {v.spec.device for v in graph.values if v.spec.device.startswith("cuda")}
    return torch.device(min(names)) if names and torch.cuda.is_available() else None
