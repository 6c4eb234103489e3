"""Improve a schedule by exchange: what one re-execution makes stays alive, others make room for it.

takes: a priced CDGraph, a legal schedule within a budget. returns: a schedule. guarantees: legal,
within the budget as `simulate` finds it, no slower; the same on every run: effort is counted, and
random numbers are drawn from fixed seeds.

A re-execution is left out (`draft`), which costs memory before it. While more is alive at some
moment than the budget allows, a storage that nothing uses there goes, and is made again directly
before its next read; what that reads stays alive until then, or goes in turn. Exchanges that gain
are kept, and by simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983) some that lose. What goes is
what takes least time to make again, with all that has to be made again for it, per byte and
distance to its next read, as in `eviction`.

Over one execution of every node, from the chain's and from an evicted schedule (roofline prices,
half of the effort): 2 layers of GPT-2 with fused attention at 35 % of keep-all's peak +38.4 ->
+27.0 and +39.1 -> +29.8 %, ResNet-18 at 54 % +14.1 -> +12.0 and +13.5 -> +11.3 %.

Where memory is shortest a search ends where only many exchanges at once lead on. Others then begin
hotter at the best schedule so far (`annealed_again`); short ones lead further in the same time than
long ones. Plans at the smallest budgets, over one execution of every node, without and with them
(`benchmarks.gap`): 2 layers of Llama +85.7 and +76.2 % (for four of six sequences of random numbers
that were tried), 2+2 layers of T5 +61.7 and +56.8, GPT-2 with fused attention +81.9 and +79.9,
written out +66.7 and +66.3, BERT +61.0 and +61.0, in twice the time.

With moves, first executions in the backward phase are no longer where the graph has them: one that
is made again before anything reads it runs later, and one that frees more than it makes runs sooner
than the moment where too much is alive. Neither takes time. Of the others moves alone did worse at
Llama's smallest budget (+83.0 %, after searches without them +75.7), so they come last.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search.local.editable_schedule import EMPTY, Draft
from rockplan.search.local.prune import prune
from rockplan.values.graph import CDGraph, movable
from rockplan.values.schedule import Schedule, with_frees

EFFORT, SQUEEZING = 600_000, 2_000_000
"""Work for one schedule, and for a smaller peak, in storages weighed: about a million in a second.
With a quarter of it for a smaller peak, 2+2 layers of T5 came to 35.1 to 37.1 MiB with five sets of
times, with all of it to 35.1 with each; two and a half times as much gained nothing there, and up
to 7 % on an encoder of 250 operations."""

LEAVING_OUT, INSERTING, POSITIONS = 40, 80, 500
"""In the time in which so many storages are weighed something is inserted, and in half of it it is
asked whether something can be left out; in that of one the memory at so many positions is looked
at. (Counted for a quarter, with twice the effort: 2+2 layers of T5 at the smallest budget +57.4 to
+56.6 % in 20 instead of 18 s, six other plans the same in 1.3 to 2.7 times the time.)"""

HOT, COLD = 0.1, 0.001
"""Temperatures at the start and at the end, of the time for re-executions."""

HOTTER = 0.4
"""At the start of a search from a schedule that another one has found."""

SEARCHES, GAIN = 8, 5e-4
"""In a row that do not gain this share of the iteration time, after which no other begins."""

POINT = 0.005
"""Of the iteration time: for each that might be gained one search may fail, and one besides. With
eight in any case ordinary budgets took 5 to 7 s more for a tenth or two of a percent; with half as
many 54 plans of nine models took up to 6 % less time, and one of them was 0.7 % slower."""

DISTANCE_POWERS = (0.0, 0.5, 1.0)
"""Of the distance to the next read, one drawn for each exchange."""

NOISE = 0.5
"""Scores are raised at random by up to this share."""

DEPTH = 30
"""Storages that must be made again for one another, beyond which none is weighed."""

PATIENCE = 30
"""Exchanges without a gain for each re-execution, after which a search ends: small graphs have been
seen from all sides by then, large ones seldom come so far."""

ATTEMPTS = 100
"""At a smaller peak in a row that fail, after which a search for it ends."""

STEP = 0.003
"""Of the peak, by which it has to get smaller."""

INSERTIONS = 1000
"""Made at most so that a schedule fits; on 200 layers of GPT-2 up to 300 take 3 to 9 s."""

AGAIN = 3
"""Insertions of the same storage for the same node in one search for room: more would have what it
needs take turns for ever."""

LONGEST = 4
"""Executions of everything, more than which no schedule with a smaller peak takes; and none takes
one more than that whose peak was smallest before."""

EXCHANGES = 5
"""Between two attempts at a smaller peak."""

NEVER = float("inf")


def annealed(
    graph: CDGraph,
    schedule: Schedule,
    budget_bytes: int,
    *,
    deadline: float,
    effort: int = EFFORT,
    hot: float = HOT,
    seed: int = 0,
    moves: bool = False,
) -> Schedule:
    """`schedule` or a faster one within `budget_bytes`; deadline: as of time.monotonic; hot:
    temperature at the start; seed: of the random numbers; moves: first executions come sooner and
    later, where that makes room."""
    if time.monotonic() >= deadline:
        return schedule
    draft = Draft(graph, *schedule.phases, movable(graph) if moves else frozenset())
    search = _Search(graph, budget_bytes, draft, deadline, seed)
    search.prune()
    best_ns, best = search.draft.time_ns, search.draft.orders
    overhead_ns = best_ns - graph.time_ns
    without_gain = 0
    while search.spent < effort and time.monotonic() < deadline:
        if without_gain >= PATIENCE * len(search.draft.reruns()):
            break
        search.exchange_any(overhead_ns * hot * (COLD / hot) ** (search.spent / effort))
        without_gain += 1
        if search.draft.time_ns < best_ns:
            best_ns, best, without_gain = search.draft.time_ns, search.draft.orders, 0
    found = with_frees(graph, *best)
    verify(graph, found)
    return found


def annealed_again(
    graph: CDGraph,
    schedule: Schedule,
    budget_bytes: int,
    *,
    enough_ns: int,
    deadline: float,
    effort: int = EFFORT,
    moves: bool = False,
) -> Schedule:
    """`schedule`, which a search has found, or a faster one that others find, each from the best so
    far; enough_ns: nothing faster than this is looked for."""
    best, best_ns, once_ns = schedule, simulate(graph, schedule).time_ns, graph.time_ns
    seed = without_gain = 0
    while time.monotonic() < deadline:
        hoped_ns = best_ns - enough_ns
        if hoped_ns <= 0 or without_gain > min(SEARCHES - 1, hoped_ns / (POINT * once_ns)):
            break
        seed, without_gain = seed + 1, without_gain + 1
        found = annealed(
            graph,
            best,
            budget_bytes,
            deadline=deadline,
            effort=effort,
            hot=HOTTER,
            seed=seed,
            moves=moves,
        )
        found_ns = simulate(graph, found).time_ns
        if found_ns < best_ns - GAIN * once_ns:
            without_gain = 0
        if found_ns < best_ns:
            best, best_ns = found, found_ns
    return best


def fitted(
    graph: CDGraph,
    forward: Sequence[int],
    backward: Sequence[int],
    budget_bytes: int,
    *,
    deadline: float = NEVER,
) -> Schedule | None:
    """The computations, legal but for the budget, with re-executions that make room; None if none
    are found before the deadline, as of time.monotonic."""
    search = _Search(graph, budget_bytes, Draft(graph, forward, backward), deadline)
    if not search.makes_room(LONGEST * graph.time_ns):
        return None
    search.prune()
    found = with_frees(graph, *search.draft.orders)
    verify(graph, found)
    return found


def squeezed(
    graph: CDGraph,
    schedule: Schedule,
    *,
    deadline: float = NEVER,
    effort: int = SQUEEZING,
    enough_bytes: int = 0,
) -> Schedule:
    """`schedule` or one whose peak is smaller, but not than what is enough; deadline: as of
    time.monotonic.

    Room is made for a smaller budget, whatever it costs; where none is found, some exchanges within
    the budget in hand lead elsewhere.
    """
    if time.monotonic() >= deadline:
        return schedule
    peak_bytes = simulate(graph, schedule).peak_bytes
    search = _Search(graph, peak_bytes, Draft(graph, *schedule.phases), deadline)
    best_bytes, best = search.budget_bytes, search.draft.orders
    failed = 0
    while search.spent < effort and best_bytes > enough_bytes and failed < ATTEMPTS:
        if time.monotonic() >= deadline:
            break
        search.budget_bytes = max(int(best_bytes * (1 - STEP)), enough_bytes)
        if search.makes_room(min(LONGEST * graph.time_ns, search.draft.time_ns + graph.time_ns)):
            search.prune()
            best_bytes, best, failed = search.draft.worst()[1], search.draft.orders, 0
            continue
        failed += 1
        search.budget_bytes = best_bytes
        for _ in range(EXCHANGES):
            if not search.draft.reruns():
                break
            search.exchange_any(HOT * (search.draft.time_ns - graph.time_ns))
    found = with_frees(graph, *best)
    verify(graph, found)
    return found


@dataclass(frozen=True, slots=True)
class _Rule:
    """Of one exchange. distance_power: of the scores; never: what was left out, which is not to
    run again for others; made: how often it was inserted, by storage and the node that reads it;
    hastened: how often a node was."""

    distance_power: float
    never: int | None
    made: Counter[tuple[int, int]] = field(default_factory=Counter)
    hastened: Counter[int] = field(default_factory=Counter)


class _Search:
    """spent: storages weighed. deadline: after which no room is made, and nothing left out, as of
    time.monotonic."""

    def __init__(
        self,
        graph: CDGraph,
        budget_bytes: int,
        draft: Draft,
        deadline: float = NEVER,
        seed: int = 0,
    ) -> None:
        self.graph = graph
        self.budget_bytes = budget_bytes
        self.draft = draft
        self.random = random.Random(seed)
        self.deadline = deadline
        self.spent = 0
        self.sizes = np.array([d.size_bytes for d in graph.data], dtype=np.float64)
        # What makes it again may only be moved.
        times_ns = [0 if n.index in draft.movable else n.time_ns for n in graph.nodes]
        self.least_ns = 1.0 + np.array(times_ns, dtype=np.float64)
        self.makers = np.array([draft.producer.get(d.index, -1) for d in graph.data])

    def prune(self) -> None:
        self.spent += LEAVING_OUT * len(self.draft.reruns())
        prune(self.draft, self.budget_bytes, self.deadline)
        self.draft.settle()

    def exchange_any(self, temperature_ns: float) -> None:
        """Leaves out a re-execution, if a schedule comes of it that is faster, or slower by what
        the temperature allows."""
        position = self.random.choice(self.draft.reruns())
        limit_ns = self.draft.time_ns + self.random.expovariate(1.0) * temperature_ns
        node = self.draft.nodes[position]
        self.draft.leave_out(position)
        if self.makes_room(limit_ns, node):
            self.prune()
        else:
            self.draft.undo(0)

    def makes_room(self, limit_ns: float, never: int | None = None) -> bool:
        """Inserts re-executions, none of the node `never`, until the budget is kept; False, and
        nothing is inserted, if the schedule would take `limit_ns`, nothing helps, or time is up."""
        draft = self.draft
        rule = _Rule(self.random.choice(DISTANCE_POWERS), never)
        before = draft.changes
        position, bytes_ = self._worst()
        while bytes_ > self.budget_bytes and draft.time_ns < limit_ns:
            if draft.changes - before == INSERTIONS or time.monotonic() > self.deadline:
                break
            if not (self._hastens(position, rule) or self._makes_again(position, rule)):
                break
            position, bytes_ = self._worst()
        if bytes_ <= self.budget_bytes and draft.time_ns < limit_ns:
            return True
        draft.undo(before)
        return False

    def _hastens(self, position: int, rule: _Rule) -> bool:
        """Moves what reads something for the last time to before `position`, if less is alive there
        then; False if nothing does."""
        draft = self.draft
        if not draft.movable or position <= draft.boundary:
            return False
        first, most_bytes = EMPTY, 0.0
        for read in np.unique(draft.around(position)[1]).tolist():
            self.spent += 1
            if rule.hastened[draft.nodes[read]] < AGAIN:
                bytes_ = draft.hastened_bytes(read, position) * self._noise()
                if bytes_ > most_bytes:
                    first, most_bytes = read, bytes_
        if first == EMPTY:
            return False
        rule.hastened[draft.nodes[first]] += 1
        draft.hasten(first, position)
        return True

    def _makes_again(self, position: int, rule: _Rule) -> bool:
        """Has what is cheapest go at `position`; False if nothing can."""
        draft = self.draft
        cheapest = self._cheapest(position, rule)
        if cheapest is None:
            return False
        d, next_read = cheapest
        rule.made[d, draft.nodes[next_read]] += 1
        draft.insert(draft.slot_before(next_read), draft.producer[d])
        draft.delay(draft.producer[d])
        return True

    def _noise(self) -> float:
        return 1.0 + NOISE * self.random.random()

    def _worst(self) -> tuple[int, int]:
        self.spent += 1 + self.draft.end // POSITIONS
        return self.draft.worst()

    def _cheapest(self, position: int, rule: _Rule) -> tuple[int, int] | None:
        """The storage that goes at `position`, and where it is read next."""
        draft = self.draft
        self.spent += INSERTING
        data, next_read = draft.around(position)
        makers = self.makers[data]
        weights = self.sizes[data] * (next_read - position) ** rule.distance_power
        at_least = self.least_ns[makers] / weights
        if rule.never is not None:
            at_least[makers == rule.never] = NEVER
        best, least = None, NEVER
        for k in np.argsort(at_least, kind="stable").tolist():
            # The others cost more already without what has to be made again for them.
            if at_least[k] >= least:
                break
            d, read = int(data[k]), int(next_read[k])
            if rule.made[d, draft.nodes[read]] >= AGAIN:
                continue
            maker = draft.producer[d]
            less_ns = self.graph.nodes[maker].time_ns if draft.is_delayed(maker, read) else 0
            limit_ns = least * weights[k] + less_ns
            cost_ns = self._cost_ns(d, read, {}, 0, limit_ns) - less_ns
            score = cost_ns / weights[k] * self._noise()
            if score < least:
                best, least = (d, read), score
        return best

    def _cost_ns(
        self, d: int, position: int, known: dict[int, float], depth: int, limit_ns: float
    ) -> float:
        """Time to make `d` again before `position`, with what has to be made again for it; NEVER if
        it is not less than the limit."""
        draft = self.draft
        self.spent += 1
        maker = draft.producer.get(d)
        if maker is None or maker not in draft.may_run_again or depth > DEPTH:
            return NEVER
        cost_ns = 1.0 + self.graph.nodes[maker].time_ns
        for r in draft.reads[maker]:
            if cost_ns >= limit_ns:
                return NEVER
            if r not in known:
                known[r] = 0.0
                if not draft.outlives(r, position):
                    known[r] = self._cost_ns(r, position, known, depth + 1, limit_ns - cost_ns)
            cost_ns += known[r]
        return cost_ns if cost_ns < limit_ns else NEVER
