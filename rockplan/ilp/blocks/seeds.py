"""Schedules without a solver: keep some storages, make the others again when they are read.

takes: a problem. returns: a few orders, from keep-all to keep-nothing. They are the first answers
of a search, and all the answers for a problem that is too large for the solver.
"""

from __future__ import annotations

import math
import time

from rockplan.oracles.graph_view import GraphView
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.order import BackwardPhase, Orders, keep_all_order, without_idle

PREFIXES = 16
"""Sets of dropped storages that are tried between keep-all and keep-nothing."""

LONGEST = 50_000
"""Executions after which a seed is given up. Making everything again for each reader takes the
square of a loop's steps (250 steps, 5690 nodes: 1.7 million executions)."""


def seed_orders(problem: CDGraph, deadline: float = math.inf) -> list[Orders]:
    """Return schedules that need no solver, as executions in order, each once: keep-all; then, for
    larger and larger sets of dropped storages (those with the least recompute time for their size
    first), each is made again when it is read; last, everything again for each reader, which keeps
    the fewest bytes alive (left out beyond LONGEST executions).

    deadline: as of process_time; after it only keep-all, the last one and the one that drops all.
    """
    view = GraphView(problem)
    read = {d for node in problem.backward for d in node.reads}
    droppable = [
        d.index
        for d in problem.data
        if d.index in read - view.held
        and d.kind is DataKind.ACTIVATION
        and view.maker(d.index) is not None
    ]
    droppable.sort(
        key=lambda d: (problem.nodes[view.producer[d]].time_ns / max(view.sizes[d], 1), d)
    )
    count = len(droppable)
    sizes = dict.fromkeys(-(-count * k // PREFIXES) for k in range(1, PREFIXES + 1))
    orders = _forgetting(view, frozenset(droppable))
    for size in reversed(sizes):
        phase = _phase(view, frozenset(droppable[:size]))
        for node in problem.backward:
            phase.execute(node.index)
        orders.append(_orders(problem, phase.nodes))
        if time.process_time() >= deadline:
            break
    return list(dict.fromkeys([Orders(*keep_all_order(problem)), *reversed(orders)]))


def _forgetting(view: GraphView, dropped: frozenset[int]) -> list[Orders]:
    """What was made again for one backward node is freed before the next; [] beyond LONGEST."""
    phase = _phase(view, dropped)
    for node in view.graph.backward:
        phase.nodes += [*phase.makers(node.reads), node.index]
        if len(phase.nodes) > LONGEST:
            return []
    return [_orders(view.graph, phase.nodes)]


def _orders(problem: CDGraph, backward: list[int]) -> Orders:
    return Orders(*without_idle(problem, keep_all_order(problem)[0], backward))


def _phase(view: GraphView, dropped: frozenset[int]) -> BackwardPhase:
    """What is `dropped`, or no backward node reads, is missing if it can be made again and is not
    held."""
    problem = view.graph
    kept = {d for node in problem.backward for d in node.reads} - dropped - view.dropped
    made = {d for node in problem.forward for d in node.writes} - view.held
    missing = (d for d in made - kept if view.maker(d) is not None)
    return BackwardPhase(problem, view.remaker, missing)
