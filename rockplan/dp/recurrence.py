"""The dynamic program over a chain, for every memory level at once.

takes: Segments, a Grid. returns: a Table of the best times. guarantees: a sequence decoded for a
limit needs no more than the limit, exactly, in the convention of `rockplan.dp.segments`; it is at
least as fast as the table says; there is one whenever the limit is at least the minimum need.
source: Rockmate, algorithms 2 and 3, with buckets that know the exact need of their sequence.

A bucket holds the best time found within its limit, and how many bytes of the limit it spares. To
take `a` bytes off bucket j, look into bucket j - floor(a / unit): if its spare bytes make up for
the rounding, it serves, else the next lower one does. Sizes are never rounded, so errors do not add
up along the chain.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rockplan.dp.links import Operation, RunForward, RunOption
from rockplan.dp.segments import EMPTY, Choices, Integers, Segments, choices
from rockplan.values.graph import Phase

NEVER = 2**60
"""The time of a sequence that does not fit; the sum of three still fits into an int64."""


class OutOfTime(Exception):
    """A table is not filled before the deadline; caught in this package."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The best times of all segments. times_ns[id, j + 1], spare_bytes[id, j + 1]: of bucket j of a
    segment.

    minimum_bytes[id]: the exact minimum need. The column below its first feasible bucket stores the
    thriftiest sequence of a segment, which needs just that: there the spare is negative.
    """

    segments: Segments
    grid: Grid
    minimum_bytes: Integers
    times_ns: Integers
    spare_bytes: Integers


def minimum_needs(segments: Segments) -> Integers:
    """Return the fewest bytes with which each segment can run, by id; exact."""
    needs = np.zeros(len(segments.spans), dtype=np.int64)
    for segment in range(1, len(segments.spans)):
        needs[segment] = choices(segments, segment).need_bytes(needs).min()
    return needs


def fastest_need(segments: Segments) -> int:
    """Return the bytes with which every block runs once, with its fastest option: the largest over
    the blocks of what earlier blocks save for their backward plus the block's own peak. More memory
    gains nothing."""
    steps: list[tuple[int, int]] = []
    segment = segments.whole
    while segment != EMPTY:
        alternatives = choices(segments, segment)
        steps.append((int(alternatives.peak_bytes[0]), int(alternatives.held_bytes[0])))
        segment = int(alternatives.inner[0])
    need = 0
    for peak_bytes, held_bytes in reversed(steps):
        need = max(peak_bytes, held_bytes + need)
    return need


def solve(
    segments: Segments, grid: Grid, minimum_bytes: Integers, *, deadline: float = math.inf
) -> Table:
    """Fill a table with the least time of each segment at every bucket (limit of memory) of `grid`.
    minimum_bytes: of each segment, by id, as `minimum_needs` returns them. Raises OutOfTime at the
    deadline (as of time.process_time)."""
    table = empty_table(segments, grid, minimum_bytes)
    for segment in range(1, len(segments.spans)):
        if time.process_time() >= deadline:
            raise OutOfTime
        if minimum_bytes[segment] <= grid.limit_bytes:
            _fill(table, segment)
    return table


def empty_table(segments: Segments, grid: Grid, minimum_bytes: Integers) -> Table:
    """Return a table with only the empty segment filled."""
    shape = (len(segments.spans), grid.count + 2)
    table = Table(segments, grid, minimum_bytes, np.full(shape, NEVER), np.full(shape, -NEVER))
    table.times_ns[EMPTY] = 0
    table.spare_bytes[EMPTY] = (np.arange(grid.count + 2) - 1) * grid.unit_bytes
    return table


def decode(table: Table, limit_bytes: int) -> tuple[Operation, ...]:
    """Return the fastest operations known for the whole chain within limit_bytes, in order: runs of
    a block forward only, or of its forward or backward with one of its options. Raises ValueError
    if the limit is below the chain's minimum. Every choice is made anew for the exact bytes that
    are left, so it may be faster than the table says, which has times at buckets only."""
    minimum = int(table.minimum_bytes[table.segments.whole])
    if limit_bytes < minimum:
        raise ValueError(f"limit of {limit_bytes} bytes is below the minimum need of {minimum}")
    done: list[Operation] = []
    todo: list[Operation | _Part] = [_Part(0, table.segments.whole, limit_bytes)]
    while todo:
        item = todo.pop()
        if isinstance(item, _Part):
            todo += _expand(table, item)[::-1]
        else:
            done.append(item)
    return tuple(done)


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment that starts at block `first`, to be run within limit_bytes."""

    first: int
    segment: int
    limit_bytes: int


