"""The fastest schedule of a graph, or the least peak, by exact search from its end backwards.

takes: a priced CDGraph, a budget. returns: a schedule, or nothing; and what is proven of the time
of every schedule that executes every node for the first time in the order of the graph. guarantees:
the schedule is legal, within the budget as `simulate` finds it, leaves the caller's loss its room
(`View.room_bytes`), and none that does is faster; the same on every run unless the deadline
strikes: effort is counted.

A state is the next first execution and what is needed there: everything read later and not made
before that. A step takes back what ran last, a first execution or a re-execution: what it makes is
needed no more, what it reads is. Both must fit at once. Of states the one is followed next that
takes least time from there on, with what must be spent before it as far as that is known (A*); none
is where something less would do as well. Before each first execution of the backward phase that is
found by the same search, as far as it takes little: of the MLP below, at 480, 534 and 595 kB, with
a plan in hand that is 1 % slower, 74,000, 94,000 and 242,000 states prove what takes 187,000,
194,000 and 376,000 without, and 60,000, 22,000 and 17,000 find it.

What is needed holds nothing in vain, and nothing has to be dropped: forwards, by states of what is
alive, each way to make room leads to a state of its own. Of 124 plans for small networks, that
search proved 100 in 64 s of CPU time, this one 122 in 4 s. The MLP of the examples, 53 operations,
roofline prices (100 GB/s, 2 Tflop/s), over one execution of every node: 292, 340, 395, 459 and 533
kB +142, +132, +58, +40 and +30 %, proven in 0.1 to 3 s.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from rockplan.ilp.whole_graph.intervals import Facts
from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule, keep_all, with_frees

T = TypeVar("T")

KNOWN = 1 << 16
"""Sets of storages whose bytes are kept."""

Mask = int
"""A set of storages, each a bit."""

Step = int
"""A node that runs; between the phases one that stands for the turn from one to the other, which
reads the outputs and makes the incoming gradients. So backward nodes have the next number."""


LARGEST = 800
"""Nodes of a graph that is searched: a state takes about as long in all of them, and at smallest
budgets few fit. Larger ones were not tried."""

FIRST, EFFORT, OF_PEAK, OF_LEVEL = 25_000, 500_000, 50_000, 10_000
"""States reached, in all: before anything else is tried, 0.1 to 0.3 s; when it is given up, 5
to 9 s; for any schedule within a budget; and to know what must be spent before one first execution.
"""

LEARNING = 250_000
"""The same for all first executions, two seconds at most."""

GROWTH = 1.8
"""By how much twice as many states may prove more than the time before: a search is given up where
even that would not do. Of deep networks at tight budgets they proved 1.2 to 2 times as much."""

STEPS = 128
"""Of what is left: how finely the least peak is looked for from below."""

CHECKED = 256
"""States after which the clock is looked at."""


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
        view = GraphView(graph)
        again = view.again
        ours = [(view.sizes[d.index], d.index) for d in graph.data if not d.kind.resident]
        drawn = [(view.state_bytes[i], ~i) for i in again if graph.nodes[i].random]
        ordered = sorted((*ours, *drawn), key=lambda found: (-found[0], found[1]))
        bit = {index: 1 << k for k, (_, index) in enumerate(ordered)}
        producer = view.producer

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
        tangents = mask(view.tangents)
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
        self.takes = by_step([[mask(t.operands) for t in takes] for takes in view.takes], [])
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


def is_searched(graph: CDGraph) -> bool:
    return len(graph.nodes) <= LARGEST


def within(graph: CDGraph, budget_bytes: int, *, deadline: float = math.inf) -> Schedule | None:
    """Any schedule, None if there is none or the search is given up. Nothing takes time in it: of
    states that differ in it alone one is followed, nearest to the start first. deadline: as of
    time.monotonic."""
    steps = _in_no_time(graph, budget_bytes).steps_within(OF_PEAK, deadline)
    return None if steps is None else checked(graph, steps, budget_bytes)


def thriftiest(graph: CDGraph, *, deadline: float = math.inf) -> Schedule | None:
    """A schedule of the least peak that there is; None if a search is given up. From below, where
    few states fit and it is soon known that nothing does, in longer and longer steps. deadline: as
    of time.monotonic."""
    found: Schedule | None = None
    least_bytes = simulate(graph, keep_all(graph)).peak_bytes
    less_bytes = max(Facts(graph).forced_bytes, default=0) - 1
    step_bytes = 1
    while less_bytes + 1 < least_bytes:
        asked_bytes = (less_bytes + least_bytes) // 2
        if found is None:
            asked_bytes = min(asked_bytes, less_bytes + step_bytes)
        search = _in_no_time(graph, asked_bytes)
        steps = search.steps_within(OF_PEAK, deadline)
        if steps is not None:
            found = checked(graph, steps, asked_bytes)
            least_bytes = simulate(graph, found).peak_bytes
        elif search.queue:
            return None
        else:
            less_bytes = asked_bytes
            step_bytes = max(2 * step_bytes, (least_bytes - less_bytes) // STEPS)
    return keep_all(graph) if found is None else found


def _in_no_time(graph: CDGraph, budget_bytes: int) -> Search:
    nodes = tuple(replace(node, time_ns=0) for node in graph.nodes)
    return Search(replace(graph, nodes=nodes), budget_bytes)


class State(NamedTuple):
    """What is needed at a position and its bytes, the time of re-executions from there on, state
    after, node that runs between the two."""

    position: int
    needed: Mask
    bytes: int
    spent_ns: int
    after: int
    node: Step


def certain(view: View, position: int) -> Mask:
    """What every schedule needs at a position: what is read or held later and not made again."""
    if position == len(view.times_ns):
        return view.held
    later = view.held
    for reads in view.reads[position:]:
        later |= reads
    once = sum(1 << k for k, maker in enumerate(view.maker) if maker < 0)
    return view.made[position] & (view.held | later & once)


class Search:
    """Of one graph within one budget. proven_ns: of every schedule, as far as it went.

    end: the position from which it goes back, if not from the end: then the time is that before the
    position. needed: what is needed there, if more than in every schedule.
    """

    def __init__(
        self,
        graph: CDGraph,
        budget_bytes: int,
        view: View | None = None,
        end: int | None = None,
        needed: Mask | None = None,
    ) -> None:
        view = self.view = view or View(graph)
        self.graph, self.budget_bytes = graph, budget_bytes
        self.end = len(view.times_ns) if end is None else end
        self.once_ns = self.proven_ns = view.rest_ns[0]
        # What re-executions before each position take at least, as far as it is known.
        self.spent_ns = [0] * (self.end + 1)
        self.is_learned = False
        self.states: list[State] = []
        # By position and what is needed, the least time of re-executions from there on, and that
        # with which a state was followed.
        self.least: list[dict[Mask, int]] = [{} for _ in self.spent_ns]
        self.followed: list[dict[Mask, int]] = [{} for _ in self.spent_ns]
        self.queue: list[tuple[tuple[float, ...], int]] = []
        self.limit_ns = math.inf
        if needed is None:
            needed = certain(view, self.end)
        self._reach(State(self.end, needed, view.bytes_of(needed), 0, -1, -1))

    def fastest(
        self, effort: int, *, deadline: float, below_ns: float = math.inf
    ) -> Schedule | None:
        """None if there is none, or none is known when `effort` states are reached in all, or would
        be: then it goes on when it is asked for more. below_ns: only what takes less is looked for,
        then and later; if there is none, that much is proven. deadline: as of time.monotonic."""
        steps = self.steps_within(min(effort, OF_LEVEL), deadline, below_ns)
        if steps is None and effort > OF_LEVEL:
            if not self.is_learned and len(self.states) > OF_LEVEL:
                self._learn(deadline)
            steps = self._steps_if_hopeful(effort, deadline, below_ns)
        return None if steps is None else checked(self.graph, steps, self.budget_bytes)

    def _steps_if_hopeful(self, effort: int, deadline: float, below_ns: float) -> list[Step] | None:
        """Twice as many states each time, until what that proves more says that all of `effort`
        would not prove enough, even if it were GROWTH times as much each time."""
        while True:
            reach, before_ns = min(2 * len(self.states), effort), self.proven_ns
            steps = self.steps_within(reach, deadline, below_ns)
            if steps is not None or len(self.states) <= reach or reach == effort:
                return steps
            gain_ns: float = self.proven_ns - before_ns
            hoped_ns: float = self.proven_ns
            for _ in range(math.ceil(math.log2(effort / reach))):
                gain_ns *= GROWTH
                hoped_ns += gain_ns
            if hoped_ns < below_ns < math.inf:
                return None

    def _learn(self, deadline: float) -> None:
        """What must be spent before the first executions of the backward phase, where no more is
        needed than in every schedule: one after the other, each from what is known of those before,
        until one takes more than OF_LEVEL."""
        self.is_learned = True
        known_ns, left, is_known = 0, LEARNING, True
        for position in range(self.view.turn + 1, self.end + 1):
            if is_known and position < self.end:
                search = Search(self.graph, self.budget_bytes, self.view, position)
                search.spent_ns = self.spent_ns[: position + 1]
                is_known = search.steps_within(min(OF_LEVEL, left), deadline) is not None
                left = max(left - len(search.states), 0)
                known_ns = max(known_ns, search.proven_ns - search.once_ns)
            self.spent_ns[position] = known_ns
        self.queue = [(self._queued(number), number) for _, number in self.queue]
        heapq.heapify(self.queue)

    def _queued(self, number: int) -> tuple[float, ...]:
        """What every schedule takes at least that ends as from this state on; what is followed
        next is the least."""
        position, _, _, spent_ns, *_ = self.states[number]
        return spent_ns + self.spent_ns[position], position

    def steps_within(
        self, effort: int, deadline: float, below_ns: float = math.inf
    ) -> list[Step] | None:
        """Of the fastest schedule, from the start; else as above."""
        self.limit_ns = below_ns - self.once_ns
        for popped in itertools.count():
            if not self.queue or self.queue[0][0][0] >= self.limit_ns:
                if below_ns < math.inf:
                    self.proven_ns = int(below_ns)
                return None
            (least_ns, position), number = self.queue[0]
            self.proven_ns = max(self.proven_ns, self.once_ns + int(least_ns))
            if position == 0:
                return list(self._steps(number))
            is_late = popped % CHECKED == 0 and time.monotonic() >= deadline
            if is_late or len(self.states) > effort:
                return None
            heapq.heappop(self.queue)
            if not self._is_dominated(self.states[number]):
                self._take_back_first(number)
                self._take_back_again(number)
        raise AssertionError

    def _steps(self, number: int) -> Iterator[Step]:
        while True:
            *_, number, node = self.states[number]
            if node < 0:
                return
            yield node

    def _is_dominated(self, state: State) -> bool:
        """Was another way to it shorter, or was it followed, or something that needs one storage
        less, at no more time? Else it is followed now."""
        position, needed, _, spent_ns, *_ = state
        if self.least[position][needed] < spent_ns:
            return True
        followed, never = self.followed[position], spent_ns + 1
        if followed.get(needed, never) <= spent_ns:
            return True
        rest = needed
        while rest:
            low = rest & -rest
            if followed.get(needed ^ low, never) <= spent_ns:
                return True
            rest ^= low
        followed[needed] = spent_ns
        return False

    def _reach(self, state: State) -> None:
        """At less time than before."""
        self.least[state.position][state.needed] = state.spent_ns
        self.states.append(state)
        number = len(self.states) - 1
        heapq.heappush(self.queue, (self._queued(number), number))

    def _take_back_first(self, number: int) -> None:
        """The first execution may have run last."""
        view = self.view
        position, needed, bytes_, spent_ns, *_ = self.states[number]
        first = position - 1
        saved = view.saved[first] & needed
        makes = view.writes[first] | saved
        if needed & view.gone[first] & ~makes:
            return
        stays = needed & ~makes
        before = stays | view.reads[first]
        limit_ns = self.limit_ns - self.spent_ns[first]
        if spent_ns >= self.least[first].get(before, limit_ns):
            return
        before_bytes = bytes_ - view.bytes_of(needed & makes)
        before_bytes += view.bytes_of(view.reads[first] & ~stays)
        over = before_bytes + view.extra_bytes[first] + view.bytes_of(saved) - self.budget_bytes
        if over <= 0 or self._may_take_over(first, before, needed, over):
            self._reach(State(first, before, before_bytes, spent_ns, number, first))

    def _take_back_again(self, number: int) -> None:
        """All that may have run last for another time."""
        view = self.view
        makes, inputs, maker = view.makes, view.inputs, view.maker
        times_ns, extra_bytes = view.times_ns, view.extra_bytes
        position, needed, bytes_, spent_ns, *_ = self.states[number]
        least, limit_ns = self.least[position], self.limit_ns - self.spent_ns[position]
        rest = needed & ~view.held
        while rest:
            i = maker[(rest & -rest).bit_length() - 1]
            if not 0 <= i < position:
                rest &= rest - 1
                continue
            rest &= ~makes[i]
            stays = needed & ~makes[i]
            more = inputs[i] & ~stays
            before = stays | more
            before_ns = spent_ns + times_ns[i]
            if before_ns >= least.get(before, limit_ns):
                continue
            before_bytes = bytes_ - view.bytes_of(needed & makes[i]) + view.bytes_of(more)
            over = before_bytes + extra_bytes[i] + view.again_bytes(i, position) - self.budget_bytes
            if over <= 0 or self._may_take_over(i, before, needed, over):
                self._reach(State(position, before, before_bytes, before_ns, number, i))

    def _may_take_over(self, node: Step, before: Mask, after: Mask, over: int) -> bool:
        """Are there operands of so many bytes, needed no more after the node, in whose storages it
        may write? Not if it makes another copy of something."""
        view = self.view
        if before & view.writes[node]:
            return False
        free = before & ~after
        return any(view.bytes_of(taken) >= over for taken in view.takes[node] if not taken & ~free)
