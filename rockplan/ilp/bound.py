"""A lower bound on the time of every legal schedule of a whole graph within a budget.

takes: a CDGraph, a budget. returns: nanoseconds. guarantees: no schedule that `verify` accepts and
`simulate` finds within the budget is faster, whatever it executes again, in whatever order.

Look at one moment: the first execution of a backward node b. Alive are at least what b reads and
writes, what is held and made by then, and the tangents that b or a descendant reads. Every
descendant is still to run. So each forward storage that b or a descendant reads is alive at that
moment or made again after it, and a node that runs again needs its own inputs in the same way.
The cheapest such choice whose live bytes fit the budget, added to one execution of every node,
bounds every schedule from below: a selection problem (Checkmate's one-stage relaxation) with two
binaries a forward node. Its linear relaxation is solved for several moments, and for the best one
of them the integer program.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from rockplan.graph import CDGraph, DataKind, producers
from rockplan.ilp.decode import proven_ns
from rockplan.ilp.solve import TIME_UNIT, LinearProgram, ProgramBuilder, SolverStatus, solve
from rockplan.ilp.units import MAX_UNITS

MOMENTS = 24
"""Backward nodes, evenly spaced, whose moments are tried. For 12 layers of GPT-2 (959 nodes) at
15 to 80 % of keep-all's peak: 0.2 s for all relaxations; the first moment is the best each time."""

GAP = 1e-4
"""Share of the iteration time that the integer program may leave unproven; there it adds at most
1e-3 to its relaxation, in up to 4 s."""


def lower_bound_ns(graph: CDGraph, budget_bytes: int, *, time_limit_s: float) -> int:
    """No legal schedule of `graph` whose peak is within `budget_bytes` takes less time.

    Where the limit of `time_limit_s` seconds leaves no time for a better one (or no schedule
    fits at all): the time of executing every node once.
    """
    deadline = time.monotonic() + time_limit_s
    best, hardest = 0.0, None
    for moment in _moments(graph):
        program = _selection(graph, moment, budget_bytes)
        bound = _bound(replace(program, integral=np.zeros_like(program.integral)), deadline)
        if bound > best:
            best, hardest = bound, program
    if hardest is not None:
        best = max(best, _bound(hardest, deadline))
    return graph.time_ns + proven_ns(best, graph.time_ns)


@dataclass(frozen=True, slots=True)
class _Moment:
    """The first execution of backward node `node`.

    alive: non-resident storages that are alive then for certain, its results included.
    needed: forward storages that it or a descendant reads.
    """

    node: int
    alive: frozenset[int]
    needed: frozenset[int]


def _moments(graph: CDGraph) -> list[_Moment]:
    n_backward = len(graph.backward)
    step = max(n_backward // MOMENTS, 1)
    return [_moment(graph, n.index) for n in graph.backward[::step]]


def _moment(graph: CDGraph, node: int) -> _Moment:
    later = _descendants(graph, node)
    read = {d for i in (node, *later) for d in graph.nodes[i].reads}
    kinds = {d: graph.data[d].kind for d in read}
    alive = {d for d in graph.nodes[node].reads if not kinds[d].resident}
    alive |= {d for d, kind in kinds.items() if kind is DataKind.TANGENT}
    alive |= set(graph.nodes[node].writes)
    made_before = _ancestors(graph, node) | {n.index for n in graph.forward}
    producer = producers(graph)
    alive |= {d for d in graph.held if producer.get(d) in made_before}
    needed = {d for d, kind in kinds.items() if kind is DataKind.ACTIVATION}
    return _Moment(node, frozenset(alive), frozenset(needed))


def _descendants(graph: CDGraph, node: int) -> set[int]:
    """Nodes that read, directly or not, what `node` makes."""
    made = set(graph.nodes[node].writes)
    found: set[int] = set()
    for later in graph.nodes[node + 1 :]:
        if not made.isdisjoint(later.reads):
            found.add(later.index)
            made.update(later.writes)
    return found


def _ancestors(graph: CDGraph, node: int) -> set[int]:
    """Nodes whose results `node` reads, directly or not."""
    read = set(graph.nodes[node].reads)
    found: set[int] = set()
    for earlier in reversed(graph.nodes[:node]):
        if not read.isdisjoint(earlier.writes):
            found.add(earlier.index)
            read.update(earlier.reads)
    return found


def _selection(graph: CDGraph, moment: _Moment, budget_bytes: int) -> LinearProgram:
    """Keep or make again each needed storage, in the least time; sizes are rounded down and the
    budget up, so that no schedule is lost."""
    builder = ProgramBuilder()
    time_unit_ns = max(graph.time_ns, 1) * TIME_UNIT
    unit_bytes = max(-(-budget_bytes // MAX_UNITS), 1)
    producer = producers(graph)
    keep: dict[int, int] = {}
    rerun: dict[int, int] = {}
    pending = sorted(moment.needed - moment.alive)
    while pending:
        d = pending.pop()
        if d in keep:
            continue
        keep[d] = builder.binary()
        node = graph.nodes[producer[d]]
        if node.recomputable and node.index not in rerun:
            rerun[node.index] = builder.binary(node.time_ns / time_unit_ns)
            pending += [r for r in node.reads if _is_open(graph, moment, r)]

    def available(d: int) -> list[tuple[int, int]]:
        again = rerun.get(producer[d])
        return [(keep[d], 1)] if again is None else [(keep[d], 1), (again, 1)]

    for d in sorted(moment.needed - moment.alive):
        builder.at_least(available(d), 1)
    for i, column in rerun.items():
        for d in graph.nodes[i].reads:
            if _is_open(graph, moment, d):
                builder.at_least([*available(d), (column, -1)], 0)
    fixed_bytes = sum(graph.data[d].size_bytes for d in moment.alive)
    fixed_bytes += graph.nodes[moment.node].workspace_bytes
    terms = [(column, graph.data[d].size_bytes // unit_bytes) for d, column in keep.items()]
    state = graph.rng_state_bytes // unit_bytes
    terms += [(column, state) for i, column in rerun.items() if graph.nodes[i].random]
    builder.at_most(terms, -(-(budget_bytes - fixed_bytes) // unit_bytes))
    return builder.build()


def _is_open(graph: CDGraph, moment: _Moment, d: int) -> bool:
    """Whether d is a forward storage that may be dead at the moment."""
    return graph.data[d].kind is DataKind.ACTIVATION and d not in moment.alive


def _bound(program: LinearProgram, deadline: float) -> float:
    """What HiGHS proves before the deadline; 0 if nothing, or if no schedule fits at all."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0 or not program.costs.any():
        return 0.0
    report = solve(program, time_limit_s=remaining_s, absolute_gap=GAP / TIME_UNIT)
    if report.status is SolverStatus.INFEASIBLE:
        return 0.0
    return max(report.bound, 0.0)
