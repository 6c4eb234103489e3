"""A plan for a budget: the passes from a priced graph to a certified schedule.

takes: a Problem, a Budget, Options. returns: Plan. guarantees: the schedule is legal under the
constraints of the options and within the budget as `simulate` finds it; what the cache holds is
not solved again, and the cache never changes which plan is found.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import torch

from rockplan.budget import Budget
from rockplan.errors import IllegalSchedule, InfeasibleBudget
from rockplan.graph_builder.costs.price import measure, price, profile_key
from rockplan.graph_builder.digests import graph_digest, profile_digest
from rockplan.graph_builder.lowering.backward_order import gathered, renumbered
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.graph_builder.partition import partition
from rockplan.ilp.blocks.pareto_search import Settings
from rockplan.ilp.whole_graph.refine import Refined, proved_ns
from rockplan.options import Options
from rockplan.oracles.constraints import constrain, with_room_for_loss
from rockplan.oracles.simulate import Simulation, simulate, timeline
from rockplan.oracles.verify import verify
from rockplan.reports.explain import peak_owner
from rockplan.search import needs
from rockplan.search.block_families import Chain, chain_of
from rockplan.search.improve import improve
from rockplan.search.local import greedy_eviction
from rockplan.search.local.exchange import annealed, annealed_again, squeezed
from rockplan.search.local.prune import pruned
from rockplan.search.minimum_peak import (
    AT_ONCE_S,
    CHAINED_S,
    SHARE,
    Improved,
    at_once_until,
    fitted_relaxed,
    is_known_below,
    is_small,
    peak_bytes,
    reached,
    share_until,
    smaller_so_far,
    smallest_so_far,
)
from rockplan.search.windows import searched
from rockplan.store.cache import Cache, default_folder
from rockplan.store.fingerprint import planner
from rockplan.store.plan_file import is_outline_of
from rockplan.values.block import Block
from rockplan.values.curve import Curve, CurvePoint, useful
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import CDGraph, as_eager
from rockplan.values.plan import BlockSummary, Certificate, Plan, Status
from rockplan.values.profile import Profile
from rockplan.values.progress import report
from rockplan.values.schedule import (
    Compute,
    Schedule,
    Waits,
    first_executions,
    keep_all,
    merge_handovers,
    with_numbers,
    with_waits,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is planned, before a budget is known.

    graph: with the prices of `profile`; constrained: the same under the constraints of the
    options and with room for the caller's loss, of which `blocks` are the blocks. The digests are
    those of graph and profile. unplanned: every node once, as eager does. waits: gradients of
    parameters that have hooks.
    """

    graph: CDGraph
    constrained: CDGraph
    blocks: tuple[Block, ...]
    profile: Profile
    graph_digest: str
    profile_digest: str
    unplanned: Simulation
    waits: Waits = ()


@dataclass(frozen=True, slots=True)
class Ordered:
    """A graph whose nodes run for the first time in the order of their indices, and its blocks,
    solved when they are asked for first. numbers: of the nodes in the graph of the problem; None if
    they are the same."""

    graph: CDGraph
    chain: Callable[[], Chain]
    numbers: tuple[int, ...] | None

    def of_problem(self, schedule: Schedule) -> Schedule:
        """A schedule of this graph as one of the problem's."""
        return schedule if self.numbers is None else with_numbers(schedule, self.numbers)

    def from_problem(self, schedule: Schedule) -> Schedule:
        """The reverse."""
        if self.numbers is None:
            return schedule
        own = sorted(range(len(self.numbers)), key=self.numbers.__getitem__)
        return with_numbers(schedule, own)


@dataclass(frozen=True, slots=True)
class Common:
    """What plans of one problem have in common, made when it is asked for first: few budgets need
    it. first: in the order of the problem; others: in further orders in which plans are looked for;
    in_order: in any; smallest: looked for until a deadline when it is asked for first; reach: says
    of a schedule in one of these orders that a plan has it: where the search for the smallest is
    cut short, that is no larger."""

    first: Ordered
    in_order: Callable[[tuple[int, ...]], Ordered]
    others: Callable[[], tuple[Ordered, ...]]
    smallest: Callable[[float], Smallest]
    reach: Callable[[Ordered, Schedule], None]


@dataclass(frozen=True, slots=True)
class Smallest:
    """The schedule whose peak is the smallest budget."""

    ordered: Ordered
    found: Improved

    @property
    def peak_bytes(self) -> int:
        return peak_bytes(self.ordered.graph, self.found)


