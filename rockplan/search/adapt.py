"""Adapt: the known plan of a module -> a plan for another kind of call, without a new search.

takes: plans, another kind of call as it was captured, its budget. returns: a Plan, or None if no
plan carries over. guarantees: as `planning`, but nothing is proven: the bound is the time without
re-executions. Bytes are those of the call itself, as measured. Times are scaled from those of the
known plan (`graph_builder.costs.scaled`).

A trainer calls a model nearly as its sample did: with a mask of ones, with a number by which the
loss is divided, with one tensor passed once or twice, with a scalar of another dtype. Then the same
storages are worth keeping. So the known schedule is replayed on the graph of the call. If that
exceeds the budget, a short local search (`QUICK`) makes room; if it leaves room, re-executions are
left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rockplan.budget import Budget
from rockplan.errors import IllegalSchedule
from rockplan.graph_builder.costs.call_key import call_keys, device_of
from rockplan.graph_builder.costs.estimate import fallback_rates, roofline
from rockplan.graph_builder.costs.price import price, profile_of, with_measured_memory
from rockplan.graph_builder.costs.scaled import with_scaled_times
from rockplan.graph_builder.digests import digest
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search import planning
from rockplan.search.local.exchange import ExchangeLimits, exchanged, pruned, repaired
from rockplan.search.problem import Problem, problem_of_priced
from rockplan.values.copies import without_copies
from rockplan.values.graph import CDGraph, ComputeNode, stem
from rockplan.values.order import without_idle
from rockplan.values.plan import Plan
from rockplan.values.schedule import Schedule, Waits, keep_all, with_frees

FEW = 8
"""Operations of a phase that may differ. A loss that is a sum divided by a number, instead of a
mean, has one or two operations more."""

WORSE = 0.01
MORE = 0.25
"""How much more time re-executions may take than in the known plan, if that plan has no larger
share of eager's peak: a share of the iteration time, plus a share of the known plan's overhead.
(The second is for models of one or two layers, where a single result matters.)"""

TIGHTER = 0.5
"""Share of the bytes that the known plan needs at this size: within less, a search finds better
plans. Within more, adapted plans of two and four layers of Llama, GPT-2, BERT and ViT at 45 to 80 %
are within 0.8 points of a search, and once 1.4 off; within less, up to 2.7."""

SLIGHTLY = 1.01
"""A little more than in proportion: not all storages of a schedule grow as eager's peak does. The
smallest plan of a Llama needs .02 to .1 % more so at other sizes."""

MOST = 3
"""Plans that are tried, those first that recompute less."""

QUICK = ExchangeLimits(effort=60_000, rounds=1, most_rounds=1)
"""Limits of the local search if a known schedule exceeds the budget."""


_Alike = tuple[Plan, dict[int, int]]
"""A known plan, and node of its graph -> node of the call's graph that does the same."""


def adapted(
    known: Iterable[Plan], lowered: Lowered, waits: Waits, budget: Budget, options: Options
) -> Plan | None:
    """Return a plan within `budget` for the graph of `lowered` that replays the schedule of one of
    `known`; None if none carries over. waits: gradients that are handed over only after the last
    read of their parameter."""
    matched = ((plan, _matched(plan.graph, lowered.graph)) for plan in _by_overhead(known))
    alike = [(plan, nodes) for plan, nodes in matched if nodes is not None]
    if not alike:
        return None
    first, nodes = alike[0]
    inverse = {new: old for old, new in nodes.items()}
    graph, keys = lowered.graph, call_keys(lowered.graph)
    profile = roofline(graph, fallback_rates(graph), keys)
    profile = with_measured_memory(graph, lowered.samples, profile, keys)
    priced = with_scaled_times(price(graph, profile, keys), first.graph, inverse)
    source = f"sizes measured, times scaled from those of graph {first.graph_digest[:12]}"
    problem = problem_of_priced(priced, replace(profile, source=source), options)
    return _first(alike, replace(problem, waits=waits), budget)


def problem_at_other_sizes(known: Plan, graph: CDGraph, waits: Waits, options: Options) -> Problem:
    """Return the problem of the graph of a known plan at other sizes, with times scaled from those
    of the plan. graph: the same nodes, with their bytes; waits: as for `adapted`."""
    same = {node.index: node.index for node in graph.nodes}
    priced = with_scaled_times(graph, without_copies(known.graph), same)
    profile = replace(
        profile_of("", device_of(graph), {}),
        source=f"sizes computed, times scaled from those of graph {known.graph_digest[:12]}",
    )
    # The profile does not have these prices, which plans in the cache are for.
    prices = digest([[n.time_ns, n.workspace_bytes] for n in priced.nodes])
    return replace(problem_of_priced(priced, profile, options), waits=waits, profile_digest=prices)


