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
from rockplan.python_state.holders import Held
from rockplan.python_state.object_slots import Element
from rockplan.python_state.snapshot import Snapshot
from rockplan.runtime.planned_state import original_forward
from rockplan.runtime.program import ModuleCall


@contextlib.contextmanager
def after_a_first_call(call: ModuleCall, refusal: Exception) -> Iterator[None]:
    """Call the module for real, and run the `with` block with the tensors that its first call
    stored in place (tables in caches). They are taken away again only if the block raises. Raises
    `refusal` if the call fails, or if a second one returns other values."""
    snapshot = Snapshot.of(call.module, original_forward(call.module), call.args, call.kwargs)
    snapshot.begin()
    stored = _stored_by_a_call(snapshot, call)
    if stored is None:
        raise refusal
    try:
        for held, elements in stored:
            held.write(elements)
        yield
    except BaseException:
        snapshot.restore()
        raise


def _stored_by_a_call(
    snapshot: Snapshot, call: ModuleCall
) -> list[tuple[Held, list[Element]]] | None:
    """Call the module for real twice, and leave everything as it was. Returns (holder, its elements
    after the first call) for each object in which that call stored a tensor; None if a call fails
    or the second one has other results."""
    forward, args, kwargs = original_forward(call.module), call.args, call.kwargs
    with untouched(call.module, args, kwargs) as run, torch.no_grad():
        try:
            with run.draws_restored():
                first = trees.tree_leaves(forward(*args, **kwargs))
            run.put_back()
            stored = [
                (held, held.elements)
                for held, start, now in snapshot.changed()
                if any(_has_tensor(v) for k, v in now.items() if start.get(k) is not v)
            ]
            with run.draws_restored():
                second = trees.tree_leaves(forward(*args, **kwargs))
            return stored if _are_equal(first, second) else None
        except Exception:  # an error of the call itself: a training step will raise it, too
            return None


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in trees.tree_leaves(value))


def _are_equal(first: list[Any], second: list[Any]) -> bool:
    """True if the results have tensors, and those of both calls are equal."""
    pairs = [(a, b) for a, b in zip(first, second, strict=False) if isinstance(a, torch.Tensor)]
    is_equal = (isinstance(b, torch.Tensor) and torch.equal(a, b) for a, b in pairs)
    return bool(pairs) and len(first) == len(second) and all(is_equal)
