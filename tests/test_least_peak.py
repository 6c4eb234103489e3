"""Where the search for the least peak begins, and prices on a busy machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rockplan.graph_builder.costs.call_costs import CallMemory, cost_of
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search import stages
from rockplan.search.incumbent import Incumbent
from rockplan.search.limits import Limits
from rockplan.search.local.exchange import DEFAULT, exchanged, squeezed
from rockplan.search.planning import profile_source
from rockplan.search.problem import Goal
from rockplan.values.profile import Profile
from rockplan.values.schedule import keep_all
from testing import models, odd_models, priced
from testing.models import Case

CASES = {
    "mlp": lambda: models.mlp(depth=6, width=32, batch=64),
    "convnext": lambda: odd_models.convnext((1, 1), width=16, batch=2, size=32),
}


def goal_of(case: Case) -> Goal:
    problem = priced.prepared_case(case, Options(cache=False))
    return Goal(problem.constrained, problem.blocks, None)


@pytest.mark.parametrize("name", CASES)
def test_relaxations_within_less_and_less_are_starts(name: str) -> None:
    torch.manual_seed(0)
    goal, limits = goal_of(CASES[name]()), Limits()
    kept = Incumbent(goal.graph.time_ns).improved(goal, keep_all(goal.graph))
    found = stages.relax(goal, kept, limits)
    peaks = [simulate(goal.graph, start).peak_bytes for start in found.starts]
    assert peaks and peaks == sorted(peaks) and len(peaks) <= limits.rungs
    assert found.peak_bytes == peaks[0] < kept.peak_bytes
    for start in found.starts:
        verify(goal.graph, start)
    if name == "convnext":
        # Nothing is left of what may lead to nothing: as far as it goes at once.
        hasty = stages.relax(goal, kept, replace(limits, missing=1))
        assert hasty.peak_bytes >= found.peak_bytes


def test_coarse_to_fine_steps_squeeze_no_less() -> None:
    torch.manual_seed(0)
    graph = goal_of(CASES["convnext"]()).graph
    limits = replace(DEFAULT, effort=100_000)
    coarse, fine = (
        simulate(graph, squeezed(graph, keep_all(graph), limits=own)).peak_bytes
        for own in (limits, replace(limits, coarse=limits.step))
    )
    assert coarse <= fine < simulate(graph, keep_all(graph)).peak_bytes


def test_rounds_of_exchanges_end_at_long_drafts() -> None:
    """One round beside the first where each takes all the work that there is."""
    torch.manual_seed(0)
    graph = goal_of(CASES["mlp"]()).graph
    small = replace(DEFAULT, effort=20_000)
    least = squeezed(graph, keep_all(graph), limits=small)
    budget_bytes = simulate(graph, least).peak_bytes
    one, many = (
        exchanged(graph, least, budget_bytes, limits=replace(small, work=work))
        for work in (1, DEFAULT.work)
    )
    times_ns = [simulate(graph, s).time_ns for s in (many, one, least)]
    assert times_ns == sorted(times_ns)


def test_the_least_repeat_counts_and_spread_is_said() -> None:
    memory = CallMemory(0, (8,))
    calm, busy = cost_of([100, 104, 101, 103], memory), cost_of([100, 900, 400, 160], memory)
    assert calm.time_ns == busy.time_ns == 100
    profile = Profile("measured", "cpu", "2.13", 1, (("a", calm),))
    assert "repeats" not in profile_source(profile)
    noisy = replace(profile, costs=(("a", busy),))
    assert "repeats differ by" in profile_source(noisy)
