"""Planned state: the programs of a planned module by kind of call, and how it was planned."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard

from torch import nn

from rockplan.errors import InvalidInput
from rockplan.runtime.bound_program import BoundProgram, bind
from rockplan.runtime.captured import GraphPool
from rockplan.runtime.guards import ModuleSignature, opened_key
from rockplan.runtime.open_program import Limits, OpenProgram
from rockplan.runtime.program import MakeProgram, OnRefused, PlannedProgram
from rockplan.runtime.watch import Watch
from rockplan.values.interface import Precedent
from rockplan.values.plan import Plan
from rockplan.values.sizes import Place, Sizes

# One thread plans at a time: meanwhile tensors of the module and functions of libraries are
# replaced, and random generators draw.
PLANNING = threading.RLock()


class AllowanceLike(Protocol):
    """What a block may take of a step."""

    def of(self, eager_bytes: int) -> Limits:
        """Return it for a call that saves eager_bytes between its phases unplanned."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """How a module was planned, which its copies keep. make_program: plans further kinds of call;
    on_mismatch, on_infeasible: as in Options; outputs_chosen: the user said which outputs backward
    starts from; is_in_place: the planned module is the original itself (`plan_in_place`);
    on_refused: of a module that is planned at its first call in training, None to raise; share: the
    budget as a share of the unplanned peak, None if it is in bytes; allowance: of a block;
    host_bytes, graph: as in Options."""

    make_program: MakeProgram
    on_mismatch: str
    on_infeasible: str | None
    outputs_chosen: bool = False
    is_in_place: bool = False
    on_refused: OnRefused | None = None
    share: float | None = None
    allowance: AllowanceLike | None = None
    host_bytes: int | None = None
    graph: bool = False


@dataclass(slots=True)
class TriedSizes:
    """What spoke against one program for calls that differ in sizes alone. fixed: sizes of which a
    recording made constants; ranges: of recordings, each of which the other call was not in; count:
    of pairs of calls between which something did."""

    fixed: set[tuple[Place, object]] = field(default_factory=set)
    ranges: list[Sizes] = field(default_factory=list)
    count: int = 0


TRIES = 6
"""Pairs of calls that are tried in vain for each program of such calls, and before there is one."""


@dataclass(slots=True)
class PlannedState:
    """What a planned module carries besides the original's attributes.

    programs: key of a kind of call (`kind_of_call`) -> its programs, the preferred one last; those
    for many sizes under the key without sizes (`opened_key`). chosen: key of a kind of call -> (one
    of these, itself at the sizes of the kind), for those that were called last; tried: keys
    without sizes -> why calls of other sizes were not open.
    infeasible: keys of calls that no plan within the budget is for, with the module as it was (they
    run the original: `on_infeasible`); count: plans made for it, and for the module that it is a
    copy of; unread, read: structure of the arguments -> positions of leaves that nothing looks at
    in any planned call, and of those that something does; precedent: outputs that backward passes
    really started from, if not the assumed ones; is_off: all calls run the original forward
    (`take_out`); warned: keys of warnings given, shared by all blocks of a model; pool: of its CUDA
    graphs.
    """

    original: type[nn.Module]
    instance_forward: Callable[..., Any] | None
    settings: PlanSettings
    count: int = 1
    latest: PlannedProgram | None = None
    programs: dict[Any, list[BoundProgram]] = field(default_factory=dict)
    infeasible: dict[Any, list[ModuleSignature]] = field(default_factory=dict)
    chosen: dict[Any, tuple[BoundProgram, BoundProgram]] = field(default_factory=dict)
    tried: dict[Any, TriedSizes] = field(default_factory=dict)
    unread: dict[Any, frozenset[int]] = field(default_factory=dict)
    read: dict[Any, frozenset[int]] = field(default_factory=dict)
    precedent: Precedent | None = None
    watch: Watch = field(default_factory=Watch)
    has_run: bool = False
    is_off: bool = False
    warned: set[str] = field(default_factory=set)
    has_warned_of_original: bool = False
    pool: GraphPool = field(default_factory=GraphPool)

    def add(self, key: Any, bound: BoundProgram) -> None:
        """Add a program for calls of the kind `key`, as the preferred one. The sample's plan is
        dropped if no call has run yet and the new plan was adapted from it to other operations than
        at other sizes: real calls differ from the sample."""
        is_first = not (self.has_run or self.settings.is_in_place) and len(self.programs) == 1
        if is_first and bound.program.is_taken_over:
            ((sample, (known, *_)),) = self.programs.items()
            is_alike = known.program.plan.graph_digest == bound.program.plan.graph_digest
            if not is_alike and opened_key(sample) not in (key, opened_key(key)):
                self.programs.clear()
        self.programs.setdefault(key, []).append(bound)

    def known_at(self, key: Any, leaves: Sequence[Any]) -> BoundProgram | None:
        """Return the program that was chosen for calls of this kind among those for many sizes;
        None if there is none, or it does not hold any more."""
        rung, bound = self.chosen.get(key, (None, None))
        if bound is None or not any(b is rung for b in self.programs.get(opened_key(key), ())):
            return None
        if bound.program.interface.sizes.counts:  # the kind does not say what these are
            with PLANNING:
                return self.choose(key, leaves)
        return bound if bound.holds(leaves) else None

    def choose(self, key: Any, leaves: Sequence[Any]) -> BoundProgram | None:
        """Return the fastest of the programs for many sizes that is for this call and stays within
        its budget; None if there is none, or if one that is made for these sizes would be much
        faster."""
        rungs, sizes = self.rungs(key, leaves)
        if not rungs:
            return None
        chosen, bound = self.chosen.get((key, sizes), (None, None))
        if any(rung is chosen for rung in rungs):
            return bound
        limits = self._limits(rungs, sizes)
        for rung in sorted(rungs, key=lambda r: r.program.plan.overhead):
            opened = opened_in(rung)
            if not opened.fits(sizes, leaves, limits):
                continue
            is_fast = rung.program.plan.overhead <= LITTLE or len(rungs) >= MOST_RUNGS
            pairs = zip(opened.least_bytes(opened.rows, sizes), limits[:2], strict=False)
            if is_fast or any(needed >= FULL * limit for needed, limit in pairs):
                return self.at(key, rung, sizes, limits[0])
            return None
        for rung in rungs:  # where not even the smallest plan fitted, and runs all the same
            own = rung.program.executable.sizes
            if not opened_in(rung).fits(own, (), self._limits(rungs, own)):
                opened_in(rung).measured(sizes, leaves)
                return self.at(key, rung, sizes, limits[0])
        return None

    def _limits(self, rungs: Sequence[BoundProgram], sizes: tuple[int, ...]) -> Limits:
        """The budget of the smallest plan so far, since a share means more bytes for larger calls
        only; of a block its part of a step."""
        opened, settings = opened_in(rungs[-1]), self.settings
        peak_bytes, saved_bytes, _ = opened.least_bytes(opened.kept, sizes)
        if settings.allowance is not None:
            return settings.allowance.of(saved_bytes)
        budgets = (b.program.plan.budget_bytes for bounds in self.programs.values() for b in bounds)
        own = (
            r.program.plan.budget_bytes
            for r in rungs
            if all(map(operator.le, r.program.executable.sizes, sizes))
        )
        most_bytes = max(min(budgets), *own, int((settings.share or 0) * peak_bytes))
        host = () if settings.host_bytes is None else (settings.host_bytes,)
        return most_bytes, most_bytes, *host

    def rungs(self, key: Any, leaves: Sequence[Any]) -> tuple[list[BoundProgram], tuple[int, ...]]:
        """Return the programs for many sizes that are for this call, plans of one program, and its
        sizes; ([], ()) if there are none."""
        families: dict[int, list[BoundProgram]] = {}
        for bound in self.programs.get(opened_key(key), ()):
            families.setdefault(id(opened_in(bound).workspaces), []).append(bound)
        for rungs in families.values():
            sizes = rungs[-1].sizes_of(leaves)
            if sizes is not None and rungs[-1].holds_but_for_reads(leaves):
                return rungs, sizes
        return [], ()

    def at(
        self, key: Any, rung: BoundProgram, sizes: tuple[int, ...], limit_bytes: int
    ) -> BoundProgram:
        """Return one of the programs for many sizes at those of a call, which later calls of this
        kind find. limit_bytes: their budget."""
        bound = replace(rung, program=rung.program.at(sizes, limit_bytes))
        kinds = (key, (key, sizes)) if rung.program.interface.sizes.counts else (key,)
        if len(self.chosen) + len(kinds) > MOST_CHOSEN:
            del self.chosen[next(iter(self.chosen))]
        self.chosen |= dict.fromkeys(kinds, (rung, bound))
        return bound

    @property
    def of_copies(self) -> tuple[Any, ...]:
        """The fields that a copy starts with, the first ones."""
        return self.original, self.instance_forward, self.settings, self.count, self.latest

    @property
    def holding(self) -> list[tuple[Any, PlannedProgram]]:
        """The programs that hold for the module as it is now: (kind of call, program)."""
        return [
            (key, bound.program)
            for key, bounds in self.programs.items()
            for bound in bounds
            if bound.signature.holds()
        ]

    @property
    def plan(self) -> Plan:
        """The plan that ran last; before the first call, the one that `solve` made."""
        return self._latest.plan_here

    @property
    def _latest(self) -> PlannedProgram:
        if self.latest is None:
            raise InvalidInput("nothing is planned yet: the first call in training is")
        return self.latest

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all kinds of call that the module has seen, in that order."""
        bounds = (bound for kind in self.programs.values() for bound in kind)
        return tuple({b.program.plan.graph_digest: b.program.plan for b in bounds}.values())

    @property
    def code(self) -> str:
        """The generated Python of `plan`."""
        return self._latest.executable.code.source


