"""`rockplan profile`: who owns the peak of a model, and what is kept for its backward pass."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Annotated

import typer

import rockplan
from rockplan.cli import arguments as shared
from rockplan.cli import display
from rockplan.cli.ending import ending
from rockplan.cli.factory import make_subject
from rockplan.reports.explain import wrapped
from rockplan.reports.progress_bars import waiting
from rockplan.values.names import operator_of
from rockplan.values.plan import format_bytes

EXAMPLE = "Example: rockplan profile rockplan.examples:transformer"


@shared.planned_with("no_cache")
def profile(
    context: typer.Context,
    model: shared.Model,
    top: Annotated[int, typer.Option(metavar="ROWS", min=1, help="Of each table.")] = 12,
    as_json: shared.Json = False,
    autocast: shared.Autocast = None,
) -> None:
    """Who owns the peak of MODEL, what is kept for its backward pass, and what that costs."""
    from rockplan.api import needed_bytes_with

    with ending(as_json), waiting():
        subject = make_subject(model)
        options = shared.planning_options(context.params)
        with shared.under_autocast(subject, autocast):
            plan = rockplan.plan(**subject.call, budget="100%", options=options)
            lower = needed_bytes_with(**subject.call, options=options, everything_kept=True)
        explanation = replace(rockplan.explain(plan, unplanned=True), needed_bytes_with=lower)
        plan = display.kept_whole(plan)
    # Layers of one stack together.
    modules = display.shares(plan, lambda n: re.sub(r"\d+", "*", n.module) or "(root)")
    operators = display.shares(plan, operator_of)
    if as_json:
        row = display.plan_row("100%", plan)
        facts = ("eager_peak_bytes", "eager_time_ns", "saved_bytes", "operations")
        sources = ("graph_digest", "profile_digest", "profile_source", "torch_version")
        display.print_json(
            {
                "model": model,
                **{name: row[name] for name in (*facts, *sources)},
                "modules": [asdict(s) for s in modules],
                "operators": [asdict(s) for s in operators],
                "explanation": explanation.as_json(),
                "kept_peak_bytes_with": lower,
            }
        )
        return
    facts_text = (
        f"{len(plan.graph.nodes)} operations, {display.milliseconds(plan.eager_time_ns)} "
        f"forward and backward, peak {format_bytes(plan.eager_peak_bytes)}, of which "
        f"{format_bytes(plan.saved_bytes)} are kept between forward and backward"
    )
    counted = "bytes beyond parameters, buffers, inputs and .grad"
    source = [*wrapped(plan.profile_source), counted]
    lines = [*wrapped(facts_text), *source, "", str(explanation), ""]
    print(display.printable("\n".join(lines)))
    display.show_shares("module", modules, top)
    print()
    display.show_shares("operator", operators, top)
