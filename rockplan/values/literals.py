"""Literals of torch in pickles, at every protocol.

takes: (nested tuples and lists of) arguments of a call, or the structure of a tree. returns: what a
pickle holds in their place. guarantees: unpickling gives the same again, wherever torch can be
imported, and without a warning.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Named:
    """What has a name in torch: a pickle holds the name, and becomes the thing itself again."""

    name: str

    def __reduce__(self) -> tuple[object, ...]:
        return pkgutil.resolve_name, (self.name,)


@dataclass(frozen=True, slots=True)
class _FunctionResult:
    """What a function of torch makes of arguments; a pickle holds both."""

    function: str
    arguments: tuple[object, ...]

    def __reduce__(self) -> tuple[object, ...]:
        return pkgutil.resolve_name(self.function), self.arguments


_LEAF = _FunctionResult("torch.utils._pytree:tree_structure", (0,))


def picklable(argument: Any) -> Any:
    """`argument` for a pickle.

    A memory format cannot be pickled below protocol 4, and torch.save writes protocol 2; dtypes,
    layouts and devices can. Of the structure of a tree PyTorch warns where a leaf is made anew.
    Matched by name, so that torch is not needed here.
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
