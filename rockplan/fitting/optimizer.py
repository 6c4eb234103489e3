"""Optimizer: the memory changes of a step of the real optimizer, over fake tensors.

takes: an optimizer, a factory of one, or a name; parameters on any device. returns: OptimizerSteps:
changes of the first step, which makes the state, and of a later one. guarantees: nothing of the
sizes of parameters is allocated; the caller's parameters, gradients and optimizer are left as they
are.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import InvalidInput
from rockplan.fitting.changes import Holding, MemoryChange, left_alive
from rockplan.fitting.shards import ALONE, Shards
from rockplan.fitting.tracker import Tracker
from rockplan.fitting.training_step import USUAL, TrainingStep
from rockplan.python_state import trees
from rockplan.python_state.distributed import local_of
from rockplan.values.garbage_collection import paused_collection

Factory = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
OptimizerLike = str | Factory | torch.optim.Optimizer | None

NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "adafactor": ("Adafactor", {}),
    "adagrad": ("Adagrad", {}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "adamw-fused": ("AdamW", {"fused": True}),
    "rmsprop": ("RMSprop", {}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
}
"""Name -> class of torch.optim and arguments."""


@dataclass(frozen=True, slots=True)
class OptimizerSteps:
    """Memory changes of an optimizer. state_bytes: kept from step to step; first, later: of a step
    that makes the state, and of one that finds it; before: of memory that is allocated before the
    first forward pass, of it held by the caller's optimizer already. kept: names of
    parameters whose gradients its `zero_grad` does not let go of. moved_bytes: read and written
    by a later step; calls: of operators in it.

    each: of optimizers that step in backward, by the name of their parameter; then there is no
    other step.
    """

    name: str
    state_bytes: int = 0
    first: tuple[MemoryChange, ...] = ()
    later: tuple[MemoryChange, ...] = ()
    before: tuple[MemoryChange, ...] = ()
    held: tuple[MemoryChange, ...] = ()
    kept: frozenset[str] = frozenset()
    each: Mapping[str, OptimizerSteps] = field(default_factory=dict)
    moved_bytes: int = 0
    calls: int = 0


def optimizer_steps(
    optimizer: OptimizerLike,
    parameters: Mapping[str, torch.Tensor],
    *,
    step: TrainingStep = USUAL,
    metered: bool = False,
    as_on_cuda: bool = False,
    shards: Shards = ALONE,
) -> OptimizerSteps:
    """Run two steps of `optimizer` over fake parameters, each with a gradient, and return the
    allocations and frees of both, and the bytes of state that stay. No memory is taken for it.

    optimizer: None for none, as if there are no parameters; a factory takes the parameters, as a
    list. step: what else happens to gradients. metered: also measure temporary memory inside of
    operators, by running calls once on made-up tensors on CPU; else it is not counted. as_on_cuda:
    use `foreach` if PyTorch chooses it for parameters on CUDA, wherever these are. shards: the part
    of the parameters that one of several processes has. Raises InvalidInput for an unknown name,
    and for an optimizer that does not run over fake tensors.
    """
    given = _named(optimizer) if isinstance(optimizer, str) else optimizer
    if given is None or not parameters:
        return OptimizerSteps("none")
    if step.in_backward:
        alone = replace(step, in_backward=False)
        each = {
            name: optimizer_steps(
                optimizer, {name: parameter}, step=alone, metered=metered, as_on_cuda=as_on_cuda
            )
            for name, parameter in parameters.items()
        }
        return _in_backward(each)
    # One tracker for all: what a step replaces was made by the one before, or with the optimizer.
    tracker = Tracker(Holding.OPTIMIZER_TEMPORARIES, metered=metered)
    # So that all that an optimizer leaves in cycles is young: found without a walk over the heap.
    with paused_collection(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: _fake(shards.part(p)) for name, p in parameters.items()}
        for name, fake in fakes.items():
            tracker.know(fake, ("parameter", name), Holding.PARAMETERS)
        held: list[MemoryChange] = []
        with tracker:
            if isinstance(given, torch.optim.Optimizer):
                made, own = _over_fakes(given, parameters, fakes, mode)
                held = [tracker.know(t, ("held", n), Holding.OPTIMIZER) for n, t in enumerate(own)]
            else:
                made = _made_by(given, fakes)
            on_cuda = as_on_cuda or all(p.is_cuda for p in fakes.values())
            _choose_foreach(made, on_cuda)
            scaler = None
            if step.grad_scaler:
                device = next(iter(fakes.values())).device
                scaler = torch.amp.GradScaler(device.type)
                scaler.scale(torch.zeros((), device=device))
        gc.collect(0)
        built = left_alive((*held, *tracker.changes))
        parts = _Stepping(made, fakes, scaler, step.clip_norm, on_cuda, tracker)
        first = parts.changes()
        kept = parts.emptied()
        tracker.moved_bytes = tracker.calls = 0
        later = parts.changes()
    after = left_alive((*built.values(), *first))
    lasting = {*built, *after, *left_alive((*after.values(), *later))}
    return OptimizerSteps(
        optimizer if isinstance(optimizer, str) else type(made).__name__,
        sum(change.size_bytes for change in after.values()),
        _with_owner(lasting, first),
        _with_owner(lasting, later),
        _with_owner(lasting, built.values()),
        tuple(held),
        kept,
        moved_bytes=tracker.moved_bytes,
        calls=tracker.calls,
    )


def _in_backward(each: Mapping[str, OptimizerSteps]) -> OptimizerSteps:
    name = next((steps.name for steps in each.values()), "none")
    state_bytes, moved_bytes, calls = (
        sum(getattr(steps, of) for steps in each.values())
        for of in ("state_bytes", "moved_bytes", "calls")
    )
    return OptimizerSteps(name, state_bytes, each=each, moved_bytes=moved_bytes, calls=calls)


def _fake(parameter: torch.Tensor) -> torch.Tensor:
    own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    device = torch.device("cpu") if own.is_meta else own.device
    made = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=device)
    return torch.nn.Parameter(made)


def _made_by(make: Factory, fakes: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    try:
        made = make([*fakes.values()])
    except Exception as error:  # the caller's function may raise anything
        raise InvalidInput(
            f"the optimizer cannot be made: {type(error).__name__}: {error}. It is called with the "
            "list of the parameters that have gradients, as fake tensors"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidInput(
            f"optimizer makes a {type(made).__name__}; pass a function from parameters to a "
            f"torch.optim.Optimizer, an optimizer, or a name: {', '.join(NAMES)}"
        )
    return made


def _named(name: str) -> Factory:
    if name not in NAMES:
        raise InvalidInput(f"no optimizer is named {name!r}; there are {', '.join(NAMES)}")
    kind, arguments = NAMES[name]
    make: Any = getattr(torch.optim, kind)
    return lambda parameters: make(parameters, **arguments)


def _over_fakes(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    fakes: Mapping[str, torch.Tensor],
    mode: FakeTensorMode,
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """Fake tensors stand for all others, too; those that are no parameters are returned beside.
    Raises InvalidInput if the optimizer has none of the parameters, or cannot be copied."""
    parts = [optimizer]
    for part in parts:  # optimizers inside of it (SAM, Lookahead), which come last
        leaves = trees.tree_leaves(vars(part))
        parts += [o for o in leaves if isinstance(o, torch.optim.Optimizer) and o not in parts]
    leaves = [leaf for part in parts for leaf in trees.tree_leaves(vars(part))]
    grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    memo: dict[int, Any] = {id(p): fakes[name] for name, p in parameters.items()}
    if grouped.isdisjoint(memo):
        raise InvalidInput("the optimizer has none of the parameters that have gradients")
    own: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in memo:
            with _disable_current_modes():
                memo[id(leaf)] = fake = mode.from_tensor(local_of(leaf))
            fake.grad = None  # parameters that are not of this model do not step
            if id(leaf) not in grouped:
                own.setdefault(fake.untyped_storage()._cdata, fake)
    memo |= {id(part): type(part).__new__(type(part)) for part in parts}
    for part in reversed(parts):
        facts = {name: fact for name, fact in vars(part).items() if not _IS_HOOK(name)}
        try:
            memo[id(part)].__setstate__(copy.deepcopy(facts, memo))
        except Exception as error:  # what others hold in an optimizer
            raise InvalidInput(
                f"{type(part).__name__} cannot be copied, to step over fake tensors: "
                f"{type(error).__name__}: {str(error).splitlines()[0]}. Pass a function from "
                "parameters to the optimizer"
            ) from error
    return memo[id(optimizer)], [*own.values()]


_IS_HOOK = re.compile("step$|_optimizer_").match
"""Attributes that call what is the caller's: hooks, and the `step` that schedulers put there."""