def common_of(
    problem: Problem, options: Options, limit_s: Callable[[], float] | None = None
) -> Common:
    """limit_s: for the options of all blocks, asked for when they are wanted; else their share of
    the time limit of one plan."""

    def ordered(graph: CDGraph, numbers: tuple[int, ...] | None = None) -> Ordered:
        @functools.cache
        def chain() -> Chain:
            blocks = problem.blocks if numbers is None else partition(graph)
            chain_s = limit_s() if limit_s else options.time_limit_s * SHARE
            settings = Settings(time_limit_s=options.time_limit_s * SHARE)
            return chain_of(graph, blocks, _cache(options), settings, chain_s)

        return Ordered(graph, chain, numbers)

    graph = problem.constrained
    first = ordered(graph)

    def in_order(numbers: tuple[int, ...]) -> Ordered:
        if numbers == tuple(range(len(numbers))):
            return first
        return ordered(renumbered(graph, numbers), numbers)

    @functools.cache
    def others() -> tuple[Ordered, ...]:
        found = in_order(gathered(graph))
        return () if found is first else (found,)

    known: list[Smallest] = []

    def smallest(deadline: float) -> Smallest:
        if not known:
            cache = _cache(options)
            found = smallest_so_far(graph, first.chain, cache, deadline)
            known.append(_smallest_of_all(Smallest(first, found), others(), cache, deadline))
        least = known[0]
        return least if least.found.is_complete else min([least, *of_plans], key=_peak_bytes)

    of_plans: list[Smallest] = []

    def reach(ordered: Ordered, schedule: Schedule) -> None:
        reached(ordered.graph, schedule, _cache(options))
        one = Smallest(ordered, Improved(schedule, is_complete=False))
        of_plans[:] = [min([*of_plans, one], key=_peak_bytes)]

    return Common(first, in_order, others, smallest, reach)


def _peak_bytes(found: Smallest) -> int:
    return found.peak_bytes


def _smallest_of_all(
    least: Smallest, others: tuple[Ordered, ...], cache: Cache | None, deadline: float
) -> Smallest:
    """Where another order leads to less, that: what it leads to is planned."""
    is_complete = least.found.is_complete
    for ordered in others:
        found = smaller_so_far(ordered.graph, least.peak_bytes, cache, deadline)
        is_complete = is_complete and time.monotonic() < deadline
        if found is not None:
            least = Smallest(ordered, found)
    return replace(least, found=replace(least.found, is_complete=is_complete))


def measured(lowered: Lowered, options: Options, waits: Waits = ()) -> Problem:
    """The problem of a captured graph under costs that are measured here, or were."""
    made = problem_of(lowered.graph, _profile(lowered, _cache(options)), options)
    return replace(made, waits=waits)


@paused_collection()
def problem_of(graph: CDGraph, profile: Profile, options: Options) -> Problem:
    """The problem of a graph under a profile of its calls."""
    report("finding blocks")
    priced = price(graph, profile)
    eager = as_eager(priced)
    unplanned = simulate(eager, keep_all(eager))
    constrained = constrain(priced, options.keep, options.recompute)
    constrained = with_room_for_loss(constrained, unplanned.peak_bytes)
    return Problem(
        graph=priced,
        constrained=constrained,
        blocks=partition(constrained),
        profile=profile,
        graph_digest=graph_digest(priced),
        profile_digest=profile_digest(profile),
        unplanned=unplanned,
    )


def plan_within(
    problem: Problem, budget: Budget, options: Options, common: Common | None = None
) -> Plan:
    """The plan of the cache, or else a new one. Raises InfeasibleBudget.

    Where gradients wait, plans for less are asked for until one leaves the room for that; if none
    does, nothing waits. The smallest budget is what the smallest plan needs with it.
    """
    if problem.waits:
        common = common or common_of(problem, options)
    plain = _without_waits(problem, budget, options, common)
    if not problem.waits:
        return plain
    limit_bytes = plain.budget_bytes
    if budget.is_minimum and (least := waiting(plain, problem.waits)).peak_bytes > limit_bytes:
        # As much may have a faster plan, whose gradients can wait as well.
        as_bytes = Budget(size_bytes=least.peak_bytes)
        found = plan_within(problem, as_bytes, options, common)
        if waiting(found, problem.waits).peak_bytes <= found.budget_bytes:
            return found
        least = replace(least, budget_bytes=least.peak_bytes)
        return _certified(problem, least, found.certificate.bound_ns)
    made = plain
    while (found := waiting(made, problem.waits)).peak_bytes > limit_bytes:
        excess_bytes = max(found.peak_bytes - limit_bytes, int(LESS * limit_bytes), 1)
        asked = Budget(size_bytes=made.peak_bytes - excess_bytes)
        try:
            made = _without_waits(problem, asked, options, common)
        except InfeasibleBudget as error:
            if made.peak_bytes <= error.minimum_bytes:
                return plain
            asked = Budget(size_bytes=error.minimum_bytes)
            made = _without_waits(problem, asked, options, common)
    found = replace(found, budget_bytes=limit_bytes)
    return found if made is plain else _certified(problem, found, plain.certificate.bound_ns)


