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
    """Return `argument` in a form that protocol 2 of pickle writes, which torch.save uses: memory
    formats and structures of pytrees, also inside tuples and lists, are replaced by stand-ins that
    unpickle as the original. Classes are matched by name, so that torch need not be imported here.
    PyTorch would warn where the leaf of a structure is unpickled as such."""
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
