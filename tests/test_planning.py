"""From a priced graph to a certified plan: what ends the search, and what the plan then says."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rockplan
from rockplan import Options
from rockplan.api import plan_each
from rockplan.budget import Budget, parse_budget
from rockplan.errors import InfeasibleBudget
from rockplan.graph_builder.partition import partition
from rockplan.ilp.blocks import pareto_search
from rockplan.ilp.blocks.pareto_search import Settings, option_families
from rockplan.oracles.constraints import with_room_for_loss
from rockplan.oracles.simulate import simulate
from rockplan.search import block_families, planning
from rockplan.search.limits import Limits
from rockplan.search.minimum_peak import LeastPeak, least_peak
from rockplan.search.pipeline import STAGES, run
from rockplan.search.problem import Goal, Problem
from rockplan.values.block import OptionFamily
from rockplan.values.graph import CDGraph, as_eager, caller_bytes
from rockplan.values.plan import Plan, Status
from rockplan.values.schedule import keep_all
from testing import models
from testing.graphs import random_graph
from testing.models import Case, mean_square
from testing.priced import prepared, prepared_case
from tests.planning import quick_limits

NO_CACHE = Options(cache=False, time_limit_s=600)
"""No time limit strikes, however slow the machine is."""


@pytest.fixture(scope="module")
def problem() -> Problem:
    return prepared("gpt2-sdpa", NO_CACHE)


@pytest.fixture(scope="module")
def dense() -> Problem:
    return prepared_case(models.densenet(3, 2, 8, 4, 16), NO_CACHE)


@pytest.fixture(scope="module")
def least(dense: Problem) -> LeastPeak:
    """The smallest peak of `dense`, looked for once."""
    return planning.least_peak_of(dense, NO_CACHE)


@pytest.fixture(scope="module")
def small() -> Problem:
    """Of which the whole search for the smallest budget takes seconds."""
    return prepared_case(models.mlp(depth=4), NO_CACHE)


def plan(problem: Problem, options: Options = NO_CACHE, budget: str = "60%") -> Plan:
    return planning.plan_anew(problem, parse_budget(budget), options)


def stages_of(plan: Plan) -> list[str]:
    return [trace.stage for trace in plan.trace]


def test_what_the_relaxation_proves_near_ends_the_search(problem: Problem) -> None:
    found = plan(problem)
    gap_ns = found.certificate.objective_ns - found.certificate.bound_ns
    assert 0 <= gap_ns <= Limits().nearness * problem.graph.time_ns < found.time_ns
    assert found.certificate.status is not Status.TIME_LIMIT
    assert {"eviction", "blocks", "proof"}.isdisjoint(stages_of(found))
    goal = Goal(problem.constrained, problem.blocks, found.budget_bytes)
    searched = run(STAGES, goal, replace(quick_limits(NO_CACHE), nearness=-1.0))
    assert [trace.stage for trace in searched.trace][-2:] == ["exchange", "proof"]
    assert searched.bound_ns <= searched.time_ns <= found.time_ns


def test_an_unknown_gap_is_no_time_limit(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs too large for the solver leave a block's gap unknown, however much time there is."""
    monkeypatch.setattr(pareto_search, "MAX_ENTRIES", 10)
    found = plan(problem, replace(NO_CACHE, without=("relaxation", "eviction")))
    assert "blocks" in stages_of(found)
    assert found.certificate.status is Status.FEASIBLE


@pytest.mark.parametrize("without", [(), ("eviction",), ("blocks",)])
def test_without_time_a_plan_says_so(without: tuple[str, ...], problem: Problem) -> None:
    """By the first construction that leads to one; what takes longest is not tried."""
    found = plan(problem, replace(NO_CACHE, time_limit_s=0.0, without=without))
    assert found.peak_bytes <= found.budget_bytes
    assert found.certificate.status is Status.TIME_LIMIT
    assert found.certificate.bound_ns < found.time_ns
    assert stages_of(found) == ["keep-all", "blocks" if without == ("eviction",) else "eviction"]


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("without", [("eviction", "exchange"), ()])
def test_the_smallest_budget_that_is_named_works(
    without: tuple[str, ...], dense: Problem, least: LeastPeak
) -> None:
    options = replace(NO_CACHE, without=without)
    known = None if without else least
    with pytest.raises(InfeasibleBudget) as caught:
        planning.plan_anew(dense, Budget(size_bytes=1), options, known)
    named = Budget(size_bytes=caught.value.minimum_bytes)
    assert planning.plan_anew(dense, named, options).peak_bytes <= caught.value.minimum_bytes


