"""Contents: what is in the lists, dictionaries and configuration objects that a module refers to,
as a value that compares equal until something in them changes; and how to put it back.

takes: an attribute of a module, and the tensors that a plan has as constants. returns: Contents.
guarantees: nothing is looked into whose parts are not known: loggers, locks, modules, optimizers.
Of an object that holds one of these, the plain values count that it shows (without an underscore):
what else it has may be a cache or a record that grows with every step.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import functools
import operator
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch import nn

# Values that do not change. Classes and functions compare by identity, as they should.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, Decimal, Fraction, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(numpy.generic, numpy.dtype, PurePath, re.Pattern, range, slice),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
)
# Most are of these, which are found faster.
_USUAL = frozenset({type(None), bool, int, float, str})
_MAXIMUM_DEPTH = 6
# Copied and compared at every call: 1 MiB takes about 0.1 ms.
_MAXIMUM_ARRAY_BYTES = 1 << 20
# Classes of the standard library that are what a class of the user's would be.
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


class _Identity:
    """Stands for an object that is compared by identity."""

    __slots__ = ("_object",)

    def __init__(self, found: object) -> None:
        self._object = found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._object is self._object

    __hash__ = None  # type: ignore[assignment]


class _Unknown(Exception):
    """There is something inside that cannot be looked into."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What was in `container`, as `read` found it."""

    container: object
    constants: tuple[torch.Tensor, ...]
    read: Callable[[object, Sequence[torch.Tensor]], Any]
    found: Any

    def hold(self) -> bool:
        """True if it still is."""
        try:
            return bool(self.read(self.container, self.constants) == self.found)
        except (_Unknown, RuntimeError, ValueError, TypeError):  # == of values of other libraries
            return False


def contents_of(container: object, constants: tuple[torch.Tensor, ...]) -> Contents | None:
    """What is in a list, tuple, dictionary, set or array, or in an object with attributes (a
    configuration). None for what does not change, or cannot be looked into."""
    if isinstance(container, (*_PLAIN, torch.Tensor)) or _is_plain_tuple(container):
        return None
    for read in (_everything, _plain_attributes):
        try:
            return Contents(container, constants, read, read(container, constants))
        except _Unknown:
            continue
    return None


def _is_plain_tuple(value: object) -> bool:
    return isinstance(value, tuple) and all(type(v) in _USUAL for v in value)


def _everything(container: object, constants: Sequence[torch.Tensor]) -> Any:
    return _Reading(constants).inside(container, strict=False)


def _plain_attributes(container: object, constants: Sequence[torch.Tensor]) -> Any:
    if _is_of_library(type(container)):  # type: ignore[arg-type]
        raise _Unknown
    reading = _Reading(constants)
    found = []
    for name, value in _attributes(container):
        if not name.startswith("_") and isinstance(value, (*_PLAIN, torch.Tensor, numpy.ndarray)):
            try:
                found.append((name, reading.value(value, strict=True)))
            except _Unknown:
                continue
    return type(container), found


class _Reading:
    """One pass over a container."""

    def __init__(self, constants: Sequence[torch.Tensor]) -> None:
        self._constants = constants
        self._path: list[int] = []

    def value(self, value: object, strict: bool) -> Any:
        """strict: what cannot be looked into raises _Unknown, and is else compared by identity."""
        if type(value) in _USUAL or isinstance(value, _PLAIN):
            return value
        if id(value) in self._path:
            return "what it is in", self._path.index(id(value))
        try:
            return self.inside(value, strict)
        except _Unknown:
            if strict:
                raise
            return _Identity(value)

    def inside(self, value: object, strict: bool) -> Any:
        if len(self._path) > _MAXIMUM_DEPTH:
            raise _Unknown
        self._path.append(id(value))
        try:
            return self._inside(value, strict)
        finally:
            self._path.pop()

    def _inside(self, value: object, strict: bool) -> Any:
        if isinstance(value, list | tuple):
            return [self.value(v, strict) for v in value]
        if isinstance(value, dict):
            return [(self.value(k, strict), self.value(v, strict)) for k, v in value.items()]
        if isinstance(value, set | frozenset):
            return set(value)
        if isinstance(value, numpy.ndarray):
            return self._array(value)
        if isinstance(value, torch.Tensor):
            if any(value is constant for constant in self._constants):
                return _Identity(value)
            raise _Unknown
        is_of_library = _is_of_library(type(value))  # type: ignore[arg-type]
        if is_of_library and callable(value) and not isinstance(value, nn.Module):
            return _Identity(value)
        return type(value), [(k, self.value(v, strict=True)) for k, v in _attributes(value)]

    @staticmethod
    def _array(array: numpy.ndarray) -> Any:
        if array.dtype.hasobject or array.nbytes > _MAXIMUM_ARRAY_BYTES:
            return _Identity(array)
        return [array.dtype, *array.shape, array.tobytes()]