LESS = 0.03
"""Of the budget, at least: what the next plan is asked to need less, to leave room for gradients
that wait. On three blocks with gated layers (`tests/test_hooks.py`) the second one has it at 60 %;
on two layers of an encoder the first."""


def waiting(plan: Plan, waits: Waits) -> Plan:
    """`plan`, in which gradients wait; it may need more than its budget."""
    schedule = with_waits(plan.graph, plan.schedule, waits)
    peak_bytes = simulate(plan.graph, schedule).peak_bytes
    return replace(plan, schedule=schedule, peak_bytes=peak_bytes)


def _certified(problem: Problem, plan: Plan, bound_ns: int) -> Plan:
    """`plan`, which was made for another budget. bound_ns: proven for the one that it has."""
    simulation = simulate(plan.graph, plan.schedule)
    certificate = _certificate(problem.constrained, simulation, bound_ns)
    made = replace(plan, certificate=certificate)
    was_stopped = plan.certificate.status is Status.TIME_LIMIT
    return _stopped(made) if was_stopped and certificate.status is not Status.OPTIMAL else made


def _stopped(plan: Plan) -> Plan:
    return replace(plan, certificate=replace(plan.certificate, status=Status.TIME_LIMIT))


def _without_waits(
    problem: Problem, budget: Budget, options: Options, common: Common | None
) -> Plan:
    cache = _cache(options)
    if cache is None:
        return plan_anew(problem, budget, options, common)
    key = _plan_key(problem, budget, options)
    graph = problem.graph
    found = cache.plan(
        key, lambda p: p.graph_digest == key["graph"] and is_outline_of(p.graph, graph)
    )
    if found is not None and not (
        budget.is_minimum and is_known_below(problem.constrained, found.peak_bytes, cache)
    ):
        return replace(found, graph=graph)
    made = plan_anew(problem, budget, options, common)
    cache.put_plan(key, made)
    if budget.is_minimum:
        as_bytes = Budget(size_bytes=made.budget_bytes)
        cache.put_plan(_plan_key(problem, as_bytes, options), made)
    return made


def curve_of(problem: Problem, options: Options) -> Curve:
    """Of plans for the smallest budget, and for others from the one at which nothing runs again
    down, in equal ratios: most changes where memory is short."""
    graph = problem.constrained
    common = common_of(problem, options)
    smallest = plan_within(problem, Budget(is_minimum=True), options, common)
    least_bytes, most_bytes = smallest.budget_bytes, simulate(graph, keep_all(graph)).peak_bytes
    plans = [smallest]
    covered_bytes = most_bytes + 1
    for step in range(POINTS - 1, 0, -1):
        report("looking along the curve", POINTS - step, POINTS)
        budget_bytes = round(least_bytes * (most_bytes / least_bytes) ** (step / (POINTS - 1)))
        if budget_bytes < covered_bytes:
            plans.append(_settled(problem, budget_bytes, smallest, options, common))
            covered_bytes = plans[-1].budget_bytes
    return Curve(
        points=useful(
            CurvePoint(p.budget_bytes, p.saved_bytes, p.certificate, problem.graph.time_ns)
            for p in plans
        ),
        unplanned_bytes=problem.unplanned.peak_bytes,
        graph_digest=problem.graph_digest,
        profile_digest=problem.profile_digest,
        profile_source=_profile_source(problem.profile),
    )


POINTS = 16
"""Of a curve: each is planned."""

SPARE = 0.05
"""Of a budget on the curve: a plan that leaves more unused is asked for at what it needs. It leaves
1 to 3 % on two layers of a transformer, and is the same plan then."""


