"""Models that do one thing, and their training beside eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rockplan
from testing.training import assert_same_state, assert_same_tensor

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
    for step, call in enumerate(calls):
        ends = []
        for module in (planned, eager):
            torch.manual_seed(step)
            result = module(**call) if isinstance(call, dict) else module(*call)
            loss = getattr(result, "loss", result)
            loss.square().mean().backward()
            ends.append((loss.detach(), torch.get_rng_state()))
        assert_same_tensor(ends[0][0], ends[1][0], "result")
        assert torch.equal(ends[0][1], ends[1][1])
        assert_same_state(planned, eager, f"step {step}")
    return planned


def made_once(net: Any, *args: Tensor) -> Any:
    """`net` after a call."""
    net(*args)
    return net
