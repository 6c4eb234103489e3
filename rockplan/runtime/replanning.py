"""Replanning: the program for a call, or a backward pass, that no known program seemed to match.

takes: a planned module and a call. returns: a known program after all, or a new one; None if the
original forward is to run. guarantees: planning is logged, with advice how to avoid it.
"""

from __future__ import annotations

import itertools
import logging
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rockplan import errors
from rockplan.codegen.executable import Executable, Pattern
from rockplan.python_state import trees
from rockplan.python_state.autocast import Autocast, under_autocast
from rockplan.python_state.sharding import is_sharded
from rockplan.runtime import call_checks
from rockplan.runtime.bound_program import BoundProgram, bind, known_signature, matching, rebind
from rockplan.runtime.differences import Difference, Differences, described_call, module_differences
from rockplan.runtime.guards import (
    PLAIN,
    call_key,
    module_signature,
    opened_key,
    with_tensors_of,
)
from rockplan.runtime.planned_state import (
    PLANNING,
    HasPlans,
    bind_now,
    original_forward,
    programs_of,
)
from rockplan.runtime.program import ModuleCall, PlannedProgram
from rockplan.runtime.switches import under_default_device
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.interface import Precedent
from rockplan.values.plan import format_bytes

LOG = logging.getLogger("rockplan")


@dataclass(slots=True)
class Called:
    """A call of a planned module. key: its kind, another one once more is known of what the forward
    reads; leaves: of (args, kwargs), whose lists may have grown since; None for those let go."""

    key: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]

    def let_go_of_inputs(self, bound: BoundProgram) -> None:
        """No longer hold the inputs of which the frame of the call takes care."""
        inputs, first = bound.program.interface.inputs, len(bound.tensors)
        for resident, _ in bound.program.executable.code.inputs:
            self.leaves[inputs[resident - first][0]] = None
            self.args, self.kwargs = (), {}


def bound_program(planned: HasPlans, call: Called) -> BoundProgram | None:
    """Return a program for a call that none seemed to match, a new one if need be; None if the
    original forward is to run: in evaluation, without gradients, where no plan fits, or as
    Options(on_mismatch='original') says. Warns of the latter, of sharding and of plans that
    accumulate. Raises StalePlan if the options forbid planning again.

    It looks again, because another thread may have planned meanwhile, or may have replaced the
    module's tensors while it planned.
    """
    state, key, leaves = planned._rockplan, call.key, call.leaves
    bound = matching(state.programs.get(key, ()), leaves)
    if bound is None:
        rebind(planned, original_forward(planned), state.programs)
        bound = matching(state.programs.get(key, ()), leaves) or state.choose(key, leaves)
        if call_checks.SHARDING not in state.warned and is_sharded(planned):
            state.warned.add(call_checks.SHARDING)
            call_checks.warn_of_sharding(planned, state.settings.is_in_place)
    if bound is None:
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        trained = itertools.chain(planned.parameters(), tensors)
        # (One half of a GAN has no gradients while the other trains.)
        if not (planned.training and any(t.requires_grad for t in trained)):
            return None
        if state.latest is None and not state.programs:
            call_checks.refuse_capture(planned, leaves)
            return _first_bound(planned, call)
        if state.rungs(key, leaves)[0]:  # a program that is known, in another schedule
            return _new_bound(planned, call, changes_from(planned, call))
        if state.settings.on_mismatch == "original" and state.has_warned_of_original:
            return None
        if state.settings.on_mismatch == "original":
            state.has_warned_of_original = True
            call_checks.warn_of_mismatch(changes_from(planned, call))
            return None
        call_checks.refuse_capture(planned, leaves)
        if any(one.holds() for one in state.infeasible.get(key, ())):
            return None
        changes = changes_from(planned, call)
        if state.settings.on_mismatch == "error":
            raise errors.StalePlan(
                f"this call does not match what was planned: {changes}. Plan again with this "
                "sample, or pass Options(on_mismatch='replan')"
            )
        if changes.has_values and len(state.programs.get(key, ())) >= call_checks.TOO_OFTEN:
            call_checks.warn_of_changes(len(state.programs[key]), changes)
        bound = _new_bound(planned, call, changes)
    return bound


def _first_bound(planned: HasPlans, call: Called) -> BoundProgram | None:
    """None if the call is refused and the original is to run, now and later."""
    state = planned._rockplan
    made, started = ModuleCall(planned, call.args, call.kwargs), time.monotonic()
    try:
        program = state.settings.make_program(made)
    except errors.CaptureError as error:
        if state.settings.on_refused is None or isinstance(error, errors.ForwardRaises):
            raise
        state.is_off = True
        try:
            state.settings.on_refused(made, error)
        except errors.RockplanError:
            state.is_off = False
            raise
        return None
    taken_s = time.monotonic() - started
    plan = program.plan
    LOG.warning(
        "planned %s at its first call in training, in %.1f s: a peak of %s within %s, %+.1f%% time",
        *(state.original.__qualname__, taken_s, format_bytes(plan.peak_bytes)),
        *(format_bytes(plan.budget_bytes), 100 * plan.overhead),
    )
    bound = bind(planned, original_forward(planned), program)
    state.add(call.key, bound)
    return bound


