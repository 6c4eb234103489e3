"""The pipeline: a module, a sample and a budget -> a plan -> a planned module."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn

from rockplan import eviction
from rockplan.available import in_bytes
from rockplan.block import Block, BlockOption, OptionFamily
from rockplan.budget import Budget, parse_budget
from rockplan.cache import Cache, default_folder
from rockplan.check import check
from rockplan.codegen import module as planned_modules
from rockplan.codegen import random_state
from rockplan.constraints import constrain
from rockplan.curve import Curve, CurvePoint, useful
from rockplan.dp.search import ChainSolver
from rockplan.errors import IllegalSchedule, InfeasibleBudget, InvalidInput, PlanMismatch
from rockplan.graph import CDGraph
from rockplan.graph_builder.canonical import graph_digest, profile_digest
from rockplan.graph_builder.capture import Capture, capture
from rockplan.graph_builder.lower import Lowered, lower
from rockplan.graph_builder.measure import check_layouts, measure, price, profile_key
from rockplan.graph_builder.partition import partition
from rockplan.ilp.bound import lower_bound_ns
from rockplan.ilp.corners import Settings
from rockplan.ilp.improve import Improved, improve
from rockplan.ilp.options import option_families
from rockplan.interface import Incoming
from rockplan.plan import BlockSummary, Certificate, Plan, Status
from rockplan.plan_file import fit, is_outline_of, read_plans
from rockplan.profile import Profile
from rockplan.progress import report
from rockplan.schedule import Compute, Schedule, keep_all, merge_handovers, with_frees
from rockplan.simulate import Simulation, simulate, timeline
from rockplan.verify import verify
from rockplan.version import planner


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan.

    on_mismatch: what a planned module does where a call differs from everything that was
    planned (shapes, dtypes, autocast, frozen parameters, changed attributes): 'replan' plans for
    the new kind of call, 'original' runs the original forward, 'error' raises StalePlan.
    differentiated: leaves of the result that backward starts from, by position among all leaves;
    None: the scalars that require a gradient (a loss), or if there are none, all that do. A
    backward that starts elsewhere is planned again when it comes; name all leaves that are ever
    differentiated where different steps use different ones.
    time_limit_s: how long to plan, after the model is captured and measured; the best plan so far
    is returned, and its status says that time was short. At least half of it is for the plan as
    a whole, the rest for options of blocks. A search for the smallest budget, where it is asked
    for or might not be met, is not cut short: what fits does not depend on the clock.
    check: run one step of the original and of the planned module on the sample, compare bit for
    bit, and raise CheckFailed if they differ; needs the memory of both.
    cache: keep profiles, options of blocks and plans on disk (ROCKPLAN_CACHE_DIR, else the
    platform's cache folder), so that planning again measures and solves nothing.
    bound_time_limit_s: how much of time_limit_s is left for the lower bound that the certificate
    states.
    keep, recompute: patterns of activations that the plan must keep from the forward pass on, or
    must not keep between forward and backward: modules ('layers.*.attn', '*.act'), or activations
    ('layers.*.attn/softmax') as `rockplan.names` names them (see `rockplan.constraints`).
    """

    on_mismatch: Literal["replan", "original", "error"] = "replan"
    differentiated: tuple[int, ...] | None = None
    time_limit_s: float = 20.0
    check: bool = False
    cache: bool = True
    bound_time_limit_s: float = 5.0
    keep: Sequence[str] = ()
    recompute: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("keep", "recompute"):
            patterns = getattr(self, name)
            if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
                raise InvalidInput(f"{name} is {patterns!r}; pass a sequence of patterns")
            object.__setattr__(self, name, tuple(patterns))
        if self.on_mismatch not in ("replan", "original", "error"):
            raise InvalidInput(
                f"on_mismatch is {self.on_mismatch!r}; choose 'replan', 'original' or 'error'"
            )


DEFAULT_OPTIONS = Options()


