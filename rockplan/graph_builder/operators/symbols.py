"""Symbols: SymInts among sizes and literals, as numbers of `values.sizes`.

takes: what PyTorch says of a fake tensor. returns: Sizes, which carry the expression. guarantees:
no guard is added to the ShapeEnv, so that looking at a size changes nothing.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

from rockplan.values.sizes import LEAST, MOST, CallSizes, Real, Size, Sizes, exchanged

_PRINTER = PythonPrinter()

_KNOWN = {"math": math, "torch": torch}


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


def new_env() -> ShapeEnv:
    return ShapeEnv(duck_shape=False, specialize_zero_one=True)


def new_symbol(env: ShapeEnv, name: str, now: int | float) -> Any:
    """Return a number that is a symbol. name: of its source, from which its own follows."""
    source = ConstantSource(name)
    if isinstance(now, float):
        symbol = env.create_unspecified_symbol(now, source, DimDynamic.DYNAMIC)
        return env.create_symfloatnode(symbol, hint=now, source=source)
    symbol = env.create_symbol(now, source, DimDynamic.DYNAMIC, None)
    env.var_to_range[symbol] = ValueRanges(LEAST, MOST)
    return env.create_symintnode(symbol, hint=now, source=source)


class Symbols:
    """Symbols of a recording in a ShapeEnv of their own. sizes: each with its number there."""

    def __init__(self, sizes: Iterable[Size | Real]) -> None:
        self.env = new_env()
        self.numbers = {size.text: new_symbol(self.env, size.text, size.plain) for size in sizes}
        self._names = {str(n.node.expr): name for name, n in self.numbers.items()}

    def symbolic(self, value: Any) -> Any:
        """Return nested tuples and dataclasses with a SymInt in place of each Size."""
        return exchanged(value, lambda one: eval(one.text, {**_KNOWN}, self.numbers))

    def recorded(self, value: Any) -> Any:
        """Return nested tuples and dataclasses whose Sizes have the names of the recording."""
        return exchanged(value, lambda one: type(one)(one, self._renamed(one.text)))

    def _renamed(self, text: str) -> str:
        return re.sub(r"\w+", lambda word: self._names.get(word[0], word[0]), text)

    def dispatched(self) -> AbstractContextManager[object]:
        """Around the rules of shapes alone, some of which make constants of symbols without it."""
        return enable_python_dispatcher() if self.numbers else nullcontext()

    @property
    def guards(self) -> tuple[str, ...]:
        """What was decided by sizes. Raises RuntimeError if one has become a constant."""
        of_numbers = (number.node.expr for number in self.numbers.values())
        if any(expr.is_number for expr in of_numbers) or self.env.deferred_runtime_asserts:
            raise RuntimeError("a size is a constant")
        printed_ones = (printed(guard.expr) for guard in self.env.guards)
        return tuple(dict.fromkeys(map(self._renamed, printed_ones)))


def function_of(names: Iterable[str], texts: Iterable[str]) -> Callable[[tuple[int, ...]], Any]:
    """Return a function: values of the symbols `names` -> tuple of the values of `texts`."""
    lines = ["def evaluate(sizes):"]
    listed = "".join(f"{name}, " for name in names)
    lines += [f"    {listed}= sizes"] if listed else []
    lines += [f"    return ({''.join(f'{text}, ' for text in texts)})"]
    return loaded(lines, "evaluate")


def are_for(sizes: Sizes, call: CallSizes) -> bool:
    """Return whether a program for many sizes is for those of a call of its kind."""
    if any(s.axis == "count" and s.position >= len(call.read) for s in sizes.symbols):
        return False
    return all(function_of(sizes.names, sizes.guards)(tuple(s.of(call) for s in sizes.symbols)))


def loaded(lines: Iterable[str], name: str) -> Callable[..., Any]:
    """Return the function `name` of Python text in which expressions stand."""
    namespace: dict[str, Any] = {**_KNOWN}
    exec("\n".join(lines), namespace)
    made: Callable[..., Any] = namespace[name]
    return made
