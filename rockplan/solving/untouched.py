"""Untouched: steps that we run leave everything as they found it.

takes: a model and a call of it. guarantees: on exit the model's Python state, parameters, buffers
and gradients, other tensors that the forward can reach, and random generators are as they were; no
hook of the caller's on a tensor sees a gradient. `after_a_first_call`: a module that stores tables
in its first call (rotary tables, masks: tensors that constants alone decide) gets them before it is
recorded; the original made them, and they stay where eager has them after its first call.

Only tensors that are written to are copied: parameters have no second copy meanwhile, except those
that a first run was seen to write to (codebooks, momentum encoders).
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode

from rockplan.codegen.rng_replay import cuda_devices
from rockplan.graph_builder.operators.facts import written
from rockplan.graph_builder.tracing import modes
from rockplan.python_state import trees
from rockplan.python_state.elements import Access, Element, same_elements
from rockplan.python_state.hooks import hooks_aside
from rockplan.python_state.memory import (
    Content,
    content_of,
    gradients_aside,
    has_other_memory,
    is_copyable,
    memory_of,
    put_back,
)
from rockplan.python_state.sharding import unsharded_gradients_aside
from rockplan.python_state.walk import Root, Walk, is_generator, walk_of
from rockplan.runtime.planned_state import original_forward
from rockplan.runtime.program import ModuleCall


@dataclass(frozen=True, slots=True)
class Untouched:
    """What the steps inside may use. draws_restored: a context that puts the generators back on
    exit, for several steps that draw alike; found: copies of tensors known to be written to."""

    draws_restored: Callable[[], contextlib.AbstractContextManager[None]]
    found: list[Content]

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        return tuple(content.tensor for content in self.found)

    def put_back(self) -> None:
        """Put back what was written to, between two steps."""
        put_back(self.found)


@contextlib.contextmanager
def untouched(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: object = None,
    written: Collection[torch.Tensor] | None = None,
) -> Iterator[Untouched]:
    """Restore everything on leaving the `with` block: tensors, gradients, hooks, random generators,
    and what Python holds. loss: a function that may be called inside, and is left as it was, too.

    written: tensors that an earlier run wrote to; they and the buffers are copied at once. None:
    operators are watched, without the compiler, and a tensor is copied before the first write to
    it.
    """
    walk = walk_of(model, model.forward, (*args, loss), kwargs)
    reached = (tensor for tensor in walk.objects if isinstance(tensor, torch.Tensor))
    given = (*model.parameters(), *model.buffers(), *trees.tree_leaves((args, kwargs)), *reached)
    tensors = [*{id(t): t for t in given if isinstance(t, torch.Tensor)}.values()]
    draws_restored = functools.partial(_draws_restored, cuda_devices(tensors), walk)
    found: list[Content] = []
    if written is not None:
        known = {id(t): t for t in (*written, *model.buffers()) if is_copyable(t)}
        found += map(content_of, known.values())
    with contextlib.ExitStack() as stack:
        stack.enter_context(walk.restored())
        stack.enter_context(draws_restored())
        stack.enter_context(gradients_aside(tensors))
        stack.enter_context(unsharded_gradients_aside(model))
        stack.enter_context(hooks_aside(tensors))
        versioned = tuple(t for t in tensors if not t.is_inference())
        stack.enter_context(_unsafe_preserve_version_counter(versioned))
        stack.callback(put_back, found)
        if written is None:
            stack.enter_context(copied_on_write(tensors, found))
        yield Untouched(draws_restored, found)


@contextlib.contextmanager
def _draws_restored(devices: list[int], walk: Walk) -> Iterator[None]:
    generators = Walk(Root("", value) for value in walk.objects if is_generator(type(value)))
    with torch.random.fork_rng(devices), generators.restored():
        yield


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


@contextlib.contextmanager
def copied_on_write(tensors: Iterable[torch.Tensor], found: list[Content]) -> Iterator[None]:
    """While active, tensors are copied before an operator first writes to them; their former
    content is appended to `found`, as is, at the end, that of tensors which got other memory.
    Compiled functions run uncompiled meanwhile."""
    before = [(t, t.detach()) for t in tensors if is_copyable(t)]
    with modes.without_compiling(), _CopyOnWrite(tensors, found):
        yield
    seen = {id(content.tensor) for content in found}
    for tensor, memory in before:
        if id(tensor) not in seen and has_other_memory(tensor, memory):
            found.append(Content(tensor, memory, memory))


class _CopyOnWrite(TorchDispatchMode):
    """Keeps the content of tensors before an operator first writes into their memory."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[torch.Tensor], found: list[Content]) -> None:
        super().__init__()
        self._found = found
        self._over: dict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in filter(is_copyable, tensors):
            for memory in memory_of(tensor):
                self._over[memory].append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            for tensor in written(func, args, kwargs):
                for memory in memory_of(tensor):
                    self._found += map(content_of, self._over.pop(memory, ()))
        return func(*args, **kwargs)
