"""Pruned schedules: legal, within budget, no slower, and nothing left that could stay out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search.local import editable_schedule as planning_draft
from rockplan.search.local.exchange import pruned
from rockplan.search.local.greedy_eviction import thriftiest, within
from rockplan.values.graph import CDGraph, DataKind, Phase
from rockplan.values.order import keep_all_order, without_idle
from rockplan.values.schedule import Schedule, keep_all, with_frees
from testing.graphs import (
    Draft,
    Ranges,
    assert_improved,
    constrained_graph,
    mlp_block,
    random_chain,
    random_graph,
)

RANGES = Ranges(pinned_percent=15)


def draw(seed: int) -> CDGraph:
    rng = random.Random(seed)
    return random_graph(rng, 5, RANGES) if seed % 2 else random_chain(rng, (2, 3), RANGES)[0]


def shorter_ones(graph: CDGraph, schedule: Schedule) -> list[Schedule]:
    """Every schedule with one re-execution of the backward phase less."""
    forward, backward = schedule.phases
    executed = set(forward)
    found: list[Schedule] = []
    for position, i in enumerate(backward):
        if i in executed:
            rest = (*backward[:position], *backward[position + 1 :])
            found.append(with_frees(graph, *without_idle(graph, forward, rest)))
        executed.add(i)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_no_single_reexecution_can_be_left_out(seed: int) -> None:
    graph = draw(seed)
    least = thriftiest(graph).schedule
    low = simulate(graph, least).peak_bytes
    for budget_bytes in (low, low + low // 20, low + low // 5):
        before = within(graph, budget_bytes) or least
        after = pruned(graph, before, budget_bytes)
        assert_improved(graph, before, after, budget_bytes)
        for shorter in shorter_ones(graph, after):
            assert simulate(graph, shorter).peak_bytes > budget_bytes


def test_what_runs_again_for_nothing_is_left_out() -> None:
    graph = mlp_block()
    forward, backward = keep_all_order(graph)
    last = len(graph.nodes) - 1
    everything = (*(i for i in forward if graph.nodes[i].recomputable), *backward[:-1])
    wasteful = with_frees(graph, forward, (*everything, last))
    verify(graph, wasteful)
    peak_bytes = max(simulate(graph, s).peak_bytes for s in (wasteful, keep_all(graph)))
    assert pruned(graph, wasteful, peak_bytes) == keep_all(graph)


def test_what_must_not_be_kept_is_made_again() -> None:
    graph = mlp_block()
    read = {d for node in graph.backward for d in node.reads}
    made = [n for n in graph.forward if n.recomputable and not read.isdisjoint(n.writes)]
    inner = [d for d in made[0].writes if d in read and d not in (*graph.outputs, *graph.held)]
    assert inner
    graph = replace(graph, dropped=tuple(inner))
    schedule = keep_all(graph)
    verify(graph, schedule)
    assert pruned(graph, schedule, simulate(graph, schedule).peak_bytes) == schedule


@pytest.mark.parametrize("seed", range(12))
def test_constraints_are_obeyed_when_much_is_left_out(seed: int) -> None:
    """What must not be kept may have been made again for what was left out before."""
    rng = random.Random(seed + 540)
    graph = constrained_graph(rng, RANGES)
    least = thriftiest(graph).schedule
    verify(graph, least)
    low = simulate(graph, least).peak_bytes
    for budget_bytes in (low, low * 11 // 10, low * 2):
        for before in (least, within(graph, budget_bytes)):
            if before is not None:
                after = pruned(graph, before, budget_bytes)
                verify(graph, after)
                assert simulate(graph, after).peak_bytes <= budget_bytes


def test_long_chains_of_re_executions_do_not_recurse() -> None:
    """Each serves the next alone, and nothing of them may be kept."""
    length = 1500
    graph = Draft()
    chain = [graph.add_data(DataKind.INPUT, 1)]
    for _ in range(length):
        chain.append(graph.add_data(DataKind.ACTIVATION, 1))
        graph.add_node(Phase.FORWARD, [chain[-2]], [chain[-1]], time_ns=1)
    gradient = graph.add_data(DataKind.GRADIENT, 1)
    graph.add_node(Phase.BACKWARD, [chain[-1]], [gradient], time_ns=1)
    problem = replace(graph.finish((), (gradient,)), dropped=tuple(chain[1:]))
    again = keep_all(problem)
    verify(problem, again)
    assert len(again.computes) == 2 * length + 1
    draft = planning_draft.Draft(problem, *again.phases)
    last = max(draft.reruns())
    assert draft.nodes[last] == length - 1
    assert draft.fits_without(last, simulate(problem, again).peak_bytes)
