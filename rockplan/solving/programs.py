"""Programs: the plan of a captured call (known, stored or new) as code that runs.

takes: a module and a call. returns: PlannedProgram, checked against eager execution if the options
ask for it. Raises InfeasibleBudget, which says what the caller could change.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from rockplan.budget import Budget
from rockplan.codegen.executable import build
from rockplan.errors import ForwardRaises, InfeasibleBudget, PlanMismatch, RockplanError
from rockplan.fitting.reserved import with_pool, with_reserved
from rockplan.graph_builder.costs.open_workspaces import with_open_workspaces
from rockplan.graph_builder.digests import graph_digest
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.graph_builder.operators.symbols import are_for
from rockplan.graph_builder.recorded.run import RecordedValue
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.graph_builder.tracing.free_sizes import StaticSizes
from rockplan.graph_builder.tracing.source_lines import is_of_torch
from rockplan.options import Options
from rockplan.oracles.verify import verify
from rockplan.python_state import key_value_cache, trees
from rockplan.runtime import planned_module as planned_modules
from rockplan.runtime import planned_state
from rockplan.runtime.captured import why_not
from rockplan.runtime.differences import described_call
from rockplan.runtime.guards import opened_key, without_unread
from rockplan.runtime.planned_module import kind_of_call
from rockplan.runtime.planned_state import TRIES, TriedSizes
from rockplan.runtime.program import MakeProgram, ModuleCall, PlannedProgram, build_program
from rockplan.runtime.switches import outside_of_initialization
from rockplan.search import planning
from rockplan.search.adapt import problem_at_other_sizes, problem_like
from rockplan.search.in_flight import needed_bytes, plan_in_flight
from rockplan.search.minimum_peak import LeastPeak
from rockplan.search.paging import refuse_beyond_host
from rockplan.search.problem import Problem
from rockplan.solving.agreement import ALONE, Agreement
from rockplan.solving.captured_calls import CapturedCall, captured_call, problems_of, waits_of
from rockplan.solving.check import NOTHING_RUNS_AGAIN, check, distance, runs
from rockplan.solving.open_sizes import unfused, with_open_sizes
from rockplan.solving.remedies import remedies
from rockplan.store.plan_file import fit, outline
from rockplan.values.copies import with_copies_of, without_copies
from rockplan.values.graph import Value, as_eager
from rockplan.values.interface import Interface, Precedent
from rockplan.values.plan import Plan
from rockplan.values.progress import is_heard, report
from rockplan.values.released import WORTH, releasable
from rockplan.values.schedule import keep_all
from rockplan.values.sizes import Place, resized

_LOGGER = logging.getLogger("rockplan")


def program_in_training(call: ModuleCall, *, make: MakeProgram) -> PlannedProgram:
    """Make the program of a call that a planned module meets in training. make: makes it, or
    raises. If the forward itself raises on this call, the original is run, so that its error leaves
    the call as in eager, and all that the forward has done before is done. For a RuntimeError of an
    operator, ours is raised instead: it says more."""
    try:
        with _shown():
            return make(call)
    except ForwardRaises as failure:
        error = failure
    forward = planned_state.original_forward(call.module)
    if not _is_of_backward(call) and not runs(call, forward):
        said = (Exception,) if _is_of_operators(error.__cause__) else ()
        with contextlib.suppress(*said):
            forward(*call.args, **call.kwargs)
    raise error


def _is_of_backward(call: ModuleCall) -> bool:
    return call.incoming is not None and not isinstance(call.incoming, Precedent)


def _is_of_operators(error: BaseException | None) -> bool:
    """True if `error` is a RuntimeError that PyTorch raised, not a `raise` of the user's."""
    if not isinstance(error, RuntimeError):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or is_of_torch(last.tb_frame.f_code.co_filename):
        return True
    is_raise = last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return type(error) is RuntimeError and not is_raise


def _shown() -> AbstractContextManager[object]:
    if is_heard() or sys.stderr is None or not sys.stderr.isatty():
        return nullcontext()
    from rockplan.reports.progress_bars import waiting  # imported late: that takes a moment

    return waiting()


