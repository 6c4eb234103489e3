"""rockplan: plan rematerialization of a PyTorch module under a byte budget, and run the plan."""

from rockplan.api import Options, plan, solve
from rockplan.errors import (
    BackwardError,
    CaptureError,
    CheckFailed,
    DataDependentShape,
    InfeasibleBudget,
    InvalidBudget,
    InvalidInput,
    NothingToDifferentiate,
    RockplanError,
    StalePlan,
    UnsupportedModel,
    ValueDependentControlFlow,
)
from rockplan.graph_builder.ruler import peak_live_bytes
from rockplan.plan import Plan

__all__ = [
    "BackwardError",
    "CaptureError",
    "CheckFailed",
    "DataDependentShape",
    "InfeasibleBudget",
    "InvalidBudget",
    "InvalidInput",
    "NothingToDifferentiate",
    "Options",
    "Plan",
    "RockplanError",
    "StalePlan",
    "UnsupportedModel",
    "ValueDependentControlFlow",
    "peak_live_bytes",
    "plan",
    "solve",
]
