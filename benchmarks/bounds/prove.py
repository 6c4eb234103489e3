"""A lower bound on the time of the legal schedules within a budget, with time to prove it.

takes: a CDGraph, a budget. returns: nanoseconds, bytes. guarantees: no schedule that `verify`
accepts, that executes every node for the first time in the order of the graph, and that `simulate`
finds within the budget is faster, whatever it executes again, forward or backward, however often
and in whatever order.

As in `rockplan.ilp.whole_graph.refine`, but re-executions become moments as well, pinches
(`pebbles`) before all others; moments that do not matter are left out, and small storages until
nothing else is to refine: that makes programs smaller. In 1 s it mostly proves less than first
executions alone; where memory is shortest, and with more time, more (docs/experiments.md). At the
smallest budget of BERT +48.2 % is proven in 14 s, where re-executions alone gave +33.5 in 150.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from benchmarks.bounds.pebbles import Pinches
from benchmarks.bounds.program import (
    PEAK_UNITS,
    Mark,
    Moments,
    Pinch,
    Program,
    ProofFacts,
    Turn,
    alive_before,
    orders_of,
    peak_program,
    program,
)
from rockplan.ilp.blocks.decode import proven_ns
from rockplan.ilp.highs import TIME_UNIT, SolveReport, SolverStatus, solve
from rockplan.ilp.whole_graph.refine import GAP, ITERATIONS, NODE_LIMIT, PATIENCE
from rockplan.oracles.simulate import simulate, timeline
from rockplan.values.graph import CDGraph
from rockplan.values.order import Orders
from rockplan.values.schedule import Compute, keep_all, with_frees

COLUMNS = 4000
"""Of a program for the least peak, beyond which no moment is added."""

PEAK_TOLERANCE = 1e-4
"""PEAK_UNITS by which the solver's rows and columns may be off."""

SMALL = 0.005
"""Of the budget: what smaller storages need is left out until nothing else is left to refine."""

GAMES = 16
"""First executions before which a pinch is looked for."""

LOSS = 5e-4
"""Share of the iteration time that a relaxation may lose with the moments that it does not need."""

NEEDED_SHARE = 0.2
"""Of the time for proofs: to find which these are."""


@dataclass(frozen=True, slots=True, eq=False)
class Refined:
    """The last relaxation that was solved. bound: the largest of all, in TIME_UNIT; 0 if no
    schedule fits, as far as the relaxations see."""

    budget_bytes: int
    moments: Moments
    program: Program
    relaxed: SolveReport
    bound: float

    @property
    def orders(self) -> Orders | None:
        """Near a fast schedule within the budget, though it may need more."""
        return None if self.relaxed.values is None else orders_of(self.program, self.relaxed.values)

    @property
    def bound_ns(self) -> int:
        return _proven_ns(self.program.facts.graph, self.bound)


def refined(
    graph: CDGraph,
    budget_bytes: int,
    *,
    deadline: float,
    pinches: Pinches | None = None,
    spent_ns: Mapping[int, int] | None = None,
) -> Refined | None:
    """None if nothing need be made again, nothing can, or there was no time. deadline: as of
    time.monotonic; spent_ns: as in `ProofFacts`."""
    facts = ProofFacts(graph, spent_ns)
    moments = _first(facts)
    best: Refined | None = None
    without_gain = 0
    while moments is not None and time.monotonic() < deadline:
        made = program(facts, moments, budget_bytes)
        if not made.linear.costs.any():
            break
        report = solve(
            made.relaxed, time_limit_s=max(deadline - time.monotonic(), 0.0), absolute_gap=0.0
        )
        if report.status is SolverStatus.STOPPED:
            break
        known = 0.0 if best is None else best.bound
        bound = report.bound if report.values is not None else 0.0
        without_gain = without_gain + 1 if bound <= known + GAP / TIME_UNIT else 0
        best = Refined(budget_bytes, moments, made, report, max(bound, known))
        if best.orders is None or without_gain == PATIENCE or report.iterations > ITERATIONS:
            break
        moments = looking_closer(
            made, moments, best.orders, budget_bytes, at_reruns=False, pinches=pinches
        )
    return best


def proved_ns(start: Refined, *, deadline: float) -> int:
    """What integer programs prove before the deadline: without small storages first, and with the
    moments of `start`, or those at which little can be alive, whichever prove more."""
    graph, budget_bytes = start.program.facts.graph, start.budget_bytes
    spent_ns = start.program.facts.spent_ns
    if start.bound == 0:
        return graph.time_ns
    coarse = without_small(graph, int(budget_bytes * SMALL))
    pinches = Pinches(coarse, budget_bytes)
    pinched = refined(coarse, budget_bytes, deadline=deadline, pinches=pinches, spent_ns=spent_ns)
    best = max((r for r in (start, pinched) if r is not None), key=lambda r: r.bound)
    now = time.monotonic()
    facts = ProofFacts(coarse, spent_ns)
    moments = _needed(facts, best, now + (deadline - now) * NEEDED_SHARE)
    bound, moments = _proved(facts, moments, pinches, best.bound, deadline)
    facts = start.program.facts
    bound, _ = _proved(facts, moments, Pinches(graph, budget_bytes), bound, deadline)
    return _proven_ns(graph, bound)


