"""Reserved: what PyTorch's caching allocator reserves on a CUDA device for the steps of a plan.

takes: a Plan. returns: the plan with that figure. guarantees: three steps are replayed by the model
of the allocator (`fitting.allocator`), with expandable segments if the process asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

import torch

from rockplan.errors import InvalidInput
from rockplan.fitting.changes import Changes, peak_of, replayed_steps
from rockplan.fitting.gpus import gpu
from rockplan.fitting.scheduled import first_gradients, scheduled_changes
from rockplan.graph_builder.recorded.specs import needed_bytes
from rockplan.python_state.distributed import local_of
from rockplan.python_state.memory import inner_tensors, parts_of
from rockplan.runtime import captured
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.interface import Interface
from rockplan.values.plan import Plan

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def with_reserved(plan: Plan) -> Plan:
    """Return the plan with `reserved_bytes`, what PyTorch's allocator reserves beyond parameters,
    buffers, inputs and the parameters' `.grad`; unchanged if it has them or is not for CUDA."""
    device = device_of(plan.graph)
    if device is None or plan.reserved_bytes is not None:
        return plan
    graph = plan.graph
    held = [
        *(d.size_bytes for d in graph.data if d.kind.resident),
        *(graph.data[index].size_bytes for index in graph.handed),
    ]
    first = scheduled_changes(graph, plan.schedule, {}, gpu(device).cublas_bytes)
    later = scheduled_changes(graph, plan.schedule, {})
    found = Changes(replayed_steps(first, later)).usage(held, expandable=is_expandable())
    return replace(plan, reserved_bytes=found.reserved_peak_bytes - sum(held))


def with_pool(plan: Plan, interface: Interface) -> Plan:
    """Return the plan with `pool_bytes`, what the CUDA graphs of a call hold at most: gradients as
    they come, which the next forward writes over, and memory for arguments and incoming gradients
    beside. Raises InvalidInput where no call of the plan can be replayed."""
    if why := captured.why_not(plan, interface):
        raise InvalidInput(f"Options(graph=True) is not for this plan: {why}. Leave out graph")
    graph, values = plan.graph, plan.graph.values
    given = [v for _, v in interface.inputs]
    given += [o.tangent for o in interface.outputs if o.tangent is not None]
    beside_bytes = sum(needed_bytes(values[v].spec) for v in given)
    incoming = (replace(d, size_bytes=0) if d.kind is DataKind.TANGENT else d for d in graph.data)
    graph = replace(graph, data=tuple(incoming))
    changes = scheduled_changes(graph, plan.schedule, first_gradients(graph, interface))
    return replace(plan, pool_bytes=peak_of(changes).size_bytes + beside_bytes)


def storage_sizes(leaves: Iterable[object]) -> tuple[int, ...]:
    """Return the bytes of the storages of tensors, each once; of DTensors of what is here."""
    named = parts_of(("", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    tensors = [local_of(tensor) for _, tensor in named if not inner_tensors(tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return tuple(storages.values())


def is_expandable() -> bool:
    """True if segments of this process expand."""
    return any("expandable_segments:True" in os.environ.get(name, "") for name in SETTINGS)


def device_of(graph: CDGraph) -> torch.device | None:
    """Return the CUDA device that a graph runs on, None if there is none."""
    names = {v.spec.device for v in graph.values if v.spec.device.startswith("cuda")}
    return torch.device(min(names)) if names and torch.cuda.is_available() else None