def _settled(
    problem: Problem, budget_bytes: int, smallest: Plan, options: Options, common: Common
) -> Plan:
    """The plan for a budget, or for a smaller one where it needs less: then for none between the
    two is another one wanted."""
    while budget_bytes > smallest.budget_bytes:
        plan = plan_within(problem, Budget(size_bytes=budget_bytes), options, common)
        if plan.peak_bytes >= (1 - SPARE) * budget_bytes:
            return plan
        budget_bytes = plan.peak_bytes
    return smallest


def _cache(options: Options) -> Cache | None:
    return Cache(default_folder()) if options.cache else None


def _profile_source(profile: Profile) -> str:
    return f"{profile.source} on {profile.device}, torch {profile.torch_version}"


def _profile(lowered: Lowered, cache: Cache | None) -> Profile:
    """Measured costs of every call; what is in the cache is not measured again."""
    key = {"profile": profile_key(lowered.graph)}
    known = cache.profile(key) if cache else None
    profile = measure(lowered.graph, lowered.samples, known=known)
    before = frozenset(known.costs) if known else frozenset()
    new = tuple(cost for cost in profile.costs if cost not in before)
    if cache and new:
        cache.put_profile(key, replace(profile, costs=new))
    return profile


# Options that do not decide which plan is found.
_BESIDE_THE_PLAN = frozenset({"on_mismatch", "on_infeasible", "check", "cache"})


def _plan_key(problem: Problem, budget: Budget, options: Options) -> dict[str, str]:
    """All that a plan depends on. The graph stands for the model, shapes, dtypes, autocast and
    device; an option that is new counts until it is named beside the plan."""
    deciding = (f.name for f in fields(options) if f.name not in _BESIDE_THE_PLAN)
    return {
        "graph": problem.graph_digest,
        "profile": problem.profile_digest,
        "device": problem.profile.device,
        "torch": str(torch.__version__),
        "budget": str(budget),
        "planner": planner(),
        **{f"option {name}": repr(getattr(options, name)) for name in deciding},
    }


def plan_of(problem: Problem, schedule: Schedule, budget_bytes: int) -> Plan | None:
    """`schedule` as a plan; None where it is none that is legal and within the budget. Nothing is
    proven of it but that no plan takes less time than running everything once."""
    graph = problem.constrained
    try:
        verify(graph, schedule)
    except IllegalSchedule:
        return None
    if simulate(graph, schedule).peak_bytes > budget_bytes:
        return None
    return _finish(problem, Improved(schedule, is_complete=True), budget_bytes, graph.time_ns)


SHARE_OF_SMALLEST = 0.75
"""The same for the smallest budget: of 30 s that of 2+2 layers of T5 takes some 20."""


SHARE_OF_PROGRAMS = 0.15
"""The same for integer programs that improve a plan of a small graph, twice: of 6 layers of GPT-2
at 13 % of keep-all's peak they took 24 of 30 s for nothing, in which exchanges gain 6 % of an
iteration."""

SHARE_WITHOUT_MOVES = 0.2
"""The same for exchanges that move nothing, where no plan is near: they may gain little by little
all the time, and those with moves mostly gain more."""

SHARE_OF_MOVES = 0.75
"""The same for exchanges that move first executions: the relaxation in their order takes what is
left, a second or two."""


def plan_anew(
    problem: Problem, budget: Budget, options: Options, common: Common | None = None
) -> Plan:
    """The plan for the smallest budget is the one for as many bytes, but for what its search takes
    of the time limit: SHARE_OF_SMALLEST at most, of a large graph all.

    common: to other plans of the problem, where there are any.
    """
    deadline = time.monotonic() + options.time_limit_s
    graph = problem.constrained
    if common is None:
        # What is left when it is wanted is shared.
        common = common_of(problem, options, lambda: (deadline - time.monotonic()) * SHARE)
    budget_bytes = budget.within(problem.unplanned.peak_bytes)
    is_least = True
    if budget_bytes is None:
        until = share_until(deadline, SHARE_OF_SMALLEST) if is_small(graph) else deadline
        least = common.smallest(until)
        budget_bytes, is_least = least.peak_bytes, least.found.is_complete
    plan = _Run(problem, common, budget_bytes, deadline, options, budget.is_minimum).plan()
    return plan if is_least else _stopped(plan)


