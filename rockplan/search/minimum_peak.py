"""The smallest budget: the schedule with the least peak that is found.

takes: a priced CDGraph. returns: Improved. guarantees: the schedule is legal; the same on every run
unless the deadline strikes. What was measured counts only where the relaxation, which is asked
first when a plan is made, leads to less with it, and in the chain of a large graph.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rockplan.graph_builder.costs.price import price, roofline
from rockplan.graph_builder.digests import problem_digest
from rockplan.ilp.blocks.decode import Orders
from rockplan.ilp.blocks.decode import price as option_of
from rockplan.ilp.whole_graph.program import Facts
from rockplan.ilp.whole_graph.refine import Refined, refined
from rockplan.oracles.simulate import simulate
from rockplan.search import needs
from rockplan.search.block_families import Chain, family_key, is_legal
from rockplan.search.local import greedy_eviction
from rockplan.search.local.exchange import fitted, squeezed
from rockplan.search.local.prune import pruned
from rockplan.search.relief import relieved
from rockplan.store.cache import Cache
from rockplan.values.block import OptionFamily
from rockplan.values.graph import CDGraph
from rockplan.values.progress import report
from rockplan.values.schedule import Schedule, keep_all, with_frees

SMALL_NODES = 800
"""Of graphs for which more is tried: on 2+2 layers of T5 (656) evicted schedules lead further than
the chain's, and exchanges are quick; on 12 layers of GPT-2 (958) they gained nothing and cost a
third of the time."""

SHARE = 0.5
"""Of the time that is left for the relaxation, for each search of the whole graph, for integer
programs that follow, for the options of blocks, and for evictions where exchanges follow, at most.
"""

SHARE_SEARCHED = 0.25
"""The same for the exact search for the smallest peak, which ends soon where it finds anything."""

SHARE_ELSEWHERE = 0.85
"""The same for the smallest peak on another machine: what is left is for the relaxation on this
one, which is asked first when a plan is made. On 5 layers of an encoder of width 16 exchanges took
all of 22 s to 81352 bytes, and it led to 64008 in 3 s."""

PART = 1 / 3
"""Of the way: half of it the relaxation proves impossible, if it is, in ten times the time."""

FINE = 0.005
"""Of a peak: between what is reached and what is not, no closer is looked."""

AT_ONCE_S = 2.5
"""Beyond the time limit for each of the few things that lead to something within the budget, or to
anything smaller, on graphs that leave no time for the rest: without them 7200 operations (a loop
of 300 steps) were refused half of eager's peak after 10 s with a limit of 1."""

CHAINED_S = 5.0
"""The same for the chain of blocks: a table takes 2 to 3.5 s from 100 blocks on, and is nothing
before it is filled."""

MOST_AT_ONCE = 0.5
"""Of what everything takes: below that nothing more is tried then."""

SHARES_AT_ONCE = (0.125, 0.25, 0.5)
"""Of the way to what single operations need: what is found soonest first, since that may be all."""

BYTES_PER_S, FLOPS_PER_S = 1e11, 4e12
"""Of the machine on which the smallest peak is looked for. What is found depends on times: with
those of other machines, or as much as 40 % off, on 4 layers of an encoder 0.45 to 0.48 MiB, on
ResNet-50 0.50 to 0.53, on 2+2 layers of T5 35.4 to 37.1. So it must not depend on what was
measured, or it differs from run to run."""


@dataclass(frozen=True, slots=True)
class Improved:
    """is_complete: nothing was cut short by the deadline, here or before."""

    schedule: Schedule
    is_complete: bool


def smallest_so_far(
    graph: CDGraph, chain: Callable[[], Chain], cache: Cache | None, deadline: float
) -> Improved:
    """What `_smallest` finds, or what an earlier call did that was cut short, if it needs less: the
    smallest budget that an error names shall work, however much time there is then."""
    known = _stored(graph, cache)
    if known is None or not known.is_complete:
        of_chain = None if is_small(graph) else chain()
        found = _smallest(graph, of_chain, cache, deadline)
        if known is None or peak_bytes(graph, found) < peak_bytes(graph, known):
            known = found
        known = replace(known, is_complete=found.is_complete)
        _store(graph, known, cache)
    return known


def smaller_so_far(
    graph: CDGraph, than_bytes: int, cache: Cache | None, deadline: float
) -> Improved | None:
    """The same in another order of first executions, if it needs less than is known: what a plan
    for a byte less starts from, made as small as it gets."""
    known = _stored(graph, cache)
    if known is not None and peak_bytes(graph, known) < than_bytes:
        than_bytes = peak_bytes(graph, known)
    else:
        known = None
    near = _near(graph, than_bytes - 1, deadline, is_evicted=True)
    if near is not None:
        found = _smallest_relaxed(graph, _squeezed(graph, near, deadline), deadline)
        known = Improved(found, time.monotonic() < deadline)
        _store(graph, known, cache)
    return known


