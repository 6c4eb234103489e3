"""Hooks of the caller on tensors, which run as soon as autograd gets a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rockplan.runtime.watch import Watch


def has_hooks(tensor: torch.Tensor) -> bool:
    """True if there is a hook on the gradient of `tensor`. It may change the tensor: an optimizer
    that steps inside the backward pass does. (Hooks on autograd's own node are not seen; our own,
    `Watch`, change nothing and do not count.)"""
    if tensor._backward_hooks:
        return True
    hooks = tensor._post_accumulate_grad_hooks
    return bool(hooks) and any(type(hook) is not Watch for hook in hooks.values())


@contextlib.contextmanager
def hooks_aside(tensors: Iterable[object]) -> Iterator[None]:
    """While active, `tensors` have no hooks that `has_hooks` sees; afterwards the hooks are back,
    before those that were added meanwhile. Tables of hooks are emptied and filled again, so that
    handles stay valid."""
    by_identity = {id(t): t for t in tensors if isinstance(t, torch.Tensor)}
    tables = [
        (table, {key: hook for key, hook in table.items() if type(hook) is not Watch})
        for t in by_identity.values()
        for table in _tables(t)
    ]
    try:
        for table, hooks in tables:
            for key in hooks:
                del table[key]
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