class _Try:
    """What is found within a budget where nodes run for the first time in one order. relaxed, near:
    the relaxation, and what its schedule leads to; best: what is improved further."""

    def __init__(self, ordered: Ordered, budget_bytes: int) -> None:
        self.ordered, self.graph = ordered, ordered.graph
        is_searched = needs.is_searched(self.graph)
        self.search = needs.Search(self.graph, budget_bytes) if is_searched else None
        self.relaxed: Refined | None = None
        self.near: Schedule | None = None
        self.best: Schedule | None = None

    def time_ns(self, found: Schedule | None) -> float:
        return math.inf if found is None else simulate(self.graph, found).time_ns

    def is_accepted(self, share_if_large: float) -> bool:
        """Is what is near known to be so near the fastest that no other is looked for?"""
        if self.relaxed is None or self.near is None:
            return False
        enough_ns = _accepted_ns(self.graph, self.relaxed.bound_ns, share_if_large)
        return self.time_ns(self.near) <= enough_ns


class _Run:
    """The search for one plan. is_least: the budget is the smallest that is known. _is_complete:
    nothing was cut short so far."""

    def __init__(
        self,
        problem: Problem,
        common: Common,
        budget_bytes: int,
        deadline: float,
        options: Options,
        is_least: bool,
    ) -> None:
        self._problem, self._common, self._options = problem, common, options
        self._budget_bytes, self._deadline = budget_bytes, deadline
        self._is_least, self._is_complete = is_least, True

    def plan(self) -> Plan:
        """Raises InfeasibleBudget."""
        first = _Try(self._common.first, self._budget_bytes)
        if (plan := self._kept(first) or self._optimal(first, needs.FIRST)) is not None:
            return plan
        others = [_Try(ordered, self._budget_bytes) for ordered in self._common.others()]
        if (plan := next(filter(None, map(self._kept, others)), None)) is not None:
            return plan
        tries = [first, *others]
        nearest = self._relaxed(tries)
        if nearest.near is not None and (plan := self._near(nearest)) is not None:
            return plan
        found = self._exchanged(tries, nearest)
        assert found.best is not None
        self._common.reach(found.ordered, found.best)
        if (plan := self._optimal(found, needs.EFFORT, found.best)) is not None:
            return plan
        moved = self._moved(found)
        if moved is not found:
            plan = self._optimal(moved, needs.EFFORT, moved.best)
        return plan or self._improved(moved)

    def _finished(self, found: _Try, improved: Improved, bound_ns: int) -> Plan:
        proven_ns = max(bound_ns, 0 if found.search is None else found.search.proven_ns)
        made = replace(improved, schedule=found.ordered.of_problem(improved.schedule))
        return _finish(self._problem, made, self._budget_bytes, proven_ns)

    def _kept(self, found: _Try) -> Plan | None:
        """The plan that keeps everything, if it is within the budget."""
        kept = keep_all(found.graph)
        if self._budget_bytes < simulate(found.graph, kept).peak_bytes:
            return None
        return self._finished(found, Improved(kept, is_complete=True), found.graph.time_ns)

    def _optimal(self, found: _Try, effort: int, known: Schedule | None = None) -> Plan | None:
        until = share_until(self._deadline, SHARE)
        optimum = _optimum(found.search, effort, known, until)
        self._note(until)
        if optimum is None:
            return None
        return self._finished(found, Improved(optimum, is_complete=True), 0)

    def _relaxed(self, tries: list[_Try]) -> _Try:
        """The one whose relaxation leads to the fastest schedule."""
        report("solving the relaxation")
        # A search that was cut short before left time for this.
        self._is_complete = True
        for found in tries:
            until = share_until(self._deadline, SHARE)
            found.relaxed, found.near = _relaxed(
                found.graph, self._budget_bytes, until, fitting_until=self._deadline
            )
            self._note(until)
            if found.is_accepted(NEAR_IF_LARGE) or not (self._is_complete or found.near is None):
                break
        return min(tries, key=lambda found: found.time_ns(found.near))

    def _near(self, found: _Try) -> Plan | None:
        """The plan of what is near, if that is near enough; without time for anything else it is
        taken as it is, or what evictions lead to."""
        relaxed, near = found.relaxed, found.near
        assert relaxed is not None and near is not None
        if not self._is_complete and is_small(found.graph):
            evicted = greedy_eviction.within(found.graph, self._budget_bytes)
            near = near if evicted is None else _fastest_first(found.graph, [near, evicted])[0]
        if self._is_complete and not found.is_accepted(NEAR_IF_LARGE):
            if (plan := self._optimal(found, needs.EFFORT, near)) is not None:
                return plan
            until = _programs_until(found.graph, self._deadline)
            found.near = near = improve(relaxed, near, deadline=until)
            self._note(until)
            if not found.is_accepted(ENOUGH_IF_LARGE):
                return None
        self._common.reach(found.ordered, near)
        return self._finished(found, Improved(near, self._is_complete), relaxed.bound_ns)

    def _exchanged(self, tries: list[_Try], nearest: _Try) -> _Try:
        """The one of which the fastest schedule becomes: the nearest or, of a small graph, one in
        which nothing is near. Raises InfeasibleBudget."""
        tried = [nearest]
        if is_small(nearest.graph):
            tried = [found for found in tries if found is nearest or found.near is None]
        for found in tried:
            # Of a small graph blocks lead to nothing where the relaxation does not.
            is_chained = found.near is not None or not is_small(found.graph)
            blocks = found.ordered.chain() if is_chained else None
            self._is_complete = self._is_complete and (blocks is None or blocks.is_complete)
            self._exchange(found, self._starts(found, blocks))
        if tries[0] in tried and tries[0].best is None:
            self._exchange_further(tries)
        return min(tries, key=lambda found: found.time_ns(found.best))

    def _exchange_further(self, tries: list[_Try]) -> None:
        """Where nothing fits in the order of the graph: what is smallest, which takes longest to
        find, and in another order what leads to a smaller peak. Raises InfeasibleBudget."""
        least = self._common.smallest(self._deadline)
        if self._budget_bytes < least.peak_bytes:
            if any(found.best is not None for found in tries):
                return
            raise _too_small(self._problem, least, self._budget_bytes, self._options)
        for found in tries:
            if found.ordered is least.ordered:
                self._exchange(found, [least.found.schedule])
            elif found.best is None and is_small(found.graph) and not self._is_least:
                start = _squeezed_within(found.graph, self._budget_bytes, self._deadline)
                self._exchange(found, [] if start is None else [start])

    def _starts(self, found: _Try, chain: Chain | None) -> list[Schedule]:
        """Schedules within the budget to improve: of the relaxation, of the chain, and of
        evictions; where none fits and time is over, of a relaxation that is taken further."""
        graph, budget_bytes = found.graph, self._budget_bytes
        known = [found.near]
        if chain is not None:
            until = self._deadline
            if found.near is None:
                until = at_once_until(graph, until, CHAINED_S)
            known.append(chain.solver.best_schedule(budget_bytes, deadline=until))
        if is_small(graph) or known[-1] is None:
            known.append(greedy_eviction.within(graph, budget_bytes))
        starts = [schedule for schedule in known if schedule is not None]
        until = at_once_until(graph, self._deadline)
        if not starts and until > self._deadline:
            # The relaxation was cut short. Rather a plan that is late than none.
            relaxed, near = fitted_relaxed(graph, budget_bytes, until, until + AT_ONCE_S)
            found.relaxed = relaxed or found.relaxed
            starts += [] if near is None else [near]
        return starts

    def _exchange(self, found: _Try, starts: list[Schedule]) -> None:
        """The best becomes what a start leads to, if that is faster; which one is not known before.
        What the budget does not ask for is left out first."""
        report("improving the plan")
        graph, budget_bytes, deadline = found.graph, self._budget_bytes, self._deadline
        shorter = {pruned(graph, s, budget_bytes, deadline=deadline): None for s in starts}
        made = [
            annealed(graph, s, budget_bytes, deadline=deadline)
            for s in _fastest_first(graph, shorter)
        ]
        known = [] if found.best is None else [found.best]
        found.best = next(iter(_fastest_first(graph, [*known, *made])), None)

    def _moved(self, found: _Try) -> _Try:
        """The best, improved by what the relaxation says and by exchanges that move first
        executions: where they do, in their order."""
        graph, budget_bytes, deadline = found.graph, self._budget_bytes, self._deadline
        assert found.best is not None
        bound_ns = graph.time_ns
        if found.relaxed is not None:
            bound_ns = found.relaxed.bound_ns
            # What was improved already is not again: it would end where it is.
            if found.best != found.near:
                until = _programs_until(graph, deadline)
                found.best = improve(found.relaxed, found.best, deadline=until)
                self._note(until)
        enough_ns = _accepted_ns(graph, bound_ns, ENOUGH_IF_LARGE)
        until = share_until(deadline, SHARE_WITHOUT_MOVES)
        found.best = annealed_again(
            graph, found.best, budget_bytes, enough_ns=enough_ns, deadline=until
        )
        self._note(until)
        # Of another order nothing is proven.
        enough_ns = graph.time_ns if is_small(graph) else enough_ns
        until = share_until(deadline, SHARE_OF_MOVES)
        found.best = annealed_again(
            graph, found.best, budget_bytes, enough_ns=enough_ns, deadline=until, moves=True
        )
        self._note(until)
        if first_executions(found.best) == tuple(range(len(graph.nodes))):
            return found
        of_problem = found.ordered.of_problem(found.best)
        moved = _Try(self._common.in_order(first_executions(of_problem)), budget_bytes)
        until = share_until(deadline, SHARE)
        moved.relaxed, moved.near = fitted_relaxed(moved.graph, budget_bytes, until, deadline)
        self._note(until)
        known = [moved.ordered.from_problem(of_problem), moved.near]
        moved.best = min(known, key=moved.time_ns)
        return moved

    def _improved(self, found: _Try) -> Plan:
        assert found.best is not None
        improved, bound_ns = _improved(
            found.graph,
            found.relaxed,
            found.best,
            self._budget_bytes,
            self._deadline,
            self._options.bound_time_limit_s,
        )
        enough_ns = _accepted_ns(found.graph, bound_ns, ENOUGH_IF_LARGE)
        if found.time_ns(improved.schedule) > enough_ns:
            is_complete = improved.is_complete and self._is_complete
            improved = replace(improved, is_complete=is_complete)
        return self._finished(found, improved, bound_ns)

    def _note(self, until: float) -> None:
        self._is_complete = self._is_complete and time.monotonic() < until


