"""Assignments: what a planned call writes into Python objects beside tensors, as the forward would.

takes: (address, value) of what the captured forward wrote. guarantees: after a planned call the
same values are there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from rockplan.python_state.contents import copied
from rockplan.python_state.holders import holder_at
from rockplan.values.interface import Address, Assignment


def put(module: nn.Module, assignments: Iterable[Assignment]) -> None:
    """Write into Python objects what the captured forward left there: for each assignment, its
    value at its address. An address that leads nowhere any more is skipped."""
    for one in assignments:
        step, key = one.address[2][-1]
        try:
            holder = holder_at(_owner(module, one.address), step, key)
        except (AttributeError, LookupError, TypeError):  # an object on the way was replaced
            continue
        holder.put(key, copied(one.value))


def _owner(module: nn.Module, address: Address) -> Any:
    """Return the object on which the last step of `address` ends: `address` is (kind of root, name
    of a submodule or Python module or the object itself, steps of attributes and keys from
    there)."""
    kind, root, steps = address
    owner: Any = root
    if kind == "module":
        owner = module.get_submodule(root)
    elif kind == "file":
        owner = sys.modules[root]
    for step, name in steps[:-1]:
        owner = getattr(owner, name) if step == "attribute" else owner[name]
    return owner
