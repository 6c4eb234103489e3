"""Elements: what an object refers to, and how to make it refer to that again: a row for each class.

takes: a class (`row_of`). returns: how its objects are read, written and named in messages; None
for objects that compare by identity. guarantees: reading and writing calls no code of the object's
class (a dictionary that imports or computes values when asked for them is not asked).

Where no row says more, an object holds its class, its attributes, its slots, or what Python's
garbage collector says. What installed packages keep for themselves is not looked into: of their
functions only defaults, cells and attributes, of their classes only data.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import io
import itertools
import operator
import pickle
import queue
import random
import re
import sys
import threading
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from rockplan.python_state import code_names
from rockplan.python_state.writes import (
    ELEMENTS,
    UNTOLD,
    Sources,
    Way,
    are_one,
    attributes,
    items,
    of_parts,
)
from rockplan.values.classes import once_for_each_class

Element = tuple[Any, Any]
"""(key, position or name of an element; the element)"""

_NOTHING: Any = object()
_LONGEST_KEY = 40
_LARGEST_ARRAY_BYTES = 1 << 20
"""Arrays up to this size are copied at a recording and compared at every call."""


@dataclass(frozen=True, slots=True)
class Access:
    """How objects of a class hold others. read: list the elements of one, in order; write: make it
    hold exactly these; named: name an element in a message, from the name of the object and the
    key; can_change: other elements may come in place of these; sources: what `read` reads."""

    read: Callable[[Any], list[Element]]
    write: Callable[[Any, list[Element]], object]
    named: Callable[[str, Any], str]
    can_change: bool = True
    sources: Callable[[Any], Sources] = lambda owner: UNTOLD


@dataclass(frozen=True, slots=True)
class Aspect:
    """One of the several ways in which `owner` holds others: its attributes, its items."""

    owner: Any
    row: Access


def _key(owner: str, key: Any) -> str:
    text = repr(key) if isinstance(key, (str, int, float, bool, bytes, type(None), tuple)) else ""
    return f"{owner}[{text if 0 < len(text) <= _LONGEST_KEY else type(key).__name__}]"


def _attribute(owner: str, key: Any) -> str:
    return f"{owner}.{getattr(key, '__name__', key)}"


def _itself(owner: str, key: Any) -> str:
    return f"{owner}.{key}" if key == "__class__" else owner


def _keep(owner: Any, elements: list[Element]) -> None: ...


def _row(
    read: Callable[[Any], Iterable[Element]], write: Any = _keep, named: Any = _itself
) -> Access:
    return Access(lambda owner: [*read(owner)], write, named, write is not _keep)


def _one(
    read: Callable[[Any], Any], put: Callable[[Any, Any], object], clear: Any = lambda owner: None
) -> Access:
    """Return the row of owners of one value. read: returns it, `_NOTHING` for an empty owner; put:
    sets it; clear: empties the owner."""

    def write(owner: Any, elements: list[Element]) -> None:
        if elements:
            put(owner, elements[0][1])
        else:
            clear(owner)

    return _row(lambda owner: (("", v) for v in (read(owner),) if v is not _NOTHING), write)


# Dictionaries, lists, sets


def _base(owner: Any) -> Any:
    return OrderedDict if isinstance(owner, OrderedDict) else dict


def _write_items(owner: Any, elements: list[Element]) -> None:
    """Make a dictionary hold these elements, in order; it is cleared only if keys differ."""
    base = _base(owner)
    if [*map(id, base.keys(owner))] != [id(key) for key, _ in elements]:
        base.clear(owner)
    for key, value in elements:
        if base.get(owner, key, _NOTHING) is not value:
            base.__setitem__(owner, key, value)


def _sequence(base: Any) -> Access:
    def write(owner: Any, elements: list[Element]) -> None:
        base.clear(owner)
        base.extend(owner, [value for _, value in elements])

    return Access(
        lambda owner: [*enumerate(base.__iter__(owner))],
        write,
        _key,
        sources=lambda owner: (ELEMENTS, owner) if type(owner) is base else UNTOLD,
    )


def _members(owner: Any) -> list[Element]:
    # Members are their own keys.
    members = [*(set if isinstance(owner, set) else frozenset).__iter__(owner)]
    plain = [m for m in members if id(type(m)) in PLAIN]
    others = [m for m in members if id(type(m)) not in PLAIN]
    return [(member, member) for member in (*sorted(plain, key=repr), *others)]


def _write_set(owner: set[Any], elements: list[Element]) -> None:
    set.clear(owner)
    set.update(owner, [value for _, value in elements])


ITEMS = Access(
    lambda owner: [*_base(owner).items(owner)],
    _write_items,
    _key,
    sources=items,
)
LIST = _sequence(list)


# Attributes, slots, variables


def attributes_of(owner: object) -> dict[str, Any] | None:
    """Return the dictionary of an object's attributes, None if it has none."""
    try:
        space = object.__getattribute__(owner, "__dict__")
    except Exception:  # stand-ins of libraries raise what they like, whatever is asked
        return None
    return space if isinstance(space, dict) else None


