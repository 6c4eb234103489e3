"""The one oracle of bytes and time: replay a schedule, event by event.

takes: a priced CDGraph and a legal Schedule. returns: Simulation. guarantees: the peak counts
every non-resident storage from its computation to its free, the workspace of the running node,
copies that a re-execution makes of storages that are alive, and saved generator states; a result
that takes over the storage of an operand (`taken_over`) costs nothing beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rockplan.oracles.graph_view import view_of
from rockplan.values.graph import CDGraph, Takeover
from rockplan.values.schedule import Compute, Free, Schedule


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


def taken_over(graph: CDGraph, schedule: Schedule) -> dict[int, Takeover]:
    """Position of a computation -> how it writes results where operands die.

    The first of the node's `takes` whose operands are all freed directly after it, before anything
    else runs or the forward phase ends, and are as large as the results. A copy of what is alive
    takes nothing.
    """
    takeovers: dict[int, Takeover] = {}
    if not any(node.takes for node in graph.nodes):
        return takeovers
    takes = view_of(graph).takes
    alive: set[int] = set()
    for position, event in enumerate(schedule.events):
        if isinstance(event, Free):
            alive.discard(event.data)
            continue
        node = graph.nodes[event.node]
        if node.takes and alive.isdisjoint(node.writes):
            dying = _freed_after(schedule, position)
            taken = next((t for t in takes[node.index] if dying.issuperset(t.operands)), None)
            if taken is not None:
                takeovers[position] = taken
        alive.update(node.writes)
    return takeovers


def _freed_after(schedule: Schedule, position: int) -> set[int]:
    """What is freed directly after the computation at `position`, in the same phase."""
    events, boundary = schedule.events, schedule.forward_length
    end = boundary if position < boundary else len(events)
    freed: set[int] = set()
    for following in range(position + 1, end):
        event = events[following]
        if isinstance(event, Compute):
            break
        freed.add(event.data)
    return freed


def _replayed(graph: CDGraph, schedule: Schedule) -> tuple[list[int], list[int]]:
    """Bytes of each event while it runs, and when it is done."""
    nodes, boundary = graph.nodes, schedule.forward_length
    view = view_of(graph)
    sizes, states = view.sizes, view.state_bytes
    draws = Counter(i for i in schedule.computes if nodes[i].random)
    drawn: Counter[int] = Counter()
    taken = taken_over(graph, schedule)
    passed_on: set[int] = set()
    alive: set[int] = set()
    live_bytes = 0
    during: list[int] = []
    after: list[int] = []
    for position, event in enumerate(schedule.events):
        if position == boundary:
            alive |= view.tangents
            live_bytes += view.bytes_of(view.tangents)
        during_bytes = live_bytes
        if not isinstance(event, Compute):
            alive.discard(event.data)
            if event.data in passed_on:
                passed_on.discard(event.data)
            else:
                live_bytes -= sizes[event.data]
        else:
            node = nodes[event.node]
            during_bytes += node.workspace_bytes
            for d in node.writes:
                during_bytes += sizes[d]
                if d not in alive:
                    alive.add(d)
                    live_bytes += sizes[d]
            if position in taken:
                operands = taken[position].operands
                taken_bytes = view.bytes_of(operands)
                during_bytes -= taken_bytes
                live_bytes -= taken_bytes
                passed_on.update(operands)
            if node.random and draws[node.index] > 1:
                during_bytes += states[node.index]
                if not drawn[node.index]:
                    live_bytes += states[node.index]
                drawn[node.index] += 1
                if drawn[node.index] == draws[node.index]:
                    live_bytes -= states[node.index]
        during.append(during_bytes)
        after.append(live_bytes)
    return during, after