def _needed(facts: ProofFacts, found: Refined, deadline: float) -> Moments:
    """Without those without which the relaxation proves about as much: programs are smaller."""
    moments = found.moments
    least = found.bound - LOSS / TIME_UNIT
    for moment in (*sorted(moments.ends)[:-1], *moments.cuts):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            break
        fewer = moments.without(moment)
        made = program(facts, fewer, found.budget_bytes)
        report = solve(made.relaxed, time_limit_s=remaining_s, absolute_gap=0.0)
        if report.values is not None and report.bound >= least:
            moments = fewer
    return moments


def _proved(
    facts: ProofFacts, moments: Moments, pinches: Pinches, bound: float, deadline: float
) -> tuple[float, Moments]:
    """The largest bound of all programs, in TIME_UNIT, and the moments of the last one."""
    while (remaining_s := deadline - time.monotonic()) > 0:
        made = program(facts, moments, pinches.budget_bytes)
        report = solve(
            made.linear,
            time_limit_s=remaining_s,
            absolute_gap=GAP / TIME_UNIT,
            node_limit=NODE_LIMIT,
        )
        if report.status is SolverStatus.INFEASIBLE:
            break
        bound = max(bound, report.bound)
        if report.status is not SolverStatus.OPTIMAL or report.values is None:
            break
        found = orders_of(made, report.values, at_once=True)
        closer = looking_closer(
            made, moments, found, pinches.budget_bytes, at_reruns=True, pinches=pinches
        )
        if closer is None:
            break
        moments = closer
    return bound, moments


def without_small(graph: CDGraph, least_bytes: int) -> CDGraph:
    """Smaller storages have no size: no schedule is lost. Nor is a room that is found so too small
    for them: whatever is alive beside a few that do not weigh more than they do leaves them less.
    """

    def kept_bytes(size_bytes: int) -> int:
        return size_bytes if size_bytes >= least_bytes else 0

    data = tuple(replace(d, size_bytes=kept_bytes(d.size_bytes)) for d in graph.data)
    return replace(graph, data=data, rng_state_bytes=kept_bytes(graph.rng_state_bytes))


def lower_bound_ns(
    graph: CDGraph,
    budget_bytes: int,
    *,
    time_limit_s: float,
    spent_ns: Mapping[int, int] | None = None,
) -> int:
    """No schedule of the class above whose peak is within `budget_bytes` takes less time. spent_ns:
    of some backward nodes, what is proven to be spent on re-executions until the first execution of
    the node before.

    Where the limit of `time_limit_s` seconds leaves no time for a better one (or no schedule
    fits at all): the time of executing every node once.
    """
    deadline = time.monotonic() + time_limit_s
    found = refined(graph, budget_bytes, deadline=deadline, spent_ns=spent_ns)
    return graph.time_ns if found is None else proved_ns(found, deadline=deadline)


def peak_lower_bound_bytes(graph: CDGraph, *, time_limit_s: float) -> int:
    """No schedule of the class above has a smaller peak.

    Where the limit leaves no time for a better one: what a single node reads and makes.
    """
    deadline = time.monotonic() + time_limit_s
    facts = ProofFacts(graph)
    best_bytes = max(facts.forced_bytes, default=0)
    most_bytes = simulate(graph, keep_all(graph)).peak_bytes
    moments = _first(facts)
    while moments is not None and best_bytes > 0:
        # Without any time the solver may still solve what its presolve does.
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            break
        made = peak_program(facts, moments, most_bytes)
        report = solve(made.relaxed, time_limit_s=remaining_s, absolute_gap=0.0)
        if report.status is not SolverStatus.OPTIMAL or report.values is None:
            break
        least_bytes = math.floor((report.bound - PEAK_TOLERANCE) * most_bytes / PEAK_UNITS)
        best_bytes = max(best_bytes, least_bytes)
        if len(made.linear.costs) > COLUMNS:
            break
        found = orders_of(made, report.values)
        moments = looking_closer(made, moments, found, best_bytes, at_reruns=False)
    return best_bytes


