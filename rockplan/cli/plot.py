"""`rockplan plot`: a report or a picture of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from rockplan.values.profile import MeasuredTimeline

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
            help="Also run a MODEL, as it is, planned and with PyTorch's checkpointing, and draw "
            "what was measured; not for a model that does not fit."
        ),
    ] = True,
    autocast: shared.Autocast = None,
) -> None:
    """Draw a plan; of a MODEL, beside what a step was measured to need, and every other budget."""
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
        if shared.is_plan_file(source, for_model=budget is not None):
            drawing = _Drawing(rockplan.read_plans(source)[0])
        elif budget is None:
            raise InvalidInput("a MODEL needs a --budget")
        else:
            subject = make_subject(source)
            shown = {
                ".html": frozenset({PictureKind.MEMORY, PictureKind.CURVE}),
                ".dot": frozenset[PictureKind](),
            }.get(suffix, frozenset({chosen}))
            with shared.under_autocast(subject, autocast):
                options = shared.planning_options(context.params)
                drawing = _drawn(subject, budget, shown, measure, options)
        path, note = _draw(drawing, Path(output), chosen)
    print(f"written: {path}{note and f' ({note})'}")


_PICTURE_ENDINGS = (".svg", ".png")
"""Endings of files that hold one picture."""

_ENDINGS = (".html", *_PICTURE_ENDINGS, ".dot")

_ROUNDS = 2
"""Rounds of the comparison on the curve: a mark in a picture needs fewer than a table."""


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A plan, and the measurements and other budgets drawn beside it."""

    plan: Plan
    series: tuple[pictures.Series, ...] = ()
    measured: MeasuredTimeline | None = None
    eager_measured: MeasuredTimeline | None = None


def _drawn(
    subject: Subject, budget: str, shown: frozenset[PictureKind], measure: bool, options: Options
) -> _Drawing:
    from rockplan.comparison import measured_series, measured_timelines

    call = subject.call
    planned = rockplan.solve(**call, budget=budget, options=options)
    series: tuple[pictures.Series, ...] = ()
    eager_measured = measured = None
    if PictureKind.CURVE in shown:
        # Drawn smaller than a hand: rough plans do.
        quick = replace(options, without=("exchange", "descent"), time_limit_s=0.25)
        quick = replace(quick, bound_time_limit_s=0.0)
        series += (pictures.curve_series(rockplan.pareto(**call, options=quick)),)
    if PictureKind.CURVE in shown and measure:
        compared = rockplan.compare(**call, budgets=[budget], rounds=_ROUNDS, options=options)
        series += measured_series(compared)
    on_cpu = all(p.device.type == "cpu" for p in subject.model.parameters())
    if PictureKind.MEMORY in shown and measure and on_cpu:
        eager_measured, measured = measured_timelines(**call, planned=planned)
    return _Drawing(rockplan.plan_of(planned), series, measured, eager_measured)


def _draw(drawing: _Drawing, path: Path, picture: PictureKind) -> tuple[Path, str]:
    lines = {"measured": drawing.measured, "eager_measured": drawing.eager_measured}
    note = ""
    content: str | bytes
    match path.suffix.lower():
        case ".html":
            title, series = path.stem, drawing.series
            content = html.html_report(drawing.plan, title=title, series=series, **lines)
        case ".dot":
            content = pictures.graph_dot(drawing.plan)
        case suffix:
            kind: pictures.Format = "png" if suffix == ".png" else "svg"
            match picture:
                case PictureKind.MEMORY:
                    content = pictures.draw_memory(drawing.plan, **lines, format=kind)
                case PictureKind.CURVE:
                    series = (*drawing.series, pictures.plan_series(drawing.plan))
                    content = pictures.draw_curve(series, format=kind)
                case PictureKind.SCHEDULE:
                    content = pictures.draw_schedule(drawing.plan, format=kind)
                case PictureKind.GRAPH:
                    drawn = pictures.draw_graph(drawing.plan, format=kind)
                    content, note, path = drawn.data, drawn.note, path.with_suffix(drawn.suffix)
    write_whole(path, content)
    return path, note
