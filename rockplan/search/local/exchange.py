"""Exchange: one local search over schedules, which minimizes time or peak.

takes: a priced CDGraph, a legal schedule within a budget. returns: a schedule. guarantees: legal,
within the budget as `simulate` finds it, no slower; the same on every run unless the deadline
strikes: effort is counted, and random numbers are drawn from fixed seeds.

An exchange leaves out a re-execution (`Draft.leave_out`), which costs memory before it. While some
position exceeds the budget, a storage that is unused there is freed and made again directly before
its next read; a first execution of the backward phase that frees more than it makes is hastened;
one whose result is unused before the node runs again is delayed. The storage chosen has the least
time of recomputation, with all that must be recomputed for it, per byte and distance to its next
read, as in `greedy_eviction`. Exchanges that gain are kept, and by simulated annealing
(Kirkpatrick, Gelatt, Vecchi 1983) some that lose. When none gains any more, further rounds begin
hotter at the incumbent. What each move is worth: benchmarks/results/ablation.md.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rockplan.oracles.recompute import NEVER, RecomputeCosts, TooDeep
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search.local.editable_schedule import EMPTY, Draft
from rockplan.values.graph import CDGraph, movable
from rockplan.values.schedule import Schedule, with_frees


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """How much a search by exchange may do, and how it does it.

    effort: of one round, in storages weighed, about a million in a second; inserting, leaving_out,
    positions: what an insertion, an attempt to leave something out, and a look at the memory of so
    many positions count. rounds: after so many in a row without a gain of `gain` of the iteration
    time, no other begins; up to most_rounds, one for each `point` that might be gained. work: of
    all rounds but the first, effort times positions of a draft (weighing takes longer in a long
    one).
    hot, hotter, cold: temperatures, as shares of the time for re-executions: at the start of the
    first round, at the start of others, and at the end.
    moves: first executions of the backward phase are delayed and hastened.
    distance_powers: exponents of the distance to the next read in the score, one drawn for each
    exchange; noise: share by which scores are raised at random. depth: storages that must be
    recomputed for one another, beyond which a storage is not weighed. patience: a round ends after
    so many exchanges without a gain for each re-execution. insertions: most of them in one
    exchange; repeats: of one storage for one node among them (more might alternate for ever).
    coarse, step: in a search for a smaller peak, the share by which it has to shrink at first
    (halved at each failure), and the least such share; attempts, between: failures in a row before
    the end, and exchanges between two attempts; longest: most time of a schedule, as a multiple of
    all nodes once. start: effort for each of several first schedules; the best one has all that is
    left.
    """

    effort: int = 600_000
    inserting: int = 80
    leaving_out: int = 40
    positions: int = 500
    rounds: int = 4
    most_rounds: int = 8
    work: int = 120_000_000_000
    point: float = 0.01
    gain: float = 5e-4
    hot: float = 0.1
    hotter: float = 0.4
    cold: float = 0.001
    moves: bool = True
    distance_powers: tuple[float, ...] = (0.0, 0.5, 1.0)
    noise: float = 0.5
    depth: int = 30
    patience: int = 30
    insertions: int = 1000
    repeats: int = 3
    coarse: float = 0.05
    step: float = 0.003
    attempts: int = 100
    between: int = 5
    longest: int = 4
    start: int = 400_000


DEFAULT = ExchangeLimits()

Spans = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Storages that are alive and unused at some position, and the position of each one's next read."""


