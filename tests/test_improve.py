"""Programs at moments hold every schedule; improving with them is legal and never slower."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest
from rockplan.search.improve import improve

from rockplan.ilp.blocks.decode import keep_all_orders, peak_bytes, price
from rockplan.ilp.blocks.seeds import seed_orders
from rockplan.ilp.highs import TIME_UNIT, SolverStatus, solve
from rockplan.ilp.whole_graph.pebbles import Pinches
from rockplan.ilp.whole_graph.program import (
    Facts,
    Mark,
    Moments,
    Pinch,
    Program,
    orders_of,
    program,
    solution_of,
)
from rockplan.ilp.whole_graph.refine import looking_closer, refined
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search.local.exchange import fitted
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.graph import CDGraph
from rockplan.values.order import Orders
from rockplan.values.schedule import Schedule, with_frees
from tests.exhaustive import stage_schedules
from tests.graphs import (
    Ranges,
    assert_improved,
    attention_block,
    mlp_block,
    random_chain,
    random_graph,
    random_schedule,
)
from tests.moments import random_moments

RANGES = Ranges(random_percent=0, max_rng_state_bytes=0, pinned_percent=15)
WITH_STATES = replace(RANGES, random_percent=40, max_rng_state_bytes=6)


def draw(seed: int) -> CDGraph:
    rng, ranges = random.Random(seed), WITH_STATES if seed % 3 == 2 else RANGES
    return random_graph(rng, 3, ranges) if seed % 2 else random_chain(rng, (1, 2), ranges)[0]


def legal_orders(graph: CDGraph) -> list[Orders]:
    """The thriftiest seed first."""
    return sorted(seed_orders(graph), key=lambda orders: peak_bytes(price(graph, orders)))


def budgets(graph: CDGraph) -> list[int]:
    """From what the thriftiest seed needs to just below keep-all."""
    low = peak_bytes(price(graph, legal_orders(graph)[0]))
    high = peak_bytes(price(graph, keep_all_orders(graph)))
    return sorted({low, (low + high) // 2, high - 1} & set(range(low, high)))


def improved(graph: CDGraph, before: Schedule, budget_bytes: int) -> Schedule:
    start = refined(graph, budget_bytes, deadline=time.monotonic() + 60)
    if start is None:
        return before
    return improve(start, before, deadline=time.monotonic() + 60)


def closest(facts: Facts, schedule: Orders, budget_bytes: int) -> Moments:
    """With every moment, also at re-executions, at which the schedule exceeds the budget."""
    moments = Moments(frozenset({len(facts.graph.nodes) - 1}))
    while True:
        made = program(facts, moments, budget_bytes)
        closer = looking_closer(made, moments, schedule, budget_bytes, at_reruns=True)
        if closer is None:
            return moments
        moments = closer


def test_every_schedule_is_a_solution_of_the_programs_at_its_peak() -> None:
    """With moments where it needs most, also at re-executions, with pinches, and split spans."""
    moments_seen = marks_seen = pinches_seen = 0
    for seed in range(60):
        graph = draw(seed)
        facts = Facts(graph)
        for found in (*legal_orders(graph), Orders(*thriftiest(graph).phases)):
            option = price(graph, found)
            moments = closest(facts, found, peak_bytes(option) // 2)
            moments = with_pinches(moments, Pinches(graph, peak_bytes(option)), found)
            fewer = without_some(random.Random(seed), moments)
            made = program(facts, fewer, peak_bytes(option))
            assert is_feasible(made, solution_of(made, found))
            made = program(facts, moments, peak_bytes(option))
            chosen = solution_of(made, found)
            assert set(chosen) == set(np.flatnonzero(made.linear.integral))
            cost = sum(made.linear.costs[column] * value for column, value in chosen.items())
            assert cost * TIME_UNIT * graph.time_ns <= option.time_ns - graph.time_ns + 1e-3
            assert is_feasible(made, chosen)
            moments_seen += len(moments.ends) - 1
            marks_seen += sum(isinstance(cut, Mark) for cut in moments.cuts)
            pinches_seen += sum(isinstance(cut, Pinch) for cut in moments.cuts)
    assert moments_seen >= 100
    assert marks_seen >= 30
    assert pinches_seen >= 100


def with_pinches(moments: Moments, pinches: Pinches, schedule: Orders) -> Moments:
    """With the narrowest one before each first execution that has any."""
    turn = min(i for i in schedule.backward if i not in schedule.forward)
    firsts = [i for i, first in zip(schedule.computations, schedule.is_first, strict=True) if first]
    for end in (i for i in firsts if i > turn):
        pinch = min(pinches.before(end), key=lambda pinch: pinch.room_bytes, default=None)
        if pinch is not None:
            following = next((cut for cut in moments.cuts if cut.end == end), None)
            moments = moments.with_cut(pinch, following)
    return moments


def without_some(rng: random.Random, moments: Moments) -> Moments:
    for moment in (*sorted(moments.ends)[:-1], *moments.cuts):
        if rng.random() < 0.5:
            moments = moments.without(moment)
    return moments


def is_feasible(made: Program, chosen: dict[int, float]) -> bool:
    """Is there a solution with these integers?"""
    if not chosen:
        return True
    lower, upper = made.linear.column_lower.copy(), made.linear.column_upper.copy()
    for column, value in chosen.items():
        lower[column] = upper[column] = value
    fixed = replace(made.relaxed, column_lower=lower, column_upper=upper)
    return solve(fixed, time_limit_s=60, absolute_gap=0.0).status is SolverStatus.OPTIMAL


def test_every_schedule_is_a_solution_of_programs_with_forward_moments() -> None:
    """Also such as run nodes of the forward phase again in it."""
    tight = again = 0
    for seed in range(60):
        rng, graph = random.Random(seed), draw(seed)
        facts = Facts(graph)
        drawn = [random_schedule(rng, graph) for _ in range(3)]
        for schedule in (*drawn, thriftiest(graph)):
            found = Orders(*schedule.phases)
            moments = random_moments(rng, facts)
            priced = simulate(graph, schedule)
            made = program(facts, moments, priced.peak_bytes)
            solution = solution_of(made, found)
            assert is_feasible(made, solution)
            cost = sum(made.linear.costs[column] * value for column, value in solution.items())
            assert cost * TIME_UNIT * graph.time_ns <= priced.time_ns - graph.time_ns + 1e-3
            again += len(set(found.forward)) < len(found.forward)
            tighter = program(facts, moments, priced.peak_bytes // 2)
            tight += not is_feasible(tighter, solution_of(tighter, found))
    assert tight >= 40
    assert again >= 30


def test_a_solution_of_a_schedule_reads_as_the_schedule() -> None:
    """Where each re-execution serves the next first execution, as seeds have it."""
    same = 0
    for seed in range(24):
        graph = draw(seed)
        facts = Facts(graph)
        ends = frozenset(n.index for n in graph.backward)
        for found in legal_orders(graph):
            made = program(facts, Moments(ends), peak_bytes(price(graph, found)))
            chosen = solution_of(made, found)
            solution = np.zeros(len(made.linear.costs))
            solution[list(chosen)] = list(chosen.values())
            again = orders_of(made, solution)
            verify(graph, with_frees(graph, again.forward, again.backward))
            assert price(graph, again).time_ns <= price(graph, found).time_ns
            same += again == found
    assert same >= 40


def test_whatever_the_values_are_their_order_is_legal() -> None:
    for seed in range(24):
        graph = draw(seed)
        rng = np.random.default_rng(seed)
        thrifty = Orders(*thriftiest(graph).phases)
        moments = closest(Facts(graph), thrifty, peak_bytes(price(graph, thrifty)) // 2)
        moments = with_pinches(moments, Pinches(graph, 100), thrifty)
        made = program(Facts(graph), moments, 100)
        for at_once in (False, True):
            found = orders_of(made, rng.random(len(made.linear.costs)), at_once=at_once)
            verify(graph, with_frees(graph, found.forward, found.backward))


def test_schedules_by_eviction_can_be_improved() -> None:
    """Backward nodes that run again there may run again, or not."""
    faster = 0
    for graph in (mlp_block(), attention_block(), *map(draw, range(24))):
        before = thriftiest(graph)
        for budget_bytes in budgets(graph):
            if simulate(graph, before).peak_bytes > budget_bytes:
                continue
            found = improved(graph, before, budget_bytes)
            assert_improved(graph, before, found, budget_bytes)
            faster += simulate(graph, found).time_ns < simulate(graph, before).time_ns
    assert faster >= 1


@pytest.mark.parametrize("seed", range(12))
def test_improving_is_legal_within_budget_and_no_slower(seed: int) -> None:
    graph = draw(seed)
    start = legal_orders(graph)[0]
    before = with_frees(graph, start.forward, start.backward)
    for budget_bytes in budgets(graph):
        found = improved(graph, before, budget_bytes)
        assert_improved(graph, before, found, budget_bytes)
        assert found == improved(graph, before, budget_bytes)


def test_improving_finds_most_optima_of_small_graphs() -> None:
    optimal = total = 0
    for seed in range(24):
        graph = draw(seed)
        points = [(found.peak_bytes, found.time_ns) for _, found in stage_schedules(graph)]
        start = legal_orders(graph)[0]
        before = with_frees(graph, start.forward, start.backward)
        for budget_bytes in budgets(graph):
            found = improved(graph, before, budget_bytes)
            least = min(t for p, t in points if p <= budget_bytes)
            optimal += simulate(graph, found).time_ns <= least
            total += 1
    assert total >= 20
    assert optimal >= 0.9 * total


def test_room_is_made_or_nothing_is_returned() -> None:
    """`fitted` begins with more than the budget."""
    made = 0
    for seed in range(24):
        graph = draw(seed)
        everything = keep_all_orders(graph)
        for budget_bytes in budgets(graph):
            found = fitted(graph, everything.forward, everything.backward, budget_bytes)
            if found is not None:
                assert simulate(graph, found).peak_bytes <= budget_bytes
                made += 1
    assert made >= 20
    assert fitted(mlp_block(), *_of(keep_all_orders(mlp_block())), 1) is None


def _of(found: Orders) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return found.forward, found.backward


def test_without_time_the_schedule_stays() -> None:
    graph = mlp_block()
    start = legal_orders(graph)[0]
    before = with_frees(graph, start.forward, start.backward)
    high = peak_bytes(price(graph, keep_all_orders(graph)))
    relaxed = refined(graph, high - 1, deadline=time.monotonic() + 60)
    assert relaxed is not None
    assert improve(relaxed, before, deadline=time.monotonic() - 1) == before
    found = improve(relaxed, before, deadline=time.monotonic() + 60)
    assert simulate(graph, found).time_ns < simulate(graph, before).time_ns
