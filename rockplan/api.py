"""The pipeline: a module, a sample and a budget -> a plan -> a planned module."""

from __future__ import annotations

import contextlib
import dis
import functools
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from rockplan.budget import Budget, parse_budget
from rockplan.check import NOTHING_RUNS_AGAIN, check, distance, runs
from rockplan.codegen import rng_replay
from rockplan.codegen.executable import build
from rockplan.errors import (
    ForwardRaises,
    InfeasibleBudget,
    InvalidInput,
    PlanMismatch,
    RockplanError,
)
from rockplan.free_memory import in_bytes
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.digests import graph_digest
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.graph_builder.pipeline import HeadStaysWhole, lower
from rockplan.graph_builder.recorded.run import Capture
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.graph_builder.tracing.outputs import WITHOUT_FLAT_PARAMETERS
from rockplan.graph_builder.tracing.source_lines import is_of_torch
from rockplan.libraries import key_value_cache
from rockplan.options import DEFAULT_OPTIONS, Options
from rockplan.oracles.verify import verify
from rockplan.parts import named_in_refusals
from rockplan.remedies import needed_with, remedies
from rockplan.runtime import planned_module as planned_modules
from rockplan.runtime.differences import described_call
from rockplan.runtime.hooks import has_hooks
from rockplan.runtime.planned_state import PLANNING, original_forward, programs_of, unplanned
from rockplan.runtime.program import MakeProgram, PlannedProgram, build_program
from rockplan.runtime.switches import outside_of_initialization
from rockplan.search import planning
from rockplan.search.adapt import Adapted, adapted
from rockplan.search.budget_curve import curve_of
from rockplan.search.minimum_peak import LeastPeak
from rockplan.search.problem import Problem, measured
from rockplan.sizes import SizedCall, sized_calls
from rockplan.store.plan_file import fit, outline, read_plans
from rockplan.values.curve import Curve, best_of
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import as_eager
from rockplan.values.interface import Incoming, Precedent
from rockplan.values.plan import Plan
from rockplan.values.progress import is_heard, report
from rockplan.values.released import WORTH, Releasable, releasable
from rockplan.values.schedule import Waits, keep_all

