"""Constraints by name: obeyed by every solver, judged by verify, refused with a reason."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import rockplan
from rockplan.dp.chain_solver import ChainSolver
from rockplan.errors import IllegalSchedule, InvalidConstraint
from rockplan.graph_builder.digests import problem_digest
from rockplan.graph_builder.partition import partition
from rockplan.ilp.blocks.pareto_search import Settings, option_families
from rockplan.oracles.constraints import constrain
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.graph import CDGraph, DataKind, producers
from rockplan.values.names import activation_names
from rockplan.values.plan import recomputations
from rockplan.values.schedule import keep_all, kept_data, with_frees
from testing.exhaustive import assert_agrees, listing_bits
from testing.graphs import DEFAULT, Ranges, graph_or_block, random_chain
from testing.models import Case
from testing.training import solve_case, train_side_by_side, twin
from tests.usage import StackWithCount


def droppable(graph: CDGraph) -> list[int]:
    producer = producers(graph)
    return [
        d.index
        for d in graph.data
        if d.kind is DataKind.ACTIVATION
        and d.index not in (*graph.outputs, *graph.held)
        and graph.nodes[producer[d.index]].recomputable
    ]


def with_dropped(graph: CDGraph, rng: random.Random) -> CDGraph:
    candidates = droppable(graph)
    chosen = rng.sample(candidates, rng.randint(min(1, len(candidates)), len(candidates)))
    return replace(graph, dropped=tuple(sorted(chosen)))


# The mechanism: CDGraph.dropped


def test_verify_judges_what_is_kept() -> None:
    read_in_backward = 0
    for seed in range(40):
        graph = graph_or_block(seed, ranges_of(seed))
        read = {d for n in graph.backward for d in n.reads}
        for d in droppable(graph):
            constrained = replace(graph, dropped=(d,))
            verify(constrained, keep_all(constrained))
            if d in read:
                read_in_backward += 1
                with pytest.raises(IllegalSchedule, match="to be dropped"):
                    verify(constrained, keep_all(graph))
    assert read_in_backward > 20


def ranges_of(seed: int) -> Ranges:
    return replace(DEFAULT, random_percent=30 * (seed % 3))


@pytest.mark.parametrize("seed", range(24))
def test_stage_formulation_is_optimal_under_constraints(seed: int) -> None:
    rng = random.Random(seed)
    graph = with_dropped(graph_or_block(seed, ranges_of(seed)), rng)
    if 0 < listing_bits(graph) <= 12:
        assert_agrees(graph, rng)


@pytest.mark.parametrize("seed", range(8))
def test_chain_obeys(seed: int) -> None:
    rng = random.Random(seed)
    graph = with_dropped(random_chain(rng, (2, 2, 2))[0], rng)
    blocks = partition(graph)
    problems = [b.problem for b in blocks]
    families = option_families(problems, settings=Settings(time_limit_s=1.0))
    solver = ChainSolver(graph, blocks, families)
    fastest = simulate(graph, keep_all(graph))
    for budget_bytes in (solver.minimum_bytes, fastest.peak_bytes - 1, fastest.peak_bytes):
        schedule = solver.best_schedule(budget_bytes)
        if schedule is not None:
            verify(graph, schedule)
            assert simulate(graph, schedule).time_ns >= fastest.time_ns


@pytest.mark.parametrize("seed", range(20))
def test_keep_all_is_the_fastest_that_obeys(seed: int) -> None:
    """Leaving out any re-execution of keep_all makes it illegal."""
    graph = with_dropped(graph_or_block(seed, ranges_of(seed)), random.Random(seed))
    schedule = keep_all(graph)
    order = schedule.computes
    forward, backward = order[: len(graph.forward)], order[len(graph.forward) :]
    for position, node in enumerate(backward):
        if node < len(graph.forward):
            without = backward[:position] + backward[position + 1 :]
            with pytest.raises(IllegalSchedule):
                verify(graph, with_frees(graph, forward, without))


def test_equal_blocks_with_different_constraints_are_different() -> None:
    graph = graph_or_block(1, ranges_of(1))
    digests = {problem_digest(replace(graph, dropped=(d,))) for d in droppable(graph)}
    assert problem_digest(graph) not in digests
    assert len(digests) == len(droppable(graph))


# Patterns


QUICK = {"time_limit_s": 3.0, "bound_time_limit_s": 0.2}


def plan(budget: Any = "60%", **options: Any) -> rockplan.Plan:
    torch.manual_seed(0)
    x = torch.randn(256, 32)
    return rockplan.plan(StackWithCount(), x, budget, options=rockplan.Options(**QUICK, **options))


def kept_names(plan: rockplan.Plan) -> set[str]:
    names = activation_names(plan.graph)
    return {names[d] for d in kept_data(plan.graph, plan.schedule)}


def remade_names(plan: rockplan.Plan) -> set[str]:
    """Activations that the backward phase makes again."""
    names = activation_names(plan.graph)
    return {names[d] for n in recomputations(plan) for d in plan.graph.nodes[n].writes}


@pytest.mark.parametrize("budget", ["min", "60%", "100%"])
def test_recompute(budget: str) -> None:
    found = plan(budget, recompute=["*.act"])
    acts = {f"layers.{i}.act/gelu" for i in range(2)}
    assert acts.isdisjoint(kept_names(found))
    assert acts <= remade_names(found)
    assert found.peak_bytes <= found.budget_bytes


@pytest.mark.parametrize("budget", ["min", "90%"])
def test_keep(budget: str) -> None:
    free, found = plan(budget), plan(budget, keep=["layers.*.act", "layers.*.drop"])
    names = activation_names(found.graph)
    read = {names[d] for n in found.graph.backward for d in n.reads}
    wanted = {n for n in names if n.split("/")[0].endswith((".act", ".drop"))} & read
    wanted = {n for n in wanted if "/backward/" not in n}
    assert len(wanted) == 4
    assert wanted <= kept_names(found)
    assert wanted.isdisjoint(remade_names(found))
    assert budget != "min" or not wanted <= kept_names(free)
    assert found.peak_bytes <= found.budget_bytes


def test_both_with_operators_and_occurrences() -> None:
    found = plan(
        "70%", keep=("layers.*/native_layer_norm",), recompute=("layers.[01].first/addmm",)
    )
    kept = kept_names(found)
    assert {f"layers.{i}.norm/native_layer_norm:{k}" for i in range(2) for k in (0, 1, 2)} <= kept
    assert kept.isdisjoint({"layers.0.first/addmm", "layers.1.first/addmm"})
    only_first = constrain(found.graph, ["layers.*.norm/native_layer_norm:1"], [])
    assert sum(not n.recomputable for n in only_first.nodes) == 2 + sum(
        not n.recomputable for n in found.graph.nodes
    )


def test_constrained_plan_trains_like_eager() -> None:
    torch.manual_seed(0)
    case = Case("model", StackWithCount(), (torch.randn(256, 32),), {}, lambda result: result)
    options = rockplan.Options(**QUICK, keep=["layers.0.act"], recompute=["layers.1", "*.norm"])
    eager = twin(case)
    planned = solve_case(case, "90%", options=options)
    train_side_by_side(case, planned, eager, steps=2)
    names = kept_names(planned.plan)
    assert "layers.0.act/gelu" in names
    assert not any(name.startswith("layers.1") or ".norm/" in name for name in names)
    assert rockplan.peak_live_bytes(lambda: case.step(planned))[0] <= planned.plan.budget_bytes


def test_whole_layers_can_be_recomputed() -> None:
    """What torch.utils.checkpoint of each layer does: the insides of layers go."""
    found = plan("100%", recompute=["layers.*.*"])
    inside = {n for n in kept_names(found) if n.startswith("layers.") and n.count(".") > 1}
    assert not inside


@pytest.mark.parametrize(
    ("options", "pattern", "message"),
    [
        ({"keep": ["layers.*.atc"]}, "layers.*.atc", r"nearest: 'layers\.\*\.act'"),
        ({"recompute": ["*/gel"]}, "*/gel", r"nearest: 'layers\.\*\.act/gelu'"),
        ({"keep": ["*.act"], "recompute": ["layers.1"]}, "layers.1", r"'\*\.act' wants it"),
        ({"recompute": ["(root)/*"]}, "(root)/*", "may run only once|output of the model"),
        ({"keep": ["(root)/mean"]}, "(root)/mean", "reads none"),
    ],
)
def test_refusals(options: dict[str, Any], pattern: str, message: str) -> None:
    with pytest.raises(InvalidConstraint, match=message) as caught:
        plan(**options)
    assert caught.value.pattern == pattern


def test_patterns_are_a_sequence() -> None:
    with pytest.raises(rockplan.InvalidInput, match="sequence of patterns"):
        rockplan.Options(keep="layers.*")


def test_infeasible_under_constraints_says_so() -> None:
    unconstrained = plan("min")
    with pytest.raises(rockplan.InfeasibleBudget, match=r"under keep=\('layers',\)"):
        plan(unconstrained.peak_bytes, keep=["layers"])


def test_cache_tells_constraints_apart() -> None:
    # All fits, so only the constraint, not the measured times, makes a difference.
    plans = [plan("100%"), plan("100%", recompute=["*.act"]), plan("100%")]
    assert plans[0].schedule == plans[2].schedule != plans[1].schedule
    assert plans[0].graph_digest == plans[1].graph_digest
