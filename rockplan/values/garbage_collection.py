"""Pause Python's cyclic garbage collection while a pass builds many values.

New objects trigger collections, which walk over all live objects and find nothing, since values of
graphs are in no cycles. They took a fifth of the time of capturing 48 layers of GPT-2.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pause Python's cyclic garbage collection inside the `with` block, or in the decorated
    function; leave it off if it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
