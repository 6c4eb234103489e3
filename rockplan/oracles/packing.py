"""Packing: places in one piece of memory for blocks, from the times at which they are alive.

takes: blocks of the calls of a step. returns: where each begins and ends. guarantees: blocks that
are alive at once do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

UNITS_BYTES = range((1 << 20) + 512, (2 << 20) + 1, 512)
"""Places are multiples of one of them: what is between two is nothing, or more than a MiB."""

TRIES = 16
"""How often what lies highest is placed first."""

_NOWHERE = 1 << 60


@dataclass(frozen=True, slots=True)
class AskedBlock:
    """opens, closes: numbers of the calls of operators in or after which it is asked for, and given
    back."""

    opens: int
    closes: int
    size_bytes: int


def packed(blocks: Sequence[AskedBlock]) -> list[tuple[int, int]]:
    """Return where each block begins and ends, in multiples of the unit with which the fewest bytes
    are alive at once. Those of one call do not touch, since two holes would be one, and those of
    one size lie in the order in which it asks for them, since the lowest hole is taken."""
    if not blocks:
        return []
    asked = np.array([(b.opens, b.closes + 1, b.size_bytes) for b in blocks], dtype=np.int64)
    opens, closes, exact = asked.T
    spans = [*zip(opens, closes, strict=True)]

    def alive(unit: int) -> Any:
        sizes = -(-exact // unit) * unit
        return (np.bincount(opens, sizes, max(closes) + 1) - np.bincount(closes, sizes)).cumsum()

    unit = min(UNITS_BYTES, key=lambda unit: alive(unit).max())
    sizes, bytes_at = -(-exact // unit) * unit, alive(unit)
    most = np.array([bytes_at[begin:end].max() for begin, end in spans])
    beside = [np.flatnonzero((opens < end) & (closes > begin)) for begin, end in spans]
    found = list[tuple[Any, Any]]()
    # The largest first, or those that are alive where most is; the last key decides.
    for keys in ((opens - closes, -sizes), (-sizes, -most)):
        order = np.lexsort(keys)
        for _ in range(TRIES):
            starts = _first_fit(opens, sizes, beside, order, unit)
            found.append((starts, ends := starts + sizes))
            if ends.max() == bytes_at.max():
                break
            is_highest = ends[order] == ends.max()
            order = np.concatenate([order[is_highest], order[~is_highest]])
    starts, ends = min(found, key=lambda one: one[1].max())
    return [*zip(starts.tolist(), ends.tolist(), strict=True)]


def _first_fit(opens: Any, sizes: Any, beside: Sequence[Any], order: Any, unit: int) -> Any:
    """beside: numbers of the blocks that are alive beside each, itself among them."""
    starts, alike = np.full(len(sizes), _NOWHERE), dict[tuple[int, int], list[int]]()
    for number, kind in enumerate(zip(opens, sizes, strict=True)):
        alike.setdefault(kind, []).append(number)
    for first in order:
        place = 0
        for number in alike.pop((opens[first], sizes[first]), ()):
            near = beside[number]
            room = np.where(opens[near] == opens[number], unit, 0)
            begins = starts[near] - room
            by_place = begins.argsort()
            ends = (starts + sizes)[near] + room
            ends = np.maximum.accumulate(np.concatenate([[place], ends[by_place]]))
            is_wide = begins[by_place] - ends[:-1] >= sizes[number]
            starts[number] = ends[is_wide.argmax()]
            place = starts[number] + sizes[number] + unit
    return starts
