"""Optimizer: the memory changes of a step of the real optimizer, over fake tensors.

takes: an optimizer, a factory of one, or a name; parameters on any device. returns: OptimizerSteps:
changes of the first step, which makes the state, and of a later one. guarantees: nothing of the
sizes of parameters is allocated; the caller's parameters, gradients and optimizer are left as they
are.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rockplan.errors import InvalidInput
from rockplan.fitting.changes import Holding, MemoryChange, left_alive
from rockplan.fitting.shards import ALONE, Shards
from rockplan.fitting.tracker import Tracker
from rockplan.fitting.training_step import USUAL, TrainingStep
from rockplan.python_state import trees

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
    first forward pass.

    each: of optimizers that step in backward, by the name of their parameter; then there is no
    other step.
    """

    name: str
    state_bytes: int = 0
    first: tuple[MemoryChange, ...] = ()
    later: tuple[MemoryChange, ...] = ()
    before: tuple[MemoryChange, ...] = ()
    each: Mapping[str, OptimizerSteps] = field(default_factory=dict)


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
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = {name: _fake(shards.part(p)) for name, p in parameters.items()}
        made = _optimizer_over(given, parameters, fakes)
        on_cuda = as_on_cuda or all(p.is_cuda for p in fakes.values())
        _choose_foreach(made, on_cuda)
        before, scaler = _scaler(fakes) if step.grad_scaler else ([], None)
        parts = _Stepping(made, fakes, scaler, step.clip_norm, on_cuda)
        steps = [_changes_of_step(parts, metered) for _ in range(2)]
    kept = left_alive(steps[0])
    first = tuple(map(_with_owner(kept), steps[0]))
    state_bytes = sum(change.size_bytes for change in (*kept.values(), *before))
    name = _name(optimizer, made)
    return OptimizerSteps(name, state_bytes, first, tuple(steps[1]), tuple(before))


def _in_backward(each: Mapping[str, OptimizerSteps]) -> OptimizerSteps:
    """Return the steps of optimizers that step in backward."""
    name = next((steps.name for steps in each.values()), "none")
    state_bytes = sum(steps.state_bytes for steps in each.values())
    return OptimizerSteps(name, state_bytes, each=each)


def _fake(parameter: torch.Tensor) -> torch.Tensor:
    """Return a fake parameter like `parameter` (of a DTensor, like the part of this rank) with a
    gradient. One on the meta device becomes one on the CPU."""
    own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    device = torch.device("cpu") if own.is_meta else own.device
    made = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=device)
    fake = torch.nn.Parameter(made)
    fake.grad = torch.empty_like(made)
    return fake


def _optimizer_over(
    optimizer: Factory | torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    fakes: Mapping[str, torch.Tensor],
) -> torch.optim.Optimizer:
    """Make the optimizer (by a function, or like one of the caller's) over the fake parameters.
    Raises InvalidInput if it cannot be made."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return _over_fakes(optimizer, parameters, fakes)
    try:
        made = optimizer([*fakes.values()])
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
) -> torch.optim.Optimizer:
    """Return a copy of the caller's optimizer without its state, in whose groups `fakes` stand for
    those `parameters` that it has, by name. Raises InvalidInput if it has none of them."""
    memo: dict[int, Any] = {id(p): fakes[name] for name, p in parameters.items()}
    groups = []
    for group in optimizer.param_groups:
        own = [memo[id(p)] for p in group["params"] if id(p) in memo]
        others = {key: copy.deepcopy(v) for key, v in group.items() if key != "params"}
        groups.append({**others, "params": own})
    made: Any = copy.copy(optimizer)
    made.state = type(optimizer.state)(dict)
    made.param_groups = [group for group in groups if group["params"]]
    if not made.param_groups:
        raise InvalidInput("the optimizer has none of the parameters that have gradients")
    return made  # type: ignore[no-any-return]


def _choose_foreach(optimizer: torch.optim.Optimizer, on_cuda: bool) -> None:
    """Set `foreach` in the optimizer's groups to what PyTorch chooses for plain tensors on CUDA;
    for fake tensors it chooses otherwise. Groups that say what they want stay."""
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

    def run(self) -> None:
        """Run one step over the fake parameters: unscale gradients, clip them, step, update the
        scaler; what is not used is left out."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clips:
            foreach = True if self.on_cuda else None
            torch.nn.utils.clip_grad_norm_([*self.fakes.values()], 1.0, foreach=foreach)
        # Not `scaler.step`, which would read whether gradients are finite.
        self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()


def _scaler(
    fakes: Mapping[str, torch.Tensor],
) -> tuple[list[MemoryChange], torch.amp.GradScaler]:
    """Return (changes, scaler): a GradScaler that has scaled a loss on the device of `fakes`, and
    the allocations that it keeps since."""
    device = next(iter(fakes.values())).device
    scaler = torch.amp.GradScaler(device.type)
    with Tracker(Holding.OPTIMIZER) as tracker:
        scaler.scale(torch.zeros((), device=device))
    gc.collect()
    return [*left_alive(tracker.changes).values()], scaler


def _changes_of_step(parts: _Stepping, metered: bool) -> list[MemoryChange]:
    """Run one optimizer step over fake tensors and return its allocations and frees. metered: with
    temporary memory inside of operators. Raises InvalidInput if it does not run so."""
    optimizer, fakes = parts.optimizer, parts.fakes
    tracker = Tracker(Holding.OPTIMIZER_TEMPORARIES, metered=metered)
    for name, fake in fakes.items():
        tracker.know(fake, ("parameter", name), Holding.PARAMETERS)
        assert fake.grad is not None
        tracker.know(fake.grad, ("gradient", name), Holding.GRADIENTS)
    for number, leaf in enumerate(trees.tree_leaves([*optimizer.state.values()])):
        if isinstance(leaf, torch.Tensor):
            tracker.know(leaf, ("state", number), Holding.OPTIMIZER)
    try:
        with tracker:
            parts.run()
    except Exception as error:  # optimizers of others fail in their own ways
        raise InvalidInput(
            f"a step of {type(optimizer).__name__} does not run over fake tensors, by which its "
            f"memory is known: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    return tracker.changes


def _with_owner(kept: Mapping[Hashable, MemoryChange]) -> Callable[[MemoryChange], MemoryChange]:
    """Return a function that gives changes among `kept` (by key) the optimizer as their owner, and
    returns others as they are."""

    def owned(change: MemoryChange) -> MemoryChange:
        if kept.get(change.key) is not change:
            return change
        return MemoryChange(change.key, change.size_bytes, Holding.OPTIMIZER)

    return owned


def _name(optimizer: OptimizerLike, made: torch.optim.Optimizer) -> str:
    return optimizer if isinstance(optimizer, str) else type(made).__name__