def best_plan(
    problems: Sequence[Problem], budget: Budget, options: Options, least: Sequence[LeastPeak]
) -> Plan:
    """Return the fastest plan of any of the problems (variants of one call) within the budget, the
    first of equally fast ones; for the smallest budget the plan that needs the fewest bytes. least:
    the search of the least peak of each problem. Raises InfeasibleBudget."""
    count = options.in_flight
    size_bytes = budget.within(needed_bytes(problems[0].unplanned, count))
    plan_within = planning.plan_within if count == 1 else plan_in_flight
    # A share is one of the unplanned peak of the first problem, whose head is not tiled.
    as_bytes = budget if size_bytes is None else Budget(size_bytes=size_bytes)
    plans: list[Plan] = []
    errors: list[InfeasibleBudget] = []
    for problem, own in zip(problems, least, strict=True):
        asked = budget if problem is problems[0] else as_bytes
        try:
            plans.append(plan_within(problem, asked, options, own))
        except InfeasibleBudget as error:
            errors.append(error)
    if not plans:
        raise min(errors, key=lambda e: e.minimum_bytes)
    if budget.is_minimum:
        best = min(plans, key=lambda p: (needed_bytes(p, count), p.time_ns))
    else:
        best = min(plans, key=lambda p: p.time_ns)
    if len(problems) > 1 and not best.graph.tiles:
        _LOGGER.info("the head stays whole: no plan with its rows in parts is better")
    return with_reserved(best)


def plan_as_asked(
    problems: Sequence[Problem],
    budget: Budget,
    options: Options,
    is_backward: bool = False,
    least: Sequence[LeastPeak] = (),
) -> Plan:
    """Return the fastest plan of any of the problems within the budget. If there is none,
    options.on_infeasible decides: InfeasibleBudget is raised, or the smallest plan is returned, as
    the logger says. is_backward: the forward of the call has run, so that running the original is
    no choice any more; least: as in `best_plan`, () for new searches."""
    least = least or [planning.least_peak_of(problem, options) for problem in problems]
    try:
        return best_plan(problems, budget, options, least)
    except InfeasibleBudget as failure:
        is_too_late = options.on_infeasible == "original" and is_backward
        if not (options.takes_smallest(budget) or is_too_late):
            raise
        error = failure
    smallest_plan = best_plan(problems, Budget(is_minimum=True), options, least)
    smallest_bytes = needed_bytes(smallest_plan, options.in_flight)
    if smallest_bytes > error.budget_bytes:
        # That a share is too small is said of the first kind of call.
        is_said = budget.share is not None and budget.least_bytes
        _LOGGER.log(logging.INFO if is_said else logging.WARNING, "%s", error.taken(smallest_bytes))
    return smallest_plan


def new_or_known_program(
    call: ModuleCall,
    *,
    budget: Budget,
    options: Options,
    agreed: Agreement = ALONE,
    source: CapturedCall | None = None,
) -> PlannedProgram:
    """Make the program of a call: in another schedule if the module has one for calls of its size
    too; of a plan that the module already has for the same graph, or of a new one. agreed:
    processes that plan the same first call; source: the call as captured, if it was."""
    if (rung := _another_rung(call, budget, options)) is not None:
        return rung
    # Kernels for this size alone are compiled if there is no program for all.
    is_first = source or not planned_state.programs_of(call.module)
    source = source or captured_call(call, options if is_first else unfused(options))
    opened = with_sizes_open(call, source, options)
    if options.compile and opened is source and not is_first:
        opened = captured_call(call, options)
    source = opened
    for variant in source.variants:
        if (same := _known_for_graph(_known(call.module, variant), variant)) is not None:
            return replace(built_program(call, same, variant, options), is_taken_over=True)
    return _new_program(call, source, budget, options, agreed)


