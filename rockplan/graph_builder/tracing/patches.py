"""Patches: names that are others while a forward is recorded, and what their replacements may ask.

Rows of them are in `eager_paths`, and come from above (`graph_builder.capture`). guarantees: they
hold in the thread that records alone, and are gone afterwards.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from rockplan.errors import CaptureError
from rockplan.graph_builder.recorded.run import RecordedCall
from rockplan.graph_builder.tracing.refusals import NAMED


class Interrupted(CaptureError):
    """Ends a recording that begins anew once something has been found out outside of it."""


def _nobody(message: object) -> NoReturn:
    raise AssertionError(message)


@dataclass(frozen=True, slots=True)
class RecordingAccess:
    """What a replacement asks of the recording that it is there for. refuse: raises, with the place
    in the model; read_all: the real tensor of one that is recorded; is_active: would a call of an
    operator be recorded now? stop: raises an error that ends the recording; place: path of the
    module that runs, and line of the user's; make_own: gives tensors, those of a storage together,
    memory of their own where no plan writes into what they have; callers_writes: calls that have
    written into tensors of the caller's; made: tensors that were met so far, in order."""

    refuse: Callable[[str], NoReturn] = _nobody
    read_all: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: None
    is_active: Callable[[], bool] = lambda: False
    stop: Callable[[CaptureError], NoReturn] = _nobody
    place: Callable[[], tuple[str, str]] = lambda: ("", "")
    make_own: Callable[[Sequence[Sequence[torch.Tensor]]], None] = lambda written: None
    callers_writes: Callable[[], Sequence[RecordedCall]] = lambda: ()
    made: Callable[[], Sequence[torch.Tensor]] = lambda: ()

    @contextlib.contextmanager
    def refusing_writes(self, run_again: Callable[[], bool]) -> Iterator[None]:
        """Around what eager runs once more in the backward pass, if `run_again` says so then."""
        before = len(self.callers_writes())
        yield
        written = self.callers_writes()[before:] if run_again() else ()
        for call in written:
            place = f" in module '{call.module}'" if call.module else ""
            self.refuse(NAMED["write in a checkpoint"].text(operator=call.call.op, place=place))


@dataclass(frozen=True, slots=True)
class Patch:
    """One name that is another while a forward is recorded.

    owner: a class or a module, or the name of a package: those of its files that have the name.
    replacement: from what was there, and the recording. why: it is there at all."""

    owner: Any
    name: str
    replacement: Callable[[Any, RecordingAccess], Any]
    why: str

    def owners(self) -> list[Any]:
        if not isinstance(self.owner, str):
            return [self.owner]
        files = [f for name, f in sys.modules.items() if name.split(".")[0] == self.owner]
        return [file for file in files if self.name in vars(file)]


PatchSource = Callable[[], Iterable[Patch]]
"""Rows as they are when it is asked: files that they are about may be imported by a forward."""


@contextlib.contextmanager
def patched(patches: Iterable[Patch], recording: RecordingAccess | None = None) -> Iterator[None]:
    """Install the rows in this thread; other threads call the former functions."""
    with contextlib.ExitStack() as stack:
        for patch in patches:
            for owner in patch.owners():
                before = getattr(owner, patch.name)
                made = patch.replacement(before, recording or RecordingAccess())
                stack.enter_context(_exchanged(owner, patch.name, _told_apart(made, before)))
        yield


_ABSENT = object()


@contextlib.contextmanager
def _exchanged(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    own = vars(owner).get(name, _ABSENT)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _told_apart(replacement: Any, elsewhere: Any) -> Any:
    """Functions, and properties that are set, tell threads apart; classes and data do not."""
    if isinstance(replacement, property):
        return property(replacement.fget, in_this_thread(replacement.fset, elsewhere.__set__))
    is_function = callable(replacement) and not isinstance(replacement, type)
    return in_this_thread(replacement, elsewhere) if is_function else replacement


def in_this_thread(function: Any, elsewhere: Any) -> Callable[..., Any]:
    """Return a function that calls `function` in this thread and `elsewhere` in others."""
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = function if threading.get_ident() == thread else elsewhere
        return chosen(*args, **kwargs)

    return call