def solve(
    model: nn.Module,
    sample_input: object,
    budget: int | float | str | Budget,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> nn.Module:
    """Plan `model` under a budget; returns a drop-in module that executes the plan.

    sample_input: one batch, as a tensor, a tuple of positional arguments or a mapping of keyword
    arguments; sample_kwargs: further keyword arguments. Neither is changed, nor is the model.
    budget: peak bytes alive during forward and backward beyond parameters, buffers, inputs and
    the parameters' `.grad`: bytes, '2GB', '1.5GiB', '40%' of the unplanned peak, 'min', or on
    CUDA 'auto': what is free when `solve` is called, with room for gradients that do not exist
    yet and a margin (`rockplan.available`); 'auto-4GB' leaves room for what comes later, such as
    an optimizer's state. Calls of other shapes are planned under the same bytes; where they are
    larger than the sample, a share means theirs.
    The result shares parameters, buffers and submodules with `model`; `.plan` and `.code` show
    what it executes.
    Raises InvalidInput, InvalidBudget, CaptureError (or a subclass), InfeasibleBudget.
    """
    args, kwargs = arguments(model, sample_input, sample_kwargs)
    wanted = in_bytes(parse_budget(budget), model)
    program = _program(model, args, kwargs, None, budget=wanted, options=options)
    later = replace(wanted, least_bytes=program.plan.budget_bytes)
    return planned_modules.planned_module(
        model,
        program,
        args,
        kwargs,
        make_program=functools.partial(_program, budget=later, options=options),
        on_mismatch=options.on_mismatch,
        outputs_chosen=options.differentiated is not None,
    )


def plan(
    model: nn.Module,
    sample_input: object,
    budget: int | float | str | Budget,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Plan:
    """The plan that `solve` would execute, with the same arguments and errors."""
    args, kwargs = arguments(model, sample_input, sample_kwargs)
    wanted = in_bytes(parse_budget(budget), model)
    return _plan(_prepare(model, args, kwargs, options), wanted, options)


def plan_each(
    model: nn.Module,
    sample_input: object,
    budgets: Sequence[int | float | str | Budget],
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> tuple[Plan | InfeasibleBudget, ...]:
    """The plan of each budget, from one preparation of `model`; for a budget that is too small
    the error that `plan` would raise. Arguments and other errors are those of `plan`."""
    parsed = [parse_budget(budget) for budget in budgets]
    args, kwargs = arguments(model, sample_input, sample_kwargs)
    wanted = [in_bytes(budget, model) for budget in parsed]
    prepared = _prepare(model, args, kwargs, options)
    found: list[Plan | InfeasibleBudget] = []
    for budget in wanted:
        try:
            found.append(_plan(prepared, budget, options))
        except InfeasibleBudget as error:
            found.append(error)
    return tuple(found)


def pareto(
    model: nn.Module,
    sample_input: object,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Curve:
    """Predicted time at every useful peak, from one preparation of `model`.

    Arguments and errors are those of `solve`, without a budget. Each point is a plan: `solve` with
    `budget=point.peak_bytes` needs no more bytes and no more time.
    """
    args, kwargs = arguments(model, sample_input, sample_kwargs)
    prepared = _prepare(model, args, kwargs, options)
    graph = prepared.graph
    families = _families(prepared.blocks, _cache(options), options)
    solver = ChainSolver(prepared.problem, prepared.blocks, families)
    found = [simulation for _, simulation in solver.curve()]
    smallest = _smallest(prepared.problem, solver)
    minimum_bytes = simulate(prepared.problem, smallest).peak_bytes
    first = _fastest(prepared.problem, solver, smallest, minimum_bytes)
    found.append(simulate(prepared.problem, first))
    return Curve(
        points=useful(
            CurvePoint(s.peak_bytes, s.saved_bytes, s.time_ns, graph.time_ns) for s in found
        ),
        graph_digest=graph_digest(graph),
        profile_digest=profile_digest(prepared.profile),
        profile_source=_profile_source(prepared.profile),
    )


def load(
    model: nn.Module,
    sample_input: object,
    path: str | os.PathLike[str],
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> nn.Module:
    """The planned module of a file that `save_plan` wrote, here or on another machine.

    Nothing is measured or solved. The model is captured again, and a plan is used only if its
    graph is the same; its schedule is verified and simulated. Other kinds of call (shapes,
    dtypes) look for their plan in the file too; where it has none, options.on_mismatch decides:
    'replan' plans within the bytes of the plan for `sample_input`, 'error' raises PlanMismatch.
    ('original' runs the original forward for every call that is not like `sample_input`.)
    The file holds bytes and times of the machine that planned; the result's `.plan` says which.
    Arguments and further errors are those of `solve`. Raises PlanMismatch where no plan is for
    this model and sample, PlanFormatError for a damaged file.
    """
    args, kwargs = arguments(model, sample_input, sample_kwargs)
    make_program = functools.partial(
        _stored_program, plans=read_plans(path), budget=None, options=options
    )
    first = make_program(model, args, kwargs, None)
    on_mismatch = options.on_mismatch
    if on_mismatch == "replan":
        budget = Budget(size_bytes=first.plan.budget_bytes)
        make_program = functools.partial(make_program, budget=budget)
    return planned_modules.planned_module(
        model,
        first,
        args,
        kwargs,
        make_program=make_program,
        on_mismatch="original" if on_mismatch == "original" else "replan",
        outputs_chosen=options.differentiated is not None,
    )


def _profile_source(profile: Profile) -> str:
    return f"{profile.source} on {profile.device}, torch {profile.torch_version}"


def _cache(options: Options) -> Cache | None:
    return Cache(default_folder()) if options.cache else None


def arguments(
    model: object, sample_input: object, sample_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    _refuse_wrappers(model)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dict(sample_kwargs or {})
    if isinstance(sample_input, Mapping):
        kwargs = {**{str(k): v for k, v in sample_input.items()}, **kwargs}
    elif isinstance(sample_input, tuple | list):
        args = tuple(sample_input)
    elif isinstance(sample_input, torch.Tensor):
        args = (sample_input,)
    else:
        raise InvalidInput(
            f"sample_input is a {type(sample_input).__name__}; pass a tensor, a tuple of "
            "positional arguments or a mapping of keyword arguments"
        )
    _check_devices(model, (*args, *kwargs.values()))
    return args, kwargs


def _refuse_wrappers(model: nn.Module) -> None:
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.jit.ScriptModule)
    compiled = hasattr(model, "_orig_mod")
    if isinstance(model, wrappers) or compiled:
        raise InvalidInput(
            f"model is a {type(model).__name__}; plan the module inside it, then wrap the "
            "planned module"
        )


def _check_devices(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    own = {t.device.type for t in (*model.parameters(), *model.buffers())} - {"meta"}
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and own and argument.device.type not in own:
            raise InvalidInput(
                f"the sample has a tensor on {argument.device}, the model is on "
                f"{', '.join(sorted(own))}; move the sample there"
            )


@dataclass(frozen=True, slots=True)
class _Captured:
    """One kind of call of a module, without prices."""

    captured: Capture
    lowered: Lowered


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Everything that planning needs, before a budget is known.

    problem: `graph` under the constraints of the options, of which `blocks` are the blocks.
    """

    source: _Captured
    graph: CDGraph
    problem: CDGraph
    blocks: tuple[Block, ...]
    profile: Profile


def _prepare(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    incoming: Incoming | None = None,
) -> _Prepared:
    return _priced(_captured(module, args, kwargs, options, incoming), options)


def _captured(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    incoming: Incoming | None,
) -> _Captured:
    report("capturing the model")
    if incoming is None and options.differentiated is not None:
        incoming = dict.fromkeys(options.differentiated)
    forward = planned_modules.original_forward(module)
    with planned_modules.PLANNING:
        captured = capture(module, args, kwargs, forward, incoming)
        device = _device(module, captured)
        lowered = lower(captured, random_state.state_bytes(device))
        check_layouts(lowered.graph, lowered.samples)
    return _Captured(captured, lowered)


def _priced(source: _Captured, options: Options) -> _Prepared:
    with planned_modules.PLANNING:
        profile = _profile(source.lowered, _cache(options))
    report("finding blocks")
    graph = price(source.lowered.graph, profile)
    problem = constrain(graph, options.keep, options.recompute)
    return _Prepared(source, graph, problem, partition(problem), profile)


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


def _families(
    blocks: tuple[Block, ...], cache: Cache | None, options: Options
) -> list[OptionFamily]:
    """Options of each block; equal blocks are solved once, and not if they are in the cache."""
    settings = Settings(time_limit_s=options.time_limit_s * _BLOCKS_SHARE)
    problems = {b.digest: b.problem for b in blocks}
    known: dict[str, OptionFamily] = {}
    for digest, problem in problems.items():
        is_legal = functools.partial(_is_legal, problem)
        found = cache.family(_family_key(digest, settings), is_legal) if cache else None
        if found is not None:
            known[digest] = found
    missing = {d: p for d, p in problems.items() if d not in known}
    solved = option_families(list(missing.values()), settings=settings)
    for digest, family in zip(missing, solved, strict=True):
        known[digest] = family
        if cache:
            cache.put_family(_family_key(digest, settings), family)
    return [known[b.digest] for b in blocks]


def _family_key(digest: str, settings: Settings) -> dict[str, str]:
    return {"block": digest, "settings": repr(settings), "planner": planner()}


def _is_legal(problem: CDGraph, option: BlockOption) -> bool:
    """True if the option is a schedule of `problem` with the bytes and time that it states."""
    if any(i >= len(problem.nodes) for i in (*option.forward, *option.backward)):
        return False
    schedule = with_frees(problem, option.forward, option.backward)
    try:
        verify(problem, schedule)
    except IllegalSchedule:
        return False
    found = simulate(problem, schedule)
    return (found.forward_peak_bytes, found.backward_peak_bytes, found.time_ns) == (
        option.forward_peak_bytes,
        option.backward_peak_bytes,
        option.time_ns,
    )


def _device(module: nn.Module, captured: Capture) -> torch.device:
    kinds = {v.spec.device for v in captured.values if v.spec.device.startswith("cuda")}
    return torch.device(min(kinds)) if kinds else torch.device("cpu")


# Options that do not decide which plan is found.
_BESIDE_THE_PLAN = frozenset({"on_mismatch", "check", "cache"})


def _plan(prepared: _Prepared, budget: Budget, options: Options) -> Plan:
    """The plan of the cache, or else a new one."""
    cache = _cache(options)
    if cache is None:
        return _new_plan(prepared, budget, options)
    key = _plan_key(prepared, budget, options)
    graph = prepared.graph
    found = cache.plan(
        key, lambda p: p.graph_digest == key["graph"] and is_outline_of(p.graph, graph)
    )
    if found is not None:
        return replace(found, graph=graph)
    made = _new_plan(prepared, budget, options)
    cache.put_plan(key, made)
    return made


def _plan_key(prepared: _Prepared, budget: Budget, options: Options) -> dict[str, str]:
    """All that a plan depends on. The graph stands for the model, shapes, dtypes, autocast and
    device; an option that is new counts until it is named beside the plan."""
    deciding = (f.name for f in fields(options) if f.name not in _BESIDE_THE_PLAN)
    return {
        "graph": graph_digest(prepared.graph),
        "profile": profile_digest(prepared.profile),
        "device": prepared.profile.device,
        "torch": str(torch.__version__),
        "budget": str(budget),
        "planner": planner(),
        **{f"option {name}": repr(getattr(options, name)) for name in deciding},
    }


# Of the time limit, for the options of blocks.
_BLOCKS_SHARE = 0.5


def _new_plan(prepared: _Prepared, budget: Budget, options: Options) -> Plan:
    deadline = time.monotonic() + options.time_limit_s
    graph = prepared.problem
    unplanned = simulate(prepared.graph, keep_all(prepared.graph))
    budget_bytes = budget.within(unplanned.peak_bytes)
    fastest = keep_all(graph)
    if budget_bytes is not None and budget_bytes >= simulate(graph, fastest).peak_bytes:
        found = Improved(fastest, is_complete=True)
        return _finish(prepared, found, budget_bytes, options, deadline)
    families = _families(prepared.blocks, _cache(options), options)
    report("combining blocks")
    solver = ChainSolver(graph, prepared.blocks, families)
    until = deadline - min(options.bound_time_limit_s, options.time_limit_s / 4)
    smallest = None
    if budget_bytes is None or solver.best_schedule(budget_bytes) is None:
        smallest = _smallest(graph, solver)
        minimum_bytes = simulate(graph, smallest).peak_bytes
        budget_bytes = minimum_bytes if budget_bytes is None else budget_bytes
        if budget_bytes < minimum_bytes:
            raise _too_small(graph, budget_bytes, smallest, options)
    schedule = _fastest(graph, solver, smallest, budget_bytes)
    found = improve(graph, schedule, budget_bytes, deadline=until)
    if any(family.gap_ns is None for family in families):
        found = replace(found, is_complete=False)
    return _finish(prepared, found, budget_bytes, options, deadline)


def _smallest(graph: CDGraph, solver: ChainSolver) -> Schedule:
    """The schedule with the least peak that is found; its peak is the smallest budget."""
    report("looking for the smallest peak")
    found = eviction.thriftiest(graph)
    if simulate(graph, found).peak_bytes <= solver.minimum_bytes:
        return found
    of_chain = solver.best_schedule(solver.minimum_bytes)
    assert of_chain is not None
    return of_chain


def _fastest(
    graph: CDGraph,
    solver: ChainSolver,
    smallest: Schedule | None,
    budget_bytes: int,
) -> Schedule:
    """Of the chain, of evictions, and `smallest`, whichever is fastest within the budget; one of
    the chain and `smallest` is."""
    known = (
        solver.best_schedule(budget_bytes),
        eviction.within(graph, budget_bytes),
        smallest,
    )
    fitting = [schedule for schedule in known if schedule is not None]
    return min(fitting, key=lambda schedule: simulate(graph, schedule).time_ns)


def _too_small(
    graph: CDGraph, budget_bytes: int, smallest: Schedule, options: Options
) -> InfeasibleBudget:
    peak = simulate(graph, smallest)
    event = smallest.events[peak.peak_event]
    where = _operation(graph, event.node) if isinstance(event, Compute) else "a free"
    asked = [f"{n}={getattr(options, n)!r}" for n in ("keep", "recompute") if getattr(options, n)]
    where += f" (under {', '.join(asked)})" if asked else ""
    return InfeasibleBudget(budget_bytes, peak.peak_bytes, where)


def _operation(graph: CDGraph, node: int) -> str:
    found = graph.nodes[node]
    place = f" in '{found.module}'" if found.module else ""
    line = f" ({found.source})" if found.source else ""
    return f"{found.phase.value} operation {found.name}{place}{line}"


def _finish(
    prepared: _Prepared,
    best: Improved,
    budget_bytes: int,
    options: Options,
    deadline: float,
) -> Plan:
    graph = prepared.graph
    unplanned = simulate(graph, keep_all(graph))
    ends = frozenset(b.backward[-1] for b in prepared.blocks if b.backward)
    during = [step.during_bytes for step in timeline(graph, best.schedule)]
    merged = merge_handovers(graph, best.schedule, during, ends)
    verify(prepared.problem, merged)
    found = simulate(graph, merged)
    limit_s = min(options.bound_time_limit_s, max(deadline - time.monotonic(), 0.0))
    certificate = _certificate(prepared.problem, found, budget_bytes, limit_s)
    if not best.is_complete and certificate.status is not Status.OPTIMAL:
        certificate = replace(certificate, status=Status.TIME_LIMIT)
    return Plan(
        graph=graph,
        schedule=merged,
        blocks=tuple(
            BlockSummary(b.name, b.digest, b.forward, b.backward) for b in prepared.blocks
        ),
        budget_bytes=budget_bytes,
        peak_bytes=found.peak_bytes,
        saved_bytes=found.saved_bytes,
        time_ns=found.time_ns,
        eager_peak_bytes=unplanned.peak_bytes,
        eager_time_ns=unplanned.time_ns,
        certificate=certificate,
        graph_digest=graph_digest(graph),
        profile_digest=profile_digest(prepared.profile),
        profile_source=_profile_source(prepared.profile),
        torch_version=str(torch.__version__),
    )


def _certificate(
    graph: CDGraph,
    found: Simulation,
    budget_bytes: int,
    time_limit_s: float,
) -> Certificate:
    fastest = simulate(graph, keep_all(graph))
    if found.time_ns == fastest.time_ns:
        return Certificate(Status.OPTIMAL, found.time_ns, found.time_ns)
    report("proving a bound")
    bound = lower_bound_ns(graph, budget_bytes, time_limit_s=time_limit_s)
    bound = min(max(bound, fastest.time_ns), found.time_ns)
    status = Status.OPTIMAL if bound == found.time_ns else Status.FEASIBLE
    return Certificate(status, found.time_ns, bound)


def _program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    incoming: Incoming | None,
    *,
    budget: Budget,
    options: Options,
) -> planned_modules.Program:
    source = _captured(module, args, kwargs, options, incoming)
    made = _plan(_priced(source, options), budget, options)
    return _built(module, made, source, args, kwargs, options)


def _stored_program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    incoming: Incoming | None,
    *,
    plans: tuple[Plan, ...],
    budget: Budget | None,
    options: Options,
) -> planned_modules.Program:
    """The program of the plan among `plans` that is for this call; if there is none, of a new
    plan for `budget`, or PlanMismatch without one."""
    source = _captured(module, args, kwargs, options, incoming)
    graph = source.lowered.graph
    try:
        made = fit(plans, graph, graph_digest(graph), str(torch.__version__))
        verify(made.graph, made.schedule)
    except PlanMismatch:
        if budget is None:
            raise
        made = _plan(_priced(source, options), budget, options)
    return _built(module, made, source, args, kwargs, options)


def _built(
    module: nn.Module,
    made: Plan,
    source: _Captured,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> planned_modules.Program:
    constants = tuple(t for _, t in source.captured.constants)
    program = planned_modules.build_program(
        made, source.lowered.interface, constants, source.captured.output_spec
    )
    return _checked(module, program, args, kwargs) if options.check else program


def _checked(
    module: nn.Module,
    program: planned_modules.Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> planned_modules.Program:
    """`program`, whose plan records what one step compared with eager execution showed."""
    outputs = program.interface.outputs
    found = check(
        module,
        planned_modules.original_forward(module),
        planned_modules.bound_forward(module, program),
        {
            i: program.plan.graph.values[leaf.tangent].spec.stride
            for i, leaf in enumerate(outputs)
            if leaf.tangent is not None
        },
        args,
        kwargs,
    )
    return replace(program, plan=replace(program.plan, checked=found))