NEAR = 0.005
"""Share of the iteration time: a plan that is proven to be so near the fastest one is taken."""

NEAR_IF_LARGE, ENOUGH_IF_LARGE = 0.01, 0.02
"""The same for graphs of more than SMALL_NODES; and once exchanges were tried. On 12 layers of
GPT-2 these take 3 to 6 s and gain 0.03 to 0.27 %; blocks took 10 to 30 s more at 25 and 28 % of
keep-all's peak, and gained 0.00 and 0.03 %, and on 200 layers a minute, whatever the time limit."""


@paused_collection()
def _relaxed(
    graph: CDGraph, budget_bytes: int, deadline: float, *, fitting_until: float
) -> tuple[Refined | None, Schedule | None]:
    """The relaxation, and what becomes of its schedule when room is made where it needs more.

    fitting_until: room is made until then, which is later than the deadline of the rest: with
    nothing that fits, blocks are left, which take longer on large graphs and lead less far.
    """
    relaxed, near = fitted_relaxed(graph, budget_bytes, deadline, fitting_until)
    if relaxed is None or near is None:
        return relaxed, near
    near_ns = relaxed.bound_ns + int(NEAR_IF_LARGE * graph.time_ns)
    if is_small(graph) or simulate(graph, near).time_ns > near_ns:
        near = annealed(graph, near, budget_bytes, deadline=deadline)
    return relaxed, near


