"""Walk: everything that a forward can reach, found by one walk over what objects refer to.

takes: a module, its forward, the arguments of a call. returns: `Walk`, in which objects that Python
makes anew from the same parts are the same ones. guarantees: `difference` names the first place
that a call has changed; `restore` makes every object hold what it held, in place, so that
references stay valid.

An object is what it refers to, in order (`elements`): data count by value, other objects by the
number under which they were met first, tensors and machinery by identity. Methods are followed only
if some reached code has their name; names that are computed (`getattr(self, "f" + x)`) are not:
`leftovers` finds fake tensors wherever they are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rockplan.python_state import elements, key_value_cache
from rockplan.python_state.code_names import names_in
from rockplan.python_state.hooks import computed_attributes
from rockplan.values.classes import once_for_each_class

# A module of 12 layers reaches 4,000 objects.
_MOST = 200_000

NOT_FOLLOWED: dict[int, Any] = {}
"""Identity -> class or function that a recording does not run: what it reaches does not count."""

_LEFT = "problem_type"
"""The attribute of a configuration that classifiers of transformers set in their first call, by
their labels: it stays set."""

_MADE_AGAIN = "_output_capturing_hooks_installed"
"""The attribute of models of transformers beside hooks of its own, which any call makes again."""


@dataclass(frozen=True, slots=True)
class Root:
    """Where a walk begins. module: path of the submodule that it is; is_callers: an argument."""

    name: str
    value: Any
    module: str | None = None
    is_callers: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object is. text: 'self.tables', 'TABLES[4] of file', "the argument 'x'"; module:
    path of the submodule that holds it, None if none does."""

    text: str
    module: str | None = None
    is_callers: bool = False

    @property
    def is_of_files(self) -> bool:
        """True for a place of a file, the user's or a library's."""
        return self.module is None and not self.is_callers

    def __str__(self) -> str:
        of = "" if self.module is None else f" of module '{self.module or '(root)'}'"
        return self.text + of


@dataclass(frozen=True, slots=True)
class StateChange:
    """What a call has changed. owner: the object; former, now: its element, `GONE` for
    none."""

    place: Place
    owner: Any
    former: Any
    now: Any


GONE: Any = object()


def shown(value: Any) -> str:
    """Return what a message says of an element of a difference."""
    if value is GONE:
        return "nothing"
    return repr(value)[:60] if id(type(value)) in elements.PLAIN else f"a {type(value).__name__}"


def walk_of(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Walk:
    """Everything that a call of `forward` can reach, and all generators of random numbers."""
    roots = [*roots_of(module, forward), *map(Root, *zip(*_generators(), strict=True))]
    return Walk([*roots, *roots_of_arguments(forward, args, kwargs or {})])


def roots_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[Root]:
    """Yield the submodules of a module, and its forward."""
    for path, submodule in module.named_modules():
        yield Root("self", submodule, path)
    yield Root("forward", forward)


def roots_of_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Root]:
    for name, value in named_arguments(forward, args, kwargs):
        yield Root(f"the argument '{name}'", value, is_callers=True)


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


_SCANNED: dict[str, tuple[tuple[int, int], list[tuple[str, Any]]]] = {}
"""Name of a file -> (identity and number of its global variables, its generators)."""


def _generators() -> Iterator[tuple[str, Any]]:
    # But sympy's, which tries numbers that make no difference.
    yield from elements.EVERYBODYS.items()
    for name, file in [*sys.modules.items()]:
        variables = getattr(file, "__dict__", None)
        if type(variables) is not dict or name.startswith("sympy."):
            continue
        known = id(variables), len(variables)
        if _SCANNED.get(name, (None,))[0] != known:
            held = [(f"{name}.{k}", v) for k, v in [*variables.items()] if is_generator(type(v))]
            _SCANNED[name] = known, held
        yield from _SCANNED[name][1]


@once_for_each_class
def is_generator(kind: type) -> bool:
    """True for classes of generators of random numbers."""
    return issubclass(kind, elements.RANDOM)


@once_for_each_class
def is_iterator(kind: type) -> bool:
    """True for built-in iterators, which a planned call does not advance."""
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")


