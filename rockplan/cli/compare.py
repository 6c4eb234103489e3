"""`rockplan compare`: a measured step of a model, as it is and planned in several ways."""

from __future__ import annotations

from typing import Annotated

import typer

import rockplan
from rockplan.cli import arguments as shared
from rockplan.cli import display
from rockplan.cli.ending import ExitCode, ending
from rockplan.cli.factory import make_subject
from rockplan.reports.progress_bars import waiting

EXAMPLE = "Example: rockplan compare rockplan.examples:mlp -b 50% --rounds 3"


@shared.planned_with("time_limit", "no_cache", "compiled", "near", "tile", "only_loss", "best")
def compare(
    context: typer.Context,
    model: shared.Model,
    budget: shared.Budgets = None,
    compile_budget: Annotated[
        list[float] | None,
        typer.Option(
            metavar="RATIO",
            min=0.0,
            max=1.0,
            help="Also torch.compile with this activation_memory_budget; may be repeated.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each variant is timed.")] = 7,
    as_json: shared.Json = False,
    autocast: shared.Autocast = None,
) -> None:
    """Measure a step of MODEL: eager, PyTorch's checkpointing, and rockplan under each budget."""
    with ending(as_json), waiting():
        subject = make_subject(model)
        with shared.under_autocast(subject, autocast):
            comparison = rockplan.compare(
                **subject.call | ({"budgets": budget} if budget else {}),
                compile_budgets=compile_budget or (),
                rounds=rounds,
                options=shared.planning_options(context.params),
            )
    print(comparison.to_json() if as_json else display.printable(str(comparison)))
    is_planned = any(row.budget_bytes is not None for row in comparison.rows)
    if not is_planned and any(row.minimum_bytes is not None for row in comparison.rows):
        raise typer.Exit(ExitCode.INFEASIBLE)
