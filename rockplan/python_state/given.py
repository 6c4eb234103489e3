"""Given: dictionaries and lists of the caller's into which a forward puts what it computes.

takes: the arguments of a call, before and after its forward. returns: the result together with the
contents of such containers after the forward, in which arguments of the call stand by their
position. guarantees: a planned call leaves the same contents in the caller's own containers, and
returns these where the forward does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rockplan.python_state import trees
from rockplan.python_state.elements import ITEMS, LIST, Access, Element, same_elements
from rockplan.values.interface import GivenLeaf


@dataclass(frozen=True, slots=True)
class GivenContainer:
    """Stands for a container or object of the call. number: its position in `trees.objects`."""

    number: int


class WithContents(NamedTuple):
    """The result of a forward with the contents that it left in the caller's containers, by their
    positions in `trees.objects`."""

    result: Any
    contents: dict[int, Any]


@dataclass(frozen=True, slots=True)
class GivenCall:
    """The arguments of a call, before its forward runs. leaves: identity of a leaf -> its position
    among the leaves; numbers: identity of a container or object -> its position; before: (position,
    container, its elements); alive: keeps these identities valid."""

    leaves: Mapping[int, int]
    numbers: Mapping[int, int]
    before: tuple[tuple[int, Any, list[Element]], ...]
    alive: Sequence[Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GivenCall:
        """Return the arguments of a call, and the elements that each container in them has now."""
        leaves = trees.tree_leaves((args, kwargs))
        objects = [*trees.objects((args, kwargs))]
        positions = {
            id(leaf): i
            for i, leaf in reversed([*enumerate(leaves)])
            if isinstance(leaf, torch.Tensor) or not isinstance(leaf, trees.NOT_COMPARED)
        }
        numbers = {id(o): n for n, o in reversed([*enumerate(objects)])}
        containers = [(n, objects[n]) for n in sorted(numbers.values())]
        kept = ((number, owner) for number, owner in containers if isinstance(owner, dict | list))
        before = tuple((number, owner, _row(owner).read(owner)) for number, owner in kept)
        return cls(positions, numbers, before, (leaves, objects))

    def with_contents(self, result: Any) -> Any:
        """Return `result` with the elements that the forward left in the caller's containers,
        arguments by position, and put the former ones back; `result` itself if it changed none."""
        contents: dict[int, Any] = {}
        for number, owner, before in self.before:
            now = _row(owner).read(owner)
            if not same_elements(now, before):
                found = {key: self._by_position(value) for key, value in now}
                contents[number] = [*found.values()] if _row(owner) is LIST else found
        for number, owner, before in self.before:
            if number in contents:
                _row(owner).write(owner, before)
        return WithContents(self._by_position(result), contents) if contents else result

    def _by_position(self, node: Any) -> Any:
        if id(node) in self.leaves:
            return GivenLeaf(self.leaves[id(node)])
        if id(node) in self.numbers:
            return GivenContainer(self.numbers[id(node)])
        return trees.mapped(node, self._by_position)


def _row(container: dict[Any, Any] | list[Any]) -> Access:
    return LIST if isinstance(container, list) else ITEMS


def has_contents(spec: trees.TreeSpec) -> bool:
    """True if a result of this structure carries the contents of the caller's containers."""
    return spec.type is WithContents or spec.context is WithContents


def returned(
    leaves: Sequence[Any], spec: trees.TreeSpec, call: tuple[Any, ...], given: Sequence[Any]
) -> Any:
    """Write the contents that a result carries into the caller's containers; return the rest.
    leaves, spec: the flattened result; call: (args, kwargs); given: leaves of `call`."""
    objects = [*trees.objects(call)] if has_contents(spec) else []

    def resolved(leaf: Any) -> Any:
        if isinstance(leaf, GivenLeaf):
            return given[leaf.position]
        return objects[leaf.number] if isinstance(leaf, GivenContainer) else leaf

    result = trees.tree_unflatten([*map(resolved, leaves)], spec)
    if not isinstance(result, WithContents):
        return result
    for number, content in result.contents.items():
        elements = content.items() if isinstance(content, dict) else enumerate(content)
        _row(objects[number]).write(objects[number], [*elements])
    return result.result
