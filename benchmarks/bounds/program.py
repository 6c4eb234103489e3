"""The program of `rockplan.ilp.whole_graph.program`, which looks at more than first executions.

takes: a CDGraph, Moments, a budget. returns: Program. guarantees: whatever order `verify` accepts
and `simulate` finds within the budget, if it executes every node for the first time in the order of
the graph, is a solution that costs what its re-executions take: the optimum is a lower bound, and a
solution whose schedule (`orders_of`) keeps the budget is optimal.

Moments are first executions. In the interval up to a moment, what is read for the first time is
alive from before, or made again, or made for the first time; what is made again needs its own
inputs in the same way, and what draws again the generator's state from before its first draw; what
is alive after a moment was alive before it or made in the interval. At each moment, and at the
start of the backward phase (the *turn*), there is the memory of what is alive. Without moments in
the forward phase intervals begin at the turn, where anything that was made may be alive.

Where memory is short between two first executions, a re-execution is a moment too (`Mark`): the
last one of its node between them, or, where the node does not run there, the first of the two. So
is a time at which little can be alive besides a few storages, which is somewhere between the two
(`Pinch`): of two ways to make those few, to keep one or to make it again beside another, each may
leave no room, but half of each leaves half of it in the linear relaxation.

What holds in an interval is said of some unions of intervals too (`ProgramRows.span`): of those
from each interval to the end, and of those that were split. It follows from the rows of the parts,
but not in the linear relaxation, in which half of a re-execution in one interval and half in
another need half of each input: without these rows every moment makes the relaxation weaker.

Columns, for interval s, storage d, node i:
    keep[s, d]    binary: d is alive when interval s starts
    reruns[s][i]  binary: i runs again in it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rockplan.ilp.highs import TIME_UNIT, ProgramBuilder
from rockplan.ilp.whole_graph import program as moments_alone
from rockplan.ilp.whole_graph.intervals import TURN, Facts, turn_of
from rockplan.ilp.whole_graph.program import MAX_UNITS, ProgramRows, Terms
from rockplan.values.graph import CDGraph
from rockplan.values.order import BackwardPhase, Orders, without_idle

PEAK_UNITS = 1000
"""In which the least peak is counted: large against the solver's tolerances."""


Key = int | tuple[int, int]
"""Of an interval: the first execution that it ends with, or TURN; or the one after it, and the
number of the cut that it ends with."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The last re-execution of `node` between the first executions of `end - 1` and of `end`, as
    far as cuts with smaller numbers leave that in one piece."""

    node: int
    end: int
    number: int

    @property
    def key(self) -> Key:
        return self.end, self.number


