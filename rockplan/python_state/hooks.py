"""Hooks: hooks that PyTorch's own utilities leave on modules, and hooks of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
