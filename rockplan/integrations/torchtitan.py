"""For torchtitan, in place of its own policies of activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from rockplan.blocks.solve import solve_blocks
from rockplan.integrations.in_place import loss_of
from rockplan.options import Options


class RockplanAC(ActivationCheckpointing):  # type: ignore[misc]
    """Plans the transformer blocks of a model part at its first call in training, when it has been
    divided and has memory:

        config.activation_checkpoint = RockplanAC.Config(budget="20GiB")

    `torch.compile` of the blocks is left out (compile.enable=False).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        """budget, optimizer: as for `rockplan.solve_blocks`; in_flight: microbatches that wait for
        their backward pass at once in a pipeline."""

        budget: str = "auto"
        optimizer: str = "adamw"
        in_flight: int = 1

    def apply(self, model: nn.Module) -> None:
        """Let the first call of `model` in training plan the blocks in `model.layers`."""
        config: Any = self.config
        options = Options(in_flight=config.in_flight)

        def plan_and_call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and model.training:
                model._compiled_call_impl = None
                solve_blocks(
                    model,
                    args,
                    config.budget,
                    blocks="layers.*",
                    optimizer=config.optimizer,
                    sample_kwargs=kwargs,
                    loss=loss_of,
                    options=options,
                )
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        # Before hooks: those of `fully_shard` would be run by the steps that are measured.
        model._compiled_call_impl = plan_and_call
