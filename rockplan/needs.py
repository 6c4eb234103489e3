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

What is needed holds nothing in vain, and nothing has to be dropped: forwards, by states of what is
alive, each way to make room leads to a state of its own. Of 124 plans for small networks, that
search proved 100 in 64 s of CPU time, this one 122 in 4 s. The MLP of the examples, 53 operations,
roofline prices (100 GB/s, 2 Tflop/s), over one execution of every node: 292, 340, 395, 459 and 533
kB +142, +132, +58, +40 and +30 %, proven in 0.1 to 3 s.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace

from rockplan.graph import CDGraph
from rockplan.schedule import Schedule
from rockplan.windows import Mask, Step, View, bits, checked

LARGEST = 96
"""Nodes of a graph that is searched. Of random networks of up to 64 all but some were within
EFFORT, from 64 to 100 about half, at four budgets each; of larger ones few."""

FIRST, EFFORT, OF_PEAK = 25_000, 250_000, 50_000
"""States reached, in all: before anything else is tried, 0.3 s; when it is given up, about 3 s and
100 MB with 53 operations; and for any schedule within a budget."""

CHECKED = 256
"""States after which the clock is looked at."""


def is_searched(graph: CDGraph) -> bool:
    return len(graph.nodes) <= LARGEST


def within(graph: CDGraph, budget_bytes: int) -> Schedule | None:
    """Any schedule, None if there is none or the search is given up. Nothing takes time in it: of
    states that differ in it alone one is followed, nearest to the start first."""
    nodes = tuple(replace(node, time_ns=0) for node in graph.nodes)
    search = Search(replace(graph, nodes=nodes), budget_bytes)
    steps = search.steps_within(OF_PEAK, math.inf)
    return None if steps is None else checked(graph, steps, budget_bytes)


class Search:
    """Of one graph within one budget. proven_ns: of every schedule, as far as it went."""

    def __init__(self, graph: CDGraph, budget_bytes: int) -> None:
        self.graph, self.budget_bytes = graph, budget_bytes
        self.view = View(graph)
        self.once_ns = self.proven_ns = self.view.rest_ns[0]
        # Of states: position, what is needed there, state after, node that runs between the two;
        # by position and what is needed, the least time of re-executions from there on.
        self.states: list[tuple[int, Mask, int, Step]] = []
        self.least: dict[tuple[int, Mask], int] = {}
        self.followed: set[tuple[int, Mask]] = set()
        self.queue: list[tuple[int, int, int]] = []
        self._reach(len(self.view.times_ns), self.view.held, 0, -1, -1)

    def fastest(self, effort: int, *, deadline: float) -> Schedule | None:
        """None if there is none, or none is known when `effort` states are reached in all: then it
        goes on when it is asked for more. deadline: as of time.monotonic."""
        steps = self.steps_within(effort, deadline)
        return None if steps is None else checked(self.graph, steps, self.budget_bytes)

    def steps_within(self, effort: int, deadline: float) -> list[Step] | None:
        """Of the fastest schedule, from the start; else as above."""
        for popped in itertools.count():
            if not self.queue:
                return None
            spent_ns, position, number = self.queue[0]
            self.proven_ns = self.once_ns + spent_ns
            if position == 0:
                return list(self._steps(number))
            is_late = popped % CHECKED == 0 and time.monotonic() >= deadline
            if is_late or len(self.states) > effort:
                return None
            heapq.heappop(self.queue)
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
