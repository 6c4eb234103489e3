"""Which corners (peak, saved bytes) of a problem to solve.

takes: a problem, Settings. returns: ParetoSearch, the answers and what is proven of them.
guarantees: keep-all is among the answers, and so are the four ends: the least peak that a schedule
of the class (`stages`) can have, the least saved bytes with it, the least saved bytes of all, the
least peak with those. For every corner that leaves room for `Settings.delta`, an answer within the
corner is at most `Settings.eps` and `gap` slower than the best schedule of the class that needs
delta less (tiny storages aside, see `scaling`), unless effort or time ended the search before. The
same answers on every run unless the time limit strikes.

`option_families` makes of the answers the options of blocks: keep-all is among them, none dominates
another, and each is legal (`verify`) and priced by `simulate`.

ParetoSearch: the schedule found at a corner (P, S) is the best one for every tighter corner that it
fits, and its time bounds every tighter corner from below. So a sweep at one peak starts without a
limit on saved bytes; each corner is answered by a known schedule if that is within eps of the
bound, else by the solver; and the next corner is just below the saved bytes of the answer. The
first sweeps have no limit on the peak, since a chain mostly uses these options; sweeps at limited
peaks follow, the extremes and the middle first, as long as the effort lasts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from rockplan.ilp.blocks.decode import pareto, price, solve_stages
from rockplan.ilp.blocks.formulate import StageModel, entries, formulate
from rockplan.ilp.blocks.stages import find_stages
from rockplan.ilp.highs import SolverStatus
from rockplan.ilp.pulp_models import HIGHS
from rockplan.ilp.scaling import UNLIMITED, Units, in_units
from rockplan.oracles.graph_view import GraphView
from rockplan.values.block import OptionFamily
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.order import BackwardPhase, Orders, keep_all_order, without_idle
from rockplan.values.progress import report

SOLVE_EFFORT = 300
"""Effort of setting up one solve (0.03 s), in iterations of the simplex method (10,000 a
second)."""

COARSE_DELTAS = (0.25, 0.1)
"""Steps of the first sweeps, as shares of the range of saved bytes: so that options are spread over
the range even if the effort ends before a fine sweep does."""

MAX_ENTRIES = 500_000
"""Most matrix entries of a stage formulation that is solved (writing it takes some seconds in
Python); larger problems have the seeds only."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to search a family. eps, gap: shares of the iteration time: how far an answer may be from
    the bound, and what the solver may leave unproven at one corner. delta: share of the range of
    saved bytes.

    effort: no new corner is solved once the solver has spent this much (iterations of the simplex
    method, and SOLVE_EFFORT for each solve); the ends are found whatever they cost. time_limit_s:
    for the whole call. solver: by its name in PuLP.

    eps 0.5 % with delta 2 % lose at most 0.1 % of iteration time in the final schedule, 1 % with 5
    % lose up to 1.6 % (in the prototype of the chain). Three times the effort was best for plans of
    the chain alone; plans that only begin at it hardly gain from more.
    """

    eps: float = 0.005
    delta: float = 0.02
    gap: float = 0.001
    effort: int = 10_000
    time_limit_s: float = 60.0
    solver: str = HIGHS


Corner = tuple[int, int]
"""(peak bytes, saved bytes), without tiny storages: limits of a schedule, or its needs."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A schedule, its needs and its time."""

    orders: Orders
    needs: Corner
    time_ns: int


