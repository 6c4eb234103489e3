"""What planning did, and planning on a machine whose times are set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from rockplan.graph_builder.costs import call_costs, price
from rockplan.graph_builder.costs.estimate import CPU_RATES, estimate
from rockplan.ilp.whole_graph import refine
from rockplan.options import DEFAULT_OPTIONS, Options
from rockplan.search import boundary, planning
from rockplan.search.limits import Limits
from rockplan.search.local.exchange import ExchangeLimits
from rockplan.values import progress

thorough_limits, THOROUGH_ITERATIONS = planning.limits_of, refine.ITERATIONS
"""What limits the searches of users, and each of their relaxations."""


OF_BLOCKS = boundary.QUICK, boundary.SQUEEZE, boundary.THOROUGH
"""What limits local searches of single blocks."""


def quick(usual: ExchangeLimits) -> ExchangeLimits:
    return replace(usual, effort=usual.effort // 40, start=usual.start // 40)


def quick_limits(options: Options) -> Limits:
    """Local searches take a fortieth of their effort, evictions and relaxations for the least peak
    an eighth. Integer programs raise bounds, which leaves plans as they are, where a test says for
    how long."""
    usual = thorough_limits(options)
    is_asked = options.bound_time_limit_s != DEFAULT_OPTIONS.bound_time_limit_s
    eviction = usual.eviction
    return replace(
        usual,
        exchange=quick(usual.exchange),
        squeeze=quick(usual.squeeze),
        eviction=replace(eviction, attempt=eviction.attempt // 8),
        missing=usual.missing // 8,
        proof_s=usual.proof_s if is_asked else 0.0,
    )


def plan_quickly() -> None:
    """Spend little, in this process, on what most tests do not ask: how exactly operators were
    timed, and how good plans are.

    Calls run as few times as the product allows, a third of what it takes to plan a small module
    otherwise, with caches as the call before left them. Relaxations end at an eighth of their
    iterations: least peaks are found in a third of the time, before a time limit cuts the search
    for them, and are others (of Llama, T5 and an encoder the same; 14 % more for an MLP, 18 % less
    for GPT-2).
    """
    call_costs._TIME_BOX_NS = 0
    call_costs.SCRATCH_BYTES = dict.fromkeys(call_costs.SCRATCH_BYTES, 1)
    planning.limits_of = quick_limits
    boundary.QUICK, boundary.SQUEEZE, boundary.THOROUGH = map(quick, OF_BLOCKS)
    refine.ITERATIONS = THOROUGH_ITERATIONS // 8


@contextlib.contextmanager
def hearing() -> Iterator[set[str]]:
    """The stages of planning that are gone through."""
    stages: set[str] = set()
    with progress.listening(lambda said: stages.add(said.stage)):
        yield stages


def heard(step: Callable[[], object]) -> set[str]:
    """The stages of planning that `step` went through."""
    with hearing() as stages:
        step()
    return stages


WITHOUT_SEARCH = {"capturing the model", "measuring sizes", "finding blocks", "writing the code"}
"""What finds out that a plan holds."""


def set_times(monkeypatch: pytest.MonkeyPatch, slower: int = 1) -> None:
    """What is measured on a busy machine leads to other plans each time."""

    def times(inputs: Any, calls: dict[str, list[Any]], scratch: Tensor) -> dict[str, list[int]]:
        progress.report("measuring times")
        estimated = {k: estimate(inputs.graph, c[0], CPU_RATES) for k, c in calls.items()}
        return {key: [slower * (1 + cost.time_ns)] * 3 for key, cost in estimated.items()}

    monkeypatch.setattr(price, "measure_times", times)
