"""Reach: every object that a forward can get at through names, each with its place.

takes: a module, its forward and the arguments of a call. returns: attributes, containers and
objects that can be reached from them; and for the code of methods, and of functions that this code
names, the global variables, class attributes, cells and defaults. guarantees: methods and class
attributes are followed only if some reached code has their name; nothing is imported or computed;
libraries of tensors and the standard library are not looked into.

Names that are computed (`getattr(self, "f" + x)`) are not followed: `leftovers` finds fake tensors
wherever they are.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rockplan.python_state.code_names import (
    compares_objects,
    files_of,
    global_names_in,
    imported_in,
    names_in,
    root_package,
)
from rockplan.python_state.holders import (
    HOLDING_NOTHING,
    Held,
    Place,
    is_keeper,
    is_opaque_keeper,
    kinds_of,
)
from rockplan.python_state.object_slots import CLASS, EVERYBODYS, NAMESPACE, Kind, Namespace
from rockplan.values.classes import once_for_each_class
from rockplan.values.interface import Address

# Packages whose classes, functions and global variables are not looked into. (An `assert` in a test
# file calls pytest, which reaches all that is tested: 40,000 objects.)
_CLOSED = {"torch", "torchvision", "torchaudio", "numpy", "triton", "rockplan", "builtins"}
_CLOSED |= {"_pytest"}
_CLOSED |= set(sys.stdlib_module_names) - {"__main__"}
PLAIN = frozenset(map(id, HOLDING_NOTHING))
"""Identities of the classes of values that hold nothing."""

_FIRST_NAMES = ("forward", "__call__")
# Objects: a module of 12 layers reaches 4,000; a table of a million strings is not gone through.
_MOST = 200_000
_UNSEEN = (types.ModuleType, types.CodeType, types.FrameType)


NOT_FOLLOWED: dict[int, Any] = {}
"""Identity -> class or function that a recording does not run: what it reaches does not count."""


@dataclass(frozen=True, slots=True)
class Reached:
    """What a forward can reach. holders: objects that can be changed; objects: (place, object) of
    everything, in the order of reaching; namespaces: global variables of the files of reached
    functions; names: all names in the code of these functions; compares_objects: some of this code
    compares objects by `is`; also_in_arguments: places at which a
    container of the arguments is met again."""

    holders: tuple[Held, ...]
    objects: tuple[tuple[Place, Any], ...]
    namespaces: tuple[dict[str, Any], ...]
    names: frozenset[str]
    compares_objects: bool
    also_in_arguments: tuple[Place, ...]


def reached(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    real: Mapping[int, torch.Tensor] | None = None,
) -> Reached:
    """Return everything that `forward(*args, **kwargs)`, a forward of `module`, can reach by names.
    real: identity of a stand-in -> the tensor whose attributes it has."""
    walk = _Walk(real or {}, frozenset(map(id, module.modules())))
    for name, generator in EVERYBODYS.items():
        walk.meet(generator, Place(name, is_guarded=True))
    for name, value in named_arguments(forward, args, kwargs or {}):
        walk.meet(value, Place(f"the argument '{name}'", is_callers=True))
    walk.run()
    walk.of_arguments = frozenset(walk.seen)
    for path, submodule in module.named_modules():
        walk.meet(submodule, Place("self", path, address=("module", path, ())))
    walk.meet(forward, Place("forward"))
    walk.run()
    return walk.found()


def named_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return (name, argument) pairs by the signature of `forward`; positional arguments that it
    does not name are numbered ('args[0]')."""
    parameters: list[inspect.Parameter] = []
    with contextlib.suppress(TypeError, ValueError):
        parameters = list(inspect.signature(forward).parameters.values())
    names = [p.name for p in parameters if p.kind in _POSITIONAL][: len(args)]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    names += [f"{rest}[{i}]" for i in range(len(args) - len(names))]
    return [*zip(names, args, strict=True), *kwargs.items()]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(slots=True)
