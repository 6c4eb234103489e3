"""In place: a model that somebody else calls is planned where it is, when it is called.

takes: a model that a trainer holds. guarantees: the model, its decoder or its repeated blocks,
the first of these that can be, is planned at the first call in training, and the logger says which;
`planned_no_more` undoes that.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from rockplan.api import AtFirstCall
from rockplan.blocks.instead import plan_parts
from rockplan.blocks.solve import restore_blocks
from rockplan.budget import Budget, parse_budget
from rockplan.errors import CaptureError, RockplanError
from rockplan.fitting.optimizer import OptimizerLike
from rockplan.fitting.training_step import USUAL
from rockplan.options import DEFAULT_OPTIONS, Options
from rockplan.python_state import trees
from rockplan.runtime.planned_module import become_planned, take_out
from rockplan.runtime.planned_state import is_own
from rockplan.runtime.program import ModuleCall

LOG = logging.getLogger("rockplan")


class PlanningCallback:
    """A callback of a trainer: with what it plans the model when training begins."""

    def __init__(
        self,
        budget: int | float | str | Budget = "auto",
        options: Options = DEFAULT_OPTIONS,
        numerics: Literal["eager", "best"] | None = None,
    ) -> None:
        self.budget = budget
        self.options = replace(options, numerics=numerics or options.numerics)


@dataclass(frozen=True)
class PlanWhenCalled:
    """How a model is planned in place. budget, optimizer, options: as for `rockplan.solve`."""

    budget: int | float | str | Budget = "auto"
    optimizer: OptimizerLike = None
    options: Options = DEFAULT_OPTIONS

    def begin(self, model: nn.Module) -> None:
        """Plan what is called of `model` at its first call in training."""
        self._plan(model, functools.partial(self._after_the_whole, model))

    def _plan(self, module: nn.Module, on_refused: Any, **changed: Any) -> None:
        options = replace(self.options, **changed)
        wanted = AtFirstCall(parse_budget(self.budget), self.optimizer, USUAL, options)
        become_planned(module, wanted.settings(module, on_refused, is_in_place=True))

    def _after_the_whole(self, model: nn.Module, call: ModuleCall, error: CaptureError) -> None:
        decoder = _decoder_of(model)
        if decoder is None:
            self._plan_blocks(call, error)
            return
        LOG.warning("the whole cannot be planned, its decoder is tried: %s", error)
        # These are of the result of the whole.
        others = {"only_loss": False, "released": (), "differentiated": None}
        self._plan(decoder, lambda _, of_it: self._plan_blocks(call, of_it), **others)

    def _plan_blocks(self, call: ModuleCall, error: CaptureError) -> None:
        try:
            own = (parse_budget(self.budget), self.optimizer, loss_of, self.options)
            plan_parts(*own, call, error)
        except RockplanError as other:
            LOG.warning("nothing is planned: %s", other)


def planned_no_more(model: nn.Module) -> None:
    """Undo what `PlanWhenCalled` planned of `model`."""
    restore_blocks(model)
    for module in filter(is_own, [*model.modules()]):
        take_out(module)


def _decoder_of(model: Any) -> nn.Module | None:
    """Of a causal model of transformers, also one with adapters of peft; None for others."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    is_inside = isinstance(decoder, nn.Module) and decoder not in (model, base)
    return decoder if is_inside and any(m is decoder for m in model.modules()) else None


def loss_of(result: Any) -> torch.Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if loss is None:
        leaves = (t for t in trees.tree_leaves(result) if isinstance(t, torch.Tensor))
        loss = sum(t.mean() for t in leaves if t.requires_grad)
    return torch.as_tensor(loss)
