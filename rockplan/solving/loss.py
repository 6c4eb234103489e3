"""The caller's loss: what it takes beside a plan, which gradients it gives, and a plan for both.

takes: a function that computes a loss from the result of a module; a captured call. returns: bytes
for each byte of the results, and strides of their gradients, with which later kinds of call are
planned as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch

from rockplan.budget import Budget
from rockplan.errors import InfeasibleBudget, InvalidInput
from rockplan.graph_builder.costs.ruler import rise_of
from rockplan.graph_builder.recorded.specs import dtype_of, tensor_of
from rockplan.oracles.constraints import with_room_for_loss
from rockplan.python_state import trees
from rockplan.python_state.autocast import OFF, under_autocast
from rockplan.python_state.distributed import strides_of
from rockplan.runtime.program import ModuleCall
from rockplan.solving.captured_calls import CapturedCall
from rockplan.values.graph import CDGraph
from rockplan.values.interface import Interface, OutputLeaf, Precedent, Strides
from rockplan.values.plan import Plan, format_bytes

_LOGGER = logging.getLogger("rockplan")

Loss = Callable[[Any], torch.Tensor]
"""Computes a scalar from the result of a module."""

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """A loss of the caller's. ratio: bytes that it and its backward pass take at their peak, for
    each byte of the results that get a gradient; starts: from what the backward pass starts, None
    if that is not known."""

    ratio: float = 0.0
    starts: Precedent | None = None

    def is_as_captured(self, source: CapturedCall) -> bool:
        """Return whether the backward pass was captured from what it starts from."""
        graph, outputs = source.lowered.graph, source.lowered.interface.outputs
        tangents = {i: leaf.tangent for i, leaf in enumerate(outputs)}
        found = {i: graph.values[t].spec.stride for i, t in tangents.items() if t is not None}
        return self.starts is None or self.starts.incoming == found

    def of(self, call: ModuleCall) -> ModuleCall:
        """Return the call with a backward pass that starts as this loss has it, if nothing else is
        known of that."""
        return replace(call, incoming=call.incoming or self.starts)


NO_LOSS = MeasuredLoss()


def measured_loss(loss: Loss, source: CapturedCall, chosen: Collection[int] | None) -> MeasuredLoss:
    """Run `loss` and its backward pass on random results like those of the call. chosen: leaves
    that backward starts from, if the caller says so. Raises InvalidInput if it does not run."""
    graph, interface = source.lowered.graph, source.lowered.interface
    with torch.random.fork_rng():
        leaves = [_result(graph, leaf) for leaf in interface.outputs]
    result = trees.tree_unflatten(
        [leaves[leaf.first] for leaf in interface.outputs], source.run.output_spec
    )
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    strides: dict[int, Strides] = {}
    for i, leaf in enumerate(interface.outputs):
        if leaf.first == i and leaf.value is not None and leaf.requires_grad:
            leaves[i].register_hook(lambda g, i=i: strides.update({i: strides_of(g)}))

    def step() -> None:
        total = loss(result)
        torch.clear_autocast_cache()
        with under_autocast(OFF):
            total.backward()
        for tensor in tensors:
            tensor.grad = None

    try:
        with torch.random.fork_rng(), torch.enable_grad():
            step()
            rise_bytes = rise_of(step, tensors[0].device)
    except Exception as error:
        raise InvalidInput(
            f"loss= does not run on a result like that of the sample: {type(error).__name__}: "
            f"{error}. Pass a function of the result alone that returns a scalar"
        ) from error
    ratio = rise_bytes / max(_result_bytes(graph, interface, strides), 1)
    if not strides or any(leaf.spec is not None for leaf in interface.outputs):
        return MeasuredLoss(ratio)
    starts = {i: strides.get(interface.outputs[i].first) for i in chosen or strides}
    shapes = {i: tuple(leaves[i].shape) for i in starts}
    return MeasuredLoss(ratio, Precedent(starts, is_repeated=False, shapes=shapes))


def _result(graph: CDGraph, leaf: OutputLeaf) -> Any:
    if leaf.value is None:
        return leaf.literal
    return tensor_of(graph.values[leaf.value].spec, _random).requires_grad_(leaf.requires_grad)


def _random(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    is_number = dtype.is_floating_point or dtype.is_complex
    return (torch.rand if is_number else torch.zeros)(elements, dtype=dtype, device=device)


def _result_bytes(graph: CDGraph, interface: Interface, starts: Collection[int]) -> int:
    values = (interface.outputs[i].value for i in starts)
    specs = [graph.values[v].spec for v in values if v is not None]
    return sum(dtype_of(spec).itemsize * prod(spec.shape) for spec in specs)


def beside_loss(
    made: Made,
    parts: Callable[[Made], tuple[Plan, Interface]],
    ratio: float,
    make: Callable[[Budget], Made],
) -> Made:
    """Return what was made, or what `make` makes for fewer bytes if the loss would take the step
    above its budget. parts: its plan, and the interface of that; ratio: of `MeasuredLoss`. Logs if
    no plan leaves the room."""
    if not ratio:
        return made
    plan, interface = parts(made)
    starts = [i for i, leaf in enumerate(interface.outputs) if leaf.tangent is not None]
    rise_bytes = int(ratio * _result_bytes(plan.graph, interface, starts))
    excess_bytes = plan.saved_bytes + rise_bytes - plan.budget_bytes
    if excess_bytes <= 0:
        return made
    room_bytes = with_room_for_loss(plan.graph, plan.eager_peak_bytes).forward[-1].workspace_bytes
    lacking_bytes = max(excess_bytes, rise_bytes - room_bytes)
    try:
        return make(Budget(size_bytes=max(plan.budget_bytes - lacking_bytes, 1)))
    except InfeasibleBudget as error:
        _LOGGER.warning(
            "the loss takes %s beside the plan, and a step needs %d bytes, %.1f%% above its budget "
            "of %d; a budget of %d bytes leaves it the room, or a forward that returns the loss, "
            "which is planned with the rest",
            *(format_bytes(rise_bytes), plan.saved_bytes + rise_bytes),
            *(100 * excess_bytes / plan.budget_bytes, plan.budget_bytes),
            error.minimum_bytes + lacking_bytes,
        )
        return made