ATTRIBUTES = Access(
    lambda owner: [*(attributes_of(owner) or {}).items()],
    lambda owner, elements: _write_items(attributes_of(owner), elements),
    _attribute,
    sources=attributes,
)


def slots_held(owner: Any) -> list[Element]:
    """List the slots of an object that are filled, with their values."""
    held: list[Element] = []
    for key, slot in slots(type(owner)).items():
        with contextlib.suppress(AttributeError):  # it is empty
            held.append((key, slot.__get__(owner)))
    return held


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


def _each(read: Any, put: Any, drop: Any, named: Callable[[str, Any], str] = _attribute) -> Access:
    """Of owners whose elements are set one by one: put(owner, key, value), drop(owner, key)."""

    def write(owner: Any, elements: list[Element]) -> None:
        now, wanted = dict(read(owner)), dict(elements)
        for key in now.keys() - wanted.keys():
            drop(owner, key)
        for key, value in wanted.items():
            if now.get(key, _NOTHING) is not value:
                put(owner, key, value)

    return Access(read, write, named)


SLOTS = _each(
    slots_held,
    lambda owner, key, value: slots(type(owner))[key].__set__(owner, value),
    lambda owner, key: slots(type(owner))[key].__delete__(owner),
)


def _of_class(kind: type) -> list[Element]:
    is_users = not code_names.is_library(kind.__module__)

    def counts(name: str, value: Any) -> bool:
        if name.startswith("__") and name.endswith("__"):
            return is_users and type(value) is types.FunctionType and name not in _MAKING
        is_dynamos = name.startswith("___")  # set at its first call of something compiled
        return is_users or not (is_dynamos or callable(value) or hasattr(type(value), "__get__"))

    return [element for element in vars(kind).items() if counts(*element)]


_MAKING = ("__init__", "__new__", "__init_subclass__", "__del__")
_SET_ON_CLASS = _each(_of_class, type.__setattr__, type.__delattr__)
_VARIABLES_OF_CLASS = of_parts(lambda kind: (*vars(kind), *vars(kind).values()))
ON_CLASS = replace(_SET_ON_CLASS, sources=lambda kind: (_VARIABLES_OF_CLASS, kind))


def _class(kind: type) -> list[Element]:
    is_followed = not code_names.is_library(kind.__module__) or issubclass(kind, nn.Module)
    bases = kind.__mro__[1:] if is_followed else ()
    return [("", Aspect(kind, ON_CLASS)), *(("", base) for base in bases)]


@dataclass(frozen=True, slots=True)
class Variables:
    """Global variables of a file, and the names among them that some code reads or sets."""

    of_file: dict[str, Any]
    names: frozenset[str]


_NAMED_VARIABLES = of_parts(lambda owner: [owner.of_file.get(n, _NOTHING) for n in owner.names])
VARIABLES = replace(
    _each(
        lambda owner: [(n, owner.of_file[n]) for n in sorted(owner.names & owner.of_file.keys())],
        lambda owner, key, value: owner.of_file.__setitem__(key, value),
        lambda owner, key: owner.of_file.pop(key),
        lambda owner, key: f"{key} of {owner}",
    ),
    sources=lambda owner: (_NAMED_VARIABLES, owner),
)


