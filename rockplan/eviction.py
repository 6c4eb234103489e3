"""Schedules by eviction: run in order, drop what matters least where memory is short, make it
again when it is read.

takes: a priced CDGraph, budgets. returns: schedules, or None. guarantees: legal (`verify`), within
the budget as `simulate` finds it; the forward phase runs every node once, in order, the backward
phase runs every node for the first time in order; the same on every run: effort is counted, not
seconds.
source: DTR (Kirisame et al., ICLR 2021) with the future known: its score, what it costs to make a
storage again over its size and the time it was not used, has here the time until it is read next,
as in Belady's rule.

Backward nodes run again as forward ones do, which the stage formulation does not allow; where
memory is shortest this is what fits. Least peaks, as shares of the least of a chain (roofline
prices, every result in a storage of its own): ResNet-18 .987 and UNet with 4 skips .866, which
nothing goes below, 2 layers of GPT-2 .943 and, with fused attention, .852, DenseNet .885, but BERT
1.03; in 0.3 to 1.2 s each. Integer programs that minimise the peak found .987 (ResNet-18), .972
and 1.000 (GPT-2) in minutes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rockplan.graph import CDGraph, ComputeNode, DataKind, producers, readers
from rockplan.schedule import Schedule, keep_all, with_frees, without_idle
from rockplan.simulate import Simulation, simulate
from rockplan.verify import verify

STEP = 0.005
"""Of the least peak: how finely it is searched."""

EXECUTIONS = 8
"""An attempt fails once it runs this many times as many nodes as the graph has."""

DEPTH = 200
"""Nodes that may wait for one another; an attempt with more fails."""

LEAST_EFFORT = 800_000
"""Storages weighed for all attempts to find the least peak: 8 s. On 2 layers of a transformer one
attempt weighs 20,000, on 2+2 layers of T5 50,000."""

EFFORT = 200_000
"""The same for one budget."""

FAR = 1_000_000
"""Positions until a storage is read that no later node reads: it may serve to make others."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """score = cost ** cost_power / (size * distance ** distance_power); the least one goes.

    loses_first: before all others goes what cannot be made again and no later node reads (it might
    serve to make others again); else it goes last.
    dearest_first: of what a node reads and is not there, the most expensive is made first; else
    the one that was made first.
    """

    cost_power: float
    distance_power: float
    loses_first: bool
    dearest_first: bool


RULES = (
    _Rule(1.0, 1.0, True, True),
    _Rule(1.0, 0.5, True, True),
    _Rule(0.5, 1.0, True, False),
    _Rule(2.0, 1.0, True, True),
    _Rule(1.0, 1.0, False, False),
    _Rule(1.0, 0.5, False, True),
)
"""None is best everywhere. For its least peak GPT-2 with fused attention needs one that is not
dearest_first (else 5 % more), Llama one that is (3 %), ResNet-18 one that is not loses_first."""


class _Failed(Exception):
    """An attempt does not fit; seen by this module only."""


@dataclass
class _Effort:
    """left: storages that may still be weighed."""

    left: int

    @property
    def is_spent(self) -> bool:
        return self.left <= 0


def thriftiest(graph: CDGraph) -> Schedule:
    """The schedule with the least peak found, of those with equal ones the fastest; the same on
    every run, so a budget that is too small always is."""
    effort = _Effort(LEAST_EFFORT)
    best = keep_all(graph)
    for rule in RULES:
        best = _thriftiest_by(graph, best, rule, effort)
    while True:
        before = simulate(graph, best)
        found = within(graph, before.peak_bytes)
        after = None if found is None else simulate(graph, found)
        if found is None or after is None or not _is_better(after, before):
            return best
        best = found


def _is_better(a: Simulation, b: Simulation) -> bool:
    return (a.peak_bytes, a.time_ns) < (b.peak_bytes, b.time_ns)


def _thriftiest_by(graph: CDGraph, best: Schedule, rule: _Rule, effort: _Effort) -> Schedule:
    """Bisection below the peak of `best`; a rule that does not gain one step is not asked again."""
    most_bytes = simulate(graph, best).peak_bytes
    low, high = _floor_bytes(graph) - 1, most_bytes
    budget_bytes = min(int(most_bytes * (1 - STEP)), most_bytes - 1)
    while high - low > max(most_bytes * STEP, 1):
        found = _attempt(graph, budget_bytes, rule, effort)
        if found is not None:
            best, high = found, simulate(graph, found).peak_bytes
        elif high == most_bytes:
            break
        else:
            low = budget_bytes
        budget_bytes = (low + high) // 2
    return best


def within(graph: CDGraph, budget_bytes: int) -> Schedule | None:
    """The fastest schedule found whose peak is within `budget_bytes`; None without any."""
    effort = _Effort(EFFORT)
    found = [_attempt(graph, budget_bytes, rule, effort) for rule in RULES]
    fitting = [schedule for schedule in found if schedule is not None]
    return min(fitting, key=lambda schedule: simulate(graph, schedule).time_ns, default=None)


def _floor_bytes(graph: CDGraph) -> int:
    """No schedule needs less: what a node reads and makes is alive with its workspace, save a
    result that takes over a storage that it reads."""
    sizes = _sizes(graph)
    return max(
        (
            n.workspace_bytes
            + sum(sizes[d] for d in {*n.reads, *n.writes})
            - max((sizes[d] for d in n.takes), default=0)
            for n in graph.nodes
        ),
        default=0,
    )


def _sizes(graph: CDGraph) -> list[int]:
    return [0 if d.kind.resident else d.size_bytes for d in graph.data]


def _attempt(graph: CDGraph, budget_bytes: int, rule: _Rule, effort: _Effort) -> Schedule | None:
    """A schedule within the budget by `rule`, if it leads to one."""
    if effort.is_spent:
        return None
    run = _Run(graph, budget_bytes, rule, effort)
    try:
        run.execute_all()
    except _Failed:
        return None
    schedule = with_frees(graph, *without_idle(graph, run.forward, run.backward))
    if simulate(graph, schedule).peak_bytes > budget_bytes:
        return None
    verify(graph, schedule)
    return schedule


@dataclass
class _Run:
    """One attempt; local to it. locks: storages that running or waiting nodes read."""

    graph: CDGraph
    budget_bytes: int
    rule: _Rule
    effort: _Effort
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    live_bytes: int = 0
    position: int = 0
    locks: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        graph = self.graph
        self.sizes = _sizes(graph)
        self.producer = producers(graph)
        self.readers = readers(graph)
        self.n_forward = len(graph.forward)
        self.handed = frozenset(graph.handed)
        self.may_run_again = [
            n.recomputable and self.handed.isdisjoint(n.writes) for n in graph.nodes
        ]
        self.stay = frozenset(graph.held)
        self.outputs = frozenset(graph.outputs)

    def execute_all(self) -> None:
        """Every node in order, with re-executions in between."""
        for node in self.graph.nodes:
            self.position = node.index
            if node.index == self.n_forward:
                self._start_backward()
            self._execute(node.index, 0)
            self.position += 1
            for d in sorted(self.handed.intersection((*node.reads, *node.writes))):
                if d not in self.stay and self._next_use(d) is None:
                    self._remove(d)

    def _take_over(self, node: ComputeNode) -> None:
        """Drops an operand whose storage the result may take, though it might serve to make
        others again."""
        for d in node.takes:
            later = (u for u in self.readers[d] if u >= self.position and u != node.index)
            if self.locks[d] == 1 and next(later, None) is None:
                self._remove(d)
                return

    def _start_backward(self) -> None:
        for d in self.graph.dropped:
            self._remove(d)
        for data in self.graph.data:
            if data.kind is DataKind.TANGENT:
                self._add(data.index)
        self._make_room(0)

    def _execute(self, index: int, depth: int) -> None:
        """Run a node, and first what it reads and is not there."""
        node = self.graph.nodes[index]
        reads = [d for d in node.reads if not self.graph.data[d].kind.resident]
        self.locks.update(reads)
        order = self.forward if self.position < self.n_forward else self.backward
        for d in self._in_order([d for d in reads if d not in self.alive]):
            if d not in self.alive:
                again = self.producer.get(d)
                limit = EXECUTIONS * len(self.graph.nodes)
                if again is None or not self.may_run_again[again]:
                    raise _Failed
                if depth >= DEPTH or len(order) >= limit:
                    raise _Failed
                self._execute(again, depth + 1)
        needed_bytes = node.workspace_bytes + sum(self.sizes[d] for d in node.writes)
        if self.live_bytes + needed_bytes > self.budget_bytes:
            self._take_over(node)
        self._make_room(needed_bytes)
        order.append(index)
        for d in node.writes:
            self._add(d)
        self.locks.subtract(reads)

    def _in_order(self, missing: Sequence[int]) -> Sequence[int]:
        """What a node lacks, in the order in which to make it."""
        if not self.rule.dearest_first:
            return missing
        known: dict[int, float] = {}
        return sorted(missing, key=lambda d: (-self._cost(d, known), d))

    def _add(self, d: int) -> None:
        if d not in self.alive:
            self.alive.add(d)
            self.live_bytes += self.sizes[d]

    def _remove(self, d: int) -> None:
        if d in self.alive:
            self.alive.discard(d)
            self.live_bytes -= self.sizes[d]

    def _make_room(self, needed_bytes: int) -> None:
        """Drop storages until so many bytes more fit."""
        if self.live_bytes + needed_bytes <= self.budget_bytes:
            return
        candidates = list(self._candidates())
        self.effort.left -= len(candidates)
        if self.effort.is_spent:
            raise _Failed
        lost = [d for d, use in candidates if use is None and self._is_last(d)]
        if self.rule.loses_first:
            self._drop(lost, needed_bytes)
        known: dict[int, float] = {}
        scores = [(self._score(d, use, known), d) for d, use in candidates if d in self.alive]
        self._drop([d for score, d in sorted(scores) if score < float("inf")], needed_bytes)
        self._drop(lost, needed_bytes)
        if self.live_bytes + needed_bytes > self.budget_bytes:
            raise _Failed

    def _drop(self, data: Sequence[int], needed_bytes: int) -> None:
        """The first of `data`, as many as must go."""
        for d in data:
            if self.live_bytes + needed_bytes <= self.budget_bytes:
                return
            self._remove(d)

    def _candidates(self) -> Iterator[tuple[int, int | None]]:
        """Storages that may be dropped here, with the node that reads each next. The forward
        phase runs nothing again: what it still reads stays, and so do outputs."""
        in_forward = self.position < self.n_forward
        for d in sorted(self.alive):
            if self.sizes[d] == 0 or self.locks[d] > 0 or d in self.stay:
                continue
            use = self._next_use(d)
            if in_forward and (d in self.outputs or (use is not None and use < self.n_forward)):
                continue
            yield d, use

    def _next_use(self, d: int) -> int | None:
        users = self.readers[d]
        k = bisect_left(users, self.position)
        return users[k] if k < len(users) else None

    def _is_last(self, d: int) -> bool:
        """Once it is gone it cannot be made again, as things are."""
        return self._cost_of_producer(d, {}) == float("inf")

    def _can_return(self, d: int) -> bool:
        made_by = self.producer.get(d)
        return made_by is not None and self.may_run_again[made_by]

    def _score(self, d: int, use: int | None, known: dict[int, float]) -> float:
        cost = self._cost_of_producer(d, known)
        distance = FAR if use is None else use - self.position + 1
        weight = self.sizes[d] * distance**self.rule.distance_power
        return float(cost**self.rule.cost_power / weight)

    def _cost(self, d: int, known: dict[int, float]) -> float:
        """Nanoseconds to have `d`; a storage that two others need counts twice."""
        if d in self.alive or self.graph.data[d].kind.resident:
            return 0.0
        if d not in known:
            known[d] = self._cost_of_producer(d, known)
        return known[d]

    def _cost_of_producer(self, d: int, known: dict[int, float]) -> float:
        if not self._can_return(d):
            return float("inf")
        node = self.graph.nodes[self.producer[d]]
        return 1.0 + node.time_ns + sum(self._cost(r, known) for r in node.reads)