class _Walk:
    """The state of one search, breadth first. real: as in `reached`; tree: identities of the
    submodules; pending: (object, place) to be looked into; seen: identities; alive: keeps these
    valid; names: all names in reached code; waiting: name -> members of classes to be followed once
    some code has that name; variables: by identity of a file's variables, these and the names read;
    of_arguments: identities of what the arguments reach."""

    real: Mapping[int, torch.Tensor]
    tree: frozenset[int] = frozenset()
    pending: deque[tuple[Any, Place]] = field(default_factory=deque)
    seen: set[int] = field(default_factory=set)
    alive: list[Any] = field(default_factory=list)
    objects: list[tuple[Place, Any]] = field(default_factory=list)
    holders: list[Held] = field(default_factory=list)
    names: set[str] = field(default_factory=lambda: {*_FIRST_NAMES})
    waiting: dict[str, list[tuple[Any, Place]]] = field(default_factory=lambda: defaultdict(list))
    variables: dict[int, tuple[dict[str, Any], set[str]]] = field(default_factory=dict)
    compares_objects: bool = False
    of_arguments: frozenset[int] = frozenset()
    shared: list[Place] = field(default_factory=list)

    def meet(self, value: Any, place: Place) -> None:
        """Queue an object to be looked into, met at `place`, unless it was met before. A container
        of the arguments that is met again is noted in `shared` with that place."""
        if id(type(value)) in PLAIN:
            return
        if id(value) in self.seen:
            if self._is_shared(value):
                self.shared.append(place)
            return
        self.seen.add(id(value))
        self.pending.append((value, place))

    def run(self) -> None:
        """Look into all queued objects and what they lead to."""
        while self.pending and len(self.objects) < _MOST:
            value, place = self.pending.popleft()
            self.objects.append((place, value))
            self._look_into(value, place)

    def found(self) -> Reached:
        """Return all that was reached; the global variables of each file have one holder."""
        for variables, names in self.variables.values():
            place = _file(variables)
            self.holders.append(Held(Namespace(variables, frozenset(names)), NAMESPACE, place))
        namespaces = tuple(variables for variables, _ in self.variables.values())
        return Reached(
            tuple(self.holders),
            tuple(self.objects),
            namespaces,
            frozenset(self.names),
            self.compares_objects,
            tuple(self.shared),
        )

    def _look_into(self, value: Any, place: Place) -> None:
        if isinstance(value, type | types.FunctionType) and id(value) in NOT_FOLLOWED:
            return
        # A proxy is looked into as the class that it pretends to be.
        kind: Any = type(value)
        _step(kind if value.__class__ is kind else value.__class__)(self, value, place)

    def _object(self, value: Any, place: Place) -> None:
        """Look into an object that no row of `_STEPS` describes: its class, and its elements."""
        kind: Any = type(value)
        if _is_closed(kind) and not is_keeper(value) and not isinstance(value, _CONTAINERS):
            return
        self.meet(kind, place)
        self._hold(value, place.guarded() if is_opaque_keeper(value) else place)

    def _tensor(self, value: torch.Tensor, place: Place) -> None:
        self._hold(self.real.get(id(value), value), place.guarded())

    def _fixed(self, value: Any, place: Place) -> None:
        """Queue (`meet`) what an object always refers to: elements of a tuple or frozen set, target
        of a weak reference, dictionary of a view; add holders of its attributes."""
        if isinstance(value, types.MappingProxyType):
            self._beyond(gc.get_referents(value), place)
        elif isinstance(value, weakref.ref):
            self._beyond((value(),), place)
        else:
            self._elements(enumerate(value), place)
        self._hold(value, place)

    def _beyond(self, values: Iterable[Any], place: Place) -> None:
        """Meet objects that have no name of their own, under the name of `place`."""
        for value in values:
            self.meet(value, place.inside(place.text, None, ""))

    def _is_old(self, value: Any) -> bool:
        """True if meeting the object changes nothing. (Asked first, since naming places takes most
        of the time.)"""
        return id(type(value)) in PLAIN or (id(value) in self.seen and not self._is_shared(value))

    def _is_shared(self, value: Any) -> bool:
        """True for a container that the arguments reach."""
        return id(value) in self.of_arguments and isinstance(value, _CONTAINERS)

    def _hold(self, value: Any, place: Place) -> None:
        """Add a holder for each way in which the object holds elements; meet these and their
        keys."""
        for owner, kind in kinds_of(value):
            held = Held(owner, kind, place)
            if owner is not value:
                self.seen.add(id(owner))
                self.alive.append(owner)
            self.holders.append(held)
            for key, element in held.elements:
                if not self._is_old(element):
                    self.meet(element, held.element(key))
                if id(type(key)) not in PLAIN:
                    self._beyond((key,), place)

    def _elements(self, elements: Iterable[tuple[Any, Any]], place: Place) -> None:
        for key, element in elements:
            if not self._is_old(element):
                self.meet(element, place.inside(f"{place.text}[{key}]", None, key))

    def _module(self, module: nn.Module, place: Place) -> None:
        """Look into a module: meet its class and attributes. Its parameters, buffers and submodules
        are named like attributes. A module outside of the planned tree is the user's state
        (`guarded`)."""
        self.meet(type(module), place)
        if id(module) not in self.tree:
            place = place.guarded()
        for owner, kind in kinds_of(module):
            held = Held(owner, kind, place)
            self.seen.add(id(owner))
            self.holders.append(held)
            for name, element in held.elements:
                if name in _REGISTRIES:
                    self._registry(element, kind, place)
                elif not self._is_old(element):
                    self.meet(element, held.element(name))

    def _registry(self, registry: Any, kind: Kind, place: Place) -> None:
        """Look into `_parameters`, `_buffers` or `_modules` of the module at `place`. kind: row of
        the module's attributes."""
        if id(registry) in self.seen or not isinstance(registry, dict):
            return
        self.seen.add(id(registry))
        held = Held(registry, kind, place, is_registry=True)
        self.holders.append(held)
        for name, element in registry.items():
            if not self._is_old(element):
                self.meet(element, held.element(name))

    def _class(self, kind: type) -> None:
        """Look into a class: its bases, its attributes, and methods whose name some reached code
        has (others wait for that). Of PyTorch's module classes, only attributes that are neither
        methods nor descriptors."""
        # A user may have put attributes on PyTorch's module classes.
        is_users = issubclass(kind, nn.Module) or not is_library(kind.__module__)
        place = Place(kind.__qualname__, address=("class", kind, ()), is_guarded=is_users)
        held = Held(kind, CLASS, place)
        if _is_closed_itself(kind):
            if issubclass(kind, nn.Module):
                self.holders.append(held)
                for name, member in kind.__dict__.items():
                    if not (isinstance(member, _DESCRIPTORS) or callable(member)):
                        self.meet(member, held.element(name))
            return
        for base in kind.__mro__[1:]:
            self.meet(base, Place(base.__qualname__))
        self.holders.append(held)
        for name, member in vars(kind).items():
            if self._is_old(member):
                continue
            if not isinstance(member, _MEMBERS) or name in self.names:
                self.meet(member, held.element(name))
            else:
                self.waiting[name].append((member, held.element(name)))

    def _function(self, function: Any, place: Place) -> None:
        """Look into a function: what it wraps, its attributes and defaults, its cells, and the
        global variables that its code names. Then meet class members that waited for names of this
        code."""
        self._beyond(_wrapped(function), place)
        if not isinstance(function, types.FunctionType) or root_package(function) in _CLOSED:
            return
        is_named = place.text.startswith("self.")
        text = place.text if is_named else function.__qualname__
        is_users = not (is_library(function.__module__) or place.is_callers)
        self._hold(function, place.unaddressed(text, is_users))
        names = names_in(function.__code__)
        self.compares_objects = self.compares_objects or compares_objects(function.__code__)
        for name in names - self.names:
            self.names.add(name)
            for member, member_place in self.waiting.pop(name, ()):
                self.meet(member, member_place)
        # In a user's script an attribute's name may also be that of an unrelated variable. (A
        # library's variables are few and do not change.)
        read = global_names_in(function.__code__) if is_users else names
        self._global_variables(function.__globals__, read, names)
        for name in imported_in(function.__code__):
            for file in files_of(name, str(function.__globals__.get("__package__") or "")):
                self._global_variables(file, names, names)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            text = place.text if is_named else f"the variable '{name}' of {function.__qualname__}"
            self.meet(cell, place.unaddressed(text, is_users))

    def _global_variables(
        self, variables: dict[str, Any], names: frozenset[str], attributes: frozenset[str]
    ) -> None:
        """Meet the global variables `names` of a file (its dictionary `variables`), and, of modules
        among them, their variables `attributes`. Files of closed packages are not looked into."""
        if str(variables.get("__name__", "?")).partition(".")[0] in _CLOSED:
            return
        _, known = self.variables.setdefault(id(variables), (variables, set()))
        new = names - known
        if not new:
            return
        known |= new
        place = _file(variables)
        for name in sorted(new & variables.keys()):
            value = variables[name]
            if isinstance(value, types.ModuleType):
                self._global_variables(vars(value), attributes, attributes)
            elif not self._is_old(value):
                self.meet(value, place.inside(name, "attribute", name))


