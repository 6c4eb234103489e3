"""Backward: the recorded backward pass, without autocast; and uses of autograd in the forward.

A plan returns gradients of parameters and arguments to autograd. In eager execution the forward can
also run backward itself, which adds to `.grad` at once, change which tensors require a gradient, or
return a tensor of its own that gets one. A planned step would do none of that, so each is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rockplan.errors import CaptureError, RockplanError
from rockplan.graph_builder.recorded.run import RecordedCall
from rockplan.graph_builder.tracing import addresses
from rockplan.graph_builder.tracing.outputs import (
    accumulating,
    backward_nodes,
    foreign_gradient,
    leaves_reached,
    sources_of,
)
from rockplan.graph_builder.tracing.recorder import Recorder, node_name
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.python_state.autocast import DEVICE_TYPES, OFF, under_autocast
from rockplan.python_state.distributed import (
    distributed,
    is_distributed,
    is_fake,
    local_shape,
    spec_of,
    why_not_shown,
)
from rockplan.values.interface import PlacedStrides, Strides

# Nodes of autograd whose kernels branch on values (prod_backward, cumprod_backward,
# masked_fill_backward in PyTorch) -> the operator, and a remedy.
_BY_VALUES = {
    "ProdBackward0": "prod: use x.flatten().cumprod(0)[-1]",
    "ProdBackward1": "prod: use x.cumprod(dim).select(dim, -1)",
    "MaskedFillBackward1": "the value of masked_fill: use torch.where(mask, value, x)",
}
if torch.__version__ < "2.13":
    _BY_VALUES |= dict.fromkeys(
        ("ProdBackward0", "ProdBackward1", "CumprodBackward0"),
        "prod or cumprod: use torch 2.13 and cumprod, or, for positive values, the logarithm",
    )


def refuse_gradients(recorder: Recorder, roots: Sequence[torch.Tensor]) -> None:
    """Raise CaptureError if a kernel of the backward pass from `roots` branches on values; or if
    the pass reaches a tensor that requires a gradient and is neither a parameter of the module nor
    an argument: eager would accumulate into it, a plan would not."""
    for node in backward_nodes(roots):
        name = node_name(node)
        fills_a_constant = name == "MaskedFillBackward1" and not node.next_functions[-1][0]
        if name in _BY_VALUES and not fills_a_constant:
            place = recorder.place_of(node)
            raise NAMED["gradient by values"].at(*place, operator=_BY_VALUES[name])
    for leaf in leaves_reached(roots):
        if not (is_fake(leaf) or recorder.knows(leaf)):
            raise foreign_gradient(leaf)


@dataclass(frozen=True, slots=True)
class AutogradState:
    """What autograd kept of a tensor before the run. name: in messages; gradient: its `.grad`;
    version: of `.grad`, which changes where autograd adds in place, -1 without one."""

    name: str
    tensor: torch.Tensor
    requires_grad: bool
    gradient: torch.Tensor | None
    version: int


def kept(name: str, tensor: torch.Tensor) -> AutogradState:
    """Return what autograd keeps of a tensor now."""
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
        now = kept(one.name, one.tensor)
        if now.requires_grad != one.requires_grad:
            raise NAMED["requires_grad"].error(tensor=one.name)
        if now.gradient is not one.gradient or now.version != one.version:
            raise NAMED["backward in the forward"].error(tensor=one.name)


@dataclass(frozen=True, slots=True)
class RecordedBackward:
    """What the recorded backward pass computed. targets: tensors whose gradients were asked for;
    gradients: one for each, None if the result does not depend on it; tangents: output position ->
    its incoming gradient; arrivals: for each target, how many gradients arrive at it;
    sources: for each leaf of the result, the positions of other leaves that
    its backward pass goes through; ignores_autocast: it is the same under the caller's autocast."""

    targets: list[torch.Tensor]
    gradients: tuple[torch.Tensor | None, ...]
    tangents: dict[int, torch.Tensor]
    arrivals: list[int]
    sources: tuple[tuple[int, ...], ...]
    ignores_autocast: bool

    def gradient_values(self, recorder: Recorder) -> tuple[tuple[int, int | None], ...]:
        """Return pairs (value of a target, value of its gradient; None if it has none)."""
        return tuple(
            (recorder.value(target), None if gradient is None else recorder.value(gradient))
            for target, gradient in zip(self.targets, self.gradients, strict=True)
        )

    def specs_of(
        self, recorder: Recorder, given: Sequence[torch.Tensor]
    ) -> tuple[tuple[int, Any], ...]:
        """(value, spec of its gradient, None without one) of those of `given` that are DTensors."""
        specs = dict(zip(map(id, self.targets), map(spec_of, self.gradients), strict=True))
        return tuple((recorder.value(t), specs.get(id(t))) for t in given if is_distributed(t))


