"""Spans in which a storage is alive and unused, for every storage: found by a position inside.

takes: the spans of one storage after another, as they change. guarantees: a look at a position
costs what numpy needs to compare all spans with it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_NOWHERE = -1


class Gaps:
    """Gaps as rows (storage, last use, next read), in no order; rows that are free are nowhere."""

    def __init__(self) -> None:
        self._table: NDArray[np.int64] = np.full((3, 0), _NOWHERE)
        self._rows: dict[int, list[int]] = {}
        self._free: list[int] = []

    def replace(self, data: int, gaps: Iterable[tuple[int, int]]) -> None:
        """From now on these (last use, next read) are the gaps of the storage."""
        old = self._rows.pop(data, [])
        for row in old:
            self._table[:, row] = _NOWHERE
        self._free += old
        rows = self._rows[data] = []
        for last_use, next_read in gaps:
            if not self._free:
                self._grow()
            row = self._free.pop()
            self._table[:, row] = data, last_use, next_read
            rows.append(row)

    def around(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Storages with a gap strictly around `position`, ascending, and where each is read next;
        a storage has one gap there at most."""
        data, last_use, next_read = self._table
        rows = np.flatnonzero((last_use < position) & (next_read > position))
        rows = rows[np.argsort(data[rows])]
        return data[rows], next_read[rows]

    def move(self, moved: NDArray[np.int64]) -> None:
        """Positions are others: what was at p is at moved[p]."""
        used = self._table[1] != _NOWHERE
        self._table[1:, used] = moved[self._table[1:, used]]

    def _grow(self) -> None:
        size = self._table.shape[1]
        more = np.full((3, max(size, 64)), _NOWHERE)
        self._table = np.concatenate([self._table, more], axis=1)
        self._free += range(size, self._table.shape[1])
