"""Progress: how far a pass that takes longer than a second has come.

A pass calls `report`; whoever wants to know listens. Nobody listens unless asked to, and a
report changes nothing, so passes stay functions from value to value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StageProgress:
    """`done` of `total` parts of `stage` are finished; total is None where it is not known."""

    stage: str
    done: int
    total: int | None


Listener = Callable[[StageProgress], None]

_listener: ContextVar[Listener | None] = ContextVar("rockplan progress", default=None)


def report(stage: str, done: int = 0, total: int | None = None) -> None:
    """Tell the listener of this context, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(StageProgress(stage, done, total))


@contextmanager
def part(name: str) -> Iterator[None]:
    """Inside the `with` block, what is reported in this context begins with `name`."""
    listener = _listener.get()
    if listener is None:
        yield
        return
    with listening(lambda step: listener(replace(step, stage=f"{name}: {step.stage}"))):
        yield


def is_heard() -> bool:
    """Return whether a listener is set in this context."""
    return _listener.get() is not None


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside the `with` block, call `listener` with every step that is reported in this context.
    Threads that a pass starts do not report; the pass does, in the thread that called it."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
