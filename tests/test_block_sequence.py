"""Options of the blocks of a step: the dynamic program against all choices, and the limit of what a
block keeps."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rockplan.dp import block_sequence
from rockplan.dp.block_sequence import fastest_options, least_budget
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search import boundary, pipeline
from rockplan.search.boundary import bounded, bounded_option, without_limit
from rockplan.values.block_sequence import (
    BoundedOption,
    StepMoment,
    step_peak_bytes,
    useful_options,
)
from rockplan.values.copies import HostLink, with_copies
from rockplan.values.schedule import Schedule, keep_all, kept_data, with_frees
from testing.graphs import random_graph

NO_EVENTS = Schedule((), 0)


def random_family(rng: random.Random) -> tuple[BoundedOption, ...]:
    found = []
    for _ in range(rng.randint(1, 4)):
        saved = rng.randint(0, 20)
        forward, backward = saved + rng.randint(0, 15), saved + rng.randint(0, 25)
        found.append(BoundedOption(NO_EVENTS, saved, forward, backward, rng.randint(1, 30)))
    return useful_options(found)


def random_moments(rng: random.Random, count: int) -> tuple[StepMoment, ...]:
    """Of a step whose blocks run backward in the opposite order, with other work in between."""
    found = [StepMoment(rng.randint(0, 9), 0)]
    for i in range(count):
        found += [
            StepMoment(rng.randint(0, 9), i, i),
            StepMoment(rng.randint(0, 9), i + 1),
            StepMoment(rng.randint(0, 9), i, i, is_backward=True),
        ]
    return tuple(found)


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_is_faster_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    families = [random_family(rng) for _ in range(rng.randint(1, 5))]
    moments = random_moments(rng, len(families))
    choices = [*itertools.product(*families)]
    peaks = {choice: step_peak_bytes(moments, choice) for choice in choices}
    assert least_budget(families, moments) == min(peaks.values())
    for budget in sorted({*peaks.values(), min(peaks.values()) - 1}):
        fitting = [sum(o.time_ns for o in c) for c in choices if peaks[c] <= budget]
        found = fastest_options(families, moments, budget)
        assert (found is None) == (not fitting)
        if found is not None:
            assert step_peak_bytes(moments, found) <= budget
            assert sum(o.time_ns for o in found) == min(fitting)


def test_few_labels_lead_to_a_choice_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    families = [random_family(rng) for _ in range(8)]
    moments = random_moments(rng, len(families))
    budget = least_budget(families, moments) + 20
    exact = fastest_options(families, moments, budget)
    monkeypatch.setattr(block_sequence, "LABELS", 3)
    found = fastest_options(families, moments, budget)
    assert exact is not None and found is not None
    assert step_peak_bytes(moments, found) <= budget
    assert sum(o.time_ns for o in found) >= sum(o.time_ns for o in exact)


def test_blocks_that_run_backward_in_another_order() -> None:
    """What is predicted may be too much then, never too little; there is a choice from the least
    budget on."""
    is_tight = 0
    for seed in range(200):
        rng = random.Random(seed)
        families = [random_family(rng) for _ in range(3)]
        other = StepMoment(5, rng.choice([1, 3]), rng.randrange(3), is_backward=True)
        moments = (*random_moments(rng, 3), other)
        least = least_budget(families, moments)
        assert fastest_options(families, moments, least - 1) is None
        for budget in (least, least + 7):
            found = fastest_options(families, moments, budget)
            assert found is not None and step_peak_bytes(moments, found) <= budget
            is_tight += step_peak_bytes(moments, found) == budget
    assert is_tight > 100


def test_a_search_cut_short_resumes_with_more_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    problem: Any = SimpleNamespace(graph=random_graph(random.Random(3)), waits=(), host=None)
    runs: list[bool] = []

    def searched(is_cut: bool, seconds: float) -> bool:
        def run(*args: Any) -> Any:
            runs.append(is_cut)
            found = pipeline.run(*args)
            return replace(found, is_complete=not is_cut)

        runs.clear()
        monkeypatch.setattr(boundary, "run", run)
        assert boundary.first_options(problem, Options(time_limit_s=seconds))
        return bool(runs)

    assert searched(is_cut=True, seconds=1.0)
    assert not searched(is_cut=True, seconds=1.0)
    assert searched(is_cut=True, seconds=2.0)
    assert searched(is_cut=False, seconds=3.0)
    assert not searched(is_cut=False, seconds=4.0)  # what is complete holds for every limit


@pytest.mark.parametrize("seed", range(12))
def test_the_limit_is_what_may_be_kept(seed: int) -> None:
    """A schedule is within the budget of the graph with the limit just where it keeps no more."""
    graph = random_graph(random.Random(seed))
    schedule = keep_all(graph)
    option = bounded_option(graph, schedule)
    peak = simulate(graph, schedule).peak_bytes
    for less, fits in ((0, True), (1, False)):
        limited = bounded(graph, option.saved_bytes - less, peak)
        same = keep_all(limited)
        verify(limited, same)
        assert without_limit(graph, limited, same) == schedule
        assert (simulate(limited, same).peak_bytes <= peak) == fits


@pytest.mark.parametrize("seed", range(6))
def test_schedules_with_some_copies_fit_all(seed: int) -> None:
    graph = random_graph(random.Random(seed))
    storages = sorted(
        kept_data(graph, keep_all(graph)) & {d for n in graph.forward for d in n.writes}
    )
    whole, some = (with_copies(graph, of, HostLink(1, 1)) for of in (storages, storages[1:]))
    searched = bounded(some, 0, 1 << 40)
    orders = ([n.index for n in nodes] for nodes in (searched.forward, searched.backward))
    found = without_limit(whole, searched, with_frees(searched, *orders))
    names = [whole.nodes[i].name for i in found.computes]
    assert names == [n.name for n in some.nodes]
