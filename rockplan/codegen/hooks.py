"""Hooks of the caller on tensors, which run as soon as a gradient is handed to autograd."""

from __future__ import annotations

import torch

from rockplan.codegen.watch import Watch


def has_hooks(tensor: torch.Tensor) -> bool:
    """Is there a hook on the gradient of `tensor`? It may change the tensor: an optimizer that
    steps inside the backward pass does. (Hooks on autograd's own node are not seen; those by which
    we see gradients arrive change nothing.)"""
    if tensor._backward_hooks:
        return True
    hooks = tensor._post_accumulate_grad_hooks
    return bool(hooks) and any(type(hook) is not Watch for hook in hooks.values())
