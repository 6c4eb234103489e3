"""`rockplan kinds`: which kinds of step a data loader makes, before training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer

import rockplan
from rockplan.cli import arguments as shared
from rockplan.cli import display
from rockplan.cli.ending import ending
from rockplan.cli.factory import made_by, make_subject
from rockplan.errors import InvalidInput

EXAMPLE = "Example: rockplan kinds rockplan.examples:transformer rockplan.examples:batches -b 50%"


@shared.planned_with("time_limit", "no_cache", "compiled", "near", "tile", "only_loss")
def kinds(
    context: typer.Context,
    model: shared.Model,
    loader: Annotated[
        str,
        typer.Argument(
            metavar="LOADER",
            help="module:factory or file.py:factory of what yields batches as the model takes them",
        ),
    ],
    budget: shared.Budget = None,
    steps: Annotated[int, typer.Option(min=1, help="How many batches to look at.")] = 100,
    as_json: shared.Json = False,
    autocast: shared.Autocast = None,
    optimizer: shared.Optimizer = None,
) -> None:
    """Plan for the batches of LOADER, and run none: how many kinds of step they are, and why."""
    with ending(as_json):
        subject = make_subject(model)
        batches = made_by(loader)
        if not isinstance(batches, Iterable):
            raise InvalidInput(
                f"{loader} made a {type(batches).__name__}: return what yields batches"
            )
        with shared.under_autocast(subject, autocast):
            found = rockplan.kinds(
                subject.model,
                batches,
                budget or "auto",
                steps=steps,
                optimizer=optimizer,
                options=shared.planning_options(context.params),
            )
    if as_json:
        display.print_json({"model": model, **asdict(found)})
    else:
        print(display.printable(str(found)))
