"""Autocast: the state of a thread, read and entered again, and which tensors it casts once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Autocast:
    """An autocast state. dtypes: of each of `DEVICE_TYPES` the dtype of autocast, None if it is off
    there; cached: True if a weight that is used several times is cast once."""

    dtypes: tuple[torch.dtype | None, ...]
    cached: bool


DEVICE_TYPES = ("cpu", "cuda")


OFF = Autocast((None,) * len(DEVICE_TYPES), cached=True)


def autocast_state() -> Autocast:
    """Return the autocast state of this thread."""
    dtypes = tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in DEVICE_TYPES
    )
    return Autocast(dtypes, torch.is_autocast_cache_enabled())


def is_cast_once(tensor: torch.Tensor) -> bool:
    """Return whether autocast keeps the cast of `tensor`, whose gradients it then adds up in the
    lower precision: that of a leaf of float32 which requires a gradient, and is no view."""
    is_leaf = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    return is_leaf and tensor.dtype is torch.float32


def cast_is_kept(tensor: torch.Tensor) -> bool:
    """Return whether autocast, as it is now, casts `tensor` once."""
    return is_cast_once(tensor) and torch.is_autocast_enabled(tensor.device.type)


def leaf_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a leaf over the memory of `tensor` that requires a gradient if `like` does, and is
    cast once if `like` is: else it is a view."""
    own = tensor.detach()
    if like.requires_grad and not is_cast_once(like):
        with torch.enable_grad():  # writing to what is a view without gradients has other errors
            own = torch.ops.aten.alias(own)
    return own.requires_grad_(like.requires_grad)


@contextlib.contextmanager
def under_autocast(state: Autocast) -> Iterator[None]:
    """While active, autocast of each device type is as in `state`, which `autocast_state` returned
    at another time: on with the same dtype, or off."""
    with contextlib.ExitStack() as stack:
        for kind, dtype in zip(DEVICE_TYPES, state.dtypes, strict=True):
            if dtype is not None or torch.is_autocast_enabled(kind):
                entered = torch.autocast(
                    kind, dtype, enabled=dtype is not None, cache_enabled=state.cached
                )
                stack.enter_context(entered)
        yield
