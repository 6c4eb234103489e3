"""The caller's loss: what it takes beside a plan, measured once, and a plan that leaves it room.

takes: a function that computes a loss from the result of a module; a program. returns: bytes for
each byte of incoming gradients, which later kinds of call are planned with as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from rockplan.budget import Budget
from rockplan.errors import InfeasibleBudget, InvalidInput
from rockplan.graph_builder.costs.ruler import rise_of
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.oracles.constraints import with_room_for_loss
from rockplan.python_state import trees
from rockplan.python_state.autocast import OFF, under_autocast
from rockplan.runtime.program import PlannedProgram
from rockplan.values.graph import CALLER_LOSS, DataKind
from rockplan.values.plan import Plan, format_bytes

_LOGGER = logging.getLogger("rockplan")


def loss_ratio(loss: Callable[[Any], torch.Tensor], program: PlannedProgram) -> float:
    """Return how many bytes `loss` and its backward pass take at their peak, for each byte of the
    gradients that they make. Measured on random results like those of `program`. Raises
    InvalidInput if it does not run on them."""
    leaves = [_result(program, position) for position in range(len(program.interface.outputs))]
    result = trees.tree_unflatten(leaves, program.output_spec)

    def step() -> None:
        total = loss(result)
        torch.clear_autocast_cache()
        with under_autocast(OFF):
            total.backward()  # type: ignore[no-untyped-call]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                leaf.grad = None

    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            step()
            rise_bytes = rise_of(step, tensors[0].device)
    except Exception as error:
        raise InvalidInput(
            f"loss= does not run on a result like that of the sample: {type(error).__name__}: "
            f"{error}. Pass a function of the result alone that returns a scalar"
        ) from error
    return rise_bytes / max(_gradient_bytes(program.plan), 1)


def _result(program: PlannedProgram, position: int) -> Any:
    leaf = program.interface.outputs[program.interface.outputs[position].first]
    if leaf.value is None:
        return leaf.literal
    spec = program.plan.graph.values[leaf.value].spec
    dtype = dtype_of(spec)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(spec.shape, dtype=dtype, device=spec.device)
    made = torch.rand(spec.shape, dtype=dtype, device=spec.device)
    return made.requires_grad_(leaf.requires_grad)


def _gradient_bytes(plan: Plan) -> int:
    own = (d for d in plan.graph.data if d.kind is DataKind.TANGENT and d.name != CALLER_LOSS)
    return sum(d.size_bytes for d in own)


def beside_loss(
    program: PlannedProgram, ratio: float, make: Callable[[Budget], PlannedProgram]
) -> PlannedProgram:
    """Return `program`, or one for fewer bytes if the loss would take the step above its budget.
    ratio: of `loss_ratio`; make: plans anew. Logs if no plan leaves the room."""
    plan = program.plan
    rise_bytes = int(ratio * _gradient_bytes(plan))
    excess_bytes = plan.saved_bytes + rise_bytes - plan.budget_bytes
    if not ratio or excess_bytes <= 0:
        return program
    room_bytes = with_room_for_loss(plan.graph, plan.eager_peak_bytes).forward[-1].workspace_bytes
    lacking_bytes = max(excess_bytes, rise_bytes - room_bytes)
    try:
        return make(Budget(size_bytes=max(plan.budget_bytes - lacking_bytes, 1)))
    except InfeasibleBudget as error:
        _LOGGER.warning(
            "the loss takes %s beside the plan, and a step needs %d bytes, %.1f%% above its budget "
            "of %d; a budget of %d bytes leaves it the room, or a forward that returns the loss, "
            "which is planned with the rest",
            format_bytes(rise_bytes),
            plan.saved_bytes + rise_bytes,
            100 * excess_bytes / plan.budget_bytes,
            plan.budget_bytes,
            error.minimum_bytes + lacking_bytes,
        )
        return program
