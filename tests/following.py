"""Models that do one thing, and their training beside eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import rockplan
from testing.training import assert_same_steps

OPTIONS = rockplan.Options(cache=False, time_limit_s=2)


class Net(nn.Module):
    """A forward of two layers and what is given."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.given = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.given(self, *args, **kwargs)


def assert_planned(model: nn.Module, *calls: Any) -> Any:
    """Trained beside eager by each of `calls` from one seed: same bits, same generator."""
    eager = copy.deepcopy(model)
    first = calls[0] if isinstance(calls[0], dict) else tuple(calls[0])
    planned = rockplan.solve(model, first, "100%", options=OPTIONS)
    assert_same_steps(planned, eager, calls)
    return planned


def made_once(net: Any, *args: Tensor) -> Any:
    """`net` after a call."""
    net(*args)
    return net
