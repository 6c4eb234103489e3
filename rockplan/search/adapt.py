"""Adapt: a plan that a module has -> one for another kind of call, without searching anew.

takes: plans, another kind of call as it was captured, its budget. returns: a Plan, or None where
none carries over. guarantees: as `planning`, but that nothing is proven: the bound is that of
running nothing again. Bytes are those of the call itself: operators whose bytes do not follow from
shapes run for that. Times are scaled from those of the plan that is known
(`graph_builder.costs.scaled`).

A trainer calls a model nearly as its sample did: with as many tokens as the batch happens to have,
with a number by which the loss is divided, with one tensor in two places or two, with a scalar of
another dtype. What is worth keeping and what to compute again is the same then. So the known
schedule is replayed on the graph of the call. Where that needs more than the budget, a short local
search (`QUICK`) makes room; where it needs less, what the budget does not ask for is not run again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rockplan.budget import Budget
from rockplan.errors import IllegalSchedule
from rockplan.graph_builder.costs.scaled import scaled
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search import planning
from rockplan.search.local.exchange import ExchangeLimits, exchanged, pruned, repaired
from rockplan.search.problem import Problem, problem_of_priced
from rockplan.values.graph import CDGraph, ComputeNode, stem
from rockplan.values.order import without_idle
from rockplan.values.plan import Plan
from rockplan.values.schedule import Schedule, Waits, keep_all, with_frees

FEW = 8
"""Operations of a phase that may be others. A loss that is a sum divided by a number, instead of a
mean, is one or two operations more."""

WORSE = 0.01
MORE = 0.25
"""Share of the iteration time, and of that for re-executions, that more may run again than in the
plan that is known, where that has no larger share of eager's peak. The second for models of one
layer or two, where one result more or less is a step."""

TIGHTER = 0.5
"""Of the share of eager's peak that the plan that is known needs: in less a search finds better
ones. In more, two and four layers of Llama, GPT-2, BERT and ViT at 45 to 80 % are within 0.8 points
of a search, and once 1.4 off; in less up to 2.7."""

MOST = 3
"""Plans that are tried, those for calls of nearest size first."""

QUICK = ExchangeLimits(effort=60_000, rounds=1, most_rounds=1)
"""Of the local search, where a known schedule needs more than the budget."""

SLIGHTLY = 0.05
"""Share of the budget: one round is enough to make room for less."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """A plan, and the known one whose schedule it replays; has_other_sizes: the operations are the
    same, so calls like those of the known one may follow."""

    plan: Plan
    known: Plan
    has_other_sizes: bool


@dataclass(frozen=True, slots=True)
class _Alike:
    """A plan with the nodes of its graph, and those of another one that do the same."""

    plan: Plan
    nodes: dict[int, int]

    def has_other_sizes(self, graph: CDGraph) -> bool:
        """Are the operations of `graph` the same, on other shapes?"""
        known = self.plan.graph
        is_whole = len(self.nodes) == len(known.nodes) == len(graph.nodes)
        return is_whole and any(
            _shapes(known, known.nodes[o]) != _shapes(graph, graph.nodes[n])
            for o, n in self.nodes.items()
        )


def adapted(
    known: Iterable[Plan], lowered: Lowered, waits: Waits, budget: Budget, options: Options
) -> Adapted | None:
    """The plan for the graph of `lowered` within `budget`. waits: as of `Problem`."""
    alike = [*islice(_alike(known, lowered.graph), MOST)]
    if not alike:
        return None
    problem = _problem(alike[0], lowered, waits, options)
    limit_bytes = _limit_bytes(alike, problem, budget)
    for one in alike:
        made = _transferred(one, problem, limit_bytes)
        if made is not None:
            return Adapted(made, one.plan, one.has_other_sizes(lowered.graph))
    return None


def _alike(known: Iterable[Plan], graph: CDGraph) -> Iterator[_Alike]:
    """Of plans for graphs like `graph` those first whose sizes are nearest."""
    size = _size_bytes(graph)

    def distance(plan: Plan) -> float:
        return abs(math.log(_size_bytes(plan.graph) / size))

    # Where storages went to the host, they go anew: how much does depends on the size.
    for plan in sorted((p for p in known if not p.trips), key=distance):
        nodes = _matched(plan.graph, graph)
        if nodes is not None:
            yield _Alike(plan, nodes)


def _size_bytes(graph: CDGraph) -> int:
    """Of all that is made: of graphs with the same operations it says which is larger."""
    return 1 + sum(d.size_bytes for d in graph.data if not d.kind.resident)


def _problem(one: _Alike, lowered: Lowered, waits: Waits, options: Options) -> Problem:
    alike = {new: old for old, new in one.nodes.items()}
    priced, profile = scaled(lowered.graph, lowered.samples, one.plan.graph, alike)
    source = f"{profile.source} from those of graph {one.plan.graph_digest[:12]}"
    profile = replace(profile, source=source)
    return replace(problem_of_priced(priced, profile, options), waits=waits)


def _limit_bytes(alike: Sequence[_Alike], problem: Problem, budget: Budget) -> int:
    """The budget in bytes. The smallest one is as small for a call of another size as for those
    that are known: in bytes where it is smaller, as a share where it is larger."""
    limit_bytes = budget.within(problem.unplanned.peak_bytes)
    if limit_bytes is not None:
        return limit_bytes
    return min(int(one.plan.budget_bytes * max(1.0, _growth(one.plan, problem))) for one in alike)


def _growth(plan: Plan, problem: Problem) -> float:
    return problem.unplanned.peak_bytes / max(plan.eager_peak_bytes, 1)


def _transferred(one: _Alike, problem: Problem, limit_bytes: int) -> Plan | None:
    """The schedule of a known plan as one within as many bytes."""
    graph = problem.constrained
    needed_bytes = _growth(one.plan, problem) * one.plan.peak_bytes
    if limit_bytes < TIGHTER * needed_bytes:
        return None
    schedule = _within(graph, _replayed(one, graph), limit_bytes)
    if schedule is None:
        return None
    made = planning.plan_of(problem, schedule, limit_bytes)
    if made is not None and problem.waits:
        made = planning.waiting(made, problem.waits)
    if made is None or made.peak_bytes > limit_bytes:
        return None
    is_as_good = made.overhead <= (1 + MORE) * one.plan.overhead + WORSE
    return made if is_as_good or limit_bytes < needed_bytes else None


def _within(graph: CDGraph, schedule: Schedule, limit_bytes: int) -> Schedule | None:
    """`schedule` with the re-executions that the budget asks for; None if none are found."""
    everything = keep_all(graph)
    if simulate(graph, everything).peak_bytes <= limit_bytes:
        return everything
    try:
        verify(graph, schedule)
    except IllegalSchedule:
        return None
    peak_bytes = simulate(graph, schedule).peak_bytes
    if peak_bytes <= limit_bytes:
        return pruned(graph, schedule, limit_bytes)
    repaired_schedule = repaired(graph, schedule, limit_bytes, limits=QUICK)
    if repaired_schedule is None or peak_bytes <= (1 + SLIGHTLY) * limit_bytes:
        return repaired_schedule
    return exchanged(graph, repaired_schedule, limit_bytes, limits=QUICK)


def carried_over(plan: Plan, graph: CDGraph) -> Schedule | None:
    """The schedule of `plan` for `graph`, whatever the sizes; None where too many nodes differ."""
    nodes = _matched(plan.graph, graph)
    return None if nodes is None else _replayed(_Alike(plan, nodes), graph)


def _replayed(one: _Alike, graph: CDGraph) -> Schedule:
    """The schedule of a plan for `graph`."""
    first, second = one.plan.schedule.phases
    # What the forward made is made again in the backward phase, too.
    orders = (
        _order(first, one.nodes, _eager(graph, graph.forward)),
        _order(second, one.nodes, _eager(graph, graph.backward)),
    )
    return with_frees(graph, *without_idle(graph, *orders))


def _eager(graph: CDGraph, nodes: Sequence[ComputeNode]) -> Sequence[ComputeNode]:
    """`nodes` in eager's order: that of a graph depends on sizes."""
    if not graph.eager_order:
        return nodes
    place = {node: position for position, node in enumerate(graph.eager_order)}
    return sorted(nodes, key=lambda n: place[n.index])


