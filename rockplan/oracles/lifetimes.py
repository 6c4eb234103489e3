"""Who owns the bytes, when: the simulator's total, taken apart.

takes: a priced CDGraph and a legal Schedule. returns: Lifetimes. guarantees: at every event the
sizes of the lifetimes that cover it add up to the `during_bytes` that `simulate.timeline` finds
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import taken_over
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Compute, Schedule


class Owner(Enum):
    """STORAGE: data, from its computation to its free. COPY: the second copy of data while an
    operation makes it again. WORKSPACE: temporaries inside a node. GENERATOR: the saved generator
    state of a node that draws again, and what it sets aside while it draws."""

    STORAGE = "storage"
    COPY = "copy"
    WORKSPACE = "workspace"
    GENERATOR = "generator state"


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Bytes that are alive during the events start..stop-1 of a schedule, their free included.

    Where a result takes over the storage of an operand, the bytes are the operand's up to that
    computation and with it, and the result's from the next event on.

    index: of the data (STORAGE, COPY) or of the node (WORKSPACE, GENERATOR).
    """

    owner: Owner
    index: int
    size_bytes: int
    start: int
    stop: int

    def covers(self, event: int) -> bool:
        return self.start <= event < self.stop


def lifetimes(graph: CDGraph, schedule: Schedule) -> tuple[Lifetime, ...]:
    """Every lifetime of more than 0 bytes, by start, owner and index."""
    stays = [*_storages(graph, schedule), *_transients(graph, schedule)]
    ordered = sorted(stays, key=lambda f: (f.start, f.owner.value, f.index))
    return tuple(f for f in ordered if f.size_bytes and f.start < f.stop)


def alive_at(stays: Sequence[Lifetime], event: int) -> tuple[Lifetime, ...]:
    """Those of `stays` that cover the event."""
    return tuple(f for f in stays if f.covers(event))


def maker(graph: CDGraph, producers: dict[int, int], lifetime: Lifetime) -> int | None:
    """The node that owns the bytes or wrote the data; None for tangents."""
    if lifetime.owner in (Owner.WORKSPACE, Owner.GENERATOR):
        return lifetime.index
    return producers.get(lifetime.index)


def start_times_ns(graph: CDGraph, schedule: Schedule) -> tuple[int, ...]:
    """When each event starts, and at last when all is done; frees take no time."""
    times = [0]
    for event in schedule.events:
        cost = graph.nodes[event.node].time_ns if isinstance(event, Compute) else 0
        times.append(times[-1] + cost)
    return tuple(times)


def _storages(graph: CDGraph, schedule: Schedule) -> list[Lifetime]:
    view = GraphView(graph)
    stays: list[Lifetime] = []
    born: dict[int, int] = {}
    taken = taken_over(graph, schedule)
    passed_on: set[int] = set()

    def end(data: int, position: int) -> None:
        size_bytes = view.sizes[data]
        stays.append(Lifetime(Owner.STORAGE, data, size_bytes, born.pop(data), position))

    for position, event in enumerate(schedule.events):
        if position == schedule.forward_length:
            born.update(dict.fromkeys(view.tangents, position))
        if isinstance(event, Compute):
            takeover = taken.get(position)
            there = takeover.results if takeover else ()
            for operand in takeover.operands if takeover else ():
                end(operand, position + 1)
                passed_on.add(operand)
            for data in graph.nodes[event.node].writes:
                born.setdefault(data, position + 1 if data in there else position)
        elif event.data in passed_on:
            passed_on.discard(event.data)
        else:
            end(event.data, position + 1)
    for data in sorted(born):
        end(data, len(schedule.events))
    return stays


def _transients(graph: CDGraph, schedule: Schedule) -> list[Lifetime]:
    """Copies, workspaces and generator states."""
    view = GraphView(graph)
    transients: list[Lifetime] = []
    alive: set[int] = set()
    executions: dict[int, list[int]] = {}
    for position, event in enumerate(schedule.events):
        if not isinstance(event, Compute):
            alive.discard(event.data)
            continue
        node = graph.nodes[event.node]
        executions.setdefault(node.index, []).append(position)
        here = (position, position + 1)
        transients.append(Lifetime(Owner.WORKSPACE, node.index, node.workspace_bytes, *here))
        for data in node.writes:
            if data in alive:
                transients.append(Lifetime(Owner.COPY, data, view.sizes[data], *here))
        alive.update(node.writes)
    for index, positions in executions.items():
        if graph.nodes[index].random and len(positions) > 1:
            spans = [(positions[0], positions[-1] + 1), *((p, p + 1) for p in positions[1:])]
            size_bytes = view.state_bytes[index]
            transients += [Lifetime(Owner.GENERATOR, index, size_bytes, *span) for span in spans]
    return transients
