"""Options of the blocks of a step: a dynamic program over the bytes that earlier blocks save.

takes: a family of options for each block, the moments of a step, a budget. returns: the options
with which the blocks take least time within the budget, or None. guarantees: the peak of every
moment (`StepMoment.peak_bytes`) is within the budget; no other choice is faster, if no more than
LABELS sums of saved bytes are useful.

Blocks are chosen in the order in which their forwards run. Of two choices for the first blocks, one
that saves no more and takes no longer is as good for all that follow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rockplan.values.block_sequence import BoundedOption, StepMoment, step_peak_bytes

LABELS = 4000
"""Most sums of saved bytes that are continued; of more, evenly spaced ones are."""

Families = Sequence[Sequence[BoundedOption]]

LIMITS = 24
"""Limits of the saved bytes of a call that are tried if several calls are in flight."""


@dataclass(frozen=True, slots=True)
class Others:
    """Further calls that are between forward and backward while one runs. returned_bytes: what each
    holds beside what its blocks save."""

    count: int = 0
    returned_bytes: int = 0

    def needed_bytes(self, options: Sequence[BoundedOption]) -> int:
        """Return the bytes of all of them, with these options."""
        return self.count * (self.returned_bytes + sum(o.saved_bytes for o in options))


NO_OTHERS = Others()


def cases(
    families: Families, moments: Sequence[StepMoment], budget_bytes: int, others: Others
) -> Iterator[tuple[Sequence[StepMoment], int]]:
    """Divide a budget between the call that runs and the others in flight. Yield (moments, budget
    in bytes) for the call that runs, for each of LIMITS limits of the bytes that a call saves
    between its phases: the others are taken to save that much, and one more moment holds the
    running call to it. Without others, yield the arguments as they are."""
    if not others.count:
        yield moments, budget_bytes
        return
    least, most = (sum(f(o.saved_bytes for o in family) for family in families) for f in (min, max))
    for limit in sorted({least + (most - least) * i // (LIMITS - 1) for i in range(LIMITS)}):
        left_bytes = budget_bytes - others.count * (others.returned_bytes + limit)
        yield (*moments, StepMoment(left_bytes - limit, len(families))), left_bytes


@dataclass(frozen=True, slots=True)
class _Label:
    """A choice for the first blocks: its last option, and the choice before."""

    saved_bytes: int
    time_ns: int
    option: BoundedOption | None = None
    before: _Label | None = None


@dataclass(frozen=True, slots=True)
class _BytesLeft:
    """What a budget leaves at each block. forward, backward: for the block while it runs and the
    saved bytes of the blocks before it; kept: for the saved bytes of it and the blocks before
    it."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    kept: tuple[int, ...]


def fastest_options(
    families: Families, moments: Sequence[StepMoment], budget_bytes: int, others: Others = NO_OTHERS
) -> tuple[BoundedOption, ...] | None:
    """Return an option for each block so that the sum of their times is least and every moment of
    the step stays within the budget, also with `others` in flight; None if none does."""
    found = (_fastest(families, *case) for case in cases(families, moments, budget_bytes, others))
    choices = (choice for choice in found if choice is not None)
    return min(choices, key=lambda choice: sum(o.time_ns for o in choice), default=None)


def _fastest(
    families: Families, moments: Sequence[StepMoment], budget_bytes: int
) -> tuple[BoundedOption, ...] | None:
    """Exact up to LABELS useful sums of saved bytes."""
    limits = _limits(families, moments, budget_bytes)
    labels = [_Label(0, 0)]
    for position, family in enumerate(families):
        extended = [
            _Label(label.saved_bytes + o.saved_bytes, label.time_ns + o.time_ns, o, label)
            for label in labels
            for o in family
            if _fits(limits, position, label.saved_bytes, o)
        ]
        labels = _useful(extended)
        if len(labels) > LABELS:
            last = len(labels) - 1
            labels = [labels[i * last // (LABELS - 1)] for i in range(LABELS)]
    if not labels:
        return None
    options: list[BoundedOption] = []
    label: _Label | None = min(labels, key=lambda label: label.time_ns)
    while label is not None and label.option is not None:
        options.append(label.option)
        label = label.before
    return tuple(options[::-1])


def least_budget(
    families: Families, moments: Sequence[StepMoment], others: Others = NO_OTHERS
) -> int:
    """Return the least budget, in bytes, with which `fastest_options` finds a choice."""

    def has_choice(budget_bytes: int) -> bool:
        several = cases(families, moments, budget_bytes, others)
        return any(_has_choice(families, *case) for case in several)

    # Options that save the least leave most to later blocks.
    thrifty = [min(f, key=lambda o: (o.saved_bytes, o.backward_peak_bytes)) for f in families]
    low = 0
    high = max(step_peak_bytes(moments, thrifty) + others.needed_bytes(thrifty), 1)
    # If blocks run backward in another order, the limits may ask for more than the peak.
    while not has_choice(high):
        low, high = high + 1, 2 * high
    return bisect_left(range(high), x=True, lo=low, key=has_choice)


def _has_choice(families: Families, moments: Sequence[StepMoment], budget_bytes: int) -> bool:
    """At each block, the one that saves least of those that fit leaves most room to later
    blocks."""
    limits, saved_bytes = _limits(families, moments, budget_bytes), 0
    for position, family in enumerate(families):
        fitting = [o.saved_bytes for o in family if _fits(limits, position, saved_bytes, o)]
        if not fitting:
            return False
        saved_bytes += min(fitting)
    return True


def _limits(families: Families, moments: Sequence[StepMoment], budget_bytes: int) -> _BytesLeft:
    forward, backward, kept = ([budget_bytes] * len(families) for _ in range(3))

    def lower(limits: list[int], position: int, limit_bytes: int) -> None:
        limits[position] = min(limits[position], limit_bytes)

    for m in moments:
        left_bytes = budget_bytes - m.outside_bytes
        if m.running is None:
            if m.keeping:
                lower(kept, m.keeping - 1, left_bytes)
            elif left_bytes < 0:
                lower(forward, 0, left_bytes)
        elif m.keeping <= m.running + 1:
            lower(backward if m.is_backward else forward, m.running, left_bytes)
        else:
            # Later blocks save something meanwhile: they must leave what it needs beyond its own.
            beyond = max(
                (o.backward_peak_bytes if m.is_backward else o.forward_peak_bytes) - o.saved_bytes
                for o in families[m.running]
            )
            lower(kept, m.keeping - 1, left_bytes - beyond)
    return _BytesLeft(tuple(forward), tuple(backward), tuple(kept))


def _fits(limits: _BytesLeft, position: int, before_bytes: int, option: BoundedOption) -> bool:
    return (
        before_bytes + option.forward_peak_bytes <= limits.forward[position]
        and before_bytes + option.backward_peak_bytes <= limits.backward[position]
        and before_bytes + option.saved_bytes <= limits.kept[position]
    )


def _useful(labels: Iterable[_Label]) -> list[_Label]:
    useful: list[_Label] = []
    for label in sorted(labels, key=lambda one: (one.saved_bytes, one.time_ns)):
        if not useful or label.time_ns < useful[-1].time_ns:
            useful.append(label)
    return useful