def replayed(known: Iterable[Plan], problem: Problem, budget: Budget) -> Plan | None:
    """Return a plan within `budget` that replays the schedule of one of the plans `known`, which
    are for the graph of the problem at other sizes. None if none carries over."""
    same = {node.index: node.index for node in problem.graph.nodes}
    return _first([(plan, same) for plan in _by_overhead(known)], problem, budget)


def _by_overhead(known: Iterable[Plan]) -> list[Plan]:
    """How much is paged depends on the size; what other calls in flight keep is not considered
    here."""
    return sorted((p for p in known if not p.trips and p.in_flight == 1), key=lambda p: p.overhead)


def _first(alike: Sequence[_Alike], problem: Problem, budget: Budget) -> Plan | None:
    if not alike:
        return None
    limit_bytes = budget.within(problem.unplanned.peak_bytes)
    if limit_bytes is None:  # the least of a known plan, in proportion for a larger call
        growths = ((p, _growth(p, problem)) for p, _ in alike)
        limit_bytes = int(min(p.budget_bytes * (g * SLIGHTLY if g > 1 else 1) for p, g in growths))
    plans = (_transferred(one, problem, limit_bytes) for one in alike[:MOST])
    return next((plan for plan in plans if plan is not None), None)


def _growth(plan: Plan, problem: Problem) -> float:
    return problem.unplanned.peak_bytes / max(plan.eager_peak_bytes, 1)


def _transferred(one: _Alike, problem: Problem, limit_bytes: int) -> Plan | None:
    """None if the known schedule is illegal here or does not fit, or re-executes more than in the
    known plan though that has no larger share of eager's peak."""
    graph = problem.constrained
    known, _ = one
    needed_bytes = _growth(known, problem) * known.peak_bytes
    if limit_bytes < TIGHTER * needed_bytes:
        return None
    schedule = _within(graph, _replayed(one, graph), limit_bytes)
    if schedule is None:
        return None
    plan = planning.plan_of(problem, schedule, limit_bytes)
    if plan is not None and problem.waits:
        plan = planning.waiting(plan, problem.waits)
    if plan is None or plan.peak_bytes > limit_bytes:
        return None
    is_as_good = plan.overhead <= (1 + MORE) * known.overhead + WORSE
    return plan if is_as_good or limit_bytes < needed_bytes else None


def _within(graph: CDGraph, schedule: Schedule, limit_bytes: int) -> Schedule | None:
    """Keep-all if that fits; else re-executions that the limit does not need are left out, others
    inserted. None if `schedule` is illegal or no room is found."""
    everything = keep_all(graph)
    if simulate(graph, everything).peak_bytes <= limit_bytes:
        return everything
    try:
        verify(graph, schedule)
    except IllegalSchedule:
        return None
    if simulate(graph, schedule).peak_bytes <= limit_bytes:
        return pruned(graph, schedule, limit_bytes)
    found = repaired(graph, schedule, limit_bytes, limits=QUICK)
    return None if found is None else exchanged(graph, found, limit_bytes, limits=QUICK)


def carried_over(plan: Plan, graph: CDGraph) -> Schedule | None:
    """Return the schedule of `plan` for `graph`, which may have other sizes; None if too many nodes
    differ."""
    nodes = _matched(plan.graph, graph)
    return None if nodes is None else _replayed((plan, nodes), graph)


def _replayed(one: _Alike, graph: CDGraph) -> Schedule:
    plan, matched = one
    forward, backward = plan.schedule.phases
    # The backward order of the plan has re-executions of forward nodes, too.
    orders = (
        _order(forward, matched, _in_eager_order(graph, graph.forward)),
        _order(backward, matched, _in_eager_order(graph, graph.backward)),
    )
    return with_frees(graph, *without_idle(graph, *orders))


def _in_eager_order(graph: CDGraph, nodes: Sequence[ComputeNode]) -> Sequence[ComputeNode]:
    if not graph.eager_order:
        return nodes
    place = {node: position for position, node in enumerate(graph.eager_order)}
    return sorted(nodes, key=lambda n: place[n.index])


def _matched(before: CDGraph, after: CDGraph) -> dict[int, int] | None:
    """None if too many nodes differ."""
    forward = _pairs(before.forward, after.forward)
    backward = _pairs(
        _in_eager_order(before, before.backward), _in_eager_order(after, after.backward)
    )
    return None if forward is None or backward is None else forward | backward


def _pairs(old: Sequence[ComputeNode], new: Sequence[ComputeNode]) -> dict[int, int] | None:
    """Nodes of one kind, from both ends of the lists; those in the middle stay unpaired. None if
    these are more than FEW, or all."""
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
    return tuple(stem(call.op) for call in node.calls), node.module, node.random, node.recomputable


def _order(
    known: Iterable[int], matched: Mapping[int, int], nodes: Sequence[ComputeNode]
) -> tuple[int, ...]:
    """matched: node there -> node here. Each of `nodes` that is not executed so comes before the
    first execution of the next one that is, or at the end."""
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
