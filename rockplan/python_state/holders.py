"""Holders: objects that hold other objects and can be changed, and the places that messages and
addresses name.

takes: any object. returns: (owner, row of `object_slots`) for each way in which it holds others.
"""

from __future__ import annotations

import argparse
import contextvars
import functools
import gc
import io
import queue
import threading
import types
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from rockplan.python_state.object_slots import (
    ARGUMENTS,
    ARRAY,
    ATTRIBUTES,
    CELL,
    CLASS,
    CONTENT,
    CONTEXT,
    DEFAULTS,
    DEQUE,
    GENERATOR,
    ITEMS,
    LIST,
    OF_CLASS,
    OF_TENSOR,
    RANDOM,
    SET,
    SLOTS,
    TEXT,
    WAITING,
    Bytes,
    Element,
    Kind,
    Namespace,
    slots,
)
from rockplan.values.classes import once_for_each_class
from rockplan.values.interface import ABSENT, Address

# Arrays up to this size are copied at a recording and compared at every call (about 0.1 ms a MiB).
_MAXIMUM_ARRAY_BYTES = 1 << 20
_ARRAYS = (bytearray, array, numpy.ndarray)


@dataclass(frozen=True, slots=True)
class Holder:
    """An owner, and the row of `object_slots` by which it holds elements."""

    owner: Any
    kind: Kind

    @property
    def elements(self) -> list[Element]:
        return self.kind.elements(self.owner)

    def write(self, elements: list[Element]) -> None:
        self.kind.write(self.owner, elements)

    def put(self, key: Any, value: object) -> None:
        """Set one element; `ABSENT` removes it. Other elements stay."""
        others = {**dict(self.elements), key: value}
        self.write([(k, v) for k, v in others.items() if v is not ABSENT])


HOLDING_NOTHING = (type(None), bool, int, float, complex, str, bytes)

# Classes of keys that find the same element again later.
_FOUND_AGAIN = (*HOLDING_NOTHING, tuple, torch.dtype, torch.device, type)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object is. text: 'self.tables', 'TABLES[4]', "the argument 'x'"; module: path of the
    submodule that holds it, if one does; is_callers: it is part of an argument of the call;
    address: steps that lead to it again later, None if there are none; is_guarded: it is the
    user's, beside arguments and attributes of modules (for which other guards are)."""

    text: str
    module: str | None = None
    is_callers: bool = False
    address: Address | None = None
    is_guarded: bool = False

    def __str__(self) -> str:
        if self.module is not None:
            return f"{self.text} of module '{self.module or '(root)'}'"
        if self.address is not None and self.address[0] == "file":
            return f"{self.text} of {self.address[1]}"
        return self.text

    @property
    def is_users(self) -> bool:
        """True for a place of the module, of the caller's arguments or of the user's files; False
        for one of a library."""
        return self.module is not None or self.is_callers or self.is_guarded

    @property
    def is_of_files(self) -> bool:
        """True for a place of files that are imported, the user's or a library's; False for one of
        the module or of the caller's arguments."""
        return self.module is None and not self.is_callers

    def inside(self, text: str, step: str | None, key: Any) -> Place:
        """Return the place of an element of this place, named `text` in messages. step: 'attribute'
        or 'item', by which `key` finds the element again; None if no address leads there."""
        address = self.address
        if address is not None:
            kind, root, steps = address
            is_found = step is not None and isinstance(key, _FOUND_AGAIN)
            address = (kind, root, (*steps, (str(step), key))) if is_found else None
        return Place(text, self.module, self.is_callers, address, self.is_guarded)

    def unaddressed(self, text: str, is_guarded: bool) -> Place:
        """Return a place like this one under another name and without an address."""
        return Place(text, self.module, self.is_callers, None, is_guarded)

    def guarded(self) -> Place:
        if self.is_callers or self.is_guarded:
            return self
        return Place(self.text, self.module, self.is_callers, self.address, is_guarded=True)


