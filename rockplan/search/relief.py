"""Lower the peak of a schedule: what only waits where memory is highest goes, and is made again.

takes: a priced CDGraph, a legal schedule. returns: a schedule. guarantees: legal, with no larger
peak as `simulate` finds it; the same on every run unless the deadline strikes: effort is counted.

Steps at which more is alive than is asked for are gone through, the last one first. At each a
storage is let go that nothing uses there, and made again before its next read, where least else is
alive. What makes it again is found by the search backwards of `needs`: from what is needed where it
has to be there again, to no more than what the schedule holds at a step in between without it.
Where that takes more room than there is, another storage is let go there first, in the same way.

Exchanges (`anneal`) insert one execution at a time, each directly before what reads it, and end
where several at once lead on: to make a projection again takes the softmax before it, sixty
operations, and in between nothing else may wait. After both, least peaks are smaller by (roofline
prices, docs/experiments.md) 2.9 % on 2+2 layers of T5, 5.6 % on those of an encoder and decoder
without its bias, 4.7 % on 3+3 layers of `nn.Transformer`, 0.8 % on 4 layers of an encoder, and the
same on BERT, 2 layers of GPT-2, Llama and `nn.Transformer` of 2+2 layers.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rockplan.oracles.simulate import simulate, timeline
from rockplan.search.needs import Search, State
from rockplan.search.windows import (
    Mask,
    Step,
    View,
    bits,
    checked,
    needed_before,
    schedule_of,
    steps_of,
)
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Compute, Schedule

STEPS = (0.01, 0.003)
"""Of the peak, by which it has to get smaller."""

EFFORT, OF_ONE = 100_000, 2_000
"""States reached for one smaller peak, and to make one storage again: three to five thousand in a
second, on T5."""

HOPELESS = 30
"""Of these, such as seem to have no room: once so many were followed a search is given up. With
none 3+3 layers of `nn.Transformer` gain nothing, without an end 2+2 layers of T5 take half as long
again."""

PLACES = 8
"""Steps at which a storage may be made again: where least is alive."""

DEPTH = 300
"""Storages made again for one another, beyond which none is."""

NEVER = math.inf


def relieved(graph: CDGraph, schedule: Schedule, *, deadline: float = NEVER) -> Schedule:
    """`schedule` or one with a smaller peak; deadline: as of time.monotonic."""
    view, found = View(graph), schedule
    for step in STEPS:
        while time.monotonic() < deadline:
            asked_bytes = int(simulate(graph, found).peak_bytes * (1 - step))
            lower = _Relief(graph, view, asked_bytes, deadline).within(found)
            if lower is None:
                break
            found = lower
    return found


@dataclass(frozen=True, slots=True)
class _Again:
    """A storage, of so many bytes, is to be made again before a step, for which `over_bytes` too
    much would be alive, as far as that is known beforehand."""

    storage: Mask
    bytes: int
    step: int
    cost_ns: float
    over_bytes: float


@dataclass
class _Relief:
    """Of one graph for one budget. left: states that may be reached still."""

    graph: CDGraph
    view: View
    budget_bytes: int
    deadline: float
    left: int = EFFORT

    def within(self, schedule: Schedule) -> Schedule | None:
        steps = steps_of(self.graph, schedule)
        while True:
            lighter = schedule_of(self.graph, steps)
            over = _last_over(self.graph, lighter, self.budget_bytes)
            if over is None:
                return checked(self.graph, steps, self.budget_bytes)
            found = self._lightened(steps, *over, is_first=True)
            if found is None:
                return None
            steps = found

    def _lightened(
        self, steps: list[Step], at: int, over_bytes: float, *, is_first: bool
    ) -> list[Step] | None:
        """The steps with something let go across the step `at`, where so much is too much.
        is_first: where there is no room to make that again, something else may go there."""
        held = _Held(self.view, steps)
        possible = [a for a in held.makeable(at, self.budget_bytes) if a.cost_ns < NEVER]
        if sum(a.bytes for a in possible) < over_bytes:
            return None
        possible.sort(key=lambda a: (a.bytes < over_bytes, a.over_bytes > 0, a.cost_ns, a.storage))
        for again in possible:
            if self.left <= 0 or time.monotonic() >= self.deadline:
                return None
            there = held
            if again.over_bytes > 0:
                if not is_first or again.bytes < over_bytes:
                    continue
                # Up to that step nothing changes.
                lighter = self._lightened(steps, again.step, again.over_bytes, is_first=False)
                if lighter is None:
                    continue
                there = _Held(self.view, lighter)
            search = _Remaking(self.graph, self.budget_bytes, there, at, again)
            found = search.run(min(OF_ONE, self.left))
            self.left -= len(search.states)
            if found is not None:
                since, between = found
                return [*there.steps[:since], *between, *there.steps[again.step :]]
        return None


def _last_over(graph: CDGraph, schedule: Schedule, budget_bytes: int) -> tuple[int, int] | None:
    """The last step at which more is alive, and how much more."""
    found, step = None, -1
    for position, (event, memory) in enumerate(
        zip(schedule.events, timeline(graph, schedule), strict=True)
    ):
        step += isinstance(event, Compute) + (position == schedule.forward_length)
        if memory.during_bytes > budget_bytes:
            found = step, memory.during_bytes - budget_bytes
    return found


@dataclass
class _Held:
    """What steps hold: needed before each of them and at the end; positions: the next first
    execution there."""

    view: View
    steps: Sequence[Step]
    needed: list[Mask] = field(init=False)
    positions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.needed = needed_before(self.view, self.steps)
        done = itertools.accumulate(self.steps, lambda p, i: max(p, i + 1), initial=0)
        self.positions = list(done)

    def makeable(self, at: int, budget_bytes: int) -> Iterator[_Again]:
        """All that waits across the step `at`, and where it is best made again."""
        view, needed = self.view, self.needed
        waits = needed[at] & needed[at + 1] & ~view.reads[self.steps[at]] & ~view.held
        waits = sum(1 << k for k in bits(waits) if view.maker[k] >= 0)
        for step in range(at + 1, len(self.steps)):
            read = waits & view.reads[self.steps[step]]
            waits &= ~read
            for k in bits(read):
                places = heapq.nsmallest(
                    PLACES, range(step, at, -1), key=lambda j: view.bytes_of(needed[j])
                )
                found = [self._again(k, j, budget_bytes) for j in {step, *places}]
                yield min(found, key=lambda a: (max(a.over_bytes, 0), a.cost_ns, -a.step))
            if not waits:
                return

    def _again(self, k: int, step: int, budget_bytes: int) -> _Again:
        making = self.making(1 << k, step)
        position, there = self.positions[step], self.needed[step] & ~(1 << k)
        over_bytes = self.view.bytes_of(there) + making.peak_bytes(k, position) - budget_bytes
        cost_ns = making.cost_ns(1 << k, position)
        return _Again(1 << k, self.view.sizes[k], step, cost_ns, over_bytes)

    def making(self, storage: Mask, step: int) -> _Making:
        # States of generators may be saved where they are drawn from, at next to no cost.
        return _Making(self.view, self.needed[step] & ~storage | self.view.states)


@dataclass
class _Making:
    """What it takes to make storages of `there`, and that of the first executions before a
    position."""

    view: View
    there: Mask
    peaks: dict[tuple[int, int], float] = field(default_factory=dict)
    costs: dict[tuple[Mask, int], float] = field(default_factory=dict)

    def missing(self, needed: Mask, position: int) -> Mask:
        return needed & ~(self.there & self.view.made[position])

    def cost_ns(self, needed: Mask, position: int) -> float:
        """Of everything that has to run, once; NEVER if something cannot."""
        missing = self.missing(needed, position)
        key = missing, position
        if key not in self.costs:
            self.costs[key] = self._cost_ns(missing, position)
        return self.costs[key]

    def _cost_ns(self, missing: Mask, position: int) -> float:
        view = self.view
        maker, inputs, writes, times_ns = view.maker, view.inputs, view.writes, view.times_ns
        made = self.there & view.made[position]
        cost_ns = 0
        while missing:
            i = maker[(missing & -missing).bit_length() - 1]
            if not 0 <= i < position:
                return NEVER
            cost_ns += 1 + times_ns[i]
            made |= writes[i]
            missing = (missing | inputs[i]) & ~made
        return cost_ns

    def peak_bytes(self, k: int, position: int, depth: int = 0) -> float:
        """Beside what is there, if what two others need is made twice (Sethi and Ullman 1970);
        NEVER if it cannot be made."""
        view, i = self.view, self.view.maker[k]
        if not 0 <= i < position or depth > DEPTH:
            return NEVER
        key = k, position
        if key not in self.peaks:
            missing = self.missing(view.inputs[i], position)
            taken = max((view.bytes_of(t) for t in view.takes[i] if t & missing), default=0)
            most = view.bytes_of(missing) + view.extra_bytes[i] - taken
            self.peaks[key] = max(most, self.peak_of_all(missing, position, depth + 1))
        return self.peaks[key]

    def peak_of_all(self, missing: Mask, position: int, depth: int = 0) -> float:
        """One after the other, what takes most beyond its own size first."""
        sizes = self.view.sizes
        peaks = [(self.peak_bytes(k, position, depth), sizes[k]) for k in bits(missing)]
        peaks.sort(key=lambda found: found[1] - found[0])
        most: float = 0
        held_bytes = 0
        for peak_bytes, size in peaks:
            most = max(most, held_bytes + peak_bytes)
            held_bytes += size
        return most


class _Remaking(Search):
    """Backwards from a step at which a storage has to be there again, to one after the step `at`
    that holds what is needed without it. First what seems to have room, and takes least to make."""

    def __init__(
        self, graph: CDGraph, budget_bytes: int, held: _Held, at: int, again: _Again
    ) -> None:
        self.held, self.again = held, again
        self.making = held.making(again.storage, again.step)
        self.since: dict[int, list[int]] = {}
        for step in range(again.step, at, -1):
            self.since.setdefault(held.positions[step], []).append(step)
        needed = held.needed[again.step]
        super().__init__(graph, budget_bytes, held.view, held.positions[again.step], needed)

    def run(self, effort: int) -> tuple[int, list[Step]] | None:
        """The step before which others follow, and these; None if none are found."""
        hopeless = 0
        while self.queue and len(self.states) <= effort:
            (is_over, *_), number = heapq.heappop(self.queue)
            hopeless += bool(is_over)
            if hopeless > HOPELESS:
                return None
            state = self.states[number]
            for step in self.since[state.position]:
                without = self.held.needed[step] & ~self.again.storage | self.view.states
                if not state.needed & ~without:
                    return step, list(self._steps(number))
            if not self._is_dominated(state):
                self._take_back_first(number)
                self._take_back_again(number)
        return None

    def _reach(self, state: State) -> None:
        if state.position in self.since:
            super()._reach(state)

    def _queued(self, number: int) -> tuple[float, ...]:
        position, needed, *_ = self.states[number]
        making = self.making
        missing = making.missing(needed, position)
        cost_ns = making.cost_ns(missing, position)
        there_bytes = self.view.bytes_of(needed & ~missing)
        peak_bytes = making.peak_of_all(missing, position) if cost_ns < NEVER else NEVER
        is_over = there_bytes + peak_bytes > self.budget_bytes
        return is_over, cost_ns, self.states[number].spent_ns, -number