def test_the_smallest_budget_is_independent_of_measurements() -> None:
    """Looked for under these times it was 178080 and 174944 bytes."""
    case = models.gpt2(2, width=32, heads=2, vocabulary=64, batch=2, length=32)
    made = prepared_case(case, NO_CACHE)
    graph, noise = made.constrained, random.Random(2)
    nodes = (replace(n, time_ns=int(n.time_ns * noise.uniform(0.7, 1.4))) for n in graph.nodes)
    graphs = [graph, replace(graph, nodes=tuple(nodes))]
    limits = quick_limits(NO_CACHE)
    found = [least_peak(Goal(g, made.blocks, None), limits) for g in graphs]
    assert found[0].peak_bytes == found[1].peak_bytes


def test_what_is_known_to_fit_is_not_refused(dense: Problem, least: LeastPeak) -> None:
    """Where no stage of a search leads to anything."""
    minimum_bytes = least.find(Limits()).peak_bytes
    blind = replace(NO_CACHE, without=("relaxation", "eviction", "blocks"))
    found = planning.plan_anew(dense, Budget(size_bytes=minimum_bytes), blind, least)
    assert found.peak_bytes <= minimum_bytes


def equal_widths() -> Case:
    """The output is as large as everything that is saved."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    return Case("equal widths", nn.Sequential(*layers), (torch.randn(128, 64),), {}, mean_square)


@pytest.mark.parametrize("budget", ["50%", "70%"])
def test_a_large_loss_has_the_room_eager_leaves(budget: str) -> None:
    made = prepared_case(equal_widths(), NO_CACHE)
    eager = made.unplanned
    room_bytes = min(caller_bytes(made.graph), eager.peak_bytes - eager.saved_bytes)
    assert made.constrained.nodes[len(made.graph.forward) - 1].workspace_bytes == room_bytes
    found = planning.plan_anew(made, parse_budget(budget), NO_CACHE)
    assert found.saved_bytes + room_bytes <= found.budget_bytes
    roomless = replace(made, constrained=made.graph, blocks=partition(made.graph))
    filled = planning.plan_anew(roomless, parse_budget(budget), NO_CACHE)
    assert filled.saved_bytes + room_bytes > filled.budget_bytes


def test_keeping_everything_needs_no_more_than_eager() -> None:
    for seed in range(200):
        graph = random_graph(random.Random(seed), 6)
        eager = as_eager(graph)
        most_bytes = simulate(eager, keep_all(eager)).peak_bytes
        roomy = with_room_for_loss(graph, most_bytes)
        assert simulate(roomy, keep_all(roomy)).peak_bytes <= most_bytes
        last = len(graph.forward) - 1
        assert without_workspace(roomy, last) == without_workspace(graph, last)


def without_workspace(graph: CDGraph, node: int) -> CDGraph:
    nodes = (replace(n, workspace_bytes=0) if n.index == node else n for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def test_a_share_below_the_least_takes_the_smallest(caplog: pytest.LogCaptureFixture) -> None:
    """With one line; bytes are refused, and so is a share where the options say so."""
    case = models.mlp(depth=3)
    smallest = rockplan.plan(case.model, case.args, "min", options=NO_CACHE)
    caplog.clear()
    found = rockplan.solve(case.model, case.args, "0.1%", options=NO_CACHE)
    assert rockplan.plan_of(found).schedule == smallest.schedule
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"needs {smallest.peak_bytes} bytes" in said
    strict = replace(NO_CACHE, on_infeasible="error")
    for budget, options in ((smallest.peak_bytes - 1, NO_CACHE), ("0.1%", strict)):
        with pytest.raises(InfeasibleBudget):
            rockplan.solve(case.model, case.args, budget, options=options)
    shares = plan_each(case.model, case.args, ["0.1%", 1000], options=NO_CACHE)
    assert [type(plan) for plan in shares] == [Plan, InfeasibleBudget]


def test_plans_of_one_problem_squeeze_once() -> None:
    case = models.mlp(depth=3)
    budgets = (100, 200, "min")
    first, second, least = plan_each(case.model, case.args, budgets, options=NO_CACHE)
    assert isinstance(first, InfeasibleBudget) and isinstance(second, InfeasibleBudget)
    assert isinstance(least, Plan)
    assert first.minimum_bytes == second.minimum_bytes == least.budget_bytes
    known = planning.least_peak_of(prepared_case(case, NO_CACHE), NO_CACHE)
    assert known.find(Limits()) is known.find(Limits())


def test_the_smallest_budget_keeps_the_time_limit(
    small: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best so far is taken, which is never called the smallest, and not kept for it."""
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    with pytest.raises(InfeasibleBudget, match="that this model needs") as patient:
        planning.plan_anew(small, Budget(size_bytes=1), NO_CACHE)
    assert patient.value.is_complete
    hurry = Options(time_limit_s=0.0)
    least = planning.plan_anew(small, Budget(is_minimum=True), hurry)
    assert least.certificate.status is Status.TIME_LIMIT
    assert patient.value.minimum_bytes < least.peak_bytes <= least.budget_bytes
    with pytest.raises(InfeasibleBudget, match="found within the time limit") as caught:
        planning.plan_anew(small, Budget(size_bytes=1), hurry)
    assert not caught.value.is_complete
    assert least.peak_bytes <= caught.value.minimum_bytes <= least.budget_bytes
    assert not pickle.loads(pickle.dumps(caught.value)).is_complete
    with pytest.raises(InfeasibleBudget) as later:
        planning.plan_anew(small, Budget(size_bytes=1), replace(NO_CACHE, cache=True))
    assert later.value.minimum_bytes == patient.value.minimum_bytes


