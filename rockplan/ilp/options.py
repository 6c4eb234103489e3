"""Pareto families of block options: which corners (peak, saved) to solve.

takes: the problem of a block. returns: OptionFamily. guarantees: keep-all is in it; no option in
it dominates another; deterministic unless a time limit strikes. It holds the least peak that a
schedule of the class (`stages`) can have, the least saved bytes within it, the least saved bytes
of all and the least peak with those. For every corner, an option is within `gap_ns` of the best
schedule of the class that stays `Settings.delta` below it (tiny storages aside, see `units`).

Search: the schedule found at a corner (P, S) is the best one for every tighter corner that it
fits, and its time bounds every tighter corner from below. So corners wait in a heap, the loosest
peak first (hence a sweep over saved bytes without a limit on the peak comes first); each one is
answered by an option in hand, if that is within eps of the bound, else by the solver, and is
followed by the two corners that exclude the answer (DESIGN, section 6).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from rockplan.block import OptionFamily
from rockplan.graph import CDGraph
from rockplan.ilp.decode import Orders, keep_all_orders, pareto, peak_bytes, price, read_orders
from rockplan.ilp.formulate import StageModel, formulate
from rockplan.ilp.solve import SolverStatus, solve
from rockplan.ilp.stages import find_stages
from rockplan.ilp.units import in_units

THREADS = 2
"""Problems solved at once: HiGHS runs without Python's lock, on one thread each."""

UNLIMITED = 1 << 62
"""Bytes: a budget that no problem reaches."""


@dataclass(frozen=True, slots=True)
class Settings:
    """eps, gap: shares of the iteration time; delta: share of the range of peaks and of saved
    bytes. eps 0.5 % with delta 2 % lose at most 0.1 % of iteration time in the final schedule,
    1 % with 5 % lose up to 1.6 % (DESIGN, section 6). gap: what the solver may leave unproven
    at one corner. time_limit_s: for the whole call."""

    eps: float = 0.005
    delta: float = 0.02
    gap: float = 0.001
    time_limit_s: float = 60.0


DEFAULT = Settings()


def option_family(problem: CDGraph, *, settings: Settings = DEFAULT) -> OptionFamily:
    """The Pareto options of one block, fastest first; see the module's docstring."""
    search = _Search.start(problem, settings)
    if search.model is not None:
        _sweep_corners(search, _find_ends(search))
    options = pareto([price(problem, answer.orders) for answer in search.answers])
    return OptionFamily(options, None if search.is_cut else search.gap_ns, search.solves)


def option_families(
    problems: Sequence[CDGraph], *, settings: Settings = DEFAULT
) -> tuple[OptionFamily, ...]:
    """The family of each problem; problems that look alike to the solver are solved once.

    Two at a time, small ones first; what they leave of the time limit goes to the large ones.
    """
    views = [_view(p) for p in problems]
    distinct = dict(zip(views, problems, strict=True))
    order = sorted(distinct, key=lambda view: len(distinct[view].nodes))
    deadline = time.monotonic() + settings.time_limit_s

    def solve_one(position: int) -> OptionFamily:
        waiting = len(order) - position
        remaining_s = max(deadline - time.monotonic(), 0.0)
        share_s = remaining_s * min(1.0, THREADS / waiting)
        own = replace(settings, time_limit_s=share_s)
        return option_family(distinct[order[position]], settings=own)

    with ThreadPoolExecutor(max_workers=THREADS) as threads:
        families = dict(zip(order, threads.map(solve_one, range(len(order))), strict=True))
    return tuple(families[view] for view in views)