def say_refused(call: ModuleCall, error: errors.CaptureError) -> None:
    """Log that the original runs, and why."""
    assert isinstance(call.module, HasPlans)
    LOG.warning("%s runs as it is: %s", call.module._rockplan.original.__qualname__, error)


def _new_bound(planned: HasPlans, call: Called, changes: Differences) -> BoundProgram | None:
    """None if no plan fits the budget and the original is to run. changes: for messages."""
    state = planned._rockplan
    unread = _unread(planned, call)
    made = ModuleCall(planned, call.args, call.kwargs, state.precedent, unread)
    try:
        program = _logged_program(made, changes)
    except errors.InfeasibleBudget as error:
        if state.settings.on_infeasible != "original":
            error.add_note(
                f"rockplan: this call was planned since it is of a new kind: {changes}. "
                "Options(on_infeasible='smallest') takes the smallest plan for such calls, "
                "'original' the original forward"
            )
            raise
        call_checks.warn_of_original(error, changes)
        state.infeasible.setdefault(call.key, []).append(
            module_signature(planned, original_forward(planned), ())
        )
        return None
    if unread:
        spec, now = call.key[0], program.interface.unread
        state.read[spec] = state.read.get(spec, frozenset()) | (unread - now)
        state.unread[spec] = now
        call.key = spec, call_key((call.args, call.kwargs), call.leaves, now)
    known = (b for bounds in state.programs.values() for b in bounds)
    bound = bind(planned, original_forward(planned), program, known_signature(known, program))
    if program.open is None:
        state.add(call.key, bound)
        return bound
    state.add(opened_key(call.key), bound)
    return state.at(call.key, bound, program.executable.sizes, program.plan.budget_bytes)


def _unread(planned: HasPlans, call: Called) -> frozenset[int]:
    """Leaves that no planned call of this structure reads; and, once calls have differed in one of
    them, all plain values, and tensors that no operator reads."""
    state, (spec, now) = planned._rockplan, call.key
    unread, read = (of.get(spec, frozenset()) for of in (state.unread, state.read))
    if state.rungs(call.key, call.leaves)[0]:  # nothing will be recorded
        return unread
    plain = {i for i, leaf in enumerate(call.leaves) if type(leaf) in PLAIN}
    for (other_spec, then), bounds in state.programs.items():
        if other_spec == spec and bounds:
            is_open = then[:1] == ("open",)
            may = (plain if is_open else plain | bounds[-1].program.interface.idle) - read - unread
            own = opened_key(call.key)[1][1:] if is_open else now
            if any(own[i] != then[i + is_open] for i in may):
                return unread | may
    return unread


_OTHER_OUTPUTS = Difference(
    "the backward pass starts from other outputs",
    "Options(differentiated=...) names the outputs from the start",
)
_OTHER_STRIDES = Difference(
    "the gradient comes in other strides than the result, as that of a sum",
    "rockplan.solve(..., loss=...), a function of the result, plans for these from the start",
)


def _logged_program(call: ModuleCall, changes: Differences) -> PlannedProgram:
    """The training waits meanwhile: that is logged, as a warning where a user can change that, or a
    plan was searched."""
    assert isinstance(call.module, HasPlans)
    state = call.module._rockplan
    known = [p.open.workspaces for p in programs_of(call.module) if p.open is not None]
    started = time.monotonic()
    program = state.settings.make_program(call)
    # Another schedule of a program for many sizes.
    is_rung = program.open is not None and any(w is program.open.workspaces for w in known)
    state.count += not is_rung
    taken_s = time.monotonic() - started
    advice = changes.advice or "Each such kind is planned for once"
    if program.open is not None:
        advice = "Such calls of other sizes run it too"
    # All blocks of a model meet another kind of call at the same step: each would log it.
    is_early = state.settings.is_in_place and state.count < _SAID_OF_BLOCKS
    # A known plan may do where nothing can be changed, or where a sample was not quite like a step.
    is_easy = program.is_taken_over and not (changes.advice and state.has_run)
    is_usual = is_easy or is_early or program.open is not None
    level = logging.INFO if is_usual or state.count > _MANY else logging.WARNING
    LOG.log(
        logging.DEBUG if is_rung else level,
        "planned %s for another kind of step, the %s: %s. It took %.1f s. %s",
        state.original.__qualname__,
        call_checks.ordinal(state.count),
        changes,
        taken_s,
        advice,
    )
    return program


_SAID_OF_BLOCKS = 3
"""Plans from which on those of blocks are logged as warnings, too."""

_MANY = 8
"""The last plan that is logged as a warning. Usual causes need fewer (a trainer calls otherwise
than the sample, the last batch is smaller); more may go on for ever."""


def changes_from(planned: HasPlans, call: Called) -> Differences:
    """Return how a call, or the module, differs from what was planned: from the one that differs
    least among the latest `_COMPARED` programs of its kind (if it has none, of all kinds)."""
    state = planned._rockplan
    now = described_call(original_forward(planned), call.args, call.kwargs)
    alike = state.programs.get(call.key) or [
        b for bounds in state.programs.values() for b in bounds
    ]
    differences = [bound.differences(now, call.leaves) for bound in reversed(alike[-_COMPARED:])]
    return Differences(min(filter(None, differences), key=len, default=(Difference(_UNNAMED),)))


