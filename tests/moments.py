"""Programs at moments for the tests: graphs, moments as refinements find them (one after the other,
each splits an interval), and whether a schedule is a solution."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.bounds.program import alive_before
from rockplan.ilp.highs import SolverStatus, solve
from rockplan.ilp.whole_graph.intervals import TURN, Facts, Moments, turn_of
from rockplan.ilp.whole_graph.program import Program, program
from rockplan.values.graph import CDGraph, required
from rockplan.values.order import Orders
from testing.graphs import Ranges, random_chain, random_graph

RANGES = Ranges(random_percent=0, max_rng_state_bytes=0, pinned_percent=15)
WITH_STATES = replace(RANGES, random_percent=40, max_rng_state_bytes=6)


def random_moments(rng: random.Random, facts: Facts) -> Moments:
    """First executions of either phase, with the spans that they split."""
    *others, last = required(facts.graph.nodes)
    share = rng.choice((0.3, 0.6, 1.0))
    chosen = [i for i in others if rng.random() < share]
    moments = Moments(frozenset({last}))
    for end in rng.sample(chosen, len(chosen)):
        spans = moments.spans | program(facts, moments, 1).spans
        moments = replace(moments, ends=moments.ends | {end}, spans=spans)
    return moments


def draw(seed: int) -> CDGraph:
    rng, ranges = random.Random(seed), WITH_STATES if seed % 3 == 2 else RANGES
    return random_graph(rng, 3, ranges) if seed % 2 else random_chain(rng, (1, 2), ranges)[0]


def places(made: Program, schedule: Orders) -> list[int]:
    """For each computation its interval: their number after the last, -1 before the first."""
    turn = len(schedule.forward)
    firsts = enumerate(zip(schedule.computations, schedule.is_first, strict=True))
    at = {i: place for place, (i, is_first) in firsts if is_first}
    stops = [turn if part.end == TURN else at[part.end] + 1 for part in made.intervals]
    start = 0 if turn_of(made.intervals) else turn
    computations = range(len(schedule.computations))
    return [-1 if place < start else bisect_right(stops, place) for place in computations]


def solution_of(made: Program, places: Sequence[int], schedule: Orders) -> dict[int, float]:
    """Integer columns as a schedule has them. places: of each computation, its interval."""
    columns = {*made.keep.values(), *(c for runs in made.reruns for c in runs.values())}
    chosen = dict.fromkeys(columns, 0.0)
    count = len(made.intervals)
    for i, s, is_first in zip(schedule.computations, places, schedule.is_first, strict=True):
        if not is_first and 0 <= s < count and i in made.reruns[s]:
            chosen[made.reruns[s][i]] = 1.0
    alive = alive_before(made.facts, schedule)
    kept = dict(reversed(list(zip(places, alive, strict=True))))
    for s in reversed(range(count)):
        # Nothing runs in it.
        kept.setdefault(s, kept.get(s + 1, frozenset()))
    chosen |= {column: 1.0 for (s, d), column in made.keep.items() if d in kept[s]}
    return chosen


def is_feasible(made: Program, chosen: dict[int, float]) -> bool:
    """Is there a solution with these integers?"""
    if not chosen:
        return True
    lower, upper = made.linear.column_lower.copy(), made.linear.column_upper.copy()
    for column, value in chosen.items():
        lower[column] = upper[column] = value
    fixed = replace(made.relaxed, column_lower=lower, column_upper=upper)
    return solve(fixed, time_limit_s=60, absolute_gap=0.0).status is SolverStatus.OPTIMAL
