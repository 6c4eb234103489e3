"""Holders: objects that hold others and can be changed: how to read, write and name their elements.

takes: any object. returns: its kinds of elements, as rows of one table. guarantees: reading and
writing an element calls no code of the object's class (dictionaries that import or compute what
they are asked for stay as they are).
"""

from __future__ import annotations

import argparse
import contextvars
import functools
import io
import queue
import threading
import types
import weakref
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from rockplan.values.classes import once_for_each_class

Element = tuple[Any, Any]
"""(key, position or name of an element; the element)"""

# Copied where a forward is recorded, and compared at every call: 1 MiB takes about 0.1 ms.
_MAXIMUM_ARRAY_BYTES = 1 << 20
_ARRAYS = (bytearray, array, numpy.ndarray)
_NOTHING = object()
_LONGEST_KEY = 40


@dataclass(frozen=True, slots=True)
class Kind:
    """elements: of an owner, in order; write: makes them what it holds, where they are others;
    named: what a message calls an element, from the name of the owner and the key; step: the key
    is that of an 'attribute' or an 'item'; 'all': the elements are set together; None: they cannot
    be set later."""

    elements: Callable[[Any], list[Element]]
    write: Callable[[Any, list[Element]], None]
    named: Callable[[str, Any], str]
    step: str | None = None


@dataclass(frozen=True, slots=True)
class Namespace:
    """Of global variables those that code names."""

    variables: dict[str, Any]
    names: frozenset[str]


def _key(owner: str, key: Any) -> str:
    text = repr(key) if isinstance(key, (str, int, float, bool, bytes, type(None), tuple)) else ""
    short = text if 0 < len(text) <= _LONGEST_KEY else type(key).__name__
    return f"{owner}[{short}]"


def _attribute(owner: str, key: Any) -> str:
    return f"{owner}.{key if isinstance(key, str) else key.__name__}"


def _itself(owner: str, key: Any) -> str:
    return owner


def _variable(owner: str, key: Any) -> str:
    return str(key)


def _default(owner: str, key: Any) -> str:
    return f"the default {key!r} of {owner}"


def _base(owner: Any) -> Any:
    return OrderedDict if isinstance(owner, OrderedDict) else dict


def _items(owner: Any) -> list[Element]:
    return [*owner.items()] if type(owner) is dict else [*_base(owner).items(owner)]


def _write_items(owner: Any, elements: list[Element]) -> None:
    base = _base(owner)
    if [*map(id, base.keys(owner))] != [id(key) for key, _ in elements]:
        base.clear(owner)
    for key, value in elements:
        if base.get(owner, key, _NOTHING) is not value:
            base.__setitem__(owner, key, value)


def _list(owner: Any) -> list[Element]:
    return [*enumerate(list.__iter__(owner))]


def _write_list(owner: Any, elements: list[Element]) -> None:
    list.__setitem__(owner, slice(None), [value for _, value in elements])


def _deque(owner: Any) -> list[Element]:
    return [*enumerate(deque.__iter__(owner))]


def _write_deque(owner: Any, elements: list[Element]) -> None:
    deque.clear(owner)
    deque.extend(owner, [value for _, value in elements])


def _set(owner: Any) -> list[Element]:
    """Members are their own keys."""
    return [(value, value) for value in set.__iter__(owner)]


def _write_set(owner: Any, elements: list[Element]) -> None:
    set.clear(owner)
    _rewind(owner, len(elements))
    set.update(owner, [value for _, value in elements])


def _rewind(empty: set[Any], length: int) -> None:
    """`pop` goes on in the table of a set where the last one found something, also after `clear`:
    from the start again, of tables for up to `length` members."""
    last = (1 << max(6, (16 * length).bit_length())) - 1
    set.update(empty, range(last + 1))
    for other in range(last):
        set.discard(empty, other)  # which leaves the table as large as it is
    set.pop(empty)
    set.clear(empty)


def _cell(owner: types.CellType) -> list[Element]:
    try:
        return [("", owner.cell_contents)]
    except ValueError:  # it is empty
        return []


def _write_cell(owner: types.CellType, elements: list[Element]) -> None:
    if elements:
        owner.cell_contents = elements[0][1]
    else:
        del owner.cell_contents


def slots_held(owner: Any) -> list[Element]:
    """What is in the slots of an object."""
    held = ((key, _slot(slot, owner)) for key, slot in slots(_kind(owner)).items())
    return [(key, value) for key, value in held if value is not _NOTHING]


