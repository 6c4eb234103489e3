"""Leftovers: tensors of a recorded run that are still alive when the run is over.

takes: weak references to every tensor that a run made. guarantees: a cache of a function, a
dictionary, a list or a cell that still holds one is found through Python's garbage collector, and
loses the tensor.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
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

from rockplan.python_state.elements import CELL, ITEMS, LIST, cached_in, cell_content, tensors_in

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
                content = cell_content(cell)
                content = tuple(content.values()) if type(content) is dict else content
                if not identities.isdisjoint(map(id, tensors_in(content))):
                    del cell.cell_contents

    def remove(self) -> str | None:
        """Remove tensors of the recording from whatever still holds them. Return the class of the
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
        return _taken_from_holders(self.alive())

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


def variables_of(frame: types.FrameType) -> dict[str, Any]:
    """Return the variables of a running function. Up to Python 3.12 it would hold what is in them
    now until it returns, such as a batch, in a dictionary that is shared with `locals()`."""
    kept = frame.f_locals
    found = dict(kept)
    is_of_frame = type(kept) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_of_frame and sys.getrefcount(kept) == 3:  # here, in the frame, as an argument
        kept.clear()
    return found


def _held_once(things: list[Any]) -> list[Any]:
    example = [object()]
    one_other = [*example]
    (most,) = map(sys.getrefcount, example)
    del one_other
    counts = [*map(sys.getrefcount, things)]
    return [thing for thing, count in zip(things, counts, strict=True) if count <= most]


def _taken_from_holders(ours: list[torch.Tensor]) -> str | None:
    identities = frozenset(map(id, ours))
    found = [r for r in gc.get_referrers(*ours) if r is not ours] if ours else []
    holders = [r for r in found if not isinstance(r, types.FrameType)]
    for row, kind in ((ITEMS, dict), (LIST, list), (CELL, types.CellType)):
        for holder in (h for h in holders if isinstance(h, kind)):
            elements = row.read(holder)
            row.write(holder, [e for e in elements if identities.isdisjoint(map(id, e))])
    names = [f"a {type(holder).__qualname__}" for holder in holders]
    return [*names, "an object that cannot be looked into"][0] if ours else None
