"""Object slots: one table of how objects hold others and can be changed.

Each row (`Kind`) lists the elements of an owner, writes them, and names one. guarantees: reading
and writing calls no code of the owner's class (a dictionary that imports or computes values when
asked for them is not asked).
"""

from __future__ import annotations

import contextvars
import pickle
import queue
import random
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from rockplan.values.classes import once_for_each_class

Element = tuple[Any, Any]
"""(key, position or name of an element; the element)"""

_NOTHING: Any = object()
_LONGEST_KEY = 40


@dataclass(frozen=True, slots=True)
class Kind:
    """One way in which objects hold elements. elements: list those of an owner, in order; write:
    make the owner hold exactly these elements; named: name an element in a message, from the name
    of the owner and the key; step: the key finds an 'attribute' or an 'item'; None: no address
    leads to an element."""

    elements: Callable[[Any], list[Element]]
    write: Callable[[Any, list[Element]], None]
    named: Callable[[str, Any], str]
    step: str | None = None


@dataclass(frozen=True, slots=True)
class Namespace:
    """Global variables of a file, and the names among them that reached code has."""

    variables: dict[str, Any]
    names: frozenset[str]


# Names of elements


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


# Rows of owners of one value, and of owners whose elements are set one by one


def _one(
    read: Callable[[Any], Any],
    put: Callable[[Any, Any], object],
    named: Callable[[str, Any], str] = _itself,
    key: str = "",
    step: str | None = None,
    clear: Callable[[Any], object] = lambda owner: None,
) -> Kind:
    """Return the row of owners of one value. read: returns it, `_NOTHING` for an empty owner; put:
    sets it; clear: empties the owner; named, key, step: as in `Kind`."""

    def elements(owner: Any) -> list[Element]:
        value = read(owner)
        return [] if value is _NOTHING else [(key, value)]

    def write(owner: Any, wanted: list[Element]) -> None:
        if wanted:
            put(owner, wanted[0][1])
        else:
            clear(owner)

    return Kind(elements, write, named, step)


def _each(
    elements: Callable[[Any], list[Element]],
    put: Callable[[Any, Any, Any], object],
    drop: Callable[[Any, Any], object],
    named: Callable[[str, Any], str],
) -> Kind:
    """Return the row of owners of attributes that are set one by one. put(owner, key, value);
    drop(owner, key)."""

    def write(owner: Any, wanted: list[Element]) -> None:
        """Drop elements that are not in `wanted`, and set those whose value is another object."""
        now, others = dict(elements(owner)), dict(wanted)
        for key in now.keys() - others.keys():
            drop(owner, key)
        for key, value in others.items():
            if now.get(key, _NOTHING) is not value:
                put(owner, key, value)

    return Kind(elements, write, named, "attribute")


def _sequence(base: Any) -> Kind:
    """Return the row of lists or deques (`base`), which are cleared and filled again."""

    def elements(owner: Any) -> list[Element]:
        return [*enumerate(base.__iter__(owner))]

    def write(owner: Any, wanted: list[Element]) -> None:
        base.clear(owner)
        base.extend(owner, [value for _, value in wanted])

    return Kind(elements, write, _key, "item")


# Reading and writing, kind by kind


def _base(owner: Any) -> Any:
    return OrderedDict if isinstance(owner, OrderedDict) else dict


def _items(owner: Any) -> list[Element]:
    return [*owner.items()] if type(owner) is dict else [*_base(owner).items(owner)]


def _write_items(owner: Any, elements: list[Element]) -> None:
    """Make a dictionary hold these elements, in order; it is cleared only if keys differ."""
    base = _base(owner)
    if [*map(id, base.keys(owner))] != [id(key) for key, _ in elements]:
        base.clear(owner)
    for key, value in elements:
        if base.get(owner, key, _NOTHING) is not value:
            base.__setitem__(owner, key, value)


def _set(owner: Any) -> list[Element]:
    """List the members of a set; members are their own keys."""
    return [(value, value) for value in set.__iter__(owner)]


def _write_set(owner: Any, elements: list[Element]) -> None:
    set.clear(owner)
    _rewind(owner, len(elements))
    set.update(owner, [value for _, value in elements])


def _rewind(emptied: set[Any], length: int) -> None:
    """Reset the position in the hash table from which `set.pop` searches (CPython keeps it, even
    over `clear`), for tables of up to `length` members. The set is empty before and after."""
    last = (1 << max(6, (16 * length).bit_length())) - 1  # more than any such table has slots
    set.update(emptied, range(last + 1))
    for member in range(last):
        set.discard(emptied, member)  # the table does not shrink
    set.pop(emptied)  # the search stops at the last slot: the next one starts at the first
    set.clear(emptied)


def _cell(owner: types.CellType) -> Any:
    try:
        return owner.cell_contents
    except ValueError:  # it is empty
        return _NOTHING