def _file(variables: dict[str, Any]) -> Place:
    """Return the place of a file; an imported file has an address."""
    name = str(variables.get("__name__", "?"))
    is_imported = vars(sys.modules.get(name, object)) is variables if name in sys.modules else False
    address: Address | None = ("file", name, ()) if is_imported else None
    return Place(name, address=address, is_guarded=not is_library(name))


@functools.cache
def is_library(name: str | None) -> bool:
    """True if the module of that name is an installed one or of the standard library, not the
    user's; False for None."""
    if name is None:
        return False
    path = str(getattr(sys.modules.get(name), "__file__", None) or "")
    return name.partition(".")[0] in _CLOSED or "site-packages" in path or "dist-packages" in path


_FUNCTIONS = (
    *(types.FunctionType, types.MethodType, functools.partial, functools.partialmethod),
    *(staticmethod, classmethod, property, functools.cached_property),
    functools._lru_cache_wrapper,
)


_Step = Callable[[_Walk, Any, Place], None]
_STEPS: tuple[tuple[tuple[type, ...], _Step], ...] = (
    (
        (types.BuiltinFunctionType, types.MethodWrapperType),
        lambda walk, value, place: walk._beyond((value.__self__,), place),
    ),
    (_UNSEEN, lambda walk, value, place: None),
    ((type,), lambda walk, value, place: walk._class(value)),
    ((torch.Tensor,), _Walk._tensor),
    ((nn.Module,), _Walk._module),
    (_FUNCTIONS, _Walk._function),
    ((types.MappingProxyType, tuple, frozenset, weakref.ref), _Walk._fixed),
)
"""Classes -> how a walk looks into their objects; the first row that fits."""


