"""Available: the budget 'auto' -> the bytes that a step may use on the device of a module.

takes: a Budget, the module that is planned, its optimizer. returns: a Budget that is not 'auto'; a
Room, in which plans are made. guarantees: what is allocated already (parameters, buffers, optimizer
state, other models and processes) is left alone, and there is room for the parameters' gradients
that do not exist yet, and with an optimizer for its state and its step. Without one what only a
later step allocates is not known: leave room ('auto-4GB'). With one gradients take no room before
they come: the timeline of a step with the plan stays within what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from rockplan.agreement import ALONE, Agreement
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
from rockplan.python_state import trees
from rockplan.values.interface import Interface
from rockplan.values.plan import Plan

MARGIN = 0.1
"""Share of what is free that stays free, for fragmentation of the caching allocator and for what
libraries (cuBLAS, cuDNN, NCCL) allocate beside it at their first use."""


def in_bytes(
    budget: Budget,
    model: nn.Module,
    optimizer: OptimizerLike = None,
    step: TrainingStep = USUAL,
) -> Budget:
    """`budget`, where it is 'auto' in bytes: what is free on the device now (on CUDA with what the
    caching allocator holds unused; on CPU what the machine and control groups leave), less MARGIN
    of it, gradients that do not exist yet, the copy of an average, what `optimizer` does not hold
    yet, with what steps inside of backward take, and the workspaces for products that come with it
    in the sum, and the bytes that the budget leaves free.

    Raises InvalidBudget where the model is not on one such device, where nothing is left, and where
    the optimizer's step needs more; InvalidInput for an optimizer as `rockplan.fit` does.
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
        "gradients that do not exist yet": _missing_gradients_bytes(model),
        "the optimizer's state": own.state_bytes,
        "its steps inside of backward": own.inside_bytes,
        "averages": _blocks(t.nbytes for t in averaged),
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
    """The budget, where it is 'auto' the least bytes of all processes that plan together. Errors
    are those of `in_bytes` and `parse_budget`."""
    parsed = parse_budget(budget)
    wanted = in_bytes(parsed, model, optimizer, step)
    if not parsed.is_auto:
        return wanted
    sizes = agreed.gathered(str(parsed), wanted.size_bytes or 0)
    return replace(wanted, size_bytes=min(sizes.values()))


Made = TypeVar("Made")
PLANS = 3
"""That are made before the one that has room for all gradients at once."""


@dataclass(frozen=True, slots=True)
class Room:
    """budget: in which there is room for all that comes, together. usable_bytes: for all of a step,
    beyond what stays as it is, where an optimizer is given, whose steps these are; else None."""

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
        """What `make` makes of the largest budget with which a step stays within what is usable, of
        those that are tried: without any room for gradients, with less where they need some.
        least_bytes: of a share. Raises InfeasibleBudget."""
        careful = replace(self.budget, least_bytes=least_bytes)
        if self.usable_bytes is None or careful.size_bytes is None:
            return make(careful)
        size_bytes = max(self.usable_bytes - _state_bytes(self.steps), careful.size_bytes)
        for _ in range(PLANS):
            made = make(replace(careful, size_bytes=size_bytes))
            plan, interface = plan_of(made)
            own_bytes = self._step_bytes(plan, interface) - self.usable_bytes
            excess_bytes = max(agreed.gathered(("step", size_bytes), own_bytes).values())
            if excess_bytes <= 0 or size_bytes <= careful.size_bytes:
                return made
            size_bytes = max(min(plan.peak_bytes, size_bytes) - excess_bytes, careful.size_bytes)
        return make(careful)

    def timeline(self, plan: Plan, interface: Interface) -> Timeline:
        """Of a first step and a later one with a plan."""
        return timeline_of(
            {},
            passes_of(plan.graph, plan.schedule, interface, self.steps),
            self.steps,
            accumulate=self.step.accumulate,
            set_to_none=self.step.set_to_none,
        )

    def _step_bytes(self, plan: Plan, interface: Interface) -> int:
        """At most, in blocks."""
        changes = self.timeline(plan, interface).changes
        blocks = (replace(c, size_bytes=rounded(c.size_bytes)) for c in changes)
        return peak_of(blocks).size_bytes


def room_of(
    budget: object,
    model: nn.Module,
    optimizer: OptimizerLike,
    step: TrainingStep,
    agreed: Agreement,
    options: Options,
) -> Room:
    """For plans of `model`: what the budget says, in bytes where it is 'auto'; with options.reserve
    and an optimizer its steps for any budget. Raises as `agreed_budget`."""
    careful = agreed_budget(budget, model, optimizer, agreed, step)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    is_auto = parse_budget(budget).is_auto
    if not (is_auto or options.reserve) or optimizer is None or not trained:
        return Room(careful, step=step)
    room = Room(careful, None, optimizer_steps(optimizer, trained, step=step), step)
    # A timeline is of one call at once.
    if not is_auto or options.in_flight > 1:
        return room
    assert careful.size_bytes is not None
    # Gradients and state that are there are part of the timeline, too.
    gradients_bytes = _blocks(p.nbytes for p in trained.values())
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
    """What the machine has available and each control group leaves to this process, the least.
    root: of the file system. Raises InvalidBudget where Linux does not say it."""
    known = available_bytes(root)
    if known is None:
        raise InvalidBudget(
            "budget 'auto': what the machine has free is not known here, without /proc/meminfo. "
            "Write bytes, '2GB', a share such as '40%', or 'min'"
        )
    return known


def _missing_gradients_bytes(model: nn.Module) -> int:
    return _blocks(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)


@dataclass(frozen=True, slots=True)
class _Coming:
    """Bytes of state that is to come, and what a step takes at most beyond it: after the backward
    pass, when activations are gone, or inside of it, beside them."""

    state_bytes: int = 0
    step_bytes: int = 0
    inside_bytes: int = 0


def _of_optimizer(optimizer: OptimizerLike, model: nn.Module, step: TrainingStep) -> _Coming:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if optimizer is None or not trained:
        return _Coming()
    steps = optimizer_steps(optimizer, trained, step=step)
    states = optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else {}
    held = trees.tree_leaves([states[p] for p in trained.values() if p in states])
    held_bytes = _blocks(t.nbytes for t in held if isinstance(t, torch.Tensor))
    inside_bytes = max(map(_beside_state, steps.each.values()), default=0)
    return _Coming(max(_state_bytes(steps) - held_bytes, 0), _beside_state(steps), inside_bytes)


def _state_bytes(steps: OptimizerSteps) -> int:
    """What stays after steps, in blocks."""
    each = (change for own in steps.each.values() for change in left_alive(own.first).values())
    kept = (*steps.before, *left_alive(steps.first).values(), *each)
    return _blocks(change.size_bytes for change in kept)


def _beside_state(steps: OptimizerSteps) -> int:
    """What one step takes at most."""
    kept_bytes = sum(change.size_bytes for change in left_alive(steps.first).values())
    first_bytes = peak_of(steps.first).size_bytes - kept_bytes
    return max(first_bytes, peak_of(steps.later).size_bytes, 0)


def _blocks(sizes: Iterable[int]) -> int:
    return sum(map(rounded, sizes))
