"""What planning did, and planning on a machine whose times are set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from rockplan.graph_builder.costs import price
from rockplan.graph_builder.costs.estimate import estimate
from rockplan.values import progress


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


def set_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured on a busy machine leads to other plans each time."""

    def times(inputs: Any, calls: dict[str, list[Any]], scratch: Tensor) -> dict[str, list[int]]:
        progress.report("measuring times")
        estimated = {k: estimate(inputs.graph, c[0], 10e9, 50e9) for k, c in calls.items()}
        return {key: [1 + cost.time_ns] * 3 for key, cost in estimated.items()}

    monkeypatch.setattr(price, "measure_times", times)
