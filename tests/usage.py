"""What the tests of usage share: a small network, and a planned and an eager copy side by side."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rockplan.solving import programs
from testing.models import Case, encoder, mean_square, mlp
from testing.training import QUICK, assert_equal_trees, assert_same_state, solve_case, twin

SAMPLE = torch.randn(32, 16)


# The smallest plan recomputes most.
BUDGET = "min"


class Net(nn.Module):
    """Two halves with dropout and BatchNorm, so that replay and statistics matter."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2))
        self.norm = nn.BatchNorm1d(4 * width)
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4 * width, width), nn.Tanh())
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.second(self.norm(self.first(x)))
        return self.head(x + self.second(self.norm(self.first(x))))


class NormOfTransposed(nn.Module):
    """Batch normalization, which writes statistics, of a transposed tensor: its result is
    contiguous, where PyTorch's shape rule says that it is transposed, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.norm(self.a(x).transpose(1, 2)).transpose(1, 2))
        return y


def net_case(batch: int = 128) -> Case:
    torch.manual_seed(0)
    return Case("net", Net().train(), (torch.randn(batch, 16),), {}, mean_square)


def pair(case: Case, budget: Any = BUDGET, **options: Any) -> tuple[nn.Module, nn.Module]:
    """(planned, eager) with equal parameters."""
    eager = twin(case)
    return solve_case(case, budget, **{"options": QUICK, **options}), eager


def both(planned: nn.Module, eager: nn.Module, use: Callable[[nn.Module], Any], what: str) -> None:
    """`use` on both modules from the same seed gives the same results and state."""
    results = []
    for module in (eager, planned):
        torch.manual_seed(5)
        results.append(use(module))
        results.append(torch.get_rng_state())
    assert_equal_trees(results[2], results[0], what)
    assert torch.equal(results[3], results[1]), f"{what}: generator"
    assert_same_state(planned, eager, what)


def mlp_case() -> Case:
    torch.manual_seed(1)
    return mlp(depth=4, width=16, batch=32)


def count_programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows whenever something is planned."""
    made: list[int] = []
    original = programs.new_or_known_program

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr("rockplan.solving.programs.new_or_known_program", counted)
    return made


def encoder_without_dropout() -> Case:
    case = encoder()
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return case


def wide(depth: int = 4, width: int = 256, batch: int = 512) -> Case:
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    return Case("wide", model, (torch.randn(batch, width),), {}, mean_square)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.second = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.second(self.act(self.first(self.norm(x)))))


class StackWithCount(nn.Module):
    """Layers that end in a scalar; statistics that change once."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.bn = nn.BatchNorm1d(width)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        self.steps.add_(1)
        return (self.bn(x) * self.steps).square().mean()


class LookupByCount(nn.Module):
    """Looks up rows by a count: in range for its sample, not for made-up values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table = nn.Linear(32, 32), nn.Embedding(2, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = (self.scale(x) - 1e3 > 0.5).sum(-1)
        rows: torch.Tensor = self.table(count)
        return rows.tanh()


class Classifier(nn.Module):
    """Returns its loss and, by far the largest tensor, the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 400)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(torch.relu(self.body(x)))
        return functional.cross_entropy(scores, torch.arange(len(x), device=x.device) % 400), scores


def classifier(batch: int = 64) -> Case:
    torch.manual_seed(0)
    sample = torch.randn(batch, 16)
    return Case("classifier", Classifier(), (sample,), {}, operator.itemgetter(0))