MOST_RUNGS = 6
FULL = 0.8
LITTLE = 0.005
"""A plan for many sizes serves a call whose peak is this share of its budget, or if it recomputes
less than this share of a step; else one is made for the call, as long as there are fewer than
MOST_RUNGS."""

MOST_CHOSEN = 1024
"""Kinds of call of which it is known which program runs them; some 2 KB each."""


def opened_in(rung: BoundProgram) -> OpenProgram:
    """Return what a program for many sizes knows of them."""
    assert rung.program.open is not None
    return rung.program.open


class HasPlans(nn.Module):
    """The base of every planned module (`planned_module.Planned`)."""

    _rockplan: PlannedState


def plan_of(planned: object) -> Plan:
    """Return `planned.plan`, also if the original has an attribute of that name.

    Raises InvalidInput unless `solve` or `load` returned `planned`.
    """
    return _state_of(planned).plan


def code_of(planned: object) -> str:
    """Return `planned.code`, as `plan_of` does."""
    return _state_of(planned).code


def programs_of(module: nn.Module) -> tuple[PlannedProgram, ...]:
    """Return the programs of all kinds of call that a planned module has seen; () of others."""
    if not isinstance(module, HasPlans):
        return ()
    return tuple(b.program for kind in module._rockplan.programs.values() for b in kind)


