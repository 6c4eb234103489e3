"""A plan for a budget, or for each of a curve: from a priced graph to a certified schedule.

takes: a Problem, a Budget, Options. returns: Plan. guarantees: the schedule is legal under the
constraints of the options and within the budget as `simulate` finds it; a plan in the cache is not
solved again. The cache does not change which plan is found, except that the smallest budget is no
larger than what any plan in it needs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from rockplan.budget import Budget
from rockplan.errors import IllegalSchedule, InfeasibleBudget
from rockplan.graph_builder.digests import takes_digest
from rockplan.ilp.pulp_models import check_solver
from rockplan.options import ROWS, Options
from rockplan.oracles.clock import trips
from rockplan.oracles.graph_view import view_of
from rockplan.oracles.peak_owner import peak_owner
from rockplan.oracles.simulate import Simulation, simulate, timeline
from rockplan.oracles.verify import verify
from rockplan.search.incumbent import Incumbent
from rockplan.search.limits import Limits
from rockplan.search.minimum_peak import LeastPeak
from rockplan.search.paging import SHARE
from rockplan.search.pipeline import POLISH, STAGES, check_names, run
from rockplan.search.problem import Goal, Problem, cache_of
from rockplan.store.fingerprint import planner
from rockplan.store.plan_file import is_outline_of
from rockplan.values import schedule as schedules
from rockplan.values.copies import shifted, with_copies, with_copies_of
from rockplan.values.curve import Curve, CurvePoint, useful
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import CDGraph
from rockplan.values.plan import BlockSummary, Certificate, Plan, Status
from rockplan.values.profile import Profile
from rockplan.values.progress import part


def limits_of(options: Options) -> Limits:
    """Return the limits of a search that begins now, under `options`. Raises InvalidInput for
    unknown names of stages or solvers."""
    check_names(options.without)
    check_solver(options.solver)
    usual = Limits()
    return Limits(
        deadline=time.process_time() + options.time_limit_s,
        proof_s=options.bound_time_limit_s,
        without=frozenset(options.without),
        blocks=replace(usual.blocks, solver=options.solver),
        ends=replace(usual.ends, solver=options.solver),
    )


def least_peak_of(problem: Problem, options: Options) -> LeastPeak:
    """Return the least peak of a problem, which its plans share: it is searched only once."""
    goal = Goal(problem.constrained, problem.blocks, None, cache_of(options))
    return LeastPeak(goal, frozenset(options.without))


def plan_within(
    problem: Problem, budget: Budget, options: Options, least: LeastPeak | None = None
) -> Plan:
    """Return the plan for `budget`, from the cache or made now. Raises InfeasibleBudget. least: the
    search of the least peak, shared with other plans; None for a new one.

    If gradients wait until their parameters are no longer read (`Problem.waits`), plans for fewer
    bytes are made until waiting fits the budget; if no plan leaves that room, no gradient waits.
    The smallest budget includes the bytes of waiting.
    """
    if problem.waits:
        least = least or least_peak_of(problem, options)
    plain = _without_waits(problem, budget, options, least)
    if not problem.waits:
        return plain
    limit_bytes = plain.budget_bytes
    if budget.is_minimum and (waited := waiting(plain, problem.waits)).peak_bytes > limit_bytes:
        # Within as many bytes there may be a faster plan whose gradients can wait, too.
        plan = plan_within(problem, Budget(size_bytes=waited.peak_bytes), options, least)
        if waiting(plan, problem.waits).peak_bytes <= plan.budget_bytes:
            return plan
        waited = replace(waited, budget_bytes=waited.peak_bytes)
        return _certified(problem, waited, plan)
    found = plain
    while (plan := waiting(found, problem.waits)).peak_bytes > limit_bytes:
        excess_bytes = max(plan.peak_bytes - limit_bytes, int(LESS * limit_bytes), 1)
        asked = Budget(size_bytes=found.peak_bytes - excess_bytes)
        try:
            found = _without_waits(problem, asked, options, least)
        except InfeasibleBudget as error:
            if found.peak_bytes <= error.minimum_bytes:
                return plain
            asked = Budget(size_bytes=error.minimum_bytes)
            found = _without_waits(problem, asked, options, least)
    plan = replace(plan, budget_bytes=limit_bytes)
    return plan if found is plain else _certified(problem, plan, plain)


LESS = 0.03
"""Share of the budget by which the next plan has to be smaller, at least, to leave room for waiting
gradients. On three blocks with gated layers (`tests/test_hooks.py`) at 60 % the second plan leaves
it; on two layers of an encoder the first."""


def waiting(plan: Plan, waits: schedules.Waits) -> Plan:
    """Return `plan` with gradients of hooked parameters waiting; it may need more than its
    budget."""
    schedule = schedules.with_waits(plan.graph, plan.schedule, waits)
    return replace(plan, schedule=schedule, peak_bytes=simulate(plan.graph, schedule).peak_bytes)


def _certified(problem: Problem, plan: Plan, proven: Plan) -> Plan:
    """proven: a plan made for this budget; its lower bound on the time holds for `plan` if both
    have their first executions in the same order, else the bound is 0."""
    orders = {schedules.first_executions(p.schedule) for p in (plan, proven)}
    bound_ns = proven.certificate.bound_ns if len(orders) == 1 else 0
    certificate = _certificate(problem.constrained, simulate(plan.graph, plan.schedule), bound_ns)
    made = replace(plan, certificate=certificate)
    was_stopped = plan.certificate.status is Status.TIME_LIMIT
    return _stopped(made) if was_stopped and certificate.status is not Status.OPTIMAL else made


def _stopped(plan: Plan) -> Plan:
    return replace(plan, certificate=replace(plan.certificate, status=Status.TIME_LIMIT))


def _without_waits(
    problem: Problem, budget: Budget, options: Options, least: LeastPeak | None
) -> Plan:
    cache = cache_of(options)
    least = least or least_peak_of(problem, options)
    if cache is None:
        return plan_anew(problem, budget, options, least)
    key = _plan_key(problem, budget, options)
    graph = problem.graph

    def is_of_graph(known: Plan) -> bool:
        copied = with_copies_of(graph, known.graph)
        return known.graph_digest == key["graph"] and is_outline_of(known.graph, copied)

    known = cache.plan(key, is_of_graph)
    if known is not None and not (budget.is_minimum and least.is_below(known.peak_bytes)):
        copied = with_copies_of(graph, known.graph)
        return replace(known, graph=copied, passes=problem.passes)
    made = plan_anew(problem, budget, options, least)
    cache.put_plan(key, made)
    if budget.is_minimum:
        cache.put_plan(_plan_key(problem, Budget(size_bytes=made.budget_bytes), options), made)
    return made


LARGE_SPREAD = 0.25
"""Spread of repeated times, as a share of the time, from which on the plan mentions it. On an idle
machine half of the repeats of a call are within 10 to 20 %."""


def profile_source(profile: Profile) -> str:
    """Say where the prices come from, and whether to distrust them."""
    source = f"{profile.source} on {profile.device}, torch {profile.torch_version}"
    if profile.spread < LARGE_SPREAD:
        return source
    return f"{source}; repeats differ by {profile.spread:.0%} (a busy machine?)"


def _plan_key(problem: Problem, budget: Budget, options: Options) -> dict[str, str]:
    """The graph's digest stands for the model, shapes, dtypes, autocast and device."""
    deciding = (name for name, row in ROWS.items() if row.decides)
    return {
        "graph": problem.graph_digest,
        "takes": takes_digest(problem.graph),
        "profile": problem.profile_digest,
        "device": problem.profile.device,
        "torch": str(torch.__version__),
        "budget": str(budget),
        "planner": planner(),
        **({"host": repr(problem.host)} if problem.host else {}),
        **{f"option {name}": repr(getattr(options, name)) for name in deciding},
    }


