"""Memory: what tensors hold, kept while steps run that are not the caller's, and put back.

takes: tensors. guarantees: after `put_back` each has the very memory that it had, with its values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Content:
    """Of one tensor. memory: an alias of it, which a forward may replace (`tensor.data = ...`)."""

    tensor: torch.Tensor
    memory: torch.Tensor
    copy: torch.Tensor


def content_of(tensor: torch.Tensor) -> Content:
    return Content(tensor, tensor.detach(), tensor.detach().clone())


def is_copyable(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not (value.is_meta or value.is_nested)
    return is_tensor and value.layout is torch.strided


def put_back(contents: Iterable[Content]) -> None:
    with torch.no_grad():
        for content in contents:
            tensor, memory = content.tensor, content.memory
            if has_other_memory(tensor, memory):
                tensor.data = memory
            if not is_same_content(tensor, content.copy):
                tensor.copy_(content.copy)


def memory_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """By which tensors over the same memory are known; of a wrapper, those of what is inside."""
    if is_wrapper(tensor):
        flatten: Any = tensor
        inside = (getattr(tensor, name) for name in flatten.__tensor_flatten__()[0])
        return tuple(m for t in inside if isinstance(t, torch.Tensor) for m in memory_of(t))
    try:
        return (tensor.untyped_storage()._cdata,)
    except (RuntimeError, NotImplementedError):  # some layouts and transforms
        return ()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Is it of a class that keeps its elements in other tensors (DTensor)?"""
    return hasattr(tensor, "__tensor_flatten__")


def has_other_memory(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Was it given another one than `memory`? (What keeps others has none of its own.)"""
    if is_wrapper(tensor):
        return False
    return memory_of(tensor) != memory_of(memory) or tensor.shape != memory.shape


def is_same_content(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits up to the payload of NaNs."""
    return a is b or (a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()))
