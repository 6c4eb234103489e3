"""Hooks: those that PyTorch's own utilities leave on modules, hooks of others, and the caller's on
tensors, which run as soon as autograd gets a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

# Attributes in which recurrent layers list their weights, computed ones among them.
_OF_RECURRENT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")


def computed_attributes(module: Any) -> frozenset[str]:
    """Return the attributes of an nn.Module that a hook of PyTorch's weight_norm, spectral_norm or
    pruning computes anew before each forward. Nobody reads what a forward leaves there."""
    hooks = module._forward_pre_hooks.values()
    hook_attributes = [vars(h) for h in hooks if type(h).__module__.startswith("torch.nn.utils.")]
    candidates = (
        attributes.get(name) for attributes in hook_attributes for name in ("name", "_tensor_name")
    )
    names = frozenset(name for name in candidates if isinstance(name, str))
    return names.union(_OF_RECURRENT_WEIGHTS) if names else names


_TRACKERS = ("torch.", "rockplan.")


def is_foreign(tracker: Any) -> bool:
    """True for a hook or mode that is neither PyTorch's nor ours (these only observe what runs)."""
    return not str(tracker.__module__).startswith(_TRACKERS)


def foreign_hooks(*registries: Mapping[int, Any]) -> tuple[Any, ...]:
    """Return the foreign hooks in registries of hooks on all modules of the process."""
    return tuple(
        filter(is_foreign, (hook for registry in registries for hook in registry.values()))
    )


def has_hooks(tensor: torch.Tensor) -> bool:
    """True if there is a hook on the gradient of `tensor`. It may change the tensor: an optimizer
    that steps inside the backward pass does. (Hooks on autograd's own node are not seen.)"""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


@contextlib.contextmanager
def hooks_aside(tensors: Iterable[object]) -> Iterator[None]:
    """While active, `tensors` have no hooks that `has_hooks` sees; afterwards the hooks are back,
    before those that were added meanwhile. Tables of hooks are emptied and filled again, so that
    handles stay valid."""
    by_identity = {id(t): t for t in tensors if isinstance(t, torch.Tensor)}
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    both = [getattr(t, name) for t in by_identity.values() for name in names]
    tables = [(table, dict(table)) for table in both if table]
    try:
        for table, _ in tables:
            table.clear()
        yield
    finally:
        for table, hooks in tables:
            since = dict(table)
            table.clear()
            table.update({**hooks, **since})
