"""Sharding: what `fully_shard` (FSDP2) has made of a model, and the gradients that it keeps.

takes: a module. guarantees: a library that is not in use is not imported; without FSDP2 the answers
are empty.

PyTorch has no public name for the gradients that a group of parameters keeps, nor for whether it
exchanges them: the names here are those of torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rockplan.python_state.distributed import is_distributed


def sharded_modules(module: nn.Module) -> list[Any]:
    """List the submodules that `fully_shard` was called with, `module` included."""
    library = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(library, "FSDPModule", None)
    return [] if kind is None else [m for m in module.modules() if isinstance(m, kind)]


def is_sharded(module: nn.Module) -> bool:
    """True if `fully_shard` was called with `module`, a part of it, or a module around it."""
    return getattr(module, "_is_fsdp_managed_module", False) or bool(sharded_modules(module))


def shards(module: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that are shards now, which a forward gathers first."""
    whole = {
        id(getattr(p, "_unsharded_param", None)) for g in _groups(module) for p in g.fsdp_params
    }
    for path, part in module.named_modules():
        if getattr(part, "_is_fsdp_managed_module", False):
            for name, parameter in part.named_parameters(path, recurse=False):
                if is_distributed(parameter) and id(parameter) not in whole:
                    yield name


def reshard(model: nn.Module) -> None:
    """Divide the parameters of `model` that a forward, or an evaluation, has left gathered: a model
    lists them, and their gradients, only while they are divided."""
    for module in sharded_modules(model):
        module.reshard()


@contextlib.contextmanager
def gathered(block: nn.Module) -> Iterator[None]:
    """While active, the parameters of `block` are gathered, as its forward sees them; afterwards
    sharded again. Every process must enter it."""
    for module in sharded_modules(block):
        module.unshard()
    try:
        yield
    finally:
        reshard(block)


def waits_for_exchange(model: nn.Module) -> bool:
    """True if backward passes keep whole gradients (`set_requires_gradient_sync(False)`)."""
    return not all(getattr(group, flag) for group in _groups(model) for flag in _EXCHANGES)


_EXCHANGES = ("reduce_grads", "all_reduce_grads")


@contextlib.contextmanager
def with_exchange(model: nn.Module) -> Iterator[None]:
    """While active, backward passes exchange gradients, whatever the user has set."""
    flags = [(group, flag) for group in _groups(model) for flag in _EXCHANGES]
    before = [getattr(group, flag) for group, flag in flags]
    for group, flag in flags:
        setattr(group, flag, True)
    try:
        yield
    finally:
        for (group, flag), value in zip(flags, before, strict=True):
            setattr(group, flag, value)


def waiting_bytes(model: nn.Module) -> int:
    """Return the bytes of the whole gradients that are kept now."""
    kept = (gradient for group in _groups(model) for gradient in _kept(group).values())
    return sum(gradient.nbytes for gradient in kept if gradient is not None)


@contextlib.contextmanager
def unsharded_gradients_aside(model: nn.Module) -> Iterator[None]:
    """While active, FSDP keeps no whole gradients of `model`; afterwards the former ones. (They
    wait to be exchanged, and belong to no tensor that the model lists.)"""
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
    """Yield each FSDPParamGroup; PyTorch has one or several for a module."""
    for module in sharded_modules(model):
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)
        groups = [state._fsdp_param_group] if several is None else several
        yield from (group for group in groups if group is not None)


def _owners(group: Any) -> Iterator[tuple[Any, str]]:
    """Yield (owner, name of the attribute) of each gradient that a group may keep. A whole
    parameter exists from the first gathering on."""
    yield group, "_partial_reduce_output"
    for parameter in group.fsdp_params:
        yield parameter, "unsharded_accumulated_grad"
        if hasattr(parameter, "_unsharded_param"):
            yield parameter._unsharded_param, "grad"


_Kept = dict[tuple[int, str], torch.Tensor | None]


def _kept(group: Any) -> _Kept:
    return {(id(owner), name): getattr(owner, name, None) for owner, name in _owners(group)}


def _put(group: Any, kept: _Kept) -> None:
    """Set the gradients that a group keeps; those not in `kept` become None."""
    for owner, name in _owners(group):
        if hasattr(owner, name):
            setattr(owner, name, kept.get((id(owner), name)))
