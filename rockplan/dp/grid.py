"""Buckets of memory.

takes: a limit in bytes and the size of the problem. returns: a Grid.
Measured (benchmarks/chain_dp.py, GPT at 30 % of keep-all), time over keep-all with 512, 1024 and
10 buckets per block: 52 blocks +12.56, +12.56, +12.56 %; 202 blocks +11.66, +11.22, +11.22 %;
402 blocks +15.3, +11.4, +11.0 %.
"""

from __future__ import annotations

from dataclasses import dataclass

MINIMUM_BUCKETS = 500
BUCKETS_PER_BLOCK = 10
TABLE_BYTES = 320 * 2**20
"""Most bytes of all tables at a time; a single table needs as many only for hundreds of blocks that
all differ."""

ENTRY_BYTES = 16
"""Bytes of a table entry: a time and spare bytes, 8 each."""

STRIDE = 32
"""Distance of the buckets at which every choice is tried; 16 and 64 take about as long."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Buckets 0..count of `unit_bytes`; bucket j stands for a limit of j * unit_bytes."""

    unit_bytes: int
    count: int

    @property
    def limit_bytes(self) -> int:
        return self.unit_bytes * self.count


def bucket_count(blocks: int, segments: int) -> int:
    """Return the number of buckets for a chain of `blocks` with so many distinct `segments`."""
    wanted = max(MINIMUM_BUCKETS, BUCKETS_PER_BLOCK * blocks)
    return max(1, min(wanted, TABLE_BYTES // (ENTRY_BYTES * segments)))


def tables_at_once(segments: int, buckets: int) -> int:
    """Return the number of tables of that size that may be kept."""
    return max(1, TABLE_BYTES // (ENTRY_BYTES * segments * buckets))


def grid(limit_bytes: int, buckets: int) -> Grid:
    """Return a grid of about `buckets` buckets that reaches limit_bytes: a multiple of STRIDE of
    them, of one byte each if that suffices."""
    strides = -(-buckets // STRIDE)
    unit_bytes = max(1, -(-limit_bytes // (strides * STRIDE)))
    return Grid(unit_bytes, -(-limit_bytes // (unit_bytes * STRIDE)) * STRIDE)
