"""A lower bound on the time of the legal schedules of a whole graph within a budget.

takes: a CDGraph, a budget. returns: nanoseconds. guarantees: no schedule that `verify` accepts,
that executes every node for the first time in the order of the graph, and that `simulate` finds
within the budget is faster, whatever it executes again, forward or backward, however often and in
whatever order.

Look at some moments: the start of the backward phase, and first executions of backward nodes.
Between two of them, what backward nodes read for the first time is alive from before, or made
again, or made for the first time; what is made again needs its own inputs in the same way; what is
alive after a moment was alive before it or made since the last one. At each moment there is the
memory of what is alive. These are necessary conditions: the stage formulation (`formulate`) without
memory during re-executions, and with all that may run again. The relaxations with few moments and
with more are solved first, then the integer program of the best one for as long as the limit
allows.

What holds between two moments is also said of each moment and the end (`_add_span`). Without these
rows the relaxation gets weaker with every moment: half of a re-execution in one interval and half
in another need half of each input. Bound over one execution of every node (roofline prices), with
them and without: 12 layers of GPT-2 at 30 % of keep-all's peak +20.7 % in 0.2 s instead of +11.1 %
in 2 s (+16.4 % in 20 s, with the integer program); 2 layers at 34 %, with fused attention, at
35 %, and 2+2 layers of T5 at 24 %, relaxations alone: {GPT} instead of +17.2, +18.0 and +22.6 %
after 40 s.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rockplan.graph import CDGraph, ComputeNode, DataKind, producers, readers
from rockplan.ilp.decode import proven_ns
from rockplan.ilp.solve import TIME_UNIT, LinearProgram, ProgramBuilder, SolverStatus, solve
from rockplan.ilp.units import MAX_UNITS
from rockplan.schedule import keep_all
from rockplan.simulate import simulate

MOST_COLUMNS = tuple(1000 << k for k in range(6))
"""Of programs, in order: moments are left out until they have no more. The relaxation of the first
takes some hundredths of a second, that of the last some seconds; which says most is not known
before, since it depends on the moments."""

NEXT = 4
"""The relaxation of a program takes about so many times as long as that of the one before it."""

GAP = 1e-4
"""Share of the iteration time that the integer program may leave unproven."""

PEAK_UNITS = 1000
"""Of the peak of keep-all, in which the least peak is counted: large against the tolerances."""

PEAK_TOLERANCE = 1e-4
"""PEAK_UNITS by which the solver's rows and columns may be off."""

NODE_LIMIT = 1 << 30
"""None: the time limit ends the search."""


def lower_bound_ns(graph: CDGraph, budget_bytes: int, *, time_limit_s: float) -> int:
    """No schedule of the class above whose peak is within `budget_bytes` takes less time.

    Where the limit of `time_limit_s` seconds leaves no time for a better one (or no schedule
    fits at all): the time of executing every node once.
    """
    deadline = time.monotonic() + time_limit_s
    if time_limit_s <= 0 or not graph.backward:
        return graph.time_ns
    relaxed: list[tuple[float, LinearProgram]] = []
    for most_columns in MOST_COLUMNS:
        start = time.monotonic()
        intervals = _intervals(graph, most_columns)
        program = _program(graph, budget_bytes, intervals)
        relaxed.append((_bound(_relaxed(program), deadline), program))
        now = time.monotonic()
        if len(intervals) == len(graph.backward) or now + NEXT * (now - start) > deadline:
            break
    relaxed.sort(key=lambda found: found[0], reverse=True)
    bound = relaxed[0][0]
    for _, program in relaxed if bound > 0 else ():
        bound = max(bound, _bound(program, deadline))
    return graph.time_ns + proven_ns(bound, graph.time_ns)


def peak_lower_bound_bytes(graph: CDGraph, *, time_limit_s: float) -> int:
    """No schedule of the class above has a smaller peak.

    Where the limit leaves no time for a better one: what a single node reads and makes.
    """
    single = max([*_forward_bytes(graph), *_forced_bytes(graph).values()], default=0)
    if time_limit_s <= 0 or not graph.backward or single == 0:
        return single
    most_bytes = simulate(graph, keep_all(graph)).peak_bytes
    program = _relaxed(_peak_program(graph, _intervals(graph, MOST_COLUMNS[-1]), most_bytes))
    report = solve(program, time_limit_s=time_limit_s, absolute_gap=0.0, node_limit=NODE_LIMIT)
    if report.status is not SolverStatus.OPTIMAL:
        return single
    return max(single, math.floor((report.bound - PEAK_TOLERANCE) * most_bytes / PEAK_UNITS))


