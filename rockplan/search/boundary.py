"""Boundary: schedules of one block of a step with a limit on the bytes saved between the phases.

The graph of a block may have copies to the host of all that may be paged: they are optional, so
that options with other copies are schedules of one graph. All of them end within their phase.

takes: a priced graph of a block, limits. returns: options that differ in saved bytes, peaks and
time. guarantees: each is legal, and needs what `simulate` finds, also if it comes from the cache.

In a step of n blocks the bytes that a block saves count n times, and its own peak once. A budget in
bytes alone cannot say that: it would shrink the peak of the block. So the limit is a last node of
the forward phase that makes nothing, and whose workspace is the rest of the budget.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace

from rockplan.graph_builder.digests import problem_digest
from rockplan.ilp.blocks.decode import price as option_of
from rockplan.options import Options
from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import timeline
from rockplan.oracles.verify import verify
from rockplan.search import planning
from rockplan.search.block_families import family_key, is_legal
from rockplan.search.limits import Limits
from rockplan.search.local.exchange import ExchangeLimits
from rockplan.search.local.placing import placed
from rockplan.search.minimum_peak import least_peak
from rockplan.search.pipeline import STAGES, check_names, run
from rockplan.search.problem import Goal, Problem, cache_of
from rockplan.values import copies
from rockplan.values.block import OptionFamily
from rockplan.values.block_sequence import BoundedOption, useful_options
from rockplan.values.graph import CDGraph, ComputeNode, Phase, Queue, as_eager
from rockplan.values.order import Orders
from rockplan.values.plan import Plan
from rockplan.values.progress import report
from rockplan.values.schedule import (
    Compute,
    Schedule,
    keep_all,
    merge_handovers,
    with_frees,
    with_waits,
)

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
"""Limits for the first options of a block, as shares of the bytes saved without re-executions. On
layers of Llama and GPT-2 each limit up to a half gives another option; larger ones gain little."""

QUICK = ExchangeLimits(effort=150_000, rounds=1, most_rounds=1)
SQUEEZE = ExchangeLimits(effort=300_000)
THOROUGH = ExchangeLimits(effort=300_000, rounds=2, most_rounds=3)
"""Limits of the local search. On a layer of Llama a longer search gained 0.3 points if only saved
bytes are limited, 7 points if the peak is."""


def first_options(problem: Problem, options: Options) -> tuple[BoundedOption, ...]:
    """Return these options of a block, without those that others equal or beat: everything kept;
    nothing kept, with the least peak; and for ten limits of the saved bytes (SHARES of what is
    saved with everything kept) the fastest one found whose peak is that of the first."""
    everything = option_with(problem, keep_all(problem.graph))
    peak_bytes, sizes = everything.peak_bytes, GraphView(problem.graph).sizes

    def solved() -> _Found:
        """Return (schedules of these options, True if no time limit cut a search short)."""
        least, is_complete = thriftiest(problem.graph, options)
        schedules = [everything.schedule, least]
        least_bytes = bounded_option(problem.graph, least).saved_bytes
        with_inputs_bytes = least_bytes + sum(map(sizes.__getitem__, _paged_inputs(problem.graph)))
        shares = (max(int(s * everything.saved_bytes), with_inputs_bytes) for s in SHARES)
        for number, saved_bytes in enumerate(sorted({least_bytes, *shares})):
            report("solving blocks", number, len(SHARES))
            found, is_its_own = _within(problem, saved_bytes, peak_bytes, QUICK, options)
            schedules += found
            is_complete = is_complete and is_its_own
        return schedules, is_complete

    return useful_options(_options(problem, "first options", options, solved))


def option_within(
    problem: Problem, saved_bytes: int, peak_bytes: int, options: Options
) -> BoundedOption | None:
    """Return the fastest option of a block found that keeps at most saved_bytes between its phases
    and whose peak is at most peak_bytes; None if none is found. Looks in the cache first."""

    def solved() -> _Found:
        return _within(problem, saved_bytes, peak_bytes, THOROUGH, options)

    what = f"kept {saved_bytes} of {peak_bytes}"
    fitting = [
        option
        for option in _options(problem, what, options, solved)
        if option.saved_bytes <= saved_bytes and option.peak_bytes <= peak_bytes
    ]
    return min(fitting, key=lambda o: o.time_ns, default=None)


def eager_option(graph: CDGraph) -> BoundedOption:
    """Return what the block needs unplanned: every result in its own storage, in eager's order."""
    eager = as_eager(graph)
    return bounded_option(eager, keep_all(eager))


