"""Answers: what a tensor says of itself, of which more than attributes can be asked.

takes: a tensor, a question. returns: its answer, to be compared at each call.
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
"""Questions that are asked by calling a method."""

PLACE: Mapping[str, Callable[[torch.Tensor], object]] = {
    "storage_offset": torch.Tensor.storage_offset,
    "untyped_storage": lambda tensor: tensor.untyped_storage().nbytes(),
}
"""Questions of where in memory a tensor is, by the method that is called, with what is compared.
Whoever asks a view has asked what it is a view of."""


def answer_of(tensor: torch.Tensor, attribute: str) -> Any:
    """What `tensor` says of itself, `ABSENT` where it has no such attribute."""
    ask = ASKED.get(attribute) or PLACE.get(attribute)
    return getattr(tensor, attribute, ABSENT) if ask is None else ask(tensor)
