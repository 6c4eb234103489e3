"""Assignments: what a planned call leaves in Python beside tensors, as the forward would.

takes: what the captured forward left, by address. guarantees: after a planned call it is there.
What every call overwrites, and none reads (the length of the last batch), is taken back before a
call is matched with what was planned, so that it makes no other kind of call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from rockplan.python_state.contents import copied, is_same
from rockplan.python_state.holders import Holder, write_all
from rockplan.values.interface import ABSENT, Address, Assignment


def put(module: nn.Module, assignments: Iterable[Assignment]) -> None:
    """Leave what a call leaves."""
    for one in assignments:
        _set(module, one.address, one.value)


def take_back(module: nn.Module, assignments: Iterable[Assignment]) -> None:
    """Where there is what one of `assignments` has left, leave what was there before."""
    for one in assignments:
        if one.is_overwritten and is_same(_get(module, one.address), one.value):
            _set(module, one.address, one.before)


@contextlib.contextmanager
def taken_back(module: nn.Module, assignments: Iterable[Assignment]) -> Iterator[None]:
    """Inside, the module is as calls find it; on exit, as it was."""
    several = [one for one in assignments if one.is_overwritten]
    there = [(one.address, _get(module, one.address)) for one in several]
    take_back(module, several)
    try:
        yield
    finally:
        for address, value in there:
            if not is_same(_get(module, address), value):
                _set(module, address, value)


def _owner(module: nn.Module, address: Address) -> Any:
    kind, root, steps = address
    owner: Any = root
    if kind == "module":
        owner = module.get_submodule(root)
    elif kind == "file":
        owner = sys.modules[root]
    elif kind == "holder":
        owner = root if steps[0][0] == "element" else root.owner
    for step, key in steps[:-1]:
        owner = getattr(owner, key) if step == "attribute" else owner[key]
    return owner


# Of a class or an object of Python's that is no longer what it was.
_GONE = (AttributeError, KeyError, IndexError, TypeError)


def _get(module: nn.Module, address: Address) -> Any:
    step, key = address[2][-1]
    try:
        owner = _owner(module, address)
        if step == "all":
            return tuple(owner)
        if isinstance(owner, Holder):
            return owner.get(key, ABSENT)
        if isinstance(owner, nn.Module):
            return owner.__dict__.get(key, ABSENT)
        return getattr(owner, key, ABSENT) if step == "attribute" else owner[key]
    except _GONE:
        return ABSENT


def _set(module: nn.Module, address: Address, value: object) -> None:
    step, key = address[2][-1]
    try:
        owner = _owner(module, address)
    except _GONE:
        return
    if step == "all":
        write_all(owner, [copied(v) for v in value])  # type: ignore[attr-defined]
        return
    if isinstance(owner, Holder):
        if value is ABSENT:
            owner.pop(key)
        else:
            owner.set({key: copied(value)})
        return
    items = owner.__dict__ if isinstance(owner, nn.Module) else owner
    is_item = step == "item" or items is not owner
    if value is ABSENT:
        if is_item:
            items.pop(key, None)
        elif hasattr(owner, key):
            delattr(owner, key)
    elif is_item:
        items[key] = copied(value)
    else:
        setattr(owner, key, copied(value))
