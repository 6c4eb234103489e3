"""The pipeline: a module, a sample and a budget -> a plan -> a planned module."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rockplan import planning
from rockplan.available import in_bytes
from rockplan.budget import Budget, parse_budget
from rockplan.check import check
from rockplan.codegen import module as planned_modules
from rockplan.codegen import random_state
from rockplan.codegen.hooks import has_hooks
from rockplan.collection import paused_collection
from rockplan.curve import Curve
from rockplan.errors import InfeasibleBudget, InvalidInput, PlanMismatch
from rockplan.graph_builder.canonical import graph_digest
from rockplan.graph_builder.capture import WITHOUT_FLAT_PARAMETERS, Capture, capture
from rockplan.graph_builder.lower import Lowered, lower
from rockplan.graph_builder.measure import check_layouts
from rockplan.interface import Incoming
from rockplan.options import DEFAULT_OPTIONS, Options
from rockplan.plan import Plan
from rockplan.plan_file import fit, read_plans
from rockplan.progress import report
from rockplan.schedule import Waits
from rockplan.verify import verify


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
    what it executes. A module that is planned already is planned anew from its original.
    Raises InvalidInput, InvalidBudget, CaptureError (or a subclass), InfeasibleBudget.
    """
    args, kwargs = arguments(model, sample_input, sample_kwargs)
    wanted = in_bytes(parse_budget(budget), model)
    model = planned_modules.unplanned(model)
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
    return planning.plan_within(_prepared(model, args, kwargs, options), wanted, options)


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
    problem = _prepared(model, args, kwargs, options)
    common = planning.common_of(problem, options)
    found: list[Plan | InfeasibleBudget] = []
    for budget in wanted:
        try:
            found.append(planning.plan_within(problem, budget, options, common))
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

    Arguments and errors are those of `solve`, without a budget. Each point is a plan, the one that
    `solve` makes for `budget=point.peak_bytes` where no time limit strikes; with the cache it is
    kept for it. options.time_limit_s holds for each of some 16 plans. Those at which little runs
    again take a second or less, others some seconds each; all of them 22 s for one layer of an
    encoder, 37 to 64 s for the MLP of the examples, on one core.
    """
    args, kwargs = arguments(model, sample_input, sample_kwargs)
    return planning.curve_of(_prepared(model, args, kwargs, options), options)


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
    model = planned_modules.unplanned(model)
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


def arguments(
    model: object, sample_input: object, sample_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
class _Captured:
    """One kind of call of a module, without prices. hooked: names of parameters that have hooks."""

    captured: Capture
    lowered: Lowered
    hooked: frozenset[str]

    @property
    def waits(self) -> Waits:
        """The gradients that hooks get."""
        values, interface = self.lowered.graph.values, self.lowered.interface
        hooked = {value for name, value in interface.parameters if name in self.hooked}
        return tuple(
            (tuple(values[g].data for g in found), values[target].data)
            for target, found in interface.gradients
            if found and target in hooked
        )


def _captured(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    incoming: Incoming | None = None,
) -> _Captured:
    report("capturing the model")
    if not isinstance(options, Options):
        raise InvalidInput(
            f"options is a {type(options).__name__}; pass rockplan.Options(...), whose arguments "
            "are the options"
        )
    if incoming is None and options.differentiated is not None:
        incoming = dict.fromkeys(options.differentiated)
    forward = planned_modules.original_forward(module)
    # Not a decorator: its frame would be taken for the user's line.
    with planned_modules.PLANNING, paused_collection():
        captured = capture(module, args, kwargs, forward, incoming)
        device = _device(module, captured)
        lowered = lower(captured, random_state.state_bytes(device), options.released)
        check_layouts(lowered.graph, lowered.samples)
    parameters = module.named_parameters(remove_duplicate=False)
    return _Captured(captured, lowered, frozenset(n for n, p in parameters if has_hooks(p)))


def _prepared(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> planning.Problem:
    return _problem(_captured(module, args, kwargs, options), options)


def _problem(source: _Captured, options: Options) -> planning.Problem:
    with planned_modules.PLANNING:
        return planning.measured(source.lowered, options, source.waits)


def _device(module: nn.Module, captured: Capture) -> torch.device:
    kinds = {v.spec.device for v in captured.values if v.spec.device.startswith("cuda")}
    return torch.device(min(kinds)) if kinds else torch.device("cpu")


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
    made = planning.plan_within(_problem(source, options), budget, options)
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
        waiting = planning.waiting(made, source.waits)
        made = waiting if waiting.peak_bytes <= made.budget_bytes else made
    except PlanMismatch:
        if budget is None:
            raise
        made = planning.plan_within(_problem(source, options), budget, options)
    return _built(module, made, source, args, kwargs, options)


def _built(
    module: nn.Module,
    made: Plan,
    source: _Captured,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> planned_modules.Program:
    report("writing the code")
    constants = tuple(t for _, t in source.captured.constants)
    program = planned_modules.build_program(
        made, source.lowered.interface, constants, source.captured.output_spec, source.hooked
    )
    return _checked(module, program, args, kwargs) if options.check else program


def _checked(
    module: nn.Module,
    program: planned_modules.Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> planned_modules.Program:
    """`program`, whose plan records what two steps compared with eager execution showed."""
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