def slots_held(owner: Any) -> list[Element]:
    """List the slots of an object that are filled, with their values."""
    held = ((key, _slot(slot, owner)) for key, slot in slots(type(owner)).items())
    return [(key, value) for key, value in held if value is not _NOTHING]


def _slot(slot: types.MemberDescriptorType, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:  # it is empty
        return _NOTHING


@once_for_each_class
def slots(kind: type) -> dict[Any, types.MemberDescriptorType]:
    """Return the `__slots__` of a class and its bases: name -> slot. A slot whose name a derived
    class uses for something else has itself as the key."""
    found: dict[Any, types.MemberDescriptorType] = {}
    taken: set[str] = set()
    for base in kind.__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and "__slots__" in vars(base):
                found[slot if name in taken else name] = slot
        taken |= vars(base).keys()
    return found


def _class(owner: type) -> list[Element]:
    return [(k, v) for k, v in vars(owner).items() if not _is_of_every_class(k)]


def _is_of_every_class(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _namespace(owner: Namespace) -> list[Element]:
    held = owner.variables
    return [(name, held[name]) for name in sorted(owner.names) if name in held]


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


RANDOM = (
    random.Random,
    numpy.random.Generator,
    numpy.random.BitGenerator,
    numpy.random.RandomState,
)
"""Classes of generators of random numbers."""

_METHODS: dict[str, Any] = {
    "Python's `random`": random.getstate,
    "numpy.random": numpy.random.get_state,
}
EVERYBODYS = {name: method.__self__ for name, method in _METHODS.items()}
"""Name -> the generator that functions of Python's `random` and of numpy.random draw from."""


def _state(owner: Any) -> Any:
    """Return the state of a random generator as bytes; `_NOTHING` for random.SystemRandom."""
    if isinstance(owner, random.SystemRandom):
        return _NOTHING
    if isinstance(owner, random.Random):
        return pickle.dumps(owner.getstate())
    if isinstance(owner, numpy.random.RandomState):
        return pickle.dumps(owner.get_state(legacy=False))
    return pickle.dumps(getattr(owner, "bit_generator", owner).state)


def _set_state(owner: Any, state: bytes) -> None:
    if isinstance(owner, random.Random):
        owner.setstate(pickle.loads(state))
    elif isinstance(owner, numpy.random.RandomState):
        owner.set_state(pickle.loads(state))
    else:
        getattr(owner, "bit_generator", owner).state = pickle.loads(state)


def _rewrite(owner: Any, text: Any) -> None:
    owner.seek(0)
    owner.truncate()
    owner.write(text)


def _shorten(owner: queue.SimpleQueue[Any], length: int) -> None:
    """Keep the first `length` items of a queue."""
    items = [owner.get_nowait() for _ in range(owner.qsize())]
    for value in items[:length]:
        owner.put(value)


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes of an array, which compare equal to the same bytes in the same shape."""

    content: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, owner: Any) -> Bytes:
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


ITEMS = Kind(_items, _write_items, _key, "item")
ATTRIBUTES = Kind(_items, _write_items, _attribute, "attribute")
OF_TENSOR = Kind(_items, _write_items, _attribute, "attribute")
LIST = _sequence(list)
DEQUE = _sequence(deque)
SET = Kind(_set, _write_set, _itself, "item")
ARRAY = Kind(_array, _write_array, _key, "item")
SLOTS = _each(
    slots_held,
    lambda owner, key, value: slots(type(owner))[key].__set__(owner, value),
    lambda owner, key: slots(type(owner))[key].__delete__(owner),
    _attribute,
)
CLASS = _each(_class, type.__setattr__, type.__delattr__, _attribute)
NAMESPACE = _each(
    _namespace,
    lambda owner, key, value: owner.variables.__setitem__(key, value),
    lambda owner, key: owner.variables.pop(key),
    _variable,
)
DEFAULTS = Kind(_defaults, _write_defaults, _default)
CELL = _one(
    _cell,
    lambda owner, value: setattr(owner, "cell_contents", value),
    clear=lambda owner: delattr(owner, "cell_contents"),
)
CONTEXT = _one(
    lambda owner: owner.get(_NOTHING),
    contextvars.ContextVar.set,
    clear=lambda owner: owner.set(None),
)
OF_CLASS = _one(
    type, lambda owner, kind: object.__setattr__(owner, "__class__", kind), _attribute, "__class__"
)
ARGUMENTS = _one(
    lambda owner: owner.args,
    lambda owner, args: setattr(owner, "args", args),
    *(_attribute, "args", "attribute"),
)
GENERATOR = _one(_state, _set_state)
TEXT = _one(lambda owner: _NOTHING if owner.closed else owner.getvalue(), _rewrite)
WAITING = _one(lambda owner: owner.qsize(), _shorten)
CONTENT = _one(Bytes.of, lambda owner, content: content.write(owner))
