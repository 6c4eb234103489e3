"""Answers: what a tensor's methods and attributes say of it (is it pinned? how large is its
storage?).

takes: a tensor, the name of a method or attribute. returns: its answer, which guards compare at
each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rockplan.values.interface import ABSENT

ASKED: Mapping[str, Callable[[torch.Tensor], object]] = {
    "is_shared": torch.Tensor.is_shared,
    "is_pinned": torch.Tensor.is_pinned,
    "_is_view": torch.Tensor._is_view,
}
"""Method -> how to call it. (Other names are read as attributes.)"""

PLACE: Mapping[str, Callable[[torch.Tensor], object]] = {
    "storage_offset": torch.Tensor.storage_offset,
    "untyped_storage": lambda tensor: tensor.untyped_storage().nbytes(),
}
"""Method that says where in memory a tensor is -> what is compared of its answer. A question to a
view counts as one to its base, too."""


def answer_of(tensor: torch.Tensor, attribute: str) -> Any:
    """Return what `tensor` answers to the method or attribute of that name, `ABSENT` if it has
    none."""
    ask = ASKED.get(attribute) or PLACE.get(attribute)
    return getattr(tensor, attribute, ABSENT) if ask is None else ask(tensor)
