"""For transformers' Trainer, and those of TRL, which derive from it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from rockplan.integrations.in_place import PlanningCallback, PlanWhenCalled, planned_no_more


class RockplanCallback(PlanningCallback, TrainerCallback):
    """Plans what the trainer calls, in place, from its first step to the end of training:

        trainer = Trainer(..., callbacks=[RockplanCallback(budget="auto")])

    budget, options: as for `rockplan.solve`; with 'auto' the trainer's optimizer is counted.
    numerics: as `Options.numerics`.
    """

    def on_train_begin(self, *_: Any, model: Any = None, **more: Any) -> None:
        optimizer = getattr(more.get("optimizer"), "optimizer", more.get("optimizer"))
        PlanWhenCalled(self.budget, optimizer, self.options).begin(model)

    def on_train_end(self, *_: Any, model: Any = None, **more: Any) -> None:
        planned_no_more(model)