@dataclass
class ParetoSearch:
    """What is known about one problem so far.

    answers: schedules found. bounds: (peak, saved, ns): no schedule within that corner is faster.
    infeasible: corners without a schedule of the class. step: the finest distance of two corners of
    the sweeps, in bytes. is_cut: the time limit struck.
    """

    units: Units
    model: StageModel | None
    settings: Settings
    deadline: float
    answers: list[Answer] = field(default_factory=list)
    bounds: list[tuple[int, int, int]] = field(default_factory=list)
    infeasible: list[tuple[int, int]] = field(default_factory=list)
    step: int = 1
    solves: int = 0
    effort: int = 0
    is_cut: bool = False

    @property
    def problem(self) -> CDGraph:
        return self.units.graph

    @property
    def is_exhausted(self) -> bool:
        return self.effort >= self.settings.effort or self.is_late()

    def add(self, orders: Orders) -> Answer:
        """Note a schedule as an answer."""
        option = price(self.problem, orders)
        answer = Answer(orders, (option.peak_bytes, option.saved_bytes), option.time_ns)
        self.answers.append(answer)
        return answer

    def bound_ns(self, corner: Corner) -> int:
        """Return the best proven bound for a corner."""
        return max(ns for p, s, ns in self.bounds if _covers((p, s), corner))

    def best(self, corner: Corner) -> Answer | None:
        """Return the fastest answer within a corner, None if there is none."""
        fitting = [a for a in self.answers if _covers(corner, a.needs)]
        return min(fitting, key=lambda a: a.time_ns, default=None)

    def is_infeasible(self, corner: Corner) -> bool:
        """True if it is proven that no schedule is within the corner."""
        return any(_covers(empty, corner) for empty in self.infeasible)

    def solve(self, corner: Corner, gap: float) -> Answer | None:
        """Search the fastest schedule within `corner` by the integer program; None if there is
        none, or none was found. `gap`: share of the iteration time that may stay unproven. Notes
        schedule, proof and effort."""
        if self.model is None or self.is_late():
            return None
        solver = self.settings.solver
        started = clock_s(solver)
        limit_s = max(self.deadline - started, 0.0) / 4
        solution = solve_stages(self.model, *corner, time_limit_s=limit_s, gap=gap, solver=solver)
        self.is_cut = self.is_cut or clock_s(solver) >= started + limit_s
        self.solves += 1
        self.effort += SOLVE_EFFORT + solution.iterations
        if solution.status is SolverStatus.INFEASIBLE:
            self.infeasible.append(corner)
            return None
        self.bounds.append((*corner, solution.bound_ns))
        return None if solution.orders is None else self.add(solution.orders)

    def is_late(self) -> bool:
        """True if the time limit has struck."""
        self.is_cut = self.is_cut or clock_s(self.settings.solver) >= self.deadline
        return self.is_cut


def clock_s(solver: str) -> float:
    """Return the seconds of CPU time of this process; of a solver that has its own, wall time."""
    return time.process_time() if solver == HIGHS else time.monotonic()


def search_corners(problem: CDGraph, settings: Settings) -> ParetoSearch:
    """Search schedules of a block (its graph) for many limits of (peak, saved bytes): those that
    need no solver, the four ends, then sweeps as long as effort and time last. A block too large
    for the solver has the first ones only."""
    seeds_until = time.process_time() + settings.time_limit_s
    units = in_units(problem)
    stages = find_stages(units)
    fits_solver = 0 < entries(stages) <= MAX_ENTRIES
    search = ParetoSearch(
        units=units,
        model=formulate(stages) if fits_solver else None,
        settings=settings,
        deadline=clock_s(settings.solver) + settings.time_limit_s,
        bounds=[(UNLIMITED, UNLIMITED, problem.time_ns)],
    )
    for orders in seed_orders(units.graph, seeds_until):
        search.add(orders)
    if search.is_late():
        return search
    if fits_solver:
        _fill(search, _find_ends(search))
    elif not stages.stages:
        # There is no choice: all schedules of the class need the same.
        peak, saved = search.answers[0].needs
        search.infeasible += [(peak - 1, UNLIMITED), (UNLIMITED, saved - 1)]
    return search


def _covers(outer: Corner, inner: Corner) -> bool:
    return inner[0] <= outer[0] and inner[1] <= outer[1]


def _find_ends(search: ParetoSearch) -> list[Corner]:
    """The least peak alone, that peak with the least saved bytes it allows, the least saved bytes
    alone, those with the least peak they allow."""
    peak = _smallest(search, 0, UNLIMITED)
    saved = _smallest(search, 1, UNLIMITED)
    return [
        (peak, UNLIMITED),
        (peak, _smallest(search, 1, peak)),
        (UNLIMITED, saved),
        (_smallest(search, 0, saved), saved),
    ]


