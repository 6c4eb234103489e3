"""Plans in another order of first executions: legal, the same bits, less to run again."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from rockplan.budget import Budget
from rockplan.graph_builder.lowering.backward_order import predecessors, renumbered
from rockplan.ilp.whole_graph.refine import refined
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.search.local import greedy_eviction
from rockplan.search.local.exchange import ExchangeLimits, exchanged, squeezed
from rockplan.search.planning import plan_anew
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import first_executions
from testing.models import Case, gpt2, mean_square, t5
from testing.training import train_side_by_side, twin
from tests.orders import planned_in, roofline_problem


class Decayed(nn.Module):
    """Linear attention with a decay, in one chunk: three matrices share the decay."""

    def __init__(self, width: int = 16, length: int = 64) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.g = nn.Linear(width, 1)
        self.register_buffer("mask", torch.ones(length, length).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        g = nn.functional.logsigmoid(self.g(x)).cumsum(1)
        decay = (g - g.transpose(1, 2)).exp() * self.mask
        v = v - (k @ k.transpose(1, 2) * decay) @ v
        state = (k * g.exp()).transpose(1, 2) @ v
        return x + (q @ k.transpose(1, 2) * decay) @ v + (q * g.exp()) @ state


def decayed() -> Case:
    return Case("decayed", Decayed(), (torch.randn(4, 64, 16),), {}, mean_square)


class Thrice(nn.Module):
    """Autograd adds the second and the third gradient of the input to the first, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x).tanh() for layer in self.layers])


def thrice() -> Case:
    return Case("thrice", Thrice(), (torch.randn(8, 16, requires_grad=True),), {}, mean_square)


def in_order(graph: CDGraph, order: Sequence[int]) -> bool:
    """Does `order` keep what has to stay in order?"""
    place = {node: position for position, node in enumerate(order)}
    before = predecessors(graph)
    return all(place[a] < place[b] for b in range(len(order)) for a in before[b])


def test_first_executions_move() -> None:
    torch.manual_seed(0)
    graph = roofline_problem(decayed()).constrained
    thrifty = greedy_eviction.thriftiest(graph).schedule
    start = squeezed(graph, thrifty, limits=ExchangeLimits(effort=100_000))
    budget_bytes = simulate(graph, start).peak_bytes
    stay, move = (
        exchanged(graph, start, budget_bytes, limits=ExchangeLimits(effort=30_000, moves=moves))
        for moves in (False, True)
    )
    assert simulate(graph, move).peak_bytes <= budget_bytes
    assert simulate(graph, move).time_ns < 0.97 * simulate(graph, stay).time_ns
    assert first_executions(stay) == tuple(range(len(graph.nodes)))
    assert first_executions(move) != first_executions(stay)
    assert in_order(graph, first_executions(move))


def test_plans_are_certified_in_their_own_order() -> None:
    torch.manual_seed(0)
    problem = roofline_problem(decayed())
    options = Options(cache=False, time_limit_s=600, bound_time_limit_s=0.0)
    plan = plan_anew(problem, Budget(size_bytes=330_000), options)
    order = first_executions(plan.schedule)
    assert order != tuple(range(len(order))) and in_order(problem.constrained, order)
    relaxation = refined(renumbered(problem.constrained, order), 330_000, deadline=math.inf)
    assert relaxation is not None
    assert plan.certificate.bound_ns == relaxation.bound_ns
    assert problem.graph.time_ns < relaxation.bound_ns <= plan.time_ns
    assert plan.peak_bytes <= 330_000


CASES = {
    "decayed": decayed,
    "gpt2": lambda: gpt2(width=32, heads=2, vocabulary=64, length=32, attention="eager"),
    "t5": lambda: t5(1, width=32, heads=2, vocabulary=64, length=32),
}


@pytest.mark.parametrize("name", CASES)
def test_bits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    eager = twin(case)
    planned = planned_in(case, random.Random(0), tmp_path / "plan.json")
    assert planned.plan.overhead > 0
    train_side_by_side(case, planned, eager, steps=3)


@pytest.mark.parametrize("seed", range(5))
def test_gradients_of_an_input_are_added_in_order(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = thrice()
    eager = twin(case)
    planned = planned_in(case, random.Random(seed), tmp_path / "plan.json")
    train_side_by_side(case, planned, eager, steps=2)
