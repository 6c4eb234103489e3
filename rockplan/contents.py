"""Contents: what is in the lists, dictionaries and configuration objects that a module refers to,
as a value that compares equal until something in them changes; and how to put it back."""

from __future__ import annotations

import enum
import operator
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

# Classes and functions compare by identity, as they should.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(type, types.FunctionType, types.BuiltinFunctionType),
)
_MAXIMUM_DEPTH = 6


class _Identity:
    """Stands for an object that is compared by identity."""

    __slots__ = ("_object",)

    def __init__(self, found: object) -> None:
        self._object = found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._object is self._object

    __hash__ = None  # type: ignore[assignment]


def contents_of(container: object) -> Any:
    """What is in `container`: a list, tuple, dictionary or set, elements that are no plain data
    by identity, or an object whose attributes are all plain data (a configuration). None for
    anything else: loggers, locks, modules and tensors are not looked into."""
    if isinstance(container, list | tuple | dict | set | frozenset):
        return _frozen(container, _MAXIMUM_DEPTH)
    return _configuration(container, _MAXIMUM_DEPTH)


def _frozen(value: object, depth: int) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if depth:
        if isinstance(value, list | tuple):
            return [_frozen(v, depth - 1) for v in value]
        if isinstance(value, dict):
            return [(_frozen(k, depth - 1), _frozen(v, depth - 1)) for k, v in value.items()]
        if isinstance(value, set | frozenset):
            return set(value)
        found = _configuration(value, depth)
        if found is not None:
            return found
    return _Identity(value)


def _configuration(value: object, depth: int) -> Any:
    """Attributes of an object, if all of them are plain data, else None."""
    if callable(value) or not depth:
        return None
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, torch.Tensor):
        return None
    found = [(k, _frozen(v, depth - 1)) for k, v in attributes.items()]
    return None if _has_identity(found) else (type(value), found)


def _has_identity(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_identity, value))
    return isinstance(value, _Identity)


_NOTHING = object()
MUTABLE = (list, dict, set, deque)


def data_in(value: object) -> Any:
    """The plain data that `value` is or holds: `contents_of` without functions, what is compared
    by identity, and None, which all stand for nothing."""
    found = _data(_frozen(value, _MAXIMUM_DEPTH))
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
    if _configuration(value, depth) is not None:
        yield from parts_of(value.__dict__, depth)
    elif isinstance(value, (*MUTABLE, tuple)):
        for inner in list(value.values() if isinstance(value, dict) else value):
            yield from parts_of(inner, depth - 1)


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