def option_with(problem: Problem, schedule: Schedule) -> BoundedOption:
    """Return the option of `schedule`, with gradients of hooked parameters handed over only when
    nothing reads the parameters any more: a hook may be an optimizer's step."""
    return bounded_option(problem.graph, with_waits(problem.graph, schedule, problem.waits))


def bounded_option(graph: CDGraph, schedule: Schedule) -> BoundedOption:
    """Return `schedule` with its time and the bytes that the block needs in a step: saved between
    the phases (without what the forward returns), and the peak during each phase's computations, in
    which incoming gradients and returned results count from the first one on. Raises
    IllegalSchedule."""
    verify(graph, schedule)
    steps = [*timeline(graph, schedule)]
    during_bytes = _while_running(graph, schedule)
    boundary = schedule.forward_length
    return BoundedOption(
        schedule,
        steps[boundary - 1].after_bytes - _output_bytes(graph),
        max(during_bytes[:boundary], default=0),
        max(during_bytes[boundary:], default=0),
        sum(step.time_ns for step in steps),
    )


def bounded_plan(problem: Problem, option: BoundedOption) -> Plan:
    """Return `option` as a plan whose budget is the option's peak. Gradients are handed over in
    groups (fewer slices of the backward) as far as that needs no more than the backward peak."""
    graph, schedule = problem.graph, option.schedule
    plan = planning.plan_of(problem, schedule, option.peak_bytes + _output_bytes(graph))
    assert plan is not None
    boundary = schedule.forward_length
    during_bytes = [0] * boundary + _while_running(graph, schedule)[boundary:]
    merged = merge_handovers(graph, schedule, GraphView(graph).sizes, during_bytes, frozenset())
    verify(graph, merged)
    return replace(plan, schedule=merged, budget_bytes=option.peak_bytes)


def bounded(graph: CDGraph, saved_bytes: int, peak_bytes: int) -> CDGraph:
    """Return `graph` with one node more, at the end of the forward phase, which makes nothing and
    whose workspace is peak_bytes less saved_bytes and what the forward returns: a schedule of it
    within peak_bytes saves at most saved_bytes."""
    room_bytes = max(peak_bytes - saved_bytes - _output_bytes(graph), 0)
    limit = ComputeNode(
        0, _LIMIT, Phase.FORWARD, (), (), workspace_bytes=room_bytes, recomputable=False
    )
    return copies.with_nodes(graph, [limit])


_LIMIT = "limit"


def without_limit(graph: CDGraph, searched: CDGraph, schedule: Schedule) -> Schedule:
    """Convert a schedule of `searched`, which is `bounded(graph, ...)` with other copies to the
    host, to one of `graph`: without the node that `bounded` added."""
    index = dict(zip(_places(graph), range(len(graph.nodes)), strict=True))
    places = _places(searched)
    orders = ([index[places[i]] for i in phase if places[i] in index] for phase in schedule.phases)
    return with_frees(graph, *orders)


def _places(graph: CDGraph) -> list[object]:
    """Return for each node what it is equal by in a graph with other copies: of copies their
    storage, of other nodes their number, None of the limit."""
    computed = (n.index for n in graph.nodes if n.queue is Queue.COMPUTE and n.name != _LIMIT)
    numbers = {index: number for number, index in enumerate(computed)}
    return [
        numbers.get(n.index) if n.queue is Queue.COMPUTE else (n.queue, min(*n.reads, *n.writes))
        for n in graph.nodes
    ]


