"""Draws: random generators and iterators of Python and numpy that a forward would move on.

takes: what a forward that is about to be recorded can reach. guarantees: a forward that draws from
one of them is refused, since a planned step would repeat the draw for ever; all are left as they
were. What a library draws from a generator of its own (sympy, which tries numbers) may make no
difference: only another run tells.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy

from rockplan.errors import RockplanError
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.python_state.contents import is_same
from rockplan.python_state.object_slots import Element
from rockplan.python_state.reach import Held, Place, Reached

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


class _NotAdvanced:
    """Stands for an iterator while a forward is recorded."""

    def __init__(self, refuse: Callable[[str], NoReturn], kind: str) -> None:
        self._refuse, self._kind = refuse, kind

    def __iter__(self) -> _NotAdvanced:
        return self

    def __next__(self) -> NoReturn:
        self._refuse(NAMED["iterator of the module"].text(kind=self._kind))

    def send(self, value: object) -> NoReturn:
        """As of a generator."""
        self.__next__()


@contextlib.contextmanager
def refused(reached: Reached, refuse: Callable[[str], NoReturn]) -> Iterator[list[Drawn]]:
    """Refuse draws meanwhile. refuse: raises with the place in the model. On exit the list has the
    generators of libraries that were drawn from, which go on from there (`restored`)."""
    drawn: list[Drawn] = []
    _refuse_given(reached)
    generators = _generators(reached)
    states = [_state(g.generator) for g in generators]
    exchanged = [*_iterators(reached)]
    for held, elements in exchanged:
        held.write([(k, _still(v, refuse)) for k, v in elements])
    try:
        yield drawn
    except BaseException:
        _put_back(_moved(generators, states))
        raise
    finally:
        for held, elements in exchanged:
            held.write(elements)
    moved = _moved(generators, states)
    of_users = [one for one in moved if one[0].place.is_users]
    _put_back(of_users)
    for one, _ in of_users:
        raise refusal(one)
    drawn += (one for one, _ in moved)


def refusal(drawn: Drawn) -> RockplanError:
    """Of a forward that draws from it."""
    place = drawn.place
    return NAMED["generator of Python"].error(
        module_path=place.module or "",
        path=place.module or "(root)",
        place=place.text,
        kind=type(drawn.generator).__name__,
    )


@contextlib.contextmanager
def restored(reached: Reached) -> Iterator[None]:
    """Generators are on exit where they were."""
    generators = _generators(reached)
    states = [_state(g.generator) for g in generators]
    try:
        yield
    finally:
        _put_back(_moved(generators, states))


@dataclass(frozen=True, slots=True)
class Drawn:
    """A generator, and where it is."""

    place: Place
    generator: Any


def _moved(generators: Sequence[Drawn], states: Sequence[Any]) -> list[tuple[Drawn, Any]]:
    """Those that are not in these states any more, with these."""
    pairs = zip(generators, states, strict=True)
    return [(g, state) for g, state in pairs if not is_same(_state(g.generator), state)]


def _put_back(moved: Iterable[tuple[Drawn, Any]]) -> None:
    for drawn, state in moved:
        _set_state(drawn.generator, state)


def _refuse_given(reached: Reached) -> None:
    for place, value in reached.objects:
        if place.is_callers and _is_iterator(value):
            kind = type(value).__name__
            raise NAMED["iterator as an argument"].error(place=place.text, kind=kind)


def _generators(state: Reached) -> list[Drawn]:
    """Those that the forward can reach, and the two that everybody draws from."""
    found = [Drawn(place, value) for place, value in state.objects if isinstance(value, _RANDOM)]
    found += [
        Drawn(Place(name, is_guarded=True), method.__self__) for name, method in _EVERYBODYS.items()
    ]
    return [*{id(drawn.generator): drawn for drawn in found}.values()]


def _iterators(reached: Reached) -> Iterator[tuple[Held, list[Element]]]:
    """Holders of iterators of Python's own, with their elements."""
    for held in reached.holders:
        elements = held.elements
        if any(_is_iterator(value) for _, value in elements):
            yield held, elements


def _is_iterator(value: object) -> bool:
    kind = type(value)
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")


def _still(value: Any, refuse: Callable[[str], NoReturn]) -> Any:
    return _NotAdvanced(refuse, type(value).__name__) if _is_iterator(value) else value


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
