"""Hooks: those of modules that PyTorch's own functions leave, and those of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Where recurrent layers list their weights, computed ones among them.
_OF_RECURRENT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")


def computed_attributes(module: Any) -> frozenset[str]:
    """Attributes of an nn.Module that PyTorch's weight_norm, spectral_norm and pruning compute anew
    in a hook before each forward; what a forward leaves there is read by nobody."""
    hooks = module._forward_pre_hooks.values()
    ours = [vars(h) for h in hooks if type(h).__module__.startswith("torch.nn.utils.")]
    candidates = (attributes.get(name) for attributes in ours for name in ("name", "_tensor_name"))
    names = frozenset(name for name in candidates if isinstance(name, str))
    return names.union(_OF_RECURRENT_WEIGHTS) if names else names


_TRACKERS = ("torch.", "rockplan.")


def is_foreign(tracker: Any) -> bool:
    """Is a hook or a mode of others than PyTorch and us? Those follow what runs, and change
    nothing."""
    return not str(tracker.__module__).startswith(_TRACKERS)


def foreign_hooks(*registries: Mapping[int, Any]) -> tuple[Any, ...]:
    """Hooks on all modules of the process, without those by which PyTorch and we follow which
    module runs."""
    return tuple(
        filter(is_foreign, (hook for registry in registries for hook in registry.values()))
    )
