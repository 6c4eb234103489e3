"""The planned module: a drop-in for the original that runs plans.

It is a shallow copy of the original whose class is derived from the original's: parameters,
buffers, submodules, `state_dict` keys and methods are the original's own; only `forward` is
replaced, and `plan`, `plans` and `code` are added unless the original has such attributes. Before
each call cheap guards compare everything the plan was captured under; if something differs, another
program is used or planned, or the call is refused.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from rockplan.codegen.executable import Executable, Pattern
from rockplan.errors import BackwardError, at_users_line
from rockplan.python_state import trees
from rockplan.python_state.autocast import autocast_state
from rockplan.python_state.distributed import is_awaited, with_collectives_done
from rockplan.python_state.surroundings import Surroundings
from rockplan.runtime import call_checks
from rockplan.runtime.bound_program import BoundProgram, matching, run
from rockplan.runtime.guards import call_key, opened_key
from rockplan.runtime.planned_state import (
    PLANNING,
    HasPlans,
    PlannedState,
    PlanSettings,
    bind_now,
    original_forward,
)
from rockplan.runtime.program import PlannedProgram
from rockplan.runtime.replanning import Called, Situation, bound_program
from rockplan.runtime.switches import function_modes, without_default_device
from rockplan.values.classes import once_for_each_class
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.literals import picklable

# Registries of hooks that the drop-in copies, so that its hooks are its own.
_OWN_REGISTRIES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


NOTHING: frozenset[int] = frozenset()

# Attributes of a planned module that are read from its `PlannedState`.
_OF_STATE = ("plan", "plans", "code")


class Planned(HasPlans):
    """Mixed in before the original's class; see the module's docstring."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that is not found otherwise: of nn.Module's registries, or `plan`,
        `plans` and `code` of the state if the original has no such name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in _OF_STATE:
                raise
            return getattr(self._rockplan, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_OF_STATE})

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the original's attributes and the programs that hold in this state, without those
        that work in this process alone."""
        state = self._rockplan
        attributes = {
            k: v for k, v in _without_compiled_call(self.__dict__).items() if k != "_rockplan"
        }
        kept = [(picklable(k), p) for k, p in state.holding if not p.is_of_this_process]
        *made_of, latest = state.of_copies
        if latest is not None and latest.is_of_this_process:
            latest = None
        return _rebuild, (attributes, kept, *made_of, latest)

    def __copy__(self) -> Any:
        """Copy as any module is copied: over the same parameters, buffers, submodules and hooks.
        The copy starts with the plans that hold in this state; later ones are its own."""
        state = self._rockplan
        copy_of_users: Callable[[], Any] | None = getattr(super(), "__copy__", None)
        if copy_of_users is not None:
            copied = copy_of_users()
        else:
            copied = object.__new__(type(self))
            copied.__dict__.update(_without_compiled_call(self.__dict__))
        if isinstance(copied, Planned):
            _begin(copied, state.holding, PlannedState(*state.of_copies))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy parameters, buffers, submodules and plans, which are for the copy's own tensors."""
        copied: Any = object.__new__(type(self))
        memo[id(self)] = copied
        # keys are values, and need no copy
        memo |= {id(key): key for key in (*self._rockplan.programs, *self._rockplan.infeasible)}
        copied.__dict__.update(copy.deepcopy(_without_compiled_call(self.__dict__), memo))
        copied._rockplan.watch.begin(copied)
        _surround(copied, self)
        return copied

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call by its plan, which is made now if there is none for such a call. Run the
        original forward without gradients, while tracing, or where no plan is to be made. Raises
        StalePlan where a planned module cannot run."""
        state = self._rockplan
        if not torch.is_grad_enabled():
            return original_forward(self)(*args, **kwargs)
        state.watch.end()
        if state.is_off or torch._C._is_tracing():
            return original_forward(self)(*args, **kwargs)
        call_checks.refuse_transforms()
        call_checks.warn_of_saved_tensor_hooks()
        if (
            state.settings.is_in_place
            and call_checks.CHECKPOINT not in state.warned
            and call_checks.under_checkpoint()
        ):
            state.warned.add(call_checks.CHECKPOINT)
            call_checks.warn_of_checkpoint(self)
        if (
            not state.has_run
            and call_checks.COMPILED not in state.warned
            and call_checks.is_compiled(self)
        ):
            state.warned.add(call_checks.COMPILED)
            call_checks.warn_of_compiled(self)
        call_checks.warn_of_dispatch_modes()
        call = _called(state, args, kwargs)
        bound = _bound(self, call)
        if bound is None:
            return original_forward(self)(*args, **kwargs)
        state.latest, state.has_run = bound.program, True
        situation = Situation(self, call, bound, autocast_state(), function_modes())
        pool = state.pool if state.settings.graph else None
        result = run(bound, (call.args, call.kwargs), call.leaves, situation.replan, pool)
        call.let_go_of_inputs(bound)
        return result


def _called(state: PlannedState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
    leaves, input_spec = trees.tree_flatten((args, kwargs))
    if any(map(is_awaited, leaves)):
        args, kwargs = with_collectives_done((args, kwargs))
        leaves = trees.tree_leaves((args, kwargs))
    unread = state.unread.get(input_spec, NOTHING)
    return Called((input_spec, call_key((args, kwargs), leaves, unread)), args, kwargs, leaves)


def _bound(planned: HasPlans, call: Called) -> BoundProgram | None:
    """None to run the original."""
    state, leaves = planned._rockplan, call.leaves
    with without_default_device():
        bound = state.known_at(call.key, leaves)
        bound = bound or matching(state.programs.get(call.key, ()), leaves)
    if bound is None:
        with PLANNING, paused_collection():
            bound = state.choose(call.key, leaves) if state.chosen else None
            bound = bound or bound_program(planned, call)
    return bound


def _surround(copied: Any, planned: Planned) -> None:
    surroundings = Surroundings.of(copied, original_forward(copied))
    for key, bounds in planned._rockplan.programs.items():
        own = copied._rockplan.programs[key]
        for position, bound in enumerate(bounds):
            if bound.signature.surroundings.changed() is None:
                signature = replace(own[position].signature, surroundings=surroundings)
                own[position] = replace(own[position], signature=signature)


def bound_forward(module: nn.Module, program: PlannedProgram) -> Callable[..., Any]:
    """Return a function like the forward that runs `program` on the tensors that `module` has now,
    without checks. It raises BackwardError for incoming gradients that are not as planned."""
    bound = bind_now(module, program)

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = (args, kwargs)
        return run(bound, call, trees.tree_leaves(call), no_other_plan)

    def no_other_plan(pattern: Pattern, residents: object) -> Executable:
        raise BackwardError(f"the incoming gradients are not as planned: {pattern}")

    return forward


def planned_module(
    module: nn.Module,
    program: PlannedProgram,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: PlanSettings,
) -> nn.Module:
    """Return the drop-in for `module`, which starts with `program` for calls like (args, kwargs).
    settings: how further kinds of call are planned."""
    planned = drop_in(module, settings)
    _start(planned, planned._rockplan, kind_of_call(args, kwargs), program)
    return planned


def drop_in(module: nn.Module, settings: PlanSettings) -> HasPlans:
    """Return the drop-in for `module` without a plan: the first call in training is planned. It
    warns if an optimizer steps twice before that call (`Watch`)."""
    attributes = _without_compiled_call(module.__dict__)
    for name in _OWN_REGISTRIES:
        if attributes.get(name) is not None:
            attributes[name] = attributes[name].copy()
    state = PlannedState(type(module), attributes.pop("forward", None), settings)
    planned: Any = nn.Module.__new__(_planned_class(type(module)))
    planned.__dict__.update(attributes, _rockplan=state)
    state.watch.begin(planned)
    return cast("HasPlans", planned)


def kind_of_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], unread: frozenset[int] = NOTHING
) -> Any:
    """Return the key by which programs for this call are found, with PyTorch's switches as they are
    now. unread: as for `call_key`."""
    leaves, input_spec = trees.tree_flatten((args, kwargs))
    return input_spec, call_key((args, kwargs), leaves, unread)


def add_program(
    planned: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], program: PlannedProgram
) -> None:
    """Add a program to a planned module, for calls like (args, kwargs), before any call."""
    assert isinstance(planned, HasPlans)
    key = kind_of_call(args, kwargs)
    key = key if program.open is None else opened_key(key)
    planned._rockplan.programs.setdefault(key, []).append(bind_now(planned, program))


def plan_in_place(
    module: nn.Module, program: PlannedProgram, kind: Any, settings: PlanSettings, warned: set[str]
) -> None:
    """Make `module` itself a planned one, which starts with `program` for calls of `kind`
    (`kind_of_call`): code that holds the module runs the plan. Its hooks run as before. warned:
    keys of warnings given, a set that the blocks of a model share."""
    state = become_planned(module, replace(settings, is_in_place=True))
    state.warned = warned
    _start(module, state, kind, program)


def become_planned(module: nn.Module, settings: PlanSettings) -> PlannedState:
    """Make `module` itself a planned one without a plan: the first call in training is planned."""
    if isinstance(module, HasPlans):  # `take_out` had to leave its class
        before = module._rockplan
        state = PlannedState(before.original, before.instance_forward, settings)
    else:
        state = PlannedState(type(module), module.__dict__.pop("forward", None), settings)
        module.__class__ = _planned_class(type(module))
    module.__dict__["_rockplan"] = state
    state.watch.begin(module)
    return state


def take_out(module: nn.Module) -> None:
    """Undo `plan_in_place`: the module gets its class and forward back. If another class was
    derived from the module's since (`fully_shard`), or its forward was wrapped, the class stays and
    runs the original forward."""
    assert isinstance(module, HasPlans)
    state = module._rockplan
    state.watch.end()
    is_own_class = type(module) is _planned_class(state.original)
    if is_own_class and "forward" not in module.__dict__:
        del module.__dict__["_rockplan"]
        module.__class__ = state.original  # type: ignore[assignment]
        if state.instance_forward is not None:
            module.__dict__["forward"] = state.instance_forward
    else:
        state.is_off = True
        state.programs.clear()


def _start(planned: nn.Module, state: PlannedState, kind: Any, program: PlannedProgram) -> None:
    state.programs[kind] = [bind_now(planned, program)]
    state.latest = program


def _without_compiled_call(attributes: dict[str, Any]) -> dict[str, Any]:
    """Without the one that `module.compile()` leaves: it calls that module, and a copy would run it
    in place of itself. (PyTorch's copies leave it out, too.)"""
    return {k: v for k, v in attributes.items() if k != "_compiled_call_impl"}


def _rebuild(
    attributes: dict[str, Any], programs: Sequence[tuple[Any, PlannedProgram]], *state: Any
) -> nn.Module:
    own = PlannedState(*state)
    planned = nn.Module.__new__(_planned_class(own.original))
    planned.__dict__.update(attributes)
    _begin(planned, programs, own)
    return planned


def _begin(
    copied: Any, programs: Sequence[tuple[Any, PlannedProgram]], state: PlannedState
) -> None:
    copied.__dict__["_rockplan"] = state
    for key, program in programs:
        state.programs.setdefault(key, []).append(bind_now(copied, program))
    state.watch.begin(copied)


@once_for_each_class
def _planned_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return a class with the original's name, derived from it, with a planned forward.

    Its forward has the signature of the original's, by which trainers decide what to pass, but not
    `__wrapped__`: accelerate unwraps a forward as far as it can and calls what it finds. Calling
    the class (the slice of a Sequential, `type(self)(...)` in a method) returns an instance of the
    original's class, since a new module is a drop-in for nothing. Setting an attribute of the class
    (`type(self).count = 1`) sets it for all modules of the original's class.
    """

    @at_users_line
    def forward(self: Planned, *args: Any, **kwargs: Any) -> Any:
        return Planned.forward(self, *args, **kwargs)

    @functools.wraps(original.__init__)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_rockplan" not in self.__dict__:
            self.__class__ = original
        original.__init__(self, *args, **kwargs)

    functools.update_wrapper(forward, original.forward)
    forward.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
    del forward.__wrapped__  # type: ignore[attr-defined]
    forward.__kwdefaults__ = getattr(original.forward, "__kwdefaults__", None)
    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__init__": initialize,
        "forward": forward,
    }
    made: list[type] = []

    def is_for_all_modules(kind: type, name: str) -> bool:
        return kind in made and not (name.startswith("__") and name.endswith("__"))

    class PlannedType(type(original)):  # type: ignore[misc]
        def __setattr__(cls, name: str, value: object) -> None:
            if is_for_all_modules(cls, name):
                setattr(original, name, value)
            else:
                super().__setattr__(name, value)

        def __delattr__(cls, name: str) -> None:
            if is_for_all_modules(cls, name):
                delattr(original, name)
            else:
                super().__delattr__(name)

    made.append(PlannedType(original.__name__, (Planned, original), body))
    return made[0]