_LOGGER = logging.getLogger("rockplan")


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
    yet and a margin (`rockplan.free_memory`); 'auto-4GB' leaves room for what comes later, such as
    an optimizer's state. Calls of other shapes are planned under the same bytes; where they are
    larger than the sample, a share means theirs. options.sizes says how large they get: then the
    largest is planned first, and a share means its.
    The result shares parameters, buffers and submodules with `model`; `.plan` and `.code` show
    what it executes. A module that is planned already is planned anew from its original.
    Raises InvalidInput, InvalidBudget, CaptureError (or a subclass), InfeasibleBudget.
    """
    args, kwargs = arguments(model, sample_input, sample_kwargs)
    wanted = in_bytes(parse_budget(budget), model)
    model = unplanned(model)
    with named_in_refusals(model), outside_of_initialization():
        first, *others = _calls(model, args, kwargs, options)
        with first.named_in_errors():
            program = _program(
                model, first.args, first.kwargs, None, budget=wanted, options=options
            )
        _advise(program, options)
        later = replace(wanted, least_bytes=program.plan.budget_bytes)
        make = functools.partial(_program, budget=later, options=options)
        planned = planned_modules.planned_module(
            model,
            program,
            first.args,
            first.kwargs,
            make_program=functools.partial(program_in_training, make=make),
            on_mismatch=options.on_mismatch,
            on_infeasible=options.on_infeasible,
            outputs_chosen=options.differentiated is not None,
        )
        _plan_ahead(planned, others, make)
        return planned


def _calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> tuple[SizedCall, ...]:
    """What is planned before training, the largest first."""
    check_options(options)
    return sized_calls(original_forward(model), args, kwargs, options)


def largest_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> SizedCall:
    """The sample with the largest of `Options.sizes`; without any, as it is."""
    return _calls(model, args, kwargs, options)[0]


def _plan_ahead(planned: nn.Module, calls: Sequence[SizedCall], make: MakeProgram) -> None:
    for call in calls:
        with call.named_in_errors():
            program = make(planned, call.args, call.kwargs, None)
        planned_modules.add_program(planned, call.args, call.kwargs, program)


def check_options(options: object) -> None:
    if not isinstance(options, Options):
        raise InvalidInput(
            f"options is a {type(options).__name__}; pass rockplan.Options(...), whose arguments "
            "are the options"
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
    call = largest_call(model, args, kwargs, options)
    with named_in_refusals(model), call.named_in_errors():
        with outside_of_initialization():
            source = captured_call(model, call.args, call.kwargs, options)
            problems = _problems(source, options)
        with _advised(model, source, call.args, call.kwargs, options):
            return _planned(problems, wanted, options)


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
    call = largest_call(model, args, kwargs, options)
    source, problems = _prepared(model, call, options)
    least = [planning.least_peak_of(problem, options) for problem in problems]
    solved: list[Plan | InfeasibleBudget] = []
    for budget in wanted:
        try:
            with call.named_in_errors(), _advised(model, source, call.args, call.kwargs, options):
                solved.append(_best(problems, budget, options, least))
        except InfeasibleBudget as error:
            solved.append(error)
    return tuple(solved)


def pareto(
    model: nn.Module,
    sample_input: object,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Curve:
    """Predicted time at every useful peak, from one preparation of `model`.

    Arguments and errors are those of `solve`, without a budget. Each point is a plan, the one that
    `solve` makes for `budget=point.peak_bytes` where no time limit strikes; with the cache it is
    kept for it. options.time_limit_s holds for each of some 16 plans. Those at which little runs
    again take a second or less, others some seconds each; all of them 22 s for one layer of an
    encoder, 37 to 64 s for the MLP of the examples, on one core.
    """
    args, kwargs = arguments(model, sample_input, sample_kwargs)
    call = largest_call(model, args, kwargs, options)
    _, problems = _prepared(model, call, options)
    return best_of([curve_of(problem, options) for problem in problems])


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
    model = unplanned(model)
    with named_in_refusals(model), outside_of_initialization():
        first, *others = _calls(model, args, kwargs, options)
        with first.named_in_errors():
            program = make_program(model, first.args, first.kwargs, None)
        on_mismatch = options.on_mismatch
        if on_mismatch == "replan":
            budget = Budget(size_bytes=program.plan.budget_bytes)
            make_program = functools.partial(make_program, budget=budget)
        planned = planned_modules.planned_module(
            model,
            program,
            first.args,
            first.kwargs,
            make_program=functools.partial(program_in_training, make=make_program),
            on_infeasible=options.on_infeasible,
            on_mismatch="original" if on_mismatch == "original" else "replan",
            outputs_chosen=options.differentiated is not None,
        )
        _plan_ahead(planned, others, make_program)
        return planned


def needed_bytes_with(
    model: object,
    sample_input: object,
    sample_kwargs: Mapping[str, Any] | None,
    options: Options,
    *,
    everything_kept: bool,
) -> dict[str, int]:
    """What a call needs under options that lower it, as they are written: the bytes of its smallest
    plan, or with everything kept. Arguments are those of `plan`."""
    args, kwargs = arguments(model, sample_input, sample_kwargs, says_cache=False)
    assert isinstance(model, nn.Module)
    model = unplanned(model)
    call = largest_call(model, args, kwargs, options)
    needs = functools.partial(
        _kept_bytes if everything_kept else least_bytes, model, call.args, call.kwargs
    )
    with outside_of_initialization():
        source = captured_call(model, call.args, call.kwargs, options, is_asked=False)
    plain_bytes = needs(options)
    if plain_bytes is None:
        return {}
    return needed_with(options, source.releasable(options), needs, plain_bytes)


def _kept_bytes(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> int | None:
    try:
        with outside_of_initialization():
            source = captured_call(module, args, kwargs, options, is_asked=False)
            if options.tile and source.in_parts is None:
                return None
            return _problems(source, options)[-1].unplanned.peak_bytes
    except RockplanError:
        return None


def arguments(
    model: object,
    sample_input: object,
    sample_kwargs: Mapping[str, Any] | None,
    *,
    says_cache: bool = True,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How `model` is called with the sample. says_cache: log that calls that are planned run
    without the key-value cache. Raises InvalidInput for what cannot be."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    _refuse_wrappers(model)
    if not isinstance(sample_kwargs, Mapping | None):
        raise InvalidInput(
            f"sample_kwargs is a {type(sample_kwargs).__name__}; pass a mapping of keyword "
            "arguments"
        )
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
    if says_cache:
        key_value_cache.say(model, kwargs)
    if "labels" in kwargs and not model.training:
        _LOGGER.warning(
            "the model is in eval mode, as from_pretrained returns it, and planned for that: steps "
            "in training mode may need another plan. Call model.train() before it is planned"
        )
    return args, kwargs


def _refuse_wrappers(model: nn.Module) -> None:
    if hasattr(model, "_orig_mod"):
        raise InvalidInput(
            "model is compiled by torch.compile, and a plan runs without a compiler; plan the "
            "module inside it (model._orig_mod)"
        )
    if isinstance(model, nn.DataParallel):
        raise InvalidInput(
            f"model is a {type(model).__name__}; plan the module inside it, then wrap the "
            "planned module"
        )
    for path, module in model.named_modules():
        # By name: what is not in use need not be imported, which takes a second.
        kind = next((k.__name__ for k in type(module).__mro__ if k.__name__ in _DISTRIBUTED), None)
        if kind is not None:
            part = f"submodule '{path}'" if path else "model"
            raise InvalidInput(f"{part} is a {kind}, {_DISTRIBUTED[kind]}")


# What works on a whole planned module, and not inside of one -> why, and what to do.
_DISTRIBUTED = {
    "DistributedDataParallel": (
        "which sums gradients over processes when autograd has them; plan the module without it, "
        "then wrap the whole planned module"
    ),
    "FullyShardedDataParallel": (
        "which exchanges the memory of parameters while they are used; plan the module without it, "
        f"and {WITHOUT_FLAT_PARAMETERS}"
    ),
}


def _check_devices(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    devices = {p.device for p in model.parameters() if not p.is_meta}
    if len(devices) > 1:
        raise InvalidInput(
            f"the parameters of the model are on {', '.join(sorted(map(str, devices)))}; a plan is "
            "for the memory of one device. Move the model to one, or plan its parts"
        )
    own = {t.device.type for t in (*model.parameters(), *model.buffers())} - {"meta"}
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and own and argument.device.type not in own:
            raise InvalidInput(
                f"the sample has a tensor on {argument.device}, the model is on "
                f"{', '.join(sorted(own))}; move the sample there"
            )


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One kind of call of a module, without prices. hooked: names of parameters that have hooks;
    in_parts: the same with the head in parts, where that is asked for and there is one."""

    lowered: Lowered
    hooked: frozenset[str]
    in_parts: CapturedCall | None = None

    @property
    def run(self) -> Capture:
        """What the graph was made of."""
        return self.lowered.run

    def releasable(self, options: Options) -> Releasable | None:
        """What the caller could let go of the result, beside what the options release."""
        return releasable(self.lowered.graph, self.lowered.interface, options.released)

    @property
    def ways(self) -> tuple[CapturedCall, ...]:
        """In which it can be planned."""
        return (self,) if self.in_parts is None else (self, self.in_parts)

    @property
    def waits(self) -> Waits:
        """The gradients that hooks get."""
        values, interface = self.lowered.graph.values, self.lowered.interface
        hooked = {value for name, value in interface.parameters if name in self.hooked}
        return tuple(
            (tuple(values[g].data for g in gradients), values[target].data)
            for target, gradients in interface.gradients
            if gradients and target in hooked
        )


