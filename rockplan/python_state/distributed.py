"""Distributed: tensors of several processes (DTensor), each a local tensor with a spec that says
how the local ones make the whole; and those that another process has not sent yet.

takes: tensors. guarantees: nothing is imported that is not in use.

What a DTensor is made of has no public name: `_local_tensor` and `_spec` are those of torch 2.11
to 2.15.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch

from rockplan.python_state import trees
from rockplan.values.interface import PlacedStrides, Strides

_TENSOR, _COLLECTIVES = "torch.distributed.tensor", "torch.distributed._functional_collectives"


@functools.cache
def is_distributed_kind(kind: Any) -> bool:
    """Is it a class of DTensors?"""
    distributed = getattr(sys.modules.get(_TENSOR), "DTensor", None)
    return distributed is not None and issubclass(kind, distributed)


def is_distributed(tensor: object) -> bool:
    """Is it a DTensor, of which this process has a part?"""
    kind: Any = type(tensor)
    return is_distributed_kind(kind)


def spec_of(tensor: Any) -> Any:
    """How the local tensors of all processes make a DTensor; None for other tensors."""
    return tensor._spec if is_distributed(tensor) else None


def local_of(tensor: Any) -> torch.Tensor:
    """The part of a DTensor that this process has, once it is there; other tensors themselves."""
    return waited(tensor._local_tensor) if is_distributed(tensor) else tensor


def strides_of(tensor: torch.Tensor) -> Strides:
    """How it lies in memory."""
    if not is_distributed(tensor):
        return tensor.stride()
    return PlacedStrides(local_of(tensor).stride(), spec_of(tensor))


def distributed(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """The DTensor of which `local` is the part of this process."""
    kind: Any = sys.modules[_TENSOR].DTensor
    made: torch.Tensor = kind(local, spec, requires_grad=False)
    return made


def is_awaited(value: object) -> bool:
    """Is it what a collective returns that has not ended?"""
    kind = getattr(sys.modules.get(_COLLECTIVES), "AsyncCollectiveTensor", None)
    return kind is not None and type(value) is kind


def waited(tensor: Any) -> torch.Tensor:
    """What a collective has given, once it has ended; other tensors themselves. No part of
    autograd's graph."""
    there: torch.Tensor = tensor.trigger_wait() if is_awaited(tensor) else tensor
    return there


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        return waited(tensor).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def waited_with_history(call: Any) -> Any:
    """(args, kwargs) of a call, in which all is there; gradients go back through what was waited
    for."""
    leaves, spec = trees.tree_flatten(call)
    if not any(map(is_awaited, leaves)):
        return call
    wait: Any = _Waited.apply
    return trees.tree_unflatten([wait(v) if is_awaited(v) else v for v in leaves], spec)


def local_shape(spec: Any) -> tuple[int, ...]:
    """Of the part that each process has, of equal parts."""
    return tuple(n // parts for n, parts in zip(spec.shape, _parts(spec), strict=True))


def _parts(spec: Any) -> list[int]:
    """Of each dimension, among how many processes it is divided."""
    sizes = [(p, spec.mesh.size(number)) for number, p in enumerate(spec.placements)]
    return [
        math.prod(size for placement, size in sizes if placement.is_shard(dimension))
        for dimension in range(len(spec.shape))
    ]


def why_not_shown(spec: Any) -> str:
    """What of DTensors with this spec is not planned; '' where all is."""
    kinds = {type(placement).__name__ for placement in spec.placements}
    if other := sorted(kinds - {"Shard", "Replicate", "Partial"}):
        return f"is placed by {', '.join(other)}"
    for dimension, (size, parts) in enumerate(zip(spec.shape, _parts(spec), strict=True)):
        if size % parts:
            return (
                f"has {size} elements in dimension {dimension}, of which {parts} processes have "
                "unequal parts"
            )
    return ""
