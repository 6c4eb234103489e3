"""Improve a schedule by exact search: windows of first executions, with all else as it is.

takes: a priced CDGraph, a legal schedule within a budget. returns: a schedule. guarantees: legal,
within the budget as `simulate` finds it, no slower; the same on every run unless the deadline
strikes: effort is counted.

A state is the next first execution and what is alive. From state to state a node runs, for the
first time or again, and what has no room beside it is dropped, in every way that drops nothing too
much: what may be dropped later need not be dropped now. The search is A* (Hart, Nilsson, Raphael
1968), from what is alive where the window begins to what the schedule reads after it; the estimate
is what would have to run again if memory were free from now on. A state is not followed where one
more storage is alive at no more time.

Nodes run again only where what they make is missing for what is read later: this may be too late,
but takes a fifth of the effort. Programs of moments say little where hardly anything fits, since a
few storages in place of many are few states, but as many columns as ever, which may all be halves.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.graph import CDGraph, DataKind, may_run_again, producers
from rockplan.values.schedule import Schedule, with_frees

SIZES, STEPS = (8, 12, 16, 24, 32), 3
"""First executions in a window; the next one of a size begins this part of it later."""

EFFORT, OF_ONE = 4_000_000, 350_000
"""Re-executions and ways to make room that are weighed for one schedule, and in one window: about a
million and a half in a second."""

OF_STATE = 10
"""As many for each state: they take memory, half a kilobyte each."""

HOPED = 0.1
"""Of the iteration time: where less may be gained, as much less effort is made in windows."""

CHECKED = 256
"""States after which the clock is looked at."""

KNOWN = 1 << 16
"""Sets of storages whose bytes are not counted again."""

T = TypeVar("T")

Mask = int
"""A set of storages, each a bit."""

Step = int
"""A node that runs; between the phases one that stands for the turn from one to the other, which
reads the outputs and makes the incoming gradients. So backward nodes have the next number."""


def searched(
    graph: CDGraph, schedule: Schedule, budget_bytes: int, *, enough_ns: int, deadline: float
) -> Schedule:
    """`schedule`, which is within the budget, or a faster one. enough_ns: nothing faster than this
    is looked for; deadline: as of time.monotonic."""
    hoped_ns = simulate(graph, schedule).time_ns - enough_ns
    if hoped_ns <= 0:
        return schedule
    effort = int(EFFORT * min(hoped_ns / (HOPED * graph.time_ns), 1.0))
    view, steps = View(graph), steps_of(graph, schedule)
    given_up: list[tuple[int, int]] = []
    for first, stop in _windows(len(view.times_ns)):
        if effort <= 0 or time.monotonic() >= deadline:
            break
        # What was too much for a window is too much for one around it, if no more is weighed.
        if any(first <= a and b <= stop for a, b in given_up):
            continue
        window = _window(view, steps, first, stop)
        if window.time_ns == view.first_ns(first, stop):
            continue
        limit = min(effort, OF_ONE)
        search = _Search(view, window, budget_bytes, limit, deadline)
        found = search.run()
        effort -= search.effort
        if found is not None:
            steps[window.begin : window.end] = found
        elif search.is_given_up:
            given_up.append((first, stop))
    return checked(graph, steps, budget_bytes)


def checked(graph: CDGraph, steps: list[Step], budget_bytes: int) -> Schedule:
    """The schedule that runs the steps, found by a search, which is wrong if it is not legal."""
    found = schedule_of(graph, steps)
    verify(graph, found)
    assert simulate(graph, found).peak_bytes <= budget_bytes
    return found


def steps_of(graph: CDGraph, schedule: Schedule) -> list[Step]:
    forward, backward = schedule.phases
    turn = len(graph.forward)
    return [*forward, turn, *(i if i < turn else i + 1 for i in backward)]


def schedule_of(graph: CDGraph, steps: list[Step]) -> Schedule:
    turn = len(graph.forward)
    forward_length = steps.index(turn)
    backward = (i if i < turn else i - 1 for i in steps[forward_length + 1 :])
    return with_frees(graph, steps[:forward_length], tuple(backward))


def _windows(n: int) -> Iterator[tuple[int, int]]:
    """Of n first executions, short ones first, which are soon searched."""
    for size in SIZES:
        if size < n:
            step = size // STEPS
            for first in range(0, n - size + step, step):
                yield first, min(first + size, n)


class View:
    """What all windows of a graph have in common, by step. Storages that are not resident are bits,
    larger ones first; so is the generator's state before a random node, which its first execution
    may save and each further one reads. maker: of each bit, -1 where nothing makes it again; takes:
    storages in which a step may write what it makes; gone: what must not be alive when it runs;
    made: by the first executions before each; makes, inputs: what a step that runs again makes, not
    needed before it, and what it needs; states: all of generators; rest_ns: of the first executions
    from each on; room_bytes: what the last forward node needs beside its result, which is the
    caller's loss, and is needed as well after whatever runs again between that node and the
    turn."""

    def __init__(self, graph: CDGraph) -> None:
        turn = self.turn = len(graph.forward)
        self.room_bytes = graph.nodes[turn - 1].workspace_bytes if turn else 0
        again = may_run_again(graph)
        ours = [(d.size_bytes, d.index) for d in graph.data if not d.kind.resident]
        drawn = [(graph.rng_state_bytes, ~i) for i in again if graph.nodes[i].random]
        ordered = sorted((*ours, *drawn), key=lambda found: (-found[0], found[1]))
        bit = {index: 1 << k for k, (_, index) in enumerate(ordered)}
        producer = producers(graph)

        def mask(indices: Iterable[int]) -> Mask:
            return sum({bit[d] for d in indices if d in bit})

        def by_step(of_nodes: list[T], of_turn: T) -> list[T]:
            return [*of_nodes[:turn], of_turn, *of_nodes[turn:]]

        def step(i: int) -> Step:
            return i if i < turn else i + 1

        nodes = graph.nodes
        self.sizes = [size for size, _ in ordered]
        # Counted again and again.
        self.bytes_of = functools.lru_cache(KNOWN)(self._bytes_of)
        self.maker = [step(i) if (i := producer.get(d, -1)) in again else -1 for _, d in ordered]
        self.again = [step(i) for i in sorted(again)]
        self.held = mask(graph.held)
        self.rng_state_bytes = graph.rng_state_bytes
        tangents = mask(d.index for d in graph.data if d.kind is DataKind.TANGENT)
        self.times_ns = by_step([n.time_ns for n in nodes], 0)
        self.reads = by_step([mask(n.reads) for n in nodes], mask(graph.outputs))
        self.writes = by_step([mask(n.writes) for n in nodes], tangents)
        self.saved = by_step([bit.get(~n.index, 0) for n in nodes], 0)
        self.makes = [writes & ~self.held for writes in self.writes]
        self.inputs = [reads | saved for reads, saved in zip(self.reads, self.saved, strict=True)]
        self.states = sum({state for state in self.saved if state})
        self.gone = by_step([0 for _ in nodes], mask(graph.dropped))
        made_bytes = [self.bytes_of(writes) for writes in self.writes]
        workspace_bytes = by_step([n.workspace_bytes for n in nodes], 0)
        self.extra_bytes = [a + b for a, b in zip(made_bytes, workspace_bytes, strict=True)]
        self.takes = by_step(
            [
                [bit[d] for d in n.takes if self.bytes_of(bit[d]) == made_bytes[step(n.index)]]
                for n in nodes
            ],
            [],
        )
        self.made = [0]
        for writes, saved in zip(self.writes, self.saved, strict=True):
            self.made.append(self.made[-1] | writes | saved)
        times = itertools.accumulate(reversed(self.times_ns), initial=0)
        self.rest_ns = list(times)[::-1]

    def _bytes_of(self, mask: Mask) -> int:
        return sum(self.sizes[k] for k in bits(mask))

    def again_bytes(self, node: Step, position: int) -> int:
        """What `node` needs more than the first time when it runs again before `position`."""
        state_bytes = self.rng_state_bytes if self.saved[node] else 0
        return state_bytes + (self.room_bytes if position == self.turn else 0)

    def first_ns(self, first: int, stop: int) -> int:
        """Of first executions from `first` to before `stop`."""
        return self.rest_ns[first] - self.rest_ns[stop]


def bits(mask: Mask) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(frozen=True, slots=True)
class _Window:
    """First executions from `first` to before `stop`: steps from `begin` to before `end`, which
    take time_ns. alive, wanted: what is used later, where it begins and where it ends."""

    first: int
    stop: int
    begin: int
    end: int
    alive: Mask
    wanted: Mask
    time_ns: int


def _window(view: View, steps: list[Step], first: int, stop: int) -> _Window:
    begin = steps.index(first - 1) + 1 if first else 0
    end = steps.index(stop - 1) + 1
    needed = needed_before(view, steps, begin)
    time_ns = sum(view.times_ns[i] for i in steps[begin:end])
    return _Window(first, stop, begin, end, needed[0], needed[end - begin], time_ns)


def needed_before(view: View, steps: Sequence[Step], begin: int = 0) -> list[Mask]:
    """What is used later, before each of the steps from `begin` on and at the end."""
    place = {i: k for k, i in reversed(list(enumerate(steps)))}
    needed = view.held
    found = [needed]
    for k in range(len(steps) - 1, begin - 1, -1):
        i = steps[k]
        if place[i] == k:
            needed &= ~(view.writes[i] | view.saved[i])
        else:
            needed = needed & ~view.makes[i] | view.saved[i]
        needed |= view.reads[i]
        found.append(needed)
    return found[::-1]


class _Again(NamedTuple):
    """What has to run again: its time; all that is read later or to run it; what it makes."""

    time_ns: int
    reads: Mask
    makes: Mask


class _Room(NamedTuple):
    """What is wanted when a node runs: position after it, what is alive before, what is alive
    after it besides (makes) and no more (gone), time within which the rest has to run again."""

    position: int
    alive: Mask
    makes: Mask
    gone: Mask
    limit_ns: int


class _Search:
    """Of one window. effort: what was weighed."""

    def __init__(
        self, view: View, window: _Window, budget_bytes: int, effort: int, deadline: float
    ) -> None:
        self.view, self.window = view, window
        self.budget_bytes, self.limit, self.deadline = budget_bytes, effort, deadline
        self.effort = 0
        first, stop = window.first, window.stop
        # What is read from each first execution on.
        self.later = {stop: window.wanted}
        for p in range(stop - 1, first - 1, -1):
            self.later[p] = self.later[p + 1] | view.reads[p]
        useful = self.later[first]
        for i in reversed(view.again):
            if i < stop and view.writes[i] & useful:
                useful |= view.reads[i] | view.saved[i]
        self.useful = useful
        self.candidates = [i for i in view.again if i < stop and view.writes[i] & useful]
        # Of states: position, alive, time, state before, node that ran; by position and alive,
        # the least time, and that with which they were followed.
        self.states: list[tuple[int, Mask, int, int, int]] = []
        self.least: dict[tuple[int, Mask], int] = {}
        self.followed: dict[tuple[int, Mask], int] = {}
        self.queue: list[tuple[int, int, int]] = []

    def run(self) -> list[Step] | None:
        """The fastest way, None if none is faster than the window's or none was found in time."""
        window = self.window
        again = self._again(window.first, window.alive)
        if again is not None:
            self._reach(window.first, window.alive, again, 0, -1, -1)
        for popped in itertools.count():
            is_late = popped % CHECKED == 0 and time.monotonic() >= self.deadline
            if is_late or self.is_given_up or not self.queue:
                return None
            _, _, number = heapq.heappop(self.queue)
            position, alive, spent_ns, *_ = self.states[number]
            if position == window.stop and not window.wanted & ~alive:
                return self._steps(number)
            if self.least[position, alive] == spent_ns and not self._is_dominated(
                position, alive, spent_ns
            ):
                self.followed[position, alive] = spent_ns
                self._follow(number)
        raise AssertionError

    @property
    def is_given_up(self) -> bool:
        return self.effort > self.limit

    def _steps(self, number: int) -> list[Step]:
        steps: list[Step] = []
        while True:
            _, _, _, before, node = self.states[number]
            if before < 0:
                return steps[::-1]
            steps.append(node)
            number = before

    def _is_dominated(self, position: int, alive: Mask, spent_ns: int) -> bool:
        if self.followed.get((position, alive), spent_ns + 1) <= spent_ns:
            return True
        missing = self.useful & ~alive
        while missing:
            low = missing & -missing
            if self.followed.get((position, alive | low), spent_ns + 1) <= spent_ns:
                return True
            missing ^= low
        return False

    def _again(self, position: int, alive: Mask) -> _Again | None:
        """What has to run again at least; None if something cannot."""
        later = self.later[position] & self.view.made[position]
        return self._more(_Again(0, later, 0), alive, later & ~alive)

    def _more(self, again: _Again, alive: Mask, missing: Mask) -> _Again | None:
        """`again` and what makes the storages of `missing`."""
        self.effort += 1
        view = self.view
        time_ns, reads, makes = again
        missing &= ~makes
        while missing:
            i = view.maker[(missing & -missing).bit_length() - 1]
            if i < 0 or view.saved[i] & ~alive:
                return None
            self.effort += 1
            time_ns += view.times_ns[i]
            reads |= view.reads[i] | view.saved[i]
            makes |= view.writes[i]
            missing = (missing | view.reads[i]) & ~(alive | makes)
        return _Again(time_ns, reads, makes)

    def _reach(
        self, position: int, alive: Mask, again: _Again, spent_ns: int, before: int, node: int
    ) -> None:
        alive &= self.useful
        found_ns = spent_ns + again.time_ns + self.view.first_ns(position, self.window.stop)
        key = position, alive
        if found_ns < self.window.time_ns and spent_ns < self.least.get(key, spent_ns + 1):
            self.effort += OF_STATE
            self.least[key] = spent_ns
            self.states.append((position, alive, spent_ns, before, node))
            heapq.heappush(self.queue, (found_ns, -position, len(self.states) - 1))

    def _follow(self, number: int) -> None:
        """All that may run next."""
        view = self.view
        position, alive, _, _, _ = self.states[number]
        absent = ~alive
        if position < self.window.stop and not view.reads[position] & absent:
            saved = view.saved[position] & self.useful
            for state in {0, saved}:
                self._run(number, position, state, 0)
        again = self._again(position, alive)
        wanted = again.makes if again is not None else 0
        for i in self.candidates:
            if i >= position:
                break
            if view.writes[i] & wanted & absent and not (view.reads[i] | view.saved[i]) & absent:
                self._run(number, i, 0, view.again_bytes(i, position))

    def _run(self, number: int, node: Step, state: Mask, more_bytes: int) -> None:
        """In every way to make room for it; state: of the generator, to be saved."""
        view = self.view
        position, alive, spent_ns, _, _ = self.states[number]
        after = position + (node == position)
        spent_ns += view.times_ns[node]
        limit_ns = self.window.time_ns - spent_ns - view.first_ns(after, self.window.stop)
        makes = view.writes[node] | state
        # A copy of what is alive is made in its place, but not of what is held.
        there = alive & ~(makes & ~view.held) & ~view.gone[node]
        stays = view.reads[node] | view.saved[node] | view.held
        needed_bytes = view.extra_bytes[node] + view.bytes_of(state) + more_bytes
        over = view.bytes_of(there) + needed_bytes - self.budget_bytes
        for taken in (0,) if alive & makes else (0, *view.takes[node]):
            if taken & ~there or taken & view.held:
                continue
            room = _Room(after, there, makes, taken, limit_ns)
            for left, again in self._with_room(room, stays, over - view.bytes_of(taken)):
                self._reach(after, (left | makes) & ~taken, again, spent_ns, number, node)

    def _with_room(self, room: _Room, stays: Mask, over: int) -> Iterator[tuple[Mask, _Again]]:
        """What is alive without a set of storages that has `over` bytes, and has not without any of
        them; and what has to run again then, where that is not too much."""
        again = self._again(room.position, (room.alive | room.makes) & ~room.gone)
        if again is not None and again.time_ns < room.limit_ns:
            left = room.alive & ~stays
            yield from self._dropping(room, room.alive, left, self.view.bytes_of(left), over, again)

    def _dropping(
        self, room: _Room, alive: Mask, left: Mask, left_bytes: int, over: int, again: _Again
    ) -> Iterator[tuple[Mask, _Again]]:
        """left: what may be dropped, left_bytes in all."""
        if over <= 0:
            yield alive, again
            return
        while left_bytes >= over and not self.is_given_up:
            self.effort += 1
            low = left & -left
            left ^= low
            size = self.view.sizes[low.bit_length() - 1]
            left_bytes -= size
            rest = alive ^ low
            more: _Again | None = again
            if low & again.reads & ~(room.makes | room.gone):
                more = self._more(again, (rest | room.makes) & ~room.gone, low)
            if more is not None and more.time_ns < room.limit_ns:
                yield from self._dropping(room, rest, left, left_bytes, over - size, more)
