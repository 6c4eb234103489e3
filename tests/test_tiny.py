"""Tiny models: their plans are the optimum, and their smallest budget is the least peak."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rockplan
from benchmarks import priced
from benchmarks.models import Case
from rockplan import Options
from rockplan.budget import Budget
from rockplan.oracles.simulate import simulate
from rockplan.search import planning
from rockplan.values.plan import Status
from rockplan.values.schedule import keep_all
from tests.exhaustive import Exhaustive
from tests.usage import mean_square

OPTIONS = Options(cache=False, time_limit_s=600)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 32)
        self.right = nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.left(x)) * torch.sigmoid(self.right(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


MODELS = {
    "layers": lambda: nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    ),
    "dropout": lambda: nn.Sequential(
        nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 16), nn.Tanh()
    ),
    "norm": lambda: nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8)),
    "branches": Branches,
    "residual": lambda: nn.Sequential(nn.Linear(8, 16), Residual()),
}


def tiny(name: str, monkeypatch: pytest.MonkeyPatch) -> planning.Problem:
    case = Case(name, MODELS[name](), (torch.randn(16, 8),), {}, mean_square)
    monkeypatch.setitem(priced.CASES, name, lambda: case)
    return priced.prepared(name, OPTIONS)


@pytest.mark.parametrize("name", MODELS)
def test_plans_of_tiny_models_are_the_optimum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tiny(name, monkeypatch)
    graph = problem.constrained

    def fastest_ns(budget_bytes: int) -> int | None:
        found = Exhaustive(graph, budget_bytes, None, is_free=True, in_order=True)
        return found.fastest_ns()

    with pytest.raises(rockplan.InfeasibleBudget) as caught:
        planning.plan_anew(problem, Budget(size_bytes=1), OPTIONS)
    least_bytes = caught.value.minimum_bytes
    assert fastest_ns(least_bytes - 1) is None
    most_bytes = simulate(graph, keep_all(graph)).peak_bytes
    for part in range(4):
        budget_bytes = least_bytes + (most_bytes - least_bytes) * part // 4
        plan = planning.plan_anew(problem, Budget(size_bytes=budget_bytes), OPTIONS)
        assert plan.time_ns == fastest_ns(budget_bytes)
        assert plan.certificate.bound_ns == plan.time_ns
        assert plan.certificate.status is Status.OPTIMAL