def _choose_foreach(optimizer: torch.optim.Optimizer, on_cuda: bool) -> None:
    """As PyTorch chooses for plain tensors on CUDA; for fake ones it chooses otherwise."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is not None or group.get("fused"):
            continue
        has_tensors = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
        if on_cuda and not has_tensors and not group.get("differentiable"):
            group["foreach"] = True


@dataclass(frozen=True, slots=True)
class _Stepping:
    """What a step runs: the scaler unscales, gradients are clipped, the optimizer steps. on_cuda:
    as PyTorch does for parameters on CUDA."""

    optimizer: torch.optim.Optimizer
    fakes: Mapping[str, torch.Tensor]
    scaler: torch.amp.GradScaler | None
    clips: bool
    on_cuda: bool
    tracker: Tracker

    def changes(self) -> list[MemoryChange]:
        """Raises InvalidInput if the optimizer does not run over fake tensors."""
        for name, fake in self.fakes.items():
            if fake.grad is None:
                fake.grad = torch.empty_like(fake)
            self.tracker.know(fake.grad, ("gradient", name), Holding.GRADIENTS)
        begin = len(self.tracker.changes)
        try:
            with self.tracker:
                if self.scaler is not None:
                    self.scaler.unscale_(self.optimizer)
                if self.clips:
                    foreach = True if self.on_cuda else None
                    torch.nn.utils.clip_grad_norm_([*self.fakes.values()], 1.0, foreach=foreach)
                # Not `scaler.step`, which would read whether gradients are finite.
                self.optimizer.step()
                if self.scaler is not None:
                    self.scaler.update()
        except Exception as error:  # optimizers of others fail in their own ways
            raise InvalidInput(
                f"a step of {type(self.optimizer).__name__} does not run over fake tensors, by "
                f"which its memory is known: {type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error
        return self.tracker.changes[begin:]

    def emptied(self) -> frozenset[str]:
        self.optimizer.zero_grad()
        return frozenset(name for name, fake in self.fakes.items() if fake.grad is not None)


def _with_owner(
    lasting: Container[Hashable], changes: Iterable[MemoryChange]
) -> tuple[MemoryChange, ...]:
    return tuple(
        change._replace(owner=Holding.OPTIMIZER) if change.key in lasting else change
        for change in changes
    )
