"""Packing: places in one piece of memory for blocks, from the times at which they are alive.

takes: blocks of the calls of a step. returns: where each begins. guarantees: blocks that are alive
at once do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

UNIT_BYTES = 2 << 20
"""Places are multiples of it: a block may keep up to half of that beyond its size."""


@dataclass(frozen=True, slots=True)
class AskedBlock:
    """opens, closes: numbers of the calls of operators in or after which it is asked for, and given
    back."""

    opens: int
    closes: int
    size_bytes: int


def packed(blocks: Sequence[AskedBlock]) -> list[int]:
    """Return where each block begins: the largest first, or those that are alive for long, where
    there is room, whichever takes less. Those of one call lie in the order in which it asks for
    them, since of holes of one size the lowest is taken, and do not touch, since two holes would be
    one."""
    rows = [(b.opens, b.closes + 1, whole_units(b.size_bytes)) for b in blocks]
    opens, closes, sizes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    keys = sizes, sizes * (closes - opens), closes - opens
    found = (_first_fit(opens, closes, sizes, np.argsort(-key, kind="stable")) for key in keys)
    best = min(found, key=lambda starts: int(max(starts + sizes, default=0)))
    return [int(start) for start in best]


def _first_fit(opens: Any, closes: Any, sizes: Any, order: Any) -> Any:
    starts, together = np.full(len(sizes), -1), dict[int, list[int]]()
    for number, call in enumerate(opens):
        together.setdefault(int(call), []).append(number)
    for first in order:
        place = 0
        for number in together.pop(int(opens[first]), ()):
            beside = (starts >= 0) & (opens < closes[number]) & (closes > opens[number])
            for start, size in sorted(zip(starts[beside], sizes[beside], strict=True)):
                if start - place >= sizes[number]:
                    break
                place = max(place, int(start + size))
            starts[number] = place
            place += int(sizes[number]) + UNIT_BYTES
    return starts


def whole_units(size_bytes: int) -> int:
    return -(-size_bytes // UNIT_BYTES) * UNIT_BYTES
