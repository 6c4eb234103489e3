"""Given: containers and objects of the caller's into which a forward puts what it computes.

takes: a call before and after its forward. returns: the result together with what is in such
containers then; what the caller gave stands there by its place in the call. guarantees: a planned
call leaves the same in the caller's own objects, and returns these where the forward does.
"""

from __future__ import annotations

import copy
import types
from collections import UserDict, UserList
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


class WithContents(NamedTuple):
    """What a forward returns, and what it leaves in containers and objects of the caller's, by
    number and position among their `kinds_of`."""

    result: Any
    contents: dict[tuple[int, int], Any]


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
        """`result`, if that is all; or with what the forward has left in the caller's objects,
        which hold again what they held."""
        contents: dict[tuple[int, int], Any] = {}
        for holder in self.holders:
            now = holder.kind.elements(holder.owner)
            if not same_elements(now, holder.before) and holder.may_hold(now):
                told = {key: self._told(value) for key, value in now}
                is_list = holder.kind is LIST
                contents[holder.number] = [*told.values()] if is_list else told
        for holder in self.holders:
            if holder.number in contents:
                holder.kind.write(holder.owner, holder.before)
        return WithContents(self._told(result), contents) if contents else result

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
    """Is it the structure of a result with what is in containers of the caller's?"""
    return spec.type is WithContents or spec.context is WithContents


def returned(
    leaves: Sequence[Any], spec: trees.TreeSpec, call: tuple[Any, ...], given: Sequence[Any]
) -> Any:
    """What a planned call returns, after it has left the rest in containers of the caller's. call:
    its (args, kwargs); given: the leaves of that."""
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
    return made.result


def as_given(call: tuple[Any, ...], leaves: Sequence[Any], spec: trees.TreeSpec) -> list[Any]:
    """The leaves of a call, with copies of the objects that a planned call with a result of `spec`
    writes into: they hold what they held."""
    objects = [*_objects(call)]
    changed = trees.tree_unflatten([None] * spec.num_leaves, spec).contents
    written = {id(objects[number]) for number, _ in changed}

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
    return (value.data,) if isinstance(value, UserDict | UserList) else ()


@dataclass(frozen=True, slots=True)
class _GivenHolder:
    """One of the `kinds_of` an object of the call, and what it holds before the forward runs.
    is_of_object: by attributes, or in what it wraps."""

    number: tuple[int, int]
    owner: Any
    kind: Kind
    before: list[Element]
    is_of_object: bool

    def may_hold(self, now: list[Element]) -> bool:
        """What has come into an object are tensors: others may be what the next call changes, where
        comparisons of calls cannot look into it."""
        known = dict(self.before)
        came = [value for key, value in now if known.get(key, now) is not value]
        return not self.is_of_object or all(isinstance(v, torch.Tensor) for v in came)


def _holders(number: int, value: Any, is_wrapped: bool) -> Iterator[_GivenHolder]:
    """Attributes are those of objects that are no containers."""
    if isinstance(value, nn.Module | types.FunctionType | types.ModuleType):
        return
    is_container = isinstance(value, dict | list)
    kinds = (ITEMS, LIST) if is_container else (ATTRIBUTES, SLOTS)
    for position, (owner, kind) in enumerate(kinds_of(value)):
        if kind in kinds:
            before = kind.elements(owner)
            yield _GivenHolder(
                (number, position), owner, kind, before, is_wrapped or not is_container
            )
