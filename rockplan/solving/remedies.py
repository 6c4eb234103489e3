"""Remedies: options with which a call needs less, for a budget that no plan fits, or less time.

takes: the options in use, leaves that the caller could release, and a function that finds what a
call needs under other options. returns: the sentence for an error, a profile or an explanation; or
the options that gain. guarantees: each figure is of a plan that was made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from rockplan.errors import InfeasibleBudget, RockplanError
from rockplan.options import Options, without_effect
from rockplan.values.plan import format_bytes
from rockplan.values.released import Releasable

TIME_LIMIT_S = 5.0
"""Seconds of the search for each figure. (A longer search may find less; this one works, too.)"""

Needs = Callable[[Options], int | None]
"""Returns the bytes that a call needs with these options, None if they have no effect or fail."""

_LOGGER = logging.getLogger("rockplan")

GAIN = 0.02
"""Share of bytes, or of time, from which on it is a gain to have less. (Times are measured.)"""

Change = dict[str, Any]
"""Names of options and other values for them."""


def remedies(
    error: InfeasibleBudget, options: Options, let_go: Releasable | None, least: Needs
) -> str:
    """Return a sentence that names options with which less memory is needed, up to the first with
    which the budget of `error` is enough; '' if none helps. least: options -> bytes of the smallest
    plan, None if there is none."""
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
    """Return change of the options, as users write it -> bytes that a call needs with it, for those
    changes that need less than below_bytes. Those that restrict the caller least are tried first,
    up to the first that needs at most enough_bytes. needs: options -> bytes, None if the call
    cannot be planned so."""
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
    """Write a change as users do: `Options(tile=True)`."""
    return f"Options({', '.join(f'{name}={value!r}' for name, value in change.items())})"


def changes(options: Options, let_go: Releasable | None) -> Iterator[Change]:
    """Yield changes of the options that lower what is needed, as name -> value; those that restrict
    the caller and change numbers least come first. let_go: leaves that could be released."""
    only_loss: Change = {"only_loss": True, **({"released": ()} if options.released else {})}
    if let_go:
        yield {"released": tuple(sorted({*let_go.positions, *options.released}))}
        yield only_loss
    if not options.tile:
        yield {"tile": True}
        if let_go:
            yield {**only_loss, "tile": True}


class Figure(NamedTuple):
    """What a plan comes to. size_bytes: beyond the budget, all of the smallest budget; time_ns: of
    a step, 0 where no plan fits."""

    size_bytes: int
    time_ns: int

    def gains_over(self, other: Figure) -> bool:
        """True for fewer bytes, and where these are alike for less time."""
        if abs(self.size_bytes - other.size_bytes) > GAIN * other.size_bytes:
            return self.size_bytes < other.size_bytes
        return self.time_ns < (1 - GAIN) * other.time_ns

    def __str__(self) -> str:
        if not self.time_ns:
            return f"no plan fits, by {format_bytes(self.size_bytes)}"
        size = f"{format_bytes(self.size_bytes)}, " if self.size_bytes else ""
        return f"{size}{self.time_ns / 1e6:.4g} ms a step"


def best_options(
    options: Options,
    figure_of: Callable[[Options], Figure],
    on_cuda: bool,
    function: str = "",
) -> Options:
    """Return the options with each of those that training normally tolerates with which a plan
    gains over the one without; the logger says of each what it comes to. figure_of: may raise
    RockplanError for options that do not go with the call. function: that plans, '' for `solve`;
    what it does not take is not tried."""
    chosen = replace(options, numerics="eager")
    now, tried = figure_of(chosen), [chosen]
    for change in _tolerated(chosen, on_cuda):
        try:
            other = replace(chosen, **change)
            if other in tried or without_effect(other, function):
                continue
            tried.append(other)
            figure = figure_of(other)
        except RockplanError as error:
            _LOGGER.warning("%s is not taken: %s", written(change), error)
            continue
        is_gain = figure.gains_over(now)
        taken = "is taken" if is_gain else "is not taken"
        _LOGGER.warning("%s %s: %s; without it %s", written(change), taken, figure, now)
        if is_gain:
            chosen, now = other, figure
    return chosen


def _tolerated(options: Options, on_cuda: bool) -> Iterator[Change]:
    yield from (c for c in changes(options, Releasable((), 0)) if not c.get("released"))
    if not options.compile:
        yield {"compile": True}
    # A plan on the CPU pages to a file, which other work may need the disk for.
    if on_cuda and options.host is None:
        yield {"host": True}
