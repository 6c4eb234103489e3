"""Snapshot: what Python's objects hold before a forward runs, what the forward changes in them, and
how to put it back.

takes: what a forward can reach (`reach`). guarantees: `restore` makes every holder hold what it
held, in place, so that references stay valid; `changes` lists elements with other data than before.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from rockplan.python_state.contents import data_in, is_same
from rockplan.python_state.holders import (
    Held,
    Identity,
    Place,
    is_function_cache,
    replaced,
    same_elements,
    tensors_in,
)
from rockplan.python_state.object_slots import GENERATOR, ITEMS, OF_TENSOR, Element
from rockplan.python_state.reach import PLAIN, Reached, is_library, reached
from rockplan.values.interface import ABSENT

Changes = dict[tuple[Identity, Any], Any]
"""(identity of a holder, key of an element) -> the plain data of the element now, `ABSENT` if it is
gone."""


_HOOKS = re.compile(r"^self\._\w+_hooks(_|$)")


@dataclass(slots=True)
class Snapshot:
    """Everything that a forward can reach. before: the elements of each of `holders` when the
    snapshot was taken; caches: lru_caches with the number of their results then (one that has
    another number is emptied by `restore`); flags: `requires_grad` of tensors; imported: names of
    imported files; start: the elements of each holder when the forward began, with stand-ins for
    tensors."""

    reached: Reached
    holders: list[Held]
    before: list[list[Element]]
    caches: list[tuple[Any, int]]
    flags: list[tuple[Place, torch.Tensor, bool]]
    imported: frozenset[str]
    start: list[list[Element]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Snapshot:
        """Return a snapshot of everything that `forward(*args, **kwargs)`, a forward of `module`,
        can reach."""
        state = reached(module, forward, args, kwargs)
        before = [held.elements for held in state.holders]
        caches = [value for _, value in state.objects if is_function_cache(value)]
        sizes = [(cache, cache.cache_info().currsize) for cache in caches]
        tensors = ((p, v) for p, v in state.objects if isinstance(v, torch.Tensor))
        flags = [(p, t, t.requires_grad) for p, t in tensors if t.is_leaf]
        return cls(state, [*state.holders], before, sizes, flags, frozenset(sys.modules))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the snapshot on exit, also after an exception."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Make every holder hold what it held, empty caches that have grown, and set
        `requires_grad` back. A forward that imports files for the first time may have them register
        things, which no later import does again: elements that are new in what files hold stay
        then, unless they have tensors."""
        has_imported = not sys.modules.keys() <= self.imported
        for held, elements in zip(self.holders, self.before, strict=True):
            now = held.elements
            if has_imported and held.place.is_of_files:
                known = _by_key(elements)
                added = [(k, v) for k, v in now if _hashable(k) not in known]
                elements = [*elements, *((k, v) for k, v in added if not any(tensors_in(v)))]
            if not same_elements(now, elements):
                held.write(elements)
        for cache, size in self.caches:
            if cache.cache_info().currsize != size:
                cache.cache_clear()
        for _, tensor, requires_grad in self.flags:
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)

    def switched_tensor(self) -> Place | None:
        """Return the place of a tensor whose `requires_grad` has changed, else None."""
        changed = (p for p, t, requires_grad in self.flags if t.requires_grad != requires_grad)
        return next(changed, None)

    def add(self, holders: list[Held]) -> None:
        """Add holders that were made for the call, as they are now."""
        self.holders += holders
        self.before += [held.elements for held in holders]

    def exchange(self, of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Replace each tensor in every holder by `of(tensor)`, where that is not None."""
        for held, elements in zip(self.holders, self.before, strict=True):
            exchanged = [(replaced(key, of), replaced(value, of)) for key, value in elements]
            if not same_elements(exchanged, elements):
                held.write(exchanged)

    def begin(self) -> None:
        """Note what each holder holds: the forward begins, and `changed` counts from here."""
        self.start = [held.elements for held in self.holders]

    def changed(self) -> Iterator[tuple[Held, dict[Any, Any], dict[Any, Any]]]:
        """Yield (holder, elements at the start, elements now) of each holder whose elements are not
        the same objects in the same order."""
        for held, start in zip(self.holders, self.start, strict=True):
            now = held.elements
            if not same_elements(now, start):
                yield held, _by_key(start), _by_key(now)

    def is_as_begun(self) -> bool:
        """True if every holder holds the objects that it held at the start (then nothing new can be
        reached)."""
        return next(self.changed(), None) is None

    def changes(self) -> Changes:
        """Return (holder, key) -> plain data now, for the elements whose data differ from the
        start.

        A tensor, or an object that cannot be looked into, counts as present or absent; so do
        functions and classes, unless one replaced another. Returns nothing if the forward installed
        hooks (transformers does, to collect what submodules return): it installs them again
        whenever they are missing, and what they note is no data.
        """
        changes: Changes = {}
        changed = [*self.changed()]
        if any(_HOOKS.search(held.place.text) for held, _, _ in changed):
            return changes
        for held, start, now in changed:
            if not held.place.is_users:  # libraries, and threads of theirs
                continue
            for key in {**start, **now}:
                value, former = now.get(key, ABSENT), start.get(key, ABSENT)
                if isinstance(value, FakeTensor):  # found by `holding`
                    continue
                if compared_of(value) != compared_of(former) or is_other_code(value, former):
                    changes[held.identity, key] = compared_of(value)
        return changes

    def grown_cache(self) -> str | None:
        """Return the name of a function of the user's whose cache has grown, else None."""
        for cache, size in self.caches:
            if cache.cache_info().currsize != size and not is_library(cache.__module__):
                return str(cache.__qualname__)
        return None

    def place_of(self, change: tuple[Identity, Any]) -> Place:
        """Return the place of a change."""
        owner, key = change
        held = next(held for held in self.holders if held.identity == owner)
        return held.element(key)

    def callers_changes(self) -> Iterator[Place]:
        """Yield the places at which an argument, or its content, was changed."""
        for held, start, now in self.changed():
            if held.place.is_callers:
                keys = [k for k in {**start, **now} if start.get(k, ABSENT) is not now.get(k)]
                yield held.element(keys[0]) if keys else held.place


def _by_key(elements: list[Element]) -> dict[Any, Any]:
    return {_hashable(key): value for key, value in elements}


def _hashable(key: Any) -> Any:
    """Return a dictionary key that equals itself: tensors compare by identity."""
    return ("tensor", id(key)) if isinstance(key, torch.Tensor) else key


def compared_of(value: Any) -> Any:
    """Return what is compared of an element: its plain data; of a tensor, its identity; `ABSENT`
    itself; None for a tensor that the recording made, and for our functions in place of
    PyTorch's."""
    if isinstance(value, types.FunctionType) and value.__module__.startswith("rockplan."):
        return None
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return "a tensor", id(value)
    if value is ABSENT or isinstance(value, torch.Tensor):
        return value if value is ABSENT else None
    return data_in(value)


def is_other_code(value: object, former: object) -> bool:
    """True if a class or function replaced another one. A function that was made anew from the same
    code does not count."""
    code, known = _code(value), _code(former)
    return code is not None and known is not None and code != known


def _code(value: object) -> Any:
    """Return what tells functions and classes apart: the code of a function (also in a method or
    partial), a class or builtin itself; None for other objects."""
    if isinstance(value, functools.partial):
        return _code(value.func)
    if isinstance(value, types.MethodType):
        return _code(value.__func__)
    if isinstance(value, types.FunctionType):
        return value.__code__
    return value if isinstance(value, type | types.BuiltinFunctionType) else None


@dataclass(frozen=True, slots=True)
class Found:
    """An element that is a tensor or a tuple with tensors, and its holder."""

    held: Held
    key: Any
    value: Any

    @property
    def place(self) -> Place:
        return self.held.element(self.key)


def holding(state: Reached, is_wanted: Callable[[torch.Tensor], bool]) -> list[Found]:
    """Return the elements of all holders in `state` that are tensors accepted by `is_wanted`, or
    that refer to such directly (tuples, frozen sets, weak references)."""
    return [
        Found(held, key, value)
        for held in state.holders
        for key, value in held.elements
        if any(map(is_wanted, tensors_in(value)))
    ]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a forward can reach beside its module in the user's code: global variables, attributes
    of classes, cells, defaults, objects, modules that are not registered.

    held: (holder, its elements); of attributes, only those whose name reached code has.
    has_registered: something beside the module's registries holds one of its parameters or buffers.
    """

    held: tuple[tuple[Held, list[Element]], ...]
    names: frozenset[str]
    has_registered: bool

    def __deepcopy__(self, memo: object) -> Surroundings:
        """A copied module has the same surroundings."""
        return self

    @classmethod
    def of(cls, module: nn.Module, forward: Callable[..., Any]) -> Surroundings:
        """Return what `forward` can reach beside `module` in the user's code, with the elements
        that it holds now; random generators are left out."""
        state = reached(module, forward)
        guarded = [
            held for held in state.holders if held.place.is_guarded and held.kind is not GENERATOR
        ]
        elements = tuple((held, _named(held, state.names)) for held in guarded)
        registered = {id(t) for t in (*module.parameters(), *module.buffers())}
        return cls(elements, state.names, _holds(state.holders, registered))

    def changed(self) -> Place | None:
        """Return the first place that holds something else now, None if there is none. New tables
        of tensors by size, and equal contents, do not count."""
        for held, elements in self.held:
            now = _named(held, self.names)
            if not same_elements(now, elements):
                before, after = _by_key(elements), _by_key(now)
                for key in {**before, **after}:
                    pair = before.get(key, ABSENT), after.get(key, ABSENT)
                    if not (_is_new_table(held, key, *pair) or _is_alike(*pair)):
                        return held.element(key)
        return None


def _holds(holders: Sequence[Held], registered: set[int]) -> bool:
    """True if a holder other than a registry holds one of the tensors `registered` (identities)."""
    return any(
        id(tensor) in registered
        for held in holders
        if not held.is_registry and "._flat_weight" not in held.place.text  # of recurrent layers
        for element in held.elements
        for part in element
        if id(type(part)) not in PLAIN
        for tensor in tensors_in(part)
    )


def _named(held: Held, names: frozenset[str]) -> list[Element]:
    """List the elements of a holder; of attributes, those of these names."""
    elements = held.elements
    if held.kind.step != "attribute" or held.kind is OF_TENSOR or "vars" in names:
        return elements
    return [element for element in elements if element[0] in names]


def _is_new_table(held: Held, key: Any, before: Any, now: Any) -> bool:
    """True for a new entry of a dictionary that forwards fill with a tensor for each size."""
    is_new = before is ABSENT and held.kind is ITEMS and isinstance(key, _SIZES)
    return is_new and any(True for _ in tensors_in(now))


# Classes of the keys of such dictionaries.
_SIZES = (int, float, tuple, torch.dtype, torch.device)


def _is_alike(one: Any, other: Any) -> bool:
    return one is not ABSENT and other is not ABSENT and is_same(one, other)
