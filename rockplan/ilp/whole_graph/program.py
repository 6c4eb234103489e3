"""The program of a whole graph with memory rows at some moments only: a small relaxation.

takes: a CDGraph, Moments, a budget. returns: Program. guarantees: every order that `verify`
accepts, that `simulate` finds within the budget, and whose first executions are in the order of the
graph, is a solution that costs at most what its re-executions take. So the optimum is a lower
bound, and a solution whose schedule (`orders_of`) keeps the budget is optimal.

Moments are first executions. In the interval up to a moment, an input of a first execution is alive
from before, or made again, or made for the first time; a re-execution needs its own inputs in the
same way, and a re-executed random node needs the generator's state from before its first draw; a
storage alive after a moment was alive before it or made in the interval. At each moment, and at the
start of the backward phase (the *turn*), a row limits the memory of live storages. Without moments
in the forward phase, intervals begin at the turn, where anything that was made may be alive; with
some, one interval ends at the turn.

The rows of an interval are also written for some unions of intervals (`ProgramRows.span`): for
those from each interval to the end, and for intervals that were split. They follow from the rows of
the parts, but not in the linear relaxation, in which half of a re-execution in one interval and
half in another need half of each input: without these rows every moment makes the relaxation
weaker.

Columns, for interval s, storage d, node i:
    keep[s, d]    binary: d is alive when interval s starts
    reruns[s][i]  binary: i is re-executed in it

Thousands of columns, anew for each moment, are written as arrays at once: PuLP models, as blocks
have them, take three times as long to write (6 ms instead of 2 for 195 columns).

`benchmarks/bounds` has programs that look at more than first executions, for offline proofs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rockplan.ilp.highs import TIME_UNIT, LinearProgram, ProgramBuilder
from rockplan.ilp.whole_graph.host_rows import HostRows
from rockplan.ilp.whole_graph.intervals import BEGINNING, TURN, Facts, Interval, Moments, turn_of
from rockplan.values.graph import required
from rockplan.values.order import Orders, without_idle

Terms = list[tuple[int, int]]
Runs = dict[int, int]
"""Node -> column that is 1 if the node is re-executed in a span of intervals."""

MAX_UNITS = 1 << 22
"""Units of memory in one program. HiGHS may leave each binary 1e-6 from an integer, a kilobyte of a
GiB. With 1 << 16 units, DenseNet at its least peak seemed to fit in a schedule that needs 192 bytes
more, and takes 2 % of an iteration less."""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """An integer program. linear: minimises the time of re-executions, in TIME_UNIT; see the module
    for its columns."""

    facts: Facts
    intervals: list[Interval]
    linear: LinearProgram
    keep: dict[tuple[int, int], int]
    reruns: list[Runs]

    @property
    def relaxed(self) -> LinearProgram:
        return replace(self.linear, integral=np.zeros_like(self.linear.integral))

    @property
    def spans(self) -> frozenset[tuple[int, int]]:
        ends = [part.end for part in self.intervals]
        before = BEGINNING if turn_of(self.intervals) else TURN
        return frozenset(zip([before, *ends], ends, strict=False))


def program(facts: Facts, moments: Moments, budget_bytes: int) -> Program:
    """Write the program. Sizes are rounded down and the budget up, so that no schedule is lost."""
    unit_bytes = max(-(-budget_bytes // MAX_UNITS), 1)
    rows = ProgramRows(facts, moments, unit_bytes)
    for terms, alive_bytes in rows.memory:
        rows.builder.at_most(terms, -(-(budget_bytes - alive_bytes) // unit_bytes))
    return Program(facts, rows.intervals, rows.builder.build(), rows.keep, rows.reruns)


class ProgramRows:
    """A program while it is written. memory: for each moment, the terms (in units, rounded down)
    and the bytes that are alive besides."""

    def __init__(self, facts: Facts, moments: Moments, unit_bytes: int) -> None:
        self.facts = facts
        self.unit_bytes = unit_bytes
        self.builder = builder = ProgramBuilder()
        self.intervals = facts.intervals(moments)
        turn = turn_of(self.intervals)
        nodes = facts.graph.nodes
        unit_ns = max(facts.graph.time_ns, 1) * TIME_UNIT
        self.keep = {
            (s, d): builder.binary()
            for s, part in enumerate(self.intervals)
            for d in part.wanted
            if s != turn or d not in facts.view.dropped
        }
        self.reruns: list[Runs] = [
            {i: builder.binary(nodes[i].time_ns / unit_ns) for i in sorted(self.may_run(part))}
            for part in self.intervals
        ]
        self.host: HostRows | None = None
        if facts.host is not None:
            self.host = HostRows(facts, facts.host, builder, self.intervals, turn, self.reruns)
        self._spans(moments.spans)
        ends = (s for s, part in enumerate(self.intervals) if part.end != TURN)
        self.memory = [self._turn(turn), *map(self._moment, ends)]

    def may_run(self, part: Interval) -> set[int]:
        """Return the nodes that may be re-executed in the interval; fetches do not run before the
        turn."""
        return {i for d in part.wanted for i in self.facts.view.makers[d] if i < part.stop}

    def _kept(self, s: int, d: int) -> Terms:
        column = self.keep.get((s, d))
        return [] if column is None else [(column, self.facts.sizes[d] // self.unit_bytes)]

    def _spans(self, split: Collection[tuple[int, int]]) -> None:
        """Of each single interval, of each union in `split` (the moments that end the interval
        before it and its last one), and of each interval with all later ones."""
        later: Runs = {}
        end = len(self.intervals) - 1
        for s in reversed(range(end + 1)):
            single = self.span(s, s, [self.reruns[s]])
            later = self.span(s, end, [single, later]) if s < end else single
        number = {BEGINNING: -1, TURN: -1}
        number |= {part.end: s for s, part in enumerate(self.intervals)}
        spans = ((number[before] + 1, number[last]) for before, last in split)
        # The largest span so far that contains each interval; the spans form a tree.
        widest = list(self.reruns)
        for s, e in sorted(spans, key=lambda span: (span[1] - span[0], span)):
            within = [
                widest[t] for t in range(s, e + 1) if t == s or widest[t] is not widest[t - 1]
            ]
            if len(within) > 1:
                widest[s : e + 1] = [self.span(s, e, within)] * (e + 1 - s)

    def span(self, s: int, end: int, within: Sequence[Runs]) -> Runs:
        """Write the rows of the intervals s to `end` taken together: what is read in them is kept
        to s or made again in them; what is kept to the interval after `end` was too; so are inputs
        of re-executions.

        within: for each of the parts that make them up, node -> the column that is 1 if it runs
        again there. Returns the same of the whole; a column of it is at most the sum of those of
        the parts.
        """
        builder, makers = self.builder, self.facts.view.makers
        wanted = set(self.intervals[s].wanted)
        runs: Runs = {}
        for i in sorted({i for d in wanted for i in makers[d]}):
            columns = [of_part[i] for of_part in within if i in of_part]
            if len(columns) > 1:
                runs[i] = builder.fraction()
                builder.at_least([*((column, 1) for column in columns), (runs[i], -1)], 0)
            elif columns:
                runs[i] = columns[0]

        available: dict[int, Terms] = {}
        for d in wanted:
            ways = (self.keep.get((s, d)), *(runs.get(i) for i in makers[d]))
            available[d] = [(column, 1) for column in ways if column is not None]
        reads = frozenset().union(*(part.reads for part in self.intervals[s : end + 1]))
        for d in sorted(wanted & reads):
            builder.at_least(available[d], 1)
        for d in sorted(wanted):
            following = self.keep.get((end + 1, d))
            if following is not None:
                builder.at_least([*available[d], (following, -1)], 0)
        for i, column in runs.items():
            for d in sorted(wanted.intersection(self.facts.view.reads_again[i])):
                builder.at_least([*available[d], (column, -1)], 0)
        if self.host is not None:
            self.host.span(s, end, runs)
        return runs

    def _turn(self, s: int) -> tuple[Terms, int]:
        """(Terms (column, units) of storages that are alive if kept, bytes alive in any case.)"""
        graph = self.facts.graph
        made_forward = {d for n in graph.forward for d in n.writes}
        is_alive = {d for d in graph.held if d in made_forward} | set(graph.outputs)
        is_alive |= self.facts.tangents
        kept = [d for d in self.intervals[s].wanted if d not in is_alive]
        terms = [term for d in kept for term in self._kept(s, d)]
        return terms, sum(self.facts.sizes[d] for d in is_alive)

    def _moment(self, s: int) -> tuple[Terms, int]:
        """As `_turn`, at the first execution that ends interval s, of storages kept to the next
        one."""
        facts, node = self.facts, self.facts.graph.nodes[self.intervals[s].end]
        following = self.intervals[s + 1].wanted if s + 1 < len(self.intervals) else ()
        # An operand that is kept is not taken over, but another takeover may apply then; only if
        # the largest takeover includes all others may its operands be counted.
        takes = [frozenset(t.operands) for t in facts.view.takes[node.index]]
        largest = takes[0] if takes and all(t <= takes[0] for t in takes) else frozenset()
        own = {*node.reads, *node.writes} - largest
        own.update(d for d in following if facts.is_always(d, node.index))
        terms = [term for d in following if d not in own for term in self._kept(s + 1, d)]
        return terms, facts.forced_bytes[node.index]


def orders_of(program: Program, solution: NDArray[np.float64]) -> Orders:
    """Return executions that follow a solution of the program `made` or of its relaxation: a
    storage that it keeps by less than half is made again, with its missing inputs, when it is read
    next. Forward nodes run once. Legal for any solution, but the peak may exceed the budget."""
    facts = program.facts
    phase = facts.backward_phase()
    turn = len(facts.graph.forward)
    for s, part in enumerate(program.intervals):
        columns = {d: program.keep.get((s, d)) for d in part.wanted}
        dropped = (d for d, c in columns.items() if c is not None and solution[c] < 0.5)
        phase.missing.update(d for d in dropped if facts.view.makers[d])
        for index in required(facts.graph.nodes[max(part.first, turn) : part.stop]):
            phase.execute(index)
    return Orders(*without_idle(facts.graph, required(facts.graph.forward), phase.nodes))