class Repeated(nn.Module):
    """One layer, several times: exchanges alone lead to little in little time."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


@pytest.mark.usefixtures("thorough")
def test_no_budget_reaches_less_than_the_smallest() -> None:
    model, x = Repeated(2), torch.randn(2, 8, 16)
    least = rockplan.plan(model, x, "min", options=NO_CACHE)
    for share in (0.9, 0.75):
        budget_bytes = int(share * least.eager_peak_bytes)
        found = rockplan.plan(model, x, budget_bytes, options=NO_CACHE)
        assert least.peak_bytes <= found.peak_bytes


@pytest.mark.usefixtures("thorough")
def test_a_smallest_cut_short_counts_other_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    model, x = Repeated(2), torch.randn(2, 8, 16)
    hurry = Options(time_limit_s=0.0)
    first = rockplan.plan(model, x, "min", options=hurry)
    other = rockplan.plan(model, x, first.peak_bytes - 1, options=replace(NO_CACHE, cache=True))
    second = rockplan.plan(model, x, "min", options=hurry)
    assert second.peak_bytes <= other.peak_bytes < first.peak_bytes
    with pytest.raises(InfeasibleBudget) as caught:
        rockplan.plan(model, x, 1, options=hurry)
    assert caught.value.minimum_bytes <= second.budget_bytes
    # No more is found, so nothing is looked for again.
    assert rockplan.plan(model, x, "min", options=hurry) == second


def test_none_planned_together_reaches_less() -> None:
    model, x = Repeated(2), torch.randn(2, 8, 16)
    hurry = replace(NO_CACHE, time_limit_s=0.0)
    budgets = ("70%", "80%", "min")
    *_, least = found = plan_each(model, x, budgets, options=hurry)
    plans = [plan for plan in found if isinstance(plan, Plan)]
    assert isinstance(least, Plan) and len(plans) > 1
    assert least.peak_bytes == min(plan.peak_bytes for plan in plans)


def test_a_smallest_budget_named_without_time_works(problem: Problem) -> None:
    hurry = replace(NO_CACHE, time_limit_s=0.0)
    with pytest.raises(InfeasibleBudget) as caught:
        planning.plan_anew(problem, Budget(size_bytes=1), hurry)
    assert not caught.value.is_complete
    named = Budget(size_bytes=caught.value.minimum_bytes)
    assert planning.plan_anew(problem, named, hurry).peak_bytes <= caught.value.minimum_bytes


def test_a_budget_without_room_for_the_loss() -> None:
    with pytest.raises(InfeasibleBudget, match="with room for the loss of the caller"):
        rockplan.solve(nn.Linear(16, 512), torch.randn(8, 16), 10)


def test_equal_blocks_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]
    case = Case("equal", nn.Sequential(*layers), (torch.randn(4, 16),), {}, mean_square)
    blocks = prepared_case(case, NO_CACHE).blocks
    asked: list[CDGraph] = []

    def counted(problems: list[CDGraph], *, settings: Settings) -> list[OptionFamily]:
        asked.extend(problems)
        return option_families(problems, settings=settings)

    monkeypatch.setattr(block_families, "option_families", counted)
    found = block_families.families(blocks, None, Settings(effort=0), 1.0)
    kinds = {b.digest for b in blocks}
    assert len(asked) == len(kinds) < len(blocks) == len(found)
    by_digest = {b.digest: f for b, f in zip(blocks, found, strict=True)}
    assert all(by_digest[b.digest] == f for b, f in zip(blocks, found, strict=True))
