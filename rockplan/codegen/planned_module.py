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
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rockplan.codegen import assignments, autograd, parametrizations
from rockplan.codegen.backward_pass import Replan
from rockplan.codegen.differences import (
    NOTHING_SAID,
    DescribedCall,
    Difference,
    Differences,
    call_differences,
    described_call,
    module_differences,
)
from rockplan.codegen.executable import Executable, Pattern, build
from rockplan.codegen.guards import (
    Autocast,
    ModuleSignature,
    Sharing,
    autocast_state,
    call_key,
    function_modes,
    holds_for_others,
    module_signature,
    signature_holds,
    under_autocast,
    under_default_device,
    with_tensors_of,
    without_default_device,
)
from rockplan.codegen.hooks import has_hooks
from rockplan.codegen.watch import Watch
from rockplan.errors import (
    BackwardError,
    InfeasibleBudget,
    InvalidInput,
    StalePlan,
    UnsupportedModel,
)
from rockplan.python_state import trees
from rockplan.python_state.contents import described, is_same
from rockplan.python_state.snapshot import Surroundings
from rockplan.values.columns import aligned
from rockplan.values.interface import (
    ABSENT,
    METHODS,
    Assignment,
    Incoming,
    Interface,
    Question,
    is_foreign,
)
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


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """One plan with what it takes to run it on one kind of call.

    hooked: names of parameters that had hooks when it was planned: their gradients wait as far as
    the budget has room; call: what it was planned for, in words; adapted_from: digest of the graph
    whose plan was adapted to this one, if one was. Copies share everything but the constants; a
    pickle holds the plan as data, and the code is generated again from it.
    """

    plan: Plan
    interface: Interface
    executable: Executable
    constants: tuple[torch.Tensor, ...]
    output_spec: trees.TreeSpec
    hooked: frozenset[str]
    call: DescribedCall = NOTHING_SAID
    adapted_from: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedProgram:
        return replace(self, constants=copy.deepcopy(self.constants, memo))

    def __str__(self) -> str:
        """A line for each tensor that the code is given, for each result, and for each slice of the
        backward phase; then the code."""
        interface, values = self.interface, self.plan.graph.values
        names = [
            *(f"parameter {name}" for name, _ in interface.parameters),
            *(f"buffer {name}" for name, _ in interface.buffers),
            *(f"input {position}" for position, _ in interface.inputs),
            *(f"constant {position}" for position, _ in enumerate(interface.constants)),
        ]
        given = zip(names, interface.residents, strict=True)
        results = zip(interface.results, self.executable.pattern, strict=True)
        rows = [
            *(
                (f"residents[{i}]", name, f"{values[v].spec.dtype} {values[v].spec.shape}")
                for i, (name, v) in enumerate(given)
            ),
            *(
                (f"results[{i}]", f"leaf {leaf}", f"gradient in strides {strides or 'none'}")
                for i, (leaf, strides) in enumerate(results)
            ),
            *(
                (f"backward_{i}", "hands over", ", ".join(names[t] for t in targets) or "nothing")
                for i, targets in enumerate(self.executable.targets)
            ),
        ]
        return "\n".join([*aligned(rows), "", self.executable.code.source])

    def __reduce__(self) -> tuple[Any, ...]:
        spec = picklable(self.output_spec)
        made_of = (self.plan, self.interface, self.constants, spec, self.hooked, self.call)
        return build_program, made_of


def build_program(
    plan: Plan,
    interface: Interface,
    constants: tuple[torch.Tensor, ...],
    output_spec: trees.TreeSpec,
    hooked: frozenset[str] = frozenset(),
    call: DescribedCall = NOTHING_SAID,
) -> PlannedProgram:
    """Generate the code of `plan`, whose values meet the caller as `interface` says."""
    executable = build(plan.graph, interface, plan.schedule, plan.graph_digest[:8])
    return PlannedProgram(plan, interface, executable, constants, output_spec, hooked, call)


MakeProgram = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any], Incoming | None], PlannedProgram
]


