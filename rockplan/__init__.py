"""rockplan: plan rematerialization of a PyTorch module under a byte budget, and run the plan.

What needs PyTorch is imported when it is first used, so that `rockplan --help` is quick and a
plan can be read where PyTorch is not installed.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rockplan.curve import Curve, CurvePoint
from rockplan.errors import (
    BackwardError,
    CaptureError,
    CheckFailed,
    DataDependentShape,
    ForwardRaises,
    InfeasibleBudget,
    InvalidBudget,
    InvalidConstraint,
    InvalidInput,
    MissingLibrary,
    NothingToDifferentiate,
    PlanFormatError,
    PlanMismatch,
    RockplanError,
    StalePlan,
    UnsupportedModel,
    ValueDependentControlFlow,
)
from rockplan.explain import Explanation, explain
from rockplan.options import Options
from rockplan.plan import Plan
from rockplan.plan_file import read_plans, save_plan
from rockplan.version import VERSION as __version__

if TYPE_CHECKING:
    from rockplan.api import load, pareto, plan, solve
    from rockplan.codegen.module import code_of, plan_of
    from rockplan.compare import Comparison, compare
    from rockplan.export import as_checkpoint_code
    from rockplan.graph_builder.ruler import measured_timeline, peak_live_bytes
    from rockplan.memory import plan_trace
    from rockplan.render import draw_curve, draw_graph, draw_memory, draw_schedule
    from rockplan.report import html_report

_LATE = {
    "Comparison": "rockplan.compare",
    "as_checkpoint_code": "rockplan.export",
    "code_of": "rockplan.codegen.module",
    "compare": "rockplan.compare",
    "draw_curve": "rockplan.render",
    "draw_graph": "rockplan.render",
    "draw_memory": "rockplan.render",
    "draw_schedule": "rockplan.render",
    "html_report": "rockplan.report",
    "load": "rockplan.api",
    "measured_timeline": "rockplan.graph_builder.ruler",
    "pareto": "rockplan.api",
    "peak_live_bytes": "rockplan.graph_builder.ruler",
    "plan": "rockplan.api",
    "plan_of": "rockplan.codegen.module",
    "plan_trace": "rockplan.memory",
    "solve": "rockplan.api",
}
"""Public name -> the module that has it, imported when the name is first used."""

__all__ = [
    "BackwardError",
    "CaptureError",
    "CheckFailed",
    "Comparison",
    "Curve",
    "CurvePoint",
    "DataDependentShape",
    "Explanation",
    "ForwardRaises",
    "InfeasibleBudget",
    "InvalidBudget",
    "InvalidConstraint",
    "InvalidInput",
    "MissingLibrary",
    "NothingToDifferentiate",
    "Options",
    "Plan",
    "PlanFormatError",
    "PlanMismatch",
    "RockplanError",
    "StalePlan",
    "UnsupportedModel",
    "ValueDependentControlFlow",
    "__version__",
    "as_checkpoint_code",
    "code_of",
    "compare",
    "draw_curve",
    "draw_graph",
    "draw_memory",
    "draw_schedule",
    "explain",
    "html_report",
    "load",
    "measured_timeline",
    "pareto",
    "peak_live_bytes",
    "plan",
    "plan_of",
    "plan_trace",
    "read_plans",
    "save_plan",
    "solve",
]


class _Package(ModuleType):
    """Importing `rockplan/plan.py` does not hide the function `rockplan.plan`."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LATE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'rockplan' has no attribute {name!r}")
    found = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = found
    return found


del globals()["plan"]  # the module, which the import of Plan left here
sys.modules[__name__].__class__ = _Package