@dataclass(frozen=True, slots=True)
class _Interval:
    """Backward nodes from `first` up to and with `node`, whose first execution is a moment.

    wanted: open storages (not held, made before `first`) that these or later nodes read, or that
    are read to make those again; reads: of these nodes. alive_bytes: at the moment, besides open
    storages that `node` neither reads nor makes.
    """

    first: int
    node: int
    reads: tuple[int, ...]
    wanted: tuple[int, ...]
    alive_bytes: int


def _intervals(graph: CDGraph, most_columns: int) -> list[_Interval]:
    """As many as fit the program; their ends are the nodes that need the most memory."""
    count = len(graph.backward)
    forced = _forced_bytes(graph)
    while (found := _split(graph, forced, count, most_columns)) is None:
        count = count * 2 // 3
    return found


def _split(
    graph: CDGraph, forced: dict[int, int], count: int, most_columns: int
) -> list[_Interval] | None:
    """The backward phase in about `count` equal parts, each ending where most is alive; None if
    those are too many for the program."""
    is_open = _open(graph)
    producer = producers(graph)
    found: list[_Interval] = []
    wanted: set[int] = set()
    columns = 0
    for start, end in reversed(_parts(graph, forced, count)):
        read = {d for n in graph.nodes[start : end + 1] for d in n.reads if d in is_open}
        wanted |= read
        # What is made for the first time from here on is there for what comes after it.
        seeds = {d for d in wanted if producer[d] < start}
        wanted = set()
        _close(graph, is_open, producer, wanted, seeds)
        columns += 2 * len(wanted)
        if columns > most_columns and count > 1:
            return None
        found.append(
            _Interval(
                first=start,
                node=end,
                reads=tuple(sorted(d for d in read if producer[d] < start)),
                wanted=tuple(sorted(wanted)),
                alive_bytes=forced[end],
            )
        )
    return found[::-1]