def _slot(slot: types.MemberDescriptorType, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:  # it is empty
        return _NOTHING


def _write_slots(owner: Any, elements: list[Element]) -> None:
    wanted = dict(elements)
    for key, slot in slots(_kind(owner)).items():
        if key in wanted:
            slot.__set__(owner, wanted[key])
        elif _slot(slot, owner) is not _NOTHING:
            slot.__delete__(owner)


def _class(owner: type) -> list[Element]:
    return [(k, v) for k, v in vars(owner).items() if not _is_of_every_class(k)]


def _is_of_every_class(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _write_class(owner: type, elements: list[Element]) -> None:
    now, wanted = dict(_class(owner)), dict(elements)
    for name in now.keys() - wanted.keys():
        type.__delattr__(owner, name)
    for name, value in wanted.items():
        if now.get(name, _NOTHING) is not value:
            type.__setattr__(owner, name, value)


def _namespace(owner: Namespace) -> list[Element]:
    held = owner.variables
    return [(name, held[name]) for name in sorted(owner.names) if name in held]


def _write_namespace(owner: Namespace, elements: list[Element]) -> None:
    wanted = dict(elements)
    for name in owner.names:
        if name in wanted:
            owner.variables[name] = wanted[name]
        else:
            owner.variables.pop(name, None)


def _context(owner: contextvars.ContextVar[Any]) -> list[Element]:
    value = owner.get(_NOTHING)
    return [] if value is _NOTHING else [("", value)]


def _write_context(owner: contextvars.ContextVar[Any], elements: list[Element]) -> None:
    owner.set(elements[0][1] if elements else None)


def _defaults(owner: types.FunctionType) -> list[Element]:
    positional = [*enumerate(owner.__defaults__ or ())]
    return [*positional, *(owner.__kwdefaults__ or {}).items()]


def _write_defaults(owner: types.FunctionType, elements: list[Element]) -> None:
    positional = tuple(value for key, value in elements if isinstance(key, int))
    named = {key: value for key, value in elements if isinstance(key, str)}
    owner.__defaults__ = positional or None
    owner.__kwdefaults__ = named or None


def _array(owner: Any) -> list[Element]:
    is_row = owner.ndim == 1
    return [(i[0] if is_row else i, owner[i]) for i in numpy.ndindex(owner.shape)]


def _write_array(owner: Any, elements: list[Element]) -> None:
    for position, value in elements:
        owner[position] = value


def _of_class(owner: Any) -> list[Element]:
    return [("__class__", type(owner))]


def _write_of_class(owner: Any, elements: list[Element]) -> None:
    object.__setattr__(owner, "__class__", elements[0][1])


def _arguments(owner: BaseException) -> list[Element]:
    return [("args", owner.args)]


def _write_arguments(owner: BaseException, elements: list[Element]) -> None:
    owner.args = elements[0][1]


def _text(owner: Any) -> list[Element]:
    return [] if owner.closed else [("", owner.getvalue())]


def _write_text(owner: Any, elements: list[Element]) -> None:
    for _, text in elements:
        owner.seek(0)
        owner.truncate()
        owner.write(text)


def _waiting(owner: queue.SimpleQueue[Any]) -> list[Element]:
    return [("", owner.qsize())]


def _write_waiting(owner: queue.SimpleQueue[Any], elements: list[Element]) -> None:
    """What came last goes."""
    items = [owner.get_nowait() for _ in range(owner.qsize())]
    for value in items[: elements[0][1]]:
        owner.put(value)


def _content(owner: Any) -> list[Element]:
    return [("", _Bytes.of(owner))]


def _write_content(owner: Any, elements: list[Element]) -> None:
    elements[0][1].write(owner)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """What was in an array; equal to what has the same bytes."""

    content: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, owner: Any) -> _Bytes:
        if isinstance(owner, numpy.ndarray):
            return cls(owner.tobytes(), owner.shape)
        return cls(bytes(owner), ())

    def write(self, owner: Any) -> None:
        if isinstance(owner, numpy.ndarray):
            owner[...] = numpy.frombuffer(self.content, owner.dtype).reshape(self.shape)
        elif isinstance(owner, array):
            owner[:] = array(owner.typecode, self.content)
        else:
            owner[:] = self.content


def write_all(owner: Any, values: list[Any]) -> None:
    """A list, a queue or a set holds these and no others."""
    kind = LIST if isinstance(owner, list) else DEQUE if isinstance(owner, deque) else SET
    kind.write(owner, [*enumerate(values)])


ITEMS = Kind(_items, _write_items, _key, "item")
ATTRIBUTES = Kind(_items, _write_items, _attribute, "attribute")
OF_TENSOR = Kind(_items, _write_items, _attribute, "attribute")
LIST = Kind(_list, _write_list, _key, "all")
DEQUE = Kind(_deque, _write_deque, _key, "all")
SET = Kind(_set, _write_set, _itself, "all")
ARRAY = Kind(_array, _write_array, _key, "item")
CELL = Kind(_cell, _write_cell, _itself)
SLOTS = Kind(slots_held, _write_slots, _attribute, "attribute")
CLASS = Kind(_class, _write_class, _attribute, "attribute")
NAMESPACE = Kind(_namespace, _write_namespace, _variable, "attribute")
WAITING = Kind(_waiting, _write_waiting, _itself)
CONTEXT = Kind(_context, _write_context, _itself)
DEFAULTS = Kind(_defaults, _write_defaults, _default)
OF_CLASS = Kind(_of_class, _write_of_class, _attribute)
ARGUMENTS = Kind(_arguments, _write_arguments, _attribute, "attribute")
TEXT = Kind(_text, _write_text, _itself)
CONTENT = Kind(_content, _write_content, _itself)


@dataclass(frozen=True, slots=True)
class Holder:
    """One that no name leads to (a cell, a context variable): copies of what refers to it refer to
    it as well, and a pickle to nothing."""

    owner: Any
    kind: Kind

    def __deepcopy__(self, memo: object) -> Holder:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()

    def get(self, key: Any, default: object) -> Any:
        return dict(self.kind.elements(self.owner)).get(key, default)

    def set(self, elements: dict[Any, Any]) -> None:
        """These, and what else there is."""
        self.kind.write(self.owner, [*(dict(self.kind.elements(self.owner)) | elements).items()])

    def pop(self, key: Any) -> None:
        elements = dict(self.kind.elements(self.owner))
        elements.pop(key, None)
        self.kind.write(self.owner, [*elements.items()])


# Classes of the standard library and of numpy that keep what users give them.
_KEEPERS = (
    *(*_ARRAYS, types.CellType, contextvars.ContextVar),
    *(UserDict, UserList, ChainMap, threading.local, types.SimpleNamespace),
    *(argparse.Namespace, queue.Queue, queue.SimpleQueue, BaseException, io.StringIO, io.BytesIO),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)


def kinds_of(value: object) -> list[tuple[Any, Kind]]:
    """(owner, kind) of what `value` holds and can hold others of; none for what never changes.

    Of an object with attributes that is no class, function or module of Python's."""
    plain = _PLAIN.get(id(type(value)))
    if plain is not None:
        return [(value, plain)]
    if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return [(value, ARRAY)] if value.dtype == object else []
    if isinstance(value, _ARRAYS):
        is_fixed = isinstance(value, numpy.ndarray) and not value.flags.writeable
        return [] if is_fixed or not is_small(value) else [(value, CONTENT)]
    kind = _kind(value)
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

_ALONE = (CELL, CONTEXT, WAITING, TEXT)
"""Objects that hold in this way are not asked for attributes."""


@once_for_each_class
def _own_kinds(kind: type) -> tuple[Kind, ...]:
    """How objects of a class hold what is not in attributes."""
    rows: tuple[tuple[type | tuple[type, ...], Kind], ...] = (
        (types.CellType, CELL),
        (contextvars.ContextVar, CONTEXT),
        (queue.SimpleQueue, WAITING),
        ((io.StringIO, io.BytesIO), TEXT),
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


def is_keeper(value: object) -> bool:
    """Is it of a class of a library whose objects are the user's state?"""
    return _is_of_keepers(_kind(value))


@once_for_each_class
def _is_of_keepers(kind: type) -> bool:
    # Abstract classes ask for a hash of it.
    return any(base is keeper for base in kind.__mro__ for keeper in _KEEPERS)


def is_opaque_keeper(value: object) -> bool:
    """Is it one that comparisons of attributes do not look into?"""
    seen = (*_ARRAYS, types.CellType, types.SimpleNamespace, argparse.Namespace)
    return is_keeper(value) and not isinstance(value, seen)


def is_small(value: Any) -> bool:
    """May what is in a buffer be copied?"""
    if isinstance(value, numpy.ndarray):
        return not value.dtype.hasobject and value.nbytes <= _MAXIMUM_ARRAY_BYTES
    return memoryview(value).nbytes <= _MAXIMUM_ARRAY_BYTES


def _kind(value: object) -> Any:
    return type(value)


@once_for_each_class
def slots(kind: type) -> dict[Any, types.MemberDescriptorType]:
    """The slots that classes of Python declare: by name, or by themselves where something else
    has that name in a class that is derived from theirs."""
    found: dict[Any, types.MemberDescriptorType] = {}
    taken: set[str] = set()
    for base in kind.__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and "__slots__" in vars(base):
                found[slot if name in taken else name] = slot
        taken |= vars(base).keys()
    return found


def same_elements(one: list[Element], other: list[Element]) -> bool:
    """Are they the very same objects, in this order?"""
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Element, other: Element) -> bool:
    (key, value), (other_key, other_value) = one, other
    if value is not other_value:
        is_content = type(value) is type(other_value) and isinstance(value, _CONTENT)
        if not (is_content and value == other_value):
            return False
    return key is other_key or (type(key) in (int, str) and bool(key == other_key))


_CONTENT = (_Bytes, str, bytes, int)


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
