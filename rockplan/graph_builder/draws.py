"""Draws: random generators and iterators of Python and numpy that a forward would move on.

takes: a module whose forward is about to be recorded. guarantees: a forward that draws from one of
them is refused, since a planned step would repeat the draw for ever; all are left as they were.
"""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy
from torch import nn

from rockplan.contents import is_same, parts_of
from rockplan.errors import UnsupportedModel

_RANDOM = (
    random.Random,
    numpy.random.Generator,
    numpy.random.BitGenerator,
    numpy.random.RandomState,
)
# Of the generators that functions of a module draw from, a method each.
_EVERYBODYS: dict[str, Any] = {
    "Python's `random`": random.getstate,
    "numpy.random": numpy.random.get_state,
}
_REMEDY = "draw with torch, or before the call, and pass what was drawn in as a tensor"


class _NotAdvanced:
    """Stands for an iterator while a forward is recorded."""

    def __init__(self, refuse: Callable[[str], NoReturn], kind: str) -> None:
        self._refuse, self._kind = refuse, kind

    def __iter__(self) -> _NotAdvanced:
        return self

    def __next__(self) -> NoReturn:
        self._refuse(
            f"the forward takes the next of an iterator that the module keeps (a {self._kind}), "
            f"which a planned step would not advance; {_REMEDY}"
        )

    def send(self, value: object) -> NoReturn:
        """As of a generator."""
        self.__next__()


@contextlib.contextmanager
def refused(module: nn.Module, refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Refuse draws meanwhile. refuse: raises with the place in the model."""
    held = list(_held(module))
    generators = {id(g): (path, name, g) for path, name, g in held if isinstance(g, _RANDOM)}
    states = {key: _state(g) for key, (_, _, g) in generators.items()}
    owners = [m.__dict__ for m in module.modules()]
    owners += [found for _, _, found in held if type(found) in (dict, list)]
    exchanged = [place for owner in owners for place in _iterators(owner)]
    for owner, key, iterator in exchanged:
        owner[key] = _NotAdvanced(refuse, type(iterator).__name__)
    try:
        yield
    finally:
        for owner, key, iterator in exchanged:
            owner[key] = iterator
        moved = [
            key for key, state in states.items() if not is_same(_state(generators[key][2]), state)
        ]
        for key in moved:
            _set_state(generators[key][2], states[key])
    for path, name, generator in (generators[key] for key in moved):
        raise UnsupportedModel(
            f"in module '{path or '(root)'}': the forward draws from {name} (a "
            f"{type(generator).__name__}), which a planned step would repeat for ever; {_REMEDY}",
            module_path=path,
        )


def _held(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(path of a submodule, name, what its attribute of that name is or holds, or what a global
    variable is that its code names); and the two generators that everybody draws from."""
    for name, method in _EVERYBODYS.items():
        yield "", name, method.__self__
    seen: set[type] = set()
    for path, m in module.named_modules():
        for name, value in m.__dict__.items():
            for part in _parts(value):
                yield path, f"self.{name}", part
        for base in type(m).__mro__:
            if base not in seen and str(base.__module__).partition(".")[0] != "torch":
                seen.add(base)
                for name, value in vars(base).items():
                    yield path, f"{base.__name__}.{name}", value
                    for named in _globals(value):
                        yield (path, *named)


def _parts(value: object) -> Iterator[Any]:
    for part in parts_of(value):
        yield part
        inner = getattr(part, "__dict__", None)
        if isinstance(inner, dict) and not isinstance(part, nn.Module | type | types.ModuleType):
            yield inner
            yield from inner.values()


def _globals(function: object) -> Iterator[tuple[str, Any]]:
    """Global variables that the code of a function names."""
    if isinstance(function, types.FunctionType):
        for name in function.__code__.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]


def _iterators(owner: Any) -> Iterator[tuple[Any, Any, Iterator[Any]]]:
    """(dictionary or list, key or position, iterator of Python's own)."""
    for key, value in list(owner.items() if isinstance(owner, dict) else enumerate(owner)):
        kind = type(value)
        if kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__"):
            yield owner, key, value


def _state(generator: Any) -> Any:
    """None of one that has none (random.SystemRandom)."""
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.state = state