def _another_rung(call: ModuleCall, budget: Budget, options: Options) -> PlannedProgram | None:
    """None if there is no program for calls of many sizes."""
    found = sized_problem(call, options)
    if found is None:
        return None
    program, problem, interface = found
    limit_bytes = budget.within(needed_bytes(problem.unplanned, options.in_flight))
    less = budget if limit_bytes is None else Budget(size_bytes=int(limit_bytes * NEARLY))
    plan = None
    with planned_state.PLANNING:
        if limit_bytes is not None:
            with contextlib.suppress(InfeasibleBudget):
                plan = plan_as_asked([problem], less, replace(options, on_infeasible="error"))
        plan = plan or plan_as_asked([problem], budget, options)
    plan = replace(plan, budget_bytes=limit_bytes or plan.budget_bytes)
    return rung_program(call, program, plan, interface, options)


NEARLY = 31 / 32
"""Share of a budget that a plan for many sizes takes where it can, so that calls of nearly the size
that it is made for fit too: their bytes and their budget grow by different powers of the size."""


def sized_problem(
    call: ModuleCall, options: Options
) -> tuple[PlannedProgram, Problem, Interface] | None:
    """Return (a program that the module has for calls of this one's size too, its problem at these
    sizes, its interface there); None if there is none. Nothing is captured: the graph follows from
    its expressions."""
    if not isinstance(call.module, planned_state.HasPlans) or _is_of_backward(call):
        return None
    leaves, spec = trees.tree_flatten((call.args, call.kwargs))
    state = call.module._rockplan
    kind = kind_of_call(call.args, call.kwargs, state.unread.get(spec, frozenset()))
    rungs, sizes = state.rungs(kind, leaves)
    if not rungs:
        return None
    # One that recomputes much fits where another does.
    rung = max(rungs, key=lambda r: r.program.plan.overhead)
    known, opened = rung.program, planned_state.opened_in(rung)
    numbers = opened.numbers(sizes, leaves)
    graph, interface = resized((without_copies(opened.graph), opened.interface), numbers)
    waits = waits_of(graph, interface, known.hooked)
    return known, problem_at_other_sizes(known.plan, graph, waits, options), interface


def rung_program(
    call: ModuleCall, known: PlannedProgram, plan: Plan, interface: Interface, options: Options
) -> PlannedProgram:
    """Generate the code of another schedule of a known program for calls of many sizes. interface:
    at the sizes of the plan."""
    assert known.open is not None
    program = build_program(
        with_reserved(plan),
        interface,
        known.constants,
        known.output_spec,
        known.hooked,
        described_call(planned_state.original_forward(call.module), call.args, call.kwargs),
        known.host_path,
        known.open.workspaces,
    )
    return _checked(call, program, plan.graph.values) if options.check else program


def with_sizes_open(
    call: ModuleCall,
    source: CapturedCall,
    options: Options,
    adjusted: Callable[[Lowered], Lowered] = lambda lowered: lowered,
) -> CapturedCall:
    """Return the captured call for calls of other sizes too, if one that the module has a program
    for differs from it in sizes alone; else `source`. What cannot be open is remembered, and said
    once for each kind of call. adjusted: as for `with_open_sizes`."""
    # A program with such workspaces is open.
    is_one = source.earlier_workspaces or _is_of_backward(call)
    if is_one or not isinstance(call.module, planned_state.HasPlans):
        return source
    state = call.module._rockplan
    kind = opened_key(kind_of_call(call.args, call.kwargs, source.run.unread))
    tried = state.tried.setdefault(kind, TriedSizes())
    most = TRIES * (1 + len(state.programs.get(kind, ())))
    for known, places in _alike_but_for_sizes(state, source, kind):
        if tried.count >= most:
            break
        try:
            return with_open_sizes(call, source, known, options, adjusted)
        except StaticSizes as error:
            reason = error
        except Exception as error:  # symbols are PyTorch's own: what is static runs all the same
            first_line = str(error).partition("\n")[0]
            reason = StaticSizes(f"with symbols the recording fails: {first_line}")
        tried.fixed.update((place, places[place]) for place in reason.fixed)
        tried.ranges += reason.ranges
        # With open ones, which are for other sizes, this one may be a constant.
        tried.count += 1 if reason.is_of_pair or most > TRIES else TRIES
        # All blocks of a model would say so.
        is_said = reason.is_of_pair or str(reason) in state.warned
        state.warned.add(str(reason))
        level = logging.INFO if is_said else logging.WARNING
        what = "sizes of such calls are each" if tried.count >= most else "this size is"
        _LOGGER.log(level, "%s planned by itself: %s", what, reason)
        if not (reason.fixed or reason.ranges):
            break
    return source