def _attributes(value: object) -> list[tuple[str, Any]]:
    """Names and values of the attributes of an object, in its dictionary and its slots."""
    attributes = getattr(value, "__dict__", None)
    slots = _slots(type(value))  # type: ignore[arg-type]
    has_none = not isinstance(attributes, dict) and not slots
    if has_none or isinstance(value, nn.Module | torch.Tensor | types.ModuleType):
        raise _Unknown
    found = list(attributes.items()) if isinstance(attributes, dict) else []
    if slots:
        found += [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    return found


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """Names of the slots that classes of Python declare."""
    return tuple(
        name
        for base in kind.__mro__
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType) and "__slots__" in vars(base)
    )


@functools.cache
def _is_of_library(kind: type) -> bool:
    """Derived from a class of PyTorch, or one of the standard library."""
    if kind in _NAMESPACES:
        return False
    roots = [str(base.__module__).partition(".")[0] for base in kind.__mro__]
    return "torch" in roots or roots[0] in sys.stdlib_module_names


_NOTHING = object()
MUTABLE = (list, dict, set, deque)


def data_in(value: object) -> Any:
    """The plain data that `value` is or holds: `contents_of` without functions, what is compared
    by identity, and None, which all stand for nothing."""
    found = _data(_Reading(()).value(value, strict=False))
    return None if found is _NOTHING else found


def _data(frozen: Any) -> Any:
    if frozen is None or isinstance(frozen, _Identity) or callable(frozen):
        return _NOTHING
    if isinstance(frozen, list):
        return [found for found in map(_data, frozen) if found is not _NOTHING]
    if isinstance(frozen, tuple):  # of a name, a key or a type, and what it stands for
        found = _data(frozen[1])
        return _NOTHING if found is _NOTHING else (frozen[0], found)
    return frozen


def parts_of(value: object, depth: int = _MAXIMUM_DEPTH) -> Iterator[Any]:
    """`value`, and what lists, tuples, dictionaries, sets and queues in it hold; of configuration
    objects their dictionaries of attributes, and what those hold."""
    yield value
    if isinstance(value, _PLAIN) or not depth:
        return
    if isinstance(value, (*MUTABLE, tuple)):
        for inner in list(value.values() if isinstance(value, dict) else value):
            yield from parts_of(inner, depth - 1)
    elif _is_configuration(value):
        yield from parts_of(value.__dict__, depth)


def _is_configuration(value: object) -> bool:
    """Are all attributes of an object, which has a dictionary of them, plain data?"""
    try:
        found = _Reading(()).inside(value, strict=True)
    except _Unknown:
        return False
    return not isinstance(found, _Identity) and isinstance(getattr(value, "__dict__", None), dict)


def elements_of(container: Any) -> list[Any]:
    """What is directly in a container that can change, for `put_back`."""
    return [*container.items()] if isinstance(container, dict) else [*container]


def put_back(container: Any, elements: list[Any]) -> None:
    """Make `elements` the content of `container` again, if it is not."""
    now = elements_of(container)
    same = _is_same_item if isinstance(container, dict) else operator.is_
    if len(now) == len(elements) and all(map(same, now, elements)):
        return
    container.clear()
    if isinstance(container, dict):
        container.update(dict(elements))
    elif isinstance(container, set):
        container.update(elements)
    else:
        container.extend(elements)


def _is_same_item(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return a[0] is b[0] and a[1] is b[1]
