"""rockplan.pareto: monotone, and each point is what solving at that budget gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import rockplan
from rockplan.api import plan_each
from testing.models import Case, mlp, resnet

CASES: list[Callable[[], Case]] = [
    lambda: mlp(depth=2),
    lambda: resnet((1, 1), batch=2, size=32),
]
Found = tuple[Case, rockplan.Curve]
OPTIONS = rockplan.Options(bound_time_limit_s=0.1, time_limit_s=60.0)
OTHER_OPTIONS = replace(OPTIONS, bound_time_limit_s=0.05)
"""Of plans that are not those that the curve was made from: they are cached as others."""


@pytest.fixture(scope="module", params=CASES, ids=["mlp", "resnet"])
def found(request: pytest.FixtureRequest) -> Found:
    """A case with its curve; the cache of the test run holds the profile for its plans."""
    torch.manual_seed(0)
    case = request.param()
    curve = rockplan.pareto(case.model, case.args, sample_kwargs=case.kwargs, options=OPTIONS)
    return case, curve


def plan(case: Case, budget: int | str) -> rockplan.Plan:
    kwargs, options = case.kwargs, OTHER_OPTIONS
    return rockplan.plan(case.model, case.args, budget, sample_kwargs=kwargs, options=options)


def test_the_curve_falls_from_minimum_to_keep_all(found: Found) -> None:
    case, curve = found
    smallest = plan(case, "min")
    for a, b in zip(curve.points, curve.points[1:], strict=False):
        assert a.peak_bytes < b.peak_bytes and a.time_ns > b.time_ns
    # What the plans of the curve reach counts later.
    assert smallest.peak_bytes <= smallest.budget_bytes <= curve.minimum_bytes
    assert smallest.eager_peak_bytes == curve.unplanned_bytes
    assert curve.points[-1].overhead == 0
    assert smallest.graph_digest == curve.graph_digest
    assert smallest.profile_digest == curve.profile_digest


def test_each_point_is_the_plan_for_its_budget(found: Found) -> None:
    """Of every third point: of all of them it takes as long as the curve."""
    case, curve = found
    points = curve.points[::3]
    budgets = [point.peak_bytes for point in points]
    # Together they look for the smallest peak once.
    plans = plan_each(
        case.model, case.args, budgets, sample_kwargs=case.kwargs, options=OTHER_OPTIONS
    )
    for point, made in zip(points, plans, strict=True):
        assert isinstance(made, rockplan.Plan)
        assert (made.budget_bytes, made.time_ns) == (point.peak_bytes, point.time_ns)
        assert made.saved_bytes == point.saved_bytes
        assert point.certificate.bound_ns <= made.time_ns
        assert 0.95 * point.peak_bytes <= made.peak_bytes <= point.peak_bytes


def test_a_budgets_point_is_the_fastest_that_fits(found: Found) -> None:
    _, curve = found
    middle = curve.points[len(curve.points) // 2]
    assert curve.at(middle.peak_bytes) == middle
    assert curve.at(middle.peak_bytes - 1) in curve.points[: len(curve.points) // 2]
    assert curve.at(curve.minimum_bytes - 1) is None
    assert curve.at(10 * curve.unplanned_bytes) == curve.points[-1]
    assert len(str(curve).splitlines()) == len(curve.points) + 2
