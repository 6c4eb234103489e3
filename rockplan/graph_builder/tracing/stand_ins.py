"""Arguments: those of one call with stand-ins for their tensors, in the caller's structure.

takes: positional and keyword arguments. returns: the same with other tensors, and the containers
that had to be made anew for that. guarantees: what holds no tensor is the caller's own object; one
object at two places stays one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rockplan.python_state import trees
from rockplan.python_state.holders import kinds_of
from rockplan.python_state.reach import Held, Place, named_arguments


@dataclass(frozen=True, slots=True)
class Arguments:
    """made: containers that stand for those of the caller."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Held]


def with_stand_ins(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of: Callable[[torch.Tensor], torch.Tensor],
) -> Arguments:
    """The arguments of `forward(*args, **kwargs)` with `of(tensor)` in place of each tensor."""
    exchange = _Exchange(of)
    named = named_arguments(forward, args, kwargs)
    found = [exchange.value(v, Place(f"the argument '{n}'", is_callers=True)) for n, v in named]
    by_name = dict(zip(kwargs, found[len(args) :], strict=True))
    return Arguments(tuple(found[: len(args)]), by_name, exchange.made)


@dataclass(slots=True)
class _Exchange:
    of: Callable[[torch.Tensor], torch.Tensor]
    known: dict[int, Any] = field(default_factory=dict)
    made: list[Held] = field(default_factory=list)

    def value(self, value: Any, place: Place) -> Any:
        if id(value) not in self.known:
            self.known[id(value)] = self._new(value, place)
        return self.known[id(value)]

    def _new(self, value: Any, place: Place) -> Any:
        if isinstance(value, torch.Tensor):
            return self.of(value)
        children = trees.children(value)
        if children is None:
            return value
        others = [self.value(child, place) for child in children]
        if all(a is b for a, b in zip(others, children, strict=True)):
            return value
        other = trees.with_children(value, others)
        self.made += [Held(owner, kind, place) for owner, kind in kinds_of(other)]
        return other
