"""Remedies: options with which a budget would be enough, for one for which no plan fits.

takes: the options that were used, what the caller could let go, and a way to find what a call needs
with others. returns: what is said, of an error, a profile and an explanation. guarantees: each
figure is the peak of a plan that was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

from rockplan.errors import InfeasibleBudget
from rockplan.options import Options
from rockplan.values.plan import format_bytes
from rockplan.values.released import Releasable

TIME_LIMIT_S = 5.0
"""Of the search for each figure: a larger one than a longer search would find is one that works."""

Needs = Callable[[Options], int | None]
"""The bytes that a call needs with these options; None where they change nothing, or cannot be."""

Change = dict[str, Any]


def remedies(
    error: InfeasibleBudget, options: Options, let_go: Releasable | None, least: Needs
) -> str:
    """What to change, from the least on, until a budget of `error` is enough; '' where nothing
    helps."""
    found = needed_with(options, let_go, least, error.minimum_bytes, error.budget_bytes)
    if not found:
        return ""
    least_so_far = accumulate(found.values(), min, initial=error.minimum_bytes)
    rows = zip(found.items(), least_so_far, strict=False)
    listed = ", ".join(
        f"{text} needs {n} bytes ({format_bytes(n)})" for (text, n), before in rows if n < before
    )
    untried = "" if options.compile else "; Options(compile=True) was not tried"
    return f" With other options a plan was found for less: {listed}{untried}."


def needed_with(
    options: Options,
    let_go: Releasable | None,
    needs: Needs,
    below_bytes: int,
    enough_bytes: int = 0,
) -> dict[str, int]:
    """Options, as users write them, and the bytes that a call needs with them: from what asks least
    of the caller on, each less than `below_bytes`, until one is enough."""
    found: dict[str, int] = {}
    limit_s = min(options.time_limit_s, TIME_LIMIT_S)
    for change in changes(options, let_go):
        needed_bytes = needs(replace(options, **change, time_limit_s=limit_s))
        if needed_bytes is None or needed_bytes >= below_bytes:
            continue
        found[written(change)] = needed_bytes
        if needed_bytes <= enough_bytes:
            break
    return found


def written(change: Change) -> str:
    """As users write it."""
    return f"Options({', '.join(f'{name}={value!r}' for name, value in change.items())})"


def changes(options: Options, let_go: Releasable | None) -> Iterator[Change]:
    """Of the options, from what asks least of the caller and of the numbers on."""
    only_loss: Change = {"only_loss": True, **({"released": ()} if options.released else {})}
    if let_go:
        yield {"released": tuple(sorted({*let_go.positions, *options.released}))}
        yield only_loss
    if not options.tile:
        yield {"tile": True}
        if let_go:
            yield {**only_loss, "tile": True}