def thriftiest(whole: CDGraph, options: Options) -> tuple[Schedule, bool]:
    """Return (the schedule with the least peak found that saves nothing but results of nodes that
    run once, and what is returned; whether no time limit cut the search). Inputs are on the host
    meanwhile where they may be."""
    graph, gone = copies.without_copies(whole), _paged_inputs(whole)
    repeatable = (d for n in graph.forward if n.recomputable for d in n.writes)
    dropped = tuple(sorted({*repeatable, *gone}.difference(graph.outputs)))
    dropping = copies.with_fetches(replace(graph, dropped=dropped), gone)
    limits = replace(_limits(THOROUGH, options), squeeze=SQUEEZE)
    goal = Goal(dropping, (), None)
    incumbent = least_peak(goal, limits)
    schedule = incumbent.schedule or keep_all(dropping)
    made = placed(graph, gone, schedule.phases, copies.HostLink(1, 1), 0)
    return without_limit(whole, made.graph, made.schedule), incumbent.is_complete


def _paged_inputs(graph: CDGraph) -> tuple[int, ...]:
    return tuple(page.data for page in copies.paged(graph) if page.data in copies.inputs(graph))


def _within(
    problem: Problem, saved_bytes: int, peak_bytes: int, effort: ExchangeLimits, options: Options
) -> _Found:
    """Return the fastest schedule found, and the fastest one that copies to the host if that is
    another."""
    graph = bounded(copies.without_copies(problem.graph), saved_bytes, peak_bytes)
    goal = Goal(graph, (), peak_bytes, host=problem.host)
    incumbent = run(STAGES, goal, _limits(effort, options))
    found = [] if incumbent.schedule is None else [(graph, incumbent.schedule)]
    if incumbent.paged is not None:
        found.append((incumbent.paged.graph, incumbent.paged.schedule))
    schedules = [without_limit(problem.graph, *one) for one in found]
    return schedules, incumbent.is_complete


def _limits(effort: ExchangeLimits, options: Options) -> Limits:
    """Without the stage "blocks": a block has none inside. Raises InvalidInput for unknown
    names."""
    check_names(options.without)
    return Limits(
        deadline=time.process_time() + options.time_limit_s,
        without=frozenset((*options.without, "blocks")),
        exchange=effort,
    )


_Found = tuple[list[Schedule], bool]
"""Schedules, and whether no time limit cut the search for them."""


def _options(
    problem: Problem, what: str, options: Options, solve: Callable[[], _Found]
) -> list[BoundedOption]:
    """From the cache, or found by `solve` and put there: under the time limit alone if that cut the
    search."""
    graph, cache = problem.graph, cache_of(options)
    keys = [_key(problem, what, options, limit) for limit in ("", f"{options.time_limit_s} s")]
    families = (cache.family(key, functools.partial(is_legal, graph)) for key in keys if cache)
    known = next((family for family in families if family is not None), None)
    if known is not None:
        schedules = [with_frees(graph, o.forward, o.backward) for o in known.options]
    else:
        schedules, is_complete = solve()
        if cache and schedules:
            priced = tuple(option_of(graph, Orders(*s.phases)) for s in schedules)
            family = OptionFamily(priced, solves=0, is_complete=is_complete)
            cache.put_family(keys[0] if is_complete else keys[1], family)
    return [option_with(problem, schedule) for schedule in schedules]


def _key(problem: Problem, what: str, options: Options, limit: str) -> dict[str, str]:
    without = " ".join(sorted(options.without))
    settings = f"of a step, {what}, {SHARES}, within {limit}, without {without}"
    if problem.host is not None:
        settings += f", on the host {problem.host.size_bytes}"
    return family_key(problem_digest(problem.graph), settings)


def _while_running(graph: CDGraph, schedule: Schedule) -> list[int]:
    steps = zip(schedule.events, timeline(graph, schedule), strict=True)
    return [step.during_bytes if isinstance(event, Compute) else 0 for event, step in steps]


def _output_bytes(graph: CDGraph) -> int:
    sizes = GraphView(graph).sizes
    return sum(sizes[d] for d in graph.outputs)
