"""A lower bound on the times of the sequences that the dynamic program over a chain knows.

takes: Segments, a Grid. returns: a table whose sizes are rounded down, so that no time is above
what any sequence of the recurrence takes; nothing can be decoded from it.
"""

from __future__ import annotations

from rockplan.dp.recurrence import Grid, Table, best_choices, empty_table
from rockplan.dp.segments import Integers, Segments, choices


def optimistic_table(segments: Segments, grid: Grid, minimum_bytes: Integers) -> Table:
    """As `recurrence.solve`, where each bucket spares what rounding might take."""
    table = empty_table(segments, grid, minimum_bytes)
    for segment in range(1, len(segments.spans)):
        if minimum_bytes[segment] <= grid.limit_bytes:
            first = -(-int(minimum_bytes[segment]) // grid.unit_bytes)
            table.times_ns[segment, 1:], _ = best_choices(table, choices(segments, segment))
            table.spare_bytes[segment, first + 1 :] = grid.unit_bytes
    return table


def lower_bound_ns(optimistic: Table, limit_bytes: int) -> int | None:
    """No sequence of the recurrence within limit_bytes is faster; None if there is none."""
    whole = optimistic.segments.whole
    if limit_bytes < optimistic.minimum_bytes[whole]:
        return None
    bucket = min(-(-limit_bytes // optimistic.grid.unit_bytes), optimistic.grid.count)
    return int(optimistic.times_ns[whole, bucket + 1])
