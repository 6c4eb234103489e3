"""Tiny models: their plans are near the optimum, and their smallest budget is the least peak."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rockplan
from rockplan import Options
from rockplan.budget import Budget
from rockplan.graph_builder.lowering.backward_order import renumbered
from rockplan.oracles.simulate import simulate
from rockplan.search import planning
from rockplan.search.limits import Limits
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import first_executions, keep_all
from testing.exhaustive import Exhaustive
from testing.models import Case, mean_square
from testing.priced import prepared_case

OPTIONS = Options(cache=False, time_limit_s=600)

pytestmark = pytest.mark.usefixtures("thorough")


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


@pytest.mark.parametrize("name", MODELS)
def test_plans_of_tiny_models_are_near_the_optimum(name: str) -> None:
    """Of the order of the graph; what a certificate proves is so of the order of the plan."""
    problem = prepared_case(
        Case(name, MODELS[name](), (torch.randn(16, 8),), {}, mean_square), OPTIONS
    )
    graph = problem.constrained
    with pytest.raises(rockplan.InfeasibleBudget) as caught:
        planning.plan_anew(problem, Budget(size_bytes=1), OPTIONS)
    least_bytes = caught.value.minimum_bytes
    assert fastest_ns(graph, least_bytes - 1) is None
    most_bytes = simulate(graph, keep_all(graph)).peak_bytes
    for part in range(4):
        budget_bytes = least_bytes + (most_bytes - least_bytes) * part // 4
        plan = planning.plan_anew(problem, Budget(size_bytes=budget_bytes), OPTIONS)
        optimum_ns = fastest_ns(graph, budget_bytes)
        assert optimum_ns is not None
        assert plan.time_ns <= optimum_ns + Limits().nearness * graph.time_ns
        in_order = fastest_ns(renumbered(graph, first_executions(plan.schedule)), budget_bytes)
        assert in_order is not None
        assert graph.time_ns <= plan.certificate.bound_ns <= in_order <= plan.time_ns


def fastest_ns(graph: CDGraph, budget_bytes: int) -> int | None:
    return Exhaustive(graph, budget_bytes, None, is_free=True, in_order=True).fastest_ns()
