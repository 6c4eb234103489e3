"""Plans in another order of first executions: legal, the same bits, less to run again."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rockplan
from benchmarks.models import Case, gpt2, t5
from rockplan.budget import Budget
from rockplan.codegen import rng_replay
from rockplan.graph_builder.costs.price import roofline
from rockplan.graph_builder.lowering.backward_order import gathered, predecessors, renumbered
from rockplan.graph_builder.lowering.lower import lower
from rockplan.graph_builder.partition import partition
from rockplan.graph_builder.tracing.capture import capture
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search import minimum_peak, planning
from rockplan.search.local import greedy_eviction
from rockplan.search.local.exchange import annealed_again
from rockplan.values.graph import CDGraph, producers, readers
from rockplan.values.schedule import Schedule, first_executions, keep_all
from tests.graphs import branched, with_random_takes
from tests.orders import plan_in, topological
from tests.training import QUICK, solve_case, train_side_by_side, twin
from tests.usage import mean_square


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


def spans_bytes(graph: CDGraph) -> int:
    """Bytes times backward nodes from the first to the last one that touches each storage."""
    first, made, read = len(graph.forward), producers(graph), readers(graph)
    total = 0
    for data in graph.data:
        places = [n for n in (*read[data.index], made.get(data.index, -1)) if n >= first]
        if places and not data.kind.resident and data.index not in graph.held:
            total += data.size_bytes * (max(places) - min(places))
    return total


@given(st.integers(0, 2**32), st.integers(1, 12), st.booleans())
def test_random_graphs(seed: int, size: int, taking: bool) -> None:
    rng = random.Random(seed)
    graph = branched(rng, size)
    graph = with_random_takes(rng, graph) if taking else graph
    order = gathered(graph)
    assert sorted(order) == list(range(len(graph.nodes)))
    found = renumbered(graph, order)
    assert found.forward == graph.forward
    verify(found, keep_all(found))
    place = {node: position for position, node in enumerate(order)}
    before = predecessors(graph)
    assert all(place[a] < place[b] for b in range(len(order)) for a in before[b])
    assert spans_bytes(found) <= spans_bytes(graph)


def test_some_random_graphs_gain() -> None:
    """The property above is no empty one."""
    gained = 0
    for seed in range(100):
        graph = branched(random.Random(seed), 8)
        gained += spans_bytes(renumbered(graph, gathered(graph))) < spans_bytes(graph)
    assert gained > 10


def roofline_problem(case: Case) -> planning.Problem:
    captured = capture(case.model, case.args, case.kwargs)
    graph = lower(captured, rng_replay.state_bytes(torch.device("cpu"))).graph
    return planning.problem_of(graph, roofline(graph, 1e11, 2e12), Options(cache=False))


def test_less_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second order as it is."""
    exchanged = planning.annealed_again

    def without_moves(*args: Any, moves: bool = False, **kwargs: Any) -> Schedule:
        return exchanged(*args, **kwargs)

    monkeypatch.setattr(planning, "annealed_again", without_moves)
    torch.manual_seed(0)
    problem = roofline_problem(decayed())
    options = Options(cache=False, time_limit_s=600, bound_time_limit_s=0.1)
    common = planning.common_of(problem, options)
    alone = replace(common, others=lambda: ())
    budget = Budget(size_bytes=312_000)
    found = planning.plan_anew(problem, budget, options, common)
    in_order = planning.plan_anew(problem, budget, options, alone)
    in_graph = tuple(range(len(problem.graph.nodes)))
    assert first_executions(in_order.schedule) == in_graph
    assert first_executions(found.schedule) != in_graph
    verify(problem.constrained, found.schedule)
    assert simulate(problem.constrained, found.schedule).peak_bytes <= 312_000
    assert found.time_ns < 0.95 * in_order.time_ns
    assert problem.graph.time_ns <= found.certificate.bound_ns <= found.time_ns


