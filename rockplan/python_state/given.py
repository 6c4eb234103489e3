"""Given: containers and objects of the caller's into which a forward puts what it computes.

takes: the arguments of a call, before and after its forward. returns: the result together with the
contents of such containers after the forward, in which arguments of the call stand by their
position. guarantees: a planned call leaves the same contents in the caller's own objects, and
returns these objects where the forward does.
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
    """Stands for a container or object of the call. number: its position in `_objects(call)`."""

    number: int


Number = tuple[int, int]
"""(position of an object in `_objects(call)`, position in its `kinds_of`): one holder."""


class WithContents(NamedTuple):
    """The result of a forward with the contents that it left in the caller's containers, and with
    the tensors that it added to the caller's objects (`added`)."""

    result: Any
    contents: dict[Number, Any]
    added: dict[Number, dict[Any, Any]]


@dataclass(frozen=True, slots=True)
class GivenCall:
    """The arguments of a call, before its forward runs. leaves: identity of a leaf -> its position
    among the leaves; numbers: identity of a container or object -> its position; alive: keeps these
    identities valid."""

    leaves: Mapping[int, int]
    numbers: Mapping[int, int]
    holders: tuple[_GivenHolder, ...]
    alive: Sequence[Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GivenCall:
        """Note the arguments and the elements of each container and object among them."""
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
        """Return `result` with what the forward put into the caller's containers, and put their
        former content back. Returns `result` alone if the forward put nothing there."""
        contents: dict[Number, Any] = {}
        added: dict[Number, dict[Any, Any]] = {}
        changed: list[_GivenHolder] = []
        for holder in self.holders:
            now = holder.kind.elements(holder.owner)
            if same_elements(now, holder.before):
                continue
            if not holder.is_of_object:
                contents_now = {key: self._by_position(value) for key, value in now}
                contents[holder.number] = (
                    [*contents_now.values()] if holder.kind is LIST else contents_now
                )
            elif (came := holder.tensors_that_came(now)) is not None:
                added[holder.number] = {
                    key: self._by_position(value) for key, value in came.items()
                }
            else:
                continue
            changed.append(holder)
        for holder in changed:
            holder.kind.write(holder.owner, holder.before)
        return WithContents(self._by_position(result), contents, added) if changed else result

    def _by_position(self, node: Any) -> Any:
        """Return `node` with the arguments of the call in it replaced by their positions."""
        if id(node) in self.leaves:
            return GivenLeaf(self.leaves[id(node)])
        if id(node) in self.numbers:
            return GivenContainer(self.numbers[id(node)])
        children = trees.children(node)
        if children is None:
            return node
        return trees.with_children(node, [self._by_position(child) for child in children])


def _is_plain(leaf: Any) -> bool:
    """True for leaves other than tensors that are equal wherever they are."""
    return isinstance(leaf, trees.UNCHANGING) and not isinstance(leaf, torch.Tensor)


def has_contents(spec: trees.TreeSpec) -> bool:
    """True if a result of this structure carries the contents of the caller's containers."""
    return spec.type is WithContents or spec.context is WithContents


def returned(
    leaves: Sequence[Any], spec: trees.TreeSpec, call: tuple[Any, ...], given: Sequence[Any]
) -> Any:
    """Return the result of a planned call, and write the contents that it carries into the caller's
    containers.

    leaves, spec: the flattened result; call: (args, kwargs); given: the leaves of `call`.
    """
    objects = [*_objects(call)] if has_contents(spec) else []

    def real(leaf: Any) -> Any:
        if isinstance(leaf, GivenLeaf):
            return given[leaf.position]
        return objects[leaf.number] if isinstance(leaf, GivenContainer) else leaf

    result = trees.tree_unflatten([*map(real, leaves)], spec)
    if not isinstance(result, WithContents):
        return result
    for (number, position), content in result.contents.items():
        elements = content.items() if isinstance(content, dict) else enumerate(content)
        owner, kind = kinds_of(objects[number])[position]
        kind.write(owner, [*elements])
    for (number, position), came in result.added.items():
        owner, kind = kinds_of(objects[number])[position]
        kind.write(owner, [*(dict(kind.elements(owner)) | came).items()])
    return result.result


def as_given(call: tuple[Any, ...], leaves: Sequence[Any], spec: trees.TreeSpec) -> list[Any]:
    """Return the leaves of a call, with copies of the objects that a planned call with a result of
    `spec` adds tensors to."""
    objects = [*_objects(call)]
    added = trees.tree_unflatten([None] * spec.num_leaves, spec).added
    written = {id(objects[number]) for number, _ in added}

    def is_written(leaf: Any) -> bool:
        return not written.isdisjoint({id(leaf), *(id(data) for data in _wrapped(leaf))})

    copies = {id(leaf): copy.copy(leaf) for leaf in leaves if is_written(leaf)}
    return [copies.get(id(leaf), leaf) for leaf in leaves]


def _objects(call: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the containers and objects of a call, and the dictionaries that UserDicts among them
    wrap."""
    for value in trees.objects(call):
        yield value
        yield from _wrapped(value)


def _wrapped(value: Any) -> tuple[Any, ...]:
    return (value.data,) if isinstance(value, UserDict) else ()


@dataclass(frozen=True, slots=True)
class _GivenHolder:
    """A holder of a container or object of the call, and its elements before the forward runs.
    is_of_object: True for attributes of an object, and for a dictionary that an object wraps."""

    number: tuple[int, int]
    owner: Any
    kind: Kind
    before: list[Element]
    is_of_object: bool

    def tensors_that_came(self, now: list[Element]) -> dict[Any, torch.Tensor] | None:
        """Return the elements that were added or replaced, if all are tensors and none was removed;
        else None. (Another change may be one that the next call needs, and comparing calls would
        not see it.)"""
        before, after = dict(self.before), dict(now)
        came = {key: value for key, value in now if before.get(key, now) is not value}
        keeps_all = before.keys() <= after.keys()
        return (
            came if keeps_all and all(isinstance(v, torch.Tensor) for v in came.values()) else None
        )


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
