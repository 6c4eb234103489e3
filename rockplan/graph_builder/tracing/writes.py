"""Writes: which tensors a run writes to, with their content before.

takes: tensors. guarantees: the content of tensors whose memory an operator writes, or which get
other memory (`tensor.data = ...`), is kept; other tensors are not copied. (Writes other than by
PyTorch's operators are not seen.)
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from rockplan.graph_builder.operators.facts import written
from rockplan.graph_builder.tracing import modes
from rockplan.python_state.memory import (
    Content,
    content_of,
    has_other_memory,
    is_copyable,
    memory_of,
)


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
