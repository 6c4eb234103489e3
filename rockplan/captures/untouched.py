"""Untouched: steps that run for us leave what they find as it was.

takes: a model and a call of it. guarantees: what the model holds in Python, its parameters, buffers
and gradients, other tensors that the forward can reach, and generators are as they were on exit;
no hook of the caller's on a tensor sees a gradient.

What is written to is copied, not what might be: parameters have no second copy meanwhile but for
those that a first run was seen to write to (codebooks, momentum encoders).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from rockplan.codegen.rng_replay import cuda_devices
from rockplan.graph_builder.tracing import host_random
from rockplan.graph_builder.tracing.writes import copied_on_write
from rockplan.python_state import trees
from rockplan.python_state.gradients import gradients_aside
from rockplan.python_state.memory import Content, content_of, is_copyable, put_back
from rockplan.python_state.reach import Reached
from rockplan.python_state.sharding import unsharded_gradients_aside
from rockplan.python_state.snapshot import Snapshot
from rockplan.runtime.hooks import hooks_aside


@dataclass(frozen=True, slots=True)
class Untouched:
    """draws_restored: a context that puts the generators back, for several steps that draw alike;
    found: what is known to be written to."""

    draws_restored: Callable[[], contextlib.AbstractContextManager[None]]
    found: list[Content]

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        return tuple(content.tensor for content in self.found)

    def put_back(self) -> None:
        """What was written to holds what it did, in the middle of what runs here."""
        put_back(self.found)


@contextlib.contextmanager
def untouched(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: object = None,
    written: Collection[torch.Tensor] | None = None,
) -> Iterator[Untouched]:
    """The context in which all is left as it was. loss: a function, to which that applies as well.

    written: what an earlier run wrote to, which is copied, and buffers; None: what is run inside is
    watched, operator by operator and without the compiler, and copied before it is written to."""
    snapshot = Snapshot.of(model, model.forward, (*args, loss), kwargs)
    reached = (value for _, value in snapshot.reached.objects if isinstance(value, torch.Tensor))
    given = (*model.parameters(), *model.buffers(), *trees.tree_leaves((args, kwargs)), *reached)
    tensors = [*{id(t): t for t in given if isinstance(t, torch.Tensor)}.values()]
    draws_restored = functools.partial(_draws_restored, cuda_devices(tensors), snapshot.reached)
    found: list[Content] = []
    if written is not None:
        known = {id(t): t for t in (*written, *model.buffers()) if is_copyable(t)}
        found += map(content_of, known.values())
    with contextlib.ExitStack() as stack:
        stack.enter_context(snapshot.restored())
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
def _draws_restored(devices: list[int], reached: Reached) -> Iterator[None]:
    """PyTorch's generators, and those of Python and numpy."""
    with torch.random.fork_rng(devices), host_random.restored(reached):
        yield
