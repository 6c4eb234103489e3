"""Literals of torch in pickles, at every protocol.

takes: (nested tuples and lists of) arguments of a call, or the structure of a tree. returns: what a
pickle holds in their place. guarantees: unpickling gives equal arguments, wherever torch can be
imported, and without a warning.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Named:
    """An object that has a name in torch: the pickle holds the name, unpickling looks it up."""

    name: str

    def __reduce__(self) -> tuple[object, ...]:
        return pkgutil.resolve_name, (self.name,)


@dataclass(frozen=True, slots=True)
class _FunctionResult:
    """The result of a function of torch: the pickle holds the function's name and its arguments,
    unpickling calls it."""

    function: str
    arguments: tuple[object, ...]

    def __reduce__(self) -> tuple[object, ...]:
        return pkgutil.resolve_name(self.function), self.arguments


_LEAF = _FunctionResult("torch.utils._pytree:tree_structure", (0,))


def picklable(argument: Any) -> Any:
    """Return `argument` in a form that can be pickled.

    A memory format cannot be pickled below protocol 4, and torch.save writes protocol 2; dtypes,
    layouts and devices can. PyTorch warns when the leaf of a tree's structure is unpickled as such.
    Classes are matched by name, so that torch need not be imported here.
    """
    if type(argument).__name__ in ("TreeSpec", "LeafSpec"):
        if argument.is_leaf():
            return _LEAF
        children = [picklable(child) for child in argument.children()]
        made = (argument.type, argument.context, children)
        return _FunctionResult("torch.utils._pytree:TreeSpec", made)
    if type(argument).__name__ == "memory_format":
        return _Named(repr(argument).replace(".", ":", 1))
    if type(argument) is tuple:
        return tuple(map(picklable, argument))
    if type(argument) is list:
        return list(map(picklable, argument))
    return argument
