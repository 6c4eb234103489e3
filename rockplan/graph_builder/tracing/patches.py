"""Patches: names that are replaced while a forward is recorded, and what replacements may ask.

Rows are in `eager_paths`, or are passed in (`graph_builder.capture`). guarantees: they hold only in
the thread that records, and are undone afterwards.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.graph_builder.recorded.run import RecordedCall
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.python_state.walk import Root, Walk


def nobody(message: object) -> NoReturn:
    raise AssertionError(message)


@dataclass(frozen=True, slots=True)
class RecordingAccess:
    """What a replacement may ask of the recording.

    refuse: raise with the place in the model; read_all: the real tensor for a recorded one; known:
    the fake tensor for a real one; is_active: whether a call of an operator would be recorded now;
    make_own: give tensors (grouped by storage) memory
    of their own if no plan writes into what they have; callers_writes: calls that wrote into
    tensors of the caller; made: tensors met so far, in order, None for one that is gone;
    checkpoints: gets what the function of each checkpoint that eager runs again could reach.
    """

    refuse: Callable[[str], NoReturn] = nobody
    read_all: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: None
    known: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    is_active: Callable[[], bool] = lambda: False
    make_own: Callable[[Sequence[Sequence[torch.Tensor]]], None] = lambda written: None
    callers_writes: Callable[[], Sequence[RecordedCall]] = lambda: ()
    made: Callable[[], Sequence[torch.Tensor | None]] = lambda: ()
    checkpoints: list[Walk] = field(default_factory=list)

    @contextlib.contextmanager
    def refusing_writes(
        self, called: Sequence[Any], run_again: Callable[[], bool]
    ) -> Iterator[None]:
        """While active, nothing is refused; at the end writes into tensors of the caller are, if
        `run_again()` is true: eager would then run the same code again in the backward pass.
        called: function and arguments of that."""
        before = len(self.callers_writes())
        with _disable_current_modes():
            reached = Walk([Root("an argument", one) for one in called], stops=nn.Module)
        yield
        if not run_again():
            return
        self.checkpoints.append(reached)
        for call in self.callers_writes()[before:]:
            place = f" in module '{call.module}'" if call.module else ""
            self.refuse(NAMED["write in a checkpoint"].text(operator=call.call.op, place=place))


@dataclass(frozen=True, slots=True)
class Patch:
    """One name that is replaced while a forward is recorded.

    owner: a class or a module, or the name of a package: all its modules that have the name.
    replacement: makes the replacement from the original and the recording. why: its reason.
    """

    owner: Any
    name: str
    replacement: Callable[[Any, RecordingAccess], Any]
    why: str

    def owners(self) -> list[Any]:
        """Return the classes and modules to patch."""
        if not isinstance(self.owner, str):
            return [self.owner]
        inside = f"{self.owner}."
        # A copy: another thread may import meanwhile.
        loaded = [*sys.modules.items()]
        files = (f for n, f in loaded if n == self.owner or n.startswith(inside))
        return [file for file in files if self.name in vars(file)]


def unrecorded(original: Any, recording: RecordingAccess) -> Callable[..., Any]:
    """Return `replacement` of a patch, whose operators are none of the step."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return run


PatchSource = Callable[[], Iterable[Patch]]
"""Returns rows when called: a forward may import the modules that they patch."""


@contextlib.contextmanager
def patched(patches: Iterable[Patch], recording: RecordingAccess | None = None) -> Iterator[None]:
    """While active, the names of `patches` are replaced in this thread; other threads call the
    originals. recording: what the replacements may ask, nothing if None."""
    with contextlib.ExitStack() as stack:
        for patch in patches:
            for owner in patch.owners():
                before = getattr(owner, patch.name)
                made = patch.replacement(before, recording or RecordingAccess())
                # What is neither a function nor a property other threads see, too.
                if isinstance(made, property):
                    made = property(made.fget, in_this_thread(made.fset, before.__set__))
                elif callable(made) and not isinstance(made, type):
                    made = in_this_thread(made, before)
                stack.enter_context(exchanged(owner, patch.name, made))
        yield


_ABSENT = object()


@contextlib.contextmanager
def exchanged(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """While active, an attribute of a class or module is `replacement`, afterwards as before."""
    own = vars(owner).get(name, _ABSENT)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def in_this_thread(function: Any, original: Any) -> Callable[..., Any]:
    """Return a function that calls `function` in the thread of now, and `original` in others."""
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = function if threading.get_ident() == thread else original
        return chosen(*args, **kwargs)

    return call