def plan_of(problem: Problem, schedule: schedules.Schedule, budget_bytes: int) -> Plan | None:
    """Return `schedule` as a plan for budget_bytes, None if it is illegal or exceeds them. The
    bound of its certificate is the time of running each operation once."""
    graph = problem.constrained
    try:
        verify(graph, schedule)
    except IllegalSchedule:
        return None
    made = _finish(problem, schedule, budget_bytes, graph.time_ns)
    return made if made.peak_bytes <= budget_bytes else None


def plan_anew(
    problem: Problem, budget: Budget, options: Options, least: LeastPeak | None = None
) -> Plan:
    """Search a plan without looking for it in the cache. For the smallest budget it is the plan for
    the bytes of the least peak; where a plan of a similar graph is known, for the bytes that its
    schedule needs here, or its own if these are more. Raises InfeasibleBudget. least: the search of
    the least peak, shared with other plans of the problem; None for a new one."""
    limits = limits_of(options)
    least = least or least_peak_of(problem, options)
    budget_bytes = budget.within(problem.unplanned.peak_bytes)
    graph = problem.constrained
    start = Incumbent(bound_ns=graph.time_ns)
    if problem.known is not None:
        if budget_bytes is None:
            needed_bytes = simulate(graph, problem.known.schedule).peak_bytes
            budget_bytes = max(needed_bytes, problem.known.budget_bytes)
        goal = Goal(graph, problem.blocks, budget_bytes)
        start = start.improved(goal, problem.known.schedule)
    if budget_bytes is None:
        smallest = least.find(limits)
        budget_bytes = smallest.peak_bytes
        start = _from_smallest(problem, start, smallest)
    goal = Goal(graph, problem.blocks, budget_bytes, cache_of(options), problem.host)
    incumbent = run(STAGES, goal, limits, start)
    if (paged := incumbent.fastest_paged) is not None:
        bound_ns = incumbent.paged_bound_ns
        made = _finish(problem, paged.schedule, budget_bytes, bound_ns, paged.storages)
        made = replace(made, trace=incumbent.trace)
        return made if incumbent.is_complete else _stopped(made)
    if incumbent.schedule is None:
        smallest = least.find(limits)
        if budget_bytes < smallest.peak_bytes:
            raise _too_small(problem, smallest, budget_bytes, options)
        incumbent = run(POLISH, goal, limits, _from_smallest(problem, incumbent, smallest))
    assert incumbent.schedule is not None
    least.reach(incumbent.schedule)
    bound_ns = incumbent.bound_ns if problem.host is None else incumbent.paged_bound_ns
    made = _finish(problem, incumbent.schedule, budget_bytes, bound_ns)
    made = replace(made, trace=incumbent.trace)
    # For the smallest budget a proof about time is not enough: with more time its bytes may shrink.
    is_proven = made.certificate.status is Status.OPTIMAL and not budget.is_minimum
    return made if incumbent.is_complete or is_proven else _stopped(made)