def _alike_but_for_sizes(
    state: planned_state.PlannedState, source: CapturedCall, kind: Any
) -> Iterator[tuple[PlannedProgram, Mapping[Place, object]]]:
    """Of a kind without sizes, the latest first, with the sizes of `source` in which they differ,
    as long as nothing speaks against leaving these open: of calls that the same recording would
    be for, where one is known."""
    now, tried = source.lowered.interface.call_in(source.lowered.graph), state.tried[kind]
    from_outputs = _starts(source.lowered.interface)
    alike = (
        bound.program
        for other, bounds in reversed([*state.programs.items()])
        if other[0] == kind[0]
        and other[1][:1] != ("open",)
        and opened_key(without_unread(other, source.run.unread)) == kind
        for bound in reversed(bounds)
        if bound.signature.holds() and _starts(bound.program.interface) == from_outputs
    )
    for program in alike:
        then = program.interface.call_in(program.plan.graph)
        places, near = now.differing(then), [one for one in tried.ranges if are_for(one, now)]
        is_near = not near or any(are_for(one, then) for one in near)
        may_be = None not in places.values() and tried.fixed.isdisjoint(places.items())
        if places and may_be and is_near:
            yield program, places


def _starts(interface: Interface) -> list[bool]:
    """For each result, whether a backward pass may start from it."""
    return [leaf.tangent is not None for leaf in interface.outputs]


def _new_program(
    call: ModuleCall,
    source: CapturedCall,
    budget: Budget,
    options: Options,
    agreed: Agreement = ALONE,
) -> PlannedProgram:
    like = problems_like(call.module, source, options)

    def make() -> Plan:
        with advised(call, source, options):
            problems = like or problems_of(source, options)
            return plan_as_asked(problems, budget, options, _is_of_backward(call))

    plan = agreed_plan(source, budget, options, agreed, make)
    variant = next(v for v in source.variants if v.run.tiles.parts == plan.graph.tiles)
    program = built_program(call, plan, variant, options)
    return replace(program, is_taken_over=bool(like))


def problems_like(module: nn.Module, source: CapturedCall, options: Options) -> tuple[Problem, ...]:
    """Return the problem of each variant, priced as plans that the module has; () if none is like
    it, and where collectives run again, too: one process may meet this call alone."""
    if options.rerun_collectives:
        return ()
    with planned_state.PLANNING:
        found = (
            problem_like(_known(module, v), v.lowered, v.waits, options) for v in source.variants
        )
        made = tuple(problem for problem in found if problem is not None)
    return made if len(made) == len(source.variants) else ()


def agreed_plan(
    source: CapturedCall,
    budget: Budget,
    options: Options,
    agreed: Agreement,
    make: Callable[[], Plan],
) -> Plan:
    """Return the plan that `make` makes here; or, if processes plan together (`agreed` is not
    ALONE), the one that the lowest rank with the same graphs, budget and options makes, on the
    graph captured here."""
    graphs = [variant.lowered.graph for variant in source.variants]

    def key() -> object:
        digests = [graph_digest(graph, on_any_device=True) for graph in graphs]
        return digests, str(budget), repr(options)

    plan = agreed.decided(key, make, graphs)
    if agreed is ALONE:
        return plan
    graph = next(w for w in source.variants if w.run.tiles.parts == plan.graph.tiles).lowered.graph
    digest = graph_digest(graph)
    outlined = replace(plan, graph=outline(plan.graph), graph_digest=digest)
    fitted = fit([outlined], graph, digest, plan.torch_version)
    verify(fitted.graph, fitted.schedule)
    return replace(fitted, origin=plan.origin)