def captured_call(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    incoming: Incoming | Precedent | None = None,
    is_asked: bool = True,
) -> CapturedCall:
    """One kind of call, in the ways of the options. is_asked: a line on the logger says why there
    is none in parts, where the options ask for that."""
    report("capturing the model")
    check_options(options)
    if incoming is None and options.differentiated is not None:
        incoming = dict.fromkeys(options.differentiated)
    forward = original_forward(module)
    # Not a decorator: its frame would be taken for the user's line.
    with PLANNING, paused_collection(), key_value_cache.switched_off(module):
        run = capture(module, args, kwargs, forward, incoming, options.only_loss)
        parameters = module.named_parameters(remove_duplicate=False)
        hooked = frozenset(n for n, p in parameters if has_hooks(p))
        state_bytes = rng_replay.state_bytes(_device(module, run))
        in_parts = None
        if options.tile:
            in_parts = _in_parts(run, state_bytes, hooked, options, is_asked)
        whole = lower(run, state_bytes, replace(options, tile=False))
        return CapturedCall(whole, hooked, in_parts)


def _in_parts(
    run: Capture, state_bytes: int, hooked: frozenset[str], options: Options, is_asked: bool
) -> CapturedCall | None:
    """The call with its head in parts; where that cannot be, a line on the logger says why."""
    try:
        return CapturedCall(lower(run, state_bytes, options), hooked)
    except HeadStaysWhole as reason:
        if is_asked:
            _LOGGER.warning("nothing is tiled: %s", reason)
        return None