def _from_smallest(problem: Problem, incumbent: Incumbent, smallest: Incumbent) -> Incumbent:
    goal = Goal(problem.constrained, problem.blocks, smallest.peak_bytes)
    return replace(
        incumbent.improved(goal, smallest.schedule),
        is_complete=incumbent.is_complete and smallest.is_complete,
        trace=(*incumbent.trace, *smallest.trace),
    )


def _too_small(
    problem: Problem, least: Incumbent, budget_bytes: int, options: Options
) -> InfeasibleBudget:
    graph, schedule = problem.constrained, least.schedule
    assert schedule is not None
    peak = simulate(graph, schedule)
    event = schedule.events[peak.peak_event]
    where = "a free"
    if isinstance(event, schedules.Compute):
        node = graph.nodes[event.node]
        place = f" in '{node.module}'" if node.module else ""
        line = f" ({node.source})" if node.source else ""
        where = f"{node.phase.value} operation {node.name}{place}{line}"
    if event == schedules.Compute(len(graph.forward) - 1):
        # The peak that a plan states leaves this room out, and may be less.
        where += ", with room for the loss of the caller"
    asked = [f"{n}={getattr(options, n)!r}" for n in ("keep", "recompute") if getattr(options, n)]
    where += f" (under {', '.join(asked)})" if asked else ""
    owner, owner_bytes, maker = peak_owner(problem.graph, schedule, peak.peak_event)
    return InfeasibleBudget(
        budget_bytes,
        peak.peak_bytes,
        where,
        least.is_complete,
        unplanned_bytes=problem.unplanned.peak_bytes,
        owner=owner,
        owner_bytes=owner_bytes,
        module_path=maker.module if maker else None,
        source=maker.source if maker else None,
    )


