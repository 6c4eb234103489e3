"""Trees of arguments and results, as in pytree, except that a torch.Size is a leaf (pytree would
return it as a plain tuple)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec, tree_unflatten

__all__ = ["TreeSpec", "named_leaves", "tree_flatten", "tree_leaves", "tree_unflatten"]
__all__ += ["mapped", "objects", "shared"]


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    return pytree.tree_flatten(tree, is_leaf=_is_size)


def tree_leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=_is_size)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return (path, leaf) pairs; the path is as Python writes it, such as `['a'][0]`. If a
    container has no names for its elements, the paths of all leaves are their numbers."""
    try:
        leaves = pytree.tree_flatten_with_path(tree, is_leaf=_is_size)[0]
    except ValueError:  # a container was registered without names
        return [(f"[{i}]", leaf) for i, leaf in enumerate(tree_leaves(tree))]
    return [(pytree.keystr(path), leaf) for path, leaf in leaves]


def _is_size(node: Any) -> bool:
    return type(node) is torch.Size


def shared(tree: Any) -> tuple[tuple[int, int], ...]:
    """Return (number of the first place, of the second) for containers and objects that occur
    twice, numbered as `objects` yields them; tensors and immutable values do not count."""
    first: dict[int, int] = {}
    pairs: list[tuple[int, int]] = []
    for number, node in enumerate(objects(tree)):
        known = first.setdefault(id(node), number)
        if known != number:
            pairs.append((known, number))
    return tuple(pairs)


def objects(node: Any) -> Iterator[Any]:
    """Yield the containers (tuples are only looked into) and other objects in a tree that may
    change, without tensors, in a fixed order."""
    if isinstance(node, NOT_COMPARED):
        return
    if not isinstance(node, tuple):
        yield node
    opened = _opened(node)
    for child in opened[0] if opened else ():
        yield from objects(child)


def mapped(node: Any, of: Callable[[Any], Any]) -> Any:
    """Return a node like `node` that holds `of(child)` for each child; `node` itself if these are
    the same objects, or if it is a leaf."""
    opened = _opened(node)
    if opened is None:
        return node
    others = [of(child) for child in opened[0]]
    return node if all(map(operator.is_, others, opened[0])) else opened[1](others)


def _opened(node: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return (children of a node, a function that makes a node like it of other children); None for
    a leaf.

    pytree's own functions would keep the node in a reference cycle, and with it tensors, until
    Python collects cycles.
    """
    kind = type(node)
    if kind is torch.Size:
        return None
    definition = pytree.SUPPORTED_NODES.get(kind)
    if definition is not None:
        leaves, context = definition.flatten_fn(node)
        return list(leaves), lambda others: definition.unflatten_fn(others, context)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(node), kind._make
    return None


NOT_COMPARED: tuple[type, ...] = (
    torch.Tensor,
    torch.Size,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
)
NOT_COMPARED += (torch.dtype, torch.device)
"""Classes of leaves that are not looked into for changes: immutable values, and tensors."""
