"""The pipeline: a module, a sample and a budget -> a plan -> a planned module."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rockplan.blocks.instead import plan_parts
from rockplan.budget import Budget, parse_budget
from rockplan.errors import (
    CaptureError,
    InfeasibleBudget,
    InvalidInput,
    at_users_line,
)
from rockplan.fitting.optimizer import OptimizerLike
from rockplan.fitting.reserved import with_pool
from rockplan.fitting.training_step import USUAL, TrainingStep
from rockplan.options import DEFAULT_OPTIONS, Options, checked
from rockplan.python_state.autocast import Autocast, autocast_state
from rockplan.runtime import planned_module as planned_modules
from rockplan.runtime.planned_state import PlanSettings, unplanned
from rockplan.runtime.program import MakeProgram, ModuleCall, OnRefused, PlannedProgram
from rockplan.runtime.replanning import say_refused
from rockplan.runtime.switches import outside_of_initialization
from rockplan.search import planning
from rockplan.search.planning import curve_of
from rockplan.solving import captured_calls, programs
from rockplan.solving.agreement import ALONE, Agreement, agreement
from rockplan.solving.free_memory import Room, room_of
from rockplan.solving.loss import NO_LOSS, Loss, MeasuredLoss, beside_loss, measured_loss
from rockplan.solving.parts import named_in_refusals
from rockplan.solving.remedies import Figure, best_options, needed_with
from rockplan.solving.side_by_side import device_of
from rockplan.solving.sizes import SizedCall
from rockplan.store.plan_file import read_plans
from rockplan.values.curve import Curve, useful
from rockplan.values.interface import Interface
from rockplan.values.plan import Plan

_LOGGER = logging.getLogger("rockplan")

LAST_TORCH = (2, 15)
"""The last minor release of PyTorch that tests ran on (benchmarks/results/versions.md)."""


def _say_newer_torch() -> None:
    version = str(torch.__version__)
    if tuple(map(int, version.split(".")[:2])) > LAST_TORCH:
        _LOGGER.warning(
            "torch %s is newer than what tests ran on (%s.%s): Options(check=True) compares a plan "
            "with eager bit for bit",
            *(version, *LAST_TORCH),
        )


_say_newer_torch()


@at_users_line
def solve(
    model: nn.Module,
    sample_input: object = None,
    budget: int | float | str | Budget = "auto",
    *,
    optimizer: OptimizerLike = None,
    step: TrainingStep = USUAL,
    sample_kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> nn.Module:
    """Plan `model` under a budget; return a drop-in module that executes the plan.

    sample_input: one batch, as a tensor, a tuple of positional arguments or a mapping of keyword
    arguments; sample_kwargs: further keyword arguments. Neither is changed, nor is the model.
    Without a sample, the first call in training is planned when it comes, under what is free then
    for 'auto'; until then, and in evaluation, the original runs. What is refused is raised by that
    call, or as Options(on_refused=...) says.
    budget: peak bytes alive during forward and backward beyond parameters, buffers, inputs and the
    parameters' `.grad`: bytes, '2GB', '1.5GiB', '40%' of the unplanned peak, 'min', or 'auto': what
    is free when `solve` is called, less gradients that do not exist yet, the state that the
    optimizer will hold, and a margin (`rockplan.solving.free_memory`); 'auto-4GB' leaves 4 GB
    more free.
    Calls of other shapes are planned under the same bytes; for calls larger than the sample, a
    share is one of their own peak. With options.sizes the largest size is planned first, and a
    share is one of its peak.
    optimizer: for 'auto', also before it has any state: an optimizer, a function that makes one of
    a list of parameters, or a name ('adamw') as for `fit`; other budgets ignore it. With it,
    gradients are counted when they come; step says how the loop trains, such as that gradients add
    up.
    loss: what the caller computes from the result before backward, a scalar: it runs on random
    results, the plan is for gradients as it gives them and leaves it room in the budget, or the
    logger says what it takes above.
    The result shares parameters, buffers and submodules with `model`; `.plan` and `.code` show what
    it executes. A planned module is planned anew from its original.
    Raises InvalidInput, InvalidBudget, CaptureError (or a subclass), InfeasibleBudget.
    """
    if sample_input is None and sample_kwargs is None:
        wanted = AtFirstCall(parse_budget(budget), optimizer, step, options, loss)
        return planned_modules.drop_in(unplanned(model), wanted.settings(model))
    with agreement(checked(options).group, model) as agreed:
        args, kwargs = captured_calls.arguments(model, sample_input, sample_kwargs)
        room = room_of(budget, model, optimizer, step, agreed, options)
        alone = replace(options, group=None)
        try:
            return _solve(unplanned(model), args, kwargs, room, alone, agreed, loss)
        except CaptureError as error:
            if options.on_refused != "blocks":
                raise
            refused = error
    call = ModuleCall(unplanned(model), args, kwargs)
    plan_parts(parse_budget(budget), optimizer, loss, options, call, refused)
    return call.module


def _solve(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    room: Room,
    options: Options,
    agreed: Agreement,
    loss: Loss | None,
) -> nn.Module:
    with named_in_refusals(model), outside_of_initialization():
        first, *others = captured_calls.calls_of(model, args, kwargs, options)
        with first.named_in_errors():
            program, make = _first_program(first.of(model), room, options, agreed, loss)
        planned = _starting_with(program, model, first, make, options, room.budget.share)
        _plan_ahead(planned, others, make)
        return planned


def _first_program(
    call: ModuleCall, room: Room, options: Options, agreed: Agreement, loss: Loss | None = None
) -> tuple[PlannedProgram, functools.partial[PlannedProgram]]:
    options, least = _chosen(call, room, options, agreed, loss)
    given, source = _measured(loss, call, options, agreed)
    program = _program_in(room, call, options, least, agreed, given, source)
    programs.advise(program, options)
    # Without `agreed`: in training one process may meet a new kind of call alone.
    made = functools.partial(_program_in, room, options=options, least=least, given=given)
    return program, made


def _measured(
    loss: Loss | None, call: ModuleCall, options: Options, agreed: Agreement
) -> tuple[MeasuredLoss, captured_calls.CapturedCall | None]:
    """The captured call is None if it has to be captured for this loss."""
    if loss is None:
        return NO_LOSS, None
    source = captured_calls.captured_call(call, replace(options, tile=False))
    own = measured_loss(loss, source, options.differentiated)
    given = max(agreed.gathered("loss", own).values(), key=lambda measured: measured.ratio)
    return given, None if options.tile or not given.is_as_captured(source) else source


@dataclass(eq=False)
class AtFirstCall:
    """Plans the first call of a module that it is called with, and later ones in the same room.
    budget, optimizer, step, loss: as for `solve`."""

    budget: Budget
    optimizer: OptimizerLike
    step: TrainingStep
    options: Options
    loss: Loss | None = None
    make: MakeProgram | None = None

    def settings(
        self, model: nn.Module, on_refused: OnRefused | None = None, is_in_place: bool = False
    ) -> PlanSettings:
        """Return the settings of a module that is planned so. on_refused: None as the options say.
        Raises InvalidInput for a model of which no call can be planned."""
        checked(self.options)
        captured_calls.arguments(model, (), None)
        if self.options.sizes:
            raise InvalidInput("Options(sizes=...) needs a sample, whose sizes vary; pass one")
        own = (self.budget, self.optimizer, self.loss, self.options)
        otherwise = {
            "error": None,
            "leave": say_refused,
            "blocks": functools.partial(plan_parts, *own),
        }
        on_refused = on_refused or otherwise[self.options.on_refused]
        settings = _settings(self, self.options, self.budget.share)
        return replace(settings, on_refused=on_refused, is_in_place=is_in_place)

    def __call__(self, call: ModuleCall) -> PlannedProgram:
        if self.make is not None:
            return self.make(call)
        with agreement(self.options.group, call.module) as agreed:
            room = room_of(
                self.budget, call.module, self.optimizer, self.step, agreed, self.options
            )
            options = replace(self.options, group=None)
            with named_in_refusals(call.module), outside_of_initialization():
                program, self.make = _first_program(call, room, options, agreed, self.loss)
        return program


def _settings(make: MakeProgram, options: Options, share: float | None) -> PlanSettings:
    return PlanSettings(
        functools.partial(programs.program_in_training, make=make),
        options.on_mismatch,
        options.on_infeasible,
        outputs_chosen=options.differentiated is not None,
        share=share,
        host_bytes=options.host_bytes,
        graph=options.graph,
    )


def _starting_with(
    program: PlannedProgram,
    model: nn.Module,
    call: SizedCall,
    make: MakeProgram,
    options: Options,
    share: float | None = None,
) -> nn.Module:
    settings = _settings(make, options, share)
    return planned_modules.planned_module(model, program, call.args, call.kwargs, settings)


def _program_in(
    room: Room,
    call: ModuleCall,
    options: Options,
    least: dict[Autocast, int],
    agreed: Agreement = ALONE,
    given: MeasuredLoss = NO_LOSS,
    source: captured_calls.CapturedCall | None = None,
) -> PlannedProgram:
    """least: autocast state -> bytes of the first budget, which is added: a share never means less.
    source: the call as captured, if it was."""

    call = given.of(call)

    def new(budget: Budget) -> PlannedProgram:
        return programs.new_or_known_program(
            call, budget=budget, options=options, agreed=agreed, source=source
        )

    def make(budget: Budget) -> PlannedProgram:
        return beside_loss(new(budget), _parts_of, given.ratio, new)

    state = autocast_state()
    program = room.filled(make, _parts_of, least.get(state, 0), agreed)
    least.setdefault(state, program.plan.budget_bytes)
    return program


def _parts_of(program: PlannedProgram) -> tuple[Plan, Interface]:
    return program.plan, program.interface


def _plan_ahead(planned: nn.Module, calls: Sequence[SizedCall], make: MakeProgram) -> None:
    for call in calls:
        with call.named_in_errors():
            program = make(call.of(planned))
        planned_modules.add_program(planned, call.args, call.kwargs, program)


@at_users_line
def plan(
    model: nn.Module,
    sample_input: object,
    budget: int | float | str | Budget,
    *,
    optimizer: OptimizerLike = None,
    step: TrainingStep = USUAL,
    sample_kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Plan:
    """Return the plan that `solve` would execute, with the same arguments and errors."""
    with agreement(checked(options).group, model) as agreed:
        args, kwargs = captured_calls.arguments(model, sample_input, sample_kwargs)
        room = room_of(budget, model, optimizer, step, agreed, options)
        options = replace(options, group=None)
        call = captured_calls.calls_of(model, args, kwargs, options)[0]
        with (
            named_in_refusals(model),
            call.named_in_errors(),
            outside_of_initialization(),
        ):
            started = call.of(model)
            options, least = _chosen(started, room, options, agreed, loss)
            return _planned(started, room, options, agreed, loss, least)


def _planned(
    call: ModuleCall,
    room: Room,
    options: Options,
    agreed: Agreement,
    loss: Loss | None,
    least: Mapping[Autocast, int],
) -> Plan:
    """Return the plan of a call; arguments as for `_program_in`."""
    given, known = _measured(loss, call, options, agreed)
    started = given.of(call)
    source = known or captured_calls.captured_call(started, options)
    parts = _interface_of(source)

    def plan_here(wanted: Budget) -> Plan:
        problems = captured_calls.problems_of(source, options)
        with programs.advised(started, source, options):
            return programs.plan_as_asked(problems, wanted, options)

    def new(wanted: Budget) -> Plan:
        return programs.agreed_plan(source, wanted, options, agreed, lambda: plan_here(wanted))

    def make(wanted: Budget) -> Plan:
        return beside_loss(new(wanted), parts, given.ratio, new)

    filled = room.filled(make, parts, least.get(autocast_state(), 0), agreed)
    return with_pool(*parts(filled)) if options.graph else filled


def _chosen(
    call: ModuleCall, room: Room, options: Options, agreed: Agreement, loss: Loss | None
) -> tuple[Options, dict[Autocast, int]]:
    """Return the options with those that options.numerics looks for, and for a share the bytes that
    it means without them, as `_program_in` takes them."""
    least: dict[Autocast, int] = {}
    if options.numerics == "eager":
        return options, least

    def figure_of(own: Options) -> Figure:
        try:
            # Neither the smallest plan nor remedies, where none fits.
            strict = replace(own, on_infeasible="original")
            plan = _planned(call, room, strict, agreed, loss, least)
            found = Figure(plan.budget_bytes if room.budget.is_minimum else 0, plan.time_ns)
            budget_bytes = plan.budget_bytes
        except InfeasibleBudget as error:
            found = Figure(error.minimum_bytes - error.budget_bytes, 0)
            budget_bytes = error.budget_bytes
        if room.budget.share is not None:
            least.setdefault(autocast_state(), budget_bytes)
        return found

    return best_options(options, figure_of, device_of(call.module).type == "cuda"), least


def _interface_of(source: captured_calls.CapturedCall) -> Callable[[Plan], tuple[Plan, Interface]]:
    interfaces = {variant.run.tiles.parts: variant.lowered.interface for variant in source.variants}
    return lambda made: (made, interfaces[made.graph.tiles])


def plan_each(
    model: nn.Module,
    sample_input: object,
    budgets: Sequence[int | float | str | Budget],
    *,
    optimizer: OptimizerLike = None,
    step: TrainingStep = USUAL,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> tuple[Plan | InfeasibleBudget, ...]:
    """Return the plan of each budget, from one preparation of `model`; for a budget that is too
    small the error that `plan` would raise. Arguments and other errors are those of `plan`;
    options.group is InvalidInput."""
    checked(options, "api.plan_each")
    parsed = [parse_budget(budget) for budget in budgets]
    args, kwargs = captured_calls.arguments(model, sample_input, sample_kwargs)
    rooms = [room_of(budget, model, optimizer, step, ALONE, options) for budget in parsed]
    call = captured_calls.calls_of(model, args, kwargs, options)[0]
    source, problems = captured_calls.prepared(model, call, options)
    least = [planning.least_peak_of(problem, options) for problem in problems]
    parts = _interface_of(source)
    solved: list[Plan | InfeasibleBudget] = []
    for room in rooms:

        def make(budget: Budget) -> Plan:
            return programs.plan_as_asked(problems, budget, options, least=least)

        try:
            with call.named_in_errors(), programs.advised(call.of(model), source, options):
                made = room.filled(make, parts)
            solved.append(with_pool(*parts(made)) if options.graph else made)
        except InfeasibleBudget as error:
            solved.append(error)
    return tuple(solved)


@at_users_line
def pareto(
    model: nn.Module,
    sample_input: object,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Curve:
    """Return the predicted time at every useful peak, from one preparation of `model`.

    Arguments and errors are those of `solve`, without a budget; options.group and in_flight are
    InvalidInput. Each point is a plan, the one that `solve` makes for `budget=point.peak_bytes`
    where no time limit strikes; with the cache it is stored there. options.time_limit_s holds for
    each of about 16 plans. Plans with few re-executions take a second or less, others some seconds
    each; all together took 22 s for one layer of an encoder, 37 to 64 s for the MLP of the
    examples, on one core.
    """
    checked(options, "pareto")
    args, kwargs = captured_calls.arguments(model, sample_input, sample_kwargs)
    _, problems = captured_calls.prepared(
        model, captured_calls.calls_of(model, args, kwargs, options)[0], options
    )
    curves = [curve_of(problem, options) for problem in problems]
    return replace(curves[0], points=useful(p for curve in curves for p in curve.points))


@at_users_line
def load(
    model: nn.Module,
    sample_input: object,
    path: str | os.PathLike[str],
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> nn.Module:
    """Return the planned module of a file that `save_plan` wrote, here or on another machine.

    Nothing is measured or solved. The model is captured again, and a plan is used only if its graph
    is the same; its schedule is verified and simulated. Other kinds of call (shapes, dtypes) look
    for their plan in the file too; if it has none, options.on_mismatch decides: 'replan' plans
    within the bytes of the plan for `sample_input`, 'error' raises PlanMismatch. ('original' runs
    the original forward for every call that is not like `sample_input`.) The file holds bytes and
    times of the machine that planned; the result's `.plan` says which. If the plans are for several
    calls in flight, so are later ones.

    Arguments and further errors are those of `solve`. Raises PlanMismatch if no plan is for this
    model and sample, PlanFormatError for a damaged file, InvalidInput if a plan pages more to the
    host than options.host allows, if options.in_flight is neither 1 nor that of the file, and for
    options.group and rerun_collectives.
    """
    checked(options, "load")
    args, kwargs = captured_calls.arguments(model, sample_input, sample_kwargs)
    plans = read_plans(path)
    options = _in_flight_as(plans, options)
    make_program = functools.partial(
        programs.stored_program, plans=plans, budget=None, options=options
    )
    model = unplanned(model)
    with named_in_refusals(model), outside_of_initialization():
        first, *others = captured_calls.calls_of(model, args, kwargs, options)
        with first.named_in_errors():
            program = make_program(first.of(model))
        if options.on_mismatch == "replan":
            budget = Budget(size_bytes=program.plan.budget_bytes)
            make_program = functools.partial(make_program, budget=budget)
        elif options.on_mismatch == "error":  # which `stored_program` raises
            options = replace(options, on_mismatch="replan")
        planned = _starting_with(program, model, first, make_program, options)
        _plan_ahead(planned, others, make_program)
        return planned


def _in_flight_as(plans: Sequence[Plan], options: Options) -> Options:
    """The budget of a plan is that of all its calls in flight. Raises InvalidInput for another
    number."""
    count = max(p.in_flight for p in plans)
    if options.in_flight not in (1, count):
        raise InvalidInput(
            f"the plan is for {count} calls in flight, not for {options.in_flight}; leave "
            f"Options(in_flight={options.in_flight}) out, or plan anew with it by rockplan.solve"
        )
    return replace(options, in_flight=count)


def needed_bytes_with(
    model: object,
    sample_input: object,
    sample_kwargs: Mapping[str, Any] | None,
    options: Options,
    *,
    everything_kept: bool,
) -> dict[str, int]:
    """Return change of the options, as users write it -> bytes that the call needs with it, for
    changes with which it needs less: of the smallest plan, or with everything kept. {} if it cannot
    be planned as it is. Arguments are those of `plan`."""
    checked(options, "explain")
    args, kwargs = captured_calls.arguments(model, sample_input, sample_kwargs, says_cache=False)
    assert isinstance(model, nn.Module)
    model = unplanned(model)
    call = captured_calls.calls_of(model, args, kwargs, options)[0].of(model)
    needs = functools.partial(programs.least_bytes, call, everything_kept=everything_kept)
    with outside_of_initialization():
        source = captured_calls.captured_call(call, options, is_asked=False)
    plain_bytes = needs(options)
    if plain_bytes is None:
        return {}
    return needed_with(options, source.releasable(options), needs, plain_bytes)
