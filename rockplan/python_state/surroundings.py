"""Surroundings: what a forward can reach beside its module in the user's code, asked for changes
before each planned call.

takes: a module and its forward. returns: `Surroundings`. guarantees: `changed` names the first
place that holds something else now.
"""

from __future__ import annotations

import contextvars
import io
import operator
import queue
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rockplan.python_state.code_names import is_library
from rockplan.python_state.contents import is_same
from rockplan.python_state.elements import (
    ATTRIBUTES,
    ITEMS,
    ON_CLASS,
    SLOTS,
    VARIABLES,
    Access,
    Aspect,
    Element,
    Variables,
    same_elements,
    tensors_in,
)
from rockplan.python_state.walk import GONE, Place, Walk, is_generator, roots_of
from rockplan.python_state.writes import UNTOLD, Sources, of_parts
from rockplan.values.classes import once_for_each_class

# Classes of the standard library that keep what users give them, and that comparisons of attributes
# do not look into.
_KEEPERS = (
    *(UserDict, UserList, ChainMap, threading.local, queue.Queue, queue.SimpleQueue),
    *(BaseException, io.StringIO, io.BytesIO, contextvars.ContextVar),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
_NAMED = (ATTRIBUTES, SLOTS, ON_CLASS, VARIABLES)
_CODE = ("__code__", "__defaults__", "__kwdefaults__")
_PARTS = of_parts(operator.attrgetter(*_CODE))
_OF_FUNCTION = Access(
    lambda function: [*zip(_CODE, operator.attrgetter(*_CODE)(function), strict=True)],
    lambda function, elements: None,
    ATTRIBUTES.named,
    sources=lambda function: (_PARTS, function),
)


@dataclass(frozen=True, slots=True)
class _Held:
    """An object, or part of one, and what it held. names: of attributes that count."""

    place: Place
    owner: Any
    row: Access
    elements: list[Element]
    names: frozenset[str]

    def hold(self) -> bool:
        return self.changed() is None

    def sources(self) -> Sources:
        is_same = same_elements(self._now(), self.elements)
        return self.row.sources(self.owner) if is_same else UNTOLD

    def changed(self) -> Place | None:
        """Return the place that holds something else now, None if there is none. New tables of
        tensors by size, and equal contents, do not count."""
        now = self._now()
        if not same_elements(now, self.elements):
            before, after = _by_key(self.elements), _by_key(now)
            for key in {**before, **after}:
                pair = before.get(key, GONE), after.get(key, GONE)
                is_alike = not any(v is GONE for v in pair) and is_same(*pair)
                # New entries of a dictionary that forwards fill with a tensor for each size.
                is_new = pair[0] is GONE and self.row is ITEMS and isinstance(key, _SIZES)
                if not (is_alike or is_new and any(True for _ in tensors_in(pair[1]))):
                    return Place(self.row.named(self.place.text, key), self.place.module)
        return None

    def _now(self) -> list[Element]:
        return _guarded(self.row, self.row.read(self.owner), self.names)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a forward can reach beside its module in the user's code: global variables, attributes
    of classes, cells, defaults, objects, modules that are not registered.

    held: the objects, and what they held; of attributes, only those whose name reached code has;
    has_registered: something beside the module's registries holds one of its parameters or buffers.
    """

    held: tuple[_Held, ...]
    has_registered: bool

    def __deepcopy__(self, memo: object) -> Surroundings:
        """A copied module has the same surroundings."""
        return self

    @classmethod
    def of(cls, module: nn.Module, forward: Callable[..., Any]) -> Surroundings:
        """Return what `forward` can reach beside `module` in the user's code, with the elements
        that it holds now; random generators are left out."""
        walk = Walk(roots_of(module, forward))
        names = frozenset(walk.names)
        tree = frozenset(map(id, module.modules()))
        guarded = [False]
        held: list[_Held] = []
        for n, value in enumerate(walk.objects[1:], 1):
            guarded.append(guarded[walk.met[n][0]] or _is_guarded(value, tree))
            row, owner = walk.rows[n], value.owner if type(value) is Aspect else value
            if guarded[n] and row and row.can_change and not is_generator(type(owner)):
                row = _OF_FUNCTION if type(value) is types.FunctionType else row
                elements = _guarded(row, row.read(owner), names)
                held.append(_Held(walk.place(n), owner, row, elements, names))
        return cls(tuple(held), _holds_registered(walk, module))

    def changed(self) -> Place | None:
        """Return the first place that holds something else now, None if there is none."""
        return next(filter(None, (one.changed() for one in self.held)), None)


def _is_guarded(value: Any, tree: frozenset[int]) -> bool:
    """True for what is the user's beside arguments and attributes of modules (for which other
    guards are). tree: identities of the submodules."""
    owner = value.owner if type(value) is Aspect else value
    if isinstance(owner, type):
        return issubclass(owner, nn.Module) or not is_library(owner.__module__)
    if isinstance(owner, types.FunctionType):
        return not is_library(owner.__module__)
    if isinstance(owner, nn.Module):
        return id(owner) not in tree
    return isinstance(owner, Variables | torch.Tensor) or _is_of_keepers(type(owner))


@once_for_each_class
def _is_of_keepers(kind: type) -> bool:
    # By identity: isinstance asks an abstract class, which needs a hash.
    return any(base is keeper for base in kind.__mro__ for keeper in _KEEPERS)


def _guarded(row: Access, elements: list[Element], names: frozenset[str]) -> list[Element]:
    if not any(row is named for named in _NAMED) or "vars" in names:
        return elements
    return [element for element in elements if element[0] in names]


def _holds_registered(walk: Walk, module: nn.Module) -> bool:
    # Registries, and the lists of recurrent layers, do not count.
    known = {id(t) for t in (*module.parameters(), *module.buffers())}
    own = {id(vars(m)[name]) for m in module.modules() for name in ("_parameters", "_buffers")}
    for m in module.modules():
        lists = (vars(m).get("_flat_weights"), vars(m).get("_flat_weight_refs"))
        own |= {id(part) for one in lists if isinstance(one, list) for part in (one, *one)}
    return any(
        id(part) in known
        for value, held in zip(walk.objects[1:], walk.held[1:], strict=True)
        if id(value) not in own
        for element in held
        for part in element
    )


def _by_key(elements: list[Element]) -> dict[Any, Any]:
    # Tensors among the keys of dictionaries compare by identity.
    return {("", id(k)) if isinstance(k, torch.Tensor) else k: value for k, value in elements}


# Classes of the keys of such dictionaries.
_SIZES = (int, float, tuple, torch.dtype, torch.device)