def reached(graph: CDGraph, schedule: Schedule, cache: Cache | None) -> None:
    """A plan has this schedule: of a search that was cut short the smallest budget is no larger.
    Of one that was not, it depends on nothing that was planned before."""
    found = Improved(schedule, is_complete=False)
    known = _stored(graph, cache)
    if known is not None and known.is_complete:
        return
    if known is None or peak_bytes(graph, found) < peak_bytes(graph, known):
        _store(graph, found, cache)


def is_known_below(graph: CDGraph, size_bytes: int, cache: Cache) -> bool:
    """Was something found that needs less?"""
    known = _stored(graph, cache)
    return known is not None and peak_bytes(graph, known) < size_bytes


def _stored(graph: CDGraph, cache: Cache | None) -> Improved | None:
    key = family_key(problem_digest(graph), "the least peak so far")
    stored = cache.family(key, functools.partial(is_legal, graph)) if cache else None
    if stored is None:
        return None
    option = stored.options[0]
    return Improved(with_frees(graph, option.forward, option.backward), stored.is_complete)


def _store(graph: CDGraph, found: Improved, cache: Cache | None) -> None:
    if cache:
        key = family_key(problem_digest(graph), "the least peak so far")
        made = option_of(graph, Orders(*found.schedule.phases))
        family = OptionFamily((made,), gap_ns=None, solves=0, is_complete=found.is_complete)
        cache.put_family(key, family)


def peak_bytes(graph: CDGraph, found: Improved) -> int:
    return simulate(graph, found.schedule).peak_bytes


def _smallest(
    graph: CDGraph, chain: Chain | None, cache: Cache | None, deadline: float
) -> Improved:
    """The schedule with the least peak that is found; its peak is the smallest budget. Until the
    deadline, as of time.monotonic, it does not depend on the clock. chain: of a large graph; of a
    small one it does not come so far."""
    report("looking for the smallest peak")
    is_complete = True
    if needs.is_searched(graph):
        until = share_until(deadline, SHARE_SEARCHED)
        least = needs.thriftiest(graph, deadline=until)
        if least is not None:
            return Improved(least, is_complete=True)
        is_complete = time.monotonic() < until
    # The relaxation is asked first when a plan is made: what it leads to with less would be
    # accepted below the smallest budget.
    until = share_until(deadline, SHARE_ELSEWHERE) if is_small(graph) else deadline
    elsewhere = _smallest_elsewhere(graph, chain, cache, until)
    found = elsewhere.schedule
    if is_small(graph):
        found = _parted(graph, found, deadline, is_hasty=not elsewhere.is_complete)
    found = _smallest_relaxed(graph, found, deadline)
    is_complete = is_complete and elsewhere.is_complete
    return Improved(found, is_complete and time.monotonic() < deadline)


def _smallest_elsewhere(
    graph: CDGraph, chain: Chain | None, cache: Cache | None, deadline: float
) -> Improved:
    """On the other machine. In the cache it is the one option of the graph as a block, unless it
    was cut short."""
    there = _elsewhere(graph)
    key = family_key(problem_digest(there), "the least peak")
    known = cache.family(key, functools.partial(is_legal, there)) if cache else None
    if known is not None:
        stored = with_frees(graph, known.options[0].forward, known.options[0].backward)
        return Improved(stored, is_complete=True)
    # First what leads further in little time, where it does.
    until = at_once_until(there, deadline, CHAINED_S)
    of_chain = None if chain is None else chain.solver.thriftiest(deadline=until)
    # Where there is a chain, evictions may take all the time and lead less far than exchanges.
    until = share_until(deadline, SHARE)
    evicted = greedy_eviction.thriftiest(there, deadline=until)
    is_complete = time.monotonic() < until
    found = min(of_chain or evicted, evicted, key=lambda s: simulate(there, s).peak_bytes)
    if not is_complete and (found == keep_all(there) or not is_small(there)):
        found = _at_once(there, found)
    if needs.is_searched(there):
        until = share_until(deadline, SHARE)
        found = _parted(there, found, until, is_hasty=False)
        is_complete = is_complete and time.monotonic() < until
    found = _smallest_relaxed(there, _squeezed(there, found, deadline), deadline)
    if needs.is_searched(there):
        found = _smallest_searched(there, found, deadline)
    is_complete = is_complete and time.monotonic() < deadline
    if cache and is_complete:
        option = option_of(there, Orders(*found.phases))
        cache.put_family(key, OptionFamily((option,), gap_ns=None, solves=0))
    return Improved(found, is_complete)


def at_once_until(graph: CDGraph, deadline: float, least_s: float = AT_ONCE_S) -> float:
    """The deadline; of a large graph later where that is over, or nearly."""
    return deadline if is_small(graph) else max(deadline, time.monotonic() + least_s)


