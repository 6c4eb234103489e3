"""Peak rows: the bytes that calls by one schedule need, at any size.

takes: a graph whose bytes are expressions of sizes, a legal schedule, how many calls are in flight.
returns: PeakRows, which say the peak, what a call saves and what it has on the host, once the
expressions have values. guarantees: those that `simulate` finds on the graph with these values.
Under a fixed schedule bytes are a sum of storages and workspaces at each event, so a row has how
often each expression counts there; a row that is nowhere above another is left out, since no
expression is negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy

from rockplan.oracles.graph_view import view_of
from rockplan.oracles.lifetimes import Owner, spans
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.schedule import Schedule
from rockplan.values.sizes import Size


@dataclass(frozen=True, slots=True)
class PeakRows:
    """texts: expressions of bytes; rows: for each event bytes that do not depend on sizes, then how
    often each expression counts, with what other calls in flight save; saved, host: the same of
    what one call saves between the phases, and has on the host."""

    texts: tuple[str, ...]
    rows: numpy.ndarray
    saved: numpy.ndarray
    host: numpy.ndarray

    def bytes_at(self, numbers: Mapping[str, int | float]) -> tuple[int, int, int]:
        """Return (peak, saved, host) bytes where the expressions have the values `numbers`."""
        factors = numpy.array([1, *(numbers[text] for text in self.texts)], dtype=numpy.int64)
        peak_bytes = int((self.rows @ factors).max())
        return peak_bytes, int(self.saved @ factors), int(self.host @ factors)


def peak_rows(graph: CDGraph, schedule: Schedule, in_flight: int = 1) -> PeakRows:
    """Return the rows of a schedule of `graph`."""
    columns: dict[str, int] = {}
    changes: dict[tuple[int, int], int] = {}
    of_nodes = (Owner.WORKSPACE, Owner.GENERATOR)
    weights = view_of(graph).sizes
    for owner, index, size_bytes, opens, closes in spans(graph, schedule):
        own: int = size_bytes
        if owner is Owner.WORKSPACE:
            own = graph.nodes[index].workspace_bytes
        elif owner not in of_nodes and weights[index]:
            own = graph.data[index].size_bytes
        column = columns.setdefault(own.text, len(columns) + 1) if isinstance(own, Size) else 0
        factor = (-1 if size_bytes < 0 else 1) if column else size_bytes
        for moment, count in ((opens, factor), (closes, -factor)):
            changes[moment, column] = changes.get((moment, column), 0) + count
    table = numpy.zeros((2 * len(schedule.events) + 1, len(columns) + 1), dtype=numpy.int64)
    for (moment, column), count in changes.items():
        table[moment, column] += count
    alive = table.cumsum(axis=0)
    saved = alive[max(2 * schedule.forward_length - 1, 0)]
    during = numpy.unique(alive[:-1:2], axis=0) + (in_flight - 1) * saved
    host = numpy.zeros_like(saved)
    for page in (d.size_bytes for d in graph.data if d.kind is DataKind.HOST):
        column = columns[page.text] if isinstance(page, Size) else 0
        host[column] += 1 if column else page
    return PeakRows(tuple(columns), _undominated(during), saved, host)


def _undominated(rows: numpy.ndarray) -> numpy.ndarray:
    """Return the rows that no other row is at least as large as in each column. rows: distinct."""
    kept = rows[numpy.argsort(-rows.sum(axis=1), kind="stable")]
    position = 0
    while position < len(kept):
        below = (kept <= kept[position]).all(axis=1)
        below[: position + 1] = False
        kept = kept[~below]
        position += 1
    return kept
