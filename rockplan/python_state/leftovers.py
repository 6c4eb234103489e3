"""Leftovers: tensors of a recorded run that are still alive when the run is over.

takes: weak references to every tensor that a run made. guarantees: any object that still holds one
(a cache that no name leads to, a thread's own data, an object of a library) is found through
Python's garbage collector, loses the tensor, and is named.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import operator
import sys
import traceback
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rockplan.python_state.elements import (
    CELL,
    Access,
    Aspect,
    Element,
    cached_in,
    row_of,
    tensors_in,
)

_DEEPEST = 5
"""Most levels of tuples, views and the like between a tensor and a holder that can be changed."""

_YOUNG, _ALL = 0, 2
"""Generations of Python's garbage collector."""


@dataclass(slots=True)
class Leftovers:
    """Weak references to the tensors that were made while recording, which none may outlive."""

    made: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def alive(self) -> list[torch.Tensor]:
        """Return the noted tensors that are still alive."""
        return [tensor for ref in self.made if (tensor := ref()) is not None]

    @contextlib.contextmanager
    def forgotten_by_errors(self) -> Iterator[None]:
        """While active, an error that leaves the block is stripped: the frames that it has passed
        are cleared, so that it keeps no tensor of the recording alive."""
        try:
            yield
        except BaseException as error:
            cleared = [*filter(_is_cleared, _frames_of(error, set()))]
            self._empty_closures(cleared)
            raise

    def _empty_closures(self, frames: list[types.FrameType]) -> None:
        """Empty the cells that keep a tensor of the recording alive through one of `frames`, which
        are cleared.

        A cleared frame keeps its function, and with it variables of the functions around: PyTorch
        has arguments of modules with hooks there. A function or cell that another object refers to
        as well may be used again: it stays, and `remove` takes our tensors out of it.
        """
        identities = frozenset(map(id, self.alive()))
        for function in _held_once(gc.get_referents(*frames)) if identities else ():
            cells = function.__closure__ if isinstance(function, types.FunctionType) else ()
            for cell in _held_once([*(cells or ())]):
                if not identities.isdisjoint(map(id, tensors_in(_content(cell)))):
                    del cell.cell_contents

    def remove(self) -> str | None:
        """Remove tensors of the recording from whatever still holds them. Return the name of the
        first holder, None if there was none.

        Function caches are emptied and not named: they fill themselves.
        """
        # The young generation first: nothing aged while collections were paused, and going through
        # the objects of all imported libraries takes longer than recording a small forward.
        for generation in (_YOUNG, _ALL):
            if not self.alive():
                return None
            gc.collect(generation)
        if self.alive():
            self._empty_function_caches()
        return self._remove_others() if self.alive() else None

    def _empty_function_caches(self) -> None:
        identities = frozenset(map(id, self.alive()))
        everything = gc.get_objects()
        # Without a line of Python for each object.
        are_caches = map(
            operator.is_, map(type, everything), itertools.repeat(functools._lru_cache_wrapper)
        )
        for cache in itertools.compress(everything, are_caches):
            if not identities.isdisjoint(map(id, cached_in(cache))):
                cache.cache_clear()
        gc.collect()

    def _remove_others(self) -> str | None:
        """Level by level, until none is alive; None if nothing held them."""
        first: str | None = None
        for _ in range(_DEEPEST):
            alive = self.alive()
            if not alive:
                break
            place = _taken_from_holders(alive)
            first = first or place
            del alive
            gc.collect()
            if place is None:
                return first or "an object that cannot be looked into"
        return first


def _frames_of(error: BaseException | None, seen: set[int]) -> Iterator[types.FrameType]:
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield from (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        yield from _frames_of(error.__cause__, seen)
        error = error.__context__


def _is_cleared(frame: types.FrameType) -> bool:
    """Clear the variables of a frame; return False if it still runs, which forbids that."""
    try:
        frame.clear()
    except RuntimeError:
        return False
    # Up to Python 3.12 a frame keeps the dictionary of variables that a debugger or pytest has
    # asked for, with the old values; asking again empties it.
    _ = frame.f_locals
    return True


def _held_once(things: list[Any]) -> list[Any]:
    example = [object()]
    one_other = [*example]
    (most,) = map(sys.getrefcount, example)
    del one_other
    counts = [*map(sys.getrefcount, things)]
    return [thing for thing, count in zip(things, counts, strict=True) if count <= most]


def _content(cell: types.CellType) -> object:
    content = next((held for _, held in CELL.read(cell)), None)
    return tuple(content.values()) if type(content) is dict else content


def _taken_from_holders(ours: list[torch.Tensor]) -> str | None:
    """Take the tensors `ours` from all objects that hold them, directly or through objects that
    cannot be changed. Return the name of the first holder, None if there is none.

    All objects of a level are looked up at once: each look-up goes through every object of the
    process.
    """
    taken: list[tuple[Any, Access, Any]] = []
    level: list[object] = [*ours]
    seen = {id(ours), id(taken), *map(id, ours)}
    for _ in range(_DEEPEST + 1):
        seen.add(id(level))
        above: list[object] = []
        identities = frozenset(map(id, level))
        for referrer in gc.get_referrers(*level):
            if id(referrer) in seen or isinstance(referrer, types.FrameType):
                continue
            seen.add(id(referrer))
            dropped = _drop(referrer, identities)
            taken += dropped
            if not dropped:
                above.append(referrer)
        if not above:
            break
        level = above
    if not taken:
        return None
    owner, row, key = taken[0]
    return row.named(_described(owner), key)


def _drop(referrer: Any, identities: frozenset[int]) -> list[tuple[Any, Access, Any]]:
    """Remove the objects of these identities from `referrer`. Return (referrer, row of `elements`,
    key of the first object) for each part of it that was changed."""
    row = None if isinstance(referrer, torch.Tensor) else row_of(type(referrer))
    if row is None:
        return []
    parts = [part for _, part in row.read(referrer) if type(part) is Aspect]
    dropped = []
    for owner, own in [(referrer, row), *((part.owner, part.row) for part in parts)]:
        elements = own.read(owner)
        kept = [e for e in elements if not _is_one(e, identities)]
        if own.can_change and len(kept) < len(elements):
            key = next(e[0] for e in elements if _is_one(e, identities))
            own.write(owner, kept)
            dropped.append((referrer, own, key))
    return dropped


def _is_one(element: Element, identities: frozenset[int]) -> bool:
    return not identities.isdisjoint(map(id, element))


def _described(owner: Any) -> str:
    """Return a name for an object, for messages: of a dictionary of variables the module or object,
    of another object the global variable that it is, else its class."""
    if isinstance(owner, dict) and isinstance(owner.get("__name__"), str) and "__spec__" in owner:
        return f"the module {owner['__name__']}"
    for referrer in gc.get_referrers(owner):
        if getattr(referrer, "__dict__", None) is owner:
            return f"a {type(referrer).__qualname__}"
    for name, module in list(sys.modules.items()):
        variables = getattr(module, "__dict__", None) or {}
        for key, value in list(variables.items()):
            if value is owner:
                return f"{name}.{key}"
    return f"a {type(owner).__qualname__}"