def _matched(before: CDGraph, after: CDGraph) -> dict[int, int] | None:
    """Nodes of one graph -> those of the other that do the same; None where too many differ."""
    forward = _pairs(before.forward, after.forward)
    backward = _pairs(_eager(before, before.backward), _eager(after, after.backward))
    return None if forward is None or backward is None else forward | backward


def _pairs(old: Sequence[ComputeNode], new: Sequence[ComputeNode]) -> dict[int, int] | None:
    """All but a few that stand together in one place. None where more differ."""
    if abs(len(old) - len(new)) > FEW:
        return None
    a, b = [*map(_kind, old)], [*map(_kind, new)]
    shorter = min(len(a), len(b))
    start = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    left = shorter - start
    end = next((i for i in range(left) if a[-1 - i] != b[-1 - i]), left)
    if max(len(a), len(b)) - start - end > FEW or start + end == 0:
        return None
    pairs = [*zip(old[:start], new[:start], strict=True)]
    pairs += zip(old[len(a) - end :], new[len(b) - end :], strict=True)
    return {o.index: n.index for o, n in pairs}


def _kind(node: ComputeNode) -> tuple[object, ...]:
    """What a node does, whatever the sizes."""
    return tuple(stem(call.op) for call in node.calls), node.module, node.random, node.recomputable


def _shapes(graph: CDGraph, node: ComputeNode) -> list[tuple[int, ...]]:
    """Of the results."""
    return [graph.values[v].spec.shape for call in node.calls for v in call.made]


def _order(
    known: Iterable[int], matched: Mapping[int, int], nodes: Sequence[ComputeNode]
) -> tuple[int, ...]:
    """What runs of `known`, and each of `nodes` that does not before the first that follows it."""
    runs = [matched[node] for node in known if node in matched]
    run = frozenset(runs)
    before: dict[int | None, list[int]] = defaultdict(list)
    following: int | None = None
    for node in reversed(nodes):
        if node.index in run:
            following = node.index
        else:
            before[following].insert(0, node.index)
    order: list[int] = []
    for index in runs:
        order += (*before.pop(index, ()), index)
    return (*order, *before.pop(None, ()))
