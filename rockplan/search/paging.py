"""Paging: which storages go to the host and come back, planned together with re-executions.

takes: a goal with a host, limits. returns: Placed, or None. guarantees: legal, within the budget of
the device and that of the host; its time is that of a link of which a share stays unused.

The storages that take longest to recompute for each byte are paged, until the link is busy between
their making and the turn. The rest is planned as if fetched storages were recomputed in no time,
and the copies are placed; then again without the storages whose copies are waited for. This is done
for larger amounts, then for smaller ones, as long as plans get faster. The best plan is polished,
and its copies placed anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from rockplan.errors import InvalidInput
from rockplan.options import Options
from rockplan.oracles.clock import clock, trips
from rockplan.oracles.graph_view import GraphView, view_of
from rockplan.oracles.recompute import NEVER, RecomputeCosts
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search.incumbent import Incumbent
from rockplan.search.limits import Limits
from rockplan.search.local.placing import Placed, placed
from rockplan.search.problem import Goal, Problem
from rockplan.values.copies import HostLink, inputs, with_copies, with_fetches, without_copies
from rockplan.values.graph import CDGraph, ComputeNode, DataKind, TensorSpec
from rockplan.values.plan import Plan, format_bytes
from rockplan.values.schedule import Compute, keep_all, kept_data

Planned = Callable[[Goal, Incumbent], Incumbent]

AMOUNTS = ((1.0, 1.05, 1.1, 1.15, 1.2), (0.9, 0.8))
"""Amounts to page, as shares of what the link carries. More is faster until copies are late."""

SHARE = 0.8
"""Share of the measured link that is planned for: a link that is slower by no more costs
nothing."""

LEAST_BYTES = 1 << 20
"""Least size of a paged storage: smaller ones are not worth a copy."""

DEPTH = 300
"""Most storages that must be made for one another to recompute a storage."""

FOREVER = 1e18
"""Nanoseconds that stand for the time of a storage that cannot be recomputed."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A plan in which copies take no time (`found`), and the same plan with its copies placed
    (`made`)."""

    storages: tuple[int, ...]
    asked: Goal
    found: Incumbent
    made: Placed


def best_placed(
    goal: Goal, limits: Limits, most_ns: float, planned: Planned, polished: Planned
) -> Placed | None:
    """Search plans in which storages go to the host and come back, for several amounts of what the
    link carries. Returns the fastest, None if none takes less than `most_ns`. planned: makes an
    incumbent for a goal without a host; polished: improves one that has a schedule."""
    tries = _Tries(goal, limits, planned, by_worth(goal.graph), limits.paging, most_ns)
    for amounts in AMOUNTS:
        for amount in amounts:
            is_faster = tries.improve(amount)
            if tries.best is not None and not is_faster:
                break
    best = tries.best
    if best is not None and not best.found.is_near(best.asked, limits) and not limits.is_over:
        tries.take(_placed(goal, best.storages, best.asked, polished(best.asked, best.found)))
    return None if tries.best is None else tries.best.made


@dataclass
class _Tries:
    """The tries of several amounts. ranked: storages that may be paged, best first; left: how many
    nodes of graphs may still be planned; most_ns: the time that a plan must be faster than; best:
    the fastest plan so far."""

    goal: Goal
    limits: Limits
    planned: Planned
    ranked: Sequence[int]
    left: int
    most_ns: float
    best: _Tried | None = None

    def improve(self, amount: float) -> bool:
        """And again without the storages whose copies were waited for. True if the best plan is
        beaten."""
        before, late = self.best, set[int]()
        for _ in range(self.limits.paging_again):
            tried = self._tried([d for d in self.ranked if d not in late], amount)
            if tried is None:
                break
            self.take(tried)
            paged_plan = tried.made
            late_now = {
                t.data for t in trips(paged_plan.graph, paged_plan.schedule) if t.waits_ns
            } - late
            if not late_now:
                break
            late |= late_now
        return self.best is not before

    def take(self, tried: _Tried) -> None:
        made, goal = tried.made, self.goal
        assert goal.host is not None and goal.budget_bytes is not None
        if made.storages and made.time_ns < self.most_ns:
            verify(made.graph, made.schedule)
            found = simulate(made.graph, made.schedule)
            is_within = found.peak_bytes <= goal.budget_bytes
            if is_within and found.host_peak_bytes <= goal.host.size_bytes:
                self.best, self.most_ns = tried, made.time_ns

    def _tried(self, ranked: Sequence[int], amount: float) -> _Tried | None:
        """None if nothing is carried, the effort is spent, or the plan takes most_ns even without
        copies."""
        goal, host = self.goal, self.goal.host
        assert host is not None
        storages = chosen(goal.graph, ranked, host.link.share(SHARE), amount, host.size_bytes)
        if not storages or self.left <= 0 or self.limits.is_over:
            return None
        self.left -= len(goal.graph.nodes)
        asked = replace(goal, graph=with_fetches(goal.graph, storages), host=None)
        found = self.planned(asked, Incumbent(bound_ns=goal.graph.time_ns))
        if found.schedule is None or found.time_ns >= self.most_ns:
            return None
        return _placed(goal, storages, asked, found)


def _placed(goal: Goal, storages: tuple[int, ...], asked: Goal, found: Incumbent) -> _Tried:
    assert goal.host is not None and goal.budget_bytes is not None and found.schedule is not None
    link = goal.host.link.share(SHARE)
    made = placed(goal.graph, storages, found.schedule.phases, link, goal.budget_bytes)
    return _Tried(storages, asked, found, made)


def pageable(problem: Problem) -> Problem:
    """Return `problem` with optional copies to the host of all that may be paged; itself if nothing
    may be."""
    if problem.host is None:
        return problem
    graph, link = without_copies(problem.graph), problem.host.link.share(SHARE)
    graph = with_copies(graph, by_worth(graph), link)
    return replace(problem, graph=graph, constrained=graph)


def by_worth(graph: CDGraph) -> list[int]:
    """Return the storages that may be paged (activations kept between the phases that can be made
    again, and `copies.inputs`, from LEAST_BYTES on), those first that take longest to recompute for
    each byte; of equal ones, those made first."""
    view = GraphView(graph)
    kept = kept_data(graph, keep_all(graph))
    given = inputs(graph)
    outside = {*graph.outputs, *graph.held, *graph.handed, *graph.dropped}
    read = {d for n in graph.backward for d in n.reads}
    specs: dict[int, list[TensorSpec]] = {}
    for value in graph.values:
        specs.setdefault(value.data, []).append(value.spec)
    able = [
        d
        for d in sorted(kept & read - outside)
        if graph.data[d].kind is DataKind.ACTIVATION
        and view.sizes[d] >= LEAST_BYTES
        and (graph.nodes[view.producer[d]].recomputable or d in given)
        and not any(v.is_conj or v.is_neg for v in specs.get(d, ()))
    ]
    makers = [view.maker(d) for d in range(len(graph.data))]
    costs = RecomputeCosts(view, makers, DEPTH)

    def worth(d: int) -> float:
        time_ns = costs.time_ns(d, lambda r: r != d and (r in kept or makers[r] is None), {})
        return (FOREVER if time_ns == NEVER else time_ns) / view.sizes[d]

    return sorted(able, key=lambda d: (-worth(d), view.producer[d], d))


def chosen(
    graph: CDGraph,
    ranked: Sequence[int],
    link: HostLink,
    amount: float,
    host_bytes: int,
    parts: Sequence[str] | None = None,
) -> tuple[int, ...]:
    """Return the storages, ascending, to page: each of `ranked`, in order, that fits beside those
    taken before it of its part into host_bytes and on the link. A copy out has the time from the
    making of its storage to the end of the part's forward, a copy in that from the begin of the
    part's backward to its first read, without re-executions. amount: share of the link's rate;
    parts: node -> the part of the graph that it is in; None: all are one."""
    parts = parts or [""] * len(graph.nodes)
    before_ns, after_ns = _times(graph, parts)
    directions = ((before_ns, link.out_bytes_per_s), (after_ns, link.in_bytes_per_s))
    taken = defaultdict[str, dict[int, int]](dict)
    view = view_of(graph)
    for d in ranked:
        part = parts[view.producer[d]]
        tried = taken[part] | {d: view.sizes[d]}
        carried = (
            _is_carried(tried, times_ns, amount * rate / 1e9) for times_ns, rate in directions
        )
        if sum(tried.values()) <= host_bytes and all(carried):
            taken[part] = tried
    return tuple(sorted(chain(*taken.values())))


def _is_carried(sizes: Mapping[int, int], left_ns: Mapping[int, int], rate: float) -> bool:
    """One after the other, each within the time that it has from the common start. rate: bytes per
    ns."""
    ordered = sorted(sizes, key=left_ns.__getitem__)
    carried = accumulate(sizes[d] for d in ordered)
    return all(
        bytes_so_far <= rate * left_ns[d] for d, bytes_so_far in zip(ordered, carried, strict=True)
    )


def _times(graph: CDGraph, parts: Sequence[str]) -> tuple[dict[int, int], dict[int, int]]:
    """Storage -> ns for its copy out, and -> ns for its copy in (`chosen`)."""
    everything = keep_all(graph)
    starts_ns = clock(graph, everything).starts_ns
    runs: tuple[list[tuple[int, ComputeNode]], ...] = [], []
    for position, event in enumerate(everything.events):
        if isinstance(event, Compute):
            is_backward = position >= everything.forward_length
            at_ns = starts_ns[position + (not is_backward)]
            runs[is_backward].append((at_ns, graph.nodes[event.node]))
    forward, backward = runs[0], runs[1][::-1]
    ends_ns, begins_ns = ({parts[n.index]: ns for ns, n in phase} for phase in (forward, backward))
    return (
        {d: ends_ns[parts[n.index]] - ns for ns, n in forward for d in n.writes},
        {d: ns - begins_ns[parts[n.index]] for ns, n in backward for d in n.reads},
    )


# -- plans read from files ------------------------------------------------------------------------


def refuse_beyond_host(plans: Sequence[Plan], options: Options) -> None:
    """Raise InvalidInput if one of `plans`, when it runs, has more bytes on the host at a time than
    the options allow. Nothing is refused if they allow what the machine has left."""
    pages = (simulate(p.graph, p.schedule).host_peak_bytes for p in plans if p.trips)
    needed_bytes = max(pages, default=0)
    allowed_bytes = 0 if options.host is None else options.host_bytes
    if allowed_bytes is not None and needed_bytes > allowed_bytes:
        raise InvalidInput(
            f"a plan pages {needed_bytes} bytes ({format_bytes(needed_bytes)}) of activations to "
            f"the host, where the options allow {allowed_bytes}: load it with "
            f"Options(host={needed_bytes}), or plan within what is allowed"
        )
