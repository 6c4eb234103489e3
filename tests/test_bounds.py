"""Programs of offline proofs hold every schedule; each solution of one reads as a legal order."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from benchmarks.bounds.pebbles import Pinches
from benchmarks.bounds.program import (
    Mark,
    Moments,
    Pinch,
    Program,
    ProofFacts,
    alive_before,
    orders_of,
    program,
)
from benchmarks.bounds.prove import looking_closer
from rockplan.ilp.blocks.decode import peak_bytes, price
from rockplan.ilp.blocks.seeds import seed_orders
from rockplan.ilp.highs import TIME_UNIT, SolverStatus, solve
from rockplan.oracles.verify import verify
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.graph import CDGraph
from rockplan.values.order import Orders
from rockplan.values.schedule import with_frees
from tests.graphs import Ranges, random_chain, random_graph

RANGES = Ranges(random_percent=0, max_rng_state_bytes=0, pinned_percent=15)
WITH_STATES = replace(RANGES, random_percent=40, max_rng_state_bytes=6)


def solution_of(found: Program, schedule: Orders) -> dict[int, float]:
    """Integer columns as a schedule has them."""
    columns = {*found.keep.values(), *(c for runs in found.reruns for c in runs.values())}
    chosen = dict.fromkeys(columns, 0.0)
    count = len(found.intervals)
    places = found.places(schedule)
    for i, s, first in zip(schedule.computations, places, schedule.is_first, strict=True):
        if not first and 0 <= s < count and i in found.reruns[s]:
            chosen[found.reruns[s][i]] = 1.0
    alive = alive_before(found.facts, schedule)
    kept = dict(reversed(list(zip(places, alive, strict=True))))
    for s in reversed(range(count)):
        # Nothing runs in it.
        kept.setdefault(s, kept.get(s + 1, frozenset()))
    chosen |= {column: 1.0 for (s, d), column in found.keep.items() if d in kept[s]}
    return chosen


def draw(seed: int) -> CDGraph:
    rng, ranges = random.Random(seed), WITH_STATES if seed % 3 == 2 else RANGES
    return random_graph(rng, 3, ranges) if seed % 2 else random_chain(rng, (1, 2), ranges)[0]


def legal_orders(graph: CDGraph) -> list[Orders]:
    """The thriftiest seed first."""
    return sorted(seed_orders(graph), key=lambda orders: peak_bytes(price(graph, orders)))


def closest(facts: ProofFacts, schedule: Orders, budget_bytes: int) -> Moments:
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
        facts = ProofFacts(graph)
        for found in (*legal_orders(graph), Orders(*thriftiest(graph).schedule.phases)):
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


def test_whatever_the_values_are_their_order_is_legal() -> None:
    for seed in range(24):
        graph = draw(seed)
        rng = np.random.default_rng(seed)
        thrifty = Orders(*thriftiest(graph).schedule.phases)
        moments = closest(ProofFacts(graph), thrifty, peak_bytes(price(graph, thrifty)) // 2)
        moments = with_pinches(moments, Pinches(graph, 100), thrifty)
        made = program(ProofFacts(graph), moments, 100)
        for at_once in (False, True):
            found = orders_of(made, rng.random(len(made.linear.costs)), at_once=at_once)
            verify(graph, with_frees(graph, found.forward, found.backward))
