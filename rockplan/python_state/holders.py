"""Holders: which rows of `object_slots` an object has, where it is, and what follows from that.

takes: any object. returns: (owner, kind) of each way in which it holds others.
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

# Copied where a forward is recorded, and compared at every call: 1 MiB takes about 0.1 ms.
_MAXIMUM_ARRAY_BYTES = 1 << 20
_ARRAYS = (bytearray, array, numpy.ndarray)


@dataclass(frozen=True, slots=True)
class Holder:
    """An owner, and how it holds elements."""

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

# Keys by which an element is found at another time.
_FOUND_AGAIN = (*HOLDING_NOTHING, tuple, torch.dtype, torch.device, type)


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is. text: 'self.tables', 'TABLES[4]', "the argument 'x'"; module: the path of
    the submodule that has it, if one has; is_callers: it is of an argument of the call; address:
    how to come to it at another time, None where there is no way; is_guarded: it is the user's, and
    neither an argument nor what attributes of the module hold, which are compared elsewhere."""

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
        """Is it the module's, the caller's, or of the user's files?"""
        return self.module is not None or self.is_callers or self.is_guarded

    def inside(self, text: str, step: str | None, key: Any) -> Place:
        """Return the place of an element of this place."""
        address = self.address
        if address is not None:
            kind, root, steps = address
            is_found = step is not None and isinstance(key, _FOUND_AGAIN)
            address = (kind, root, (*steps, (str(step), key))) if is_found else None
        return Place(text, self.module, self.is_callers, address, self.is_guarded)

    def unaddressed(self, text: str, is_guarded: bool) -> Place:
        """Where something is that is found by no steps."""
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
    """A holder that can be changed, and where. is_registry: of parameters, buffers or
    submodules."""

    place: Place
    is_registry: bool = False

    @property
    def identity(self) -> Identity:
        """Of the same holder, whenever it is reached."""
        return identity_of(self.owner, self.kind)

    def element(self, key: Any) -> Place:
        """Return the place of an element."""
        step = self.kind.step
        if step == "all":
            step = None if self.kind is SET else "item"
        return self.place.inside(self.kind.named(self.place.text, key), step, key)


def holder_at(owner: Any, step: str, key: Any) -> Holder:
    """Find the holder of the element that this step of an address names. Raises LookupError."""
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
    """List (owner, kind) for each way in which `value` holds elements that can be replaced.

    Immutable values have none. An object with attributes lists its dictionary as the owner.
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
"""Of objects that are of these classes themselves, and so have no attributes."""

_ALONE = (CELL, CONTEXT, WAITING, TEXT, GENERATOR)
"""Objects that hold in this way are not asked for attributes."""


@once_for_each_class
def _own_kinds(kind: type) -> tuple[Kind, ...]:
    """List how objects of a class hold elements beside attributes."""
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
    """Is it a functools.lru_cache?"""
    return isinstance(value, functools._lru_cache_wrapper)


def cached_in(cache: Any) -> Iterator[Any]:
    """Yield what a functools.lru_cache keeps, also inside of tuples, lists and dictionaries."""
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
    # Abstract classes ask for a hash of it.
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
    """`value` with `of(tensor)` for each tensor that it is or weakly refers to, or that tuples in
    it hold; itself where there is none."""
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
    """The class of nodes is abstract, and asks for a hash of others."""
    try:
        return issubclass(kind, torch.autograd.graph.Node)
    except TypeError:
        return False


def tensors_in(value: Any) -> Iterable[Any]:
    """The tensors, and nodes of autograd, that it is, or that tuples and frozen sets in it hold, or
    that it refers to weakly."""
    if isinstance(value, torch.Tensor) or _is_of_nodes(type(value)):
        yield value
    elif isinstance(value, tuple | frozenset):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, weakref.ref):
        yield from tensors_in(value())
