"""Sizes: numbers of a captured program that follow from the sizes of its arguments.

A `Size` is an int, that of the call which was captured, and carries the expression by which any
other call has its own. So search, prices, digests and files see the captured call; only what runs
or weighs other calls reads expressions. Arithmetic on a Size gives a plain int: what computes with
sizes (`solving.open_sizes`) is compared with a static capture at a second size.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Self, TypeGuard


class _OfCall:
    text: str

    def __new__(cls, number: float, text: str) -> Self:
        made = super().__new__(cls, number)  # type: ignore[call-arg]
        made.text = text
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.real, self.text)  # type: ignore[attr-defined]


class Size(_OfCall, int):
    """An integer of the captured call. text: Python expression of the symbols of its `Sizes`."""

    @property
    def plain(self) -> int:
        return int(self)


class Real(_OfCall, float):
    """A floating-point number of the captured call, as `Size`."""

    @property
    def plain(self) -> float:
        return float(self)


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor."""

Place = tuple[int, str, int]
"""Where a size of a call is: as position, axis and dimension of a `Symbol`."""


@dataclass(frozen=True, slots=True)
class CallSizes:
    """What the sizes of a call are taken from. layouts: of tensors among the leaves of
    (args, kwargs), by position; numbers: those among the leaves; read: what its guards expect, in
    order, but for those of sizes alone."""

    layouts: Mapping[int, Layout]
    numbers: Mapping[int, int | float]
    read: tuple[object, ...]

    def without(self, unread: frozenset[int]) -> CallSizes:
        """Return it without the leaves at `unread` positions."""
        layouts = {i: layout for i, layout in self.layouts.items() if i not in unread}
        numbers = {i: n for i, n in self.numbers.items() if i not in unread}
        return CallSizes(layouts, numbers, self.read)

    def differing(self, other: CallSizes) -> dict[Place, int | float | None]:
        """Return place -> size, None if it may not be a symbol, where another call differs."""
        pairs: list[tuple[Place, Any, Any]] = []
        for position, layout in self.layouts.items():
            for axis, own, others in zip(_AXES, layout, other.layouts[position], strict=True):
                sizes = enumerate(zip(own, others, strict=True))
                pairs += (((position, axis, d), a, b) for d, (a, b) in sizes)
        pairs += (((i, "number", 0), n, other.numbers.get(i, n)) for i, n in self.numbers.items())
        read = enumerate(zip(self.read, other.read, strict=False))
        pairs += (((i, "count", 0), a, b) for i, (a, b) in read if is_count(a) and is_count(b))
        differing = ((place, a, is_usual(a) and is_usual(b)) for place, a, b in pairs if a != b)
        return {place: size if may_be else None for place, size, may_be in differing}


_AXES = "shape", "stride"

LEAST, MOST = 2, 2**31
"""Sizes 0 and 1 broadcast and end loops: calls with these are kinds of their own. Without an upper
bound, `h[:, :]` would not be eager's alias."""


def is_usual(number: float) -> bool:
    """Return whether a symbol may stand for a number."""
    return isinstance(number, float) or LEAST <= number <= MOST


def is_number(leaf: object) -> TypeGuard[int | float]:
    """Return whether a leaf of the arguments is a number that may be a symbol in other calls."""
    return type(leaf) is int or (type(leaf) is float and math.isfinite(leaf))


def is_count(read: object) -> TypeGuard[int]:
    """Return whether a value that Python reads may be a number of something."""
    return type(read) is int or isinstance(read, Size)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size, or number, that differs between calls. position: of the leaf of (args, kwargs) that
    has it, or is it; axis, dimension: where in its shape or strides; of a count, position is the
    place in `CallSizes.read`."""

    name: str
    position: int
    axis: Literal["shape", "stride", "number", "count"]
    dimension: int

    def of(self, call: CallSizes) -> Any:
        """Return the size in a call."""
        if self.axis == "number":
            number = call.numbers[self.position]
            return int(number) if isinstance(number, int) else float(number)
        if self.axis == "count":
            count = call.read[self.position]
            assert isinstance(count, int)
            return int(count)
        return int(call.layouts[self.position][_AXES.index(self.axis)][self.dimension])

    @property
    def place(self) -> str:
        """The Python expression that reads it from `leaves`; of a count, what it is in words."""
        if self.axis == "count":
            return f"the count that guard {self.position} reads"
        if self.axis == "number":
            return f"leaves[{self.position}]"
        where = "shape" if self.axis == "shape" else "stride()"
        return f"leaves[{self.position}].{where}[{self.dimension}]"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Which calls one program is for. symbols: sizes of a call, in the order in which generated
    code takes them, counts last; guards: expressions of these that are true for each such call."""

    symbols: tuple[Symbol, ...] = ()
    guards: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(symbol.name for symbol in self.symbols)

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of the symbols that the values of tensors decide."""
        return tuple(symbol.name for symbol in self.symbols if symbol.axis == "count")


STATIC = Sizes()
"""Of a program for calls of one size."""


def text_of(number: int | float) -> str:
    """Return a number as Python text: its expression, or itself."""
    return number.text if isinstance(number, Size | Real) else repr(number)


def texts_in(value: object) -> dict[str, Size | Real]:
    """Return the expressions in nested tuples and dataclasses, each once, in order, with their
    numbers."""
    found: dict[str, Size | Real] = {}

    def noted(one: Size | Real) -> Size | Real:
        found[one.text] = one
        return one

    exchanged(value, noted)
    return found


def at_sizes(number: int, known: Mapping[str, int | float] | None) -> int:
    """Return a number of another call. known: as for `resized`; None for the number as it is."""
    if not isinstance(number, Size):
        return number
    return number.plain if known is None else int(known[number.text])


def resized(value: Any, known: Mapping[str, int | float]) -> Any:
    """Return nested tuples and dataclasses with the numbers of another call. known: expression ->
    its value there. What has no expression in it is returned as it is."""

    def number(one: Size | Real) -> Size | Real:
        if isinstance(one, Size):
            return Size(at_sizes(one, known), one.text)
        return Real(float(known[one.text]), one.text)

    return exchanged(value, number)


def as_text(value: Any) -> Any:
    """Return nested tuples and dataclasses with its expression in place of each Size and Real:
    equal ones are equal at all sizes."""
    return exchanged(value, operator.attrgetter("text"))


def exchanged(value: Any, number: Callable[[Any], Any]) -> Any:
    """Return nested tuples and dataclasses with `number(one)` in place of each Size and Real."""
    if isinstance(value, Size | Real):
        return number(value)
    if type(value) is tuple:
        made = tuple([exchanged(item, number) if _may_hold(item) else item for item in value])
        return made if any(map(operator.is_not, made, value)) else value
    if is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for name in _names_of(value.__class__):
            before = getattr(value, name)
            after = exchanged(before, number) if _may_hold(before) else before
            if after is not before:
                changed[name] = after
        return replace(value, **changed) if changed else value
    return value


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    """None of a class that keeps the sizes it was made for."""
    is_open = not getattr(kind, "keeps_sizes", False)
    return tuple(field.name for field in fields(kind)) if is_open else ()


def _may_hold(value: object) -> bool:
    return value.__class__ not in (int, str, bool, float, type(None))