Identity = tuple[int, int]


def identity_of(owner: Any, kind: Kind) -> Identity:
    """Return a key that stays the same whenever the holder is reached."""
    known = owner.variables if isinstance(owner, Namespace) else owner
    return id(known), id(kind)


@dataclass(frozen=True, slots=True)
class Held(Holder):
    """A holder that can be changed, and its place. is_registry: it is `_parameters`, `_buffers` or
    `_modules` of a module."""

    place: Place
    is_registry: bool = False

    @property
    def identity(self) -> Identity:
        """A key that stays the same whenever the holder is reached."""
        return identity_of(self.owner, self.kind)

    def element(self, key: Any) -> Place:
        """Return the place of an element."""
        return self.place.inside(self.kind.named(self.place.text, key), self.kind.step, key)


def holder_at(owner: Any, step: str, key: Any) -> Holder:
    """Return the holder by which `owner` has the element of this step ('attribute' or 'item') and
    key. Raises LookupError if it has none."""
    if isinstance(owner, types.ModuleType):
        return Holder(vars(owner), ITEMS)
    if isinstance(owner, type):
        return Holder(owner, CLASS)
    named: dict[Kind, Any] = {SLOTS: slots(type(owner)), ARGUMENTS: ("args",)}
    for held, kind in reversed(kinds_of(owner)):
        if kind.step == step and key in named.get(kind, (key,)):
            return Holder(held, kind)
    raise LookupError(key)


# Classes of the standard library and of numpy that keep what users give them.
_KEEPERS = (
    *(*_ARRAYS, types.CellType, contextvars.ContextVar),
    *(UserDict, UserList, ChainMap, threading.local, types.SimpleNamespace),
    *(argparse.Namespace, queue.Queue, queue.SimpleQueue, BaseException, io.StringIO, io.BytesIO),
    *(*RANDOM, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)


def kinds_of(value: object) -> list[tuple[Any, Kind]]:
    """Return (owner, row of `object_slots`) for each way in which `value` holds elements that can
    be replaced.

    Immutable values have none. The owner of an object's attributes is its dictionary.
    """
    plain = _PLAIN.get(id(type(value)))
    if plain is not None:
        return [(value, plain)]
    if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return [(value, ARRAY)] if value.dtype == object else []
    if isinstance(value, _ARRAYS):
        is_fixed = isinstance(value, numpy.ndarray) and not value.flags.writeable
        return [] if is_fixed or not is_small(value) else [(value, CONTENT)]
    kind = type(value)
    kinds: list[tuple[Any, Kind]] = [(value, own) for own in _own_kinds(kind)]
    if kinds and kinds[0][1] in _ALONE:
        return kinds[:1]
    attributes = _attributes(value)
    if isinstance(attributes, dict):
        kinds.append((attributes, OF_TENSOR if isinstance(value, torch.Tensor) else ATTRIBUTES))
    if slots(kind):
        kinds.append((value, SLOTS))
    return kinds


def _attributes(value: object) -> object:
    try:
        return getattr(value, "__dict__", None)
    except Exception:  # stand-ins of libraries (pydantic's) raise what they like, whatever is asked
        return None


_PLAIN = {
    id(kind): row
    for kind, row in (
        *((dict, ITEMS), (list, LIST), (deque, DEQUE), (set, SET)),
        (types.CellType, CELL),
    )
}
"""Class, by identity -> row. For these very classes, not derived ones: they have no attributes."""

_ALONE = (CELL, CONTEXT, WAITING, TEXT, GENERATOR)
"""Rows of objects whose attributes are not listed."""


@once_for_each_class
def _own_kinds(kind: type) -> tuple[Kind, ...]:
    """Return the rows of `object_slots` that say how objects of a class hold others, apart from
    attributes (a list's items, a cell's content); () for a class that holds none."""
    rows: tuple[tuple[type | tuple[type, ...], Kind], ...] = (
        (types.CellType, CELL),
        (contextvars.ContextVar, CONTEXT),
        (queue.SimpleQueue, WAITING),
        ((io.StringIO, io.BytesIO), TEXT),
        (RANDOM, GENERATOR),
        (dict, ITEMS),
        (list, LIST),
        (deque, DEQUE),
        (set, SET),
        (types.FunctionType, DEFAULTS),
        (BaseException, ARGUMENTS),
        (nn.Module, OF_CLASS),
    )
    return tuple(row for kinds, row in rows if issubclass(kind, kinds))


def is_function_cache(value: object) -> bool:
    """True for a function with functools.lru_cache."""
    return isinstance(value, functools._lru_cache_wrapper)


def cached_in(cache: Any) -> Iterator[Any]:
    """Yield the arguments and results that a functools.lru_cache keeps, and the elements of tuples,
    lists and dictionaries among them."""
    waiting: list[Any] = gc.get_referents(cache) if cache.cache_info().currsize else []
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, tuple | list | dict) and id(value) not in seen:
            seen.add(id(value))
            waiting += gc.get_referents(value)