def _state_of(planned: object) -> PlannedState:
    if not isinstance(planned, HasPlans):
        raise InvalidInput(
            f"a {type(planned).__name__} has no plan; pass what rockplan.solve or rockplan.load "
            "returned"
        )
    return planned._rockplan


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of `module`; of a planned one, the original's."""
    return module._rockplan.original if isinstance(module, HasPlans) else type(module)


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the unplanned forward of `module`, bound to it, whether `module` is planned or not."""
    if not isinstance(module, HasPlans):
        return module.forward
    state = module._rockplan
    if state.instance_forward is not None:
        return state.instance_forward
    return functools.partial(state.original.forward, module)


def bind_now(module: nn.Module, program: PlannedProgram) -> BoundProgram:
    return bind(module, original_forward(module), program)


def is_in_place(module: object) -> bool:
    """True if `plan_in_place` planned the module and `take_out` did not undo it."""
    return is_own(module) and not module._rockplan.is_off


def is_own(module: object) -> TypeGuard[HasPlans]:
    """True if `plan_in_place` planned the module, even if `take_out` has undone it since."""
    return isinstance(module, HasPlans) and module._rockplan.settings.is_in_place


def make_program_of(module: nn.Module) -> MakeProgram:
    """Return the function by which a planned module plans further kinds of call."""
    assert isinstance(module, HasPlans)
    return module._rockplan.settings.make_program


def latest_of(module: nn.Module) -> PlannedProgram:
    """Return the program that a call of the kind that ran last starts with now: the last in the
    list of programs of that kind; or the one that ran last, if the kind is gone."""
    assert isinstance(module, HasPlans)
    state = module._rockplan
    assert state.latest is not None
    for bounds in state.programs.values():
        if any(bound.program is state.latest for bound in bounds):
            return bounds[-1].program
    return state.latest


def unplanned(module: nn.Module) -> nn.Module:
    """Return the original of a planned module, with the attributes and hooks that it has now; any
    other module itself.

    Raises InvalidInput if the forward of the planned module was replaced, which the original would
    lose.
    """
    if not isinstance(module, HasPlans):
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
