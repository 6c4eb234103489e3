"""Answers: what attributes of a tensor, and its place in memory, say of it.

takes: a tensor, the name of an attribute or method. returns: its answer, which guards compare at
each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rockplan.values.interface import ABSENT

PLACE: Mapping[str, Callable[[torch.Tensor], object]] = {
    "storage_offset": torch.Tensor.storage_offset,
    "untyped_storage": lambda tensor: tensor.untyped_storage().nbytes(),
}
"""Method that says where in memory a tensor is -> what is compared of its answer. A question to a
view counts as one to its base, too."""


def answer_of(tensor: torch.Tensor, attribute: str) -> Any:
    """Return what `tensor` answers to the attribute or method of that name, `ABSENT` if it has
    none."""
    ask = PLACE.get(attribute)
    return getattr(tensor, attribute, ABSENT) if ask is None else ask(tensor)