def _smallest(search: ParetoSearch, axis: int, other: int) -> int:
    """axis: 0 for the peak, 1 for saved bytes. Bisection. Few values are possible (sums of a few
    sizes), and the smallest known one is often the least: every other trial is just below it."""

    def corner(limit: int) -> Corner:
        return (limit, other) if axis == 0 else (other, limit)

    smallest = min(a.needs[axis] for a in search.answers if _covers(corner(UNLIMITED), a.needs))
    assert search.model is not None
    rows = (search.model.saved,) if axis else search.model.peak
    least = limit = max(row.constant_bytes for row in rows)
    while least < smallest:
        answer = search.solve(corner(limit), gap=1.0)
        if answer is not None and answer.needs[axis] < smallest:
            smallest = answer.needs[axis]
            limit = (least + smallest) // 2
        elif search.is_infeasible(corner(limit)):
            least, limit = limit + 1, smallest - 1
        else:
            return smallest
    search.infeasible.append(corner(smallest - 1))
    return smallest


def _fill(search: ParetoSearch, ends: list[Corner]) -> None:
    """Sweeps without a limit on the peak, then the ends, then sweeps at peaks `step` bytes apart
    until the effort is spent."""
    range_bytes = search.answers[0].needs[1] - min(saved for _, saved in ends)
    step = search.step = max(int(search.settings.delta * range_bytes), 1)
    for share in COARSE_DELTAS:
        _sweep(search, UNLIMITED, max(int(share * range_bytes), step))
    _sweep(search, UNLIMITED, step)
    for corner in ends:
        _answer(search, corner)
    least = min(peak for peak, _ in ends)
    greatest = max(a.needs[0] for a in search.answers)
    for level in _from_coarse_to_fine(-(-(greatest - least) // step)):
        if search.is_exhausted:
            break
        _sweep(search, least + level * step, step)


def _from_coarse_to_fine(last: int) -> list[int]:
    """0 to last, each once, so that every beginning of the list covers the range evenly."""
    order = dict.fromkeys([0, last])
    stride = last
    while len(order) <= last:
        stride = max(stride // 2, 1)
        order |= dict.fromkeys(range(0, last, stride))
    return list(order)


def _sweep(search: ParetoSearch, peak_bytes: int, step_bytes: int) -> None:
    """For less and less saved bytes, each at least `step_bytes` below the last ones found."""
    corner = (peak_bytes, UNLIMITED)
    while corner[1] >= 0 and not search.is_infeasible(corner):
        answer = _answer(search, corner)
        if answer is None:
            return
        corner = (peak_bytes, answer.needs[1] - step_bytes)


def _answer(search: ParetoSearch, corner: Corner) -> Answer | None:
    """None without one. Solved if no known one is within `eps` of the bound and effort is left."""
    best = search.best(corner)
    eps_ns = int(search.settings.eps * search.problem.time_ns)
    is_good = best is not None and best.time_ns <= search.bound_ns(corner) + eps_ns
    if not is_good and not search.is_exhausted:
        search.solve(corner, search.settings.gap)
        best = search.best(corner)
    return best


THREADS = 2
"""Problems solved at once: HiGHS runs without Python's lock, on one thread each."""


def option_family(problem: CDGraph, *, settings: Settings = Settings()) -> OptionFamily:
    """Return the Pareto options of one block, fastest first."""
    search = search_corners(problem, settings)
    options = pareto([price(problem, answer.orders) for answer in search.answers])
    return OptionFamily(options, search.solves, is_complete=not search.is_cut)


def option_families(
    problems: Sequence[CDGraph], *, settings: Settings = Settings()
) -> tuple[OptionFamily, ...]:
    """Return for each block (its graph) the family of its options, in the order of `problems`.
    Blocks are solved in THREADS threads, small ones first; `settings.time_limit_s` is for all of
    them, and each gets an equal share of what is left when it begins. Reports progress."""
    order = sorted(range(len(problems)), key=lambda k: len(problems[k].nodes))
    deadline = clock_s(settings.solver) + settings.time_limit_s

    def solve_one(position: int) -> OptionFamily:
        waiting = len(order) - position
        remaining_s = max(deadline - clock_s(settings.solver), 0.0)
        own = replace(settings, time_limit_s=remaining_s * min(1.0, THREADS / waiting))
        return option_family(problems[order[position]], settings=own)

    families: dict[int, OptionFamily] = {}
    report("solving blocks", 0, len(order))
    threads = ThreadPoolExecutor(max_workers=THREADS)
    try:
        for k, family in zip(order, threads.map(solve_one, range(len(order))), strict=True):
            families[k] = family
            report("solving blocks", len(families), len(order))
    finally:
        # An interrupt does not wait for the solver.
        threads.shutdown(wait=False, cancel_futures=True)
    return tuple(families[k] for k in range(len(problems)))


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