def _parts(graph: CDGraph, forced: dict[int, int], count: int) -> list[tuple[int, int]]:
    """First and last node of each part."""
    first, length = len(graph.forward), len(graph.backward)
    edges = [first + length * k // count for k in range(count + 1)]
    ends = [
        max(range(low, high), key=lambda i: (forced[i], i))
        for low, high in itertools.pairwise(edges)
        if low < high
    ]
    if ends[-1] != len(graph.nodes) - 1:
        ends[-1] = len(graph.nodes) - 1
    return list(zip([first, *(e + 1 for e in ends[:-1])], ends, strict=True))


def _open(graph: CDGraph) -> frozenset[int]:
    """Storages that may be dropped after they were made."""
    held = set(graph.held)
    kinds = (DataKind.ACTIVATION, DataKind.GRADIENT)
    return frozenset(d.index for d in graph.data if d.kind in kinds and d.index not in held)


def _may_run_again(graph: CDGraph) -> list[bool]:
    handed = set(graph.handed)
    return [n.recomputable and handed.isdisjoint(n.writes) for n in graph.nodes]


def _forced_bytes(graph: CDGraph) -> dict[int, int]:
    """Backward node -> bytes alive for certain at its first execution: its workspace, what it
    makes and reads, held storages made by then, tangents that it or a later node reads; without
    what its result may take over."""
    producer, read_by = producers(graph), readers(graph)
    count = len(graph.nodes)
    until = {
        d.index: max(read_by[d.index], default=-1) for d in graph.data if d.kind is DataKind.TANGENT
    }
    spans = {d: (0, last) for d, last in until.items()}
    spans |= {d: (producer.get(d, 0), count - 1) for d in graph.held}
    changes = [0] * (count + 1)
    for d, (low, high) in spans.items():
        changes[low] += graph.data[d].size_bytes
        changes[high + 1] -= graph.data[d].size_bytes
    alive = list(itertools.accumulate(changes))
    found: dict[int, int] = {}
    for node in graph.backward:
        own = {
            d
            for d in (*node.reads, *node.writes)
            if not graph.data[d].kind.resident and not _within(spans.get(d), node.index)
        }
        own_bytes = sum(graph.data[d].size_bytes for d in own)
        own_bytes += node.workspace_bytes - _taken_bytes(graph, node)
        found[node.index] = alive[node.index] + own_bytes
    return found


def _forward_bytes(graph: CDGraph) -> list[int]:
    """Bytes alive for certain at the first execution of each forward node."""
    producer = producers(graph)
    found: list[int] = []
    for node in graph.forward:
        alive = {d for d in (*node.reads, *node.writes) if not graph.data[d].kind.resident}
        alive |= {d for d in graph.held if producer.get(d, len(graph.nodes)) <= node.index}
        own_bytes = node.workspace_bytes - _taken_bytes(graph, node)
        found.append(own_bytes + sum(graph.data[d].size_bytes for d in alive))
    return found


def _taken_bytes(graph: CDGraph, node: ComputeNode) -> int:
    """Of what the node reads, at most: for its result."""
    return max((graph.data[d].size_bytes for d in node.takes), default=0)


def _within(span: tuple[int, int] | None, index: int) -> bool:
    return span is not None and span[0] <= index <= span[1]


def _close(
    graph: CDGraph,
    is_open: frozenset[int],
    producer: dict[int, int],
    closed: set[int],
    seeds: set[int],
) -> None:
    """Adds to `closed` the `seeds` and every open storage that making them again may read."""
    again = _may_run_again(graph)
    pending = list(seeds)
    while pending:
        d = pending.pop()
        if d not in closed:
            closed.add(d)
            node = graph.nodes[producer[d]]
            if again[node.index]:
                pending += [r for r in node.reads if r in is_open]


@dataclass(frozen=True, slots=True)
class _Columns:
    """keep[s, d]: d is alive when interval s starts. reruns[s][i]: i runs again in it."""

    builder: ProgramBuilder
    keep: dict[tuple[int, int], int]
    reruns: list[dict[int, int]]


@dataclass(frozen=True, slots=True)
class _MemoryRow:
    """Sum of terms, in units rounded down, and alive_bytes: alive at once in every schedule."""

    terms: list[tuple[int, int]]
    alive_bytes: int


def _program(graph: CDGraph, budget_bytes: int, intervals: list[_Interval]) -> LinearProgram:
    """Sizes are rounded down and the budget up, so that no schedule is lost."""
    unit_bytes = max(-(-budget_bytes // MAX_UNITS), 1)
    columns = _columns(graph, intervals)
    for row in _memory_rows(graph, columns, intervals, unit_bytes):
        columns.builder.at_most(row.terms, -(-(budget_bytes - row.alive_bytes) // unit_bytes))
    return columns.builder.build()


def _peak_program(graph: CDGraph, intervals: list[_Interval], scale_bytes: int) -> LinearProgram:
    """Minimises the peak, in 1/PEAK_UNITS of scale_bytes, instead of the time."""
    unit_bytes = max(-(-scale_bytes // MAX_UNITS), 1)
    columns = _columns(graph, intervals)
    builder = columns.builder
    builder.costs = [0.0] * len(builder.costs)
    peak = builder.amount(PEAK_UNITS)
    share = PEAK_UNITS / scale_bytes
    for row in _memory_rows(graph, columns, intervals, unit_bytes):
        terms = [(column, weight * unit_bytes * share) for column, weight in row.terms]
        builder.at_most([*terms, (peak, -1.0)], -row.alive_bytes * share)
    return builder.build()


def _columns(graph: CDGraph, intervals: list[_Interval]) -> _Columns:
    """Columns, and the rows about what must be there."""
    builder = ProgramBuilder()
    unit_ns = max(graph.time_ns, 1) * TIME_UNIT
    producer = producers(graph)
    nodes = graph.nodes
    again = _may_run_again(graph)
    columns = _Columns(
        builder=builder,
        keep={(s, d): builder.binary() for s, part in enumerate(intervals) for d in part.wanted},
        reruns=[
            {
                i: builder.binary(nodes[i].time_ns / unit_ns)
                for i in sorted({producer[d] for d in part.wanted})
                if again[i]
            }
            for part in intervals
        ],
    )
    _add_spans(graph, columns, intervals, producer)
    return columns


def _add_spans(
    graph: CDGraph, columns: _Columns, intervals: list[_Interval], producer: dict[int, int]
) -> None:
    """The rows of each interval, and of all from each one to the end."""
    later: dict[int, int] = {}
    for s in reversed(range(len(intervals))):
        here = _add_span(
            graph, columns, intervals[s : s + 1], s, columns.reruns[s : s + 1], producer
        )
        following = [columns.reruns[s], later]
        later = _add_span(graph, columns, intervals[s:], s, following, producer) if later else here


def _add_span(
    graph: CDGraph,
    columns: _Columns,
    span: list[_Interval],
    s: int,
    within: list[dict[int, int]],
    producer: dict[int, int],
) -> dict[int, int]:
    """What is read in the intervals `span`, of which the first is the s-th, is there; what is kept
    to its end was there or is made. For nodes made before it, a column that is 1 only if the node
    runs again in the span. within: such columns of the spans that it consists of."""
    builder, keep = columns.builder, columns.keep
    wanted = set(span[0].wanted)
    runs: dict[int, int] = {}
    for i in sorted({producer[d] for d in wanted}):
        parts = [of_part[i] for of_part in within if i in of_part]
        if len(parts) > 1:
            runs[i] = builder.fraction()
            builder.at_least([*((part, 1) for part in parts), (runs[i], -1)], 0)
        elif parts:
            runs[i] = parts[0]

    def available(d: int) -> list[tuple[int, float]]:
        made = runs.get(producer[d])
        return [(keep[s, d], 1)] if made is None else [(keep[s, d], 1), (made, 1)]

    for d in sorted(wanted.intersection(d for part in span for d in part.reads)):
        builder.at_least(available(d), 1)
    for d in sorted(wanted):
        following = keep.get((s + len(span), d))
        if following is not None:
            builder.at_least([*available(d), (following, -1)], 0)
    for i, column in runs.items():
        for d in sorted(wanted.intersection(graph.nodes[i].reads)):
            builder.at_least([*available(d), (column, -1)], 0)
    return runs


def _memory_rows(
    graph: CDGraph, columns: _Columns, intervals: list[_Interval], unit_bytes: int
) -> Iterator[_MemoryRow]:
    """The start of the backward phase, then each moment: what outlives it was alive at it."""
    sizes = [d.size_bytes for d in graph.data]
    made_forward = {d for n in graph.forward for d in n.writes}
    there = {d for d in graph.held if d in made_forward} | set(graph.outputs)
    there |= {d.index for d in graph.data if d.kind is DataKind.TANGENT}
    kept = [d for d in intervals[0].wanted if d not in there]
    yield _MemoryRow(
        [(columns.keep[0, d], sizes[d] // unit_bytes) for d in kept], sum(sizes[d] for d in there)
    )
    for s, part in enumerate(intervals):
        following = intervals[s + 1].wanted if s + 1 < len(intervals) else ()
        node = graph.nodes[part.node]
        terms = [
            (columns.keep[s + 1, d], sizes[d] // unit_bytes)
            for d in following
            if d not in node.reads and d not in node.writes
        ]
        # Nothing is taken over from the only operand that might be, if it is kept.
        if len(node.takes) == 1 and node.takes[0] in following:
            d = node.takes[0]
            terms.append((columns.keep[s + 1, d], sizes[d] // unit_bytes))
        yield _MemoryRow(terms, part.alive_bytes)


def _relaxed(program: LinearProgram) -> LinearProgram:
    return replace(program, integral=np.zeros_like(program.integral))


def _bound(program: LinearProgram, deadline: float) -> float:
    """What HiGHS proves before the deadline; 0 if nothing, or if no schedule fits at all."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0 or not program.costs.any():
        return 0.0
    report = solve(
        program, time_limit_s=remaining_s, absolute_gap=GAP / TIME_UNIT, node_limit=NODE_LIMIT
    )
    if report.status is SolverStatus.INFEASIBLE:
        return 0.0
    return max(report.bound, 0.0)
