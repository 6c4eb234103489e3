"""Explanations of a plan, and what its call needs with other options.

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
    """Who owns the peak of `plan`, why, and what its recomputations buy.

    plan: a Plan or a planned module. unplanned: explain the execution that keeps everything
    instead, which is where to look first when a model does not fit. Each price and each
    recomputation is one replay of the schedule: a second or so for a thousand operations.
    sample_input, sample_kwargs, options: as for `solve`, of a planned module: the explanation says
    as well with which other options the call needs less, and how many bytes: the smallest plan, or
    with `unplanned` everything kept. Raises InvalidInput.
    """
    found = explain_plan(plan, unplanned=unplanned)
    if sample_input is None and sample_kwargs is None:
        return found
    if isinstance(plan, Plan):
        raise InvalidInput("what other options need is found with the model; pass a planned module")
    from rockplan.api import needed_bytes_with  # which imports torch, that plans of files need not

    sample = () if sample_input is None else sample_input
    lower = needed_bytes_with(plan, sample, sample_kwargs, options, everything_kept=unplanned)
    return replace(found, needed_bytes_with=lower)
