"""The one oracle of bytes and time: replay a schedule, event by event.

takes: a priced CDGraph and a legal Schedule. returns: Simulation. guarantees: the peak counts
every non-resident storage from its computation to its free, the workspace of the running node,
copies that a re-execution makes of storages that are alive, and saved generator states; a result
that takes over the storage of an operand (`schedule.taken_over`) costs nothing beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rockplan.graph import CDGraph, DataKind
from rockplan.schedule import Compute, Schedule, taken_over


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
class Step:
    """Memory at one event: `during_bytes` while it runs (for a free: up to it), `after_bytes` when
    it is done."""

    during_bytes: int
    after_bytes: int
    time_ns: int


def simulate(graph: CDGraph, schedule: Schedule) -> Simulation:
    """Peak bytes and time of `schedule`; the schedule must be legal (`verify`)."""
    during: list[int] = []
    time_ns = saved_bytes = after_bytes = 0
    for position, step in enumerate(timeline(graph, schedule)):
        if position == schedule.forward_length:
            saved_bytes = after_bytes
        during.append(step.during_bytes)
        after_bytes = step.after_bytes
        time_ns += step.time_ns
    if schedule.forward_length == len(schedule.events):
        saved_bytes = after_bytes
    forward = during[: schedule.forward_length]
    backward = during[schedule.forward_length :]
    peak_event = max(range(len(during)), key=during.__getitem__, default=0)
    return Simulation(
        peak_bytes=max(during, default=0),
        forward_peak_bytes=max(forward, default=0),
        backward_peak_bytes=max(backward, default=0),
        saved_bytes=saved_bytes,
        time_ns=time_ns,
        peak_event=peak_event,
    )


def timeline(graph: CDGraph, schedule: Schedule) -> Iterator[Step]:
    """One Step for each event of `schedule`."""
    data = graph.data
    live_bytes = 0
    tangent_bytes = sum(d.size_bytes for d in data if d.kind is DataKind.TANGENT)
    executions = Counter(schedule.computes)
    remaining = dict(executions)
    alive: set[int] = set()
    taken = taken_over(graph, schedule)
    passed_on: set[int] = set()
    for position, event in enumerate(schedule.events):
        if position == schedule.forward_length:
            alive.update(d.index for d in data if d.kind is DataKind.TANGENT)
            live_bytes += tangent_bytes
        if not isinstance(event, Compute):
            alive.discard(event.data)
            before_bytes = live_bytes
            if event.data not in passed_on:
                live_bytes -= data[event.data].size_bytes
            passed_on.discard(event.data)
            yield Step(before_bytes, live_bytes, 0)
            continue
        node = graph.nodes[event.node]
        keeps_state = node.random and executions[node.index] > 1
        if keeps_state and remaining[node.index] == executions[node.index]:
            live_bytes += graph.rng_state_bytes
        is_replay = keeps_state and remaining[node.index] < executions[node.index]
        made = sum(data[d].size_bytes for d in node.writes)
        during = live_bytes + made + node.workspace_bytes
        if is_replay:
            during += graph.rng_state_bytes
        if position in taken:
            taken_bytes = data[taken[position]].size_bytes
            during -= taken_bytes
            live_bytes -= taken_bytes
            passed_on.add(taken[position])
        new = [d for d in node.writes if d not in alive]
        alive.update(new)
        live_bytes += sum(data[d].size_bytes for d in new)
        remaining[node.index] -= 1
        if keeps_state and remaining[node.index] == 0:
            live_bytes -= graph.rng_state_bytes
        yield Step(during, live_bytes, node.time_ns)