def _known(module: nn.Module, source: CapturedCall) -> tuple[Plan, ...]:
    """For calls whose gradients have the same hooks, and whose head is tiled or whole as in
    `source`."""
    plans = (p.plan for p in planned_state.programs_of(module) if p.hooked == source.hooked)
    return tuple(p for p in plans if bool(p.graph.tiles) == bool(source.run.tiles.parts))


def advise(program: PlannedProgram, options: Options) -> None:
    """Log, if the user may start backward from other leaves, for which ones the peak is predicted;
    and, if the plan recomputes for lack of memory, which leaves of the result could be released."""
    plan = program.plan
    if options.differentiated is None and (starts := _ambiguous_starts(program)):
        _LOGGER.info(
            "the peak that is promised is for a backward pass from leaves %s of the result; where "
            "a step starts from others, Options(differentiated=(...)) says so before training",
            starts,
        )
    let_go = releasable(plan.graph, program.interface, options.released)
    if let_go and plan.overhead > 0 and let_go.size_bytes >= WORTH * plan.budget_bytes:
        _LOGGER.warning("%s", let_go.advice(options.released))


def _ambiguous_starts(program: PlannedProgram) -> tuple[int, ...]:
    """Users may mean others if several leaves require a gradient and one of them is a scalar; () if
    they cannot."""
    values, outputs = program.plan.graph.values, program.interface.outputs
    starts = tuple(i for i, leaf in enumerate(outputs) if leaf.tangent is not None)
    distinct = [
        (i, leaf) for i, leaf in enumerate(outputs) if leaf.requires_grad and leaf.first == i
    ]
    scalars = [
        i for i, leaf in distinct if leaf.value is not None and not values[leaf.value].spec.shape
    ]
    return starts if scalars and len(distinct) > 1 else ()


@contextlib.contextmanager
def advised(call: ModuleCall, source: CapturedCall, options: Options) -> Iterator[None]:
    """Add to InfeasibleBudget raised in the `with` block which leaves of the result could be
    released, and with which options the budget would do."""
    try:
        yield
    except InfeasibleBudget as error:
        let_go = source.releasable(options)
        if let_go and let_go.size_bytes < WORTH * error.minimum_bytes:
            let_go = None
        text = f"{error} Or: {let_go.advice(options.released)}." if let_go else str(error)
        if options.on_infeasible in (None, "error"):
            text += remedies(error, options, let_go, functools.partial(least_bytes, call))
        error.args = (text,)
        raise


def least_bytes(call: ModuleCall, options: Options, everything_kept: bool = False) -> int | None:
    """Return the bytes of the smallest plan of a call under these options, or with everything kept;
    None if it cannot be planned, or if options.tile is set and there is no head to tile."""
    try:
        with outside_of_initialization():
            source = captured_call(call, options, is_asked=False)
            if options.tile and source.in_parts is None:
                return None
            problems = problems_of(source, options)
            if everything_kept:
                return needed_bytes(problems[-1].unplanned, options.in_flight)
            return plan_as_asked(problems, Budget(is_minimum=True), options).budget_bytes
    except RockplanError:
        return None


def _known_for_graph(known: Sequence[Plan], source: CapturedCall) -> Plan | None:
    """None if there is none. (Trainers change attributes and configurations that the forward does
    not read: then the call is new, but the graph is not.)"""
    graph = source.lowered.graph
    # Compare values first: a digest takes as long as a pass of lowering.
    known = [p for p in known if without_copies(p.graph).values == graph.values]
    digest = graph_digest(graph) if known else ""
    known_plan = next((p for p in known if p.graph_digest == digest), None)
    if known_plan is None:
        return None
    outlined = replace(known_plan, graph=outline(known_plan.graph))
    try:
        fitted = fit([outlined], graph, digest, known_plan.torch_version)
    except PlanMismatch:
        return None
    return replace(fitted, origin=known_plan.origin)


# `Plan.compiled` -> `Options.compile`.
_COMPILE: dict[str, bool | Literal["near"]] = {"": False, "yes": True, "near": "near"}


