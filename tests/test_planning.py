"""From a priced graph to a certified plan: what ends the search, and what the plan then says."""

from __future__ import annotations

import math
import pickle
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rockplan
from benchmarks import models, priced
from benchmarks.models import Case
from benchmarks.priced import prepared
from rockplan import Options
from rockplan.api import plan_each
from rockplan.budget import Budget, parse_budget
from rockplan.dp.chain_solver import ChainSolver
from rockplan.errors import InfeasibleBudget
from rockplan.graph_builder.partition import partition
from rockplan.ilp.blocks import pareto_search
from rockplan.ilp.whole_graph.refine import Refined, refined
from rockplan.oracles.constraints import with_room_for_loss
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search import block_families, minimum_peak, planning
from rockplan.search.local import greedy_eviction
from rockplan.search.local.exchange import fitted
from rockplan.values.block import OptionFamily
from rockplan.values.graph import CDGraph, as_eager, caller_bytes
from rockplan.values.plan import Plan, Status
from rockplan.values.schedule import Schedule, keep_all
from tests.graphs import random_graph
from tests.usage import mean_square

NO_CACHE = Options(cache=False, time_limit_s=600)
"""No time limit strikes, however slow the machine is."""


@pytest.fixture(scope="module")
def problem() -> planning.Problem:
    return prepared("gpt2-sdpa", NO_CACHE)


def plan(problem: planning.Problem, options: Options = NO_CACHE, budget: str = "60%") -> Plan:
    return planning.plan_anew(problem, parse_budget(budget), options)


def forbid_nearness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "NEAR", -1.0)


def forbid_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: object, **__: object) -> tuple[OptionFamily, ...]:
        raise AssertionError("blocks are solved")

    monkeypatch.setattr(block_families, "option_families", unwanted)


