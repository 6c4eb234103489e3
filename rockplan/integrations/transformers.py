"""For transformers' Trainer, and those of TRL, which derive from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from transformers import TrainerCallback

from rockplan.budget import Budget
from rockplan.integrations.in_place import PlanWhenCalled, planned_no_more
from rockplan.options import DEFAULT_OPTIONS, Options


class RockplanCallback(TrainerCallback):
    """Plans what the trainer calls, in place, from its first step to the end of training:

        trainer = Trainer(..., callbacks=[RockplanCallback(budget="auto")])

    budget, options: as for `rockplan.solve`; with 'auto' the trainer's optimizer is counted.
    numerics: as `Options.numerics`.
    """

    def __init__(
        self,
        budget: int | float | str | Budget = "auto",
        options: Options = DEFAULT_OPTIONS,
        numerics: Literal["eager", "best"] | None = None,
    ) -> None:
        self.budget = budget
        self.options = replace(options, numerics=numerics or options.numerics)

    def on_train_begin(self, *_: Any, model: Any = None, **more: Any) -> None:
        optimizer = getattr(more.get("optimizer"), "optimizer", more.get("optimizer"))
        PlanWhenCalled(self.budget, optimizer, self.options).begin(model)

    def on_train_end(self, *_: Any, model: Any = None, **more: Any) -> None:
        planned_no_more(model)