class Walk:
    """What `roots` reach now. objects: each once, by number, the list of roots first; rows: how
    each is read and written, None for what compares by identity, as objects of `stops` do; held:
    its elements; counted: positions of those that are compared; nodes: what these are, data by
    value and objects by number; met: (number of the object in which it was met first, position of
    the element there)."""

    def __init__(self, roots: Iterable[Root], stops: tuple[type, ...] | type = ()) -> None:
        self.roots, self.stops = [*roots], stops
        self.objects: list[Any] = [self.roots]
        self.rows: list[elements.Access | None] = [None]
        self.held: list[list[elements.Element]] = [[]]
        self.nodes: list[list[Any]] = [[]]
        self.counted: list[Sequence[int]] = [()]
        self.met: list[tuple[int, int]] = [(-1, 0)]
        self.number = {id(self.roots): 0}
        self.names = {"forward"}
        self._put_back_alone: set[int] = set()
        self._waiting: dict[str, list[tuple[Any, int, int]]] = defaultdict(list)
        for is_callers in (False, True):  # what is met elsewhere, too, is not the caller's alone
            for position, root in enumerate(self.roots):
                if root.is_callers is is_callers:
                    self.nodes[0].append(self._meet(root.value, 0, position))
            while len(self.nodes) < len(self.objects):
                self._look_into(self.objects[len(self.nodes)])
        self.imported = frozenset(sys.modules)
        self.caches = [
            (c, c.cache_info().currsize) for c in self.objects if elements.is_function_cache(c)
        ]

    def _look_into(self, value: Any) -> None:
        kind = type(value)
        is_followed = id(value) not in NOT_FOLLOWED and not issubclass(kind, self.stops)
        row = (
            value.row if kind is elements.Aspect else elements.row_of(kind) if is_followed else None
        )
        held = [] if row is None else row.read(value.owner if kind is elements.Aspect else value)
        self.rows.append(row)
        self.held.append(held)
        counted = _counted(value, held)
        self.counted.append(counted)
        is_compared = id(value) not in self._put_back_alone
        self.nodes.append(self._node(len(self.nodes)) if is_compared else [])
        for position in {*range(len(held))} - {*counted} if len(counted) < len(held) else ():
            if type(held[position][1]) is list:
                self._put_back_alone.add(id(held[position][1]))
                self._meet(held[position][1], len(self.nodes) - 1, position)
        if kind is types.FunctionType:
            self._follow(names_in(value.__code__) - self.names)

    def _node(self, at: int) -> list[Any]:
        value, row = self.objects[at], self.rows[at]
        node: list[Any] = [
            id(value)
            if row is None
            else id(row)
            if type(value) is elements.Aspect
            else id(type(value))
        ]
        is_class = type(value) is elements.Aspect and row is elements.ON_CLASS
        for position in self.counted[at]:
            element = self.held[at][position]
            for part in element:
                kind = type(part)
                if kind is str:
                    node.append(part)
                elif id(kind) in elements.PLAIN:
                    node.append((kind, repr(part) if kind in (float, complex) else part))
                elif (
                    is_class
                    and id(kind) in _METHODS
                    and not (element[0] in self.names or element[0].startswith("__"))
                ):
                    node.append(("method", id(part)))
                    self._waiting[element[0]].append((part, at, position))
                else:
                    node.append(self._meet(part, at, position))
        return node

    def _follow(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            self.names.add(name)
            for waiting in self._waiting.pop(name, ()):
                self._meet(*waiting)

    def _meet(self, value: Any, at: int, position: int) -> int:
        """Return the number of an object; -1 if too many were met before."""
        known = self.number.get(id(value))
        if known is None and len(self.objects) < _MOST:
            known = self.number[id(value)] = len(self.objects)
            self.objects.append(value)
            self.met.append((at, position))
        return -1 if known is None else known

    def place(self, n: int, key: Any = None) -> Place:
        """Return the place of an object by number, or of its element of this key."""
        steps = [] if key is None else [(self.rows[n], key)]
        while (start := self._named(n)) is None:
            n, position = self.met[n]
            steps.append((self.rows[n], self.held[n][position][0]))
        text = start.text
        for row, key in reversed(steps):
            text = text if row is None else row.named(text, key)
        return Place(_REGISTRY.sub(r".\1", text), start.module, start.is_callers)

    def _named(self, n: int) -> Place | None:
        """None for what has no name of its own."""
        value, (parent, _), root = self.objects[n], self.met[n], self.root_of(n)
        if parent == 0:
            return Place(root.name, root.module, root.is_callers)
        is_function = isinstance(value, types.FunctionType) and root.module is None
        if is_function or isinstance(value, type):
            return Place(value.__qualname__, None, is_function and root.is_callers)
        if type(value) is elements.Aspect and isinstance(value.owner, elements.Variables):
            return Place(str(value.owner.of_file.get("__name__", "?")))
        return None

    def root_of(self, n: int) -> Root:
        """Return the root from which an object was met first."""
        position = 0
        while n > 0:
            n, position = self.met[n]
        return self.roots[position]

    def difference(self, later: Walk) -> StateChange | None:
        """None if nothing differs in a later walk from the same roots."""
        for n in range(1, min(len(self.nodes), len(later.nodes))):
            if self.nodes[n] != later.nodes[n]:
                return self._difference(later, n)
        return None

    def _difference(self, later: Walk, n: int) -> StateChange:
        before, now = self._by_key(n), later._by_key(n)
        value = self.objects[n]
        if isinstance(value, torch.Tensor) and value is not later.objects[n]:
            return StateChange(self.place(n), value, value, later.objects[n])
        owner = value.owner if type(value) is elements.Aspect else value
        nothing = (None, GONE, GONE)
        for key in {**before, **now}:
            (_, former, a), (_, current, b) = before.get(key, nothing), now.get(key, nothing)
            if a != b:
                walk = later if key in now else self
                return StateChange(walk.place(n, (now | before)[key][0]), owner, former, current)
        return StateChange(later.place(n), owner, value, later.objects[n])

    def _by_key(self, n: int) -> dict[Any, tuple[Any, Any, Any]]:
        """(Key in the node, how often it was there before) -> (key, element, that in the node)."""
        found: dict[Any, tuple[Any, Any, Any]] = {}
        codes = iter(self.nodes[n][1:])
        held = (self.held[n][position] for position in self.counted[n])
        for (key, value), code, of in zip(held, codes, codes, strict=True):
            number = 0
            while (code, number) in found:
                number += 1
            found[code, number] = key, value, of
        return found

    def restore(self, is_refused: bool = False) -> None:
        """Make every object hold what it held, and empty caches of functions that have grown. Files
        that were imported meanwhile may have registered things, which no later import does again:
        what is new in what files hold stays then, but for tensors; unless is_refused, so does what
        libraries settle in a first call."""
        has_imported = not sys.modules.keys() <= self.imported
        for n, (owner, row, held) in self.holders():
            now = row.read(owner)
            if not elements.same_elements(now, held):
                stays = [e for e in now if _stays(owner, e) and not is_refused]
                if has_imported and self.place(n).is_of_files:
                    stays = _added(held, now)
                row.write(owner, [*held, *stays])
        for cache, size in self.caches:
            if cache.cache_info().currsize != size:
                cache.cache_clear()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore on exit, also after an exception."""
        try:
            yield
        except BaseException:
            self.restore(is_refused=True)
            raise
        self.restore()

    def exchange(self, of: Callable[[Any], Any]) -> None:
        """Replace each element e by `of(e)`, where that is another object."""
        for _, (owner, row, held) in self.holders():
            if not row.can_change:
                continue
            others = [(of(key), of(part)) for key, part in held]
            if not elements.same_elements(others, held):
                row.write(owner, others)

    def holders(self) -> Iterator[tuple[int, tuple[Any, elements.Access, list[elements.Element]]]]:
        """Yield (number, (object, how it is read and written, its elements))."""
        for n, value in enumerate(self.objects):
            row = self.rows[n]
            if row is not None:
                yield (
                    n,
                    (value.owner if type(value) is elements.Aspect else value, row, self.held[n]),
                )

    def again(self) -> Walk:
        """Return what the same roots reach now."""
        return Walk(self.roots, self.stops)

    def tensors(self) -> Iterator[tuple[Place, torch.Tensor]]:
        for n, value in enumerate(self.objects):
            if isinstance(value, torch.Tensor):
                yield self.place(n), value


_OF_CODE = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_METHODS = frozenset(map(id, _OF_CODE))
_REGISTRY = re.compile(r"\._(?:parameters|buffers|modules)\['([^']*)'\]")


def _counted(value: Any, held: list[elements.Element]) -> Sequence[int]:
    """Positions of elements that count in a comparison: not what PyTorch's hooks compute before
    each call, nor what transformers settles in the first call, or makes again in each."""
    if type(value) is OrderedDict:
        return [i for i, e in enumerate(held) if not _is_hook_of_transformers(e[1])]
    if type(value) is not elements.Aspect or value.row is not elements.ATTRIBUTES:
        return range(len(held))
    owner = value.owner
    names = {_MADE_AGAIN}
    if isinstance(owner, nn.Module) and owner._forward_pre_hooks:
        names |= computed_attributes(owner)
    return [i for i, e in enumerate(held) if e[0] not in names and not _stays(owner, e)]


def _added(held: list[elements.Element], now: list[elements.Element]) -> list[elements.Element]:
    known = {id(key) for key, _ in held} | {id(value) for _, value in held}
    return [
        (key, value)
        for key, value in now
        if id(key) not in known and id(value) not in known and not any(elements.tensors_in(value))
    ]


def _stays(owner: Any, element: elements.Element) -> bool:
    is_known = element[0] == _LEFT
    return is_known and key_value_cache.configuration_class(type(owner)) is not None


def _is_hook_of_transformers(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and str(value.__module__).startswith(
        "transformers."
    )
