"""Autocast: the state of a thread, read and entered again."""

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
