"""Hooks of the caller on tensors, which run as soon as autograd gets a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch


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
    tables = [(table, dict(table)) for t in by_identity.values() for table in _tables(t)]
    try:
        for table, _ in tables:
            table.clear()
        yield
    finally:
        for table, hooks in tables:
            since = dict(table)
            table.clear()
            table.update({**hooks, **since})


_Table = dict[Any, Any]


def _tables(tensor: torch.Tensor) -> list[_Table]:
    both = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return [table for table in both if table]
