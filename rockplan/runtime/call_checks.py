"""Checks of a call: errors where a planned module cannot run, and warnings about what a user should
know."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rockplan.errors import InfeasibleBudget, StalePlan, UnsupportedModel
from rockplan.python_state.distributed import is_fake
from rockplan.python_state.hooks import is_foreign
from rockplan.python_state.leftovers import variables_of
from rockplan.runtime.differences import Differences
from rockplan.values.plan import format_bytes


def refuse_transforms() -> None:
    """Raise StalePlan under torch.func transforms and forward-mode derivatives."""
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


def refuse_capture(planned: nn.Module, leaves: Sequence[Any]) -> None:
    """Raise UnsupportedModel if `planned` is being captured, as a part of a module that is planned
    or exported: then its parameters or the `leaves` of its arguments are fake tensors."""
    if any(map(is_fake, (*leaves, *planned.parameters()))):
        raise UnsupportedModel(
            f"a submodule, {type(planned).__qualname__}, is planned already; plan (or export, with "
            "torch.export) the whole with the original module in its place"
        )


def warn_of_saved_tensor_hooks() -> None:
    """Warn if hooks on saved tensors are active that are not PyTorch's, and so see nothing."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and not str(hooks[0].__module__).startswith("torch."):
        warnings.warn(
            "hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks) see nothing of what "
            "a planned module keeps for its backward pass: those that change values (compression) "
            "have no effect on it. Use the original module, or leave them out around the planned "
            "one",
            stacklevel=2,
        )


def under_checkpoint() -> bool:
    """True in a forward under `torch.utils.checkpoint` with use_reentrant=False."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


CHECKPOINT = "checkpoint"
COMPILED = "compiled"
SHARDING = "sharding"
"""Keys of warnings that are given once for all blocks of a model."""


def is_compiled(planned: nn.Module) -> bool:
    """True in a call of `planned` that `torch.compile`, or `Module.compile`, has wrapped."""
    if planned._compiled_call_impl is not None:
        return True
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return False
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            break
        wrapper = variables_of(frame).get("self")
        if isinstance(wrapper, eval_frame.OptimizedModule):
            return wrapper._orig_mod is planned
        frame = frame.f_back
    return False


_FRAMES = 16
"""Frames between a call of a compiled module and its forward, at most: 9 with torch 2.13."""


def warn_of_compiled(planned: nn.Module) -> None:
    """Warn that torch.compile of a planned module has no effect."""
    warnings.warn(
        f"torch.compile of a planned {type(planned).__qualname__} compiles nothing: its plan runs "
        "as it is. Leave torch.compile out, and plan with rockplan.Options(compile=True): kernels "
        "of the same compiler, under the budget",
        stacklevel=2,
    )


def warn_of_sharding(planned: nn.Module, is_block: bool) -> None:
    """Warn that the predicted peak, made before, leaves out what `fully_shard` gathers and
    exchanges. is_block: `planned` is a block planned by solve_blocks."""
    whole_bytes = sum(p.nbytes for p in planned.parameters())
    instead = "call fully_shard first, then rockplan.solve_blocks, which counts them"
    if not is_block:
        instead = f"leave that much free, or, in place of rockplan.solve, {instead}"
    warnings.warn(
        f"a planned {type(planned).__qualname__} is sharded by fully_shard since it was planned: "
        "the parameters that this gathers, and what it exchanges, are not in the predicted peak "
        f"({format_bytes(whole_bytes)} for such a module; about two are gathered at once, one more "
        f"for each that is prefetched, all without resharding). To have them in it, {instead}",
        stacklevel=2,
    )


def warn_of_checkpoint(planned: nn.Module) -> None:
    """Warn that a checkpoint around a planned block only costs time."""
    warnings.warn(
        f"a planned block, {type(planned).__qualname__}, runs under torch.utils.checkpoint, which "
        "runs its forward again for nothing: the plan has decided what is kept. Switch it off "
        "(model.gradient_checkpointing_disable(), or gradient_checkpointing=False where a trainer "
        "takes it)",
        stacklevel=2,
    )


def warn_of_dispatch_modes() -> None:
    """Warn if a TorchDispatchMode of others is active: it sees the plan's operators."""
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


TOO_OFTEN = 4
"""From so many plans on that differ in the module's state alone, a further one is warned of. (Train
and eval mode, or layers frozen one after the other, do not need more.)"""


def warn_of_changes(count: int, changes: Differences) -> None:
    """Warn that plans for one call accumulate because the module's own values change. count: plans
    made for the call; changes: what differs this time."""
    warnings.warn(
        f"the same call is planned for the {ordinal(count + 1)} time, because {changes} (changed "
        "again). If the forward does not read it, keep it outside of the module; if it does, pass "
        "the value in as a tensor",
        stacklevel=2,
    )


def warn_of_mismatch(changes: Differences) -> None:
    """Warn that a step runs the original forward, since it is not as planned. changes: how."""
    advice = changes.advice or "Options(on_mismatch='replan') plans for such steps, once for each"
    warnings.warn(
        "this step is not as planned and runs the original forward, with eager's memory, as all "
        f"such steps will (Options(on_mismatch='original')): {changes}. {advice}",
        stacklevel=2,
    )


def warn_of_original(error: InfeasibleBudget, changes: Differences) -> None:
    """Warn that calls of a kind run the original forward, since no plan for them fits. changes: how
    they differ from what was planned."""
    warnings.warn(
        f"no plan for this call fits the budget of {error.budget_bytes} bytes (the smallest needs "
        f"{error.minimum_bytes}), so it and others like it run the original forward, with eager's "
        f"memory (Options(on_infeasible='original')): {changes}",
        stacklevel=2,
    )


def ordinal(number: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    ending = "th" if number % 100 in (11, 12, 13) else endings.get(number % 10, "th")
    return f"{number}{ending}"
