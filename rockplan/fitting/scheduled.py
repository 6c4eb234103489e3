"""Scheduled: the changes of memory of a schedule, as a step of training sees them.

takes: a priced CDGraph, a legal Schedule, which gradients stay. returns: changes, forward and
backward, in which gradients become `.grad` of parameters as they are handed over. guarantees: where
none stays, their peak is that of `simulate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from rockplan.fitting.changes import Holding, MemoryChange
from rockplan.oracles.lifetimes import Lifetime, Owner, lifetimes
from rockplan.values.graph import CALLER_LOSS, CDGraph
from rockplan.values.interface import Interface
from rockplan.values.schedule import Schedule

Gradients = Mapping[int, str]
"""Storage of a gradient -> name of the parameter that has none before and keeps it."""


def first_gradients(graph: CDGraph, interface: Interface) -> dict[int, str]:
    """Of each parameter that gets gradients, the first one: autograd adds others to it."""
    names: dict[int, str] = {}
    for name, value in interface.parameters:
        names.setdefault(value, name)
    return {
        graph.values[contributions[0]].data: names[target]
        for target, contributions in interface.gradients
        if contributions and target in names
    }


def scheduled_changes(
    graph: CDGraph, schedule: Schedule, gradients: Gradients
) -> tuple[MemoryChange, ...]:
    """gradients: those that stay; others are added to what is there, and given back. What the
    caller holds of the result is let go at the end."""
    return tuple(_changes(graph, schedule, gradients))


def _changes(graph: CDGraph, schedule: Schedule, gradients: Gradients) -> Iterator[MemoryChange]:
    begin: dict[int, list[MemoryChange]] = defaultdict(list)
    end: dict[int, list[MemoryChange]] = defaultdict(list)
    for number, lifetime in enumerate(lifetimes(graph, schedule)):
        change = MemoryChange(("lifetime", number), lifetime.size_bytes, _owner(graph, lifetime))
        begin[lifetime.start].append(change)
        end[lifetime.stop].append(change.freed)
        if lifetime.owner is Owner.STORAGE and lifetime.index in gradients:
            name = gradients[lifetime.index]
            kept = MemoryChange(("gradient", name), lifetime.size_bytes, Holding.GRADIENTS)
            end[lifetime.stop].append(kept)
    for event in range(len(schedule.events) + 1):
        yield from end[event]
        yield from begin[event]


def _owner(graph: CDGraph, lifetime: Lifetime) -> Holding:
    if lifetime.owner in (Owner.WORKSPACE, Owner.GENERATOR):
        return Holding.WORKSPACES
    if lifetime.index in graph.handed:
        return Holding.GRADIENTS
    is_callers = graph.data[lifetime.index].name == CALLER_LOSS
    return Holding.CALLER if is_callers else Holding.ACTIVATIONS
