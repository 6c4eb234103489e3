"""Free memory: the budget 'auto' -> the bytes that a step may use on the device of a module.

takes: a Budget, the module that is planned, its optimizer. returns: a Budget in bytes; a Room, in
which plans are made. guarantees: what is allocated already (parameters, buffers, optimizer state,
other models and processes) is left alone, and there is room for the parameters' gradients that do
not exist yet, and with an optimizer for its state and its step. Without an optimizer, memory that
only a later step allocates is unknown: leave room ('auto-4GB'). With one, gradients count only from
when they come: the timeline of a step with the plan stays within the free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from rockplan.budget import Budget, parse_budget
from rockplan.errors import InvalidBudget
from rockplan.fitting.allocator import rounded
from rockplan.fitting.changes import left_alive, peak_of
from rockplan.fitting.gpus import gpu
from rockplan.fitting.optimizer import OptimizerLike, OptimizerSteps, optimizer_steps
from rockplan.fitting.timeline import Timeline, passes_of, timeline_of
from rockplan.fitting.training_step import USUAL, TrainingStep
from rockplan.machine import available_bytes
from rockplan.options import Options
from rockplan.python_state.distributed import own_bytes
from rockplan.solving.agreement import ALONE, Agreement
from rockplan.values.interface import Interface
from rockplan.values.plan import Plan

MARGIN = 0.1
"""Share of what is free that stays free, for fragmentation of the caching allocator and for what
libraries (cuBLAS, cuDNN, NCCL) allocate beside it at their first use."""


def in_bytes(
    budget: Budget, model: nn.Module, optimizer: OptimizerLike = None, step: TrainingStep = USUAL
) -> Budget:
    """Return `budget`, with 'auto' turned into bytes.

    These are what is free on the device now (on CUDA including unused memory of the caching
    allocator; on CPU what the machine and control groups leave), less MARGIN of it, gradients that
    do not exist yet, the copy of an average, state that `optimizer` does not hold yet, memory of
    its steps inside backward, with an optimizer also workspaces of cuBLAS, and the bytes that the
    budget leaves free.

    Raises InvalidBudget if the model is not on one such device, if nothing is left, and if the
    optimizer's step needs more; InvalidInput for an optimizer as `rockplan.fit` does.
    """
    if not budget.is_auto:
        return budget
    device = _device(model)
    free_bytes = _free_bytes(device)
    usable_bytes = int(free_bytes * (1 - MARGIN))
    own = _of_optimizer(optimizer, model, step)
    sums = optimizer is not None and device.type == "cuda"
    averaged = (*model.parameters(), *model.buffers()) if step.average else ()
    coming = {
        "gradients that do not exist yet": _blocks(
            own_bytes(p) for p in model.parameters() if p.requires_grad and p.grad is None
        ),
        "the optimizer's state": own.state_bytes,
        "its steps inside of backward": own.inside_bytes,
        "averages": _blocks(map(own_bytes, averaged)),
        "workspaces": 2 * gpu(device).cublas_bytes if sums else 0,
    }
    left_bytes = usable_bytes - sum(coming.values()) - budget.reserve_bytes
    if left_bytes <= 0 or left_bytes < own.step_bytes:
        needs = ", ".join(f"{name} need {size}" for name, size in coming.items() if size)
        more = f", a step of the optimizer needs {own.step_bytes} more" if own.step_bytes else ""
        left = "less remains" if left_bytes > 0 else "nothing remains for activations"
        raise InvalidBudget(
            f"budget 'auto': {device} has {free_bytes} bytes free, of which {usable_bytes} are "
            f"used at most; {needs or 'nothing else comes'}{more}, and {budget.reserve_bytes} "
            f"shall be left: {left}. Free memory on the device, or plan a smaller model"
        )
    return replace(budget, is_auto=False, reserve_bytes=0, size_bytes=left_bytes)


def agreed_budget(
    budget: object,
    model: nn.Module,
    optimizer: OptimizerLike,
    agreed: Agreement,
    step: TrainingStep = USUAL,
) -> Budget:
    """Return the budget; 'auto' is turned into bytes, the fewest of all processes that plan
    together. Errors are those of `in_bytes` and `parse_budget`."""
    parsed = parse_budget(budget)
    wanted = in_bytes(parsed, model, optimizer, step)
    if not parsed.is_auto:
        return wanted
    sizes = agreed.gathered(str(parsed), wanted.size_bytes or 0)
    return replace(wanted, size_bytes=min(sizes.values()))


Made = TypeVar("Made")
PLANS = 3
"""Plans that are tried before the one that leaves room for all gradients at once."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory in which plans are made. budget: leaves room for everything that comes later, all at
    once; usable_bytes: what a whole training step may use, gradients and state included, if an
    optimizer was given; else None."""

    budget: Budget
    usable_bytes: int | None = None
    steps: OptimizerSteps = OptimizerSteps("none")
    step: TrainingStep = USUAL

    def filled(
        self,
        make: Callable[[Budget], Made],
        plan_of: Callable[[Made], tuple[Plan, Interface]],
        least_bytes: int = 0,
        agreed: Agreement = ALONE,
    ) -> Made:
        """Return what `make` makes of the largest of PLANS tried budgets with which a whole
        training step stays within `usable_bytes`; of the careful one, `self.budget`, if nothing
        else does.

        The first budget leaves no room for gradients; later ones leave as much as the last plan
        lacked. plan_of: the plan and interface of what `make` returned; least_bytes: a share never
        means less; agreed: processes that try the same budgets. Raises InfeasibleBudget.
        """
        careful = replace(self.budget, least_bytes=least_bytes)
        if self.usable_bytes is None or careful.size_bytes is None:
            return make(careful)
        size_bytes = max(self.usable_bytes - _state_bytes(self.steps), careful.size_bytes)
        for _ in range(PLANS):
            made = make(replace(careful, size_bytes=size_bytes))
            plan, interface = plan_of(made)
            changes = self.timeline(plan, interface).changes
            blocks = (c._replace(size_bytes=rounded(c.size_bytes)) for c in changes)
            own_bytes = peak_of(blocks).size_bytes - self.usable_bytes
            excess_bytes = max(agreed.gathered(("step", size_bytes), own_bytes).values())
            if excess_bytes <= 0 or size_bytes <= careful.size_bytes:
                return made
            size_bytes = max(min(plan.peak_bytes, size_bytes) - excess_bytes, careful.size_bytes)
        return make(careful)

    def timeline(self, plan: Plan, interface: Interface) -> Timeline:
        """Return the memory over time of a first and of a later training step that run `plan`,
        optimizer included."""
        return timeline_of(
            {},
            passes_of(plan.graph, plan.schedule, interface, self.steps),
            self.steps,
            accumulate=self.step.accumulate,
            set_to_none=self.step.set_to_none,
        )


def room_of(
    budget: object,
    model: nn.Module,
    optimizer: OptimizerLike,
    step: TrainingStep,
    agreed: Agreement,
    options: Options,
) -> Room:
    """Return what plans of `model` may take: the budget (in bytes if it is 'auto'), and for 'auto'
    with an optimizer the memory of its steps beside it. Raises as `agreed_budget`."""
    careful = agreed_budget(budget, model, optimizer, agreed, step)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parse_budget(budget).is_auto or optimizer is None or not trained:
        return Room(careful, step=step)
    room = Room(careful, None, optimizer_steps(optimizer, trained, step=step), step)
    if options.in_flight > 1:  # timelines have one call at a time
        return room
    assert careful.size_bytes is not None
    # The timeline counts all gradients and state, those that exist already too.
    gradients_bytes = _blocks(map(own_bytes, trained.values()))
    inside_bytes = max(map(_beside_state, room.steps.each.values()), default=0)
    usable_bytes = careful.size_bytes + gradients_bytes + _state_bytes(room.steps) + inside_bytes
    return replace(room, usable_bytes=usable_bytes)


def _device(model: nn.Module) -> torch.device:
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or next(iter(devices)).type not in ("cuda", "cpu"):
        names = ", ".join(sorted(map(str, devices))) or "no device"
        raise InvalidBudget(
            f"budget 'auto' needs a model on one device, CUDA or CPU, whose free memory is known; "
            f"this one is on {names}. Write bytes, '2GB', a share such as '40%', or 'min'"
        )
    return devices.pop()


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused_bytes
    return machine_bytes()


def machine_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may still take: the least of what the machine
    has available and what each control group leaves. root: of the file system. Raises InvalidBudget
    if Linux does not say it."""
    known = available_bytes(root)
    if known is None:
        raise InvalidBudget(
            "budget 'auto': what the machine has free is not known here, without /proc/meminfo. "
            "Write bytes, '2GB', a share such as '40%', or 'min'"
        )
    return known


