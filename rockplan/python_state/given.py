"""Given: containers and objects of the caller's into which a forward puts what it computes.

takes: a call before and after its forward. returns: the result together with what is in such
containers then; what the caller gave stands there by its place in the call. guarantees: a planned
call leaves the same in the caller's own objects, and returns these where the forward does.
"""

from __future__ import annotations

import copy
import types
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from rockplan.python_state import trees
from rockplan.python_state.holders import kinds_of, same_elements
from rockplan.python_state.object_slots import ATTRIBUTES, ITEMS, LIST, SLOTS, Element, Kind
from rockplan.values.interface import GivenLeaf


@dataclass(frozen=True, slots=True)
class GivenContainer:
    """Stands for the container or object of the arguments of this number (`trees.objects`)."""

    number: int


Number = tuple[int, int]


class WithContents(NamedTuple):
    """What a forward returns, and what it leaves in containers of the caller's, by number and
    position among their `kinds_of`; added: what it puts into objects."""

    result: Any
    contents: dict[Number, Any]
    added: dict[Number, dict[Any, Any]]


@dataclass(frozen=True, slots=True)
class GivenCall:
    """What a call is made with, before its forward runs. leaves, numbers: of leaves, and of
    containers and objects, by identity."""

    leaves: Mapping[int, int]
    numbers: Mapping[int, int]
    holders: tuple[_GivenHolder, ...]
    alive: Sequence[Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GivenCall:
        leaves = trees.tree_leaves((args, kwargs))
        objects = [*_objects((args, kwargs))]
        positions = {id(x): i for i, x in reversed([*enumerate(leaves)]) if not _is_plain(x)}
        numbers = {id(o): n for n, o in reversed([*enumerate(objects)])}
        wrapped = {id(data) for o in objects for data in _wrapped(o)}
        holders = (
            holder
            for number in sorted(numbers.values())
            for holder in _holders(number, objects[number], id(objects[number]) in wrapped)
        )
        return cls(positions, numbers, tuple(holders), (leaves, objects))

    def with_contents(self, result: Any) -> Any:
        """Return `result` with what the forward has put into the caller's containers, which hold
        their former content after this. Just `result` if there is nothing."""
        contents: dict[Number, Any] = {}
        added: dict[Number, dict[Any, Any]] = {}
        changed: list[_GivenHolder] = []
        for holder in self.holders:
            now = holder.kind.elements(holder.owner)
            if same_elements(now, holder.before):
                continue
            if not holder.is_of_object:
                told = {key: self._told(value) for key, value in now}
                contents[holder.number] = [*told.values()] if holder.kind is LIST else told
            elif (came := holder.tensors_that_came(now)) is not None:
                added[holder.number] = {key: self._told(value) for key, value in came.items()}
            else:
                continue
            changed.append(holder)
        for holder in changed:
            holder.kind.write(holder.owner, holder.before)
        return WithContents(self._told(result), contents, added) if changed else result

    def _told(self, node: Any) -> Any:
        """With what the caller gave by its place."""
        if id(node) in self.leaves:
            return GivenLeaf(self.leaves[id(node)])
        if id(node) in self.numbers:
            return GivenContainer(self.numbers[id(node)])
        children = trees.children(node)
        if children is None:
            return node
        return trees.with_children(node, [self._told(child) for child in children])


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, trees.UNCHANGING) and not isinstance(leaf, torch.Tensor)


def has_contents(spec: trees.TreeSpec) -> bool:
    """True if a result of this structure carries the contents of the caller's containers."""
    return spec.type is WithContents or spec.context is WithContents


def returned(
    leaves: Sequence[Any], spec: trees.TreeSpec, call: tuple[Any, ...], given: Sequence[Any]
) -> Any:
    """Return the result of a planned call, and write the other leaves into the caller's containers.

    call: (args, kwargs); given: the leaves of `call`.
    """
    objects = [*_objects(call)] if has_contents(spec) else []

    def real(leaf: Any) -> Any:
        if isinstance(leaf, GivenLeaf):
            return given[leaf.position]
        return objects[leaf.number] if isinstance(leaf, GivenContainer) else leaf

    made = trees.tree_unflatten([*map(real, leaves)], spec)
    if not isinstance(made, WithContents):
        return made
    for (number, position), content in made.contents.items():
        elements = content.items() if isinstance(content, dict) else enumerate(content)
        owner, kind = kinds_of(objects[number])[position]
        kind.write(owner, [*elements])
    for (number, position), came in made.added.items():
        owner, kind = kinds_of(objects[number])[position]
        kind.write(owner, [*(dict(kind.elements(owner)) | came).items()])
    return made.result


def as_given(call: tuple[Any, ...], leaves: Sequence[Any], spec: trees.TreeSpec) -> list[Any]:
    """Copy the objects of a call that a planned call with a result of `spec` writes into. Returns
    the leaves."""
    objects = [*_objects(call)]
    added = trees.tree_unflatten([None] * spec.num_leaves, spec).added
    written = {id(objects[number]) for number, _ in added}

    def is_written(leaf: Any) -> bool:
        return not written.isdisjoint({id(leaf), *(id(data) for data in _wrapped(leaf))})

    copies = {id(leaf): copy.copy(leaf) for leaf in leaves if is_written(leaf)}
    return [copies.get(id(leaf), leaf) for leaf in leaves]


def _objects(call: tuple[Any, ...]) -> Iterator[Any]:
    """Containers and objects of a call, and containers that those wrap."""
    for value in trees.objects(call):
        yield value
        yield from _wrapped(value)


def _wrapped(value: Any) -> tuple[Any, ...]:
    return (value.data,) if isinstance(value, UserDict) else ()


@dataclass(frozen=True, slots=True)
class _GivenHolder:
    """One of the `kinds_of` an object of the call, and what it holds before the forward runs.
    is_of_object: by attributes, or in what it wraps."""

    number: tuple[int, int]
    owner: Any
    kind: Kind
    before: list[Element]
    is_of_object: bool

    def tensors_that_came(self, now: list[Element]) -> dict[Any, torch.Tensor] | None:
        """Into an object; None where others did, or something went: that may be what the next call
        changes, where comparisons of calls cannot look into it."""
        known, held = dict(self.before), dict(now)
        came = {key: value for key, value in now if known.get(key, now) is not value}
        is_more = known.keys() <= held.keys()
        return came if is_more and all(isinstance(v, torch.Tensor) for v in came.values()) else None


def _can_be_copied(value: Any) -> bool:
    """True if `copy.copy` returns an object of the same class. (A class may forbid it.)"""
    try:
        return type(copy.copy(value)) is type(value)
    except Exception:
        return False


def _holders(number: int, value: Any, is_wrapped: bool) -> Iterator[_GivenHolder]:
    """Yield the holders of one object: items of a container, attributes of another object."""
    if isinstance(value, nn.Module | types.FunctionType | types.ModuleType):
        return
    is_container = isinstance(value, dict | list)
    if not is_container and not _can_be_copied(value):
        return
    kinds = (ITEMS, LIST) if is_container else (ATTRIBUTES, SLOTS)
    for position, (owner, kind) in enumerate(kinds_of(value)):
        if kind in kinds:
            before = kind.elements(owner)
            yield _GivenHolder(
                (number, position), owner, kind, before, is_wrapped or not is_container
            )
