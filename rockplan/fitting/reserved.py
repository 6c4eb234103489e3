"""Reserved: what PyTorch's caching allocator reserves on a CUDA device for the steps of a plan.

takes: a Plan; or storages that exist and the changes of steps. returns: the plan with that figure.
Allocates one block first, if that is worth it. guarantees: three steps are replayed by the model of
the allocator (`fitting.allocator`), with expandable segments if the process asks for them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace

import torch

from rockplan.errors import InvalidInput
from rockplan.fitting.changes import Changes, Holding, MemoryChange, peak_of, replayed_steps
from rockplan.fitting.gpus import gpu
from rockplan.fitting.scheduled import first_gradients, scheduled_changes
from rockplan.graph_builder.recorded.specs import needed_bytes
from rockplan.python_state.distributed import local_of
from rockplan.python_state.memory import inner_tensors, parts_of
from rockplan.runtime import captured
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.interface import Interface
from rockplan.values.plan import Plan

_LOGGER = logging.getLogger("rockplan")

WORTH = 0.02
"""Share of the reserved bytes that a first block must be predicted to save. Of twelve plans of full
size (benchmarks/results/reserve.md) five promise 10 % or more, and save 13 to 29 %; one promises
0.3 % and saves 0.6 %; six promise nothing, and five of these lose up to 4 %."""

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


def block_bytes(held: Iterable[int], changes: Iterable[MemoryChange]) -> int:
    """Return the bytes of a block to allocate and free before training, so that later blocks are
    split from it: the most that `changes` need at a time. 0 if that saves less than WORTH of what
    is reserved. held: bytes of each storage that exists before."""
    existing, requested = tuple(held), tuple(changes)
    plain = Changes(requested).usage(existing)
    needed_bytes = Changes(requested).usage((), expandable=True).allocated_peak_bytes
    block = MemoryChange("block", needed_bytes, Holding.CALLER)
    split = Changes((block, block.freed, *requested)).usage(existing)
    is_worth_it = split.reserved_peak_bytes < (1 - WORTH) * plain.reserved_peak_bytes
    return needed_bytes if is_worth_it else 0


def reserve(graph: CDGraph, held: Iterable[int], changes: Iterable[MemoryChange]) -> None:
    """Allocate and free a block of `block_bytes` on the graph's device, which PyTorch's allocator
    keeps. If there is nothing to gain, a warning says why."""
    device = device_of(graph)
    if device is None:
        why = "the module is not on a CUDA device"
    elif is_expandable():
        why = "segments of this process expand, which saves as much"
    elif not (size_bytes := block_bytes(held, changes)):
        why = f"it would save less than {WORTH:.0%} of what PyTorch's allocator reserves"
    elif not _allocates(device, size_bytes):
        why = f"{device} does not have the {size_bytes} bytes at once"
    else:
        return
    _LOGGER.warning("Options(reserve=True) takes nothing: %s", why)


def _allocates(device: torch.device, size_bytes: int) -> bool:
    """PyTorch's allocator keeps the block. Returns False if the device does not have the bytes."""
    try:
        torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    return True


def is_expandable() -> bool:
    """True if segments of this process expand."""
    return any("expandable_segments:True" in os.environ.get(name, "") for name in SETTINGS)


def device_of(graph: CDGraph) -> torch.device | None:
    """Return the CUDA device that a graph runs on, None if there is none."""
    names = {v.spec.device for v in graph.values if v.spec.device.startswith("cuda")}
    return torch.device(min(names)) if names and torch.cuda.is_available() else None
