"""Scheduled: the memory changes of a schedule, as a training step and its allocator see them.

takes: a priced CDGraph, a legal Schedule, the gradients that stay. returns: changes, forward and
backward, in which gradients become `.grad` of parameters when they are handed over. guarantees: if
none stays, their peak is that of `simulate`; a result that takes over an operand's storage
allocates nothing.

Within an operation results are allocated before temporaries, and these as one block (how kernels
really allocate them is not known).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rockplan.fitting.changes import Holding, MemoryChange
from rockplan.graph_builder.operators.facts import PRODUCTS
from rockplan.oracles.lifetimes import Lifetime, Owner, lifetimes, taken_over
from rockplan.values.graph import CALLER_LOSS, CDGraph
from rockplan.values.interface import Interface
from rockplan.values.schedule import Compute, Free, Schedule

Gradients = Mapping[str, int]
"""Name of a parameter -> storage of what becomes its first `.grad`."""

_ORDER = (Owner.STORAGE, Owner.COPY, Owner.GENERATOR, Owner.WORKSPACE)


def first_gradients(graph: CDGraph, interface: Interface) -> dict[str, int]:
    """Return name of a parameter -> storage of its first gradient. (Autograd adds later ones to
    it.)"""
    return {name: data[0] for name, data in all_gradients(graph, interface).items()}


def all_gradients(graph: CDGraph, interface: Interface) -> dict[str, tuple[int, ...]]:
    """Return name of a parameter -> storages of all contributions to its gradient, for each
    parameter that gets any."""
    names = {value: name for name, value in reversed(interface.parameters)}
    return {
        names[target]: tuple(graph.values[one].data for one in contributions)
        for target, contributions in interface.gradients
        if contributions and target in names
    }


def scheduled_changes(
    graph: CDGraph,
    schedule: Schedule,
    gradients: Gradients,
    workspace_bytes: int = 0,
    inside: Mapping[str, tuple[Sequence[int], Sequence[MemoryChange]]] | None = None,
    before: Mapping[int, Sequence[MemoryChange]] | None = None,
) -> tuple[MemoryChange, ...]:
    """Return the allocations and frees of one forward and backward by `schedule`, in order.

    gradients: of parameters that keep them (of several with one storage, the others keep copies);
    others are added to existing ones, and freed. What the caller holds of the result is freed at
    the end. workspace_bytes: memory that the first product of forward, and that of backward
    (another thread), allocates and keeps (`Gpu.cublas_bytes`). inside: name of a parameter ->
    (storages of its gradients, changes of its optimizer, which steps when the last of them is
    handed over; then they are freed). Of several gradients handed over at once, autograd decides
    which is taken first: here all exist until the last optimizer has stepped. before: position of
    an event -> further changes before it.
    """
    begun: dict[int, list[MemoryChange]] = defaultdict(list)
    ended: dict[int, list[MemoryChange]] = defaultdict(list)
    closed: dict[int, int] = {}
    keeping = defaultdict[int, list[str]](list)
    for name, data in gradients.items():
        keeping[data].append(name)
    found = sorted(lifetimes(graph, schedule), key=lambda f: _ORDER.index(f.owner))
    heirs = _heirs(graph, schedule, found)
    for number in sorted({*range(len(found))} - {*heirs.values()}):
        first = last = found[number]
        while number in heirs:
            number = heirs[number]
            last = found[number]
        names = keeping[last.index] if last.owner is Owner.STORAGE else []
        key = ("gradient", names[0]) if names else ("lifetime", number)
        change = MemoryChange(key, first.size_bytes, _owner(graph, last))
        begun[first.opens].append(change)
        if not names:
            ended[last.closes].append(change.freed)
        for name in names[1:]:
            ended[last.closes].append(change._replace(key=("gradient", name)))
        if last.owner is Owner.STORAGE:
            closed[last.index] = last.closes
    for name, (handed, changes) in (inside or {}).items():
        last_moment = max(closed[data] for data in handed)
        ended[last_moment] += changes
        gone = MemoryChange(("gradient", name), graph.data[handed[0]].size_bytes, Holding.GRADIENTS)
        ended[_end_of_frees(schedule, last_moment)].append(gone.freed)
    for position in _first_products(graph, schedule) if workspace_bytes else ():
        change = MemoryChange(("products", position), workspace_bytes, Holding.WORKSPACES)
        begun[2 * position].append(change)
    others = {2 * position: changes for position, changes in (before or {}).items()}
    return tuple(
        change
        for moment in sorted({*begun, *ended, *others})
        for change in (*others.get(moment, ()), *ended[moment], *begun[moment])
    )


def _end_of_frees(schedule: Schedule, moment: int) -> int:
    position = moment // 2
    while position + 1 < len(schedule.events) and isinstance(schedule.events[position + 1], Free):
        position += 1
    return max(2 * position + 1, moment)


def _heirs(graph: CDGraph, schedule: Schedule, found: Sequence[Lifetime]) -> dict[int, int]:
    """Operand -> result, as numbers in `found`: both are one allocation where a result takes
    over."""
    opens, closes = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for number, lifetime in enumerate(found):
        if lifetime.owner is Owner.STORAGE:
            opens[lifetime.index, lifetime.opens] = number
            closes[lifetime.index, lifetime.closes] = number
    return {
        closes[operand, 2 * position + 1]: opens[result, 2 * position + 1]
        for position, takeover in taken_over(graph, schedule).items()
        for operand, result in zip(takeover.operands, takeover.results, strict=True)
        if (result, 2 * position + 1) in opens
    }


def _first_products(graph: CDGraph, schedule: Schedule) -> Iterator[int]:
    multiplies = [any(call.op in PRODUCTS for call in node.calls) for node in graph.nodes]
    positions = range(len(schedule.events))
    for phase in (positions[: schedule.forward_length], positions[schedule.forward_length :]):
        for position in phase:
            event = schedule.events[position]
            if isinstance(event, Compute) and multiplies[event.node]:
                yield position
                break


def _owner(graph: CDGraph, lifetime: Lifetime) -> Holding:
    if lifetime.owner in (Owner.WORKSPACE, Owner.GENERATOR):
        return Holding.WORKSPACES
    if lifetime.index in graph.handed:
        return Holding.GRADIENTS
    is_callers = graph.data[lifetime.index].name == CALLER_LOSS
    return Holding.CALLER if is_callers else Holding.ACTIVATIONS
