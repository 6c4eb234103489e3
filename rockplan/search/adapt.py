"""Adapt: the problem of another kind of call of a module, from a plan of a similar one.

takes: plans, another kind of call as it was captured. returns: its Problem, or None if no plan is
of nearly the same graph. guarantees: bytes are those of the call itself, as measured; times are
scaled from those of the known plan (`graph_builder.costs.estimate`), so that nothing is timed.

A trainer calls a model nearly as its sample did: with a mask of ones, with a number by which the
loss is divided, with one tensor passed once or twice, with a scalar of another dtype. Then the same
storages are worth keeping: the search begins with the known order of computations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rockplan.errors import IllegalSchedule
from rockplan.graph_builder.costs.call_key import call_keys, device_of
from rockplan.graph_builder.costs.estimate import fallback_rates, roofline, with_scaled_times
from rockplan.graph_builder.costs.price import price, profile_of, with_measured_memory
from rockplan.graph_builder.digests import digest
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.options import Options
from rockplan.oracles.verify import verify
from rockplan.search.problem import KnownSchedule, Problem, problem_of_priced
from rockplan.values.copies import paged, without_copies
from rockplan.values.graph import CDGraph, ComputeNode, stem
from rockplan.values.order import without_idle
from rockplan.values.plan import Plan
from rockplan.values.profile import Profile
from rockplan.values.schedule import Schedule, Waits, with_frees

FEW = 8
"""Operations of a phase that may differ. A loss that is a sum divided by a number, instead of a
mean, has one or two operations more."""


def problem_like(
    known: Iterable[Plan], lowered: Lowered, waits: Waits, options: Options
) -> Problem | None:
    """Return the problem of a captured call whose graph is nearly that of one of the plans `known`,
    of several the one that recomputes most: it fits where another does. None if there is none.
    waits: gradients that are handed over only after the last read of their parameter."""
    graph = lowered.graph
    plain = sorted((p for p in known if not paged(p.graph)), key=lambda p: -p.overhead)
    matched = ((plan, _matched(plan.graph, graph)) for plan in plain)
    plan, nodes = next((one for one in matched if one[1] is not None), (None, None))
    if plan is None or nodes is None:
        return None
    keys = call_keys(graph)
    profile = roofline(graph, fallback_rates(graph), keys)
    profile = with_measured_memory(graph, lowered.samples, profile, keys)
    inverse = {new: old for old, new in nodes.items()}
    priced = with_scaled_times(price(graph, profile, keys), plan.graph, inverse)
    return _problem(priced, profile, "measured", plan, nodes, waits, options)


def problem_at_other_sizes(known: Plan, graph: CDGraph, waits: Waits, options: Options) -> Problem:
    """Return the problem of the graph of a known plan at other sizes. graph: the same nodes, with
    their bytes; waits: as for `problem_like`."""
    same = {node.index: node.index for node in graph.nodes}
    priced = with_scaled_times(graph, without_copies(known.graph), same)
    profile = profile_of("", device_of(graph), {})
    return _problem(priced, profile, "computed", known, same, waits, options)


def _problem(
    priced: CDGraph,
    profile: Profile,
    how: str,
    plan: Plan,
    nodes: dict[int, int],
    waits: Waits,
    options: Options,
) -> Problem:
    source = f"sizes {how}, times scaled from those of graph {plan.graph_digest[:12]}"
    problem = problem_of_priced(priced, replace(profile, source=source), options)
    # The profile does not have these prices, which plans in the cache are for.
    prices = digest([[n.time_ns, n.workspace_bytes] for n in priced.nodes])
    problem = replace(problem, waits=waits, profile_digest=prices)
    if paged(plan.graph):  # its schedule is one of the graph with copies
        return problem
    schedule = _replayed(plan.schedule, nodes, problem.constrained)
    try:
        verify(problem.constrained, schedule)
    except IllegalSchedule:
        return problem
    return replace(problem, known=KnownSchedule(schedule, plan.budget_bytes))


def _replayed(schedule: Schedule, matched: Mapping[int, int], graph: CDGraph) -> Schedule:
    forward, backward = schedule.phases
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
