"""Adapt: a plan that a module has -> one for another kind of call that differs in few operations.

takes: plans, the problem of the other kind, its budget. returns: a Plan, or None where none carries
over. guarantees: as `planning`, but that nothing was searched: the bound is that of running nothing
again, and the plan runs no larger share of the time again than the one that it is made of.

A trainer calls a model nearly as its sample did: with a number by which the loss is divided, with
one tensor in two places or two, with a scalar of another dtype. What is worth keeping and what to
compute again is the same then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rockplan.budget import Budget
from rockplan.search import planning
from rockplan.search.problem import Problem
from rockplan.values.graph import CDGraph, ComputeNode
from rockplan.values.order import without_idle
from rockplan.values.plan import Plan
from rockplan.values.schedule import Schedule, with_frees

FEW = 8
"""Operations of a phase that may be others. A loss that is a sum divided by a number, instead of a
mean, is one or two operations more."""

WORSE = 0.01
"""Share of the iteration time that more may run again than in the plan that is known."""


def adapted(known: Iterable[Plan], problem: Problem, budget: Budget) -> tuple[Plan, Plan] | None:
    """(the plan for `problem`, that of `known` which it is made of), within `budget`."""
    budget_bytes = budget.within(problem.unplanned.peak_bytes)
    if problem.waits:
        return None
    for plan in known:
        schedule = carried_over(plan, problem.constrained)
        if schedule is None:
            continue
        limit_bytes = plan.budget_bytes if budget_bytes is None else budget_bytes
        made = planning.plan_of(problem, schedule, limit_bytes)
        if made is not None and made.overhead <= plan.overhead + WORSE:
            return made, plan
    return None


def carried_over(plan: Plan, graph: CDGraph) -> Schedule | None:
    """The schedule of `plan` for `graph`."""
    before = plan.graph
    forward = _matched(before, before.forward, graph, graph.forward)
    backward = _matched(before, before.backward, graph, graph.backward)
    if forward is None or backward is None:
        return None
    first, second = plan.schedule.phases
    orders = (
        _order(first, forward, graph.forward),
        # What the forward made is made again there, too.
        _order(second, forward | backward, graph.backward),
    )
    return with_frees(graph, *without_idle(graph, *orders))


def _matched(
    before: CDGraph, old: Sequence[ComputeNode], after: CDGraph, new: Sequence[ComputeNode]
) -> dict[int, int] | None:
    """`old` nodes of one graph -> those of the other that do the same to as much: all but a few
    that stand together in one place. None where more differ."""
    a = [_kind(before, node) for node in old]
    b = [_kind(after, node) for node in new]
    shorter = min(len(a), len(b))
    start = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    left = shorter - start
    end = next((i for i in range(left) if a[-1 - i] != b[-1 - i]), left)
    if max(len(a), len(b)) - start - end > FEW or start + end == 0:
        return None
    pairs = [*zip(old[:start], new[:start], strict=True)]
    pairs += zip(old[len(a) - end :], new[len(b) - end :], strict=True)
    return {o.index: n.index for o, n in pairs}


def _kind(graph: CDGraph, node: ComputeNode) -> tuple[object, ...]:
    sizes = tuple(graph.data[d].size_bytes for d in node.writes)
    return tuple(call.op for call in node.calls), node.module, sizes


def _order(
    known: Iterable[int], matched: dict[int, int], nodes: Sequence[ComputeNode]
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
