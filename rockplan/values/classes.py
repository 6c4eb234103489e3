"""Classes: what is found out about one, once.

takes: a function of a class. returns: one that remembers. guarantees: classes are told apart by
identity, whatever their metaclass makes of ==; one that defines it alone makes classes without a
hash.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")


def once_for_each_class(work: Callable[[Any], Found]) -> Callable[[Any], Found]:
    known: dict[int, tuple[Any, Found]] = {}

    @functools.wraps(work)
    def remembered(kind: Any) -> Found:
        entry = known.get(id(kind))
        if entry is None:
            entry = known[id(kind)] = kind, work(kind)
        return entry[1]

    return remembered
