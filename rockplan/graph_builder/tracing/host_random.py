"""Draws: random generators and iterators of Python and numpy that a forward would advance.

takes: what a forward that is about to be recorded can reach. guarantees: a forward that draws from
one of them is refused, since a planned step would repeat the same draw forever; all are put back. A
library may draw from a generator of its own (sympy, which tries numbers) if the result does not
depend on it: only a second run can tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from rockplan.errors import RockplanError
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.python_state.holders import Held, same_elements
from rockplan.python_state.object_slots import GENERATOR, Element
from rockplan.python_state.reach import Reached


class _NotAdvanced:
    """Replaces an iterator while a forward is recorded, and refuses to advance."""

    def __init__(self, refuse: Callable[[str], NoReturn], kind: str) -> None:
        self._refuse, self._kind = refuse, kind

    def __iter__(self) -> _NotAdvanced:
        return self

    def __next__(self) -> NoReturn:
        self._refuse(NAMED["iterator of the module"].text(kind=self._kind))

    def send(self, value: object) -> NoReturn:
        """Refuse, as `__next__` does."""
        self.__next__()


@contextlib.contextmanager
def refused(reached: Reached, refuse: Callable[[str], NoReturn]) -> Iterator[list[Held]]:
    """While active, iterators that are `reached` raise the refusal (`refuse`, which knows the place
    in the model) when they advance; at the start, CaptureError for one among the arguments. At the
    end, draws from a generator of the user's raise; the yielded list gets the generators of
    libraries that drew, which are not put back."""
    drawn: list[Held] = []
    _refuse_given(reached)
    generators = [(h, h.elements) for h in reached.holders if h.kind is GENERATOR]
    exchanged = [*_iterators(reached)]
    for held, elements in exchanged:
        held.write([(k, _still(v, refuse)) for k, v in elements])
    try:
        yield drawn
    except BaseException:
        _put_back(generators)
        raise
    finally:
        for held, elements in exchanged:
            held.write(elements)
    drawn += [held for held, _ in _moved(generators)]
    for held in drawn:
        if held.place.is_users:
            _put_back(generators)
            raise refusal(held)


def refusal(drawn: Held) -> RockplanError:
    """Return the error for a forward that draws from the generator `drawn`, which names it."""
    place = drawn.place
    return NAMED["generator of Python"].error(
        module_path=place.module or "",
        path=place.module or "(root)",
        place=place.text,
        kind=type(drawn.owner).__name__,
    )


@contextlib.contextmanager
def restored(reached: Reached) -> Iterator[None]:
    """While active, generators that are `reached` may draw; afterwards they are put back."""
    generators = [(h, h.elements) for h in reached.holders if h.kind is GENERATOR]
    try:
        yield
    finally:
        _put_back(generators)


def _moved(generators: Iterable[tuple[Held, list[Element]]]) -> list[tuple[Held, list[Element]]]:
    """Return the generators whose state has changed, each with its former state."""
    return [(h, state) for h, state in generators if not same_elements(h.elements, state)]


def _put_back(generators: Iterable[tuple[Held, list[Element]]]) -> None:
    for held, state in _moved(generators):
        held.write(state)


def _refuse_given(reached: Reached) -> None:
    """Raise if an argument of the caller is an iterator."""
    for place, value in reached.objects:
        if place.is_callers and _is_iterator(value):
            kind = type(value).__name__
            raise NAMED["iterator as an argument"].error(place=place.text, kind=kind)


def _iterators(reached: Reached) -> Iterator[tuple[Held, list[Element]]]:
    """Yield holders of built-in iterators, each with its elements."""
    for held in reached.holders:
        elements = held.elements
        if any(_is_iterator(value) for _, value in elements):
            yield held, elements


def _is_iterator(value: object) -> bool:
    kind = type(value)
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")


def _still(value: Any, refuse: Callable[[str], NoReturn]) -> Any:
    return _NotAdvanced(refuse, type(value).__name__) if _is_iterator(value) else value