@dataclass(frozen=True, slots=True)
class _Bound:
    """A program bound to the tensors of one module tree in one state.

    sharing: as it was when the program was captured; unhooked: parameters that it hands gradients
    of while it still reads them, since they had no hooks.
    """

    program: PlannedProgram
    signature: ModuleSignature
    tensors: tuple[torch.Tensor, ...]
    sharing: Sharing
    unhooked: tuple[torch.Tensor, ...]

    def residents(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The tensors that the generated code is given."""
        inputs = (leaves[i] for i, _ in self.program.interface.inputs)
        return (*self.tensors, *inputs, *self.program.constants)

    def holds(self, leaves: Sequence[Any]) -> bool:
        """True if the program is for the module as it is now and a call with `leaves`."""
        return (
            signature_holds(self.signature)
            and self.sharing.holds(self.residents(leaves))
            and not any(map(has_hooks, self.unhooked))
            and _guards_hold(self.program, leaves)
            and self._answers_hold(leaves)
        )

    def _answers_hold(self, leaves: Sequence[Any]) -> bool:
        """True if tensors would say of themselves what they did."""
        questions = self.program.interface.questions
        return not questions or all(self._is_answered(q, leaves) for q in questions)

    def _is_answered(self, question: Question, leaves: Sequence[Any]) -> bool:
        if question.role == "input":
            tensor = leaves[int(question.key)]
        else:
            interface = self.program.interface
            named = (*interface.parameters, *interface.buffers)
            tensor = self.tensors[[name for name, _ in named].index(str(question.key))]
        found: Any = getattr(tensor, question.attribute, ABSENT)
        if found is ABSENT or question.answer is ABSENT:
            return found is question.answer
        is_method = question.attribute in METHODS
        return bool(described(found() if is_method else found) == question.answer)

    def differences(self, now: DescribedCall, leaves: Sequence[Any]) -> tuple[Difference, ...]:
        """The reasons why the program is not for a call `now` with `leaves`."""
        of_call = call_differences(now, self.program.call)
        of_module = module_differences(self.signature)
        if of_call:  # what is left to compare is about the same arguments
            return (*of_call, *of_module)
        found = [*of_module]
        if not self.sharing.holds(self.residents(leaves)):
            found.append(Difference(_SHARED))
        interface = self.program.interface
        names = dict(zip(map(id, self.tensors), (n for n, _ in interface.parameters), strict=False))
        hooked = [names[id(t)] for t in self.unhooked if has_hooks(t)]
        if hooked:
            found.append(Difference(f"hooks on parameters ({', '.join(map(repr, hooked[:3]))})"))
        for asked in interface.questions:
            if not self._is_answered(asked, leaves):
                found.append(Difference(f"`{asked.attribute}` of the {asked.role} {asked.key!r}"))
        return (*found, *_read_differences(self.program, leaves))


_SHARED = (
    "which arguments are one tensor or a tensor of the module, or share memory with what the "
    "forward changes"
)


def _read_differences(program: PlannedProgram, leaves: Sequence[Any]) -> Iterator[Difference]:
    """Of values of tensors that Python reads in the forward."""
    checks = zip(program.executable.functions.guards, program.interface.guards, strict=True)
    for check, guard in checks:
        value = check(leaves, program.constants)
        if not is_same(value, guard.expected):
            names = dict(enumerate(name for name, _ in program.call.leaves))
            of = ", ".join(names[i] for _, i in guard.inputs if i in names)
            where = f"in module '{guard.module or '(root)'}' at {guard.source or 'an unknown line'}"
            texts = f": {_short(value)}, planned {_short(guard.expected)}"
            yield Difference(
                f"values {f'of {of} ' if of else ''}that the forward reads {where}"
                # Of a comparison the result says nothing.
                f"{'' if isinstance(guard.expected, bool) else texts}",
                is_value=True,
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@dataclass(slots=True)
class _PlannedState:
    """What a planned module carries besides the original's attributes.

    infeasible: calls for which no plan fits the budget, as the module was, and which therefore run
    the original (`on_infeasible`). count: of plans made, for it or the one that it is a copy of.
    """

    original: type[nn.Module]
    instance_forward: Callable[..., Any] | None
    make_program: MakeProgram
    on_mismatch: str
    on_infeasible: str
    outputs_chosen: bool
    programs: dict[Any, list[_Bound]] = field(default_factory=dict)
    latest: PlannedProgram | None = None
    infeasible: dict[Any, list[ModuleSignature]] = field(default_factory=dict)
    count: int = 1
    watch: Watch = field(default_factory=Watch)
    has_run: bool = False
    assigned: list[Assignment] = field(default_factory=list)

    def leave(self, module: nn.Module, key: Any, bound: _Bound) -> None:
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

    def add(self, key: Any, bound: _Bound) -> None:
        """For calls like `key`. What was planned for the sample goes if nothing was called like it,
        and this is its plan, adapted to what is called."""
        if not self.has_run and bound.program.adapted_from:
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
            found = super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name not in _OF_STATE:
                raise
            return getattr(self._rockplan, name)
        if isinstance(found, nn.Module | nn.Parameter) and not torch.compiler.is_compiling():
            self._rockplan.watch.used(name, found)
        return found

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
            if signature_holds(bound.signature)
        ]
        settings = _settings(state)
        return _rebuild, (state.original, attributes, settings, programs, state.latest, state.count)

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
        if not torch.is_grad_enabled() or torch._C._is_tracing():
            return _run_original(self, args, kwargs)
        _refuse_transforms()
        _warn_of_saved_tensor_hooks()
        _warn_of_dispatch_modes()
        assignments.take_back(self, state.assigned)
        leaves, input_spec = trees.tree_flatten((args, kwargs))
        key = (input_spec, call_key((args, kwargs), leaves))
        with without_default_device():
            bound = _matching(state.programs.get(key, ()), leaves)
        if bound is None:
            with PLANNING:
                bound = self._bound_program(key, leaves, args, kwargs)
        if bound is None:
            return _run_original(self, args, kwargs)
        parametrizations.claim(self)
        state.latest, state.has_run = bound.program, True
        state.watch.called()
        state_of_torch = (autocast_state(), function_modes(), parametrizations.are_cached())
        situation = _Situation(self, key, bound, args, kwargs, *state_of_torch)
        result = _run(bound, leaves, situation.replan)
        state.leave(self, key, bound)
        return result

    def _bound_program(
        self, key: Any, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Bound | None:
        """The program for a call that none seemed to match; None: run the original forward.

        It looks again, because another thread may have planned meanwhile, or have had the
        module's tensors exchanged while it planned.
        """
        state = self._rockplan
        assert isinstance(self, nn.Module)
        bound = _matching(state.programs.get(key, ()), leaves)
        if bound is None:
            _bind_again(self, state.programs)
            bound = _matching(state.programs.get(key, ()), leaves)
        if bound is None:
            is_original = state.on_mismatch == "original" or not _has_gradients(self, leaves)
            if is_original or not self.training:
                return None
            _refuse_capture(self, leaves)
            if any(map(signature_holds, state.infeasible.get(key, ()))):
                return None
            changes = _changes(self, key, leaves, args, kwargs)
            if state.on_mismatch == "error":
                raise StalePlan(
                    f"this call does not match what was planned: {changes}. Plan again with this "
                    "sample, or pass Options(on_mismatch='replan')"
                )
            if changes.has_values and len(state.programs.get(key, ())) >= _TOO_OFTEN:
                _warn_of_changes(len(state.programs[key]), changes)
            bound = self._new_bound(key, changes, args, kwargs)
        return bound

    def _new_bound(
        self, key: Any, changes: Differences, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Bound | None:
        """Plan for a call like this one; None where nothing fits and the original shall run."""
        state = self._rockplan
        assert isinstance(self, nn.Module)
        try:
            program = _made(self, args, kwargs, None, changes)
        except InfeasibleBudget as error:
            if state.on_infeasible != "original":
                error.add_note(
                    f"rockplan: this call was planned since it is of a new kind: {changes}. "
                    "Options(on_infeasible='smallest') takes the smallest plan for such calls, "
                    "'original' the original forward"
                )
                raise
            _warn_of_original(error, changes)
            state.infeasible.setdefault(key, []).append(
                module_signature(self, original_forward(self), ())
            )
            return None
        bound = _bind(self, program)
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
    incoming: Incoming | None,
    changes: Differences,
) -> PlannedProgram:
    """A program for one more kind of call, which takes time that the training waits for: from the
    third one on that is said, with what would keep it from happening again."""
    state = planned._rockplan
    assert isinstance(planned, nn.Module)
    started = time.monotonic()
    with state.watch.aside():
        program = state.make_program(planned, args, kwargs, incoming)
    state.count += 1
    if state.count >= _SAID:
        LOG.warning(
            "planned %s for another kind of step, the %s: %s. It took %.1f s. %s",
            state.original.__qualname__,
            _ordinal(state.count),
            changes,
            time.monotonic() - started,
            changes.advice or "Each such kind is planned for once",
        )
    return program


_SAID = 3
"""The plan from which on each is said: a trainer calls in another way than the sample says, and the
last batch is smaller; more than that may go on for ever."""


def _ordinal(number: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    ending = "th" if number % 100 in (11, 12, 13) else endings.get(number % 10, "th")
    return f"{number}{ending}"


def _changes(
    planned: Planned,
    key: Any,
    leaves: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Differences:
    """What of a call, or of the module, is not as in the most similar kind of call that is planned
    for."""
    state = planned._rockplan
    assert isinstance(planned, nn.Module)
    now = described_call(original_forward(planned), args, kwargs)
    alike = state.programs.get(key) or [b for bounds in state.programs.values() for b in bounds]
    found = [bound.differences(now, leaves) for bound in reversed(alike)]
    return Differences(min(filter(None, found), key=len, default=(Difference(_UNNAMED),)))


_UNNAMED = (
    "what is in an argument that is no tensor, whether arguments come by position or by name, or "
    "which parameters and buffers are one or of which class"
)


@dataclass(frozen=True, slots=True)
class _Situation:
    """What a call was made under, to plan it again from its backward pass.

    modes: as `function_modes` says; cached: in a block of `torch.nn.utils.parametrize.cached()`.
    """

    planned: Planned
    key: Any
    bound: _Bound
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Autocast
    modes: tuple[torch.device | int, ...]
    cached: bool

    def replan(self, pattern: Pattern) -> Executable:
        """The plan for incoming gradients of `pattern`; later calls like this one start with it,
        unless the outputs to differentiate were chosen by the user.

        It is planned with the parameters and buffers that the call had, which eager's graph keeps:
        `functional_call` has put the module's own back when backward begins."""
        with PLANNING, with_tensors_of(self.bound.signature):
            return self._replan(pattern)

    def _replan(self, pattern: Pattern) -> Executable:
        module, state = self.planned, self.planned._rockplan
        assert isinstance(module, nn.Module)
        if not signature_holds(self.bound.signature):
            raise BackwardError(
                "the module was changed between forward and backward, and this backward pass "
                "needs another plan; change modules before the forward"
            )
        _bind_again(module, {self.key: state.programs[self.key]})
        bounds = state.programs[self.key]
        known = [b for b in bounds if b.program.executable.pattern == pattern]
        found = _matching(known, trees.tree_leaves((self.args, self.kwargs)))
        if found is None:
            found = _bind(module, self._program(pattern))
        else:
            bounds.remove(found)
        bounds.insert(len(bounds) if self._is_preferred(pattern) else 0, found)
        return found.program.executable

    def _program(self, pattern: Pattern) -> PlannedProgram:
        module, state = self.planned, self.planned._rockplan
        assert isinstance(module, nn.Module)
        if state.on_mismatch != "replan":
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
            return _made(module, self.args, self.kwargs, incoming, _OTHER_OUTPUTS)

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


def bound_forward(module: nn.Module, program: PlannedProgram) -> Callable[..., Any]:
    """A function that runs `program` on the tensors that `module` has now."""
    bound = _bind(module, program)

    def forward(*args: Any, **kwargs: Any) -> Any:
        result = _run(bound, trees.tree_leaves((args, kwargs)), _no_other_plan)
        assignments.put(module, program.interface.assignments)
        return result

    return forward


def _has_gradients(module: nn.Module, leaves: Sequence[Any]) -> bool:
    """Does anything require a gradient? (Of a GAN one half does not while the other trains.)"""
    arguments = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return any(t.requires_grad for t in itertools.chain(module.parameters(), arguments))


def _refuse_transforms() -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise StalePlan(
            "a planned module cannot run under torch.func transforms (grad, vmap, jvp); use the "
            "original module there"
        )
    if forward_ad._current_level >= 0:
        raise StalePlan(
            "a planned module has no forward-mode derivatives (torch.autograd.forward_ad, "
            "dual_level): tangents would be lost; use the original module there, or call the "
            "planned one outside of the dual level"
        )


def _warn_of_saved_tensor_hooks() -> None:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and not str(hooks[0].__module__).startswith("torch."):
        warnings.warn(
            "hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks) see nothing of what "
            "a planned module keeps for its backward pass: those that change values (compression) "
            "have no effect on it. Use the original module, or leave them out around the planned "
            "one",
            stacklevel=2,
        )


def _warn_of_dispatch_modes() -> None:
    if not torch._C._len_torch_dispatch_stack():
        return
    foreign = [type(m).__qualname__ for m in filter(is_foreign, _get_current_dispatch_mode_stack())]
    if foreign:
        warnings.warn(
            f"the TorchDispatchMode {', '.join(foreign)} sees the operators of a plan: those that "
            "run again among them, and those that write into memory which is there already "
            "(aten.add.out). If it changes results, these may be others than those of the "
            "original module; use that one there",
            stacklevel=2,
        )


_TOO_OFTEN = 4
"""Plans of calls that the module's state alone tells apart, from which on a further one is warned
of: a mode or two, or layers frozen one after the other, are no more."""


def _warn_of_changes(count: int, changes: Differences) -> None:
    warnings.warn(
        f"the same call is planned for the {_ordinal(count + 1)} time, because {changes} (changed "
        "again). If the forward does not read it, keep it outside of the module; if it does, pass "
        "the value in as a tensor",
        stacklevel=2,
    )


def _warn_of_original(error: InfeasibleBudget, changes: Differences) -> None:
    warnings.warn(
        f"no plan for this call fits the budget of {error.budget_bytes} bytes (the smallest needs "
        f"{error.minimum_bytes}), so it and others like it run the original forward, with eager's "
        f"memory (Options(on_infeasible='original')): {changes}",
        stacklevel=2,
    )


def _refuse_capture(planned: nn.Module, leaves: Sequence[Any]) -> None:
    """Raise where `planned` runs as a part of a module that is being planned, or exported."""
    if any(isinstance(t, FakeTensor) for t in (*leaves, *planned.parameters())):
        raise UnsupportedModel(
            f"a submodule, {type(planned).__qualname__}, is planned already; plan (or export, with "
            "torch.export) the whole with the original module in its place"
        )


def _no_other_plan(pattern: Pattern) -> Executable:
    raise BackwardError(f"the incoming gradients are not as planned: {pattern}")


def _matching(candidates: Sequence[_Bound], leaves: Sequence[Any]) -> _Bound | None:
    for bound in reversed(candidates):
        if bound.holds(leaves):
            return bound
    return None


def _bind_again(module: nn.Module, programs: dict[Any, list[_Bound]]) -> None:
    """Bind what was planned to the tensors that the module has now, where these replaced others
    like them (functional_call, load_state_dict(assign=True)): nothing else keeps those alive."""
    for bounds in programs.values():
        for position, bound in enumerate(bounds):
            is_bound = signature_holds(bound.signature)
            if not is_bound and holds_for_others(bound.signature):
                bounds[position] = _bind(module, bound.program)


def _guards_hold(program: PlannedProgram, leaves: Sequence[Any]) -> bool:
    checks = zip(program.executable.functions.guards, program.interface.guards, strict=True)
    # NaN is what it was, too.
    return all(is_same(check(leaves, program.constants), guard.expected) for check, guard in checks)


def _run(bound: _Bound, leaves: Sequence[Any], replan: Replan) -> Any:
    program = bound.program
    with without_default_device():
        tensors = autograd.call(program.executable, bound.residents(leaves), replan)
    of = dict(zip(program.interface.results, tensors, strict=True))
    leaves = [
        leaf.literal if leaf.value is None else of[leaf.first] for leaf in program.interface.outputs
    ]
    return trees.tree_unflatten(leaves, program.output_spec)


def _bind(module: nn.Module, program: PlannedProgram) -> _Bound:
    interface = program.interface
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    tensors = (
        *(parameters[name] for name, _ in interface.parameters),
        *(buffers[name] for name, _ in interface.buffers),
    )
    named = {i: name for i, (name, _) in enumerate(interface.parameters)}
    early = (i for i in program.executable.early if i in named)
    unhooked = tuple(tensors[i] for i in early if named[i] not in program.hooked)
    signature = module_signature(module, original_forward(module), program.constants)
    return _Bound(program, signature, tensors, _sharing(program, len(tensors)), unhooked)


def _sharing(program: PlannedProgram, first_input: int) -> Sharing:
    """Among the residents, as it was when `program` was captured."""
    interface, values = program.interface, program.plan.graph.values
    residents = interface.residents
    return Sharing.of(
        residents,
        [values[v].data for v in residents],
        range(first_input, first_input + len(interface.inputs)),
        tuple(residents.index(v) for v in interface.mutated),
    )


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
    planned = nn.Module.__new__(_planned_class(type(module)))  # type: ignore[arg-type]
    planned.__dict__.update(attributes, _rockplan=state)
    leaves, input_spec = trees.tree_flatten((args, kwargs))
    state.programs[(input_spec, call_key((args, kwargs), leaves))] = [_bind(planned, program)]
    state.latest = program
    state.watch.begin(planned)
    return planned


def _uncompiled(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy without what `module.compile()` leaves: a call of that module, which another one would
    run in place of its own. PyTorch's copies are without it, too."""
    return {k: v for k, v in attributes.items() if k != "_compiled_call_impl"}


_Settings = tuple[Callable[..., Any] | None, MakeProgram, str, str, bool]


def _settings(state: _PlannedState) -> _Settings:
    """What copies have from the start."""
    options = (state.on_mismatch, state.on_infeasible, state.outputs_chosen)
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
    planned = nn.Module.__new__(_planned_class(original))  # type: ignore[arg-type]
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


@functools.cache
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

    class Kind(type(original)):  # type: ignore[misc]
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

    made.append(Kind(original.__name__, (Planned, original), body))
    return made[0]