def _programs_until(graph: CDGraph, deadline: float) -> float:
    return share_until(deadline, SHARE_OF_PROGRAMS if is_small(graph) else SHARE)


def _accepted_ns(graph: CDGraph, bound_ns: int, share_if_large: float) -> int:
    """Nothing faster is looked for, where that bound is proven."""
    return bound_ns + int((NEAR if is_small(graph) else share_if_large) * graph.time_ns)


def _optimum(
    search: needs.Search | None, effort: int, known: Schedule | None, deadline: float
) -> Schedule | None:
    """The fastest schedule, if the search finds it or proves that it is the known one."""
    if search is None:
        return None
    report("searching the whole graph")
    below_ns = math.inf if known is None else simulate(search.graph, known).time_ns
    optimum = search.fastest(effort, deadline=deadline, below_ns=below_ns) or known
    if optimum is None or search.proven_ns < simulate(search.graph, optimum).time_ns:
        return None
    return optimum


LOOSER = 1.2
"""A budget, as a share of the one in hand, within which evictions may lead to something."""


def _squeezed_within(graph: CDGraph, budget_bytes: int, deadline: float) -> Schedule | None:
    """Of what evictions lead to within more, if exchanges make its peak so small."""
    loose = greedy_eviction.within(graph, int(LOOSER * budget_bytes))
    if loose is None:
        return None
    found = squeezed(graph, loose, deadline=deadline, enough_bytes=budget_bytes)
    return found if simulate(graph, found).peak_bytes <= budget_bytes else None


