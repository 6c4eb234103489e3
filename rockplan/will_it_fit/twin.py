"""Twin: a copy of a model on the meta device, in CPU memory that is never touched.

takes: a module, arguments. returns: a copy on CPU if it has anything on the meta device (or on a
device that is full), else the module itself. guarantees: no memory of the sizes of its parameters
is used: it is allocated, but the system supplies pages only when they are written, and nothing
writes to them.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rockplan.errors import InvalidInput
from rockplan.python_state import trees


def twin_of(model: nn.Module, device: str = "meta") -> nn.Module:
    """Return the model itself, or, if some of it is on a device of this type, a copy on the CPU
    that can be captured: parameters without content, of their classes, zeros for all other tensors.
    Raises InvalidInput if the system allocates no memory beyond what it has."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    if device == "cpu" or not any(t.device.type == device for t in tensors):
        return model
    memo: dict[int, Any] = {}
    with _OnCPU(device):
        for parameter in model.parameters():
            made = torch.Tensor._make_subclass(
                type(parameter), _unfilled(parameter), parameter.requires_grad
            )
            memo[id(parameter)] = made
            # What a class hangs on its parameters, such as scales of quantized weights.
            vars(made).update(copy.deepcopy(vars(parameter), memo))
        return copy.deepcopy(model, memo)


class _OnCPU(TorchFunctionMode):
    """Tensors on a device of this type are copied to zeros on the CPU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.__deepcopy__ and args[0].device.type == self.device:
            tensor, memo = args
            memo[id(tensor)] = torch.zeros_like(tensor, device="cpu")
            return memo[id(tensor)]
        return function(*args, **kwargs or {})


def _unfilled(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    except RuntimeError as error:
        raise InvalidInput(
            f"nothing can stand for a parameter of {tensor.nbytes} bytes on the meta device: "
            f"{str(error).splitlines()[0]}"
        ) from error


def with_values(tree: Any) -> Any:
    """Return nested arguments with zeros on the CPU in place of tensors on the meta device."""

    def real(leaf: Any) -> Any:
        is_meta = isinstance(leaf, torch.Tensor) and leaf.is_meta
        return torch.zeros_like(leaf, device="cpu") if is_meta else leaf

    leaves, spec = trees.tree_flatten(tree)
    return trees.tree_unflatten([*map(real, leaves)], spec)
