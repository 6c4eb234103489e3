"""Oracles for the ILP: exhaustive searches over tiny graphs, without any solver.

`stage_schedules` lists every schedule of the stage class and lets `simulate` price it: it knows
nothing of memory. `fastest` searches states (what has run, what is alive) with Dijkstra's
algorithm and reaches classes that are too large to list.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product

from rockplan.errors import IllegalSchedule
from rockplan.ilp.blocks.decode import price, solve_stages
from rockplan.ilp.blocks.formulate import StageModel, formulate
from rockplan.ilp.blocks.stages import find_stages
from rockplan.ilp.highs import SolverStatus
from rockplan.ilp.pulp_models import HIGHS
from rockplan.ilp.scaling import UNLIMITED, in_units
from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import Simulation, simulate
from rockplan.oracles.verify import verify
from rockplan.values.graph import CDGraph, ComputeNode, Phase
from rockplan.values.order import Orders, without_idle
from rockplan.values.schedule import with_frees


def stage_schedules(graph: CDGraph) -> Iterator[tuple[Orders, Simulation]]:
    """Forward once, backward once, and before each backward node that reads forward storages
    any set of forward nodes again, in order; none of them idle."""
    n_forward = len(graph.forward)
    made = {d for n in graph.forward for d in n.writes}
    again = [n.index for n in graph.forward if n.recomputable]
    subsets = list(chain.from_iterable(combinations(again, k) for k in range(len(again) + 1)))
    choices = [subsets if made & set(n.reads) else [()] for n in graph.backward]
    for chosen in product(*choices):
        backward = chain.from_iterable(
            (*extra, n.index) for extra, n in zip(chosen, graph.backward, strict=True)
        )
        orders = Orders(tuple(range(n_forward)), tuple(backward))
        if Orders(*without_idle(graph, orders.forward, orders.backward)) != orders:
            continue
        schedule = with_frees(graph, orders.forward, orders.backward)
        try:
            verify(graph, schedule)
        except IllegalSchedule:
            continue
        yield orders, simulate(graph, schedule)


@dataclass(frozen=True, slots=True)
class State:
    """ran: nodes that have run. again: the last node that ran again since the latest first
    execution, -1 if none did. states: random nodes whose generator state is kept."""

    is_backward: bool
    ran: frozenset[int]
    again: int
    alive: frozenset[int]
    states: frozenset[int]


START = State(False, frozenset(), -1, frozenset(), frozenset())


@dataclass(frozen=True)
class Exhaustive:
    """Fastest schedule of `graph` within two budgets.

    is_free: any legal schedule; with in_order only those whose first executions come in the order
    of the graph. Else first executions in the order of the graph, and between two of them each node
    at most once, in order.
    """

    graph: CDGraph
    peak_bytes: int
    saved_bytes: int | None
    is_free: bool = False
    in_order: bool = False

    def fastest_ns(self) -> int | None:
        """Dijkstra over states; None if nothing fits."""
        best = {START: 0}
        queue = [(0, 0, START)]
        count = 0
        while queue:
            cost, _, state = heapq.heappop(queue)
            if cost > best[state]:
                continue
            if len(state.ran) == len(self.graph.nodes):
                return cost
            for extra, following in self._moves(state):
                if cost + extra < best.get(following, 1 << 62):
                    best[following] = cost + extra
                    count += 1
                    heapq.heappush(queue, (cost + extra, count, following))
        return None

    def _moves(self, state: State) -> Iterator[tuple[int, State]]:
        for node in self.graph.nodes:
            if self._may_run(state, node):
                for following in self._run(state, node):
                    yield node.time_ns, following
        if not state.is_backward and len(state.ran) == len(self.graph.forward):
            for following in self._turn(state):
                yield 0, following

    def _may_run(self, state: State, node: ComputeNode) -> bool:
        if node.phase is Phase.BACKWARD and not state.is_backward:
            return False
        if any(d not in state.alive for d in node.reads if self._is_ours(d)):
            return False
        if node.index not in state.ran:
            return self._may_be_first(state, node)
        if not node.recomputable or (node.random and node.index not in state.states):
            return False
        if not set(self.graph.handed).isdisjoint(node.writes):
            return False
        if self.is_free:
            return True
        # After its last node the forward phase has nothing left to prepare.
        is_over = not state.is_backward and len(state.ran) == len(self.graph.forward)
        return node.index > state.again and not is_over

    def _may_be_first(self, state: State, node: ComputeNode) -> bool:
        if node.phase is Phase.FORWARD and state.is_backward:
            return False
        if self.in_order or not self.is_free:
            return node.index == len(state.ran)
        effects = [i for i in state.ran if self._has_effect(self.graph.nodes[i])]
        return not self._has_effect(node) or node.index > max(effects, default=-1)

    def _run(self, state: State, node: ComputeNode) -> Iterator[State]:
        graph = self.graph
        is_first = node.index not in state.ran
        own_copies = set(node.writes) - set(graph.held)
        before = replace(state, alive=state.alive - own_copies)
        extra = self._view.own_bytes(node)
        if not is_first:
            extra += self._view.state_bytes[node.index]
        for keeps_state in (False, True) if node.random and is_first else (False,):
            states = before.states | ({node.index} if keeps_state else set())
            wanted = replace(before, states=states)
            for taken in self._takeovers(before, node):
                rest = extra - self._view.bytes_of(taken)
                for fitting in self._fit(wanted, rest, set(node.reads), {node.index}):
                    after = replace(
                        fitting,
                        ran=fitting.ran | {node.index},
                        again=-1 if is_first else node.index,
                        alive=(fitting.alive - taken) | set(node.writes),
                    )
                    yield self._without_dead(after)

    def _takeovers(self, state: State, node: ComputeNode) -> Iterator[frozenset[int]]:
        """What results may be written over, which dies then, or nothing."""
        yield frozenset()
        if state.alive.isdisjoint(node.writes):
            yield from (frozenset(t.operands) for t in self._view.takes[node.index])

    def _fit(self, state: State, extra: int, reads: set[int], running: set[int]) -> Iterator[State]:
        """States with as few frees as let `extra` bytes fit; to free more later is as good."""
        graph = self.graph
        droppable = [(d, -1) for d in sorted(state.alive - reads - set(graph.held))]
        states = self._view.state_bytes
        droppable += [(-1, i) for i in sorted(state.states - running) if states[i]]
        enough: list[set[tuple[int, int]]] = []
        for k in range(len(droppable) + 1):
            for chosen in combinations(droppable, k):
                if any(smaller <= set(chosen) for smaller in enough):
                    continue
                dropped = replace(
                    state,
                    alive=state.alive - {d for d, _ in chosen},
                    states=state.states - {i for _, i in chosen},
                )
                if self._bytes(dropped) + extra <= self.peak_bytes:
                    enough.append(set(chosen))
                    yield dropped

    def _turn(self, state: State) -> Iterator[State]:
        """From the forward to the backward phase, with as few frees as the save budget allows."""
        graph = self.graph
        if not set(graph.outputs) <= state.alive:
            return
        state = replace(state, alive=state.alive - set(graph.dropped))
        tangents = self._view.tangents
        outputs_bytes = self._view.bytes_of(graph.outputs)
        allowed = self.peak_bytes if self.saved_bytes is None else self.saved_bytes + outputs_bytes
        tangent_bytes = self._view.bytes_of(tangents)
        narrow = replace(self, peak_bytes=min(allowed, self.peak_bytes - tangent_bytes))
        for fitting in narrow._fit(state, 0, set(graph.outputs), set()):
            yield replace(fitting, is_backward=True, alive=fitting.alive | tangents)

    def _without_dead(self, state: State) -> State:
        """Frees what no node can read any more; that is as good as keeping it."""
        stays = set(self.graph.held)
        if not state.is_backward:
            stays |= set(self.graph.outputs)
        dead = {d for d in state.alive - stays if not self._can_be_read(state, d)}
        return replace(state, alive=state.alive - dead)

    def _can_be_read(self, state: State, d: int) -> bool:
        nodes = self.graph.nodes
        return any(i not in state.ran or nodes[i].recomputable for i in self._view.readers[d])

    @cached_property
    def _view(self) -> GraphView:
        return GraphView(self.graph)

    def _bytes(self, state: State) -> int:
        states = self._view.state_bytes
        return self._view.bytes_of(state.alive) + sum(states[i] for i in state.states)

    def _is_ours(self, d: int) -> bool:
        return not self.graph.data[d].kind.resident

    @staticmethod
    def _has_effect(node: ComputeNode) -> bool:
        return node.random or not node.recomputable


Point = tuple[int, int, int]


def exact_model(graph: CDGraph) -> StageModel | None:
    """Nothing is tiny; None without stages."""
    stages = find_stages(in_units(graph, tiny_share=0.0))
    return formulate(stages) if stages.stages else None


def listed(graph: CDGraph) -> list[Point]:
    """Peak, saved bytes and time of every schedule of the class."""
    output_bytes = GraphView(graph).bytes_of(graph.outputs)
    return [
        (
            found.peak_bytes,
            found.saved_bytes - output_bytes,
            found.time_ns,
        )
        for _, found in stage_schedules(graph)
    ]


def corners(points: list[Point], rng: random.Random, count: int) -> Iterator[tuple[int, int]]:
    """Corners at and just below what schedules need, the smallest peak first."""
    peaks = sorted({p for p, _, _ in points})
    saved = sorted({s for _, s, _ in points})
    yield peaks[0], UNLIMITED
    yield peaks[0] - 1, UNLIMITED
    for _ in range(count - 2):
        yield rng.choice(peaks) - rng.choice((0, 0, 1)), rng.choice(saved) - rng.choice((0, 0, 1))


def assert_agrees(graph: CDGraph, rng: random.Random, count: int = 6, solver: str = HIGHS) -> None:
    """The solver finds the optimum of the listing, or proves that there is none."""
    model = exact_model(graph)
    assert model is not None
    points = listed(graph)
    for peak, saved in corners(points, rng, count):
        expected = min((t for p, s, t in points if p <= peak and s <= saved), default=None)
        found = solve_stages(model, peak, saved, time_limit_s=60, gap=0.0, solver=solver)
        if expected is None:
            assert found.status is SolverStatus.INFEASIBLE
            continue
        assert found.status is SolverStatus.OPTIMAL
        assert found.orders is not None
        option = price(graph, found.orders)
        assert option.peak_bytes <= peak
        assert option.saved_bytes <= saved
        assert found.bound_ns <= option.time_ns == expected
        assert solver != HIGHS or found.bound_ns == expected


def listing_bits(graph: CDGraph) -> int:
    """The listing has two to this power schedules; 0 if the class has one only."""
    stages = find_stages(in_units(graph, tiny_share=0.0)).stages
    return len(stages) * sum(n.recomputable for n in graph.forward)
