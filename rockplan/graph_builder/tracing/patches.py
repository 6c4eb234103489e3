"""Patches: names that are replaced while a forward is recorded.

Rows are in `eager_paths`, or are passed in (`graph_builder.capture`). guarantees: they hold only in
the thread that records, and are undone afterwards.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True, slots=True)
class Patch:
    """One name that is replaced while a forward is recorded.

    owner: a class or a module, or the name of a package: all its modules that have the name.
    replacement: makes the replacement from the original and the Recorder, None outside of a
    recording. why: its reason.
    """

    owner: Any
    name: str
    replacement: Callable[[Any, Any], Any]
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


def unrecorded(original: Any, recorder: object) -> Callable[..., Any]:
    """Return `replacement` of a patch, whose operators are none of the step."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return run


PatchSource = Callable[[], Iterable[Patch]]
"""Returns rows when called: a forward may import the modules that they patch."""


@contextlib.contextmanager
def patched(patches: Iterable[Patch], recorder: Any = None) -> Iterator[None]:
    """While active, the names of `patches` are replaced in this thread; other threads call the
    originals. recorder: what the replacements may ask."""
    with contextlib.ExitStack() as stack:
        for patch in patches:
            for owner in patch.owners():
                before = getattr(owner, patch.name)
                made = patch.replacement(before, recorder)
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