_COMPARED = 4
"""Kinds of call that are compared, each in 0.5 ms. (A hundred lengths would all differ alike.)"""

_UNNAMED = (
    "what is in an argument that is no tensor, whether arguments come by position or by name, or "
    "which parameters and buffers are one or of which class"
)


@dataclass(frozen=True, slots=True)
class Situation:
    """The circumstances of a call, to plan it again from its backward pass.

    modes: of `function_modes`.
    """

    planned: HasPlans
    call: Called
    bound: BoundProgram
    autocast: Autocast
    modes: tuple[torch.device | int, ...]

    def replan(self, pattern: Pattern, residents: Sequence[torch.Tensor]) -> Executable:
        """Return the plan for incoming gradients of `pattern`. Later calls like this one start with
        it, unless the user chose the outputs to differentiate.

        It is planned with the parameters and buffers that the call had, which eager's graph keeps:
        `functional_call` has put the module's own back when backward begins.
        """
        leaves, inputs = self.call.leaves, self.bound.program.interface.inputs
        for (i, _), given in zip(inputs, residents[len(self.bound.tensors) :], strict=False):
            if leaves[i] is None:  # it was computed, and so required a gradient
                leaves[i] = given if given.requires_grad else given.detach().requires_grad_()
        with PLANNING, paused_collection(), with_tensors_of(self.bound.signature):
            return self._replan(pattern)

    def _replan(self, pattern: Pattern) -> Executable:
        """The plan comes last among the programs of its kind, the preferred place, if later calls
        are to start with it, else first. Raises BackwardError if the module has changed since the
        forward."""
        module, state = self.planned, self.planned._rockplan
        # What the call itself wrote into Python objects is no change.
        own = state.programs.setdefault(self.call.key, [])
        same = (b for b in own if b.program is self.bound.program)
        if not any(b.signature.holds() for b in (self.bound, *same)):
            changed = Differences(module_differences(self.bound.signature))
            raise errors.BackwardError(
                f"the module, a {type(module).__qualname__}, was changed between forward and "
                f"backward ({changed}), and this backward pass needs another plan; change modules "
                "before the forward. Where only the first call of a model does (it settles a "
                "configuration that planned blocks share), run the model once on the sample, then "
                "plan it"
            )
        bounds = state.programs[self.call.key]
        rebind(module, original_forward(module), {self.call.key: bounds})
        known = [b for b in bounds if b.program.executable.pattern == pattern]
        other = matching(known, self.call.leaves)
        if other is None:
            other = bind_now(module, self._program(pattern))
        else:
            bounds.remove(other)
        if not state.settings.outputs_chosen or self._is_of_planned_outputs(pattern):
            # Calls of other sizes will most likely start so, too.
            state.programs.pop(opened_key(self.call.key), None)
            bounds.append(other)
            incoming, before = other.program.incoming, state.precedent
            is_repeated = before is not None and before.incoming.keys() == incoming.keys()
            state.precedent = Precedent(incoming, is_repeated)
        else:
            bounds.insert(0, other)
        return other.program.executable

    def _program(self, pattern: Pattern) -> PlannedProgram:
        module, state = self.planned, self.planned._rockplan
        if state.settings.on_mismatch == "error":
            raise errors.BackwardError(
                "the incoming gradients are of other outputs, or have other strides, than "
                "planned; pass the loss as a function of the result (rockplan.solve(..., "
                "loss=...)), Options(differentiated=...) for the outputs that backward starts "
                "from, or Options(on_mismatch='replan')"
            )
        results = self.bound.program.interface.results
        incoming = {i: s for i, s in zip(results, pattern, strict=True) if s is not None}
        with under_autocast(self.autocast), under_default_device(self.modes):
            unread = self.bound.program.interface.unread
            call = ModuleCall(module, *self._arguments(), incoming, unread)
            is_same = self._is_of_planned_outputs(pattern)
            changed = Differences((_OTHER_STRIDES if is_same else _OTHER_OUTPUTS,))
            program = _logged_program(call, changed)
            if program.interface.unread != unread:
                raise errors.BackwardError(
                    "this backward pass reads an argument that the forward and the planned one do "
                    "not; name the outputs that backward starts from: Options(differentiated=...)"
                )
            return program

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        now, spec = trees.tree_flatten((self.call.args, self.call.kwargs))
        is_same = spec == self.call.key[0] and len(now) == len(self.call.leaves)
        if is_same and all(map(operator.is_, now, self.call.leaves)):
            return self.call.args, self.call.kwargs
        called: tuple[tuple[Any, ...], dict[str, Any]] = trees.tree_unflatten(
            self.call.leaves, self.call.key[0]
        )
        return called

    def _is_of_planned_outputs(self, pattern: Pattern) -> bool:
        planned = self.bound.program.executable.pattern
        return [s is None for s in planned] == [s is None for s in pattern]
