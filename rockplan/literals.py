"""Literals of torch in pickles, at every protocol.

takes: (nested tuples and lists of) arguments of a call. returns: what a pickle holds in their
place. guarantees: unpickling gives the arguments again, wherever torch can be imported.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Named:
    """What has a name in torch: a pickle holds the name, and becomes the thing itself again."""

    name: str

    def __reduce__(self) -> tuple[object, ...]:
        return pkgutil.resolve_name, (self.name,)


def picklable(argument: object) -> object:
    """`argument` for a pickle.

    A memory format cannot be pickled below protocol 4, and torch.save writes protocol 2; dtypes,
    layouts and devices can. Matched by name, so that torch is not needed here.
    """
    if type(argument).__name__ == "memory_format":
        return _Named(repr(argument).replace(".", ":", 1))
    if type(argument) is tuple:
        return tuple(map(picklable, argument))
    if type(argument) is list:
        return list(map(picklable, argument))
    return argument
