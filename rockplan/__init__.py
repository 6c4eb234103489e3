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
    from rockplan.comparison import Comparison, compare
    from rockplan.explanations import explain
    from rockplan.fitting.training_step import TrainingStep
    from rockplan.graph_builder.costs.ruler import peak_live_bytes
    from rockplan.graph_builder.foreign.opaque import opaque
    from rockplan.graph_builder.operators.facts import pure
    from rockplan.reports.html import html_report
    from rockplan.reports.pictures import draw_curve, draw_graph, draw_memory, draw_schedule
    from rockplan.runtime.log_probs import token_log_probs
    from rockplan.runtime.planned_state import code_of, plan_of
    from rockplan.will_it_fit.answer import Fit
    from rockplan.will_it_fit.out_of_memory import explained
    from rockplan.will_it_fit.what_fits import fit

_NAMES = {
    "blocks.report": "BlocksPlan",
    "comparison": "Comparison compare",
    "will_it_fit.answer": "Fit",
    "fitting.training_step": "TrainingStep",
    "blocks.solve": "blocks_of restore_blocks solve_blocks",
    "runtime.planned_state": "code_of plan_of",
    "reports.pictures": "draw_curve draw_graph draw_memory draw_schedule",
    "explanations": "explain",
    "will_it_fit.what_fits": "fit",
    "reports.html": "html_report",
    "api": "load pareto plan solve",
    "graph_builder.costs.ruler": "peak_live_bytes",
    "graph_builder.foreign.opaque": "opaque",
    "will_it_fit.out_of_memory": "explained",
    "graph_builder.operators.facts": "pure",
    "runtime.log_probs": "token_log_probs",
}
_LATE = {name: module for module, names in _NAMES.items() for name in names.split()}
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
    "blocks_of",
    "code_of",
    "compare",
    "draw_curve",
    "draw_graph",
    "draw_memory",
    "draw_schedule",
    "explain",
    "explained",
    "fit",
    "html_report",
    "load",
    "opaque",
    "pareto",
    "peak_live_bytes",
    "plan",
    "plan_of",
    "pure",
    "read_plans",
    "restore_blocks",
    "save_plan",
    "solve",
    "solve_blocks",
    "token_log_probs",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'rockplan' has no attribute {name!r}")
    attribute = getattr(importlib.import_module(f"rockplan.{_LATE[name]}"), name)
    globals()[name] = attribute
    return attribute
