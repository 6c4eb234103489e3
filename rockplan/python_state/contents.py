"""Contents: what the lists, dictionaries, configuration objects and functions that a module refers
to hold, as a value that compares equal until something in them changes.

takes: an attribute of a module, and the tensors that a plan has as constants. returns: Contents.
guarantees: objects whose parts are not known (loggers, locks, modules, optimizers) are not looked
into. Of an object that has one of these as an attribute, only the plain public attributes count
(without an underscore): others may be a cache or a record that grows with every step.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import enum
import functools
import itertools
import re
import sys
import types
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch import nn

from rockplan.python_state import key_value_cache
from rockplan.python_state.code_names import root_package
from rockplan.python_state.elements import cell_content, is_small, slots, slots_held
from rockplan.python_state.writes import ELEMENTS, UNTOLD, Sources, attributes, items
from rockplan.values.classes import once_for_each_class

# Values that do not change. Classes compare by identity, as they should.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, Decimal, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(numpy.generic, numpy.dtype, PurePath, re.Pattern, range, slice),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    type,
)
# Their object (`__self__`) may change.
_BOUND_IN_C = (types.BuiltinFunctionType, types.MethodWrapperType)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, *_BOUND_IN_C)
# The commonest plain classes, tested first and by identity (a metaclass may define no hash).
_USUAL = frozenset(map(id, (type(None), bool, int, float, str)))
_MAXIMUM_DEPTH = 6
# Elements of a collection that a function refers to (it may read fewer): 1000 take about 0.1 ms.
_MAXIMUM_LENGTH = 1000
# Classes of the standard library whose attributes are looked into like those of a user's class.
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_COLLECTIONS = (list, tuple, dict, set, frozenset, deque)
_SHOWN = (*_FUNCTIONS, torch.Tensor, numpy.ndarray)
_READABLE = (*_COLLECTIONS, types.MappingProxyType)
_BUFFERS = (bytearray, array, numpy.ndarray)
_UNTOLD = (*_BUFFERS, *_FUNCTIONS, types.CellType)
"""Classes of what may be written to unnoticed."""
_FIXED = frozenset(map(id, (tuple, frozenset)))
_LISTS = frozenset(map(id, (list, set, deque)))


class _Identity:
    """Wraps an object to compare it by identity, and keeps it alive meanwhile."""

    __slots__ = ("object",)

    def __init__(self, value: object) -> None:
        self.object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.object is self.object

    def __hash__(self) -> int:
        return id(self.object)


class _OfCaller(_Identity):
    """Wraps an object of the caller's. A deep copy of a planned module compares equal to the same
    object; an unpickled one, to no object."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> _OfCaller:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()


class _Unknown(Exception):
    """Raised for an object that cannot be looked into."""


