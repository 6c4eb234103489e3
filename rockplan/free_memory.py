"""Available: the budget 'auto' -> the bytes that a step may use on the CUDA device of a module.

takes: a Budget, the module that is planned. returns: a Budget that is not 'auto'. guarantees: what
is allocated already (parameters, buffers, optimizer state, other models and processes) is left
alone, and there is room for the parameters' gradients that do not exist yet. What only a later
step allocates is not known: make the optimizer's state first, or leave room ('auto-4GB').
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from rockplan.budget import Budget
from rockplan.errors import InvalidBudget

MARGIN = 0.1
"""Share of what is free that stays free, for fragmentation of the caching allocator and for what
libraries (cuBLAS, cuDNN, NCCL) allocate beside it at their first use."""

_BLOCK_BYTES = 512
"""The caching allocator rounds every request up to this."""


def in_bytes(budget: Budget, model: nn.Module) -> Budget:
    """`budget`, where it is 'auto' in bytes: what is free on the device now and what the caching
    allocator holds unused, less MARGIN of it, gradients that do not exist yet, and the bytes that
    the budget leaves free.

    Raises InvalidBudget where the model is not on one CUDA device, and where nothing is left.
    """
    if not budget.is_auto:
        return budget
    device = _cuda_device(model)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    usable_bytes = int((free_bytes + unused_bytes) * (1 - MARGIN))
    gradients_bytes = _missing_gradients_bytes(model)
    left_bytes = usable_bytes - gradients_bytes - budget.reserve_bytes
    if left_bytes <= 0:
        raise InvalidBudget(
            f"budget 'auto': {device} has {free_bytes + unused_bytes} bytes free, of which "
            f"{usable_bytes} are used at most; gradients that do not exist yet need "
            f"{gradients_bytes}, and {budget.reserve_bytes} shall be left: nothing remains for "
            "activations. Free memory on the device, or plan a smaller model"
        )
    return replace(budget, is_auto=False, reserve_bytes=0, size_bytes=left_bytes)


def _cuda_device(model: nn.Module) -> torch.device:
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        names = ", ".join(sorted(map(str, devices))) or "no device"
        raise InvalidBudget(
            f"budget 'auto' needs a model on one CUDA device, whose free memory is known; this one "
            f"is on {names}. Write bytes, '2GB', a share such as '40%', or 'min'"
        )
    return devices.pop()


def _missing_gradients_bytes(model: nn.Module) -> int:
    missing = (p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)
    return sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in missing)
