"""Requests: what a schedule asks of the caching allocator, in order.

takes: a priced CDGraph and a legal Schedule. returns: Requests, all of which are freed at the end
but for what stays. guarantees: the most bytes that are asked for at a time are the peak of
`simulate`; a result that takes over an operand's storage asks for nothing.

Inside of an operation results come before temporaries, and these are one block: how kernels ask for
them is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from rockplan.fitting.allocator import Request
from rockplan.graph_builder.operators.facts import PRODUCTS
from rockplan.oracles.lifetimes import Lifetime, Owner, lifetimes, taken_over
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Compute, Schedule

_ORDER = (Owner.STORAGE, Owner.COPY, Owner.GENERATOR, Owner.WORKSPACE)


def requests_of(
    graph: CDGraph,
    schedule: Schedule,
    step: int = 0,
    stays: Collection[int] = (),
    workspace_bytes: int = 0,
) -> tuple[Request, ...]:
    """step: part of the keys, so that steps may follow each other. stays: storages that are not
    freed, such as gradients that become `.grad`. workspace_bytes: what the first product of forward
    and that of backward, which is another thread, ask for and keep (`Gpu.cublas_bytes`); 0 in later
    steps."""
    found = lifetimes(graph, schedule)
    products = _first_products(graph, schedule) if workspace_bytes else ()
    workspaces = {
        2 * position: Request(("products", position), workspace_bytes) for position in products
    }
    heirs = _heirs(graph, schedule, found)
    return tuple(_requests(found, heirs, workspaces, step, frozenset(stays)))


def _requests(
    found: Sequence[Lifetime],
    heirs: dict[int, int],
    workspaces: dict[int, Request],
    step: int,
    stays: frozenset[int],
) -> Iterator[Request]:
    opened: dict[int, list[int]] = defaultdict(list)
    closed: dict[int, list[int]] = defaultdict(list)
    for number, lifetime in enumerate(found):
        opened[lifetime.opens].append(number)
        closed[lifetime.closes].append(number)
    passed_on = set(heirs.values())
    for moment in sorted({*opened, *closed, *workspaces}):
        for number in closed[moment]:
            lifetime = found[number]
            is_kept = lifetime.owner is Owner.STORAGE and lifetime.index in stays
            if number not in passed_on and not is_kept:
                yield Request((step, _first(number, heirs)), None)
        for number in sorted(opened[moment], key=lambda n: _ORDER.index(found[n].owner)):
            if number not in heirs:
                yield Request((step, number), found[number].size_bytes)
        if moment in workspaces:
            yield workspaces[moment]


def _first_products(graph: CDGraph, schedule: Schedule) -> Iterator[int]:
    """Where a product of matrices runs first, in forward and in backward."""
    multiplies = [any(call.op in PRODUCTS for call in node.calls) for node in graph.nodes]
    positions = range(len(schedule.events))
    for phase in (positions[: schedule.forward_length], positions[schedule.forward_length :]):
        for position in phase:
            event = schedule.events[position]
            if isinstance(event, Compute) and multiplies[event.node]:
                yield position
                break


def _heirs(graph: CDGraph, schedule: Schedule, found: Sequence[Lifetime]) -> dict[int, int]:
    """Lifetime of a result that takes over a storage -> that of the operand, by their numbers."""
    opens, closes = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for number, lifetime in enumerate(found):
        if lifetime.owner is Owner.STORAGE:
            opens[lifetime.index, lifetime.opens] = number
            closes[lifetime.index, lifetime.closes] = number
    return {
        opens[result, 2 * position + 1]: closes[operand, 2 * position + 1]
        for position, takeover in taken_over(graph, schedule).items()
        for operand, result in zip(takeover.operands, takeover.results, strict=True)
        if (result, 2 * position + 1) in opens
    }


def _first(number: int, heirs: dict[int, int]) -> int:
    while number in heirs:
        number = heirs[number]
    return number
