"""Gradients: those of tensors and of sharded modules set aside while steps run that are not the
caller's.

takes: tensors, or a module. guarantees: each has the very gradient that it had, with its values: a
step that ran inside has added nothing to it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def gradients_aside(tensors: Iterable[object]) -> Iterator[None]:
    """The leaves among `tensors` have no gradient on entry. (One that stayed would be added to in
    place.)"""
    leaves = {id(t): t for t in tensors if isinstance(t, torch.Tensor) and t.is_leaf}
    before = [(t, t.grad) for t in leaves.values() if t.requires_grad or t.grad is not None]
    try:
        for leaf, _ in before:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


@contextlib.contextmanager
def unsharded_gradients_aside(model: nn.Module) -> Iterator[None]:
    """The gradients of whole parameters that `fully_shard` keeps until it exchanges them
    (`set_requires_gradient_sync(False)`): no tensor that the model has is their owner."""
    groups = [*_groups(model)]
    before = [_kept(group) for group in groups]
    try:
        for group in groups:
            _put(group, {})
        yield
    finally:
        for group, kept in zip(groups, before, strict=True):
            _put(group, kept)


def _groups(model: nn.Module) -> Iterator[Any]:
    """Of parameters that are gathered together; PyTorch has one for a module, or several."""
    library = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(library, "FSDPModule", None)
    for module in () if kind is None else model.modules():
        if isinstance(module, kind):
            state = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            groups = [state._fsdp_param_group] if several is None else several
            yield from (group for group in groups if group is not None)


def _owners(group: Any) -> Iterator[tuple[Any, str]]:
    """Who keeps a gradient, and where. A whole parameter is there from the first gathering on."""
    yield group, "_partial_reduce_output"
    for parameter in group.fsdp_params:
        yield parameter, "unsharded_accumulated_grad"
        if hasattr(parameter, "_unsharded_param"):
            yield parameter._unsharded_param, "grad"


_Kept = dict[tuple[int, str], torch.Tensor | None]


def _kept(group: Any) -> _Kept:
    return {(id(owner), name): getattr(owner, name, None) for owner, name in _owners(group)}


def _put(group: Any, kept: _Kept) -> None:
    for owner, name in _owners(group):
        if hasattr(owner, name):
            setattr(owner, name, kept.get((id(owner), name)))