def recorded_backward(
    module: nn.Module,
    recorder: Recorder,
    outputs: list[Any],
    starts: Mapping[int, Strides],
    targets: list[torch.Tensor],
) -> RecordedBackward:
    """Record the backward pass from some leaves of the result, without autocast. outputs: all
    leaves; starts: position of a leaf -> strides of its incoming gradient; targets: tensors to
    differentiate by. Raises CaptureError if the pass fails or is refused."""
    sources = sources_of(outputs)
    roots = [outputs[i] for i in starts]
    tangents = [_tangent(o, strides) for o, strides in zip(roots, starts.values(), strict=True)]
    edges = Counter(edge for node in backward_nodes(roots) for edge in node.next_functions)
    at_leaves = {id(leaf): edges[node, 0] for node, leaf in accumulating(node for node, _ in edges)}
    arrivals = [
        at_leaves.get(id(t), 0) if t.grad_fn is None else edges[t.grad_fn, t.output_nr]
        for t in targets
    ]
    recorder.begin_backward(o for o in outputs if isinstance(o, torch.Tensor))
    forward_calls = len(recorder.calls)

    def run(retain: bool) -> tuple[torch.Tensor | None, ...]:
        """Run the backward pass. retain: keep the graph for another run."""
        with recorder, torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(
                roots, targets, tangents, allow_unused=True, retain_graph=retain
            )

    try:
        with_casts: list[object] | None = None
        if any(map(torch.is_autocast_enabled, DEVICE_TYPES)):
            run(retain=True)
            with_casts = _named(recorder.calls[forward_calls:])
            del recorder.calls[forward_calls:]
        with under_autocast(OFF):
            gradients = run(retain=False)
    except RockplanError:
        raise
    except Exception as error:
        by_address = addresses.refusal(error, module)
        if by_address is not None:
            raise by_address from error
        raise CaptureError(
            f"the backward pass of the module does not run: {addresses.named_error(error)}. "
            "Check that the original module's backward works on the sample"
        ) from error
    recorder.refuse_if_refused()
    for tangent in tangents:  # of which the backward pass may read none (`sgn`)
        recorder.value(tangent)
    made = [recorder.value(g) for g in gradients if g is not None]
    recorder.refuse_unwritten(made, "a gradient is")
    return RecordedBackward(
        targets=targets,
        gradients=gradients,
        tangents=dict(zip(starts, tangents, strict=True)),
        arrivals=arrivals,
        sources=sources,
        ignores_autocast=with_casts == _named(recorder.calls[forward_calls:]),
    )


def _tangent(output: torch.Tensor, strides: Strides) -> torch.Tensor:
    kind: Any = {"dtype": output.dtype, "device": output.device}
    if not isinstance(strides, PlacedStrides):
        return torch.empty_strided(output.shape, strides, **kind)
    if why := why_not_shown(strides.spec):
        raise NAMED["distributed tensor"].error(tensor="a gradient of the result", why=why)
    shape = local_shape(strides.spec)
    return distributed(torch.empty_strided(shape, strides.strides, **kind), strides.spec)


def _named(calls: Sequence[RecordedCall]) -> list[object]:
    return [(c.call.op, [a for a in c.call.args if isinstance(a, str)]) for c in calls]