def _function(function: types.FunctionType) -> list[Element]:
    """List code, defaults, attributes and cells; of the user's also the global variables that the
    code names, and those of the user's files among these that it imports; of PyTorch's and the
    standard library's what they wrap."""
    if code_names.root_package(function) in code_names.CLOSED:
        return [("", getattr(function, "__wrapped__", None))]
    code = function.__code__
    held: list[Element] = [("__code__", code), ("__defaults__", function.__defaults__)]
    held += [("__kwdefaults__", function.__kwdefaults__), ("", Aspect(function, ATTRIBUTES))]
    held += zip(code.co_freevars, function.__closure__ or (), strict=True)
    return [*held, *(("", Aspect(one, VARIABLES)) for one in _variables_of(function))]


def _variables_of(function: types.FunctionType) -> Iterable[Variables]:
    code, own = function.__code__, function.__globals__
    names = code_names.names_in(code)
    waiting = [Variables(own, code_names.global_names_in(code))]
    if not code_names.is_library(own.get("__name__")):
        package = str(own.get("__package__") or "")
        files = (
            file
            for name in code_names.imported_in(code)
            for file in code_names.files_of(name, package)
        )
        waiting += (Variables(file, names) for file in files)
    found: dict[int, Variables] = {}
    for one in waiting:  # the list grows meanwhile
        if id(one.of_file) not in found and not code_names.is_library(one.of_file.get("__name__")):
            found[id(one.of_file)] = one
            values = (one.of_file[name] for name in sorted(one.names & one.of_file.keys()))
            modules = (value for value in values if type(value) is types.ModuleType)
            waiting += (Variables(vars(module), names) for module in modules)
    return found.values()


def _write_function(function: types.FunctionType, elements: list[Element]) -> None:
    for name, value in elements[:3] if len(elements) > 1 else ():
        setattr(function, name, value)


def _of_function(owner: str, key: str) -> str:
    if key.startswith("__"):
        return f"{owner}.{key}"
    return f"the variable '{key}' of {owner}" if key else owner


# Tensors

_OF_FAKES = frozenset({*vars(FakeTensor), *FakeTensor.__annotations__}) | {"_is_param"}
_OF_FAKES |= {f"_{name}{end}" for name in _OF_FAKES for end in ("", "_vc", "_epoch")}


def _tensor(tensor: torch.Tensor) -> list[Element]:
    space = object.__getattribute__(tensor, "__dict__")
    own = _OF_FAKES if isinstance(tensor, FakeTensor) else ()
    kept = [(name, value) for name, value in space.items() if name not in own]
    flag = tensor.requires_grad
    return [("", "a tensor"), ("", id(tensor)), ("requires_grad", flag), *kept]


_FLAG = Way(
    lambda tensors: [*map(operator.attrgetter("requires_grad"), tensors)], operator.is_, are_one
)


def _write_tensor(tensor: torch.Tensor, elements: list[Element]) -> None:
    flag = elements[2][1]
    if tensor.is_leaf and tensor.requires_grad != flag:
        tensor.requires_grad_(flag)
    space = object.__getattribute__(tensor, "__dict__")
    for name, _ in _tensor(tensor)[3:]:
        del space[name]
    space.update(elements[3:])


# Values behind one name


