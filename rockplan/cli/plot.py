"""`rockplan plot`: a report or a picture of a plan."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import rockplan
from rockplan.cli import arguments as shared
from rockplan.cli.ending import ending
from rockplan.cli.factory import Subject, make_subject
from rockplan.errors import InvalidInput
from rockplan.options import Options
from rockplan.reports import html, pictures
from rockplan.reports.progress_bars import waiting
from rockplan.store.plan_file import write_whole
from rockplan.values.plan import Plan

EXAMPLE = "Example: rockplan plot rockplan.examples:mlp -b 50% --time-limit 0.5"


class PictureKind(StrEnum):
    """What a picture shows."""

    MEMORY = "memory"
    CURVE = "curve"
    SCHEDULE = "schedule"
    GRAPH = "graph"


@shared.planned_with("time_limit", "no_cache")
def plot(
    context: typer.Context,
    source: shared.Source,
    budget: shared.Budget = None,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=".html: a report in one file; .svg, .png: a picture; .dot: the graph for "
            "Graphviz.",
        ),
    ] = "rockplan.html",
    picture: Annotated[
        PictureKind | None,
        typer.Option(help="For .svg and .png, which have one; memory by default."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            help="With a curve, also run a MODEL, as it is, planned and with PyTorch's "
            "checkpointing, and mark what was measured; not for a model that does not fit."
        ),
    ] = True,
    autocast: shared.Autocast = None,
) -> None:
    """Draw a plan; of a MODEL, beside every other budget and what a step was measured to need."""
    with ending(as_json=False), waiting():
        suffix = Path(output).suffix.lower()
        if suffix not in _ENDINGS or not Path(output).parent.is_dir():
            raise InvalidInput(
                f"--output {output}: name a file in a folder that exists, with one "
                f"of the endings {', '.join(_ENDINGS)}"
            )
        if picture is not None and suffix not in _PICTURE_ENDINGS:
            raise InvalidInput(
                f"--picture is for {' and '.join(_PICTURE_ENDINGS)}; "
                f"a {suffix} file always holds the same"
            )
        chosen = picture or PictureKind.MEMORY
        series: Lines = ()
        if shared.is_plan_file(source, for_model=budget is not None):
            plan = rockplan.read_plans(source)[0]
        elif budget is None:
            raise InvalidInput("a MODEL needs a --budget")
        else:
            subject = make_subject(source)
            has_curve = suffix == ".html" or chosen is PictureKind.CURVE
            with shared.under_autocast(subject, autocast):
                options = shared.planning_options(context.params)
                plan, series = _planned(subject, budget, has_curve, measure, options)
        path = Path(output)
        write_whole(path, _drawn(plan, series, path, chosen))
    print(f"written: {path}")


_PICTURE_ENDINGS = (".svg", ".png")
"""Endings of files that hold one picture."""

_ENDINGS = (".html", *_PICTURE_ENDINGS, ".dot")

_ROUNDS = 2
"""Rounds of the comparison on the curve: a mark in a picture needs fewer than a table."""

Lines = tuple[pictures.Series, ...]
"""Other budgets, and what was measured, beside a plan on the curve."""


def _planned(
    subject: Subject, budget: str, has_curve: bool, measure: bool, options: Options
) -> tuple[Plan, Lines]:
    call = subject.call
    plan = rockplan.plan_of(rockplan.solve(**call, budget=budget, options=options))
    if not has_curve:
        return plan, ()
    # Drawn smaller than a hand: rough plans do.
    quick = replace(options, without=("exchange",), time_limit_s=0.25)
    quick = replace(quick, bound_time_limit_s=0.0)
    curve = pictures.curve_series(rockplan.pareto(**call, options=quick))
    if not measure:
        return plan, (curve,)
    from rockplan.comparison import measured_series  # which imports torch

    compared = rockplan.compare(**call, budgets=[budget], rounds=_ROUNDS, options=options)
    return plan, (curve, *measured_series(compared))


def _drawn(plan: Plan, series: Lines, path: Path, picture: PictureKind) -> str | bytes:
    suffix = path.suffix.lower()
    if suffix == ".html":
        return html.html_report(plan, title=path.stem, series=series)
    if suffix == ".dot":
        return pictures.draw_graph(plan, format="dot")
    kind: pictures.Format = "png" if suffix == ".png" else "svg"
    match picture:
        case PictureKind.MEMORY:
            return pictures.draw_memory(plan, format=kind)
        case PictureKind.CURVE:
            return pictures.draw_curve((*series, pictures.plan_series(plan)), format=kind)
        case PictureKind.SCHEDULE:
            return pictures.draw_schedule(plan, format=kind)
        case PictureKind.GRAPH:
            return pictures.draw_graph(plan, format=kind)
