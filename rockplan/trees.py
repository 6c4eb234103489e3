"""Trees of arguments and results, as pytree has them but for torch.Size: here that is a leaf, of
which pytree would give back a plain tuple."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec, tree_unflatten

__all__ = ["TreeSpec", "named_leaves", "tree_flatten", "tree_leaves", "tree_unflatten"]


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    return pytree.tree_flatten(tree, is_leaf=_is_size)


def tree_leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=_is_size)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(its path as Python writes it, such as `['a'][0]`, leaf) of each leaf; where a container has
    no names for what is in it, its number among all."""
    try:
        found = pytree.tree_flatten_with_path(tree, is_leaf=_is_size)[0]
    except ValueError:  # registered without
        return [(f"[{i}]", leaf) for i, leaf in enumerate(tree_leaves(tree))]
    return [(pytree.keystr(path), leaf) for path, leaf in found]


def _is_size(node: Any) -> bool:
    return type(node) is torch.Size
