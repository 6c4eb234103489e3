"""Given: dictionaries and lists of the caller's into which a forward puts what it computes.

takes: a call before and after its forward. returns: the result together with what is in such
containers then; what the caller gave stands there by its place in the call. guarantees: a planned
call leaves the same in the caller's own objects, and returns these where the forward does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rockplan.python_state import trees
from rockplan.python_state.holders import same_elements
from rockplan.python_state.object_slots import ITEMS, LIST, Element, Kind
from rockplan.values.interface import GivenLeaf


@dataclass(frozen=True, slots=True)
class GivenContainer:
    """Stands for the container or object of the arguments of this number (`trees.objects`)."""

    number: int


class WithContents(NamedTuple):
    """What a forward returns, and what it leaves in containers of the caller's, by their number."""

    result: Any
    contents: dict[int, Any]


@dataclass(frozen=True, slots=True)
class GivenCall:
    """What a call is made with, before its forward runs. leaves, numbers: of leaves, and of
    containers and objects, by identity; containers: number, dictionary or list, and what it
    holds."""

    leaves: Mapping[int, int]
    numbers: Mapping[int, int]
    containers: tuple[tuple[int, Any, list[Element]], ...]
    alive: Sequence[Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GivenCall:
        leaves = trees.tree_leaves((args, kwargs))
        objects = [*trees.objects((args, kwargs))]
        positions = {id(x): i for i, x in reversed([*enumerate(leaves)]) if not _is_plain(x)}
        numbers = {id(o): n for n, o in reversed([*enumerate(objects)]) if id(o) not in positions}
        places = [(n, objects[n]) for n in sorted(numbers.values())]
        containers = ((n, o, _kind(o).elements(o)) for n, o in places if isinstance(o, dict | list))
        return cls(positions, numbers, tuple(containers), (leaves, objects))

    def with_contents(self, result: Any) -> Any:
        """`result`, if that is all; or with what the forward has left in containers, which hold
        again what they held."""
        contents: dict[int, Any] = {}
        for number, owner, before in self.containers:
            now = _kind(owner).elements(owner)
            if not same_elements(now, before):
                told = {key: self._told(value) for key, value in now}
                contents[number] = told if isinstance(owner, dict) else [*told.values()]
        for number, owner, before in self.containers:
            if number in contents:
                _kind(owner).write(owner, before)
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
    objects = [*trees.objects(call)] if has_contents(spec) else []

    def real(leaf: Any) -> Any:
        if isinstance(leaf, GivenLeaf):
            return given[leaf.position]
        return objects[leaf.number] if isinstance(leaf, GivenContainer) else leaf

    made = trees.tree_unflatten([*map(real, leaves)], spec)
    if not isinstance(made, WithContents):
        return made
    for number, content in made.contents.items():
        elements = content.items() if isinstance(content, dict) else enumerate(content)
        _kind(objects[number]).write(objects[number], [*elements])
    return made.result


def _kind(container: Any) -> Kind:
    return LIST if isinstance(container, list) else ITEMS