@paused_collection()
def _finish(
    problem: Problem,
    schedule: schedules.Schedule,
    budget_bytes: int,
    bound_ns: int,
    storages: Sequence[int] = (),
) -> Plan:
    """Gradients are handed over in groups where that needs no more memory. storages: those that go
    to the host; the schedule is then one of the graph with their copies."""
    unplanned, turn = problem.unplanned, len(problem.graph.forward)
    graph, constrained = (
        with_copies(g, storages, problem.host.link.share(SHARE)) if problem.host else g
        for g in (problem.graph, problem.constrained)
    )
    blocks = tuple(
        BlockSummary(
            b.name, b.digest, b.forward, tuple(shifted(b.backward, turn, 2 * len(storages)))
        )
        for b in problem.blocks
    )
    ends = frozenset(b.backward[-1] for b in blocks if b.backward)
    during_bytes = [step.during_bytes for step in timeline(graph, schedule)]
    merged = schedules.merge_handovers(graph, schedule, view_of(graph).sizes, during_bytes, ends)
    verify(constrained, merged)
    simulation = simulate(graph, merged)
    certificate = _certificate(constrained, simulation, bound_ns)
    compiled = "" if not graph.kernels else "near" if graph.kernels[0].keeps_roundings else "yes"
    return Plan(
        graph=graph,
        schedule=merged,
        blocks=blocks,
        budget_bytes=budget_bytes,
        peak_bytes=simulation.peak_bytes,
        saved_bytes=simulation.saved_bytes,
        time_ns=simulation.time_ns,
        eager_peak_bytes=unplanned.peak_bytes,
        eager_time_ns=unplanned.time_ns,
        certificate=certificate,
        graph_digest=problem.graph_digest,
        profile_digest=problem.profile_digest,
        profile_source=profile_source(problem.profile),
        torch_version=str(torch.__version__),
        compiled=compiled,
        trips=trips(graph, merged),
        passes=problem.passes,
    )


def _certificate(graph: CDGraph, simulation: Simulation, bound_ns: int) -> Certificate:
    """bound_ns: proven; the time of running each node once is a bound, too."""
    bound = min(max(bound_ns, graph.time_ns), simulation.time_ns)
    status = Status.OPTIMAL if bound == simulation.time_ns else Status.FEASIBLE
    return Certificate(status, simulation.time_ns, bound)


def curve_of(problem: Problem, options: Options) -> Curve:
    """Return time against memory: plans for the smallest budget and for up to POINTS - 1 others,
    from the peak of keep-all down in equal ratios (most changes where memory is short). Points that
    are no faster than one with less memory are left out."""
    graph = problem.constrained
    least = least_peak_of(problem, options)
    with part(f"plan 1 of {POINTS}"):
        smallest = plan_within(problem, Budget(is_minimum=True), options, least)
    least_bytes, most_bytes = (
        smallest.budget_bytes,
        simulate(graph, schedules.keep_all(graph)).peak_bytes,
    )
    plans = [smallest]
    covered_bytes = most_bytes + 1
    for step in range(POINTS - 1, 0, -1):
        budget_bytes = round(least_bytes * (most_bytes / least_bytes) ** (step / (POINTS - 1)))
        if budget_bytes < covered_bytes:
            with part(f"plan {POINTS - step + 1} of {POINTS}"):
                plans.append(_settled(problem, budget_bytes, smallest, options, least))
            covered_bytes = plans[-1].budget_bytes
    return Curve(
        points=useful(
            CurvePoint(p.budget_bytes, p.saved_bytes, p.certificate, problem.graph.time_ns)
            for p in plans
        ),
        unplanned_bytes=problem.unplanned.peak_bytes,
        graph_digest=problem.graph_digest,
        profile_digest=problem.profile_digest,
        profile_source=profile_source(problem.profile),
    )


POINTS = 16
"""Budgets of a curve, each of which is planned."""

SPARE = 0.05
"""Share of a budget on the curve: a plan that leaves more unused is planned again within the bytes
it needs. (On two layers of a transformer plans leave 1 to 3 %, and stay the same then.)"""


def _settled(
    problem: Problem, budget_bytes: int, smallest: Plan, options: Options, least: LeastPeak
) -> Plan:
    """As long as a plan leaves more than SPARE unused, ask again for the bytes that it needs;
    `smallest`, the plan for the smallest budget, ends that."""
    while budget_bytes > smallest.budget_bytes:
        plan = plan_within(problem, Budget(size_bytes=budget_bytes), options, least)
        if plan.peak_bytes >= (1 - SPARE) * budget_bytes:
            return plan
        budget_bytes = plan.peak_bytes
    return smallest