def _improved(
    graph: CDGraph,
    relaxed: Refined | None,
    best: Schedule,
    budget_bytes: int,
    deadline: float,
    bound_s: float,
) -> tuple[Improved, int]:
    """What becomes of the best schedule, and the time that is proven of every one, in ns."""
    with ThreadPoolExecutor(max_workers=1) as beside:
        latest = min(deadline, time.monotonic() + bound_s)
        proving = None if relaxed is None else beside.submit(proved_ns, relaxed, deadline=latest)
        # What is proven meanwhile depends on the machine; the plan does not.
        proven_ns = graph.time_ns if relaxed is None else relaxed.bound_ns
        enough_ns = _accepted_ns(graph, proven_ns, ENOUGH_IF_LARGE)
        if is_small(graph):
            best = searched(graph, best, budget_bytes, enough_ns=enough_ns, deadline=deadline)
        is_complete = time.monotonic() < deadline
        report("proving a bound")
        bound_ns = graph.time_ns if proving is None else proving.result()
    best = pruned(graph, best, budget_bytes, deadline=deadline)
    return Improved(best, is_complete), bound_ns


def _fastest_first(graph: CDGraph, schedules: Iterable[Schedule]) -> list[Schedule]:
    return sorted(schedules, key=lambda schedule: simulate(graph, schedule).time_ns)


def _too_small(
    problem: Problem, least: Smallest, budget_bytes: int, options: Options
) -> InfeasibleBudget:
    graph, schedule = least.ordered.graph, least.found.schedule
    peak = simulate(graph, schedule)
    event = schedule.events[peak.peak_event]
    where = _operation(graph, event.node) if isinstance(event, Compute) else "a free"
    if event == Compute(len(graph.forward) - 1):
        # Of a plan it is no part: the peak that one states may be less.
        where += ", with room for the loss of the caller"
    asked = [f"{n}={getattr(options, n)!r}" for n in ("keep", "recompute") if getattr(options, n)]
    where += f" (under {', '.join(asked)})" if asked else ""
    of_problem = least.ordered.of_problem(schedule)
    owner = peak_owner(problem.graph, of_problem, peak.peak_event)
    return InfeasibleBudget(
        budget_bytes,
        peak.peak_bytes,
        where,
        least.found.is_complete,
        unplanned_bytes=problem.unplanned.peak_bytes,
        owner=owner.shown if owner else "",
        owner_bytes=owner.size_bytes if owner else 0,
        module_path=owner.module if owner else None,
        source=owner.source if owner else None,
    )


def _operation(graph: CDGraph, node: int) -> str:
    found = graph.nodes[node]
    place = f" in '{found.module}'" if found.module else ""
    line = f" ({found.source})" if found.source else ""
    return f"{found.phase.value} operation {found.name}{place}{line}"


@paused_collection()
def _finish(problem: Problem, best: Improved, budget_bytes: int, bound_ns: int) -> Plan:
    graph, unplanned = problem.graph, problem.unplanned
    ends = frozenset(b.backward[-1] for b in problem.blocks if b.backward)
    during = [step.during_bytes for step in timeline(graph, best.schedule)]
    merged = merge_handovers(graph, best.schedule, during, ends)
    verify(problem.constrained, merged)
    found = simulate(graph, merged)
    certificate = _certificate(problem.constrained, found, bound_ns)
    plan = Plan(
        graph=graph,
        schedule=merged,
        blocks=tuple(BlockSummary(b.name, b.digest, b.forward, b.backward) for b in problem.blocks),
        budget_bytes=budget_bytes,
        peak_bytes=found.peak_bytes,
        saved_bytes=found.saved_bytes,
        time_ns=found.time_ns,
        eager_peak_bytes=unplanned.peak_bytes,
        eager_time_ns=unplanned.time_ns,
        certificate=certificate,
        graph_digest=problem.graph_digest,
        profile_digest=problem.profile_digest,
        profile_source=_profile_source(problem.profile),
        torch_version=str(torch.__version__),
    )
    is_done = best.is_complete or certificate.status is Status.OPTIMAL
    return plan if is_done else _stopped(plan)


def _certificate(graph: CDGraph, found: Simulation, bound_ns: int) -> Certificate:
    """bound_ns: no schedule within the budget is faster; nor is any than `keep_all`."""
    kept = simulate(graph, keep_all(graph))
    bound = min(max(bound_ns, kept.time_ns), found.time_ns)
    status = Status.OPTIMAL if bound == found.time_ns else Status.FEASIBLE
    return Certificate(status, found.time_ns, bound)
