"""The planned module: a drop-in that runs plans where they hold.

It is a shallow copy of the original whose class is derived from the original's: parameters,
buffers, submodules, `state_dict` keys and methods are the original's own; only `forward` is
replaced, and `plan`, `plans` and `code` are added where the original has no such attributes.
Before each call cheap guards compare everything the plan was captured under; where they do not
hold, another program is used, planned, or refused.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import operator
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import nn

from rockplan.codegen.executable import Executable, Pattern
from rockplan.errors import BackwardError, InfeasibleBudget, InvalidInput, StalePlan
from rockplan.python_state import trees
from rockplan.python_state.snapshot import Surroundings
from rockplan.runtime import assignments, parametrizations
from rockplan.runtime.bound_program import (
    BoundProgram,
    bind,
    known_signature,
    matching,
    rebind,
    run,
)
from rockplan.runtime.call_checks import (
    TOO_OFTEN,
    ordinal,
    refuse_capture,
    refuse_transforms,
    under_checkpoint,
    warn_of_changes,
    warn_of_checkpoint,
    warn_of_dispatch_modes,
    warn_of_mismatch,
    warn_of_original,
    warn_of_saved_tensor_hooks,
)
from rockplan.runtime.differences import Difference, Differences, described_call
from rockplan.runtime.guards import (
    Autocast,
    ModuleSignature,
    autocast_state,
    call_key,
    function_modes,
    module_signature,
    signature_holds,
    under_autocast,
    under_default_device,
    with_tensors_of,
    without_default_device,
)
from rockplan.runtime.program import MakeProgram, PlannedProgram
from rockplan.runtime.watch import Watch
from rockplan.values.classes import once_for_each_class
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.interface import Assignment, Incoming, Precedent
from rockplan.values.literals import picklable
from rockplan.values.plan import Plan

# Planning exchanges tensors of the module and functions of libraries, and moves random generators,
# before it puts them back: one thread at a time.
PLANNING = threading.RLock()

LOG = logging.getLogger("rockplan")

# Registries of the root module that the drop-in has for itself.
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


@dataclass(slots=True)
class _PlannedState:
    """What a planned module carries besides the original's attributes.

    infeasible: calls for which no plan fits the budget, as the module was, and which therefore run
    the original (`on_infeasible`). count: of plans made, for it or the one that it is a copy of.
    precedent: where backward passes start if not where it was thought that they do.
    is_in_place: it is the original itself (`plan_in_place`); is_off: all calls run the original
    forward (`take_out`).
    """

    original: type[nn.Module]
    instance_forward: Callable[..., Any] | None
    make_program: MakeProgram
    on_mismatch: str
    on_infeasible: str
    outputs_chosen: bool
    is_in_place: bool = False
    programs: dict[Any, list[BoundProgram]] = field(default_factory=dict)
    latest: PlannedProgram | None = None
    infeasible: dict[Any, list[ModuleSignature]] = field(default_factory=dict)
    count: int = 1
    precedent: Precedent | None = None
    watch: Watch = field(default_factory=Watch)
    has_run: bool = False
    assigned: list[Assignment] = field(default_factory=list)
    is_off: bool = False
    is_checkpoint_said: bool = False
    is_original_said: bool = False

    def leave(self, module: nn.Module, key: Any, bound: BoundProgram) -> None:
        """Put what a call leaves in Python where it belongs; the plan is for calls that find it
        there, too."""
        left = bound.program.interface.assignments
        if not left:
            return
        self.assigned += [one for one in left if not any(one is known for known in self.assigned)]
        assignments.put(module, left)
        is_settled = all(one.is_overwritten for one in left)
        if not is_settled and not any(
            other.program is bound.program and signature_holds(other.signature)
            for other in self.programs.get(key, ())
        ):
            self.programs.setdefault(key, []).append(_bind(module, bound.program))

    def add(self, key: Any, bound: BoundProgram) -> None:
        """For calls like `key`. What was planned for the sample alone goes if nothing was called
        like it, and this is its plan, adapted to what is called."""
        if not self.has_run and bound.program.adapted_from and len(self.programs) == 1:
            self.programs.clear()
        self.programs.setdefault(key, []).append(bound)

    @property
    def plan(self) -> Plan:
        """The plan that ran last; before the first call, the one that `solve` made."""
        assert self.latest is not None
        return self.latest.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all kinds of call that the module has seen, in that order."""
        bounds = (bound for kind in self.programs.values() for bound in kind)
        return tuple({b.program.plan.graph_digest: b.program.plan for b in bounds}.values())

    @property
    def code(self) -> str:
        """The generated Python of `plan`."""
        assert self.latest is not None
        return self.latest.executable.code.source