def cell_content(cell: types.CellType, default: Any = None) -> Any:
    """Return what a cell holds, `default` if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


CELL = _one(
    lambda owner: cell_content(owner, _NOTHING),
    lambda owner, value: setattr(owner, "cell_contents", value),
    lambda owner: delattr(owner, "cell_contents"),
)

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


GENERATOR = _one(_state, _set_state)


def _rewrite(owner: Any, text: Any) -> None:
    owner.seek(0)
    owner.truncate()
    owner.write(text)


def _shorten(owner: queue.SimpleQueue[Any], length: int) -> None:
    items = [owner.get_nowait() for _ in range(owner.qsize())]
    for value in items[:length]:
        owner.put(value)


def is_small(value: Any) -> bool:
    """True if a buffer is small enough to copy at each recording and compare at each call."""
    if isinstance(value, numpy.ndarray):
        return not value.dtype.hasobject and value.nbytes <= _LARGEST_ARRAY_BYTES
    return memoryview(value).nbytes <= _LARGEST_ARRAY_BYTES


def _array(owner: Any) -> list[Element]:
    if isinstance(owner, numpy.ndarray) and owner.dtype == object:
        is_row = owner.ndim == 1
        return [(i[0] if is_row else i, owner[i]) for i in numpy.ndindex(owner.shape)]
    if not is_small(owner):
        return [("", id(owner))]
    shape = str((owner.dtype, owner.shape) if isinstance(owner, numpy.ndarray) else type(owner))
    return [(shape, owner.tobytes() if isinstance(owner, numpy.ndarray) else bytes(owner))]


def _write_array(owner: Any, elements: list[Element]) -> None:
    content = elements[0][1] if elements else b""
    if isinstance(owner, numpy.ndarray) and owner.dtype == object:
        for position, value in elements:
            owner[position] = value
    elif isinstance(owner, array):
        owner[:] = array(owner.typecode, content)
    elif isinstance(owner, bytearray):
        owner[:] = content
    elif isinstance(content, bytes) and owner.flags.writeable:
        owner[...] = numpy.frombuffer(content, owner.dtype).reshape(owner.shape)


def _position(owner: Any) -> list[Element]:
    try:
        return [("", owner.__reduce_ex__(4))]
    except Exception:
        return [("", operator.length_hint(owner, -1))]


def _pickled(owner: Any, kind: type) -> list[Element]:
    """List what tells an object of a class of C: of the standard library's and numpy's (dates,
    decimal numbers) what pickle says, of others the identity."""
    is_known = kind.__module__.partition(".")[0] in {*sys.stdlib_module_names, "numpy"}
    return _position(owner) if is_known else [("", id(owner))]


def _frame(owner: types.GeneratorType[Any, Any, Any]) -> list[Element]:
    frame = owner.gi_frame
    return [("", -1)] if frame is None else [("", frame.f_lasti), *frame.f_locals.items()]


# The table

_NUMBERS: tuple[Any, ...] = (int, float, complex, str, bytes)
_PLAIN = (*_NUMBERS, bool, type(None), type(Ellipsis), range)
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)
PLAIN = frozenset(map(id, _PLAIN))
"""Identities of the classes of values that compare by `==`."""

_BOUND_IN_C = (types.BuiltinFunctionType, types.MethodWrapperType)
_ALWAYS_ALIKE = (
    *(types.MethodType, functools.partial, functools.partialmethod, staticmethod, classmethod),
    *(property, functools.cached_property, slice, types.MappingProxyType),
)
_ITERATORS: tuple[Any, ...] = (enumerate, zip, map, filter, reversed)
_ITERATORS += tuple(v for v in vars(itertools).values() if isinstance(v, type))
_ITERATED: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), set(), "", b"", range(0))
_ITERATORS += tuple(type(iter(one)) for one in _ITERATED)
_ITERATORS += (type(iter(range(1 << 70))), type(reversed([])))

_WHOLE: tuple[tuple[Any, Access], ...] = (
    (
        torch.Tensor,
        replace(
            _row(_tensor, _write_tensor, _attribute), sources=lambda t: (_FLAG, t, *attributes(t))
        ),
    ),
    (type, _row(_class)),
    (types.FunctionType, _row(_function, _write_function, _of_function)),
    (_BOUND_IN_C, _row(lambda f: [("", f.__name__), ("", f.__self__)])),
    (numpy.generic, _row(lambda v: [(str(v.dtype), v.tobytes())])),
    (_ALWAYS_ALIKE, _row(lambda v: (("", part) for part in gc.get_referents(v)))),
    (functools._lru_cache_wrapper, _row(lambda f: [("", f.__wrapped__)])),
    (types.CellType, CELL),
    (weakref.ref, _row(lambda ref: [("", ref())])),
    (_ITERATORS, _row(_position)),
    (types.GeneratorType, _row(_frame)),
    (RANDOM, GENERATOR),
    (numpy.ndarray, _row(_array, _write_array, _key)),
    (queue.SimpleQueue, _one(lambda owner: owner.qsize(), _shorten)),
    (
        contextvars.ContextVar,
        _one(lambda owner: owner.get(_NOTHING), contextvars.ContextVar.set, lambda v: v.set(None)),
    ),
)
"""Classes -> row of their objects, whose attributes are not looked at."""

_INNER: tuple[tuple[Any, Access], ...] = (
    (frozenset, _row(_members)),
    (set, _row(_members, _write_set)),
    (dict, ITEMS),
    (list, LIST),
    (deque, _sequence(deque)),
    (tuple, _row(lambda v: enumerate(tuple.__iter__(v)), _keep, _key)),
    ((bytearray, array), _row(_array, _write_array)),
    (_NUMBERS, _row(lambda v: [("", next(k for k in _NUMBERS if isinstance(v, k)).__repr__(v))])),
    (BaseException, _one(lambda e: e.args, lambda e, args: setattr(e, "args", args))),
    (
        (io.StringIO, io.BytesIO),
        _one(lambda owner: _NOTHING if owner.closed else owner.getvalue(), _rewrite),
    ),
)
"""Classes -> row of what their objects hold beside attributes and slots."""

_BARE = frozenset(
    map(id, (dict, OrderedDict, list, tuple, set, frozenset, deque, bytearray, array))
)
"""Identities of classes whose objects have no attributes."""

_MACHINERY: tuple[Any, ...] = (
    *(types.ModuleType, types.CodeType, types.FrameType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.GetSetDescriptorType, type(torch.ops.aten)),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType),
    *(type(threading.Lock()), type(threading.RLock()), re.Pattern),
)
_FIXED = frozenset(map(id, _MACHINERY))
_OPAQUE = (
    *("torch.", "logging.", "threading.", "concurrent.", "socket.", "asyncio.", "importlib."),
    *("multiprocessing.", "_thread.", "_frozen_importlib", "_io.TextIO", "_io.Buff", "_pytest."),
    *("sympy.", "rockplan."),
)
"""What begins the full names of classes of machinery, whose objects compare by identity."""


@once_for_each_class
def row_of(kind: type) -> Access | None:
    """Return how objects of a class are read and written; None: they compare by identity."""
    whole = next((row for kinds, row in _WHOLE if issubclass(kind, kinds)), None)
    if whole is not None:
        return whole
    own = next((row for kinds, row in _INNER if issubclass(kind, kinds)), None)
    if own is not None and id(kind) in _BARE:
        return own
    is_opaque = f"{kind.__module__}.{kind.__qualname__}".startswith(_OPAQUE)
    is_opaque = is_opaque and not issubclass(kind, (nn.Module, threading.local, *_COLLECTIONS))
    return None if id(kind) in _FIXED or is_opaque else _composed(kind, own)


_COLLECTIONS = (dict, list, tuple, set, frozenset)


def _composed(kind: type, own: Access | None) -> Access:
    """Of objects with attributes and slots. own: the row of what they hold beside."""
    is_followed = not code_names.is_library(kind.__module__) or issubclass(kind, nn.Module)
    has_slots = bool(slots(kind))

    def read(owner: Any) -> list[Element]:
        held: list[Element] = [("__class__", type(owner))] if is_followed else []
        has_attributes = attributes_of(owner) is not None
        if has_attributes:
            held.append(("", Aspect(owner, ATTRIBUTES)))
        if has_slots:
            held.append(("", Aspect(owner, SLOTS)))
        if own is not None:
            held.append(("", Aspect(owner, own)))
        elif not has_attributes and not has_slots:
            inner = [part for part in gc.get_referents(owner) if part is not kind]
            held += [("", part) for part in inner] or _pickled(owner, kind)
        return held

    def write(owner: Any, elements: list[Element]) -> None:
        if is_followed and type(owner) is not kind:
            object.__setattr__(owner, "__class__", kind)

    return Access(read, write, _itself, can_change=False)


# What elements are


def same_elements(one: list[Element], other: list[Element]) -> bool:
    """True if both lists have the same objects in the same order."""
    flat = map(itertools.chain.from_iterable, (one, other))
    return len(one) == len(other) and all(map(_is_same, *flat))


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) in (str, bytes, int) and bool(one == other) or type(one) is Aspect


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
    try:
        return issubclass(kind, torch.autograd.graph.Node)
    except TypeError:  # an abstract class needs a hash of the class, which may have none
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
