"""The pipeline: no stage is needed by another, none can do harm, and what ran is said."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import rockplan
from rockplan import Options
from rockplan.budget import Budget, parse_budget
from rockplan.errors import InfeasibleBudget, InvalidInput
from rockplan.graph_builder.lowering.backward_order import renumbered
from rockplan.ilp.whole_graph.intervals import Facts
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search import planning, stages
from rockplan.search.incumbent import Incumbent
from rockplan.search.limits import Limits
from rockplan.search.local.exchange import ExchangeLimits
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.search.minimum_peak import least_peak
from rockplan.search.pipeline import LEAST_PEAK, NAMES, STAGES, Stage, always, run
from rockplan.search.problem import Goal, Problem
from rockplan.values.graph import CDGraph
from rockplan.values.plan import Plan
from rockplan.values.schedule import first_executions, keep_all
from testing import models
from testing.exhaustive import Exhaustive
from testing.graphs import Ranges, branched, random_chain
from testing.models import Case
from testing.priced import prepared_case
from tests.orders import schedule_in, topological

OPTIONS = Options(cache=False, time_limit_s=600, bound_time_limit_s=0.0)
QUICK = Limits(exchange=ExchangeLimits(effort=5_000), squeeze=ExchangeLimits(effort=5_000))
BUDGETS = ("min", "60%")


def mlp() -> Case:
    """Small, and at 60 % every stage that improves a plan runs (of larger models, and what each
    stage is worth there: `benchmarks/ablation.py`)."""
    torch.manual_seed(0)
    return models.mlp(depth=3)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return prepared_case(mlp(), OPTIONS)


@pytest.fixture(scope="module")
def plans(problem: Problem) -> dict[str, Plan]:
    return {b: planning.plan_anew(problem, parse_budget(b), OPTIONS) for b in BUDGETS}


def chain(seed: int) -> Goal:
    """A small one at about a budget in the middle."""
    graph, blocks = random_chain(random.Random(seed), (2, 3, 2), Ranges(pinned_percent=15))
    least = thriftiest(graph).schedule
    low, high = (simulate(graph, s).peak_bytes for s in (least, keep_all(graph)))
    return Goal(graph, blocks, (low + high) // 2)


def check(goal: Goal, incumbent: Incumbent) -> None:
    """What it holds is legal, within the budget, and as stated."""
    if incumbent.schedule is None:
        return
    verify(goal.graph, incumbent.schedule)
    found = simulate(goal.graph, incumbent.schedule)
    assert (found.time_ns, found.peak_bytes) == (incumbent.time_ns, incumbent.peak_bytes)
    if goal.budget_bytes is not None:
        assert found.peak_bytes <= goal.budget_bytes
        assert goal.graph.time_ns <= incumbent.bound_ns <= found.time_ns


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_plans_without_a_stage_are_legal_or_refused(
    name: str, budget: str, problem: Problem
) -> None:
    try:
        made = planning.plan_anew(problem, parse_budget(budget), replace(OPTIONS, without=(name,)))
    except InfeasibleBudget as error:
        assert error.minimum_bytes > error.budget_bytes
        return
    verify(problem.constrained, made.schedule)
    assert simulate(problem.constrained, made.schedule).peak_bytes <= made.budget_bytes
    assert name not in {trace.stage for trace in made.trace}


@pytest.mark.parametrize("left_out", range(len(STAGES)))
def test_the_search_for_time_needs_no_single_stage(left_out: int) -> None:
    for seed in range(6):
        goal = chain(seed)
        check(goal, run(without(STAGES, left_out), goal, QUICK))


@pytest.mark.parametrize("left_out", range(len(LEAST_PEAK)))
def test_the_least_peak_needs_no_single_stage(left_out: int) -> None:
    for seed in range(6):
        goal = replace(chain(seed), budget_bytes=None)
        check(goal, least_peak(goal, QUICK, without(LEAST_PEAK, left_out)))


def without(some: Sequence[Stage], left_out: int) -> tuple[Stage, ...]:
    return (*some[:left_out], *some[left_out + 1 :])


@pytest.mark.parametrize("names", [("exchanges",), ("exchange", "Relaxation"), ("",)])
def test_names_that_no_stage_has_are_refused(names: tuple[str, ...], problem: Problem) -> None:
    with pytest.raises(InvalidInput, match="the stages are keep-all, relaxation"):
        planning.plan_anew(problem, Budget(is_minimum=True), replace(OPTIONS, without=names))
    case = mlp()
    with pytest.raises(InvalidInput, match="the stages are"):
        rockplan.plan(
            case.model, case.args, "min", sample_kwargs=case.kwargs, options=Options(without=names)
        )


def test_the_trace_names_stages_in_order(plans: dict[str, Plan]) -> None:
    for_time = [stage.name for stage in STAGES]
    for_peak = [stage.name for stage in LEAST_PEAK]
    for budget, plan in plans.items():
        names = [trace.stage for trace in plan.trace]
        # Of the smallest budget, the search for its bytes comes first.
        start = names.index("keep-all", 1) if budget == "min" else 0
        assert is_part(names[:start], for_peak) and is_part(names[start:], for_time)
        assert "relaxation" in names[start:] or plan.overhead == 0
        # Within 60 % something fits, and each stage that improves it runs.
        assert budget == "min" or {"relaxation", "exchange", "proof"} <= {*names}
        assert all(trace.seconds >= 0 for trace in plan.trace)


def is_part(some: Sequence[str], whole: Sequence[str]) -> bool:
    """In the same order, each at most once?"""
    left = iter(whole)
    return all(name in left for name in some)


def test_the_incumbent_never_gets_worse(plans: dict[str, Plan]) -> None:
    for budget, plan in plans.items():
        names = [trace.stage for trace in plan.trace]
        start = names.index("keep-all", 1) if budget == "min" else 0
        peaks = [trace.peak_bytes for trace in plan.trace[:start]]
        assert None not in peaks and peaks == sorted(peaks, key=lambda p: -(p or 0))
        times = [trace.time_ns for trace in plan.trace[start:]]
        found = [t for t in times if t is not None]
        assert times == [None] * (len(times) - len(found)) + sorted(found, reverse=True)
        assert found[-1] == plan.time_ns
        bounds = [trace.bound_ns for trace in plan.trace[start:]]
        if first_executions(plan.schedule) == tuple(range(len(plan.graph.nodes))):
            assert bounds == sorted(bounds)


def test_a_deadline_that_does_not_strike_changes_nothing(
    problem: Problem, plans: dict[str, Plan]
) -> None:
    for budget, plan in plans.items():
        options = replace(OPTIONS, time_limit_s=40_000.0)
        again = planning.plan_anew(problem, parse_budget(budget), options)
        assert again.schedule == plan.schedule
        assert again.certificate == plan.certificate
        assert again.budget_bytes == plan.budget_bytes


def test_a_stage_can_do_no_harm() -> None:
    """What is beyond the budget is not taken, nor what is slower or needs more."""
    for seed in range(6):
        goal = chain(seed)
        before = run(STAGES, goal, QUICK)

        def keeps(goal: Goal, incumbent: Incumbent, limits: Limits) -> Incumbent:
            return incumbent.improved(goal, keep_all(goal.graph))

        def wastes(goal: Goal, incumbent: Incumbent, limits: Limits) -> Incumbent:
            return incumbent.improved(goal, thriftiest(goal.graph).schedule)

        made_up = (Stage("keeps", keeps, always), Stage("wastes", wastes, always))
        after = run(made_up, goal, QUICK, before)
        check(goal, after)
        assert before.schedule is None or after.time_ns <= before.time_ns
        if simulate(goal.graph, keep_all(goal.graph)).peak_bytes > (goal.budget_bytes or 0):
            assert after.schedule != keep_all(goal.graph)
        least = replace(goal, budget_bytes=None)
        smallest = least_peak(least, QUICK)
        assert run(made_up, least, QUICK, smallest).peak_bytes <= smallest.peak_bytes


def test_what_is_not_legal_is_no_plan(problem: Problem) -> None:
    schedule = keep_all(problem.constrained)
    broken = replace(schedule, events=schedule.events[1:])
    assert planning.plan_of(problem, broken, 1 << 60) is None
    assert planning.plan_of(problem, schedule, 1) is None
    assert planning.plan_of(problem, schedule, 1 << 60) is not None


def test_what_had_no_time_is_called_incomplete() -> None:
    over = replace(QUICK, deadline=time.process_time() - 1)
    for seed in range(6):
        goal = chain(seed)
        assert run(STAGES, goal, QUICK).is_complete
        late = run(STAGES, goal, over)
        check(goal, late)
        assert late.is_near(goal, over) or not late.is_complete
        least = replace(goal, budget_bytes=None)
        assert least_peak(least, QUICK).is_complete
        assert not least_peak(least, over).is_complete


def test_bounds_are_of_the_order_that_runs() -> None:
    """Against all schedules with these first executions, of which every other graph has its own."""
    moved = costly = 0
    for seed in range(40):
        rng = random.Random(seed)
        graph = branched(rng, 3)
        if len(graph.nodes) > 11:
            continue
        start = thriftiest(graph).schedule
        if seed % 2:
            start = schedule_in(graph, topological(rng, graph))
        budget_bytes = simulate(graph, start).peak_bytes
        goal = Goal(graph, (), budget_bytes)
        incumbent = Incumbent(bound_ns=graph.time_ns).improved(goal, start)
        if not seed % 2:
            incumbent = stages.relax(goal, incumbent, QUICK)
        incumbent = stages.prove(goal, incumbent, QUICK)
        check(goal, incumbent)
        assert incumbent.schedule is not None
        order = first_executions(incumbent.schedule)
        fastest_ns = of_order(graph, order, budget_bytes)
        assert fastest_ns is not None and incumbent.bound_ns <= fastest_ns <= incumbent.time_ns
        moved += order != tuple(range(len(order)))
        costly += incumbent.bound_ns > graph.time_ns
        proven = stages.prove(goal, incumbent, replace(QUICK, proof_s=60.0, nearness=-1.0))
        assert incumbent.bound_ns <= proven.bound_ns <= fastest_ns
    assert moved >= 4 and costly >= 4


def test_proofs_of_one_order_hold_in_no_other() -> None:
    graph = branched(random.Random(0), 3)
    order = topological(random.Random(0), graph)
    moved = schedule_in(graph, order)
    goal = Goal(graph, (), 1 << 40)
    incumbent = Incumbent(bound_ns=1 << 40).improved(goal, moved)
    assert incumbent.order == order != tuple(range(len(order)))
    assert incumbent.bound_ns == graph.time_ns
    proven = replace(incumbent, bound_ns=1 << 40, time_ns=1 << 50)
    assert proven.improved(goal, moved).bound_ns == 1 << 40
    in_place = proven.improved(goal, keep_all(graph))
    assert in_place.order == () and in_place.bound_ns == graph.time_ns


def test_relaxations_prove_the_schedules_they_lead_to() -> None:
    """Where the incumbent had another order of first executions before, too."""
    in_place = 0
    for seed in range(40):
        graph = branched(random.Random(seed), 3)
        low = simulate(graph, thriftiest(graph).schedule).peak_bytes
        goal = Goal(graph, (), low)
        slow = replace(Incumbent(bound_ns=graph.time_ns), order=(1, 0))
        relaxed = stages.relax(goal, slow, QUICK)
        if relaxed.schedule is not None and relaxed.order == ():
            assert relaxed.relaxation is not None
            assert graph.time_ns <= relaxed.bound_ns <= relaxed.time_ns
            in_place += relaxed.bound_ns > graph.time_ns
    assert in_place >= 4


def test_proofs_of_a_plan_hold_in_its_order() -> None:
    """Whichever stage moved its first executions, and whether or not the last one ran."""
    moved = 0
    for seed in range(40):
        graph = branched(random.Random(seed), 3)
        if len(graph.nodes) > 11:
            continue
        low = simulate(graph, thriftiest(graph).schedule).peak_bytes
        for names in ((), ("proof",)):
            goal = Goal(graph, (), low)
            limits = replace(QUICK, without=frozenset({"blocks", *names}))
            incumbent = run(STAGES, goal, limits)
            check(goal, incumbent)
            if incumbent.schedule is not None:
                fastest_ns = of_order(graph, first_executions(incumbent.schedule), low)
                assert fastest_ns is not None
                assert incumbent.bound_ns <= fastest_ns <= incumbent.time_ns, seed
                moved += incumbent.order != ()
    assert moved >= 6


def of_order(graph: CDGraph, order: Sequence[int], budget_bytes: int) -> int | None:
    found = Exhaustive(renumbered(graph, order), budget_bytes, None, is_free=True, in_order=True)
    return found.fastest_ns()


def test_near_what_is_needed_the_search_ends() -> None:
    """The logits need what the smallest plan does."""
    graph = prepared_case(models.llama(vocabulary=2048), OPTIONS).constrained
    needed_bytes = max(Facts(graph).forced_bytes)
    found = least_peak(Goal(graph, (), None), Limits())
    assert needed_bytes <= found.peak_bytes <= needed_bytes / (1 - Limits().nearness)
    assert found.is_complete and found.peak_bytes < simulate(graph, keep_all(graph)).peak_bytes
    assert [line.stage for line in found.trace] == ["keep-all", "relaxation"]