def _prepared(
    module: nn.Module, call: SizedCall, options: Options
) -> tuple[CapturedCall, tuple[Problem, ...]]:
    with named_in_refusals(module), outside_of_initialization(), call.named_in_errors():
        source = captured_call(module, call.args, call.kwargs, options)
        return source, _problems(source, options)


def _problems(source: CapturedCall, options: Options) -> tuple[Problem, ...]:
    """Of each way; what several have in common is measured once."""
    problems: tuple[Problem, ...] = ()
    with PLANNING:
        for way in source.ways:
            known = problems[0].profile if problems else None
            problems += (measured(way.lowered, options, way.waits, known),)
    return problems


def _device(module: nn.Module, captured: Capture) -> torch.device:
    kinds = {v.spec.device for v in captured.values if v.spec.device.startswith("cuda")}
    return torch.device(min(kinds)) if kinds else torch.device("cpu")


def program_in_training(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    incoming: Incoming | Precedent | None,
    *,
    make: MakeProgram,
) -> PlannedProgram:
    """What `make` makes for a call of a planned module. Where the forward raises on it, that leaves
    the call as it leaves one of the original, with all that the forward has done before; what
    operators raise is RuntimeError in either case, and ours says more."""
    try:
        with _shown():
            return make(module, args, kwargs, incoming)
    except ForwardRaises as failure:
        error = failure
    forward = original_forward(module)
    is_own = not _is_of_backward(incoming) and not _is_of_operators(error.__cause__)
    if is_own and not runs(module, forward, args, kwargs):
        forward(*args, **kwargs)
    raise error


def _is_of_backward(incoming: Incoming | Precedent | None) -> bool:
    """Is a program made for a backward pass that has begun, after the forward of its call?"""
    return incoming is not None and not isinstance(incoming, Precedent)


def _is_of_operators(error: BaseException | None) -> bool:
    """Is it a RuntimeError that PyTorch raised, and no line of the user's?"""
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
    """Progress on stderr, as the command line shows it."""
    if is_heard() or sys.stderr is None or not sys.stderr.isatty():
        return nullcontext()
    from rockplan.reports.progress_bars import waiting  # what shows it takes a moment to import

    return waiting()


def _best(
    problems: Sequence[Problem],
    budget: Budget,
    options: Options,
    least: Sequence[LeastPeak],
) -> Plan:
    """Of the plans of all problems the fastest within the budget, the first where others are no
    faster; for the smallest budget that which needs least. Raises InfeasibleBudget."""
    size_bytes = budget.within(problems[0].unplanned.peak_bytes)
    # A share is one of what the call needs as the model writes it.
    as_bytes = budget if size_bytes is None else Budget(size_bytes=size_bytes)
    plans: list[Plan] = []
    errors: list[InfeasibleBudget] = []
    for problem, own in zip(problems, least, strict=True):
        asked = budget if problem is problems[0] else as_bytes
        try:
            plans.append(planning.plan_within(problem, asked, options, own))
        except InfeasibleBudget as error:
            errors.append(error)
    if not plans:
        raise min(errors, key=lambda e: e.minimum_bytes)
    if budget.is_minimum:
        best = min(plans, key=lambda p: (p.peak_bytes, p.time_ns))
    else:
        best = min(plans, key=lambda p: p.time_ns)
    if len(problems) > 1 and not best.graph.tiles:
        _LOGGER.info("the head stays whole: no plan with its rows in parts is better")
    return best


def _planned(
    problems: Sequence[Problem], budget: Budget, options: Options, is_backward: bool = False
) -> Plan:
    """The plan within the budget, or what the options say where there is none.

    is_backward: of a call whose forward has run: the original is no choice any more."""
    least = [planning.least_peak_of(problem, options) for problem in problems]
    try:
        return _best(problems, budget, options, least)
    except InfeasibleBudget as failure:
        is_left = options.on_infeasible == "original" and not is_backward
        if options.on_infeasible == "error" or is_left:
            raise
        error = failure
    made = _best(problems, Budget(is_minimum=True), options, least)
    excess_bytes = made.peak_bytes - error.budget_bytes
    if excess_bytes > 0:
        warnings.warn(
            f"no plan fits the budget of {error.budget_bytes} bytes; the smallest that was found "
            f"needs {made.peak_bytes} bytes, {excess_bytes} more "
            f"({excess_bytes / error.budget_bytes:.1%}), and runs all the same "
            f"(Options(on_infeasible='{options.on_infeasible}')). Its peak is at "
            f"{error.operation}",
            stacklevel=2,
        )
    return made


