"""Messages: what a forward logs is said once, at however many sizes it is captured.

takes: nothing. returns: a context. guarantees: the first of equal records of the thread that
entered reaches every handler and filter; other threads log as ever.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

_ONE_AT_A_TIME = threading.RLock()
"""Contexts of two threads that end in another order would leave the function of one behind."""


@contextlib.contextmanager
def messages_once() -> Iterator[None]:
    """In the `with` block, or the decorated function, drop log records of this thread that repeat
    one (same logger, level and text). A forward that warns once by a function cache warns at each
    capture: caches are put back."""
    said: set[tuple[str, int, str]] = set()
    thread = threading.get_ident()
    with _ONE_AT_A_TIME:
        handle = logging.Logger.handle

        def once(logger: logging.Logger, record: logging.LogRecord) -> None:
            """Handle a record in place of `Logger.handle`."""
            message = record.name, record.levelno, record.getMessage()
            if threading.get_ident() != thread or message not in said:
                said.add(message)
                handle(logger, record)

        logging.Logger.handle = once  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            logging.Logger.handle = handle  # type: ignore[method-assign]
