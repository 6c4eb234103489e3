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
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from rockplan.python_state import trees
from rockplan.values.graph import MeshGroup
from rockplan.values.interface import PlacedStrides, Strides

_TENSOR, _COLLECTIVES = "torch.distributed.tensor", "torch.distributed._functional_collectives"

# Most are of these, and every call of a planned module asks it of all parameters.
PLAIN = (nn.Parameter, torch.Tensor)


def has_others() -> bool:
    """True if processes exchange data."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"


@functools.cache
def is_distributed_kind(kind: Any) -> bool:
    """True for a class of DTensors."""
    distributed = getattr(sys.modules.get(_TENSOR), "DTensor", None)
    return distributed is not None and issubclass(kind, distributed)


def is_distributed(tensor: object) -> bool:
    """True for a DTensor, of which this process holds a part."""
    kind: Any = type(tensor)
    return is_distributed_kind(kind)


def spec_of(tensor: Any) -> Any:
    """Return how the local tensors of all processes make a DTensor; None for other tensors."""
    return tensor._spec if is_distributed(tensor) else None


def local_of(tensor: Any) -> torch.Tensor:
    """The part that this process holds, once it has arrived; other tensors as they are."""
    return waited(tensor._local_tensor) if is_distributed(tensor) else tensor


def is_fake(tensor: Any) -> bool:
    """True for a tensor of a recording, and for a DTensor of such."""
    return isinstance(tensor._local_tensor if is_distributed(tensor) else tensor, FakeTensor)


def own_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements that this process holds."""
    return int(local_of(tensor).nbytes)


def strides_of(tensor: torch.Tensor) -> Strides:
    """Return how the elements of `tensor` lie in memory."""
    if type(tensor) in PLAIN or not is_distributed(tensor):
        return tensor.stride()
    return PlacedStrides(local_of(tensor).stride(), spec_of(tensor))


def distributed(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return the DTensor of which `local` is the part of this process."""
    kind: Any = sys.modules[_TENSOR].DTensor
    made: torch.Tensor = kind(local, spec, requires_grad=False)
    return made


def own_ways() -> tuple[frozenset[tuple[Any, int]], bool]:
    """Return what decides, beside specs, what DTensor makes of operators: ((operator, identity of
    its handler) for those that are handled otherwise now than by default, as under `loss_parallel`;
    whether other tensors count as replicated)."""
    kind = getattr(sys.modules.get(_TENSOR), "DTensor", None)
    dispatcher = getattr(kind, "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    modules = {op: str(getattr(how, "__module__", "")) for op, how in handlers.items()}
    other = {
        (op, id(handlers[op])) for op, m in modules.items() if not m.startswith(f"{_TENSOR}._")
    }
    return frozenset(other), getattr(dispatcher, "_allow_implicit_replication", False)


def is_awaited(value: object) -> bool:
    """True for what a collective returns before it has ended."""
    kind = getattr(sys.modules.get(_COLLECTIVES), "AsyncCollectiveTensor", None)
    return kind is not None and type(value) is kind


def waited(tensor: Any) -> torch.Tensor:
    """The result of a collective once it has ended; other tensors as they are."""
    there: torch.Tensor = tensor.trigger_wait() if is_awaited(tensor) else tensor
    return there


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        return waited(tensor).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def with_collectives_done(call: Any) -> Any:
    """Return `call`, (args, kwargs), in which the results of all collectives have arrived;
    gradients flow back to these."""
    leaves, spec = trees.tree_flatten(call)
    if not any(map(is_awaited, leaves)):
        return call
    wait: Any = _Waited.apply
    return trees.tree_unflatten([wait(v) if is_awaited(v) else v for v in leaves], spec)


def local_shape(spec: Any) -> tuple[int, ...]:
    """Return the shape of the part of each process, of equal parts."""
    return tuple(n // parts for n, parts in zip(spec.shape, _parts(spec), strict=True))


def _parts(spec: Any) -> list[int]:
    """Return for each dimension among how many processes it is divided."""
    sizes = [(p, spec.mesh.size(number)) for number, p in enumerate(spec.placements)]
    return [
        math.prod(size for placement, size in sizes if placement.is_shard(dimension))
        for dimension in range(len(spec.shape))
    ]


def why_not_shown(spec: Any) -> str:
    """Return why DTensors with this spec cannot be planned, for a message; '' if they can."""
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


class MeshGroups:
    """The processes that a collective exchanges data with, by dimensions of device meshes: equal
    in all processes of a mesh but for the name of the group."""

    def __init__(self) -> None:
        self._meshes: set[Any] = set()
        self._dimensions: dict[str, tuple[str, int]] = {}
        self._known: dict[str, MeshGroup] = {}
        self._count: Counter[tuple[str, int]] = Counter()

    def add(self, mesh: Any) -> None:
        """Note the process groups of the dimensions of `mesh`."""
        if mesh not in self._meshes:
            self._meshes.add(mesh)
            names = mesh.mesh_dim_names or map(str, range(mesh.ndim))
            for number, dimension in enumerate(names):
                name = mesh.get_group(number).group_name
                self._dimensions.setdefault(name, (dimension, mesh.size(number)))

    def named(self, argument: Any) -> Any:
        """Return what a plan has in place of `argument` of a collective: a MeshGroup for the name
        of a process group of a known mesh, else the argument itself."""
        if not isinstance(argument, str) or argument not in self._dimensions:
            return argument
        if argument not in self._known:
            dimension = self._dimensions[argument]
            self._known[argument] = MeshGroup(*dimension, self._count[dimension], argument)
            self._count[dimension] += 1
        return self._known[argument]