def _program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    incoming: Incoming | Precedent | None,
    *,
    budget: Budget,
    options: Options,
) -> PlannedProgram:
    source = captured_call(module, args, kwargs, options, incoming)
    for way in source.ways:
        known = _known(module, way)
        if (same := _same(known, way)) is not None:
            return built_program(module, same, way, args, kwargs, options)
        if (replayed := _adapted(known, way, budget, options)) is not None:
            program = built_program(module, replayed.plan, way, args, kwargs, options)
            digest = "" if replayed.has_other_sizes else replayed.known.graph_digest
            return replace(program, adapted_from=digest)
    return _new_program(module, source, args, kwargs, budget, options, _is_of_backward(incoming))


def _new_program(
    module: nn.Module,
    source: CapturedCall,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    budget: Budget,
    options: Options,
    is_backward: bool,
) -> PlannedProgram:
    with _advised(module, source, args, kwargs, options):
        made = _planned(_problems(source, options), budget, options, is_backward)
    way = next(w for w in source.ways if w.run.tiles.parts == made.graph.tiles)
    return built_program(module, made, way, args, kwargs, options)


def _known(module: nn.Module, source: CapturedCall) -> tuple[Plan, ...]:
    """The plans of a planned module for calls whose gradients have the same hooks, and whose head
    is whole, or in parts, as this one's."""
    plans = (p.plan for p in programs_of(module) if p.hooked == source.hooked)
    return tuple(p for p in plans if bool(p.graph.tiles) == bool(source.run.tiles.parts))


def _adapted(
    known: Sequence[Plan], source: CapturedCall, budget: Budget, options: Options
) -> Adapted | None:
    with PLANNING:
        return adapted(known, source.lowered, source.waits, budget, options)


def _advise(program: PlannedProgram, options: Options) -> None:
    """Log what the promise is for, where a loss may be made of several leaves of the result; and
    what a plan that runs operations again could have, if the caller let it go."""
    plan = program.plan
    if options.differentiated is None and (starts := _uncertain(program)):
        _LOGGER.info(
            "the peak that is promised is for a backward pass from leaves %s of the result; where "
            "a step starts from others, Options(differentiated=(...)) says so before training",
            starts,
        )
    let_go = releasable(plan.graph, program.interface, options.released)
    if let_go and plan.overhead > 0 and let_go.size_bytes >= WORTH * plan.budget_bytes:
        _LOGGER.warning("%s", let_go.advice(options.released))


def _uncertain(program: PlannedProgram) -> tuple[int, ...]:
    """What backward is taken to start from, where that is a scalar beside other leaves, or where
    others could be meant; none where nothing else could."""
    values, outputs = program.plan.graph.values, program.interface.outputs
    starts = tuple(i for i, leaf in enumerate(outputs) if leaf.tangent is not None)
    own = [(i, leaf) for i, leaf in enumerate(outputs) if leaf.requires_grad and leaf.first == i]
    scalars = [i for i, leaf in own if leaf.value is not None and not values[leaf.value].spec.shape]
    return starts if scalars and len(own) > 1 else ()