def stored_program(
    call: ModuleCall, *, plans: tuple[Plan, ...], budget: Budget | None, options: Options
) -> PlannedProgram:
    """Make the program of the one among `plans`, read from a file, that is for this call. If there
    is none: of a plan made for `budget`; PlanMismatch is raised if that is None. Raises
    InvalidInput if any of `plans` pages more to the host than the options allow: a call in training
    may need it."""
    refuse_beyond_host(plans, options)
    # The plans say whether kernels are compiled; a plan without any ("") says nothing.
    modes = {p.compiled for p in plans}
    modes = modes - {""} or modes
    if len(modes) == 1:
        options = replace(options, compile=_COMPILE[modes.pop()])
    if budget is not None and (rung := _another_rung(call, budget, options)) is not None:
        return rung
    # Capture once for each number of parts that a plan's head is tiled into.
    for parts in sorted({p.graph.tiles for p in plans}):
        options = replace(options, tile=parts or options.tile)
        source = captured_call(call, options)
        if budget is not None:
            source = with_sizes_open(call, source, options)
        for variant in source.variants:
            graph = variant.lowered.graph
            try:
                plan = fit(plans, graph, graph_digest(graph), str(torch.__version__))
            except PlanMismatch as error:
                mismatch = error
                continue
            verify(plan.graph, plan.schedule)
            waiting = planning.waiting(plan, variant.waits)
            if needed_bytes(waiting, plan.in_flight) <= plan.budget_bytes:
                plan = waiting
            return built_program(call, plan, variant, options)
    if budget is None:
        raise mismatch
    return new_or_known_program(call, budget=budget, options=options, source=source)


def built_program(
    call: ModuleCall, plan: Plan, source: CapturedCall, options: Options
) -> PlannedProgram:
    """Generate the code of a plan for a captured call and return it as a program. With
    options.check it is compared with eager first, and the plan says what was found; raises
    CheckFailed if it differs."""
    report("writing the code")
    plan = with_reserved(plan)
    interface, is_first = source.lowered.interface, not planned_state.programs_of(call.module)
    # A later kind of call that no graph can be of runs by its code, as the logger says.
    if options.graph and (is_first or not why_not(plan, interface)):
        plan = with_pool(plan, interface)
    if source.earlier_workspaces:
        graph = with_open_workspaces(without_copies(plan.graph), source.earlier_workspaces)
        plan = replace(plan, graph=with_copies_of(graph, plan.graph))
    program = build_program(
        plan,
        interface,
        tuple(t for _, t in source.run.constants),
        source.run.output_spec,
        source.hooked,
        described_call(planned_state.original_forward(call.module), call.args, call.kwargs),
        None if options.host_path is None else os.fspath(options.host_path),
    )
    return _checked(call, program, source.run.values) if options.check else program


def _checked(
    call: ModuleCall, program: PlannedProgram, values: Sequence[Value | RecordedValue]
) -> PlannedProgram:
    """If its kernels are compiled or its head is tiled, the comparison is with the same graph
    without re-executions, and the distance from eager is stated too. values: whose dtypes say how
    exact that can be. Raises CheckFailed."""
    starts = program.incoming
    original = planned_state.original_forward(call.module)
    planned = planned_modules.bound_forward(call.module, program)
    plan = program.plan
    with key_value_cache.switched_off(call.module):
        if plan.compiled or plan.graph.tiles:
            graph = as_eager(plan.graph)
            everything = replace(plan, graph=graph, schedule=keep_all(graph))
            name = f"{plan.graph_digest[:8]} kept"
            executable = build(graph, program.interface, everything.schedule, name)
            keeping = replace(program, plan=everything, executable=executable)
            kept = planned_modules.bound_forward(call.module, keeping)
            difference = check(call, kept, planned, starts, NOTHING_RUNS_AGAIN)
            dtypes = frozenset(dtype_of(value.spec) for value in values)
            share = distance(call, original, planned, starts, dtypes)
            difference += f"; gradients differ from eager's by {share:.1e} of their norm"
        else:
            difference = check(call, original, planned, starts)
    return replace(program, plan=replace(plan, checked=difference))
