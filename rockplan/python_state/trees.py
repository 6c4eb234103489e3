"""Trees of arguments and results, as pytree has them but for torch.Size: here that is a leaf, of
which pytree would give back a plain tuple."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec, tree_unflatten

__all__ = ["TreeSpec", "named_leaves", "tree_flatten", "tree_leaves", "tree_unflatten"]
__all__ += ["children", "objects", "shared", "with_children"]


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    return pytree.tree_flatten(tree, is_leaf=_is_size)


def tree_leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=_is_size)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(its path as Python writes it, such as `['a'][0]`, leaf) of each leaf; where a container has
    no names for what is in it, its number among all."""
    try:
        leaves = pytree.tree_flatten_with_path(tree, is_leaf=_is_size)[0]
    except ValueError:  # registered without
        return [(f"[{i}]", leaf) for i, leaf in enumerate(tree_leaves(tree))]
    return [(pytree.keystr(path), leaf) for path, leaf in leaves]


def _is_size(node: Any) -> bool:
    return type(node) is torch.Size


def shared(tree: Any) -> tuple[tuple[int, int], ...]:
    """Which containers and objects in a tree are one: (number of a place, that of the first one
    with the same object). Tensors, and what does not change, are not counted."""
    first: dict[int, int] = {}
    pairs: list[tuple[int, int]] = []
    for number, node in enumerate(objects(tree)):
        known = first.setdefault(id(node), number)
        if known != number:
            pairs.append((known, number))
    return tuple(pairs)


def objects(node: Any) -> Iterator[Any]:
    """Containers and objects in a tree, which may change."""
    if isinstance(node, UNCHANGING):
        return
    if not isinstance(node, tuple):
        yield node
    for child in children(node) or ():
        yield from objects(child)


def children(node: Any) -> list[Any] | None:
    """Return what a node of a tree holds, None for a leaf."""
    opened = _opened(node)
    return None if opened is None else opened[0]


def with_children(node: Any, others: list[Any]) -> Any:
    """Return a node like `node` that holds `others`."""
    opened = _opened(node)
    assert opened is not None
    return opened[1](others)


def _opened(node: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Without a function that refers to itself and to the node, as pytree makes one for a call: it
    would hold the tensors until Python collects cycles."""
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


UNCHANGING: tuple[type, ...] = (
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
UNCHANGING += (torch.dtype, torch.device)
"""Classes of leaves that are what they are; tensors among them."""
