"""Stages of a search: each takes a goal, the incumbent and limits, and returns an incumbent.

Schedules are verified where they are made (`verify`), and compared with the budget where an
incumbent takes them (`Incumbent.improved`): so no stage can do harm, and none depends on another.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from rockplan.dp.chain_solver import ChainSolver
from rockplan.graph_builder.lowering.backward_order import renumbered
from rockplan.ilp.whole_graph.intervals import Facts
from rockplan.ilp.whole_graph.refine import Refined, proved_ns, refined
from rockplan.oracles.simulate import simulate
from rockplan.search.block_families import families
from rockplan.search.incumbent import Incumbent, moved
from rockplan.search.limits import Limits
from rockplan.search.local.exchange import annealed, exchanged, fitted, pruned, squeezed
from rockplan.search.local.greedy_eviction import thriftiest, within
from rockplan.search.paging import SHARE, best_placed, by_worth
from rockplan.search.problem import Goal
from rockplan.values.copies import shifted, with_fetches
from rockplan.values.graph import CDGraph
from rockplan.values.progress import report
from rockplan.values.schedule import Schedule, keep_all


def keep_everything(goal: Goal, incumbent: Incumbent, limits: Limits) -> Incumbent:
    """Every node once, if that is within the budget: nothing is faster."""
    return incumbent.improved(goal, keep_all(goal.graph))


def relax(goal: Goal, incumbent: Incumbent, limits: Limits) -> Incumbent:
    """The relaxation of the whole graph at some moments: its bound on the time, and its schedule,
    with re-executions inserted if that exceeds the budget. Where the goal is the least peak, for
    smaller and smaller budgets. Returns the incumbent with what it improved."""
    report("solving the relaxation")
    if goal.budget_bytes is None:
        return _relax_down(goal, incumbent, limits)
    relaxation = refined(goal.graph, goal.budget_bytes, deadline=_half_way(limits))
    if relaxation is None:
        return incumbent
    if (orders := relaxation.orders) is not None:
        schedule = fitted(
            goal.graph,
            orders.forward,
            orders.backward,
            goal.budget_bytes,
            deadline=limits.deadline,
            limits=limits.exchange,
        )
        incumbent = incumbent.improved(goal, schedule)
    if incumbent.order:
        return incumbent
    bound_ns = max(incumbent.bound_ns, relaxation.bound_ns)
    return replace(incumbent, relaxation=relaxation, bound_ns=bound_ns)


def _relax_down(goal: Goal, incumbent: Incumbent, limits: Limits) -> Incumbent:
    """Solve relaxations for smaller and smaller budgets: each the geometric mean of the peak
    reached and of a lower limit (what every schedule needs, or the last budget that failed), after
    the last of these budgets was tried at once. The smallest schedules are added to `starts` of the
    incumbent."""
    assert incumbent.schedule is not None
    until = _half_way(limits)
    least_bytes = max(Facts(goal.graph).forced_bytes, default=0)
    left_nodes = limits.missing
    rungs: list[Schedule] = []
    last = replace(goal, budget_bytes=int(least_bytes / (1 - limits.nearness)))
    at_once = relax(last, Incumbent(bound_ns=goal.graph.time_ns), limits).schedule
    if at_once is not None:
        rungs.append(at_once)
        incumbent = incumbent.improved(goal, at_once)
    while left_nodes > 0 and time.process_time() < until:
        most_bytes = incumbent.peak_bytes
        asked_bytes = int(math.sqrt(most_bytes * least_bytes))
        if asked_bytes > (1 - limits.nearness) * most_bytes:
            break
        asked = replace(goal, budget_bytes=asked_bytes)
        lower = relax(asked, Incumbent(bound_ns=goal.graph.time_ns), limits).schedule
        if lower is None:
            left_nodes, least_bytes = left_nodes - len(goal.graph.nodes), asked_bytes
        else:
            rungs.append(lower)
            incumbent = incumbent.improved(goal, lower)
    return replace(incumbent, starts=(*incumbent.starts, *reversed(rungs[-limits.rungs :])))


def evict(goal: Goal, incumbent: Incumbent, limits: Limits) -> Incumbent:
    """A schedule by greedy evictions: within the budget; where the goal is the least peak, the
    smallest they find, and all they find as `starts` for later stages. Returns the incumbent with
    it if it is better."""
    report("evicting storages")
    if goal.budget_bytes is not None:
        schedule = within(goal.graph, goal.budget_bytes, limits=limits.eviction)
        return incumbent.improved(goal, schedule)
    least = thriftiest(goal.graph, deadline=_half_way(limits), limits=limits.eviction)
    made = incumbent.improved(goal, least.schedule)
    return replace(
        made,
        starts=(*incumbent.starts, *least.schedules),
        is_exhausted=least.is_exhausted and made.schedule is least.schedule,
    )


def combine_blocks(goal: Goal, incumbent: Incumbent, limits: Limits) -> Incumbent:
    """Options of each block by integer programs, combined to a schedule by the dynamic program over
    the chain of blocks. Where the goal is the least peak, the schedule is one of the `starts` too.
    Returns the incumbent with it if it is better."""
    report("solving blocks")
    left_s = max(_half_way(limits) - time.process_time(), 0.0)
    settings = limits.blocks if goal.budget_bytes is not None else limits.ends
    known = families(goal.blocks, goal.cache, settings, left_s)
    is_complete = incumbent.is_complete and all(family.is_complete for family in known)
    incumbent = replace(incumbent, is_complete=is_complete)
    report("combining blocks")
    solver = ChainSolver(goal.graph, goal.blocks, known)
    # A table takes 2 to 3.5 s from 100 blocks on, and is useless until it is complete.
    until = max(limits.deadline, time.process_time() + limits.combining_s)
    if goal.budget_bytes is not None:
        schedule = solver.best_schedule(goal.budget_bytes, deadline=until)
        return incumbent.improved(goal, schedule)
    schedule = solver.thriftiest(deadline=until)
    starts = incumbent.starts if schedule is None else (*incumbent.starts, schedule)
    return replace(incumbent.improved(goal, schedule), starts=starts)


def page(goal: Goal, incumbent: Incumbent, limits: Limits) -> Incumbent:
    """Storages to the host and back, if that is faster than the incumbent: those that take longest
    to recompute for each byte, as many as the link carries, planned together with re-executions.
    Returns the incumbent with the schedule as `paged` if one is found."""
    report("choosing what goes to the host")

    def planned(asked: Goal, start: Incumbent) -> Incumbent:
        made = relax(asked, start, limits)
        return made if made.schedule is not None else evict(asked, made, limits)

    def polished(asked: Goal, start: Incumbent) -> Incumbent:
        return exchange(asked, start, limits)

    most_ns = math.inf if incumbent.schedule is None else incumbent.time_ns
    made = best_placed(goal, limits, most_ns, planned, polished)
    return incumbent if made is None else replace(incumbent, paged=made)


def exchange(goal: Goal, incumbent: Incumbent, limits: Limits) -> Incumbent:
    """The local search: from the incumbent's schedule to a faster one within the budget; where the
    goal is the least peak, to one with a smaller peak. Returns the incumbent with it."""
    assert incumbent.schedule is not None
    report("exchanging re-executions")
    if goal.budget_bytes is None:
        return _squeeze_all(goal, incumbent, limits)
    schedule = exchanged(
        goal.graph,
        incumbent.schedule,
        goal.budget_bytes,
        enough_ns=incumbent.enough_ns(goal, limits),
        deadline=limits.deadline,
        limits=limits.exchange,
    )
    return incumbent.improved(goal, schedule)


def prove(goal: Goal, incumbent: Incumbent, limits: Limits) -> Incumbent:
    """The bound of schedules in the order of the incumbent, by a new relaxation if that order is
    not the graph's or schedules may page; and what integer programs add to it in the time that the
    limits give them. Before, the schedule loses re-executions that the budget does not need.
    Returns the incumbent with bound and schedule."""
    assert goal.budget_bytes is not None
    report("proving a bound")
    if incumbent.schedule is not None and not incumbent.is_near(goal, limits):
        schedule = incumbent.schedule
        shorter = pruned(goal.graph, schedule, goal.budget_bytes, deadline=limits.deadline)
        incumbent = incumbent.improved(goal, shorter)
    if goal.host is not None:
        return replace(incumbent, paged_bound_ns=_bound_with_host(goal, incumbent, limits))
    relaxation = incumbent.relaxation
    if incumbent.order:
        graph = renumbered(goal.graph, incumbent.order)
        relaxation = refined(graph, goal.budget_bytes, deadline=limits.deadline)
        bound_ns = graph.time_ns if relaxation is None else relaxation.bound_ns
        incumbent = replace(incumbent, relaxation=relaxation, bound_ns=bound_ns)
    if relaxation is None:
        return incumbent
    return replace(incumbent, bound_ns=_proven_ns(relaxation, incumbent.time_ns, limits))


def _bound_with_host(goal: Goal, incumbent: Incumbent, limits: Limits) -> int:
    """Return a lower bound (ns) on the time of all schedules within the budget that page any of
    what may be paged, in the order of first executions of the incumbent's faster schedule."""
    assert goal.host is not None and goal.budget_bytes is not None
    paged, order, time_ns = incumbent.fastest_paged, incumbent.order, incumbent.time_ns
    if paged is not None:
        turn, copies = len(goal.graph.forward), 2 * len(paged.storages)
        order = tuple(shifted(moved(paged.graph, paged.schedule), turn, -copies))
        time_ns = paged.time_ns
    graph = renumbered(goal.graph, order) if order else goal.graph
    host = replace(goal.host, link=goal.host.link.share(SHARE))
    asked = with_fetches(graph, by_worth(graph))
    relaxation = refined(asked, goal.budget_bytes, deadline=limits.deadline, host=host)
    return graph.time_ns if relaxation is None else _proven_ns(relaxation, time_ns, limits)


