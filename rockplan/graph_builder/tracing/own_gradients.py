"""Own gradients: uses of autograd in the forward that a plan does not repeat.

A plan returns gradients of parameters and arguments to autograd. In eager execution the forward can
also run backward itself, which adds to `.grad` at once, change which tensors require a gradient, or
return a tensor of its own that gets one. A planned step would do none of that, so each is refused.
takes: tensors of a recorded run. guarantees: unless refused, all gradients come from the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rockplan.graph_builder.tracing.refusals import NAMED


@dataclass(frozen=True, slots=True)
class AutogradState:
    """What autograd kept of a tensor before the run. name: in messages; gradient: its `.grad`;
    version: of `.grad`, which changes where autograd adds in place, -1 without one."""

    name: str
    tensor: torch.Tensor
    requires_grad: bool
    gradient: torch.Tensor | None
    version: int


def kept(named: Mapping[str, torch.Tensor]) -> tuple[AutogradState, ...]:
    """Return what autograd keeps of named tensors, before a run."""
    return tuple(_kept(name, tensor) for name, tensor in named.items())


def _kept(name: str, tensor: torch.Tensor) -> AutogradState:
    gradient = tensor.grad
    version = -1 if gradient is None else gradient._version
    return AutogradState(name, tensor, tensor.requires_grad, gradient, version)


def refuse_changes(before: Iterable[AutogradState]) -> None:
    """Raise CaptureError if the run has changed `requires_grad` or `.grad` of a leaf, or written
    something with a gradient into a tensor without. before: states before the run."""
    for one in before:
        if not one.tensor.is_leaf:
            if not one.requires_grad:
                raise NAMED["write of what has a gradient"].error(tensor=one.name)
            continue
        now = _kept(one.name, one.tensor)
        if now.requires_grad != one.requires_grad:
            raise NAMED["requires_grad"].error(tensor=one.name)
        if now.gradient is not one.gradient or now.version != one.version:
            raise NAMED["backward in the forward"].error(tensor=one.name)


def refuse_history(constants: Sequence[torch.Tensor]) -> None:
    """Raise if the run has written something with a gradient into `constants`, tensors that are
    neither the module's nor the caller's."""
    for tensor in constants:
        raise NAMED["write into another tensor"].error(shape=tuple(tensor.shape))


def refuse_of_result(output: torch.Tensor, position: int) -> None:
    """Raise if a result has a gradient of its own, which the caller would find in `.grad`."""
    if output.requires_grad and (output.is_leaf or output.retains_grad):
        raise NAMED["result with a gradient of its own"].error(position=position)


def refuse_none(gradients: Sequence[torch.Tensor | None]) -> None:
    """Raise if the backward pass reaches no tensor of the caller."""
    if all(gradient is None for gradient in gradients):
        raise NAMED["detached"].error()