def is_keeper(value: object) -> bool:
    """True for library classes whose objects are the user's state."""
    return _is_of_keepers(type(value))


@once_for_each_class
def _is_of_keepers(kind: type) -> bool:
    # By identity: isinstance asks an abstract class, which needs a hash.
    return any(base is keeper for base in kind.__mro__ for keeper in _KEEPERS)


def is_opaque_keeper(value: object) -> bool:
    """True for keepers that comparisons of attributes do not look into."""
    seen = (*_ARRAYS, *RANDOM, types.CellType, types.SimpleNamespace, argparse.Namespace)
    return is_keeper(value) and not isinstance(value, seen)


def is_small(value: Any) -> bool:
    """True if a buffer is small enough to copy at each recording and compare at each call."""
    if isinstance(value, numpy.ndarray):
        return not value.dtype.hasobject and value.nbytes <= _MAXIMUM_ARRAY_BYTES
    return memoryview(value).nbytes <= _MAXIMUM_ARRAY_BYTES


def same_elements(one: list[Element], other: list[Element]) -> bool:
    """True if both lists have the same objects in the same order."""
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Element, other: Element) -> bool:
    (key, value), (other_key, other_value) = one, other
    if value is not other_value:
        is_content = type(value) is type(other_value) and isinstance(value, _CONTENT)
        if not (is_content and value == other_value):
            return False
    return key is other_key or (type(key) in (int, str) and bool(key == other_key))


_CONTENT = (Bytes, str, bytes, int)


def replaced(value: Any, of: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """Return `value` with each tensor t in it (itself, in tuples, behind a weak reference) replaced
    by `of(t)`, unless that is None; the same object if nothing is replaced."""
    if isinstance(value, torch.Tensor):
        other = of(value)
        return value if other is None else other
    if type(value) is weakref.ref:
        inner = replaced(value(), of)
        return value if inner is value() else weakref.ref(inner)
    if not isinstance(value, tuple):
        return value
    elements = [replaced(v, of) for v in value]
    if all(a is b for a, b in zip(elements, value, strict=True)):
        return value
    return value._make(elements) if hasattr(value, "_make") else type(value)(elements)


@once_for_each_class
def _is_of_nodes(kind: type) -> bool:
    """True for classes of autograd nodes. (Their abstract class needs a hash of the class, which
    may have none.)"""
    try:
        return issubclass(kind, torch.autograd.graph.Node)
    except TypeError:
        return False


def tensors_in(value: Any) -> Iterable[Any]:
    """Yield the tensors and autograd nodes that `value` is, holds in tuples and frozen sets, or
    refers to by a weak reference."""
    if isinstance(value, torch.Tensor) or _is_of_nodes(type(value)):
        yield value
    elif isinstance(value, tuple | frozenset):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, weakref.ref):
        yield from tensors_in(value())
