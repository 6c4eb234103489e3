"""rockplan: plan rematerialization of a PyTorch module under a byte budget, and run the plan.

Names that need PyTorch are imported when they are first used, so that `rockplan --help` is quick
and a plan can be read where PyTorch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rockplan.errors import (
    BackwardError,
    CaptureError,
    CheckFailed,
    DataDependentShape,
    ForwardRaises,
    HostMemoryError,
    InfeasibleBudget,
    InvalidBudget,
    InvalidConstraint,
    InvalidInput,
    MissingLibrary,
    NothingToDifferentiate,
    OtherRankFailed,
    PlanFormatError,
    PlanMismatch,
    ResultNotMade,
    RockplanError,
    StalePlan,
    UnsupportedModel,
    ValueDependentControlFlow,
)
from rockplan.options import Options
from rockplan.reports.explain import Explanation
from rockplan.store.fingerprint import VERSION as __version__
from rockplan.store.plan_file import read_plans, save_plan
from rockplan.values.curve import Curve, CurvePoint
from rockplan.values.plan import Plan

if TYPE_CHECKING:
    from rockplan.api import load, pareto, plan, solve
    from rockplan.blocks.report import BlocksPlan
    from rockplan.blocks.solve import blocks_of, restore_blocks, solve_blocks
    from rockplan.checkpointing.export import as_checkpoint_code
    from rockplan.comparison import Comparison, compare
    from rockplan.explained import explain
    from rockplan.fitting.training_step import TrainingStep
    from rockplan.graph_builder.costs.ruler import measured_timeline, peak_live_bytes
    from rockplan.graph_builder.foreign.opaque import opaque
    from rockplan.graph_builder.operators.facts import pure
    from rockplan.reports.html import html_report
    from rockplan.reports.pictures import draw_curve, draw_graph, draw_memory, draw_schedule
    from rockplan.reports.timeline import plan_trace
    from rockplan.runtime.planned_state import code_of, plan_of
    from rockplan.will_it_fit.answer import Fit
    from rockplan.will_it_fit.what_fits import fit

_LATE = {
    "BlocksPlan": "rockplan.blocks.report",
    "Comparison": "rockplan.comparison",
    "Fit": "rockplan.will_it_fit.answer",
    "TrainingStep": "rockplan.fitting.training_step",
    "blocks_of": "rockplan.blocks.solve",
    "as_checkpoint_code": "rockplan.checkpointing.export",
    "code_of": "rockplan.runtime.planned_state",
    "compare": "rockplan.comparison",
    "draw_curve": "rockplan.reports.pictures",
    "draw_graph": "rockplan.reports.pictures",
    "draw_memory": "rockplan.reports.pictures",
    "draw_schedule": "rockplan.reports.pictures",
    "explain": "rockplan.explained",
    "fit": "rockplan.will_it_fit.what_fits",
    "html_report": "rockplan.reports.html",
    "load": "rockplan.api",
    "measured_timeline": "rockplan.graph_builder.costs.ruler",
    "opaque": "rockplan.graph_builder.foreign.opaque",
    "pareto": "rockplan.api",
    "peak_live_bytes": "rockplan.graph_builder.costs.ruler",
    "plan": "rockplan.api",
    "plan_of": "rockplan.runtime.planned_state",
    "plan_trace": "rockplan.reports.timeline",
    "pure": "rockplan.graph_builder.operators.facts",
    "restore_blocks": "rockplan.blocks.solve",
    "solve": "rockplan.api",
    "solve_blocks": "rockplan.blocks.solve",
}
"""Public name -> the module that has it, imported when the name is first used."""

__all__ = [
    "BackwardError",
    "BlocksPlan",
    "CaptureError",
    "CheckFailed",
    "Comparison",
    "Curve",
    "CurvePoint",
    "DataDependentShape",
    "Explanation",
    "Fit",
    "ForwardRaises",
    "HostMemoryError",
    "InfeasibleBudget",
    "InvalidBudget",
    "InvalidConstraint",
    "InvalidInput",
    "MissingLibrary",
    "NothingToDifferentiate",
    "Options",
    "OtherRankFailed",
    "Plan",
    "PlanFormatError",
    "PlanMismatch",
    "ResultNotMade",
    "RockplanError",
    "StalePlan",
    "TrainingStep",
    "UnsupportedModel",
    "ValueDependentControlFlow",
    "__version__",
    "as_checkpoint_code",
    "blocks_of",
    "code_of",
    "compare",
    "draw_curve",
    "draw_graph",
    "draw_memory",
    "draw_schedule",
    "explain",
    "fit",
    "html_report",
    "load",
    "measured_timeline",
    "opaque",
    "pareto",
    "peak_live_bytes",
    "plan",
    "plan_of",
    "plan_trace",
    "pure",
    "read_plans",
    "restore_blocks",
    "save_plan",
    "solve",
    "solve_blocks",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'rockplan' has no attribute {name!r}")
    attribute = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = attribute
    return attribute
