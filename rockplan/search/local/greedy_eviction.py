"""Schedules by eviction: run in order, free the cheapest storages where memory is short, and
recompute them when they are read.

takes: a priced CDGraph, budgets. returns: schedules, or None. guarantees: legal (`verify`), within
the budget as `simulate` finds it; the forward phase runs every node once, in order, the backward
phase has first executions in order; the same on every run unless a deadline strikes: effort is
counted, not seconds. source: DTR (Kirisame et al., ICLR 2021) with the future known: its score
(recompute cost over size and staleness) has the time until the next read in place of staleness, as
in Belady's rule. The missing inputs of a node are made in the order of Sethi and Ullman (JACM
1970): the one that takes most memory beyond its own size first; inputs that are alive may be freed
meanwhile.

Backward nodes are re-executed as forward ones are, which the stage formulation does not allow;
where memory is shortest this is what fits. The order of inputs decides: with the most expensive or
the first one first, and alive inputs kept meanwhile, least peaks (of `testing.priced`, MiB) were
32.0 for GPT-2 and BERT instead of 30.03, where no schedule goes below 30.00
(`benchmarks/bounds/pebbles`).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rockplan.ilp.whole_graph.intervals import Facts
from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.recompute import NEVER, RecomputeCosts, TooDeep
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.graph import CDGraph, ComputeNode
from rockplan.values.order import without_idle
from rockplan.values.schedule import Schedule, keep_all, with_frees


@dataclass(frozen=True, slots=True)
class EvictionLimits:
    """How much evictions may do. effort: storages weighed for one budget; attempt: for one attempt
    at the least peak; attempts: what all of them may weigh, as a multiple of `attempt`; weighed:
    one attempt may weigh this share of the squared number of nodes, if that is more. executions: an
    attempt fails once it has run this many times the nodes of the graph; depth: it fails beyond so
    many storages that must be made for one another. steps: shares by which the peak is lowered,
    from coarse to fine."""

    effort: int = 200_000
    attempt: int = 150_000
    attempts: int = 6
    weighed: float = 1 / 8
    executions: int = 8
    depth: int = 600
    steps: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01)


DEFAULT = EvictionLimits()

FAR = 1_000_000
"""Distance to the next read of a storage that no later node reads (re-executions may read it)."""


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """The score of a storage: cost ** cost_power / (size * distance ** distance_power). Storages
    that nothing can make again and no later node reads are freed first, then those with the least
    score."""

    cost_power: float
    distance_power: float


RULES = (EvictionRule(0.5, 0.5), EvictionRule(1.0, 1.0))
"""With the first alone BERT's smallest budget is 3.4 % larger (benchmarks/results/ablation.md); six
other rules gained nothing once exchanges followed."""


class _Failed(Exception):
    """The budget does not suffice; caught in this module."""


class _GaveUp(Exception):
    """An attempt takes too much effort; caught in this module."""


@dataclass
class _Effort:
    """left: storages that may still be weighed; deadline: as of time.process_time."""

    left: int
    deadline: float = NEVER

    def spend(self, weighed: int) -> None:
        """Count storages weighed; raises _GaveUp if nothing is left."""
        self.left -= weighed
        if self.left <= 0 or time.process_time() >= self.deadline:
            raise _GaveUp


@dataclass(frozen=True, slots=True)
class Thriftiest:
    """The result of a search for the least peak. schedules: of each rule, the smallest peak first;
    is_exhausted: effort or time ended the search."""

    schedules: tuple[Schedule, ...]
    is_exhausted: bool

    @property
    def schedule(self) -> Schedule:
        return self.schedules[0]


def thriftiest(
    graph: CDGraph, *, deadline: float = NEVER, limits: EvictionLimits = DEFAULT
) -> Thriftiest:
    """Search the least peak by greedy evictions: of each rule the schedule with the least peak, all
    sorted by peak, then time. The same on every run, unless the deadline (as of time.process_time)
    strikes; if nothing is found by then, the first rule is tried with the effort for one budget."""
    most_weighed = max(limits.attempt, int(limits.weighed * len(graph.nodes) ** 2))
    total = limits.attempts * min(most_weighed, limits.attempt)
    effort = _Effort(max(total, most_weighed), deadline)
    everything = keep_all(graph)
    least = [_thriftiest_by(graph, everything, r, effort, most_weighed, limits) for r in RULES]
    is_over = time.process_time() >= deadline
    if is_over and all(schedule == everything for schedule in least):
        hasty = _Effort(limits.effort)
        least = [_thriftiest_by(graph, everything, RULES[0], hasty, limits.effort, limits)]
    rows = [(simulate(graph, schedule), schedule) for schedule in least]
    rows.sort(key=lambda row: (row[0].peak_bytes, row[0].time_ns))
    schedules = tuple(schedule for _, schedule in rows)
    return Thriftiest(schedules, is_exhausted=is_over or effort.left <= 0)


def _thriftiest_by(
    graph: CDGraph,
    best: Schedule,
    rule: EvictionRule,
    effort: _Effort,
    most_weighed: int,
    limits: EvictionLimits,
) -> Schedule:
    """In smaller and smaller steps, each repeated until it fails. The first goes at least to the
    geometric mean of the peak and of what every schedule needs. most_weighed: storages, in one
    attempt. Spends from `effort`."""
    forced_bytes = max(Facts(graph).forced_bytes, default=0)
    for step in limits.steps:
        while effort.left > 0 and time.process_time() < effort.deadline:
            attempt = _Effort(min(effort.left, most_weighed), effort.deadline)
            effort.left -= attempt.left
            peak_bytes = simulate(graph, best).peak_bytes
            if not peak_bytes:
                return best
            budget_bytes = peak_bytes * (1 - step)
            if step == limits.steps[0]:
                budget_bytes = min(budget_bytes, math.sqrt(peak_bytes * forced_bytes))
            lower = _attempt(graph, int(budget_bytes), rule, attempt, limits)
            effort.left += max(attempt.left, 0)
            if lower is None:
                break
            best = lower
    return best


def within(
    graph: CDGraph, budget_bytes: int, *, limits: EvictionLimits = DEFAULT
) -> Schedule | None:
    """Return the faster of the schedules within `budget_bytes` that the two rules of greedy
    eviction lead to; None if neither leads to one."""
    effort = _Effort(limits.effort)
    tried = [_attempt(graph, budget_bytes, rule, effort, limits) for rule in RULES]
    fitting = [schedule for schedule in tried if schedule is not None]
    return min(fitting, key=lambda schedule: simulate(graph, schedule).time_ns, default=None)


def _attempt(
    graph: CDGraph, budget_bytes: int, rule: EvictionRule, effort: _Effort, limits: EvictionLimits
) -> Schedule | None:
    """None if room or effort runs out. Spends from `effort`."""
    run = _Run(graph, budget_bytes, rule, effort, limits)
    try:
        run.execute_all()
    except (_Failed, _GaveUp, TooDeep, RecursionError):
        # RecursionError if the caller's own stack is deep: `depth` leaves room for 300 frames.
        return None
    schedule = with_frees(graph, *without_idle(graph, run.forward, run.backward))
    if simulate(graph, schedule).peak_bytes > budget_bytes:
        return None
    verify(graph, schedule)
    return schedule


@dataclass
class _Run:
    """One attempt. locks: storages that running nodes read, which must stay; waited_for: storages
    that waiting nodes read, which may be freed and made again. costs: ns to make a storage again,
    as far as known. first: node -> the input that is made before the others, since another order
    failed; tried: all such (node, input)."""

    graph: CDGraph
    budget_bytes: int
    rule: EvictionRule
    effort: _Effort
    limits: EvictionLimits
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    live_bytes: int = 0
    position: int = 0
    locks: Counter[int] = field(default_factory=Counter)
    waited_for: Counter[int] = field(default_factory=Counter)
    costs: dict[int, float] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    tried: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        graph = self.graph
        self.view = view = GraphView(graph)
        self.sizes, self.readers = view.sizes, view.readers
        self.n_forward = len(graph.forward)
        self.handed = frozenset(graph.handed)
        # Of each node: inputs that can be freed, and the bytes that it needs beside its inputs.
        self.inputs = view.reads
        self.beside_bytes = [view.own_bytes(n) for n in graph.nodes]
        # The node that makes each storage again, None if none does.
        self.maker = [_worth(view, view.maker(d.index)) for d in graph.data]
        self.recompute = RecomputeCosts(view, self.maker, self.limits.depth)
        self._is_alive = self.alive.__contains__
        self.made_of: list[list[int]] = [[] for _ in graph.data]
        for d, maker in enumerate(self.maker):
            for r in () if maker is None else self.inputs[maker]:
                self.made_of[r].append(d)
        self.stay, self.dropped, self.tangents = view.held, view.dropped, view.tangents
        self.outputs = frozenset(graph.outputs)

    def execute_all(self) -> None:
        """Raises _Failed where the budget does not suffice, _GaveUp where it takes too much
        effort."""
        for node in self.graph.nodes:
            self.position = node.index
            if node.index == self.n_forward:
                for d in self.dropped:
                    self._remove(d)
                for d in self.tangents:
                    self._add(d)
                self._make_room(0)
            if node.optional:
                continue
            self._execute(node.index)
            self.position += 1
            for d in sorted(self.handed.intersection((*node.reads, *node.writes))):
                if d not in self.stay and self._next_use(d) is None:
                    self._remove(d)

    def _execute(self, index: int) -> None:
        """And before it the makers of missing inputs. Raises _Failed if one of them finds no room.
        (Generators: recursion would be too deep.)"""
        waiting = [self._executing(index)]
        failed: _Failed | None = None
        while waiting:
            try:
                maker = next(waiting[-1]) if failed is None else waiting[-1].throw(failed)
            except StopIteration:
                waiting.pop()
                failed = None
            except _Failed as error:
                waiting.pop()
                failed = error
            else:
                waiting.append(self._executing(maker))
                failed = None
        if failed is not None:
            raise failed

    def _executing(self, index: int) -> Generator[int, None, None]:
        """Yields the nodes that have to run before it goes on. The caller throws in _Failed where
        one of them did not find room."""
        node = self.graph.nodes[index]
        locked: list[int] = []
        self.waited_for.update(self.inputs[index])
        try:
            yield from self._collecting(node, locked)
            self._make_room_for(node)
        finally:
            self.locks.subtract(locked)
            self.waited_for.subtract(self.inputs[index])
        self._order.append(index)
        for d in node.writes:
            self._add(d)

    def _collecting(self, node: ComputeNode, locked: list[int]) -> Generator[int, None, None]:
        """Yields the maker of each missing input first: of several, of the one that takes most
        memory beyond its own size. If that fails after others were locked, these are unlocked and
        the one that failed comes first from then on. locked: what is locked is added."""
        reads = self.inputs[node.index]
        while missing := [d for d in reads if d not in self.alive]:
            d = self.first.get(node.index, -1)
            if d not in missing:
                d = self._most_needed(missing)
            try:
                if (maker := self.maker[d]) is None:
                    raise _Failed
                if len(self._order) >= self.limits.executions * len(self.graph.nodes):
                    raise _GaveUp
                yield maker
            except _Failed:
                if not locked or (node.index, d) in self.tried:
                    raise
                self.tried.add((node.index, d))
                self.first[node.index] = d
                self.locks.subtract(locked)
                locked.clear()
            else:
                locked.append(d)
                self.locks[d] += 1
        others = [d for d in reads if d not in locked]
        self.locks.update(others)
        locked += others

    def _most_needed(self, missing: Sequence[int]) -> int:
        """The one whose making takes most bytes beyond its own size, with all that must be made for
        it."""
        if len(missing) == 1:
            return missing[0]
        known: dict[int, float] = {}
        needed_bytes, is_alive = self.recompute.needed_bytes, self._is_alive
        best = min(missing, key=lambda d: (self.sizes[d] - needed_bytes(d, is_alive, known), d))
        self.effort.spend(len(known))
        return best

    @property
    def _order(self) -> list[int]:
        return self.forward if self.position < self.n_forward else self.backward

    def _cost(self, d: int) -> float:
        known = self.costs.get(d)
        if known is None:
            known = self.costs[d] = self.recompute.time_ns(d, self._is_alive, self.costs)
        return known

    def _forget_costs(self, d: int) -> None:
        """Those (ns to make a storage again) that depend on `d`, which was just made or freed."""
        costs, alive, made_of = self.costs, self.alive, self.made_of
        changed = [d]
        while changed:
            for w in made_of[changed.pop()]:
                if w in costs:
                    del costs[w]
                    if w not in alive:
                        changed.append(w)

    def _make_room_for(self, node: ComputeNode) -> None:
        """If the budget is short, results take over operands that die here, or, if even that fails
        in the backward phase, operands that must be made again later. Raises _Failed."""
        needed_bytes = self.beside_bytes[node.index]

        def is_free(d: int) -> bool:
            return self.locks[d] == 1 and d not in self.stay

        def is_read_last(d: int) -> bool:  # by nodes in order: re-executions may read it later
            return all(u < self.position or u == node.index for u in self.readers[d])

        taken: frozenset[int] = frozenset()
        if self.live_bytes + needed_bytes > self.budget_bytes:
            taken = self._taken(node, lambda d: is_free(d) and is_read_last(d))
            self._take(taken)
        try:
            self._make_room(needed_bytes)
        except _Failed:
            more = self._taken(
                node, lambda d: is_free(d) and (d in taken or self.maker[d] is not None)
            )
            if (taken and not more > taken) or self.position < self.n_forward:
                raise
            self._take(more)
            self._make_room(needed_bytes)

    def _taken(self, node: ComputeNode, dies: Callable[[int], bool]) -> frozenset[int]:
        takeover = self.view.taken(node.index, dies)
        return frozenset(takeover.operands if takeover else ())

    def _take(self, operands: Iterable[int]) -> None:
        for d in operands:
            self._remove(d)

    def _add(self, d: int) -> None:
        if d not in self.alive:
            self.alive.add(d)
            self.live_bytes += self.sizes[d]
            self._forget_costs(d)

    def _remove(self, d: int) -> None:
        if d in self.alive:
            self.alive.discard(d)
            self.live_bytes -= self.sizes[d]
            self._forget_costs(d)

    def _make_room(self, needed_bytes: int) -> None:
        """First what no later node reads and nothing can make again, then by score. Raises
        _Failed."""
        if self.live_bytes + needed_bytes <= self.budget_bytes:
            return
        candidates = list(self._candidates())
        self.effort.spend(len(candidates))
        # Free those first that nobody reads later and that cannot be made again now.
        lost = [d for d, use in candidates if use is None and self._cost(d) == NEVER]
        self._drop(lost, needed_bytes)
        self._drop(self._scored(candidates), needed_bytes)
        if self.live_bytes + needed_bytes > self.budget_bytes:
            raise _Failed

    def _scored(self, candidates: Sequence[tuple[int, int | None]]) -> list[int]:
        """Those that can be made again, the first to be freed first. A storage that a waiting node
        reads counts as read next: otherwise a network of n residual additions would be made 2 ** n
        times."""
        scores: list[tuple[float, int]] = []
        for d, use in candidates:
            if d in self.alive and (cost := self._cost(d)) < NEVER:
                distance = FAR if use is None else use - self.position + 1
                if self.waited_for[d] > 0:
                    distance = 1
                weight = self.sizes[d] * distance**self.rule.distance_power
                scores.append((cost**self.rule.cost_power / weight, d))
        return [d for _, d in sorted(scores)]

    def _drop(self, data: Sequence[int], needed_bytes: int) -> None:
        for d in data:
            if self.live_bytes + needed_bytes <= self.budget_bytes:
                return
            self._remove(d)

    def _candidates(self) -> Iterator[tuple[int, int | None]]:
        """(Storage, node that reads it next; None if no later one does.) In the forward phase,
        which runs nothing again, outputs and what it still reads stay."""
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


def _worth(view: GraphView, maker: int | None) -> int | None:
    """None if it saves nothing: its generator state is as large as what it makes."""
    if maker is None or 0 < view.made_bytes[maker] <= view.state_bytes[maker]:
        return None
    return maker
