"""Programs of offline proofs hold every schedule; each solution of one reads as a legal order."""

from __future__ import annotations

import random

import numpy as np

from benchmarks.bounds.pebbles import Pinches
from benchmarks.bounds.program import (
    Mark,
    Moments,
    Pinch,
    ProofFacts,
    orders_of,
    program,
)
from benchmarks.bounds.prove import looking_closer
from rockplan.ilp.blocks.decode import price
from rockplan.ilp.blocks.pareto_search import seed_orders
from rockplan.ilp.highs import TIME_UNIT
from rockplan.oracles.verify import verify
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.graph import CDGraph
from rockplan.values.order import Orders
from rockplan.values.schedule import with_frees
from tests.moments import draw, is_feasible, solution_of


def legal_orders(graph: CDGraph) -> list[Orders]:
    """The thriftiest seed first."""
    return sorted(seed_orders(graph), key=lambda orders: price(graph, orders).peak_bytes)


def closest(facts: ProofFacts, schedule: Orders, budget_bytes: int) -> Moments:
    """With every moment, also at re-executions, at which the schedule exceeds the budget."""
    moments = Moments(frozenset({len(facts.graph.nodes) - 1}))
    while True:
        made = program(facts, moments, budget_bytes)
        closer = looking_closer(made, moments, schedule, budget_bytes, at_reruns=True)
        if closer is None:
            return moments
        moments = closer


def test_every_schedule_solves_the_programs_at_its_peak() -> None:
    """With moments where it needs most, also at re-executions, with pinches, and split spans."""
    moments_seen = marks_seen = pinches_seen = 0
    for seed in range(60):
        graph = draw(seed)
        facts = ProofFacts(graph)
        for found in (*legal_orders(graph), Orders(*thriftiest(graph).schedule.phases)):
            option = price(graph, found)
            moments = closest(facts, found, option.peak_bytes // 2)
            moments = with_pinches(moments, Pinches(graph, option.peak_bytes), found)
            fewer = without_some(random.Random(seed), moments)
            made = program(facts, fewer, option.peak_bytes)
            assert is_feasible(made, solution_of(made, made.places(found), found))
            made = program(facts, moments, option.peak_bytes)
            chosen = solution_of(made, made.places(found), found)
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


def test_whatever_the_values_are_their_order_is_legal() -> None:
    for seed in range(24):
        graph = draw(seed)
        rng = np.random.default_rng(seed)
        thrifty = Orders(*thriftiest(graph).schedule.phases)
        moments = closest(ProofFacts(graph), thrifty, price(graph, thrifty).peak_bytes // 2)
        moments = with_pinches(moments, Pinches(graph, 100), thrifty)
        made = program(ProofFacts(graph), moments, 100)
        for at_once in (False, True):
            found = orders_of(made, rng.random(len(made.linear.costs)), at_once=at_once)
            verify(graph, with_frees(graph, found.forward, found.backward))
