"""Parametrizations: what `torch.nn.utils.parametrize.cached()` means for planned modules.

Within such a block eager computes a parametrized tensor once, for all calls, and keeps it. A plan
is for one call: it computes the tensor once, and keeps nothing. So the first call in a block is
planned like any other, and a call that would read the kept tensor is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from rockplan.errors import StalePlan


def are_cached() -> bool:
    """True inside a block of `parametrize.cached()`."""
    return bool(parametrize._cache_enabled)


@contextlib.contextmanager
def cached_as(cached: bool) -> Iterator[None]:
    """While active, PyTorch is inside a block of `parametrize.cached()` or not, as `are_cached`
    returned at another time."""
    before = parametrize._cache_enabled
    parametrize._cache_enabled = int(cached)
    try:
        yield
    finally:
        parametrize._cache_enabled = before


def claim(planned: nn.Module) -> None:
    """Begin a planned call of `planned` inside a block of `parametrize.cached()`: put a mark into
    PyTorch's cache, which ends with the block. Raises StalePlan if another call in the block has
    computed a parametrized tensor of it. Does nothing outside of a block."""
    if not are_cached():
        return
    cache: dict[Any, Any] = parametrize._cache
    marks = []
    for path, module in planned.named_modules():
        if not parametrize.is_parametrized(module):
            continue
        parametrized = module.parametrizations
        mark = ("rockplan", id(parametrized))
        for name in parametrized:
            if mark in cache or (id(module), name) in cache:
                shown = f"{path}.{name}" if path else name
                raise StalePlan(
                    f"torch.nn.utils.parametrize.cached() keeps '{shown}' from one call to the "
                    "next, and a planned call computes it itself; open a block for each call, or "
                    "plan the module that makes all of the calls"
                )
        marks.append(mark)
    cache.update(dict.fromkeys(marks))
