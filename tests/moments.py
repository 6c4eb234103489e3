"""Moments for the tests, as refinements find them: one after the other, each splits an interval."""

from __future__ import annotations

import random
from dataclasses import replace

from rockplan.ilp.whole_graph.program import Facts, Moments, program


def random_moments(rng: random.Random, facts: Facts) -> Moments:
    """First executions of either phase, with the spans that they split."""
    last = len(facts.graph.nodes) - 1
    share = rng.choice((0.3, 0.6, 1.0))
    chosen = [i for i in range(last) if rng.random() < share]
    moments = Moments(frozenset({last}))
    for end in rng.sample(chosen, len(chosen)):
        spans = moments.spans | program(facts, moments, 1).spans
        moments = replace(moments, ends=moments.ends | {end}, spans=spans)
    return moments
