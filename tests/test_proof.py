"""Proofs of gap.md: nothing is proven that is not so, and of what is not relaxed the optimum is."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.bounds.prove import lower_bound_ns
from benchmarks.exact_search import Search, bits
from benchmarks.proof import NONE, Relaxation, least_ns, proven_ns
from rockplan.oracles.simulate import simulate
from rockplan.search.local.greedy_eviction import thriftiest
from rockplan.values.graph import CDGraph
from testing.graphs import random_graph, varied_graph, with_random_takes, with_room

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler"
)

EFFORT, MOST = 50_000, 1_000_000


def graphs(seeds: range) -> Iterator[CDGraph]:
    """Small ones; of some many operations take the same time, or none."""
    for seed in seeds:
        rng = random.Random(seed)
        graph = varied_graph(seed)
        if seed % 3 == 0:
            graph = with_random_takes(rng, random_graph(rng, rng.randint(4, 8)))
        graph = with_room(graph, rng.randint(1, 30)) if seed % 2 else with_room(graph, 0)
        if seed % 5 == 0:
            nodes = (replace(node, time_ns=rng.choice((0, 1, 1, 2))) for node in graph.nodes)
            graph = replace(graph, nodes=tuple(nodes))
        yield graph


def optima(seeds: range) -> Iterator[tuple[CDGraph, int, int | None]]:
    """Graphs, budgets, and the least time of re-executions, None where nothing fits."""
    for graph in graphs(seeds):
        least_bytes = simulate(graph, thriftiest(graph).schedule).peak_bytes
        for more_bytes in (-2, 0, 1, 3):
            search = Search(graph, max(least_bytes + more_bytes, 0))
            steps = search.steps_within(EFFORT, math.inf)
            if steps is not None:
                yield graph, search.budget_bytes, search.proven_ns - search.once_ns
            elif not search.queue:
                yield graph, search.budget_bytes, None


def test_nothing_is_lost_by_what_is_dropped() -> None:
    """Without bounds of levels; exact where no operation has to run again with another."""
    costly = impossible = relaxed = 0
    for graph, budget_bytes, optimum_ns in optima(range(60)):
        relaxation = Relaxation(graph, budget_bytes, small=0)
        found_ns = relaxation.least_ns(relaxation.levels, relaxation.held, 1 << 40, MOST)
        assert found_ns is not None
        if max(relaxation.parts) >= 0:
            relaxed += 1
            assert optimum_ns is None or found_ns <= optimum_ns
        else:
            costly += bool(optimum_ns)
            impossible += optimum_ns is None
            assert found_ns == (NONE if optimum_ns is None else optimum_ns)
    assert costly >= 40 and impossible >= 4 and relaxed >= 12


def test_bounds_of_levels_prove_the_optimum() -> None:
    proven = 0
    for graph, budget_bytes, optimum_ns in optima(range(150, 200)):
        if optimum_ns is None:
            continue
        relaxation = Relaxation(graph, budget_bytes, small=0)
        bounds = dict(proven_ns(relaxation, 2 * optimum_ns, MOST))
        bound_ns = bounds[relaxation.levels]
        assert max(bounds.values()) <= optimum_ns
        if max(relaxation.parts) < 0:
            proven += bound_ns > 0
            assert bound_ns == optimum_ns
    assert proven >= 25


def test_what_is_learned_holds_with_any_storages() -> None:
    """Bounds of levels with one storage, against searches of the level with some that know
    nothing of them."""
    rng, larger = random.Random(0), 0
    for graph, budget_bytes, optimum_ns in optima(range(240, 300)):
        if not optimum_ns:
            continue
        relaxation = Relaxation(graph, budget_bytes, small=0)
        for _ in proven_ns(relaxation, 2 * optimum_ns, MOST):
            pass
        for level in range(len(graph.forward) + 1, relaxation.levels):
            made = list(bits(relaxation.made[level]))
            some = sum(1 << k for k in rng.sample(made, min(len(made), 2)))
            needed = some | relaxation.certain(level)
            bound_ns = relaxation.bound_ns(level, needed)
            fresh = Relaxation(graph, budget_bytes, small=0)
            found_ns = fresh.least_ns(level, needed, 1 << 40, MOST)
            assert found_ns is not None
            assert found_ns == NONE or bound_ns <= found_ns
            larger += bound_ns > 0
    assert larger >= 50


def test_levels_raise_the_relaxation_never_too_far() -> None:
    raised = 0
    for graph, budget_bytes, optimum_ns in optima(range(420, 450)):
        if not optimum_ns or max(Relaxation(graph, budget_bytes, small=0).parts) >= 0:
            continue
        relaxation, turn = Relaxation(graph, budget_bytes, small=0), len(graph.forward)
        bounds = list(proven_ns(relaxation, 2 * optimum_ns, MOST))[:-1]
        spent_ns = {level - 1: bound for level, bound in bounds if level > turn + 1 and bound}
        alone_ns = lower_bound_ns(graph, budget_bytes, time_limit_s=60)
        both_ns = lower_bound_ns(graph, budget_bytes, time_limit_s=60, spent_ns=spent_ns)
        assert both_ns <= graph.time_ns + optimum_ns
        raised += both_ns > alone_ns
    assert raised >= 1


def test_few_states_prove_less_than_the_optimum() -> None:
    fewer = smaller = 0
    for graph, budget_bytes, optimum_ns in optima(range(300, 360)):
        if not optimum_ns:
            continue
        exact = Relaxation(graph, budget_bytes, small=0)
        few_ns, _ = least_ns(exact, exact.levels, exact.held, optimum_ns * 2, 3)
        relaxation = Relaxation(graph, budget_bytes, small=0.2)
        small_ns, _ = least_ns(relaxation, exact.levels, relaxation.held, optimum_ns * 2, MOST)
        assert 0 <= few_ns <= optimum_ns and 0 <= small_ns <= optimum_ns
        fewer += few_ns < optimum_ns
        smaller += small_ns < optimum_ns
    assert fewer >= 10 and smaller >= 10