@once_for_each_class
def _step(kind: type) -> _Step:
    return next((step for kinds, step in _STEPS if issubclass(kind, kinds)), _Walk._object)


_MEMBERS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_DESCRIPTORS = (*_MEMBERS, types.GetSetDescriptorType, types.MemberDescriptorType)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set, deque)


def _wrapped(function: Any) -> Iterable[Any]:
    """Return what a function, or a member of a class, calls, and the arguments that it passes on;
    () for a plain function."""
    if isinstance(function, types.MethodType):
        return function.__func__, function.__self__
    if isinstance(function, functools.partial | functools.partialmethod):
        return function.func, function.args, function.keywords
    if isinstance(function, property):
        return tuple(f for f in (function.fget, function.fset, function.fdel) if f)
    if isinstance(function, functools.cached_property):
        return (function.func,)
    inner = getattr(function, "__wrapped__", None)
    return () if inner is None else (inner,)


@once_for_each_class
def _is_closed_itself(kind: type) -> bool:
    """True for a class of a package that is not looked into."""
    return root_package(kind) in _CLOSED


@once_for_each_class
def _is_closed(kind: type) -> bool:
    """True for a class of a package that is not looked into, or derived from PyTorch's."""
    return "torch" in map(root_package, kind.__mro__) or _is_closed_itself(kind)