def _view(problem: CDGraph) -> Hashable:
    """All of a problem that its options depend on: no names, no calls."""
    return (
        tuple((d.kind, d.size_bytes) for d in problem.data),
        tuple(
            (n.phase, n.reads, n.writes, n.time_ns, n.workspace_bytes, n.random, n.recomputable)
            for n in problem.nodes
        ),
        (problem.outputs, problem.held, problem.handed, problem.rng_state_bytes),
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """A schedule with its bytes and time on the problem without tiny storages."""

    orders: Orders
    peak_bytes: int
    saved_bytes: int
    time_ns: int

    def fits(self, peak_bytes: int, saved_bytes: int) -> bool:
        return self.peak_bytes <= peak_bytes and self.saved_bytes <= saved_bytes


@dataclass
class _Search:
    """What is known about one problem so far.

    answers: schedules found. bounds: (peak, saved, ns): nothing within that corner is faster.
    infeasible: corners without a schedule.
    """

    problem: CDGraph
    settings: Settings
    model: StageModel | None
    deadline: float
    answers: list[_Answer] = field(default_factory=list)
    bounds: list[tuple[int, int, int]] = field(default_factory=list)
    infeasible: list[tuple[int, int]] = field(default_factory=list)
    solves: int = 0
    gap_ns: int = 0
    is_cut: bool = False

    @classmethod
    def start(cls, problem: CDGraph, settings: Settings) -> _Search:
        units = in_units(problem)
        stages = find_stages(units)
        search = cls(
            problem=units.graph,
            settings=settings,
            model=formulate(stages) if stages.stages else None,
            deadline=time.monotonic() + settings.time_limit_s,
            bounds=[(UNLIMITED, UNLIMITED, problem.time_ns)],
        )
        search.add(keep_all_orders(problem))
        return search

    def add(self, orders: Orders) -> _Answer:
        option = price(self.problem, orders)
        answer = _Answer(orders, peak_bytes(option), option.saved_bytes, option.time_ns)
        self.answers.append(answer)
        return answer

    def bound_ns(self, peak_bytes: int, saved_bytes: int) -> int:
        return max(ns for p, s, ns in self.bounds if p >= peak_bytes and s >= saved_bytes)

    def best(self, peak_bytes: int, saved_bytes: int) -> _Answer | None:
        fitting = [a for a in self.answers if a.fits(peak_bytes, saved_bytes)]
        return min(fitting, key=lambda a: a.time_ns, default=None)

    def is_infeasible(self, peak_bytes: int, saved_bytes: int) -> bool:
        return any(peak_bytes <= p and saved_bytes <= s for p, s in self.infeasible)

    def solve(self, peak_bytes: int, saved_bytes: int, gap: float) -> _Answer | None:
        """Solve one corner and note what was proven; None if that found no schedule."""
        assert self.model is not None
        program = self.model.within(
            None if peak_bytes >= UNLIMITED else peak_bytes,
            None if saved_bytes >= UNLIMITED else saved_bytes,
        )
        remaining_s = self.deadline - time.monotonic()
        if remaining_s <= 0:
            self.is_cut = True
            return None
        self.solves += 1
        report = solve(program, time_limit_s=remaining_s, absolute_gap=1000 * gap)
        if report.status is SolverStatus.INFEASIBLE:
            self.infeasible.append((peak_bytes, saved_bytes))
            return None
        # Times are integers: what is a little above one is no less than the next one.
        slack = 1e-6 * self.problem.time_ns
        overhead_ns = max(math.ceil(report.bound * self.model.time_unit_ns - slack), 0)
        self.bounds.append((peak_bytes, saved_bytes, self.problem.time_ns + overhead_ns))
        if report.values is None:
            self.is_cut = True
            return None
        return self.add(read_orders(self.model, report.values))


def _find_ends(search: _Search) -> list[tuple[int, int]]:
    """The corners at the four ends of the family: the least peak and the least saved bytes, each
    alone and followed by the other."""
    assert search.model is not None
    least_peak = max(row.constant_bytes for row in search.model.peak)
    least_saved = search.model.saved.constant_bytes

    def smallest_peak(saved_bytes: int) -> int:
        found = min(a.peak_bytes for a in search.answers if a.saved_bytes <= saved_bytes)

        def within(limit: int) -> int | None:
            answer = search.solve(limit, saved_bytes, gap=1.0)
            return None if answer is None else answer.peak_bytes

        return _smallest(least_peak, found, within)

    def smallest_saved(peak_bytes: int) -> int:
        found = min(a.saved_bytes for a in search.answers if a.peak_bytes <= peak_bytes)

        def within(limit: int) -> int | None:
            answer = search.solve(peak_bytes, limit, gap=1.0)
            return None if answer is None else answer.saved_bytes

        return _smallest(least_saved, found, within)

    peak, saved = smallest_peak(UNLIMITED), smallest_saved(UNLIMITED)
    return [
        (peak, UNLIMITED),
        (peak, smallest_saved(peak)),
        (UNLIMITED, saved),
        (smallest_peak(saved), saved),
    ]


def _smallest(least: int, found: int, within: Callable[[int], int | None]) -> int:
    """Bisect for the smallest value: `found` is one, none is below `least`; within(limit)
    returns one that is not above its limit, None if there is none."""
    limit = least
    while least < found:
        value = within(limit)
        if value is None:
            least = limit + 1
        else:
            found = value
        limit = (least + found) // 2
    return found


def _sweep_corners(search: _Search, ends: list[tuple[int, int]]) -> None:
    """Answer every corner, from the loosest; the ends as well."""
    keep_all = search.answers[0]
    least_peak, least_saved = min(p for p, _ in ends), min(s for _, s in ends)
    share = search.settings.delta
    peak_step = max(int(share * (keep_all.peak_bytes - least_peak)), 1)
    saved_step = max(int(share * (keep_all.saved_bytes - least_saved)), 1)
    heap = [(-p, -s) for p, s in [(UNLIMITED, UNLIMITED), *ends]]
    heapq.heapify(heap)
    seen: set[tuple[int, int]] = set()
    while heap:
        peak, saved = (-x for x in heapq.heappop(heap))
        if (peak, saved) in seen or search.is_infeasible(peak, saved):
            continue
        seen.add((peak, saved))
        answer = _answer(search, peak, saved)
        if answer is not None:
            heapq.heappush(heap, (peak_step - answer.peak_bytes, -saved))
            heapq.heappush(heap, (-peak, saved_step - answer.saved_bytes))


def _answer(search: _Search, peak_bytes: int, saved_bytes: int) -> _Answer | None:
    """The best schedule in hand for a corner, if it is good enough; else the solver's."""
    best = search.best(peak_bytes, saved_bytes)
    eps_ns = int(search.settings.eps * search.problem.time_ns)
    if best is None or best.time_ns > search.bound_ns(peak_bytes, saved_bytes) + eps_ns:
        search.solve(peak_bytes, saved_bytes, search.settings.gap)
        best = search.best(peak_bytes, saved_bytes)
    if best is not None:
        bound_ns = search.bound_ns(peak_bytes, saved_bytes)
        search.gap_ns = max(search.gap_ns, best.time_ns - bound_ns)
    return best
