"""Instead: the parts of a model that can be planned, where the whole cannot.

takes: a model, its call, and the error that refuses it. guarantees: parts are planned in place,
within the budget of the whole, and the logger says what is left and why; or that error is raised.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from rockplan.blocks.solve import blocks_of, solve_blocks
from rockplan.budget import Budget
from rockplan.errors import CaptureError, ForwardRaises, InvalidInput
from rockplan.fitting.optimizer import OptimizerLike
from rockplan.options import DEFAULT_OPTIONS, Options, without_effect
from rockplan.runtime.checkpointing import repeated_blocks
from rockplan.runtime.program import ModuleCall
from rockplan.solving.loss import Loss
from rockplan.solving.parts import ADVICE, parts_beside

_LOGGER = logging.getLogger("rockplan")


def plan_parts(
    budget: Budget,
    optimizer: OptimizerLike,
    loss: Loss | None,
    options: Options,
    call: ModuleCall,
    refused: CaptureError,
) -> None:
    """Plan in place the parts of call.module that have no module like the one that `refused` names.
    Other arguments are those of `solve_blocks`. Raises `refused`, with what is said of the parts,
    if none can be planned; InfeasibleBudget."""
    model = call.module
    if isinstance(refused, ForwardRaises):
        raise refused
    parts = parts_beside(model, refused)
    without = without_effect(options, "solve_blocks")
    usual = {name: getattr(DEFAULT_OPTIONS, name) for name in without}
    try:
        solve_blocks(
            model,
            call.args,
            budget,
            blocks=None if parts in ([], [*repeated_blocks(model)]) else parts,
            optimizer=optimizer,
            sample_kwargs=call.kwargs,
            loss=loss,
            options=replace(options, on_refused="leave", **usual),
        )
        planned = blocks_of(model)
    except (CaptureError, InvalidInput) as error:
        refused.args = (f"{str(refused).partition(ADVICE)[0]}. Of its parts: {error}",)
        raise refused from error
    why = str(refused).partition(ADVICE)[0]
    left = "".join(f"; '{path}' is left: {reason}" for path, reason in planned.left)
    left += "".join(f"; Options({name}=...) is left out" for name in without)
    _LOGGER.warning(
        "the whole cannot be planned, so %s of its parts are, in place%s. Of the whole: %s",
        *(len(planned.blocks), left, why),
    )