def test_what_the_relaxation_proves_near_needs_no_options_of_blocks(
    problem: planning.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_blocks(monkeypatch)
    found = plan(problem)
    gap_ns = found.certificate.objective_ns - found.certificate.bound_ns
    assert 0 <= gap_ns <= planning.NEAR * problem.graph.time_ns < found.time_ns
    assert found.certificate.status is not Status.TIME_LIMIT
    forbid_nearness(monkeypatch)
    with pytest.raises(AssertionError, match="blocks are solved"):
        plan(problem)


def test_of_large_graphs_a_plan_need_not_be_so_near(
    problem: planning.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_blocks(monkeypatch)
    with pytest.raises(AssertionError, match="blocks are solved"):
        plan(problem, budget="41%")
    monkeypatch.setattr(minimum_peak, "SMALL_NODES", len(problem.graph.nodes) - 1)
    found = plan(problem, budget="41%").certificate
    gap = (found.objective_ns - found.bound_ns) / problem.graph.time_ns
    assert planning.NEAR < planning.NEAR_IF_LARGE < gap <= planning.ENOUGH_IF_LARGE
    assert found.status is Status.FEASIBLE


def test_of_large_graphs_nothing_is_exchanged_if_a_plan_is_near(
    problem: planning.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(*_: object, **__: object) -> Schedule:
        raise AssertionError("exchanges are tried")

    monkeypatch.setattr(planning, "annealed", unwanted)
    with pytest.raises(AssertionError, match="exchanges are tried"):
        plan(problem)
    monkeypatch.setattr(minimum_peak, "SMALL_NODES", len(problem.graph.nodes) - 1)
    found = plan(problem).certificate
    gap = (found.objective_ns - found.bound_ns) / problem.graph.time_ns
    assert 0 <= gap <= planning.NEAR_IF_LARGE
    with pytest.raises(AssertionError, match="exchanges are tried"):
        plan(problem, budget="41%")


def test_after_a_late_relaxation_room_is_made_with_the_time_for_the_rest(
    problem: planning.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(graph: CDGraph, budget_bytes: int, *, deadline: float) -> Refined | None:
        assert deadline <= time.monotonic()
        return refined(graph, budget_bytes, deadline=deadline + 600)

    monkeypatch.setattr(planning, "SHARE", 0.0)
    monkeypatch.setattr(minimum_peak, "refined", late)
    forbid_blocks(monkeypatch)
    found = plan(problem, budget="41%")
    assert found.peak_bytes <= found.budget_bytes
    gap_ns = found.certificate.objective_ns - found.certificate.bound_ns
    assert gap_ns > planning.NEAR * problem.graph.time_ns
    assert found.certificate.status is Status.TIME_LIMIT


def test_the_blocks_lead_to_a_plan_that_is_not_slower(
    problem: planning.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = plan(problem)
    forbid_nearness(monkeypatch)
    searched = plan(problem)
    assert searched.certificate.bound_ns <= searched.time_ns <= near.time_ns
    assert searched.certificate.status is not Status.TIME_LIMIT


def test_a_gap_that_is_unknown_is_not_a_time_limit(
    problem: planning.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs too large for the solver leave a block's gap unknown, however much time there is."""
    forbid_nearness(monkeypatch)
    monkeypatch.setattr(pareto_search, "MAX_ENTRIES", 10)
    assert plan(problem).certificate.status is Status.FEASIBLE


@pytest.mark.parametrize("time_limit_s", [0.0, 0.05, 0.5])
def test_when_time_is_up_there_is_a_plan_that_says_so(
    problem: planning.Problem, time_limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_nearness(monkeypatch)
    options = Options(cache=False, time_limit_s=time_limit_s)
    found = plan(problem, options)
    assert found.peak_bytes <= found.budget_bytes
    assert found.certificate.status is Status.TIME_LIMIT
    assert found.certificate.bound_ns < found.time_ns


def test_nothing_below_the_minimum_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the relaxation alone leads to schedules with a small peak."""
    monkeypatch.setattr(planning.eviction, "thriftiest", lambda graph, **_: keep_all(graph))
    monkeypatch.setattr(planning, "squeezed", lambda _, schedule, **__: schedule)
    monkeypatch.setattr(planning, "NEAR", 10.0)
    made = prepared("densenet", NO_CACHE)
    with pytest.raises(rockplan.InfeasibleBudget) as caught:
        planning.plan_anew(made, Budget(size_bytes=1), NO_CACHE)
    minimum_bytes = caught.value.minimum_bytes
    found = planning.plan_anew(made, Budget(size_bytes=minimum_bytes), NO_CACHE)
    assert found.peak_bytes <= minimum_bytes
    with pytest.raises(rockplan.InfeasibleBudget):
        planning.plan_anew(made, Budget(size_bytes=minimum_bytes - 1), NO_CACHE)


def test_the_smallest_budget_does_not_depend_on_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looked for under these times it was 178080 and 174944 bytes."""

    def small() -> Case:
        return models.gpt2(2, width=32, heads=2, vocabulary=64, batch=2, length=32)

    monkeypatch.setitem(priced.CASES, "small", small)
    graph = prepared("small", NO_CACHE).constrained
    noise = random.Random(2)
    nodes = (replace(n, time_ns=int(n.time_ns * noise.uniform(0.7, 1.4))) for n in graph.nodes)
    graphs = [graph, replace(graph, nodes=tuple(nodes))]
    least = (minimum_peak._smallest(g, None, None, math.inf) for g in graphs)
    found = {simulate(g, s.schedule).peak_bytes for g, s in zip(graphs, least, strict=True)}
    assert len(found) == 1


def test_what_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the chain finds nothing, what the relaxation led to is improved."""
    made = prepared("densenet", NO_CACHE)
    with pytest.raises(rockplan.InfeasibleBudget) as caught:
        planning.plan_anew(made, Budget(size_bytes=1), NO_CACHE)
    monkeypatch.setattr(planning, "NEAR", -1.0)
    monkeypatch.setattr(block_families.ChainSolver, "best_schedule", lambda *_, **__: None)
    monkeypatch.setattr(planning.eviction, "within", lambda *_: None)
    monkeypatch.delattr(minimum_peak, "_smallest")
    budget = Budget(size_bytes=caught.value.minimum_bytes)
    found = planning.plan_anew(made, budget, NO_CACHE)
    assert found.peak_bytes <= caught.value.minimum_bytes


def equal_widths() -> Case:
    """The output is as large as everything that is saved."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    return Case("equal widths", nn.Sequential(*layers), (torch.randn(128, 64),), {}, mean_square)


@pytest.mark.parametrize("budget", ["50%", "60%", "70%"])
def test_a_loss_as_large_as_activations_has_the_room_that_eager_leaves(
    budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(priced.CASES, "equal widths", equal_widths)
    made = prepared("equal widths", NO_CACHE)
    eager = made.unplanned
    room_bytes = min(caller_bytes(made.graph), eager.peak_bytes - eager.saved_bytes)
    assert made.constrained.nodes[len(made.graph.forward) - 1].workspace_bytes == room_bytes
    found = planning.plan_anew(made, parse_budget(budget), NO_CACHE)
    assert found.saved_bytes + room_bytes <= found.budget_bytes
    roomless = replace(made, constrained=made.graph, blocks=partition(made.graph))
    filled = planning.plan_anew(roomless, parse_budget(budget), NO_CACHE)
    assert filled.saved_bytes + room_bytes > filled.budget_bytes


def test_keeping_everything_needs_no_more_than_eager_for_room() -> None:
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


def test_room_is_not_made_after_the_deadline(problem: planning.Problem) -> None:
    graph = problem.constrained
    budget_bytes = plan(problem).budget_bytes
    relaxed = refined(graph, budget_bytes, deadline=time.monotonic() + 60)
    assert relaxed is not None and relaxed.orders is not None
    forward, backward = relaxed.orders.forward, relaxed.orders.backward
    assert fitted(graph, forward, backward, budget_bytes) is not None
    assert fitted(graph, forward, backward, budget_bytes, deadline=time.monotonic()) is None


def unwanted(*_: object) -> minimum_peak.Improved:
    raise AssertionError("the smallest peak is looked for")


def test_without_time_the_smallest_peak_is_not_looked_for_where_something_fits(
    problem: planning.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longest."""
    monkeypatch.setattr(minimum_peak, "_smallest", unwanted)
    found = plan(problem, replace(NO_CACHE, time_limit_s=0.0))
    assert found.certificate.status is Status.TIME_LIMIT
    assert found.peak_bytes <= found.budget_bytes


def test_without_time_what_is_near_gives_way_to_what_evictions_lead_to(
    problem: planning.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = problem.constrained
    budget_bytes = plan(problem).budget_bytes
    slow = greedy_eviction.within(graph, int(0.7 * budget_bytes))
    evicted = greedy_eviction.within(graph, budget_bytes)
    assert slow is not None and evicted is not None
    relaxed = refined(graph, budget_bytes, deadline=math.inf)
    monkeypatch.setattr(planning, "_relaxed", lambda *_, **__: (relaxed, slow))
    found = plan(problem, replace(NO_CACHE, time_limit_s=0.0))
    assert found.time_ns == simulate(graph, evicted).time_ns < simulate(graph, slow).time_ns
    assert found.certificate.status is Status.TIME_LIMIT


def test_plans_of_one_problem_look_for_the_smallest_peak_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, looked_for = minimum_peak._smallest, list[minimum_peak.Improved]()

    def counted(*args: Any) -> minimum_peak.Improved:
        looked_for.append(found(*args))
        return looked_for[-1]

    monkeypatch.setattr(minimum_peak, "_smallest", counted)
    case = models.mlp(depth=3)
    budgets = (100, 200, "min")
    first, second, least = plan_each(case.model, case.args, budgets, options=NO_CACHE)
    assert isinstance(first, InfeasibleBudget) and isinstance(second, InfeasibleBudget)
    assert isinstance(least, Plan)
    assert first.minimum_bytes == second.minimum_bytes == least.budget_bytes
    assert len(looked_for) == 1


def test_the_smallest_budget_is_looked_for_within_the_time_limit(
    problem: planning.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best so far is taken, which is never called the smallest, and not kept for it."""
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    with pytest.raises(InfeasibleBudget, match="that this model needs") as patient:
        planning.plan_anew(problem, Budget(size_bytes=1), NO_CACHE)
    assert patient.value.is_complete
    hurry = Options(time_limit_s=0.0)
    least = planning.plan_anew(problem, Budget(is_minimum=True), hurry)
    assert least.certificate.status is Status.TIME_LIMIT
    assert patient.value.minimum_bytes < least.peak_bytes <= least.budget_bytes
    with pytest.raises(InfeasibleBudget, match="found within the time limit") as caught:
        planning.plan_anew(problem, Budget(size_bytes=1), hurry)
    assert not caught.value.is_complete
    assert least.peak_bytes <= caught.value.minimum_bytes <= least.budget_bytes
    assert not pickle.loads(pickle.dumps(caught.value)).is_complete
    with pytest.raises(InfeasibleBudget) as later:
        planning.plan_anew(problem, Budget(size_bytes=1), replace(NO_CACHE, cache=True))
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


@pytest.mark.parametrize("times", [3, 5])
def test_the_smallest_budget_is_at_most_what_any_budget_reaches(times: int) -> None:
    model, x = Repeated(times), torch.randn(2, 8, 16)
    options = replace(NO_CACHE, time_limit_s=5.0)
    least = rockplan.plan(model, x, "min", options=options)
    for share in (0.9, 0.75):
        budget_bytes = int(share * least.eager_peak_bytes)
        assert least.peak_bytes <= rockplan.plan(model, x, budget_bytes, options=options).peak_bytes


def test_where_the_search_for_the_smallest_is_cut_short_plans_for_other_budgets_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("rockplan.search.needs.LARGEST", 0)
    model, x = Repeated(3), torch.randn(2, 8, 16)
    hurry = Options(time_limit_s=0.0)
    first = rockplan.plan(model, x, "min", options=hurry)
    other = rockplan.plan(model, x, first.peak_bytes - 1000, options=Options(time_limit_s=5))
    second = rockplan.plan(model, x, "min", options=hurry)
    assert second.peak_bytes <= other.peak_bytes < first.peak_bytes
    with pytest.raises(InfeasibleBudget) as caught:
        rockplan.plan(model, x, 1, options=hurry)
    assert caught.value.minimum_bytes <= second.budget_bytes
    # No more is found, so nothing is looked for again.
    assert rockplan.plan(model, x, "min", options=hurry) == second


def test_of_budgets_that_are_planned_together_none_reaches_less_than_the_smallest() -> None:
    model, x = Repeated(3), torch.randn(2, 8, 16)
    hurry = replace(NO_CACHE, time_limit_s=0.0)
    budgets = ("70%", "80%", "min")
    *_, least = found = plan_each(model, x, budgets, options=hurry)
    plans = [plan for plan in found if isinstance(plan, Plan)]
    assert isinstance(least, Plan) and len(plans) > 1
    assert least.peak_bytes == min(plan.peak_bytes for plan in plans)


def test_where_time_is_too_short_for_evictions_the_relaxation_leads_to_something(
    problem: planning.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = problem.constrained
    everything = keep_all(graph)
    monkeypatch.setattr(greedy_eviction, "thriftiest", lambda *_, **__: everything)
    found = minimum_peak._smallest(graph, None, None, time.monotonic())
    assert not found.is_complete
    verify(graph, found.schedule)
    assert minimum_peak.peak_bytes(graph, found) < 0.8 * simulate(graph, everything).peak_bytes


@pytest.mark.parametrize("by", ["blocks", "relaxation"])
def test_a_large_graph_gets_a_plan_however_little_time_there_is(
    by: str, problem: planning.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minimum_peak, "SMALL_NODES", 0)
    monkeypatch.setattr(minimum_peak, "_smallest", unwanted)
    monkeypatch.setattr(greedy_eviction, "within", lambda *_, **__: None)
    if by == "blocks":
        monkeypatch.setattr(planning, "fitted_relaxed", lambda *_, **__: (None, None))
    else:
        monkeypatch.setattr(ChainSolver, "best_schedule", lambda *_, **__: None)
    found = plan(problem, replace(NO_CACHE, time_limit_s=0.0))
    assert found.certificate.status is Status.TIME_LIMIT
    assert found.peak_bytes <= found.budget_bytes


def test_a_smallest_budget_that_was_named_works_whatever_is_found_later(
    problem: planning.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    hurry = Options(time_limit_s=0.0)
    graph = problem.constrained
    found = [
        minimum_peak.Improved(keep_all(graph), is_complete=False),
        replace(minimum_peak._smallest(graph, None, None, math.inf), is_complete=False),
    ]
    monkeypatch.setattr(minimum_peak, "_smallest", lambda *_: found.pop())
    with pytest.raises(InfeasibleBudget) as caught:
        planning.plan_anew(problem, Budget(size_bytes=1), hurry)
    named = Budget(size_bytes=caught.value.minimum_bytes)
    assert planning.plan_anew(problem, named, hurry).peak_bytes <= caught.value.minimum_bytes


def test_a_budget_too_small_for_the_loss_of_the_caller_is_said_to_be() -> None:
    with pytest.raises(InfeasibleBudget, match="with room for the loss of the caller"):
        rockplan.solve(nn.Linear(16, 512), torch.randn(8, 16), 10)