# Attributes of a planned module that its state answers.
_OF_STATE = ("plan", "plans", "code")


class Planned:
    """Mixed in before the original's class; see the module's docstring."""

    _rockplan: _PlannedState

    def __getattr__(self, name: str) -> Any:
        """What the original has comes first: `plan`, `plans` and `code` are those of the state
        only where neither the original's class nor the module has such a name."""
        try:
            attribute = super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name not in _OF_STATE:
                raise
            return getattr(self._rockplan, name)
        if isinstance(attribute, nn.Module | nn.Parameter) and not torch.compiler.is_compiling():
            self._rockplan.watch.used(name, attribute)
        return attribute

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_OF_STATE})

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For pickle: the original's attributes and the programs that hold in this state."""
        state = self._rockplan
        attributes = {k: v for k, v in _uncompiled(self.__dict__).items() if k != "_rockplan"}
        programs = [
            (picklable(key), bound.program)
            for key, bounds in state.programs.items()
            for bound in bounds
            if signature_holds(bound.signature) and not bound.program.is_of_this_process
        ]
        settings, latest = _settings(state), state.latest
        if latest is not None and latest.is_of_this_process:
            latest = None
        return _rebuild, (state.original, attributes, settings, programs, latest, state.count)

    def __copy__(self) -> Any:
        """As of any module: one of its own over the same parameters, buffers, submodules and hooks.
        It starts with the plans that hold in this state, and further ones are its own."""
        state = self._rockplan
        copy_of_users: Callable[[], Any] | None = getattr(super(), "__copy__", None)
        if copy_of_users is not None:
            copied = copy_of_users()
        else:
            copied = object.__new__(type(self))
            copied.__dict__.update(_uncompiled(self.__dict__))
        if isinstance(copied, Planned):
            programs = [
                (key, bound.program)
                for key, bounds in state.programs.items()
                for bound in bounds
                if signature_holds(bound.signature)
            ]
            own = _PlannedState(
                state.original, *_settings(state), latest=state.latest, count=state.count
            )
            _begin(copied, own, programs)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = object.__new__(type(self))
        memo[id(self)] = copied
        # values, which stay as they are
        memo |= {id(key): key for key in (*self._rockplan.programs, *self._rockplan.infeasible)}
        copied.__dict__.update(copy.deepcopy(_uncompiled(self.__dict__), memo))
        copied._rockplan.watch.begin(copied)
        _surround(copied, self)
        return copied

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._rockplan
        assert isinstance(self, nn.Module)
        if state.is_off or not torch.is_grad_enabled() or torch._C._is_tracing():
            return _run_original(self, args, kwargs)
        refuse_transforms()
        warn_of_saved_tensor_hooks()
        if state.is_in_place and not state.is_checkpoint_said and under_checkpoint():
            state.is_checkpoint_said = True
            warn_of_checkpoint(self)
        warn_of_dispatch_modes()
        assignments.take_back(self, state.assigned)
        leaves, input_spec = trees.tree_flatten((args, kwargs))
        key = (input_spec, call_key((args, kwargs), leaves))
        with without_default_device():
            bound = matching(state.programs.get(key, ()), leaves)
        if bound is None:
            with PLANNING, paused_collection():
                bound = self._bound_program(key, leaves, args, kwargs)
        if bound is None:
            return _run_original(self, args, kwargs)
        parametrizations.claim(self)
        state.latest, state.has_run = bound.program, True
        state.watch.called()
        state_of_torch = (autocast_state(), function_modes(), parametrizations.are_cached())
        call = (args, kwargs)
        if bound.program.changes_given:
            args, kwargs = trees.tree_unflatten(leaves, input_spec)
        situation = _Situation(self, key, bound, args, kwargs, leaves, *state_of_torch)
        result = run(bound, call, leaves, situation.replan)
        state.leave(self, key, bound)
        return result

    def _bound_program(
        self, key: Any, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BoundProgram | None:
        """The program for a call that none seemed to match; None: run the original forward.

        It looks again, because another thread may have planned meanwhile, or have had the
        module's tensors exchanged while it planned.
        """
        state = self._rockplan
        assert isinstance(self, nn.Module)
        bound = matching(state.programs.get(key, ()), leaves)
        if bound is None:
            rebind(self, original_forward(self), state.programs)
            bound = matching(state.programs.get(key, ()), leaves)
        if bound is None:
            if not (self.training and _has_gradients(self, leaves)):
                return None
            if state.on_mismatch == "original" and state.is_original_said:
                return None
            if state.on_mismatch == "original":
                state.is_original_said = True
                warn_of_mismatch(_changes(self, key, leaves, args, kwargs))
                return None
            refuse_capture(self, leaves)
            if any(map(signature_holds, state.infeasible.get(key, ()))):
                return None
            changes = _changes(self, key, leaves, args, kwargs)
            if state.on_mismatch == "error":
                raise StalePlan(
                    f"this call does not match what was planned: {changes}. Plan again with this "
                    "sample, or pass Options(on_mismatch='replan')"
                )
            if changes.has_values and len(state.programs.get(key, ())) >= TOO_OFTEN:
                warn_of_changes(len(state.programs[key]), changes)
            bound = self._new_bound(key, changes, args, kwargs)
        return bound

    def _new_bound(
        self, key: Any, changes: Differences, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BoundProgram | None:
        """Plan for a call like this one; None where nothing fits and the original shall run."""
        state = self._rockplan
        assert isinstance(self, nn.Module)
        try:
            program = _made(self, args, kwargs, state.precedent, changes)
        except InfeasibleBudget as error:
            if state.on_infeasible != "original":
                error.add_note(
                    f"rockplan: this call was planned since it is of a new kind: {changes}. "
                    "Options(on_infeasible='smallest') takes the smallest plan for such calls, "
                    "'original' the original forward"
                )
                raise
            warn_of_original(error, changes)
            state.infeasible.setdefault(key, []).append(
                module_signature(self, original_forward(self), ())
            )
            return None
        known = (b for bounds in state.programs.values() for b in bounds)
        signature = known_signature(known, program)
        bound = bind(self, original_forward(self), program, signature)
        state.add(key, bound)
        state.watch.begin(self)
        return bound


_OTHER_OUTPUTS = Differences(
    (
        Difference(
            "the backward pass starts from other outputs, or has gradients in other strides",
            "Options(differentiated=...) names the outputs from the start",
        ),
    )
)


def _made(
    planned: Planned,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    incoming: Incoming | Precedent | None,
    changes: Differences,
) -> PlannedProgram:
    """A program for one more kind of call, which takes time that the training waits for: that is
    said, with what would keep it from happening again."""
    state = planned._rockplan
    assert isinstance(planned, nn.Module)
    started = time.monotonic()
    with state.watch.aside():
        program = state.make_program(planned, args, kwargs, incoming)
    state.count += 1
    advice = changes.advice or "Each such kind is planned for once"
    if state.count == _EVER_NEW:
        advice = _FOR_EVER_NEW
    # A block is one of many, whose first calls of another kind come at the same step.
    is_early = state.is_in_place and state.count < _SAID_OF_BLOCKS
    LOG.log(
        logging.INFO if is_early or state.count > _EVER_NEW else logging.WARNING,
        "planned %s for another kind of step, the %s: %s. It took %.1f s. %s",
        state.original.__qualname__,
        ordinal(state.count),
        changes,
        time.monotonic() - started,
        advice,
    )
    return program


_SAID_OF_BLOCKS = 3

_EVER_NEW = 8
"""The last plan that is said of: a trainer calls in another way than the sample says, the last
batch is smaller, there are a few lengths; more than that may go on for ever."""

_FOR_EVER_NEW = (
    "Further ones are logged at level INFO alone. If batches have ever new sizes (lengths, nodes "
    "and edges of graphs): pad them to a few sizes; Options(sizes=...) plans the largest before "
    "training, and others replay its plan; Options(on_mismatch='original') runs what is not "
    "planned for as it is"
)


def _changes(
    planned: Planned,
    key: Any,
    leaves: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Differences:
    """What of a call, or of the module, is not as in the most similar of the latest kinds of call
    that are planned for."""
    state = planned._rockplan
    assert isinstance(planned, nn.Module)
    now = described_call(original_forward(planned), args, kwargs)
    alike = state.programs.get(key) or [b for bounds in state.programs.values() for b in bounds]
    differences = [bound.differences(now, leaves) for bound in reversed(alike[-_COMPARED:])]
    return Differences(min(filter(None, differences), key=len, default=(Difference(_UNNAMED),)))


_COMPARED = 4
"""Of a hundred lengths all differ alike, and to compare a module takes half a millisecond."""

_UNNAMED = (
    "what is in an argument that is no tensor, whether arguments come by position or by name, or "
    "which parameters and buffers are one or of which class"
)


@dataclass(frozen=True, slots=True)
class _Situation:
    """What a call was made under, to plan it again from its backward pass.

    leaves: of the arguments, whose lists may have grown since; modes: as `function_modes` says;
    cached: in a block of `torch.nn.utils.parametrize.cached()`.
    """

    planned: Planned
    key: Any
    bound: BoundProgram
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    autocast: Autocast
    modes: tuple[torch.device | int, ...]
    cached: bool

    def replan(self, pattern: Pattern) -> Executable:
        """The plan for incoming gradients of `pattern`; later calls like this one start with it,
        unless the outputs to differentiate were chosen by the user.

        It is planned with the parameters and buffers that the call had, which eager's graph keeps:
        `functional_call` has put the module's own back when backward begins."""
        module: Any = self.planned
        left = assignments.taken_back(module, module._rockplan.assigned)
        with PLANNING, paused_collection(), with_tensors_of(self.bound.signature), left:
            return self._replan(pattern)

    def _replan(self, pattern: Pattern) -> Executable:
        module, state = self.planned, self.planned._rockplan
        assert isinstance(module, nn.Module)
        # What the call itself has left in Python is no change.
        same = (b for b in state.programs[self.key] if b.program is self.bound.program)
        if not any(signature_holds(b.signature) for b in (self.bound, *same)):
            raise BackwardError(
                "the module was changed between forward and backward, and this backward pass "
                "needs another plan; change modules before the forward"
            )
        rebind(module, original_forward(module), {self.key: state.programs[self.key]})
        bounds = state.programs[self.key]
        known = [b for b in bounds if b.program.executable.pattern == pattern]
        other = matching(known, self.leaves)
        if other is None:
            other = _bind(module, self._program(pattern))
        else:
            bounds.remove(other)
        if self._is_preferred(pattern):
            bounds.append(other)
            incoming, before = other.program.incoming, state.precedent
            is_repeated = before is not None and before.incoming.keys() == incoming.keys()
            state.precedent = Precedent(incoming, is_repeated)
        else:
            bounds.insert(0, other)
        return other.program.executable

    def _program(self, pattern: Pattern) -> PlannedProgram:
        module, state = self.planned, self.planned._rockplan
        assert isinstance(module, nn.Module)
        if state.on_mismatch == "error":
            raise BackwardError(
                "the incoming gradients are of other outputs, or have other strides, than "
                "planned; pass Options(differentiated=...) for the outputs that backward starts "
                "from, or Options(on_mismatch='replan')"
            )
        results = self.bound.program.interface.results
        incoming = {i: s for i, s in zip(results, pattern, strict=True) if s is not None}
        with (
            under_autocast(self.autocast),
            under_default_device(self.modes),
            parametrizations.cached_as(self.cached),
        ):
            return _made(module, *self._call(), incoming, _OTHER_OUTPUTS)

    def _call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they were."""
        now, spec = trees.tree_flatten((self.args, self.kwargs))
        is_same = spec == self.key[0] and len(now) == len(self.leaves)
        if is_same and all(map(operator.is_, now, self.leaves)):
            return self.args, self.kwargs
        called: tuple[tuple[Any, ...], dict[str, Any]] = trees.tree_unflatten(
            self.leaves, self.key[0]
        )
        return called

    def _is_preferred(self, pattern: Pattern) -> bool:
        planned = self.bound.program.executable.pattern
        chosen = [s is None for s in planned] == [s is None for s in pattern]
        return chosen or not self.planned._rockplan.outputs_chosen


def plan_of(planned: object) -> Plan:
    """`planned.plan`, also where the original has an attribute of that name.

    Raises InvalidInput for what `solve` and `load` did not return."""
    return _state_of(planned).plan


def code_of(planned: object) -> str:
    """`planned.code`, as `plan_of`."""
    return _state_of(planned).code


def programs_of(module: nn.Module) -> tuple[PlannedProgram, ...]:
    """Of a planned module, those of all kinds of call that it has seen."""
    if not isinstance(module, Planned):
        return ()
    return tuple(b.program for kind in module._rockplan.programs.values() for b in kind)


def _state_of(planned: object) -> _PlannedState:
    if not isinstance(planned, Planned):
        raise InvalidInput(
            f"a {type(planned).__name__} has no plan; pass what rockplan.solve or rockplan.load "
            "returned"
        )
    return planned._rockplan


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of `module`; of a planned one, its original's."""
    return module._rockplan.original if isinstance(module, Planned) else type(module)


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """The unplanned forward of `module`, planned or not."""
    if not isinstance(module, Planned):
        return module.forward
    state = module._rockplan
    if state.instance_forward is not None:
        return state.instance_forward
    return functools.partial(state.original.forward, module)


def unplanned(module: nn.Module) -> nn.Module:
    """`module`; of a planned one, its original with the attributes and hooks that it has now.

    Raises InvalidInput where somebody gave the planned module another forward, which the original
    would not have.
    """
    if not isinstance(module, Planned):
        return module
    attributes = {k: v for k, v in module.__dict__.items() if k != "_rockplan"}
    if "forward" in attributes:
        raise InvalidInput(
            "the forward of this planned module was replaced (a trainer wraps it, for instance); "
            "plan the original module again, then wrap the planned one"
        )
    state = module._rockplan
    original: nn.Module = nn.Module.__new__(state.original)
    original.__dict__.update(attributes)
    if state.instance_forward is not None:
        original.__dict__["forward"] = state.instance_forward
    return original


def _surround(copied: Any, planned: Planned) -> None:
    """The plans of a copy are for what is beside it now, if those of `planned` are."""
    assert isinstance(planned, nn.Module)
    surroundings = Surroundings.of(copied, original_forward(copied))
    for key, bounds in planned._rockplan.programs.items():
        own = copied._rockplan.programs[key]
        for position, bound in enumerate(bounds):
            if bound.signature.surroundings.changed() is None:
                signature = replace(own[position].signature, surroundings=surroundings)
                own[position] = replace(own[position], signature=signature)


def _run_original(planned: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with planned._rockplan.watch.original_runs():
        return original_forward(planned)(*args, **kwargs)


def _bind(module: nn.Module, program: PlannedProgram) -> BoundProgram:
    return bind(module, original_forward(module), program)


def bound_forward(module: nn.Module, program: PlannedProgram) -> Callable[..., Any]:
    """A function that runs `program` on the tensors that `module` has now."""
    bound = _bind(module, program)

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = (args, kwargs)
        result = run(bound, call, trees.tree_leaves(call), _no_other_plan)
        assignments.put(module, program.interface.assignments)
        return result

    return forward


def _has_gradients(module: nn.Module, leaves: Sequence[Any]) -> bool:
    """Does anything require a gradient? (Of a GAN one half does not while the other trains.)"""
    arguments = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return any(t.requires_grad for t in itertools.chain(module.parameters(), arguments))


def _no_other_plan(pattern: Pattern) -> Executable:
    raise BackwardError(f"the incoming gradients are not as planned: {pattern}")


def planned_module(
    module: nn.Module,
    program: PlannedProgram,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    make_program: MakeProgram,
    on_mismatch: str,
    on_infeasible: str,
    outputs_chosen: bool,
) -> nn.Module:
    """The drop-in for `module`, which starts with `program` for calls like (args, kwargs).

    outputs_chosen: the user said which outputs backward starts from.
    """
    attributes = _uncompiled(module.__dict__)
    for name in _OWN_REGISTRIES:
        if attributes.get(name) is not None:
            attributes[name] = attributes[name].copy()
    settings = (make_program, on_mismatch, on_infeasible, outputs_chosen)
    state = _PlannedState(type(module), attributes.pop("forward", None), *settings)
    planned = nn.Module.__new__(_planned_class(type(module)))
    planned.__dict__.update(attributes, _rockplan=state)
    _start(planned, state, kind_of_call(args, kwargs), program)
    return planned


def kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What programs are found by, in the state that PyTorch is in."""
    leaves, input_spec = trees.tree_flatten((args, kwargs))
    return input_spec, call_key((args, kwargs), leaves)


def add_program(
    planned: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], program: PlannedProgram
) -> None:
    """Before any call: `program` is for calls like (args, kwargs)."""
    assert isinstance(planned, Planned)
    known = planned._rockplan.programs.setdefault(kind_of_call(args, kwargs), [])
    known.append(_bind(planned, program))


def plan_in_place(
    module: nn.Module,
    program: PlannedProgram,
    kind: Any,
    *,
    make_program: MakeProgram,
    on_mismatch: str,
    on_infeasible: str,
) -> None:
    """Make `module` itself a planned one, which starts with `program` for calls of `kind`: whoever
    holds it calls the plan. Its hooks run as they did."""
    settings = (make_program, on_mismatch, on_infeasible, False, True)
    if isinstance(module, Planned):  # taken out, where its class had to stay
        before = module._rockplan
        state = _PlannedState(before.original, before.instance_forward, *settings)
    else:
        state = _PlannedState(type(module), module.__dict__.pop("forward", None), *settings)
        module.__class__ = _planned_class(type(module))
    module.__dict__["_rockplan"] = state
    _start(module, state, kind, program)


def is_in_place(module: object) -> bool:
    """Was it planned by `plan_in_place`, and not taken out?"""
    return is_own(module) and not module._rockplan.is_off


def is_own(module: object) -> TypeGuard[Planned]:
    """Was it planned by `plan_in_place`, whatever came of it?"""
    return isinstance(module, Planned) and module._rockplan.is_in_place


def make_program_of(module: nn.Module) -> MakeProgram:
    """By what a planned module plans for further kinds of call."""
    assert isinstance(module, Planned)
    return module._rockplan.make_program


def latest_of(module: nn.Module) -> PlannedProgram:
    """What calls of the kind that ran last start with now."""
    assert isinstance(module, Planned)
    state = module._rockplan
    assert state.latest is not None
    for bounds in state.programs.values():
        if any(bound.program is state.latest for bound in bounds):
            return bounds[-1].program
    return state.latest


def take_out(module: nn.Module) -> None:
    """Undo `plan_in_place`. Where the class of the module has another one derived from it since
    (`fully_shard`), or its forward was wrapped, the class stays, and runs the original forward."""
    assert isinstance(module, Planned) and isinstance(module, nn.Module)
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


def _start(planned: nn.Module, state: _PlannedState, kind: Any, program: PlannedProgram) -> None:
    state.programs[kind] = [_bind(planned, program)]
    state.latest = program
    state.watch.begin(planned)


def _uncompiled(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy without what `module.compile()` leaves: a call of that module, which another one would
    run in place of its own. PyTorch's copies are without it, too."""
    return {k: v for k, v in attributes.items() if k != "_compiled_call_impl"}


_Settings = tuple[Callable[..., Any] | None, MakeProgram, str, str, bool, bool]


def _settings(state: _PlannedState) -> _Settings:
    """What copies have from the start."""
    options = (state.on_mismatch, state.on_infeasible, state.outputs_chosen, state.is_in_place)
    return (state.instance_forward, state.make_program, *options)


def _rebuild(
    original: type[nn.Module],
    attributes: dict[str, Any],
    settings: _Settings,
    programs: Sequence[tuple[Any, PlannedProgram]],
    latest: PlannedProgram | None,
    count: int = 1,
) -> nn.Module:
    """Unpickle a planned module."""
    planned = nn.Module.__new__(_planned_class(original))
    planned.__dict__.update(attributes)
    _begin(planned, _PlannedState(original, *settings, latest=latest, count=count), programs)
    return planned


def _begin(
    copied: Any, state: _PlannedState, programs: Sequence[tuple[Any, PlannedProgram]]
) -> None:
    """Give a copy of a planned module a state of its own, with `programs` by kind of call."""
    copied.__dict__["_rockplan"] = state
    for key, program in programs:
        state.programs.setdefault(key, []).append(_bind(copied, program))
    state.watch.begin(copied)


@once_for_each_class
def _planned_class(original: type[nn.Module]) -> type[nn.Module]:
    """A class with the original's name, derived from it, with a planned forward.

    Its forward has the signature of the original's, by which trainers decide what to pass, but
    not `__wrapped__`: accelerate unwraps a forward as far as it can and calls what it finds.
    What is made by calling the class (the slice of a Sequential, `type(self)(...)` in a method) is
    no drop-in for anything, and so becomes an instance of the original's class. What is set as an
    attribute of the class (`type(self).count = 1`) is set for all modules of the original's.
    """

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

    def is_of_all(kind: type, name: str) -> bool:
        return kind in made and not (name.startswith("__") and name.endswith("__"))

    class PlannedType(type(original)):  # type: ignore[misc]
        def __setattr__(cls, name: str, value: object) -> None:
            if is_of_all(cls, name):
                setattr(original, name, value)
            else:
                super().__setattr__(name, value)

        def __delattr__(cls, name: str) -> None:
            if is_of_all(cls, name):
                delattr(original, name)
            else:
                super().__delattr__(name)

    made.append(PlannedType(original.__name__, (Planned, original), body))
    return made[0]