# The last three may be raised by `==` of a library's values.
_ERRORS = (_Unknown, RuntimeError, ValueError, TypeError)


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of `container`, as `read` returned them, with their sources. constants: tensors
    that are compared by identity; a container with other tensors cannot be read."""

    container: object
    constants: tuple[torch.Tensor, ...]
    read: Callable[[object, Sequence[torch.Tensor]], tuple[Any, Sources]]
    contents: Any

    def hold(self) -> bool:
        """True if `container` still has these contents."""
        return self._compared()[0]

    def sources(self) -> Sources:
        return self._compared()[1]

    def _compared(self) -> tuple[bool, Sources]:
        try:
            now, sources = self.read(self.container, self.constants)
            return bool(now == self.contents), sources
        except _ERRORS:
            return False, UNTOLD


def described(argument: object) -> Any:
    """A hashable value for an argument that is no tensor, equal for the same contents. Parts that
    cannot be looked into compare by identity, as does an argument none of which can."""
    try:
        contents = _hashable(_Reading(None).value(argument, strict=False))
        hash(contents)  # a class of the user's may define == alone
    except _ERRORS:
        return _OfCaller(argument)
    return contents


def _hashable(frozen: Any) -> Any:
    if isinstance(frozen, list | tuple):
        return type(frozen), tuple(map(_hashable, frozen))
    if isinstance(frozen, set):
        return frozenset(frozen)
    return _OfCaller(frozen.object) if isinstance(frozen, _Identity) else frozen


def is_same(a: object, b: object) -> bool:
    """True if code that reads `a` would read the same in `b`: 2 is not 2.0, and 0.0 is not -0.0."""
    if a is b:
        return True
    try:
        one, other = (_Reading(()).value(value, strict=False) for value in (a, b))
        return bool(one == other)
    except _ERRORS:
        return False


def contents_of(
    container: object,
    constants: tuple[torch.Tensor, ...],
    of_configurations: frozenset[str] | None = None,
) -> Contents | None:
    """Return the contents of a collection, an array, an object with attributes (a configuration) or
    a function; None if they cannot change, or cannot be looked into. constants: tensors that may
    occur in them, compared by identity; of_configurations: the attributes that count of
    configurations of transformers, None for all."""
    parts = container if isinstance(container, tuple) else (None, container)
    is_plain = all(id(type(part)) in _USUAL for part in parts)
    if is_plain or _is_value(container) or isinstance(container, torch.Tensor):
        return None
    for is_whole in (True, False):
        read = functools.partial(_contents, of_configurations=of_configurations, is_whole=is_whole)
        try:
            contents, _ = read(container, constants)
        except _Unknown:
            continue
        is_fixed = isinstance(container, _FUNCTIONS) and contents[1] is container
        return None if is_fixed else Contents(container, constants, read, contents)
    return None


def _is_value(value: object) -> bool:
    # Fractions by class: isinstance asks an abstract class, which needs a hash.
    return isinstance(value, _PLAIN) or type(value) is Fraction


def _contents(
    container: object,
    constants: Sequence[torch.Tensor],
    of_configurations: frozenset[str] | None,
    is_whole: bool,
) -> tuple[Any, Sources]:
    reading = _Reading(constants, of_configurations)
    whole = functools.partial(reading.inside, strict=False)
    return (whole if is_whole else reading.plain_attributes)(container), reading.sources


class _Reading:
    """One pass over a container. constants: tensors that may occur, compared by identity; None: any
    tensor may. of_configurations: as in `contents_of`."""

    def __init__(
        self,
        constants: Sequence[torch.Tensor] | None,
        of_configurations: frozenset[str] | None = None,
    ) -> None:
        self._constants = constants
        self._of_configurations = of_configurations
        self._path: list[int] = []
        self._functions = 0
        self.sources: Sources = ()

    def value(self, value: object, strict: bool) -> Any:
        """Return the contents of any object: a plain value as itself with its type. strict: raise
        _Unknown for an object that cannot be looked into; else such an object compares by
        identity."""
        kind = type(value)
        if kind is str or kind is int or value is None:
            return value
        if id(kind) in _USUAL or _is_value(value):
            return _leaf(value)
        if kind is types.CodeType:
            return _Identity(value)
        if id(value) in self._path:
            return "what it is in", self._path.index(id(value))
        try:
            return self.inside(value, strict)
        except _Unknown:
            if strict and not isinstance(value, _FUNCTIONS):
                raise
        try:
            return [_Identity(value), self.plain_attributes(value)]
        except _Unknown:
            return _Identity(value)

    def plain_attributes(self, value: object) -> Any:
        """Return (class, (name, contents) of each plain public attribute), for an object that
        cannot be looked into as a whole. Raises _Unknown for an object of a library."""
        if _is_of_library(type(value)):
            raise _Unknown
        attributes = []
        for name, attribute in self._attributes(value):
            is_shown = _is_value(attribute) or isinstance(attribute, _SHOWN)
            if not name.startswith("_") and is_shown:
                with contextlib.suppress(_Unknown):
                    attributes.append((name, self.value(attribute, strict=True)))
        return type(value), attributes

    def inside(self, value: object, strict: bool) -> Any:
        """Raises _Unknown deeper than `_MAXIMUM_DEPTH` objects."""
        if len(self._path) > _MAXIMUM_DEPTH:
            raise _Unknown
        self._path.append(id(value))
        try:
            return self._inside(value, strict)
        finally:
            self._path.pop()

    def _inside(self, value: object, strict: bool) -> Any:
        """Return (class, contents) by the kind of object: elements, bytes, what a function refers
        to, or attributes. Raises _Unknown for what cannot be looked into, such as a tensor that is
        no constant."""
        if isinstance(value, _READABLE):
            self.sources += _sources(value)
            return type(value), self._elements(value, strict)
        if isinstance(value, _UNTOLD):
            self.sources += UNTOLD
        if isinstance(value, _BUFFERS):
            return self._buffer(value)
        if isinstance(value, types.CellType):
            return types.CellType, [self.value(cell_content(value), strict)]
        if isinstance(value, torch.Tensor):
            if self._constants is None or any(value is c for c in self._constants):
                return _Identity(value)
            raise _Unknown
        if isinstance(value, _FUNCTIONS):
            return self._function(value)
        is_of_library = _is_of_library(type(value))
        if is_of_library and callable(value) and not isinstance(value, nn.Module):
            return _Identity(value)
        return type(value), self._named(self._attributes(value), strict=True)

    def _attributes(self, value: object) -> list[tuple[str, Any]]:
        # `use_cache` of a configuration does not count.
        pairs = _attributes(value)
        self.sources += UNTOLD if slots(type(value)) else attributes(value)
        if key_value_cache.configuration_class(type(value)) is None:
            return pairs
        read = self._of_configurations
        is_read = (n != key_value_cache.SWITCH and (read is None or n in read) for n, _ in pairs)
        return [*itertools.compress(pairs, is_read)]

    def _function(self, function: Any) -> Any:
        """The function itself if none of it can change."""
        state = _referred(function)
        if not state:
            return _leaf(function)
        self._functions += 1
        try:
            return type(function), [self.value(v, strict=False) for v in state]
        finally:
            self._functions -= 1

    def _elements(self, value: Any, strict: bool) -> Any:
        """Return the elements of a collection, and the attributes of one of a derived class. Raises
        _Unknown for more than `_MAXIMUM_LENGTH` elements where a function refers to the
        collection."""
        if self._functions and len(value) > _MAXIMUM_LENGTH:
            raise _Unknown
        if isinstance(value, set | frozenset):
            elements: Any = {_leaf(v) for v in value}
            return elements
        if isinstance(value, dict | types.MappingProxyType):
            items = value.items()
            elements = [(self.value(k, strict), self.value(v, strict)) for k, v in items]
        else:
            elements = [self.value(v, strict) for v in value]
        attributes = getattr(value, "__dict__", None)
        if attributes:
            elements.append(self._named(attributes.items(), strict))
        if isinstance(value, defaultdict):
            elements.append(self.value(value.default_factory, strict))
        return elements

    def _named(self, attributes: Iterable[tuple[str, Any]], strict: bool) -> list[Any]:
        return [(name, self.value(v, strict)) for name, v in attributes]

    def _buffer(self, value: bytearray | array[Any] | numpy.ndarray) -> Any:
        """Return the kind, shape and bytes of an array; of an array of objects its shape and
        elements; a large array compares by identity."""
        if isinstance(value, numpy.ndarray) and value.dtype == object:
            return [*value.shape, *(self.value(v, strict=False) for v in value.ravel().tolist())]
        if not is_small(value):
            return _Identity(value)
        if isinstance(value, numpy.ndarray):
            return [value.dtype, *value.shape, *value.strides, value.tobytes()]
        return type(value), [getattr(value, "typecode", ""), bytes(value)]


def _sources(value: Any) -> Sources:
    kind = id(type(value))
    if kind in _LISTS:
        return ELEMENTS, value
    return () if kind in _FIXED else items(value)


def _referred(function: Any) -> tuple[Any, ...]:
    """Return the objects that decide what a function does and may change: code, cells, defaults and
    attributes of a function; function and object of a method; function and arguments of a partial.
    Empty if there are none."""
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    if isinstance(function, types.MethodType):
        return function.__func__, function.__self__
    if isinstance(function, _BOUND_IN_C):
        owner = function.__self__
        fixed = owner is None or isinstance(owner, types.ModuleType | type | torch.Tensor)
        return () if fixed else (function.__name__, owner)
    if root_package(function) == "torch" or root_package(function) in sys.stdlib_module_names:
        return ()
    cells = tuple(map(cell_content, function.__closure__ or ()))
    state = (*cells, *(function.__defaults__ or ()))
    named = function.__kwdefaults__, function.__dict__
    if not state and not any(named):
        return ()
    return (function.__code__, *state, *named)


def _leaf(value: Any) -> Any:
    """2, 2.0 and True differ, 0.0 and -0.0 differ, and NaN equals NaN."""
    kind = type(value)
    if kind is str or kind is int or value is None:
        return value
    if isinstance(value, numpy.generic):
        return value.dtype, value.tobytes()
    if isinstance(value, float):
        return kind, float.hex(value)
    if isinstance(value, complex):
        return kind, (value.real.hex(), value.imag.hex())
    if isinstance(value, slice):  # has no hash before Python 3.12, and may hold anything
        parts = value.start, value.stop, value.step
        return kind, [_leaf(v) if _is_value(v) else _Identity(v) for v in parts]
    return kind, value


def _attributes(value: object) -> list[tuple[str, Any]]:
    """Return (name, value) of the attributes of an object, in its dictionary and its slots. Raises
    _Unknown if it has none, or is a module or a tensor."""
    attributes = getattr(value, "__dict__", None)
    named = slots(type(value))
    has_none = not isinstance(attributes, dict) and not named
    if has_none or isinstance(value, nn.Module | torch.Tensor | types.ModuleType):
        raise _Unknown
    pairs = list(attributes.items()) if isinstance(attributes, dict) else []
    if named:
        held = slots_held(value)
        pairs += [(key if isinstance(key, str) else repr(key), inside) for key, inside in held]
    return pairs


@once_for_each_class
def _is_of_library(kind: type) -> bool:
    if any(kind is known for known in _NAMESPACES):
        return False
    roots = [*map(root_package, kind.__mro__)]
    return "torch" in roots or roots[0] in sys.stdlib_module_names
