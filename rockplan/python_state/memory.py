"""Memory: the storages of tensors, their values and their gradients, kept while steps run that are
not the caller's, and put back.

takes: tensors. guarantees: after `put_back` each has the very storage that it had, with its values,
and after `gradients_aside` the very gradient. Guards compare what a tensor answers of itself
(`answer_of`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rockplan.python_state.distributed import PLAIN, is_distributed, local_of, spec_of
from rockplan.values.interface import ABSENT


@dataclass(frozen=True, slots=True)
class Content:
    """The memory and values of one tensor. memory: an alias of the tensor, which keeps its storage
    even if a forward gives the tensor another one (`tensor.data = ...`); copy: the values."""

    tensor: torch.Tensor
    memory: torch.Tensor
    copy: torch.Tensor


def content_of(tensor: torch.Tensor) -> Content:
    return Content(tensor, tensor.detach(), tensor.detach().clone())


def is_copyable(value: Any) -> bool:
    """True for dense tensors with elements: neither meta nor nested nor sparse."""
    is_tensor = isinstance(value, torch.Tensor) and not (value.is_meta or value.is_nested)
    return is_tensor and value.layout is torch.strided


def put_back(contents: Iterable[Content]) -> None:
    """Give each tensor its storage and values back, where they differ."""
    with torch.no_grad():
        for content in contents:
            tensor, memory = content.tensor, content.memory
            if has_other_memory(tensor, memory):
                tensor.data = memory
            if not is_same_content(tensor, content.copy):
                local_of(tensor).copy_(local_of(content.copy))


def parts_of(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of tensors; in place of a wrapper those that it has its elements in
    ('proj.weight.scale'), which are what a plan reads, after itself where it gets a gradient."""
    for name, tensor in named:
        inner = inner_tensors(tensor)
        if not inner or is_trained_wrapper(tensor):
            yield name, tensor
        yield from parts_of((f"{name}.{n}", t) for n, t in inner.items())


def inner_tensors(tensor: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a wrapper has its elements in, by attribute; {} for others, for a
    DTensor, and for what gets a gradient and has no `__tensor_unflatten__`."""
    if type(tensor) in PLAIN or not is_wrapper(tensor):
        return {}
    is_put_together = tensor.is_leaf and hasattr(tensor, "__tensor_unflatten__")
    if tensor.is_nested or is_distributed(tensor) or (tensor.requires_grad > is_put_together):
        return {}
    names = tensor.__tensor_flatten__()[0]
    return {n: vars(tensor)[n] for n in names} if vars(tensor).keys() >= {*names} else {}


def is_trained_wrapper(tensor: torch.Tensor) -> bool:
    """True for a leaf that gets a gradient, and has its elements in other tensors."""
    return tensor.requires_grad and bool(inner_tensors(tensor))


def memory_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a key of the storage of a tensor: tensors that share memory have the same. Of a
    wrapper (DTensor) it has the keys of the tensors inside; it is () where there is no storage."""
    if is_wrapper(tensor):
        flatten: Any = tensor
        inside = (getattr(tensor, name) for name in flatten.__tensor_flatten__()[0])
        return tuple(m for t in inside if isinstance(t, torch.Tensor) for m in memory_of(t))
    try:
        return (tensor.untyped_storage()._cdata,)
    except (RuntimeError, NotImplementedError):  # some layouts and transforms
        return ()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """True for tensors whose class keeps the elements in other tensors (DTensor)."""
    return is_wrapper_kind(type(tensor))


@functools.cache
def is_wrapper_kind(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


def has_other_memory(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """True for another storage or shape. (A wrapper has no storage of its own.)"""
    if is_wrapper(tensor):
        return False
    return memory_of(tensor) != memory_of(memory) or tensor.shape != memory.shape


def is_same_content(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True for equal values; NaNs are equal whatever their payload. DTensors are compared by what
    is here, without any exchange, and by where they are placed."""
    inside = inner_tensors(a), inner_tensors(b)
    if any(inside):
        is_alike = inside[0].keys() == inside[1].keys()
        return is_alike and all(map(is_same_content, *(part.values() for part in inside)))
    if a is b:
        return True
    is_placed_alike = operator.eq(*(getattr(spec_of(t), "placements", None) for t in (a, b)))
    a, b = local_of(a), local_of(b)
    is_alike = is_placed_alike and a.shape == b.shape
    return is_alike and bool(((a == b) | ((a != a) & (b != b))).all())


@contextlib.contextmanager
def gradients_aside(tensors: Iterable[object]) -> Iterator[None]:
    """While active, `.grad` of the leaves among `tensors` is None; afterwards it is the former
    tensor. (Autograd would add to a gradient in place.)"""
    leaves = {id(t): t for t in tensors if isinstance(t, torch.Tensor) and t.is_leaf}
    before = [(t, t.grad) for t in leaves.values() if t.requires_grad or t.grad is not None]
    try:
        for leaf, _ in before:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


PLACE: Mapping[str, Callable[[torch.Tensor], object]] = {
    "storage_offset": torch.Tensor.storage_offset,
    "untyped_storage": lambda tensor: tensor.untyped_storage().nbytes(),
}
"""Method that says where in memory a tensor is -> what is compared of its answer. A question to a
view counts as one to its base, too."""


def answer_of(tensor: torch.Tensor, attribute: str) -> Any:
    """Return what `tensor` answers to that attribute or method, `ABSENT` if it has none."""
    ask = PLACE.get(attribute)
    return getattr(tensor, attribute, ABSENT) if ask is None else ask(tensor)
