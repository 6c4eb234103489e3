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
from rockplan.python_state.holders import Holder, holder_at
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


def _slot(module: nn.Module, address: Address) -> tuple[Holder, Any] | None:
    """What holds an element, and its key; None where nothing leads there any more."""
    kind, root, steps = address
    step, key = steps[-1]
    try:
        owner: Any = root
        if kind == "module":
            owner = module.get_submodule(root)
        elif kind == "file":
            owner = sys.modules[root]
        for inner, name in steps[:-1]:
            owner = getattr(owner, name) if inner == "attribute" else owner[name]
        return (owner if kind == "holder" else holder_at(owner, step, key)), key
    except (AttributeError, LookupError, TypeError):  # of an object that is not what it was
        return None


def _get(module: nn.Module, address: Address) -> Any:
    slot = _slot(module, address)
    if slot is None:
        return ABSENT
    holder, key = slot
    return tuple(v for _, v in holder.elements) if holder.kind.step == "all" else holder.get(key)


def _set(module: nn.Module, address: Address, value: Any) -> None:
    slot = _slot(module, address)
    if slot is None:
        return
    holder, key = slot
    if holder.kind.step == "all":
        holder.write([*enumerate(map(copied, value))])
    else:
        holder.put(key, copied(value))
