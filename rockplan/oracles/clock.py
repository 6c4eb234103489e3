"""The clock: when each event of a schedule happens, and which copies it waits for.

takes: a priced CDGraph and a legal Schedule. returns: Clock. guarantees: on each queue one node
runs at a time. Computations run in the order of the schedule. A copy out begins as soon as its
operand is made, in the order of making; a copy in where it stands, since its memory is allocated
there. Computations wait for a copy out where it stands, since the operand may be freed there, and
for a copy in where its result is first read. Without copies the time is a sum over computations.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rockplan.oracles.graph_view import view_of
from rockplan.values.copies import Trip
from rockplan.values.graph import CDGraph, ComputeNode, Queue
from rockplan.values.schedule import Compute, Schedule


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy. position: its event in the schedule; begin and end in ns of the clock."""

    position: int
    queue: Queue
    begins_ns: int
    ends_ns: int


@dataclass(frozen=True, slots=True)
class Clock:
    """When everything happens, in ns from the start of the step. starts_ns: start of each event on
    the queue of computations, and finally the end of all; waits and frees count as part of the
    event before them. waits_ns: position of an event -> how long computations wait there for a
    copy, if they do. copies: in the order in which they begin on each queue."""

    starts_ns: tuple[int, ...]
    waits_ns: dict[int, int]
    copies: tuple[Copy, ...]

    @property
    def time_ns(self) -> int:
        return self.starts_ns[-1]


def clock(graph: CDGraph, schedule: Schedule) -> Clock:
    """Return when each event of `schedule` begins, which ones wait for copies to or from the host
    and how long, and when each copy runs, all in ns. The schedule must be legal (`verify`)."""
    copies_out = leaving(graph, schedule) if view_of(graph).has_copies else {}
    now_ns, starts_ns = 0, [0]
    free_ns = dict.fromkeys(Queue, 0)
    ready_ns: dict[int, int] = {}
    copied_out_ns: dict[int, int] = {}
    waits_ns: dict[int, int] = {}
    copies: list[Copy] = []

    def copied(position: int, queue: Queue, earliest_ns: int, time_ns: int) -> int:
        begins_ns = max(free_ns[queue], earliest_ns)
        free_ns[queue] = begins_ns + time_ns
        copies.append(Copy(position, queue, begins_ns, free_ns[queue]))
        return free_ns[queue]

    for position, event in enumerate(schedule.events):
        if isinstance(event, Compute):
            node = graph.nodes[event.node]
            done_ns = now_ns
            if node.queue is Queue.IN:
                room_ns = max(now_ns, *(ready_ns.get(d, 0) for d in node.reads))
                done_ns = copied(position, Queue.IN, room_ns, node.time_ns)
            else:
                begins_ns = copied_out_ns.pop(position, now_ns)
                if ready_ns:
                    begins_ns = max(begins_ns, *(ready_ns.get(d, 0) for d in node.reads), 0)
                if begins_ns > now_ns:
                    waits_ns[position] = begins_ns - now_ns
                now_ns = max(now_ns, begins_ns)
                if node.queue is Queue.COMPUTE:
                    now_ns += node.time_ns
                done_ns = now_ns
            if copies_out or ready_ns:
                ready_ns.update(dict.fromkeys(node.writes, done_ns))
            for place, store in copies_out.get(position, ()):
                copied_out_ns[place] = copied(place, Queue.OUT, done_ns, store.time_ns)
        starts_ns.append(now_ns)
    return Clock(tuple(starts_ns), waits_ns, tuple(copies))


def trips(graph: CDGraph, schedule: Schedule) -> tuple[Trip, ...]:
    """Return a Trip for each storage that `schedule` copies to the host and back, in the order in
    which they leave the device: when it leaves and comes back, and how long it is waited for."""
    if not view_of(graph).has_copies:
        return ()
    clocked = clock(graph, schedule)
    copied_out: dict[int, Copy] = {}
    back: defaultdict[int, list[Copy]] = defaultdict(list)
    for copy in clocked.copies:
        event = schedule.events[copy.position]
        assert isinstance(event, Compute)
        node = graph.nodes[event.node]
        if copy.queue is Queue.OUT:
            copied_out[node.reads[0]] = copy
        else:
            back[node.writes[0]].append(copy)
    waits_ns = _waits_for(graph, schedule, clocked)
    return tuple(
        Trip(
            data=d,
            size_bytes=graph.data[d].size_bytes,
            leaves_ns=copy.begins_ns,
            gone_ns=copy.ends_ns,
            comes_ns=back[d][0].begins_ns if back[d] else copy.ends_ns,
            back_ns=back[d][0].ends_ns if back[d] else copy.ends_ns,
            times_back=len(back[d]),
            waits_ns=waits_ns.get(d, 0),
        )
        for d, copy in sorted(copied_out.items(), key=lambda item: item[1].begins_ns)
    )


def _waits_for(graph: CDGraph, schedule: Schedule, clocked: Clock) -> dict[int, int]:
    """Return storage -> ns that computations wait for its copies in. Where several copies are late
    for one event, the wait counts for the last to arrive. clocked: the clock of `schedule`."""
    ends_ns = {copy.position: copy.ends_ns for copy in clocked.copies}
    came_ns: dict[int, int] = {}
    waits_ns: defaultdict[int, int] = defaultdict(int)
    for position, event in enumerate(schedule.events):
        if not isinstance(event, Compute):
            continue
        node = graph.nodes[event.node]
        if node.queue is Queue.IN:
            came_ns.update(dict.fromkeys(node.writes, ends_ns[position]))
        elif position in clocked.waits_ns:
            latest = max(node.reads, key=lambda d: came_ns.get(d, -1))
            waits_ns[latest] += clocked.waits_ns[position]
    return waits_ns


def leaving(graph: CDGraph, schedule: Schedule) -> dict[int, list[tuple[int, ComputeNode]]]:
    """Return position in the schedule at which a storage is made -> the copies out of it to the
    host: (position of the copy, its node), in the order in which they begin."""
    made: dict[int, int] = {}
    found: defaultdict[int, list[tuple[int, ComputeNode]]] = defaultdict(list)
    for position, event in enumerate(schedule.events):
        if not isinstance(event, Compute):
            made.pop(event.data, None)
            continue
        node = graph.nodes[event.node]
        if node.queue is Queue.OUT:
            found[max(made[d] for d in node.reads)].append((position, node))
        for d in node.writes:  # if `d` is alive, a re-execution drops the copy that it makes
            made.setdefault(d, position)
    return dict(found)
