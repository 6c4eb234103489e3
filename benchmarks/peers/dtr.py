"""Dynamic tensor rematerialization, simulated on a graph (Kirisame et al., 2020, arXiv:2006.09616).

An online algorithm: nodes run in eager order, and where the next allocation would exceed the
budget the storage with the smallest score is evicted until it fits; what is read and was evicted
is made again, recursively. Scores, evicted neighbourhoods and the treatment of lost references
(eager eviction; banishing for what cannot be made again) follow the definitions of simrd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.peers.orders import checked_schedule
from rockplan.oracles.simulate import simulate
from rockplan.values.graph import CDGraph, DataKind, producers
from rockplan.values.schedule import Compute, Schedule, keep_all

MOST_TIME = 10
"""A run that takes this many times the iteration without recomputation is given up: it thrashes."""

ROUNDS = 4
"""Runs with smaller and smaller limits: saved generator states, which the algorithm does not
know, may lift the simulated peak over the budget."""


@dataclass
class Components:
    """Disjoint sets of evicted storages, each with the time of its members.

    A set is never split: what leaves it takes its time along and leaves its connections.
    """

    parents: list[int] = field(default_factory=list)
    costs_ns: list[int] = field(default_factory=list)
    number: dict[int, int] = field(default_factory=dict)

    def root(self, d: int) -> int:
        found = self.number[d]
        while self.parents[found] != found:
            self.parents[found] = found = self.parents[self.parents[found]]
        return found

    def add(self, d: int, cost_ns: int, neighbours: Iterable[int]) -> None:
        own = self.number[d] = len(self.parents)
        self.parents.append(own)
        self.costs_ns.append(cost_ns)
        for root in {self.root(e) for e in neighbours}:
            self.parents[root] = own
            self.costs_ns[own] += self.costs_ns[root]

    def remove(self, d: int, cost_ns: int) -> None:
        self.costs_ns[self.root(d)] -= cost_ns
        del self.number[d]


@dataclass
class Runtime:
    """What the algorithm knows while it runs; local to one run.

    pinned: cannot be made again (any more), or must stay. released: no reference from outside is
    left. executed: nodes, in order.
    """

    graph: CDGraph
    limit_bytes: int
    producer: dict[int, int]
    dependents: dict[int, frozenset[int]]
    pinned: set[int]
    alive: set[int] = field(default_factory=set)
    evicted: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    locks: Counter[int] = field(default_factory=Counter)
    accessed_ns: dict[int, int] = field(default_factory=dict)
    components: Components = field(default_factory=Components)
    executed: list[int] = field(default_factory=list)
    live_bytes: int = 0
    clock_ns: int = 0

    def size_bytes(self, d: int) -> int:
        return self.graph.data[d].size_bytes

    def dependencies(self, d: int) -> list[int]:
        """Storages that making d reads, without resident ones."""
        return self.owned_reads(self.producer[d]) if d in self.producer else []

    def owned_reads(self, node: int) -> list[int]:
        return [d for d in self.graph.nodes[node].reads if not self.graph.data[d].kind.resident]

    def cost_ns(self, d: int) -> int:
        return self.graph.nodes[self.producer[d]].time_ns

    def evicted_neighbours(self, d: int) -> set[int]:
        return {*self.dependencies(d), *self.dependents[d]} & self.evicted

    def stale_ns(self, d: int) -> int:
        return max(self.clock_ns - self.accessed_ns[d], 1)


Score = Callable[[Runtime, int], float]


def full(runtime: Runtime, d: int) -> float:
    """h_DTR with the exact evicted neighbourhood e*."""
    before = _reached(runtime, d, runtime.dependencies)
    after = _reached(runtime, d, runtime.dependents.__getitem__)
    return _per_stale_byte(runtime, d, sum(map(runtime.cost_ns, before | after)))


def eqclass(runtime: Runtime, d: int) -> float:
    """h_DTR with undirected components of evicted storages in place of e*."""
    roots = {runtime.components.root(e) for e in runtime.evicted_neighbours(d)}
    return _per_stale_byte(runtime, d, sum(runtime.components.costs_ns[r] for r in roots))


def local(runtime: Runtime, d: int) -> float:
    """h_DTR with the cost of the storage alone."""
    return _per_stale_byte(runtime, d, 0)


def least_recently_used(runtime: Runtime, d: int) -> float:
    return 1 / runtime.stale_ns(d)


def largest(runtime: Runtime, d: int) -> float:
    return 1 / max(runtime.size_bytes(d), 1)


SCORES: dict[str, Score] = {
    "e*": full,
    "eqclass": eqclass,
    "local": local,
    "LRU": least_recently_used,
    "largest": largest,
}


def _per_stale_byte(runtime: Runtime, d: int, others_ns: int) -> float:
    cost_ns = runtime.cost_ns(d) + others_ns
    return cost_ns / (max(runtime.size_bytes(d), 1) * runtime.stale_ns(d))


def _reached(runtime: Runtime, d: int, step: Callable[[int], Iterable[int]]) -> set[int]:
    """Evicted storages that `step` reaches from d through evicted ones."""
    found: set[int] = set()
    pending = list(step(d))
    while pending:
        e = pending.pop()
        if e in runtime.evicted and e not in found:
            found.add(e)
            pending += step(e)
    return found


class _OutOfMemory(Exception):
    """Nothing is left to evict, or the run thrashes."""


def dtr(graph: CDGraph, budget_bytes: int, score: Score) -> Schedule | None:
    """What the algorithm executes within budget_bytes; None where it runs out of memory."""
    limit_bytes = budget_bytes
    for _ in range(ROUNDS):
        try:
            forward, backward = _replay(_start(graph, limit_bytes), score)
        except _OutOfMemory:
            return None
        schedule = checked_schedule(graph, forward, backward)
        excess_bytes = simulate(graph, schedule).peak_bytes - budget_bytes
        if excess_bytes <= 0:
            return schedule
        limit_bytes -= excess_bytes
    return None


def _start(graph: CDGraph, limit_bytes: int) -> Runtime:
    dependents: dict[int, set[int]] = {d.index: set() for d in graph.data}
    handed = set(graph.handed)
    pinned = set(graph.held) | {d.index for d in graph.data if d.kind is DataKind.TANGENT}
    for node in graph.nodes:
        for d in node.reads:
            dependents[d].update(node.writes)
        if not node.recomputable or not handed.isdisjoint(node.writes):
            pinned.update(node.writes)
    frozen = {d: frozenset(found) for d, found in dependents.items()}
    return Runtime(graph, limit_bytes, producers(graph), frozen, pinned)


def _replay(runtime: Runtime, score: Score) -> tuple[list[int], list[int]]:
    """Nodes executed in the forward and in the backward phase."""
    schedule = keep_all(runtime.graph)
    boundary = 0
    for position, event in enumerate((*schedule.events, None)):
        if position == schedule.forward_length:
            _end_forward(runtime, score)
            boundary = len(runtime.executed)
        if isinstance(event, Compute):
            _execute(runtime, event.node, score)
        elif event is not None:
            _release(runtime, event.data)
    return runtime.executed[:boundary], runtime.executed[boundary:]


def _end_forward(runtime: Runtime, score: Score) -> None:
    """The caller gets the outputs, then hands in the tangents."""
    outputs = [d for d in runtime.graph.outputs if not runtime.graph.data[d].kind.resident]
    _lock_and_make(runtime, outputs, score)
    tangents = [d for d in runtime.graph.data if d.kind is DataKind.TANGENT]
    _make_room(runtime, sum(d.size_bytes for d in tangents), score)
    for d in tangents:
        _add(runtime, d.index)
    runtime.locks.subtract(outputs)


def _execute(runtime: Runtime, index: int, score: Score) -> None:
    """Run a node, for the first time or again, after what it reads."""
    node = runtime.graph.nodes[index]
    reads = runtime.owned_reads(index)
    _lock_and_make(runtime, reads, score)
    made_bytes = sum(runtime.size_bytes(d) for d in node.writes)
    _make_room(runtime, made_bytes + node.workspace_bytes, score)
    runtime.clock_ns += node.time_ns
    if runtime.clock_ns > MOST_TIME * runtime.graph.time_ns:
        raise _OutOfMemory
    runtime.executed.append(index)
    for d in node.writes:
        _add(runtime, d)
    for d in reads:
        runtime.accessed_ns[d] = runtime.clock_ns
    runtime.locks.subtract(reads)
    for d in reads:
        if d in runtime.released:
            _banish(runtime, d)


def _lock_and_make(runtime: Runtime, wanted: list[int], score: Score) -> None:
    runtime.locks.update(wanted)
    for d in wanted:
        if d not in runtime.alive:
            _execute(runtime, runtime.producer[d], score)


def _make_room(runtime: Runtime, size_bytes: int, score: Score) -> None:
    while runtime.live_bytes + size_bytes > runtime.limit_bytes:
        pool = [d for d in sorted(runtime.alive) if _is_evictable(runtime, d)]
        if not pool:
            raise _OutOfMemory
        _evict(runtime, min(pool, key=lambda d: score(runtime, d)))


def _is_evictable(runtime: Runtime, d: int) -> bool:
    return d not in runtime.pinned and not runtime.locks[d] and runtime.size_bytes(d) > 0


def _add(runtime: Runtime, d: int) -> None:
    runtime.accessed_ns[d] = runtime.clock_ns
    if d in runtime.evicted:
        runtime.evicted.discard(d)
        runtime.components.remove(d, runtime.cost_ns(d))
    if d not in runtime.alive:
        runtime.alive.add(d)
        runtime.live_bytes += runtime.size_bytes(d)


def _drop(runtime: Runtime, d: int) -> None:
    runtime.alive.discard(d)
    runtime.live_bytes -= runtime.size_bytes(d)


def _evict(runtime: Runtime, d: int) -> None:
    _drop(runtime, d)
    neighbours = runtime.evicted_neighbours(d)
    runtime.evicted.add(d)
    runtime.components.add(d, runtime.cost_ns(d), neighbours)


def _release(runtime: Runtime, d: int) -> None:
    """The last reference from outside is gone: evict, or banish what cannot be made again."""
    runtime.released.add(d)
    if d in runtime.pinned:
        _banish(runtime, d)
    elif d in runtime.alive:
        _evict(runtime, d)


def _banish(runtime: Runtime, d: int) -> None:
    """Drop a pinned storage for good, once nothing evicted needs it; what was made from it can
    then not be made again."""
    if d in runtime.pinned and d in runtime.alive and not runtime.dependents[d] & runtime.evicted:
        _drop(runtime, d)
        runtime.pinned |= runtime.dependents[d] & runtime.alive