@dataclass(frozen=True, slots=True)
class Pinch:
    """A time between the first executions of `end - 1` and of `end` at which those open storages
    that are not among the `few`, nor always there, have room_bytes at most, in every schedule
    within the budget that it was found for. One for each end."""

    end: int
    few: frozenset[int]
    room_bytes: int

    @property
    def number(self) -> int:
        """It divides before all marks."""
        return -1

    @property
    def key(self) -> Key:
        return self.end, self.number


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the backward phase starts, between the first executions of `end - 1` and of `end`."""

    end: int

    @property
    def number(self) -> int:
        """It divides before all others."""
        return -2

    @property
    def key(self) -> Key:
        return TURN


Cut = Mark | Pinch | Turn


@dataclass(frozen=True, slots=True)
class Moments:
    """Where the program looks.

    ends: nodes, the last one among them. cuts: of one end in order of time; the turn follows from
    the ends. spans: (key of the interval before, key of the last one) of unions of intervals.
    """

    ends: frozenset[int]
    cuts: tuple[Mark | Pinch, ...] = ()
    spans: frozenset[tuple[Key, Key]] = frozenset()

    def with_cut(self, cut: Mark | Pinch, before: Mark | Pinch | None) -> Moments:
        """before: what comes next of the same end, None if it comes last."""
        place = len(self.cuts) if before is None else self.cuts.index(before)
        return replace(self, cuts=(*self.cuts[:place], cut, *self.cuts[place:]))

    def without(self, moment: int | Mark | Pinch) -> Moments:
        """An end, or a cut."""
        key = moment if isinstance(moment, int) else moment.key
        return Moments(
            self.ends - {moment} if isinstance(moment, int) else self.ends,
            tuple(cut for cut in self.cuts if cut != moment),
            frozenset(span for span in self.spans if key not in span),
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """From one moment to the next: of the nodes from `first` to before `stop`, which run for the
    first time there, up to the first execution of the last of them, or to the `cut` after it.

    wanted: open storages (not held, made before `first`) that these or later nodes read, or that
    are read to make those again; reads: of these nodes; absent: nodes that do not run again in it.
    """

    first: int
    stop: int
    cut: Cut | None
    reads: frozenset[int]
    wanted: tuple[int, ...]
    absent: frozenset[int]

    @property
    def end(self) -> Key:
        return self.stop - 1 if self.cut is None else self.cut.key


class ProofFacts(Facts):
    """spent_ns: of some backward nodes, what is known to be spent on re-executions until the first
    execution of the node before, in every schedule within the budget."""

    def __init__(self, graph: CDGraph, spent_ns: Mapping[int, int] | None = None) -> None:
        super().__init__(graph)
        self.spent_ns = spent_ns or {}

    def always_before(self, end: int) -> frozenset[int]:
        """What is always there from the first execution of `end - 1` to that of `end`."""
        always = self.always.items()
        return frozenset(d for d, (_, high) in always if self.producer[d] < end <= high)

    def beside(self, there: Iterable[int], pinch: Pinch) -> list[int]:
        """Of what is there at the pinch: what its room is for."""
        always = self.always_before(pinch.end)
        return [d for d in there if d in self.is_open and d not in pinch.few and d not in always]

    def beside_bytes(self, there: Iterable[int], pinch: Pinch) -> int:
        return sum(self.sizes[d] for d in self.beside(there, pinch))

    def intervals(self, moments: Moments) -> list[Interval]:
        start = len(self.graph.forward)
        stops = _stops(moments, start)
        firsts = [0 if min(moments.ends) < start else start, *(stop for stop, _, _ in stops)]
        found: list[Interval] = []
        wanted: set[int] = set()
        unborn: frozenset[int] = frozenset()
        for first, (stop, cut, absent) in reversed(list(zip(firsts, stops, strict=False))):
            if isinstance(cut, Turn):
                unborn = self.tangents
            nodes = self.graph.nodes[first:stop]
            read = {d for n in nodes for d in n.reads if d in self.is_open}
            # What is made for the first time from here on is there for what comes after it.
            older = {d for d in wanted | read if self.born[d] < first} - unborn
            wanted = self.closure(older)
            reads = frozenset(read & older)
            found.append(Interval(first, stop, cut, reads, tuple(sorted(wanted)), absent))
        return found[::-1]


Stop = tuple[int, Cut | None, frozenset[int]]


def _stops(moments: Moments, turn: int) -> list[Stop]:
    """Of each interval: before which first execution it ends, with which cut, and what does not run
    again in it. turn: the first backward node."""
    cuts: list[Cut] = [*moments.cuts]
    if min(moments.ends) < turn:
        cuts.insert(0, Turn(turn))
    found: list[Stop] = []
    for end in sorted(moments.ends.union(cut.end for cut in cuts)):
        *parts, (_, absent) = _parts([c for c in cuts if c.end == end], None, frozenset())
        found += [(end, cut, absent_there) for cut, absent_there in parts]
        if end in moments.ends:
            found.append((end + 1, None, absent))
    return found


def _parts(
    cuts: Sequence[Cut], last: Cut | None, absent: frozenset[int]
) -> list[tuple[Cut | None, frozenset[int]]]:
    """Of the time between two first executions, or a part of it that ends with `last`, divided at
    `cuts`: what ends each part, and what does not run in it."""
    if not cuts:
        return [(last, absent)]
    k = _oldest(cuts)
    cut = cuts[k]
    gone = {cut.node} if isinstance(cut, Mark) else set[int]()
    return [*_parts(cuts[:k], cut, absent), *_parts(cuts[k + 1 :], last, absent | gone)]


def _oldest(cuts: Sequence[Cut]) -> int:
    return min(range(len(cuts)), key=lambda k: cuts[k].number)


class Program(moments_alone.Program):
    """Of intervals that may end with cuts."""

    def places(self, schedule: Orders) -> list[int]:
        """For each computation: its interval; their number where no first execution follows, -1
        before the first of them."""
        cuts = [part.cut for part in self.intervals if part.cut is not None]
        ends = {part.stop - 1 for part in self.intervals if part.cut is None}
        is_pinched = any(isinstance(cut, Pinch) for cut in cuts)
        alive = alive_before(self.facts, schedule) if is_pinched else []
        start = 0 if turn_of(self.intervals) else len(schedule.forward)
        found = [-1] * start
        s = 0
        for place, (i, first) in enumerate(
            zip(schedule.computations, schedule.is_first, strict=True)
        ):
            if place < start or not first:
                continue
            here = range(start, place + 1)
            lengths = self._lengths(schedule, here, alive, [cut for cut in cuts if cut.end == i])
            for part, length in enumerate(lengths, s):
                found += [part] * length
            # Where it is no moment, the last part goes on.
            s += len(lengths) - (i not in ends)
            start = place + 1
        return found + [len(self.intervals)] * (len(schedule.computations) - len(found))

    def _lengths(
        self, schedule: Orders, here: range, alive: Sequence[Set[int]], cuts: Sequence[Cut]
    ) -> list[int]:
        """How many computations of `here`, the last one for the first time, run in each part;
        alive: before each of all."""
        if not cuts:
            return [len(here)]
        k = _oldest(cuts)
        cut = cuts[k]
        match cut:
            case Turn():
                at = len(schedule.forward)
            case Mark():
                nodes = schedule.computations[here.start : here.stop]
                runs = (p + 1 for p, i in zip(here, nodes, strict=True) if i == cut.node)
                at = max(runs, default=here.start)
            case Pinch():
                at = min(here, key=lambda p: self.facts.beside_bytes(alive[p], cut))
        before, after = range(here.start, at), range(at, here.stop)
        return [
            *self._lengths(schedule, before, alive, cuts[:k]),
            *self._lengths(schedule, after, alive, cuts[k + 1 :]),
        ]


def program(facts: ProofFacts, moments: Moments, budget_bytes: int) -> Program:
    """Sizes are rounded down and the budget up, so that no schedule is lost."""
    unit_bytes = max(-(-budget_bytes // MAX_UNITS), 1)
    rows = _ProofRows(facts, moments, unit_bytes)
    for terms, alive_bytes in rows.memory:
        rows.builder.at_most(terms, -(-(budget_bytes - alive_bytes) // unit_bytes))
    for terms, room_bytes in rows.rooms:
        rows.builder.at_most(terms, -(-room_bytes // unit_bytes))
    rows.spend()
    return rows.program()


def peak_program(facts: ProofFacts, moments: Moments, most_bytes: int) -> Program:
    """Minimises the peak, in 1/PEAK_UNITS of most_bytes, instead of the time."""
    unit_bytes = max(-(-most_bytes // MAX_UNITS), 1)
    rows = _ProofRows(facts, moments, unit_bytes)
    rows.builder.costs = [0.0] * len(rows.builder.costs)
    peak = _amount(rows.builder, PEAK_UNITS)
    share = PEAK_UNITS / most_bytes
    for terms, alive_bytes in rows.memory:
        scaled = [(column, weight * unit_bytes * share) for column, weight in terms]
        rows.builder.at_most([*scaled, (peak, -1.0)], -alive_bytes * share)
    return rows.program()


def _amount(builder: ProgramBuilder, upper: float) -> int:
    """A continuous column in [0, upper] that costs what it is."""
    column = builder.fraction()
    builder.costs[column], builder.column_upper[column] = 1.0, upper
    return column


class _ProofRows(ProgramRows):
    """rooms: terms and bytes, for each pinch; they hold within the budget alone, so a program for
    the peak has none."""

    def __init__(self, facts: ProofFacts, moments: Moments, unit_bytes: int) -> None:
        super().__init__(facts, moments, unit_bytes)
        self.rooms = self._rooms()

    def may_run(self, part: Interval) -> set[int]:
        return super().may_run(part) - part.absent

    def spend(self) -> None:
        """Until some ends at least so much is spent: on what the columns say, and on what runs more
        than once in an interval, of which they say nothing."""
        unit_ns = max(self.facts.graph.time_ns, 1) * TIME_UNIT
        terms: list[tuple[int, float]] = []
        for part, runs in zip(self.intervals, self.reruns, strict=True):
            terms += [(column, self.builder.costs[column]) for column in runs.values()]
            spent_ns = self.facts.spent_ns.get(part.stop, 0) if part.cut is None else 0
            if spent_ns:
                terms.append((_amount(self.builder, spent_ns / unit_ns), 1.0))
                self.builder.at_least(terms, spent_ns / unit_ns)

    def program(self) -> Program:
        return Program(self.facts, self.intervals, self.builder.build(), self.keep, self.reruns)

    def _moment(self, s: int) -> tuple[Terms, int]:
        """What outlives the moment was alive at it."""
        part, facts = self.intervals[s], self.facts
        following = self._following(s)
        if isinstance(part.cut, Mark):
            return self._marked(s, part.cut, following)
        if isinstance(part.cut, Pinch):
            always = facts.always_before(part.cut.end)
            terms = [term for d in following if d not in always for term in self._kept(s + 1, d)]
            return terms, sum(facts.sizes[d] for d in always)
        return super()._moment(s)

    def _marked(self, s: int, mark: Mark, following: Iterable[int]) -> tuple[Terms, int]:
        """What a re-execution reads and makes is there if it runs: if it did so before the first
        execution that comes before the mark, this may be just after that."""
        facts = self.facts
        node, reads = facts.graph.nodes[mark.node], facts.view.reads_again[mark.node]
        always = facts.always_before(mark.end)
        own = always.union(reads, node.writes)
        terms = [term for d in following if d not in own for term in self._kept(s + 1, d)]
        if self.intervals[s].first == mark.end and node.index in self.reruns[s]:
            own_units = facts.own_bytes(node, reads, mark.end) // self.unit_bytes
            terms.append((self.reruns[s][node.index], own_units))
        return terms, sum(facts.sizes[d] for d in always)

    def _rooms(self) -> list[tuple[Terms, int]]:
        """Of each pinch: what its room is for, in units, and the room in bytes."""
        found: list[tuple[Terms, int]] = []
        for s, part in enumerate(self.intervals):
            if isinstance(part.cut, Pinch):
                beside = self.facts.beside(self._following(s), part.cut)
                terms = [term for d in beside for term in self._kept(s + 1, d)]
                found.append((terms, part.cut.room_bytes))
        return found

    def _following(self, s: int) -> tuple[int, ...]:
        return self.intervals[s + 1].wanted if s + 1 < len(self.intervals) else ()


def orders_of(found: Program, solution: NDArray[np.float64], *, at_once: bool = False) -> Orders:
    """The order that a solution stands for: what it does not keep runs again when it is read next,
    with what that needs, or before the mark beyond which it is kept; at_once: before any moment
    beyond which it is kept. In the forward phase nothing runs again. Legal whatever the solution
    is."""
    facts = found.facts
    phase = facts.backward_phase()

    def is_chosen(column: int | None) -> bool:
        return column is not None and solution[column] >= 0.5

    for s, part in enumerate(found.intervals):
        columns = {d: found.keep.get((s, d)) for d in part.wanted}
        dropped = (d for d, c in columns.items() if c is not None and not is_chosen(c))
        phase.missing.update(d for d in dropped if facts.view.makers[d])
        kept = [d for d in part.wanted if is_chosen(found.keep.get((s + 1, d)))]
        made_again = [d for d in kept if facts.view.makers[d]]
        for index in range(max(part.first, len(facts.graph.forward)), part.stop):
            is_last = part.cut is None and index == part.stop - 1
            _execute(phase, index, made_again if is_last and at_once else ())
        if isinstance(part.cut, Pinch) and at_once:
            phase.run(phase.makers(made_again))
        elif isinstance(part.cut, Mark) and is_chosen(found.reruns[s].get(part.cut.node)):
            _execute(phase, part.cut.node, made_again)
    forward = range(len(facts.graph.forward))
    return Orders(*without_idle(facts.graph, forward, phase.nodes))


def _execute(phase: BackwardPhase, index: int, beside: Iterable[int]) -> None:
    """The node, after what makes its operands, and what is wanted beside it."""
    again = phase.makers((*beside, *phase.graph.nodes[index].reads))
    phase.run([*again, *([index] if again[-1:] != [index] else [])])


def alive_before(facts: ProofFacts, schedule: Orders) -> list[frozenset[int]]:
    """For each computation: what is there that it or a later one reads."""
    found: list[frozenset[int]] = []
    read_next: set[int] = set()
    for i, is_first in reversed(list(zip(schedule.computations, schedule.is_first, strict=True))):
        node = facts.graph.nodes[i]
        read_next.difference_update(node.writes)
        if is_first:
            read_next.discard(facts.view.states.get(i, -1))
        read_next.update(node.reads if is_first else facts.view.reads_again[i])
        found.append(frozenset(read_next))
    return found[::-1]
