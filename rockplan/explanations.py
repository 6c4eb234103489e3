"""Explanations of a plan, and what its call would need with other options.

takes: a plan, or a planned module with a sample. returns: values that print. guarantees: each
figure is the peak of a plan that was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rockplan.errors import InvalidInput
from rockplan.options import DEFAULT_OPTIONS, Options
from rockplan.reports.explain import Explanation, explain_plan
from rockplan.values.plan import Plan


def explain(
    plan: object,
    *,
    unplanned: bool = False,
    sample_input: object = None,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Explanation:
    """Explain who owns the peak of `plan`, why, and what its recomputations save.

    plan: a Plan or a planned module. unplanned: explain the execution that keeps everything
    instead, which is where to look first when a model does not fit. Each price and each
    recomputation is one replay of the schedule: about a second for a thousand operations.
    sample_input, sample_kwargs, options: as for `solve`, for a planned module: the explanation then
    lists other options with which the call needs less, and how many bytes: of the smallest plan, or
    with `unplanned` of everything kept. Raises InvalidInput.
    """
    found = explain_plan(plan, unplanned=unplanned)
    if sample_input is None and sample_kwargs is None:
        return found
    if isinstance(plan, Plan):
        raise InvalidInput("what other options need is found with the model; pass a planned module")
    from rockplan.api import (
        needed_bytes_with,
    )  # imports torch, which a plan of a file does not need

    sample = () if sample_input is None else sample_input
    lower = needed_bytes_with(plan, sample, sample_kwargs, options, everything_kept=unplanned)
    return replace(found, needed_bytes_with=lower)
