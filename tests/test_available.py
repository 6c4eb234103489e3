"""The budget 'auto': what a CUDA device has free, with PyTorch's answers about it replaced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rockplan
from rockplan.budget import Budget, parse_budget
from rockplan.free_memory import MARGIN, in_bytes

FREE, RESERVED, ALLOCATED = 10_000_000, 700_000, 500_000
CUDA = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of which FREE bytes are free and RESERVED - ALLOCATED are held unused."""
    for name, answer in (
        ("mem_get_info", (FREE, 2 * FREE)),
        ("memory_reserved", RESERVED),
        ("memory_allocated", ALLOCATED),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda asked, a=answer: a if asked == CUDA else None)


class OnCuda(torch.Tensor):
    """A tensor that says it is on a CUDA device."""

    @property
    def device(self) -> torch.device:
        return CUDA


def on_cuda(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.__class__ = type("P", (OnCuda, nn.Parameter), {})
    return module


USABLE = int((FREE + RESERVED - ALLOCATED) * (1 - MARGIN))
WEIGHT, BIAS = 79 * 512, 512
"""Blocks of 512 bytes that the gradients of a 100 x 100 layer take."""


def test_gradients_that_do_not_exist_are_left_room_for() -> None:
    model = on_cuda(nn.Linear(100, 100))
    assert in_bytes(parse_budget("auto"), model) == Budget(size_bytes=USABLE - WEIGHT - BIAS)
    model.weight.requires_grad_(False)
    assert in_bytes(parse_budget("auto"), model) == Budget(size_bytes=USABLE - BIAS)
    model.bias.grad = torch.zeros(100)
    assert in_bytes(parse_budget("auto"), model) == Budget(size_bytes=USABLE)


def test_a_parameter_that_is_used_twice_has_one_gradient() -> None:
    linear = on_cuda(nn.Linear(100, 100, bias=False))
    once = in_bytes(parse_budget("auto"), linear)
    assert in_bytes(parse_budget("auto"), nn.Sequential(linear, linear)) == once


def test_room_for_what_comes_later() -> None:
    model = on_cuda(nn.Linear(1, 1, bias=False))
    all_of_it, less = (in_bytes(parse_budget(b), model).size_bytes for b in ("auto", "AUTO - 1MB"))
    assert all_of_it - less == 10**6
    with pytest.raises(rockplan.InvalidBudget, match="nothing remains for activations"):
        in_bytes(parse_budget("auto-9.2MB"), model)


@pytest.mark.parametrize("text", ["auto-", "auto-min", "auto-40%", "auto-auto", "auto4GB"])
def test_what_does_not_parse(text: str) -> None:
    with pytest.raises(rockplan.InvalidBudget, match="auto-4GB"):
        parse_budget(text)


def test_other_budgets_are_left_alone() -> None:
    for text in ("1GB", "40%", "min"):
        budget = parse_budget(text)
        assert in_bytes(budget, nn.Linear(1, 1)) is budget


def test_on_cpu_it_is_refused() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for plan in (rockplan.solve, rockplan.plan):
        with pytest.raises(rockplan.InvalidBudget, match="one CUDA device.* is on cpu"):
            plan(model, x, budget="auto")


def test_solve_plans_under_the_bytes_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is replaced; model and plan are of the CPU."""
    monkeypatch.setattr("rockplan.free_memory._cuda_device", lambda model: CUDA)
    model, x = nn.Linear(100, 100), torch.randn(8, 100)
    fast = rockplan.solve(model, x, budget="auto")
    assert fast.plan.budget_bytes == USABLE - WEIGHT - BIAS
    (found,) = rockplan.api.plan_each(model, x, ["auto"])
    assert found.budget_bytes == fast.plan.budget_bytes
    x.requires_grad_()
    fast(torch.cat([x, x])).sum().backward()
    assert fast.plan.budget_bytes == USABLE - WEIGHT - BIAS
