"""Programs at moments hold every schedule, and each solution of one reads as a legal order."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import replace

import numpy as np

from benchmarks.bounds.program import alive_before
from rockplan.ilp.blocks.decode import peak_bytes, price
from rockplan.ilp.blocks.seeds import seed_orders
from rockplan.ilp.highs import TIME_UNIT, SolverStatus, solve
from rockplan.ilp.whole_graph.program import (
    TURN,
    Facts,
    Moments,
    Program,
    orders_of,
    program,
    turn_of,
)
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.graph import CDGraph
from rockplan.values.order import Orders
from rockplan.values.schedule import with_frees
from tests.graphs import Ranges, random_chain, random_graph, random_schedule
from tests.moments import random_moments

RANGES = Ranges(random_percent=0, max_rng_state_bytes=0, pinned_percent=15)
WITH_STATES = replace(RANGES, random_percent=40, max_rng_state_bytes=6)


def places(made: Program, schedule: Orders) -> list[int]:
    """For each computation its interval: their number after the last, -1 before the first."""
    turn = len(schedule.forward)
    firsts = enumerate(zip(schedule.computations, schedule.is_first, strict=True))
    at = {i: place for place, (i, is_first) in firsts if is_first}
    stops = [turn if part.end == TURN else at[part.end] + 1 for part in made.intervals]
    start = 0 if turn_of(made.intervals) else turn
    computations = range(len(schedule.computations))
    return [-1 if place < start else bisect_right(stops, place) for place in computations]


def solution_of(made: Program, schedule: Orders) -> dict[int, float]:
    """Integer columns as a schedule has them."""
    columns = {*made.keep.values(), *(c for runs in made.reruns for c in runs.values())}
    chosen = dict.fromkeys(columns, 0.0)
    count, at = len(made.intervals), places(made, schedule)
    for i, s, is_first in zip(schedule.computations, at, schedule.is_first, strict=True):
        if not is_first and 0 <= s < count and i in made.reruns[s]:
            chosen[made.reruns[s][i]] = 1.0
    alive = alive_before(made.facts, schedule)
    kept = dict(reversed(list(zip(at, alive, strict=True))))
    for s in reversed(range(count)):
        # Nothing runs in it.
        kept.setdefault(s, kept.get(s + 1, frozenset()))
    chosen |= {column: 1.0 for (s, d), column in made.keep.items() if d in kept[s]}
    return chosen


def draw(seed: int) -> CDGraph:
    rng, ranges = random.Random(seed), WITH_STATES if seed % 3 == 2 else RANGES
    return random_graph(rng, 3, ranges) if seed % 2 else random_chain(rng, (1, 2), ranges)[0]


def is_feasible(made: Program, chosen: dict[int, float]) -> bool:
    """Is there a solution with these integers?"""
    if not chosen:
        return True
    lower, upper = made.linear.column_lower.copy(), made.linear.column_upper.copy()
    for column, value in chosen.items():
        lower[column] = upper[column] = value
    fixed = replace(made.relaxed, column_lower=lower, column_upper=upper)
    return solve(fixed, time_limit_s=60, absolute_gap=0.0).status is SolverStatus.OPTIMAL


def test_every_schedule_is_a_solution_of_the_programs_at_its_peak() -> None:
    """At moments of either phase, with split spans, also where forward nodes run again in the
    forward phase."""
    tight = again = 0
    for seed in range(60):
        rng, graph = random.Random(seed), draw(seed)
        facts = Facts(graph)
        drawn = [random_schedule(rng, graph) for _ in range(3)]
        for schedule in (*drawn, thriftiest(graph).schedule):
            found = Orders(*schedule.phases)
            moments = random_moments(rng, facts)
            priced = simulate(graph, schedule)
            made = program(facts, moments, priced.peak_bytes)
            solution = solution_of(made, found)
            assert set(solution) == set(np.flatnonzero(made.linear.integral))
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
        for found in seed_orders(graph):
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
        made = program(Facts(graph), random_moments(random.Random(seed), Facts(graph)), 100)
        found = orders_of(made, rng.random(len(made.linear.costs)))
        verify(graph, with_frees(graph, found.forward, found.backward))
