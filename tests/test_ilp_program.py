"""Programs at moments hold every schedule, and each solution of one reads as a legal order."""

from __future__ import annotations

import random

import numpy as np

from rockplan.ilp.blocks.decode import price
from rockplan.ilp.blocks.pareto_search import seed_orders
from rockplan.ilp.highs import TIME_UNIT
from rockplan.ilp.whole_graph.intervals import Facts, Moments
from rockplan.ilp.whole_graph.program import orders_of, program
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.order import Orders
from rockplan.values.schedule import with_frees
from testing.graphs import random_schedule
from tests.moments import draw, is_feasible, places, random_moments, solution_of


def test_every_schedule_solves_the_programs_at_its_peak() -> None:
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
            solution = solution_of(made, places(made, found), found)
            assert set(solution) == set(np.flatnonzero(made.linear.integral))
            assert is_feasible(made, solution)
            cost = sum(made.linear.costs[column] * value for column, value in solution.items())
            assert cost * TIME_UNIT * graph.time_ns <= priced.time_ns - graph.time_ns + 1e-3
            again += len(set(found.forward)) < len(found.forward)
            tighter = program(facts, moments, priced.peak_bytes // 2)
            tight += not is_feasible(tighter, solution_of(tighter, places(tighter, found), found))
    assert tight >= 40
    assert again >= 30


def test_a_schedules_solution_reads_as_the_schedule() -> None:
    """Where each re-execution serves the next first execution, as seeds have it."""
    same = 0
    for seed in range(24):
        graph = draw(seed)
        facts = Facts(graph)
        ends = frozenset(n.index for n in graph.backward)
        for found in seed_orders(graph):
            made = program(facts, Moments(ends), price(graph, found).peak_bytes)
            chosen = solution_of(made, places(made, found), found)
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