def looking_closer(
    made: Program,
    moments: Moments,
    found: Orders,
    budget_bytes: int,
    *,
    at_reruns: bool,
    pinches: Pinches | None = None,
) -> Moments | None:
    """With a moment at which the schedule does not keep the budget and that the program does not
    have: the one of `pinches` whose room it exceeds most, or else where it needs most; None if
    there is none. at_reruns: re-executions in the backward phase count too."""
    turn = len(made.facts.graph.forward)
    spans = moments.spans | made.spans
    excesses = _excesses(made, found, budget_bytes)
    if pinches is not None:
        pinch = _exceeded(made, found, {e.end for e in excesses if e.end >= turn}, pinches)
        if pinch is not None:
            marks = (cut for cut in moments.cuts if cut.end == pinch.end)
            return replace(moments.with_cut(pinch, next(marks, None)), spans=spans)
    new = [e for e in excesses if _is_new(e, made, at_reruns)]
    if not new:
        return None
    worst = max(new)
    if worst.node == worst.end:
        return replace(moments, ends=moments.ends | {worst.end}, spans=spans)
    # All that runs for the first time there is the end.
    ends = moments.ends | {e for e in (worst.end - 1, worst.end) if e >= turn}
    number = 1 + max([0, *(cut.number for cut in moments.cuts)])
    mark = Mark(worst.node, worst.end, number)
    cut = made.intervals[worst.interval].cut
    following = None if isinstance(cut, Turn) or cut is None or cut.end != worst.end else cut
    return replace(moments.with_cut(mark, following), ends=ends, spans=spans)


@dataclass(frozen=True, slots=True, order=True)
class _Excess:
    """A computation that needs more than the budget; end: itself or the next first execution."""

    during_bytes: int
    end: int
    node: int
    interval: int


def _excesses(made: Program, found: Orders, budget_bytes: int) -> list[_Excess]:
    during = _during(made.facts.graph, found)
    at = zip(during, _following(found), found.computations, made.places(found), strict=True)
    turn = len(found.forward)
    return [
        _Excess(bytes_, end, i, s)
        for place, (bytes_, end, i, s) in enumerate(at)
        if end is not None and bytes_ > budget_bytes and (place >= turn or i == end)
    ]


def _is_new(excess: _Excess, made: Program, at_reruns: bool) -> bool:
    """Does the program not look there?"""
    if excess.interval < 0:
        # Before the turn, with which it begins.
        return True
    part = made.intervals[excess.interval]
    if excess.node == excess.end:
        return part.cut is not None or part.stop != excess.end + 1
    is_marked = isinstance(part.cut, Mark) and part.cut.node == excess.node
    return at_reruns and not is_marked


def _exceeded(
    made: Program, found: Orders, ends: Collection[int], pinches: Pinches
) -> Pinch | None:
    """Whose room the schedule exceeds most, of those before the ends and next to them: where most
    is alive all the time, since each takes a game."""
    facts = made.facts
    known = {part.cut.end for part in made.intervals if isinstance(part.cut, Pinch)}
    alive = alive_before(facts, found)
    turn = len(facts.graph.forward)
    firsts = zip(found.computations, found.is_first, strict=True)
    at = {i: place for place, (i, is_first) in enumerate(firsts) if is_first}
    states = {
        end: alive[at[end - 1] + 1 : at[end] + 1]
        for end in {*ends, *(e + 1 for e in ends)} - known
        if end > turn and end in at
    }

    def least_bytes(end: int) -> int:
        return min(sum(facts.sizes[d] for d in there & facts.is_open) for there in states[end])

    worst: Pinch | None = None
    most_bytes = 0
    for end in sorted(states, key=lambda end: (-least_bytes(end), end))[:GAMES]:
        for pinch in pinches.before(end):
            beside_bytes = min(facts.beside_bytes(there, pinch) for there in states[end])
            if beside_bytes - pinch.room_bytes > most_bytes:
                worst, most_bytes = pinch, beside_bytes - pinch.room_bytes
    return worst


def _first(facts: ProofFacts) -> Moments | None:
    if not facts.graph.backward:
        return None
    return Moments(frozenset({len(facts.graph.nodes) - 1, *(i - 1 for i in facts.spent_ns)}))


def _following(found: Orders) -> list[int | None]:
    """For each computation: itself or the next first execution."""
    following: list[int | None] = []
    end: int | None = None
    for i, first in zip(reversed(found.computations), reversed(found.is_first), strict=True):
        end = i if first else end
        following.append(end)
    return following[::-1]


def _during(graph: CDGraph, found: Orders) -> list[int]:
    """Bytes during each computation."""
    schedule = with_frees(graph, found.forward, found.backward)
    steps = zip(schedule.events, timeline(graph, schedule), strict=True)
    return [step.during_bytes for event, step in steps if isinstance(event, Compute)]


def _proven_ns(graph: CDGraph, bound: float) -> int:
    return graph.time_ns + proven_ns(bound, graph.time_ns)
