"""Schedule: what is executed and freed, in order.

A schedule is determined by the order of its computations: a storage is alive exactly when the
next event that concerns it is a use. `with_frees` writes the frees out from that rule.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rockplan.values.columns import aligned
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.order import keep_all_order


@dataclass(frozen=True, slots=True)
class Compute:
    """Execute `graph.nodes[node]`; a second one for the same node is a recomputation."""

    node: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the storage `data`; for a gradient in `graph.handed`: hand it to autograd."""

    data: int


Event = Compute | Free

# Cached: thousands of schedules are made of the same events.
_compute = functools.cache(Compute)
_free = functools.cache(Free)


Waits = tuple[tuple[tuple[int, ...], int], ...]
"""Pairs: contributions to a parameter's gradient, in order, and the parameter; indices of data."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """events[:forward_length] run in the forward phase, the rest in the backward phase."""

    events: tuple[Event, ...]
    forward_length: int

    @property
    def computes(self) -> tuple[int, ...]:
        return tuple(e.node for e in self.events if isinstance(e, Compute))

    @property
    def phases(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the computations of the forward and of the backward phase."""
        forward = sum(isinstance(e, Compute) for e in self.events[: self.forward_length])
        return self.computes[:forward], self.computes[forward:]

    def __str__(self) -> str:
        """Return a line for each event, with indices of nodes and data; `reports.listing` writes
        names and bytes."""
        rows, executed = [], set[int]()
        for position, event in enumerate(self.events):
            phase = "forward" if position < self.forward_length else "backward"
            if isinstance(event, Free):
                rows.append((str(position), phase, "free", str(event.data), ""))
                continue
            remark = "again" if event.node in executed else ""
            rows.append((str(position), phase, "compute", str(event.node), remark))
            executed.add(event.node)
        return "\n".join(aligned(rows, numbers=(0, 3)))


def first_executions(schedule: Schedule) -> tuple[int, ...]:
    """Return all nodes in the order in which they run for the first time."""
    return tuple(dict.fromkeys(schedule.computes))


def keep_all(graph: CDGraph) -> Schedule:
    """Return the schedule that executes every node once, in order, as eager PyTorch does, and frees
    each storage as early as possible. A node that makes a storage of `graph.dropped` runs once
    more, where the backward phase first needs the storage; no legal schedule takes less time."""
    return with_frees(graph, *keep_all_order(graph))


def with_frees(graph: CDGraph, forward: Sequence[int], backward: Sequence[int]) -> Schedule:
    """Return the schedule that executes `forward` then `backward` (node indices) and frees each
    storage as early as possible.

    A storage is freed directly after the computation at which it is last used before it is computed
    again or never used; `graph.outputs` live to the end of the forward phase, `graph.held` to the
    end. A re-execution drops its copy of a storage that is alive.
    """
    freed = {d.index for d in graph.data if not d.kind.resident}.difference(graph.held)
    used_next: set[int] = set()

    def scan(order: Sequence[int]) -> list[list[int]]:
        """Return for each computation of `order` the storages to free directly after it. Walks
        backwards: `used_next` (storages whose next event is a read) is that of the place behind
        `order`, and is brought to its begin."""
        frees: list[list[int]] = []
        for index in reversed(order):
            node = graph.nodes[index]
            unused = [d for d in (*node.reads, *node.writes) if d not in used_next and d in freed]
            frees.append(sorted({*unused}) if len(unused) > 1 else unused)
            used_next.difference_update(node.writes)
            used_next.update(node.reads)
        return frees[::-1]

    backward_frees = scan(backward)
    tangents = {d.index for d in graph.data if d.kind is DataKind.TANGENT}
    unread = sorted((tangents | set(graph.outputs)) - used_next - set(graph.held))
    used_next.update(graph.outputs)
    forward_frees = scan(forward)

    events: list[Event] = []
    for index, frees in zip(forward, forward_frees, strict=True):
        events += (_compute(index), *map(_free, frees))
    forward_length = len(events)
    events += map(_free, unread)
    for index, frees in zip(backward, backward_frees, strict=True):
        events += (_compute(index), *map(_free, frees))
    return Schedule(tuple(events), forward_length)


def kept_data(graph: CDGraph, schedule: Schedule) -> frozenset[int]:
    """Return the storages that the forward phase of `schedule` makes and leaves alive on the device
    for the backward phase."""
    alive: set[int] = set()
    for event in schedule.events[: schedule.forward_length]:
        if isinstance(event, Compute):
            alive.update(graph.nodes[event.node].writes)
        else:
            alive.discard(event.data)
    return frozenset(d for d in alive if graph.data[d].kind is not DataKind.HOST)


def merge_handovers(
    graph: CDGraph,
    schedule: Schedule,
    sizes: Sequence[int],
    during_bytes: Sequence[int],
    ends: frozenset[int],
) -> Schedule:
    """Return `schedule` with the frees of parameters' gradients, which hand them to autograd, moved
    later into groups, where that does not raise the peak: each hand-over costs a step of the
    autograd engine.

    A group ends where the bytes that wait would exceed the peak, and after each node of `ends` (the
    last backward nodes of blocks), so that hooks fire block by block. sizes: bytes of each storage;
    during_bytes: of each event, as `simulate.timeline` finds them.
    """
    limit_bytes = max(during_bytes, default=0)
    handed = set(graph.handed)
    merged = list(schedule.events[: schedule.forward_length])
    waiting: list[Event] = []
    waiting_bytes = 0
    backward = zip(
        schedule.events[schedule.forward_length :],
        during_bytes[schedule.forward_length :],
        strict=True,
    )
    is_due = False
    for event, event_bytes in backward:
        if isinstance(event, Free) and event.data in handed:
            waiting.append(event)
            waiting_bytes += sizes[event.data]
            continue
        if isinstance(event, Compute) and (is_due or event_bytes + waiting_bytes > limit_bytes):
            merged += waiting
            waiting, waiting_bytes, is_due = [], 0, False
        merged.append(event)
        is_due = is_due or (isinstance(event, Compute) and event.node in ends)
    return Schedule((*merged, *waiting), schedule.forward_length)


def with_waits(graph: CDGraph, schedule: Schedule, waits: Waits) -> Schedule:
    """Return `schedule` in which the gradients of `waits` are handed to autograd only when no later
    event reads their parameter, because a hook may change the parameter then. More bytes may be
    alive. A hook runs when the last contribution to the gradient is handed over, so earlier ones
    need not wait."""
    last_read: dict[int, int] = {}
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    for position, event in enumerate(schedule.events):
        if isinstance(event, Free):
            freed[event.data] = position
            continue
        node = graph.nodes[event.node]
        last_read.update(dict.fromkeys(node.reads, position))
        made.update(dict.fromkeys(node.writes, position))
    until: dict[int, int] = {}
    for contributions, parameter in waits:
        read, complete = last_read.get(parameter, -1), made.get(contributions[-1], -1)
        for data in set(contributions).intersection(graph.handed):
            if complete < freed.get(data, -1) < read:
                until[data] = max(read, until.get(data, read))
    handed: dict[int, list[Event]] = defaultdict(list)
    for data, position in sorted(until.items()):
        handed[position].append(Free(data))
    events: list[Event] = []
    for position, event in enumerate(schedule.events):
        if isinstance(event, Compute) or event.data not in until:
            events.append(event)
        events += handed[position]
    return Schedule(tuple(events), schedule.forward_length)
