"""First calls: a module that stores tables in its first call gets them before it is recorded.

takes: a module and a call of it, whose recording found that the first call stores tensors that
constants alone decide (`StoredByTheFirstCall`: rotary tables, masks). guarantees: the original made
the tables, and they stay where eager has them after its first call; if recording fails even so,
they are removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from rockplan.captures.untouched import untouched
from rockplan.python_state import trees
from rockplan.python_state.elements import Access, Element, same_elements
from rockplan.python_state.walk import Walk, walk_of
from rockplan.runtime.planned_state import original_forward
from rockplan.runtime.program import ModuleCall


@contextlib.contextmanager
def after_a_first_call(call: ModuleCall, refusal: Exception) -> Iterator[None]:
    """Call the module for real, and run the `with` block with what its first call left (tables in
    caches) in place. It is taken away again only if the block raises. Raises `refusal` if the call
    fails, or if a second one returns other values."""
    walk = walk_of(call.module, original_forward(call.module), call.args, call.kwargs)
    left = _left_by_a_call(walk, call)
    if left is None:
        raise refusal
    try:
        for owner, row, elements in left:
            row.write(owner, elements)
        yield
    except BaseException:
        walk.restore()
        raise


_Left = list[tuple[Any, Access, list[Element]]]
"""(object, how it is written, its elements after the first call) of each that the call changed"""


def _left_by_a_call(walk: Walk, call: ModuleCall) -> _Left | None:
    """Call the module for real twice, and leave everything as it was. Returns what the first call
    changed; None if a call fails or the second one has other results."""
    forward, args, kwargs = original_forward(call.module), call.args, call.kwargs
    with untouched(call.module, args, kwargs) as run, torch.no_grad():
        try:
            with run.draws_restored():
                first = trees.tree_leaves(forward(*args, **kwargs))
            run.put_back()
            left: _Left = []
            for n, (owner, row, before) in walk.holders():
                now = row.read(owner)
                if not walk.root_of(n).is_callers and not same_elements(now, before):
                    left.append((owner, row, now))
            with run.draws_restored():
                second = trees.tree_leaves(forward(*args, **kwargs))
            return left if _are_equal(first, second) else None
        except Exception:  # an error of the call itself: a training step will raise it, too
            return None


def _are_equal(first: list[Any], second: list[Any]) -> bool:
    pairs = [(a, b) for a, b in zip(first, second, strict=False) if isinstance(a, torch.Tensor)]
    is_equal = (isinstance(b, torch.Tensor) and torch.equal(a, b) for a, b in pairs)
    return bool(pairs) and len(first) == len(second) and all(is_equal)
