"""Leftovers: tensors of a recorded run that are still alive when the run is forgotten.

takes: weak references to every tensor that a run made. guarantees: whatever holds one of them then
(a cache that no name leads to, a thread's own data, an object of a library) is found by asking
Python who refers to it, loses it, and is named.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rockplan.python_state.holders import kinds_of

_DEEPEST = 5
"""Tuples, views and the like between a tensor and what can be changed."""


@dataclass(slots=True)
class Leftovers:
    """What is alive of what was made while recording."""

    made: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def note(self, objects: Iterable[object]) -> None:
        """Tensors among `objects` are not to outlive the recording."""
        self.made += [weakref.ref(o) for o in objects if isinstance(o, torch.Tensor)]

    def alive(self) -> list[torch.Tensor]:
        return [tensor for ref in self.made if (tensor := ref()) is not None]

    def remove(self) -> list[str]:
        """Where some were still held, which do not hold them any more; caches of functions are
        emptied, and not named: they fill again."""
        if not self.alive():
            return []
        gc.collect()
        if self.alive():
            self._empty_function_caches()
        return self._remove_others() if self.alive() else []

    def _empty_function_caches(self) -> None:
        identities = frozenset(map(id, self.alive()))
        for cache in _function_caches():
            if _keeps(cache, identities):
                cache.cache_clear()
        gc.collect()

    def _remove_others(self) -> list[str]:
        places: list[str] = []
        for _ in range(_DEEPEST):
            alive = self.alive()
            if not alive:
                break
            before = len(places)
            for position in range(len(alive)):
                places += _taken_from_holders(alive[position], alive)
            del alive
            gc.collect()
            if len(places) == before:
                places.append("an object that cannot be looked into")
                break
        return [*dict.fromkeys(places)]


@contextlib.contextmanager
def frames_forgotten() -> Iterator[None]:
    """An exception that leaves keeps no local variables of the frames that it has left."""
    try:
        yield
    except BaseException as error:
        _forget(error, set())
        raise


def _forget(error: BaseException | None, seen: set[int]) -> None:
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        _forget(error.__cause__, seen)
        error = error.__context__


def _function_caches() -> Iterator[Any]:
    """Every functools.lru_cache that exists, found without a line of Python for each object."""
    everything = gc.get_objects()
    kinds = map(type, everything)
    return itertools.compress(
        everything, map(operator.is_, kinds, itertools.repeat(functools._lru_cache_wrapper))
    )


def _keeps(cache: Any, identities: frozenset[int]) -> bool:
    """Looks at the results that `cache` keeps, also in their tuples, lists and dictionaries."""
    pending: list[object] = gc.get_referents(cache) if cache.cache_info().currsize else []
    seen: set[int] = set()
    while pending:
        found = pending.pop()
        if id(found) in identities:
            return True
        if isinstance(found, tuple | list | dict) and id(found) not in seen:
            seen.add(id(found))
            pending += gc.get_referents(found)
    return False


def _taken_from_holders(tensor: torch.Tensor, ours: list[torch.Tensor]) -> list[str]:
    """Names of what held it, and does no more."""
    found: list[str] = []
    pending: list[tuple[object, int]] = [(tensor, 0)]
    seen = {id(tensor), id(ours), id(pending)}
    while pending:
        value, depth = pending.pop()
        for referrer in gc.get_referrers(value):
            if id(referrer) in seen or isinstance(referrer, types.FrameType):
                continue
            seen.add(id(referrer))
            name = _drop(referrer, value)
            if name is not None:
                found.append(name)
            elif depth < _DEEPEST:
                pending.append((referrer, depth + 1))
    return found


def _drop(referrer: Any, value: object) -> str | None:
    """Take `value` out of what refers to it; what a message calls it, None if it cannot be."""
    if isinstance(referrer, torch.Tensor | tuple | frozenset):
        return None
    name = None
    for owner, kind in kinds_of(referrer):
        elements = kind.elements(owner)
        kept = [(k, v) for k, v in elements if v is not value and k is not value]
        if len(kept) < len(elements):
            key = next(k for k, v in elements if v is value or k is value)
            kind.write(owner, kept)
            name = kind.named(_described(referrer), key)
    return name


def _described(owner: Any) -> str:
    """A dictionary by what it is the attributes, or the global variables, of."""
    if isinstance(owner, dict) and isinstance(owner.get("__name__"), str) and "__spec__" in owner:
        return f"the module {owner['__name__']}"
    for referrer in gc.get_referrers(owner):
        if getattr(referrer, "__dict__", None) is owner:
            return f"a {type(referrer).__qualname__}"
    variable = _global_name(owner)
    return variable or f"a {type(owner).__qualname__}"


def _global_name(owner: Any) -> str | None:
    for name, module in list(sys.modules.items()):
        variables = getattr(module, "__dict__", None) or {}
        for key, value in list(variables.items()):
            if value is owner:
                return f"{name}.{key}"
    return None