@contextlib.contextmanager
def _advised(
    module: nn.Module,
    source: CapturedCall,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Iterator[None]:
    """Where no plan fits, the error says what the caller could let go, and with which options one
    would."""
    try:
        yield
    except InfeasibleBudget as error:
        let_go = source.releasable(options)
        if let_go and let_go.size_bytes < WORTH * error.minimum_bytes:
            let_go = None
        text = f"{error} Or: {let_go.advice(options.released)}." if let_go else str(error)
        if options.on_infeasible == "error":
            least = functools.partial(least_bytes, module, args, kwargs)
            text += remedies(error, options, let_go, least)
        error.args = (text,)
        raise


def least_bytes(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> int | None:
    """Of the smallest plan; None where there is none, or where nothing is cut of what should be."""
    try:
        with outside_of_initialization():
            source = captured_call(module, args, kwargs, options, is_asked=False)
            if options.tile and source.in_parts is None:
                return None
            smallest = Budget(is_minimum=True)
            return _planned(_problems(source, options), smallest, options).budget_bytes
    except RockplanError:
        return None


def _same(known: Sequence[Plan], source: CapturedCall) -> Plan | None:
    """Of plans of the module, that for the same graph: trainers change attributes, and what is in
    configurations, that its forward does not read."""
    graph = source.lowered.graph
    # A digest takes as long as a pass of lowering.
    known = [p for p in known if p.graph.values == graph.values]
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


_COMPILE: dict[str, bool | Literal["near"]] = {"": False, "yes": True, "near": "near"}


def _stored_program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    incoming: Incoming | Precedent | None,
    *,
    plans: tuple[Plan, ...],
    budget: Budget | None,
    options: Options,
) -> PlannedProgram:
    """The program of the plan among `plans` that is for this call; if there is none, of a new
    plan for `budget`, or PlanMismatch without one."""
    # The file says whether kernels are compiled; those of its plans that have none say nothing.
    modes = {p.compiled for p in plans}
    modes = modes - {""} or modes
    if len(modes) == 1:
        options = replace(options, compile=_COMPILE[modes.pop()])
    # Each of its plans says in how many parts the head is.
    for parts in sorted({p.graph.tiles for p in plans}):
        options = replace(options, tile=parts or options.tile)
        source = captured_call(module, args, kwargs, options, incoming)
        for way in source.ways:
            graph = way.lowered.graph
            try:
                made = fit(plans, graph, graph_digest(graph), str(torch.__version__))
            except PlanMismatch as error:
                mismatch = error
                continue
            verify(made.graph, made.schedule)
            waiting = planning.waiting(made, way.waits)
            made = waiting if waiting.peak_bytes <= made.budget_bytes else made
            return built_program(module, made, way, args, kwargs, options)
    if budget is None:
        raise mismatch
    for way in source.ways:
        if (replayed := _adapted(_known(module, way), way, budget, options)) is not None:
            return built_program(module, replayed.plan, way, args, kwargs, options)
    return _new_program(module, source, args, kwargs, budget, options, _is_of_backward(incoming))


def built_program(
    module: nn.Module,
    made: Plan,
    source: CapturedCall,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> PlannedProgram:
    report("writing the code")
    constants = tuple(t for _, t in source.run.constants)
    program = build_program(
        made,
        source.lowered.interface,
        constants,
        source.run.output_spec,
        source.hooked,
        described_call(original_forward(module), args, kwargs),
    )
    if not options.check:
        return program
    dtypes = frozenset(dtype_of(value.spec) for value in source.run.values)
    return _checked(module, program, args, kwargs, dtypes)


def _keep_all(program: PlannedProgram) -> PlannedProgram:
    """The program on the same graph in which every node runs once."""
    graph = as_eager(program.plan.graph)
    plan = replace(program.plan, graph=graph, schedule=keep_all(graph))
    executable = build(graph, program.interface, plan.schedule, f"{plan.graph_digest[:8]} kept")
    return replace(program, plan=plan, executable=executable)


def _checked(
    module: nn.Module,
    program: PlannedProgram,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtypes: frozenset[torch.dtype],
) -> PlannedProgram:
    """`program`, whose plan records what two steps compared with eager execution showed; with its
    own graph where nothing runs again, if its kernels are compiled or its head is in parts, and how
    far that is from eager. dtypes: of what it computes."""
    outputs = program.interface.outputs
    starts = {
        i: program.plan.graph.values[leaf.tangent].spec.stride
        for i, leaf in enumerate(outputs)
        if leaf.tangent is not None
    }
    original = original_forward(module)
    planned = planned_modules.bound_forward(module, program)
    with key_value_cache.switched_off(module):
        if program.plan.compiled or program.plan.graph.tiles:
            kept = planned_modules.bound_forward(module, _keep_all(program))
            difference = check(module, kept, planned, starts, args, kwargs, NOTHING_RUNS_AGAIN)
            share = distance(module, original, planned, starts, args, kwargs, dtypes)
            difference += f"; gradients differ from eager's by {share:.1e} of their norm"
        else:
            difference = check(module, original, planned, starts, args, kwargs)
    return replace(program, plan=replace(program.plan, checked=difference))