def test_what_another_order_leads_to_counts_for_the_smallest_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And is known later, however much time there is then."""
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    problem = roofline_problem(decayed())
    graph = problem.constrained
    everything = minimum_peak.Improved(keep_all(graph), is_complete=True)
    monkeypatch.setattr(minimum_peak, "_smallest", lambda *_: everything)
    found = planning.common_of(problem, Options()).smallest(math.inf)
    assert found.ordered.numbers is not None
    assert found.peak_bytes < minimum_peak.peak_bytes(graph, everything)
    verify(graph, found.ordered.of_problem(found.found.schedule))
    hurried = planning.common_of(problem, Options()).smallest(-math.inf)
    assert hurried.peak_bytes == found.peak_bytes
    budget = Budget(size_bytes=found.peak_bytes)
    plan = planning.plan_anew(problem, budget, Options(time_limit_s=0.0))
    assert plan.peak_bytes <= found.peak_bytes


def test_first_executions_move() -> None:
    """Within a budget that is short for both orders, to one that is neither."""
    torch.manual_seed(0)
    problem = roofline_problem(decayed())
    graph = problem.constrained
    start = greedy_eviction.within(graph, 290_000)
    assert start is not None
    search = functools.partial(
        annealed_again, graph, start, 290_000, enough_ns=graph.time_ns, deadline=math.inf
    )
    stay, move = search(effort=100_000), search(effort=100_000, moves=True)
    assert simulate(graph, move).peak_bytes <= 290_000
    assert simulate(graph, move).time_ns < 0.9 * simulate(graph, stay).time_ns
    assert first_executions(stay) == tuple(range(len(graph.nodes)))
    order = first_executions(move)
    assert order not in (first_executions(stay), gathered(graph))
    place = {node: position for position, node in enumerate(order)}
    before = predecessors(graph)
    assert all(place[a] < place[b] for b in range(len(order)) for a in before[b])


def test_a_plan_is_certified_in_the_order_to_which_its_first_executions_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    problem = roofline_problem(decayed())
    graph = problem.constrained
    bounds: dict[CDGraph, int] = {}
    relaxed = planning.fitted_relaxed

    def noted(graph: CDGraph, *args: Any) -> Any:
        found = relaxed(graph, *args)
        bounds[graph] = found[0].bound_ns
        return found

    monkeypatch.setattr(planning, "fitted_relaxed", noted)
    options = Options(cache=False, time_limit_s=600, bound_time_limit_s=0.0)
    plan = planning.plan_anew(problem, Budget(size_bytes=330_000), options)
    order = first_executions(plan.schedule)
    assert order not in (tuple(range(len(order))), gathered(graph))
    assert plan.certificate.bound_ns == bounds[renumbered(graph, order)]
    assert plan.peak_bytes <= 330_000


@pytest.fixture(params=["gathered", "random"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    at_random = functools.partial(topological, random.Random(0))
    plan_in(at_random if request.param == "random" else gathered, monkeypatch)


CASES = {
    "decayed": decayed,
    "gpt2": lambda: gpt2(width=32, heads=2, vocabulary=64, length=32, attention="eager"),
    "t5": lambda: t5(1, width=32, heads=2, vocabulary=64, length=32),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("elsewhere")
def test_bits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    eager = twin(case)
    options = replace(QUICK, cache=False)
    planned = solve_case(case, "70%", options=options)
    order = first_executions(planned.plan.schedule)
    assert order != tuple(sorted(order))
    train_side_by_side(case, planned, eager, steps=3)
    rockplan.save_plan(planned, tmp_path / "plan.json")
    loaded = rockplan.load(
        case.model, case.args, tmp_path / "plan.json", sample_kwargs=case.kwargs, options=options
    )
    assert loaded.plan.schedule == planned.plan.schedule


@pytest.mark.parametrize("seed", range(5))
def test_gradients_of_an_input_are_added_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = thrice()
    eager = twin(case)
    plan_in(functools.partial(topological, random.Random(seed)), monkeypatch)
    planned = solve_case(case, "200%", options=replace(QUICK, cache=False))
    order = first_executions(planned.plan.schedule)
    assert order != tuple(sorted(order))
    train_side_by_side(case, planned, eager, steps=2)


def test_no_other_order_of_a_chain() -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(6)))
    case = Case("tanh", model, (torch.randn(8, 8, requires_grad=True),), {}, mean_square)
    problem = roofline_problem(case)
    assert planning.common_of(problem, Options(cache=False)).others() == ()
    assert len(partition(problem.constrained)) > 1
