"""For Lightning's Trainer, by its old name (pytorch_lightning) as well."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch import nn

from rockplan.integrations.in_place import PlanningCallback, PlanWhenCalled, planned_no_more

_NAME = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
_Callback: Any = importlib.import_module(_NAME).Callback


class LightningCallback(PlanningCallback, _Callback):  # type: ignore[misc]
    """Plans the network of a LightningModule, in place, while it is fitted: the submodule with the
    most parameters.

        trainer = lightning.Trainer(callbacks=[RockplanCallback(budget="auto")])

    budget, options: as for `rockplan.solve`; with 'auto' and one optimizer, that is counted.
    numerics: as `Options.numerics`.
    """

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        network = max(pl_module.children(), key=lambda m: sum(p.numel() for p in m.parameters()))
        PlanWhenCalled(self.budget, optimizer, self.options).begin(network)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        planned_no_more(pl_module)


RockplanCallback = LightningCallback
