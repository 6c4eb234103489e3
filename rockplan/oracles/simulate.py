"""The one oracle of bytes and time: replay a schedule, event by event.

takes: a priced CDGraph and a legal Schedule. returns: Simulation. guarantees: bytes are the sum of
`lifetimes.spans`, whatever the clock says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rockplan.oracles.clock import clock
from rockplan.oracles.graph_view import view_of
from rockplan.oracles.lifetimes import Owner, Span, spans
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Simulation:
    """Bytes beyond resident storages; time in nanoseconds under the graph's prices.

    saved_bytes: alive between forward and backward; peak_event: index of the event at the peak.
    time_ns includes the time that computations wait for copies. host_peak_bytes: of host memory.
    """

    peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    saved_bytes: int
    time_ns: int
    peak_event: int
    host_peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EventCost:
    """Memory and time of one event. during_bytes: alive while it runs (for a free: up to it);
    after_bytes: when it is done. time_ns: time on the queue of computations, waits included."""

    during_bytes: int
    after_bytes: int
    time_ns: int


def simulate(graph: CDGraph, schedule: Schedule) -> Simulation:
    """Return peak bytes (whole, forward, backward, of the host), bytes saved between the phases,
    and time of `schedule`, which must be legal (`verify`). With copies to the host, the time
    includes waits."""
    during, after = _replayed(schedule, spans(graph, schedule))
    boundary = schedule.forward_length
    peak_bytes = max(during, default=0)
    if not view_of(graph).has_copies:
        time_ns, host_peak_bytes = sum(graph.nodes[i].time_ns for i in schedule.computes), 0
    else:
        time_ns = clock(graph, schedule).time_ns
        host_peak_bytes = max(host_bytes(graph, schedule), default=0)
    return Simulation(
        peak_bytes=peak_bytes,
        forward_peak_bytes=max(during[:boundary], default=0),
        backward_peak_bytes=max(during[boundary:], default=0),
        saved_bytes=after[boundary - 1] if boundary else 0,
        time_ns=time_ns,
        peak_event=during.index(peak_bytes) if during else 0,
        host_peak_bytes=host_peak_bytes,
    )


def host_bytes(graph: CDGraph, schedule: Schedule) -> list[int]:
    """Return for each event of the schedule the bytes of paged storages on the host then."""
    on_host = view_of(graph).on_host
    stored = (
        (owner, d, graph.data[d].size_bytes, opens, closes)
        for owner, d, _, opens, closes in spans(graph, schedule)
        if owner is Owner.STORAGE and d in on_host
    )
    return _replayed(schedule, stored)[0]


def timeline(graph: CDGraph, schedule: Schedule) -> Iterator[EventCost]:
    """Yield an EventCost for each event of `schedule`."""
    starts_ns = clock(graph, schedule).starts_ns
    took_ns = (end - start for start, end in pairwise(starts_ns))
    replayed = _replayed(schedule, spans(graph, schedule))
    yield from map(EventCost, *replayed, took_ns)


def _replayed(schedule: Schedule, lifetimes: Iterable[Span]) -> tuple[list[int], list[int]]:
    """Return two lists, with an entry for each event of the schedule: the bytes alive while it
    runs, and once it is done. lifetimes: what takes memory, and when, as `spans` yields it."""
    changes = [0] * (2 * len(schedule.events) + 1)
    for _, _, size_bytes, opens, closes in lifetimes:
        changes[opens] += size_bytes
        changes[closes] -= size_bytes
    alive = list(accumulate(changes))[:-1]
    return alive[::2], alive[1::2]
