"""The one oracle of bytes and time: replay a schedule, event by event.

takes: a priced CDGraph and a legal Schedule. returns: Simulation. guarantees: bytes are the sum of
`lifetimes.spans`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from rockplan.oracles.lifetimes import spans
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Compute, Schedule


@dataclass(frozen=True, slots=True)
class Simulation:
    """Bytes beyond resident storages; time in nanoseconds under the graph's prices.

    saved_bytes: alive between forward and backward; peak_event: index of the event at the peak.
    """

    peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    saved_bytes: int
    time_ns: int
    peak_event: int


@dataclass(frozen=True, slots=True)
class EventCost:
    """Memory at one event: `during_bytes` while it runs (for a free: up to it), `after_bytes` when
    it is done."""

    during_bytes: int
    after_bytes: int
    time_ns: int


def simulate(graph: CDGraph, schedule: Schedule) -> Simulation:
    """Peak bytes and time of `schedule`; the schedule must be legal (`verify`)."""
    during, after = _replayed(graph, schedule)
    boundary = schedule.forward_length
    peak_bytes = max(during, default=0)
    return Simulation(
        peak_bytes=peak_bytes,
        forward_peak_bytes=max(during[:boundary], default=0),
        backward_peak_bytes=max(during[boundary:], default=0),
        saved_bytes=after[boundary - 1] if boundary else 0,
        time_ns=sum(graph.nodes[i].time_ns for i in schedule.computes),
        peak_event=during.index(peak_bytes) if during else 0,
    )


def timeline(graph: CDGraph, schedule: Schedule) -> Iterator[EventCost]:
    """One EventCost for each event of `schedule`."""
    steps = zip(schedule.events, *_replayed(graph, schedule), strict=True)
    for event, during_bytes, after_bytes in steps:
        time_ns = graph.nodes[event.node].time_ns if isinstance(event, Compute) else 0
        yield EventCost(during_bytes, after_bytes, time_ns)


def _replayed(graph: CDGraph, schedule: Schedule) -> tuple[list[int], list[int]]:
    """Bytes of each event while it runs, and when it is done."""
    changes = [0] * (2 * len(schedule.events) + 1)
    for _, _, size_bytes, opens, closes in spans(graph, schedule):
        changes[opens] += size_bytes
        changes[closes] -= size_bytes
    alive = list(accumulate(changes))[:-1]
    return alive[::2], alive[1::2]
