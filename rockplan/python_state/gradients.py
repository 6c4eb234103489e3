"""Gradients: `.grad` of tensors, set aside while steps run that are not the caller's.

takes: tensors. guarantees: afterwards each has the very gradient that it had, with its values: the
step inside added nothing to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


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
