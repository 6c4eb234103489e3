"""Contents: what is in the lists, dictionaries and configuration objects that a module refers to,
as a value that compares equal until something in them changes."""

from __future__ import annotations

import enum
import types
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
