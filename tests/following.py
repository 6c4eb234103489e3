"""Models that do one thing, and their training beside eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
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


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything of a module tree that planning could leave changed."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            found[f"{path}:{name}"] = (value, copy.copy(value))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not nn.parameter.is_lazy(tensor):
                data = None if tensor.is_meta else tensor.detach().clone()
                found[f"{path}.{name}"] = (tensor, (data, tensor.requires_grad, tensor.grad))
    return found


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = state_of(model)
    assert after.keys() == before.keys()
    for name, (value, content) in before.items():
        assert after[name][0] is value, name
        if isinstance(value, torch.Tensor) and isinstance(content, tuple):
            data, requires_grad, grad = content
            assert data is None or torch.equal(value.detach(), data), name
            assert value.requires_grad == requires_grad and value.grad is grad, name
        elif isinstance(content, dict | list):
            assert after[name][1] == content, name
