"""Lifetimes: which bytes are alive from when to when, the one account of memory.

takes: a priced CDGraph and a legal Schedule. returns: Lifetimes, opened and closed at moments;
`simulate` adds them up. guarantees: they are every non-resident storage from its computation to its
free, the workspace of the running node, the second copy of a storage that is alive while a
re-execution makes it, and saved generator states; a result that takes over the storage of an
operand (`taken_over`) costs nothing while both exist.
Event e of a schedule has two moments: 2e while it runs (for a free: up to it), 2e + 1 when it is
done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import starmap

from rockplan.oracles.graph_view import view_of
from rockplan.values.graph import CDGraph, ComputeNode, Takeover
from rockplan.values.schedule import Compute, Free, Schedule


class Owner(Enum):
    """What owns bytes. STORAGE: data, from its computation to its free. COPY: the second copy of
    data while an operation makes it again. WORKSPACE: temporaries inside a node. GENERATOR: the
    saved generator state of a node that draws again, and the state set aside meanwhile."""

    STORAGE = "storage"
    COPY = "copy"
    WORKSPACE = "workspace"
    GENERATOR = "generator state"


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Bytes that are alive from moment `opens` on and until just before moment `closes`.

    index: of the data (STORAGE, COPY) or of the node (WORKSPACE, GENERATOR).
    """

    owner: Owner
    index: int
    size_bytes: int
    opens: int
    closes: int

    @property
    def start(self) -> int:
        """The first event during which the bytes are alive."""
        return (self.opens + 1) // 2

    @property
    def stop(self) -> int:
        """The first event after `start` during which they are not alive."""
        return (self.closes + 1) // 2

    @property
    def is_of_node(self) -> bool:
        return self.owner in (Owner.WORKSPACE, Owner.GENERATOR)

    def covers(self, event: int) -> bool:
        return self.opens <= 2 * event < self.closes

    def kind(self, graph: CDGraph) -> str:
        """Return the kind of the storage, or the name of another owner."""
        stored = self.owner is Owner.STORAGE
        return graph.data[self.index].kind.value if stored else self.owner.value

    def maker(self, graph: CDGraph) -> ComputeNode | None:
        """Return the node that owns the bytes or wrote the data; None for tangents."""
        node = self.index if self.is_of_node else view_of(graph).producer.get(self.index)
        return None if node is None else graph.nodes[node]


def lifetimes(graph: CDGraph, schedule: Schedule) -> tuple[Lifetime, ...]:
    """Return every lifetime of more than 0 bytes that covers an event, by start, owner and
    index."""
    of_bytes = (f for f in starmap(Lifetime, spans(graph, schedule)) if f.size_bytes)
    ordered = sorted(of_bytes, key=lambda f: (f.start, f.owner.value, f.index))
    return tuple(f for f in ordered if f.start < f.stop)


Span = tuple[Owner, int, int, int, int]
"""Fields of a Lifetime, as a tuple: a simulation has thousands."""


def spans(graph: CDGraph, schedule: Schedule) -> Iterator[Span]:
    """Yield (owner, index of storage or node, bytes, first moment, end moment) of all that takes
    memory, of any size: storages, workspaces, second copies of a storage that is alive, saved
    states of generators. Event p of the schedule has two moments: 2 p while it runs, 2 p + 1 after.

    Where a storage is freed that the schedule does not make (`dp.links`: it was alive before), the
    span has negative bytes, from there on.
    """
    view = view_of(graph)
    nodes, sizes = graph.nodes, view.sizes
    taken = taken_over(graph, schedule)
    opened: dict[int, int] = {}
    passed_on: set[int] = set()
    draws: dict[int, list[int]] = {}
    end = 2 * len(schedule.events)

    def closed(data: int, moment: int) -> Span:
        return Owner.STORAGE, data, sizes[data], opened.pop(data), moment

    for position, event in enumerate(schedule.events):
        now, done = 2 * position, 2 * position + 1
        if position == schedule.forward_length:
            opened.update(dict.fromkeys(view.tangents, now))
        if isinstance(event, Free):
            if event.data in opened:
                yield closed(event.data, done)
            elif event.data not in passed_on:
                yield Owner.STORAGE, event.data, -sizes[event.data], done, end
            passed_on.discard(event.data)
            continue
        node = nodes[event.node]
        if node.workspace_bytes:
            yield Owner.WORKSPACE, node.index, node.workspace_bytes, now, done
        if view.state_bytes[node.index]:
            draws.setdefault(node.index, []).append(now)
        takeover = taken.get(position)
        results = takeover.results if takeover else ()
        for data in takeover.operands if takeover else ():
            yield closed(data, done)
            passed_on.add(data)
        for data in node.writes:
            if data in opened:
                yield Owner.COPY, data, sizes[data], now, done
            else:
                opened[data] = done if data in results else now
    for data in list(opened):
        yield closed(data, end)
    for index, (first, *again) in draws.items():
        if again:
            for opens, closes in ((first, again[-1] + 1), *((now, now + 1) for now in again)):
                yield Owner.GENERATOR, index, view.state_bytes[index], opens, closes


def taken_over(graph: CDGraph, schedule: Schedule) -> dict[int, Takeover]:
    """Return position of a computation -> the takeover that it uses (results written into the
    storages of operands that die there), for those that use one. Its operands are freed directly
    after it, before anything else runs or the forward phase ends. A re-execution that copies a
    storage takes nothing over."""
    takeovers: dict[int, Takeover] = {}
    view = view_of(graph)
    if not any(view.takes):
        return takeovers
    alive: set[int] = set()
    for position, event in enumerate(schedule.events):
        if isinstance(event, Free):
            alive.discard(event.data)
            continue
        node = graph.nodes[event.node]
        if node.takes and alive.isdisjoint(node.writes):
            dying = _freed_after(schedule, position)
            taken = view.taken(node.index, dying.__contains__)
            if taken is not None:
                takeovers[position] = taken
        alive.update(node.writes)
    return takeovers


def _freed_after(schedule: Schedule, position: int) -> set[int]:
    """Return the storages freed after the computation at `position` before any other one runs, in
    the same phase."""
    events, boundary = schedule.events, schedule.forward_length
    end = boundary if position < boundary else len(events)
    freed: set[int] = set()
    for following in range(position + 1, end):
        event = events[following]
        if isinstance(event, Compute):
            break
        freed.add(event.data)
    return freed


def alive_at(stays: Sequence[Lifetime], event: int) -> tuple[Lifetime, ...]:
    """Return those of `stays` that cover the event."""
    return tuple(f for f in stays if f.covers(event))