def _expand(table: Table, part: _Part) -> list[Operation | _Part]:
    if part.segment == EMPTY:
        return []
    alternatives = choices(table.segments, part.segment)
    k = int(np.argmin(_times_within(table, alternatives, part.limit_bytes)))
    inner, rest_bytes = (
        int(alternatives.inner[k]),
        part.limit_bytes - int(alternatives.held_bytes[k]),
    )
    option = int(alternatives.option[k])
    if option >= 0:
        return [
            RunOption(part.first, option, Phase.FORWARD),
            _Part(part.first + 1, inner, rest_bytes),
            RunOption(part.first, option, Phase.BACKWARD),
        ]
    split = part.first + int(alternatives.ahead[k])
    return [
        *(RunForward(block) for block in range(part.first, split)),
        _Part(split, inner, rest_bytes),
        _Part(part.first, int(alternatives.left[k]), part.limit_bytes),
    ]


def _fill(table: Table, segment: int) -> None:
    alternatives = choices(table.segments, segment)
    minimum, unit_bytes = int(table.minimum_bytes[segment]), table.grid.unit_bytes
    first = -(-minimum // unit_bytes)
    best, chosen = best_choices(table, alternatives)
    table.times_ns[segment, 1:] = best
    table.spare_bytes[segment, first + 1 :] = _spare_bytes(table, alternatives, best, chosen, first)
    table.times_ns[segment, first] = _times_within(table, alternatives, minimum).min()
    table.spare_bytes[segment, first] = (first - 1) * unit_bytes - minimum


def best_choices(table: Table, alternatives: Choices) -> tuple[Integers, Integers]:
    """Return two arrays over the buckets (limits of memory): the least time of a segment (ns; NEVER
    where nothing fits), and the index of an alternative, a way to begin it, that takes it. The time
    of a choice falls as the limit grows. So between two buckets only choices can matter that take
    less at the upper one than the best takes at the lower one: few, if the two are near each
    other."""
    fits = alternatives.need_bytes(table.minimum_bytes) <= table.grid.limit_bytes
    able, ends = np.flatnonzero(fits), np.arange(0, table.grid.count + 1, STRIDE)
    times = _times(table, alternatives, able, np.zeros_like(able), len(ends), STRIDE)
    place = times.argmin(axis=0)
    least = times[place, np.arange(len(ends))]
    # The best choice at a lower end fits at all buckets up to the next end.
    best = np.repeat(least, STRIDE)[: table.grid.count + 1]
    chosen = np.repeat(able[place], STRIDE)[: table.grid.count + 1]
    interval, place = np.nonzero(times.T[1:] < least[:-1, np.newaxis])
    if len(interval) == 0:
        return best, chosen

    k, lower = able[place], ends[interval]
    times = _times(table, alternatives, k, lower + 1, STRIDE - 1, 1)
    heads = np.concatenate([[0], (interval[1:] != interval[:-1]).nonzero()[0] + 1])
    fastest = _fastest_rows(times, heads)
    times_here = times[fastest, np.arange(STRIDE - 1)]
    between = lower[heads, np.newaxis] + np.arange(1, STRIDE)
    is_faster = times_here < best[between]
    best[between[is_faster]] = times_here[is_faster]
    chosen[between[is_faster]] = k[fastest[is_faster]]
    return best, chosen


def _fastest_rows(times: Integers, heads: Integers) -> Integers:
    """Split the rows of `times` into runs that begin at `heads` (ascending; the first is 0). Return
    an array of runs x columns: the last row of the run with the least time in that column.
    (`np.minimum.reduceat` along rows takes three times as long.)"""
    rows: Integers = np.empty((len(heads), times.shape[1]), dtype=np.int64)
    tails = np.append(heads[1:], len(times))
    for run, (head, tail) in enumerate(zip(heads.tolist(), tails.tolist(), strict=True)):
        times[head:tail][::-1].argmin(axis=0, out=rows[run])
    return tails[:, np.newaxis] - 1 - rows


def _times(
    table: Table, alternatives: Choices, k: Integers, bucket: Integers, length: int, step: int
) -> Integers:
    """Return times in ns, NEVER where the choice (an index of `alternatives`) does not fit: row p
    has those of choice k[p] at `length` buckets (limits of memory), `step` apart, from bucket[p]
    on. Where it does not fit, the entry read may belong to the segment before (never before the
    first one: EMPTY is reached without holding anything), and is replaced."""
    width, unit_bytes = table.times_ns.shape[1], table.grid.unit_bytes
    shift, rest = np.divmod(alternatives.held_bytes, unit_bytes)
    start = -(-alternatives.need_bytes(table.minimum_bytes) // unit_bytes)
    above = alternatives.inner[k] * width + bucket + 1 - shift[k]
    serves = _runs(table.spare_bytes, length, step)[above] >= rest[k, np.newaxis]
    times = _runs(table.times_ns, length, step)
    total: Integers = times[above - 1]
    np.copyto(total, times[above], where=serves)
    total += times[alternatives.left[k] * width + bucket + 1]
    total += alternatives.time_ns[k, np.newaxis]
    late = np.flatnonzero(start[k] > bucket)
    missing = (start[k] - bucket)[late, np.newaxis]
    total[late] = np.where(np.arange(0, length * step, step) < missing, NEVER, total[late])
    return total


def _runs(rows: Integers, length: int, step: int) -> Integers:
    each, starts = rows.itemsize, rows.size - (length - 1) * step
    return np.ndarray((starts, length), rows.dtype, rows, 0, (each, each * step))


def _times_within(table: Table, alternatives: Choices, limit_bytes: int) -> Integers:
    """Return the time (ns) of each choice within exactly limit_bytes, which need not be that of a
    bucket; NEVER where the choice does not fit."""
    inner = limit_bytes - alternatives.held_bytes
    left = np.full_like(inner, limit_bytes)
    times = table.times_ns[alternatives.inner, _columns(table, alternatives.inner, inner)]
    times += table.times_ns[alternatives.left, _columns(table, alternatives.left, left)]
    times += alternatives.time_ns
    return np.where(alternatives.need_bytes(table.minimum_bytes) <= limit_bytes, times, NEVER)


def _columns(table: Table, ids: Integers, limits_bytes: Integers) -> Integers:
    """Return the column of the bucket above the limit if its sequence fits all the same, else of
    the one below. (Meaningless if the segment does not fit.)"""
    unit_bytes, count = table.grid.unit_bytes, table.grid.count
    above = np.minimum(np.maximum(limits_bytes // unit_bytes + 2, 1), count + 1)
    missing = (above - 1) * unit_bytes - limits_bytes
    return above - (table.spare_bytes[ids, above] < missing)


def _spare_bytes(
    table: Table, alternatives: Choices, best: Integers, chosen: npt.NDArray[np.int64], first: int
) -> Integers:
    """Of the limits from bucket `first` on. best, chosen: as of `best_choices`; equal times share
    one sequence."""
    unit_bytes = table.grid.unit_bytes
    is_new = np.concatenate([[True], best[first + 1 :] != best[first:-1]])
    limits = np.arange(first, len(best), dtype=np.int64) * unit_bytes
    k, at = chosen[first:][is_new], limits[is_new]
    inner = alternatives.held_bytes[k] + _needs_within(
        table, alternatives.inner[k], at - alternatives.held_bytes[k]
    )
    left = _needs_within(table, alternatives.left[k], at)
    needs = np.maximum(np.maximum(alternatives.peak_bytes[k], inner), left)
    spare: Integers = limits - needs[np.cumsum(is_new) - 1]
    return spare


def _needs_within(table: Table, ids: Integers, limits_bytes: Integers) -> Integers:
    columns = _columns(table, ids, limits_bytes)
    return (columns - 1) * table.grid.unit_bytes - table.spare_bytes[ids, columns]


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
