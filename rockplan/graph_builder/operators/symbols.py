"""Symbols: SymInts among sizes and literals, as numbers of `values.sizes`.

takes: what PyTorch says of a fake tensor. returns: Sizes, which carry the expression. guarantees:
no guard is added to the ShapeEnv, so that looking at a size changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.utils._sympy.printers import PythonPrinter

from rockplan.values.sizes import Real, Size

_PRINTER = PythonPrinter()


@functools.lru_cache(4096)
def printed(expression: Any) -> str:
    """Return an expression of sympy as Python text."""
    return cast(str, _PRINTER.doprint(expression))


def known_number(number: Any) -> Any:
    """Return a SymInt as a Size, a SymFloat as a Real; a constant, and anything else, as it is. (A
    SymBool becomes a bool, which is a guard.)"""
    if type(number) is int:
        return number
    if isinstance(number, torch.SymInt | torch.SymFloat):
        node = number.node
        plain, made = (int, Size) if isinstance(number, torch.SymInt) else (float, Real)
        if node.constant is not None:
            return plain(node.constant)
        return plain(node.expr) if node.expr.is_number else made(node.hint, printed(node.expr))
    return bool(number) if isinstance(number, torch.SymBool) else number


def hints(sizes: Iterable[Any]) -> tuple[int, ...]:
    """Return sizes as those of the recorded call."""
    return tuple([n if type(n) is int else int(known_number(n)) for n in sizes])


def is_unknown(size: Any) -> bool:
    """Return whether a size follows from values, so that the recorded call has none."""
    return isinstance(size, torch.SymInt) and not size.node.has_hint()


def are_known(sizes: Iterable[Any]) -> bool:
    """Return whether no size is a symbol."""
    return all(type(n) is int for n in sizes)