def _at_once(graph: CDGraph, found: Schedule) -> Schedule:
    """Where time was short: what the relaxation leads to within less and less, part of the way, in
    ratios, from what was found to what single operations need."""
    most_bytes = simulate(graph, found).peak_bytes
    least_bytes = max(Facts(graph).forced_bytes, default=0)
    if most_bytes < MOST_AT_ONCE * simulate(graph, keep_all(graph)).peak_bytes:
        return found
    deadline = time.monotonic() + AT_ONCE_S
    for share in SHARES_AT_ONCE:
        asked_bytes = int(most_bytes * (least_bytes / max(most_bytes, 1)) ** share)
        until = share_until(deadline, SHARE)
        _, near = fitted_relaxed(graph, asked_bytes, until, deadline)
        if near is None:
            break
        found = near
    return found


def _elsewhere(graph: CDGraph) -> CDGraph:
    """The graph with the times of the machine on which the smallest peak is looked for."""
    times = [n.time_ns for n in price(graph, roofline(graph, BYTES_PER_S, FLOPS_PER_S)).nodes]
    return replace(graph, nodes=tuple(replace(n, time_ns=times[n.index]) for n in graph.nodes))


def _smallest_searched(graph: CDGraph, found: Schedule, deadline: float) -> Schedule:
    """`found`, or what the search of the whole graph leads to within less and less: at each step
    twice as much less as the last one brought, then a byte less again."""
    peak, less_bytes = simulate(graph, found).peak_bytes, 1
    while less_bytes:
        less = needs.within(graph, peak - less_bytes, deadline=deadline)
        if less is not None:
            before, peak = peak, simulate(graph, less).peak_bytes
            found, less_bytes = less, 2 * (before - peak)
        else:
            less_bytes = 1 if less_bytes > 1 else 0
    return found


def _parted(graph: CDGraph, found: Schedule, deadline: float, *, is_hasty: bool) -> Schedule:
    """The least that the relaxation or evictions lead to, part of the way from `found` to what
    single operations need, and from there. A plan for as much would start from there at once.

    is_hasty: also where they do not lead the first part of the way: then `found` is near the least
    as a rule, if there was time to look for it."""
    most_bytes = simulate(graph, found).peak_bytes
    least_bytes = max(Facts(graph).forced_bytes, default=0)
    while most_bytes - least_bytes > FINE * most_bytes and time.monotonic() < deadline:
        asked_bytes = most_bytes - int(PART * (most_bytes - least_bytes))
        near = _near(graph, asked_bytes, deadline, is_evicted=is_hasty)
        if near is not None:
            is_hasty = True
            found, most_bytes = near, simulate(graph, near).peak_bytes
        elif is_hasty:
            least_bytes = asked_bytes
        else:
            break
    return found


def _smallest_relaxed(graph: CDGraph, found: Schedule, deadline: float) -> Schedule:
    """`found`, or what the relaxation leads to within less, or evictions: what a plan for less
    starts from."""
    less_bytes = 1
    while less_bytes:
        asked_bytes = simulate(graph, found).peak_bytes - less_bytes
        near = _near(graph, asked_bytes, deadline, is_evicted=less_bytes == 1)
        if near is not None:
            found, less_bytes = _squeezed(graph, near, deadline), 2 * less_bytes
        else:
            less_bytes = 1 if less_bytes > 1 else 0
    return found


def _near(
    graph: CDGraph, budget_bytes: int, deadline: float, *, is_evicted: bool
) -> Schedule | None:
    """What a plan within the budget starts from; is_evicted: evictions are tried as well."""
    _, near = fitted_relaxed(graph, budget_bytes, deadline, deadline)
    if near is None and is_evicted and time.monotonic() < deadline:
        near = greedy_eviction.within(graph, budget_bytes)
    return near


def _squeezed(graph: CDGraph, schedule: Schedule, deadline: float) -> Schedule:
    found = squeezed(graph, schedule, deadline=deadline)
    # Leaving something out may lower the peak as well.
    while time.monotonic() < deadline:
        shorter = pruned(graph, found, simulate(graph, found).peak_bytes, deadline=deadline)
        if shorter == found:
            break
        found = shorter
    return relieved(graph, found, deadline=deadline) if needs.is_searched(graph) else found


def fitted_relaxed(
    graph: CDGraph, budget_bytes: int, deadline: float, latest: float
) -> tuple[Refined | None, Schedule | None]:
    """The relaxation, and its schedule with room made, until `latest`, where it needs more."""
    relaxed = refined(graph, budget_bytes, deadline=deadline)
    orders = None if relaxed is None else relaxed.orders
    if orders is None:
        return relaxed, None
    return relaxed, fitted(graph, orders.forward, orders.backward, budget_bytes, deadline=latest)


def is_small(graph: CDGraph) -> bool:
    return len(graph.nodes) <= SMALL_NODES


def share_until(deadline: float, share: float) -> float:
    """When a share of the time that is left is over, as of time.monotonic."""
    now = time.monotonic()
    return now + (deadline - now) * share
