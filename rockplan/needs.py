"""The fastest schedule of a small graph, by exact search from its end backwards.

takes: a priced CDGraph, a budget. returns: a schedule, or nothing; and what is proven of the time
of every schedule that executes every node for the first time in the order of the graph. guarantees:
the schedule is legal, within the budget as `simulate` finds it, leaves the caller's loss its room
(`View.room_bytes`), and none that does is faster; the same on every run unless the deadline
strikes: effort is counted.

A state is the next first execution and what is needed there: everything read later and not made
before that. A step takes back what ran last, a first execution or a re-execution: what it makes is
needed no more, what it reads is. Both must fit at once. Of states the one that takes least time
from there on is followed next (Dijkstra 1959); none is where something less would do as well.

What is needed holds nothing in vain, and nothing has to be dropped: forwards (`windows`), each way
to make room leads to a state of its own. The MLP of the examples, 53 operations, roofline prices
(100 GB/s, 2 Tflop/s), over one execution of every node: 292, 340, 395, 459 and 533 kB +142, +132,
+58, +40 and +30 %, proven in 0.1 to 2.6 s of CPU time. Exchanges had found these schedules in 14 to
3 s, 8 to 90 % above what programs of moments and forward search had proven.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator

from rockplan.graph import CDGraph
from rockplan.schedule import Schedule
from rockplan.windows import Mask, Step, View, bits, checked

LARGEST = 64
"""Nodes of a graph that is searched."""

EFFORT = 250_000
"""States reached: about 3 s, and 100 MB."""

CHECKED = 256
"""States after which the clock is looked at."""


def is_searched_backwards(graph: CDGraph) -> bool:
    return len(graph.nodes) <= LARGEST


def fastest(graph: CDGraph, budget_bytes: int, *, deadline: float) -> tuple[Schedule | None, int]:
    """The schedule, None if there is none or the search is given up; and the proven time. deadline:
    as of time.monotonic."""
    search = _Search(View(graph), budget_bytes, deadline)
    steps = search.run()
    return None if steps is None else checked(graph, steps, budget_bytes), search.floor_ns


class _Search:
    """floor_ns: proven of every schedule, once it has run."""

    def __init__(self, view: View, budget_bytes: int, deadline: float) -> None:
        self.view, self.budget_bytes, self.deadline = view, budget_bytes, deadline
        self.once_ns = self.floor_ns = view.rest_ns[0]
        # Of states: position, what is needed there, state after, node that runs between the two;
        # by position and what is needed, the least time of re-executions from there on.
        self.states: list[tuple[int, Mask, int, Step]] = []
        self.least: dict[tuple[int, Mask], int] = {}
        self.followed: set[tuple[int, Mask]] = set()
        self.queue: list[tuple[int, int, int]] = []

    def run(self) -> list[Step] | None:
        self._reach(len(self.view.times_ns), self.view.held, 0, -1, -1)
        for popped in itertools.count():
            if not self.queue:
                return None
            spent_ns, position, number = heapq.heappop(self.queue)
            is_late = popped % CHECKED == 0 and time.monotonic() >= self.deadline
            if is_late or len(self.states) > EFFORT:
                self.floor_ns = self.once_ns + spent_ns
                return None
            if position == 0:
                self.floor_ns = self.once_ns + spent_ns
                return list(self._steps(number))
            needed = self.states[number][1]
            if self.least[position, needed] == spent_ns and not self._is_dominated(
                position, needed
            ):
                self.followed.add((position, needed))
                self._follow(number, spent_ns)
        raise AssertionError

    def _steps(self, number: int) -> Iterator[Step]:
        while True:
            _, _, number, node = self.states[number]
            if node < 0:
                return
            yield node

    def _is_dominated(self, position: int, needed: Mask) -> bool:
        """Was it followed, or something that needs one storage less, at no more time?"""
        if (position, needed) in self.followed:
            return True
        return any((position, needed ^ 1 << k) in self.followed for k in bits(needed))

    def _reach(self, position: int, needed: Mask, spent_ns: int, after: int, node: Step) -> None:
        key = position, needed
        if spent_ns < self.least.get(key, spent_ns + 1):
            self.least[key] = spent_ns
            self.states.append((position, needed, after, node))
            heapq.heappush(self.queue, (spent_ns, position, len(self.states) - 1))

    def _follow(self, number: int, spent_ns: int) -> None:
        """All that may have run last."""
        view = self.view
        position, needed, _, _ = self.states[number]
        first = position - 1
        saved = view.saved[first] & needed
        makes = view.writes[first] | saved
        if not needed & view.gone[first] & ~makes:
            before = needed & ~makes | view.reads[first]
            if self._fits(first, before, needed, view.bytes_of(saved)):
                self._reach(first, before, spent_ns, number, first)
        tried: set[Step] = set()
        for k in bits(needed & ~view.held):
            i = view.maker[k]
            if 0 <= i < position and i not in tried:
                tried.add(i)
                before = needed & ~(view.writes[i] & ~view.held) | view.reads[i] | view.saved[i]
                if self._fits(i, before, needed, view.again_bytes(i, position)):
                    self._reach(position, before, spent_ns + view.times_ns[i], number, i)

    def _fits(self, node: Step, before: Mask, after: Mask, more_bytes: int) -> bool:
        """Do what is needed before the node and what it makes fit? In the storage of an operand
        that is needed no more, if need be, unless it makes another copy of something."""
        view = self.view
        over = view.bytes_of(before) + view.extra_bytes[node] + more_bytes - self.budget_bytes
        if over <= 0:
            return True
        if before & view.writes[node]:
            return False
        free = before & ~after
        return any(view.bytes_of(taken) >= over for taken in view.takes[node] if taken & free)
