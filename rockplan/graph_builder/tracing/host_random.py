"""Draws: random generators and iterators of Python and numpy that a forward would advance.

takes: what a forward that is about to be recorded can reach. guarantees: a forward that draws from
one of them is refused, since a planned step would repeat the same draw forever; all are put back. A
library may draw from a generator of its own (sympy, which tries numbers) if the result does not
depend on it: only a second run can tell.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from torch import nn

from rockplan.errors import RockplanError
from rockplan.graph_builder.tracing.refusals import DRAWN, NAMED
from rockplan.graph_builder.tracing.source_lines import is_of_python, is_of_users
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
def refused(
    reached: Reached,
    refuse: Callable[[str], NoReturn],
    module: Callable[[], str],
    again: Callable[[], object],
) -> Iterator[list[Held]]:
    """While active, iterators that are `reached` raise the refusal (`refuse`, which knows the place
    in the model) when they advance; at the start, CaptureError for one among the arguments. At the
    end, draws from a generator of the user's raise; the yielded list gets the generators of
    libraries that drew, which are not put back. module: returns the path of the module that is
    running; again: runs the forward once more, to see which line draws."""
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
            line = _DrawingLine(held, module)
            line.find(again)
            _put_back(generators)
            raise refusal(held, line)


def refusal(drawn: Held, line: _DrawingLine | None = None) -> RockplanError:
    """Return the error for a forward that draws from the generator `drawn`, which names it. line:
    the one that draws, None if it is not known."""
    place, line = drawn.place, line or _DrawingLine(drawn, lambda: drawn.place.module or "")
    facts = {"place": place.text, "kind": type(drawn.owner).__name__}
    if line.argument:
        facts["remedy"] = f"{line.argument}, or {DRAWN}"
    return NAMED["generator of Python"].at(line.module or "", line.source, **facts)


class _DrawingLine:
    """The first line of Python that draws from a generator, and the module in which that runs.

    argument: says which argument takes what the line draws, '' if none is known: one of a forward
    that is running, whose name the drawn value gets."""

    def __init__(self, drawn: Held, module: Callable[[], str]) -> None:
        self._drawn, self._path = drawn, module
        self.module, self.source, self.argument = module(), "", ""

    def find(self, again: Callable[[], object]) -> None:
        """Run `again` with an eye on each line. Its errors do not matter."""
        self._start = self._drawn.elements
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            with contextlib.suppress(Exception):
                again()
        finally:
            sys.settrace(before)

    def _entered(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if self.source or is_of_python(name) or not is_of_users(name):
            return None
        line = frame.f_lineno

        def follow(frame: types.FrameType, event: str, arg: Any) -> Any:
            nonlocal line
            if not self.source and not same_elements(self._drawn.elements, self._start):
                self.module, self.source = self._path(), f"{frame.f_code.co_filename}:{line}"
                self.argument = _argument(frame, line)
            line = frame.f_lineno
            return follow

        return follow


def _argument(frame: types.FrameType | None, line: int) -> str:
    """Say which argument of a forward that is running takes what `line` of `frame` draws, by the
    name that the value gets in the functions that are running; '' if there is none."""
    names: set[str] = set()
    while frame is not None:
        owner = frame.f_locals.get("self")
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        found = sorted(names & {*arguments})
        if found and isinstance(owner, nn.Module) and frame.f_code.co_name == "forward":
            return f"pass {found[0]!r} to the {type(owner).__name__}, which draws where it is None"
        text = linecache.getline(frame.f_code.co_filename, line)
        names |= {*re.findall(r"^\s*(\w+)\s*=[^=]", text)}
        frame = frame.f_back
        line = frame.f_lineno if frame else 0
    return ""


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