@dataclass(frozen=True, slots=True)
class _Coming:
    """Memory that an optimizer will take: bytes of its state that do not exist yet, and the most
    that a step takes beside state: after the backward pass, when activations are gone (step_bytes),
    or inside of it (inside_bytes)."""

    state_bytes: int = 0
    step_bytes: int = 0
    inside_bytes: int = 0


def _of_optimizer(optimizer: OptimizerLike, model: nn.Module, step: TrainingStep) -> _Coming:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if optimizer is None or not trained:
        return _Coming()
    steps = optimizer_steps(optimizer, trained, step=step)
    inside_bytes = max(map(_beside_state, steps.each.values()), default=0)
    held_bytes = _blocks(change.size_bytes for change in steps.held)
    return _Coming(max(_state_bytes(steps) - held_bytes, 0), _beside_state(steps), inside_bytes)


def _state_bytes(steps: OptimizerSteps) -> int:
    each = (change for own in steps.each.values() for change in left_alive(own.first).values())
    kept = (*steps.before, *left_alive(steps.first).values(), *each)
    return _blocks(change.size_bytes for change in kept)


def _beside_state(steps: OptimizerSteps) -> int:
    kept_bytes = sum(change.size_bytes for change in left_alive(steps.first).values())
    first_bytes = peak_of(steps.first).size_bytes - kept_bytes
    return max(first_bytes, peak_of(steps.later).size_bytes, 0)


def _blocks(sizes: Iterable[int]) -> int:
    return sum(map(rounded, sizes))