def _proven_ns(relaxation: Refined, time_ns: int, limits: Limits) -> int:
    """Return the lower bound (ns) of `relaxation`, raised by integer programs if a schedule that
    takes `time_ns` is not near it and the limits give time for that."""
    bound_ns, graph = relaxation.bound_ns, relaxation.program.facts.graph
    is_near = time_ns <= bound_ns + int(limits.nearness * graph.time_ns)
    if limits.proof_s == 0 or is_near:
        return bound_ns
    until = min(limits.deadline, time.process_time() + limits.proof_s)
    return proved_ns(relaxation, deadline=until)


def _squeeze_all(goal: Goal, incumbent: Incumbent, limits: Limits) -> Incumbent:
    """Lower the peak by the local search: a little from each start that needs not much more than
    the best (which leads furthest is not known before), then more from the best result, and again
    from faster schedules within its peak. Returns the incumbent with the smallest."""
    assert incumbent.schedule is not None
    start_limits = _start_limits(limits)
    peaks = {start: simulate(goal.graph, start).peak_bytes for start in incumbent.starts}
    most_bytes = limits.worth * min(peaks.values(), default=0)
    for start in (start for start, peak_bytes in peaks.items() if peak_bytes <= most_bytes):
        incumbent = incumbent.improved(goal, _squeezed(goal.graph, start, start_limits))
    assert incumbent.schedule is not None
    incumbent = incumbent.improved(goal, _squeezed(goal.graph, incumbent.schedule, limits))
    # A faster schedule within the same peak is another place to begin at.
    for seed in range(1, limits.again + 1):
        assert incumbent.schedule is not None
        faster = annealed(
            goal.graph,
            incumbent.schedule,
            incumbent.peak_bytes,
            deadline=limits.deadline,
            limits=start_limits.squeeze,
            seed=seed,
        )
        incumbent = incumbent.improved(goal, _squeezed(goal.graph, faster, start_limits))
    return incumbent


def _start_limits(limits: Limits) -> Limits:
    return replace(limits, squeeze=replace(limits.squeeze, effort=limits.squeeze.start))


def _squeezed(graph: CDGraph, schedule: Schedule, limits: Limits) -> Schedule:
    lower = squeezed(graph, schedule, deadline=limits.deadline, limits=limits.squeeze)
    # Leaving something out may lower the peak as well.
    while not limits.is_over:
        peak_bytes = simulate(graph, lower).peak_bytes
        shorter = pruned(graph, lower, peak_bytes, deadline=limits.deadline)
        if shorter == lower:
            break
        lower = shorter
    return lower


def _half_way(limits: Limits) -> float:
    now = time.process_time()
    return now + max(limits.deadline - now, 0.0) / 2
