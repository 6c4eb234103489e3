"""Hooks of the caller on tensors, which run as soon as a gradient is handed to autograd."""

from __future__ import annotations

import torch


def has_hooks(tensor: torch.Tensor) -> bool:
    """Is there a hook on the gradient of `tensor`? It may change the tensor: an optimizer that
    steps inside the backward pass does. (Hooks on autograd's own node are not seen.)"""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)
