"""Facts about Python classes that are computed once for each class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")


def once_for_each_class(work: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """Decorate a function of one class so that it is called once for each class. Classes are told
    apart by identity: a metaclass may define `==`, and without a hash too."""
    known: dict[int, tuple[Any, Found]] = {}

    @functools.wraps(work)
    def remembered(kind: Any) -> Found:
        entry = known.get(id(kind))
        if entry is None:
            entry = known[id(kind)] = kind, work(kind)
        return entry[1]

    return remembered
