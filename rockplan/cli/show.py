"""`rockplan show`: a plan, its explanation, its kernels, its generated code, or the passes that
make the graph of a model."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

import rockplan
from rockplan.cli import arguments as shared
from rockplan.cli import display
from rockplan.cli.ending import ending
from rockplan.cli.factory import make_subject
from rockplan.errors import InvalidInput
from rockplan.options import Options
from rockplan.reports.listing import kernel_calls, passes_trace
from rockplan.reports.progress_bars import waiting
from rockplan.values.plan import Plan

EXAMPLE = "Example: rockplan show rockplan.examples:mlp -b min --code"


@shared.planned_with("no_cache", "compiled", "near", "tile")
def show(
    context: typer.Context,
    source: shared.Source,
    budget: shared.Budget = None,
    code: Annotated[bool, typer.Option("--code", help="The generated Python of a MODEL.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Who owns the peak, and what each recomputation buys.")
    ] = False,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Compiled kernels of a MODEL, each with its operators."),
    ] = False,
    passes: Annotated[
        bool, typer.Option("--passes", help="Passes from a MODEL to its graph; needs no budget.")
    ] = False,
    as_json: shared.Json = False,
    autocast: shared.Autocast = None,
) -> None:
    """Print a plan: what is kept, what is recomputed, at what cost."""
    with ending(as_json), waiting():
        of_planning = any(context.params[name] for name in ("compiled", "near", "tile"))
        for_model = budget is not None or code or kernels or passes or of_planning
        lower: dict[str, int] = {}
        if shared.is_plan_file(source, for_model=for_model):
            plans, text = rockplan.read_plans(source), ""
        else:
            options = shared.planning_options(context.params)
            if passes:
                _show_passes(source, autocast, options, as_json)
                return
            plans, text, lower = _planned(source, budget, code, explain, autocast, options)
        found = [rockplan.explain(p) for p in plans] if explain else []
        explanations = [replace(one, needed_bytes_with=lower) for one in found]
        counted = kernel_calls(plans[0].graph, plans[0].schedule).items() if kernels else ()
    if as_json:
        rows = [display.plan_row(f"{p.budget_bytes}", p) for p in plans]
        for row, explanation in zip(rows, explanations, strict=False):
            row["explanation"] = explanation.as_json()
        if kernels:
            rows[0]["kernels"] = [
                {"name": k.name, "calls": count, "operators": str(k)} for k, count in counted
            ]
        display.print_json({"source": source, "plans": rows, **({"code": text} if code else {})})
    else:
        shown = [text] if code else [*map(str, explanations or plans)]
        if kernels:
            shown += [f"{count} x {kernel}" for kernel, count in counted] or ["no compiled kernels"]
        print(display.printable("\n\n".join(shown)))


def _show_passes(model: str, autocast: str | None, options: Options, as_json: bool) -> None:
    from rockplan.runtime.program import ModuleCall
    from rockplan.solving.captured_calls import arguments, captured_call  # which import torch

    subject = make_subject(model)
    args, kwargs = arguments(**subject.call)
    with shared.under_autocast(subject, autocast):
        call = captured_call(ModuleCall(subject.model, args, kwargs), options)
    traces = [variant.lowered.trace for variant in call.variants]
    if as_json:
        rows = [[asdict(one) for one in trace] for trace in traces]
        display.print_json({"source": model, "passes": rows})
    else:
        print("\n\n".join(map(passes_trace, traces)))


def _planned(
    model: str,
    budget: str | None,
    code: bool,
    explain: bool,
    autocast: str | None,
    options: Options,
) -> tuple[tuple[Plan, ...], str, dict[str, int]]:
    """Returns (the plan, alone; its code, '' unless `code`; with `explain`, text of other options
    -> bytes needed with them)."""
    from rockplan.api import needed_bytes_with

    if budget is None:
        raise InvalidInput("a MODEL needs a --budget")
    subject = make_subject(model)
    make = rockplan.solve if code else rockplan.plan
    lower: dict[str, int] = {}
    with shared.under_autocast(subject, autocast):
        made: Any = make(**subject.call, budget=budget, options=options)
        if explain:
            lower = needed_bytes_with(**subject.call, options=options, everything_kept=False)
    if code:
        return (rockplan.plan_of(made),), rockplan.code_of(made), lower
    return (made,), "", lower