def exchanged(
    graph: CDGraph,
    schedule: Schedule,
    budget_bytes: int,
    *,
    enough_ns: int = 0,
    deadline: float = NEVER,
    limits: ExchangeLimits = DEFAULT,
) -> Schedule:
    """Search a faster schedule within `budget_bytes`, and return the fastest, or `schedule`, which
    must fit. Rounds of random exchanges, each from the best so far, until enough of them gain
    little. enough_ns: a schedule this fast ends the search. deadline: as of process_time."""
    best = annealed(graph, schedule, budget_bytes, deadline=deadline, limits=limits)
    best_ns = simulate(graph, best).time_ns
    seed = without_gain = 0
    most_rounds = max(limits.work // (limits.effort * Draft(graph, *best.phases).end), 1)
    while best_ns > enough_ns and seed < most_rounds and time.process_time() < deadline:
        hoped = (best_ns - enough_ns) / max(graph.time_ns, 1)
        if without_gain >= max(limits.rounds, min(limits.most_rounds, hoped / limits.point)):
            break
        seed, without_gain = seed + 1, without_gain + 1
        candidate = annealed(graph, best, budget_bytes, deadline=deadline, limits=limits, seed=seed)
        candidate_ns = simulate(graph, candidate).time_ns
        if candidate_ns < best_ns - limits.gain * graph.time_ns:
            without_gain = 0
        if candidate_ns < best_ns:
            best, best_ns = candidate, candidate_ns
    return best


def annealed(
    graph: CDGraph,
    schedule: Schedule,
    budget_bytes: int,
    *,
    deadline: float = NEVER,
    limits: ExchangeLimits = DEFAULT,
    seed: int = 0,
) -> Schedule:
    """Run one round of random exchanges from `schedule`, which fits into budget_bytes; return the
    fastest schedule of the round, or `schedule`. It ends when its effort is spent, or too many
    exchanges gain nothing. seed: of the random numbers. The round of seed 0 begins at a lower
    temperature and leaves first executions in their order. deadline: as of time.process_time."""
    if time.process_time() >= deadline:
        return schedule
    may_move = movable(graph) if seed and limits.moves else frozenset()
    draft = Draft(graph, *schedule.phases, may_move)
    search = _ExchangeSearch(graph, budget_bytes, draft, deadline, limits, seed)
    effort, hot = limits.effort, limits.hotter if seed else limits.hot
    search.prune()
    best_ns, best = draft.time_ns, draft.orders
    overhead_ns = best_ns - graph.time_ns
    without_gain = 0
    while search.spent < effort and time.process_time() < deadline:
        if without_gain >= limits.patience * len(draft.reruns()):
            break
        search.exchange_any(overhead_ns * hot * (limits.cold / hot) ** (search.spent / effort))
        without_gain += 1
        if draft.time_ns < best_ns:
            best_ns, best, without_gain = draft.time_ns, draft.orders, 0
    return _checked(graph, best)


def fitted(
    graph: CDGraph,
    forward: Sequence[int],
    backward: Sequence[int],
    budget_bytes: int,
    *,
    deadline: float = NEVER,
    limits: ExchangeLimits = DEFAULT,
) -> Schedule | None:
    """Return the schedule of these executions (legal, but they may exceed budget_bytes) with
    re-executions inserted until it fits. None if none help, or not before the deadline (as of
    time.process_time)."""
    search = _ExchangeSearch(graph, budget_bytes, Draft(graph, forward, backward), deadline, limits)
    if not search.makes_room(limits.longest * graph.time_ns):
        return None
    search.prune()
    return _checked(graph, search.draft.orders)


def squeezed(
    graph: CDGraph, schedule: Schedule, *, deadline: float = NEVER, limits: ExchangeLimits = DEFAULT
) -> Schedule:
    """Search a schedule with a smaller peak than that of `schedule`, at whatever time up to
    `limits.longest`; return the one with the smallest, or `schedule`. deadline: as of
    time.process_time. Room is made for a smaller budget; if that fails, some exchanges within the
    present peak change the schedule, and it is tried again."""
    if time.process_time() >= deadline:
        return schedule
    peak_bytes = simulate(graph, schedule).peak_bytes
    draft = Draft(graph, *schedule.phases)
    search = _ExchangeSearch(graph, peak_bytes, draft, deadline, limits)
    best_bytes, best = search.budget_bytes, search.draft.orders
    failed, step = 0, limits.coarse
    while search.spent < limits.effort and best_bytes > 0 and failed < limits.attempts:
        if time.process_time() >= deadline:
            break
        search.budget_bytes = int(best_bytes * (1 - step))
        most_ns = min(limits.longest * graph.time_ns, search.draft.time_ns + graph.time_ns)
        if search.makes_room(most_ns):
            search.prune()
            best_bytes, best, failed = search.draft.worst()[1], search.draft.orders, 0
            continue
        if step > limits.step:
            step = max(step / 2, limits.step)
            continue
        failed += 1
        search.budget_bytes = best_bytes
        for _ in range(limits.between):
            if not search.draft.reruns():
                break
            search.exchange_any(limits.hot * (search.draft.time_ns - graph.time_ns))
    return _checked(graph, best)


def pruned(
    graph: CDGraph, schedule: Schedule, budget_bytes: int, *, deadline: float = math.inf
) -> Schedule:
    """Return `schedule` without the re-executions that budget_bytes does not need, the most
    expensive left out first; their results stay alive instead. Stops at the deadline (as of
    time.process_time)."""
    if time.process_time() >= deadline:
        return schedule
    draft = Draft(graph, *schedule.phases)
    while prune(draft, budget_bytes, deadline):
        pass
    return _checked(graph, draft.orders)


def prune(draft: Draft, budget_bytes: int, deadline: float = math.inf) -> bool:
    """Try once to leave each re-execution out of `draft`, the most expensive first, and keep the
    change if the peak stays within budget_bytes. Returns True if any was left out; False once the
    deadline (as of process_time) has passed."""
    times_ns = [n.time_ns for n in draft.graph.nodes]
    is_shorter = False
    for position in sorted(draft.reruns(), key=lambda p: (-times_ns[draft.nodes[p]], p)):
        if time.process_time() >= deadline:
            return False
        if draft.nodes[position] == EMPTY or not draft.fits_without(position, budget_bytes):
            continue
        before = draft.changes
        draft.leave_out(position)
        if draft.worst()[1] > budget_bytes:
            draft.undo(before)
        else:
            is_shorter = True
    return is_shorter


def _checked(graph: CDGraph, orders: tuple[Sequence[int], Sequence[int]]) -> Schedule:
    schedule = with_frees(graph, *orders)
    verify(graph, schedule)
    return schedule


@dataclass(frozen=True, slots=True)
class _ExchangeRule:
    """The rule of one exchange. distance_power: exponent in the scores; never: the node that was
    left out, which is not re-executed again; made: how often a storage was made again, by (storage,
    node that reads it); hastened: how often a node was moved."""

    distance_power: float
    never: int | None
    made: Counter[tuple[int, int]] = field(default_factory=Counter)
    hastened: Counter[int] = field(default_factory=Counter)


class _ExchangeSearch:
    """The state of one search. spent: storages weighed; deadline: as of process_time, after which
    no room is made and nothing is left out."""

    def __init__(
        self,
        graph: CDGraph,
        budget_bytes: int,
        draft: Draft,
        deadline: float = NEVER,
        limits: ExchangeLimits = DEFAULT,
        seed: int = 0,
    ) -> None:
        self.graph = graph
        self.budget_bytes = budget_bytes
        self.draft = draft
        self.random = random.Random(seed)
        self.deadline = deadline
        self.limits = limits
        self.spent = 0
        self.sizes = np.array(draft.sizes, dtype=np.float64)
        # Least time to make each storage again: 0 if its maker may only have to be moved.
        times_ns = [0 if n.index in draft.movable else n.time_ns for n in graph.nodes]
        self.least_ns = 1.0 + np.array(times_ns, dtype=np.float64)
        makers = [draft.view.maker(d.index) for d in graph.data]
        self.recompute = RecomputeCosts(draft.view, makers, limits.depth)
        # The node that makes each storage again, -1 if none does; as an array, too.
        self.maker = [-1 if i is None else i for i in makers]
        self.makers = np.array(self.maker)

    def prune(self) -> None:
        """Leave out re-executions that the budget does not need, and commit."""
        self.spent += self.limits.leaving_out * len(self.draft.reruns())
        prune(self.draft, self.budget_bytes, self.deadline)
        self.draft.settle()

    def exchange_any(self, temperature_ns: float) -> None:
        """Make room for what stays alive instead. The draft is put back if no room is found, or if
        it would be slower by more than a random number of mean `temperature_ns`."""
        position = self.random.choice(self.draft.reruns())
        limit_ns = self.draft.time_ns + self.random.expovariate(1.0) * temperature_ns
        node = self.draft.nodes[position]
        self.draft.leave_out(position)
        if self.makes_room(limit_ns, node):
            self.prune()
        else:
            self.draft.undo(0)

    def makes_room(self, limit_ns: float, never: int | None = None) -> bool:
        """Until the draft is within the budget. False, with the draft as it was, if it would take
        `limit_ns` or longer, nothing helps, or time is up. never: a node that does not run
        again."""
        draft = self.draft
        rule = _ExchangeRule(self.random.choice(self.limits.distance_powers), never)
        before = draft.changes
        position, live_bytes = self._worst()
        while live_bytes > self.budget_bytes and draft.time_ns < limit_ns:
            has_enough = draft.changes - before == self.limits.insertions
            if has_enough or time.process_time() > self.deadline:
                break
            gaps = draft.around(position)
            if not (self._hastens(position, gaps, rule) or self._makes_again(position, gaps, rule)):
                break
            position, live_bytes = self._worst()
        if live_bytes <= self.budget_bytes and draft.time_ns < limit_ns:
            return True
        draft.undo(before)
        return False

    def _hastens(self, position: int, gaps: Spans, rule: _ExchangeRule) -> bool:
        """The one that frees most bytes; False if none frees any. gaps: what is alive and unused at
        `position`."""
        draft = self.draft
        if not draft.movable or position <= draft.boundary:
            return False
        first, most_bytes = EMPTY, 0.0
        reads = sorted(set(gaps[1].tolist()))
        self.spent += len(reads)
        for read in reads:
            node = draft.nodes[read]
            if rule.hastened.get(node, 0) >= self.limits.repeats:
                continue
            noise = self._noise()
            if node in draft.movable:
                freed_bytes = draft.hastened_bytes(read, position) * noise
                if freed_bytes > most_bytes:
                    first, most_bytes = read, freed_bytes
        if first == EMPTY:
            return False
        rule.hastened[draft.nodes[first]] += 1
        draft.hasten(first, position)
        return True

    def _makes_again(self, position: int, gaps: Spans, rule: _ExchangeRule) -> bool:
        """The cheapest one, right before its next read; False if none can be made again."""
        draft = self.draft
        cheapest = self._cheapest(position, gaps, rule)
        if cheapest is None:
            return False
        d, next_read = cheapest
        rule.made[d, draft.nodes[next_read]] += 1
        draft.insert(draft.slot_before(next_read), self.maker[d])
        draft.delay(self.maker[d])
        return True

    def _noise(self) -> float:
        return 1.0 + self.limits.noise * self.random.random()

    def _worst(self) -> tuple[int, int]:
        self.spent += 1 + self.draft.end // self.limits.positions
        return self.draft.worst()

    def _cheapest(self, position: int, gaps: Spans, rule: _ExchangeRule) -> tuple[int, int] | None:
        """(Storage, position of its next read) with the least time to make it again over its bytes
        and a power of the distance, with some noise. None if none can be made again."""
        draft = self.draft
        self.spent += self.limits.inserting
        data, next_read = gaps
        makers = self.makers[data]
        weights = self.sizes[data] * (next_read - position) ** rule.distance_power
        least_scores = self.least_ns[makers] / weights
        if rule.never is not None:
            least_scores[makers == rule.never] = NEVER
        columns = least_scores.tolist(), data.tolist(), next_read.tolist(), weights.tolist()
        best, best_score = None, NEVER
        for k in least_scores.argsort(kind="stable").tolist():
            # Lists, not arrays: numpy would make an object of each element.
            least_score, d, read, weight = (column[k] for column in columns)
            # All others cost more even without what must be recomputed for them.
            if least_score >= best_score:
                break
            if rule.made.get((d, draft.nodes[read]), 0) >= self.limits.repeats:
                continue
            maker, less_ns = self.maker[d], 0
            if maker in draft.movable and draft.is_delayed(maker, read):
                less_ns = self.graph.nodes[maker].time_ns
            cost_ns = self._cost_ns(d, read, best_score * weight + less_ns) - less_ns
            score = cost_ns / weight * self._noise()
            if score < best_score:
                best, best_score = (d, read), score
        return best

    def _cost_ns(self, d: int, position: int, limit_ns: float) -> float:
        """NEVER if that is limit_ns or more, or takes too long a chain."""
        known: dict[int, float] = {}
        try:
            return self.recompute.time_ns(d, self.draft.outliving(position), known, limit_ns)
        except TooDeep:
            return NEVER
        finally:
            self.spent += 1 + len(known)
