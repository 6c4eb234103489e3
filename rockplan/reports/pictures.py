"""Pictures of plans: memory over time, the curve, the schedule, the graph of blocks.

takes: values (Plan, Curve). returns: the bytes of a picture, 'svg' or 'png'.
Functions: draw_memory, draw_curve, draw_schedule, draw_graph. guarantees: the same values give the
same bytes under the same version of matplotlib; labels are in MiB; colours are those of Okabe and
Ito, which colour-blind readers can tell apart.

matplotlib is an extra (`pip install 'rockplan[plot]'`) and is imported when a picture is drawn.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import graphviz

from rockplan.errors import InvalidInput, MissingLibrary
from rockplan.reports import timeline as timelines
from rockplan.reports.timeline import CALLER, OTHERS
from rockplan.values.curve import Curve
from rockplan.values.graph import producers
from rockplan.values.plan import Plan, format_bytes, plan_in

Format = Literal["svg", "png"]

_MARKERS = ("s", "^", "D", "v", "P", "X", "*")
_MIB = 2**20
_MANY_POINTS = 12
"""Lines with more points than this have small marks."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
FILLS = ("#BFDDF2", "#FBE3B0", "#B9E4D6", "#EFD3E2", "#D5ECFA", "#F6C9B0", "#FAF5B8", "#E2E2E2")
RUN_LABELS = {
    "forward": "forward",
    "again": "forward again",
    "backward": "backward",
    "copy": "copy to or from the host",
}
RUN_COLOURS = dict(zip(RUN_LABELS, COLOURS, strict=False))
KEPT_COLOUR = "#8FD3BC"


def group_colours(groups: Sequence[str]) -> dict[str, str]:
    """Return a colour for each group, in order of first appearance; grey for the caller and
    others."""
    named = [g for g in dict.fromkeys(groups) if g not in (CALLER, OTHERS)]
    colours = {g: COLOURS[i % len(COLOURS)] for i, g in enumerate(named)}
    return {**colours, CALLER: "#9A9A9A", OTHERS: "#C8C8C8"}


@dataclass(frozen=True, slots=True)
class Series:
    """One line or marker of the memory-time curve.

    points: (peak bytes, time over eager: 0.05 is 5 %). connected: draw a line through them.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    connected: bool = False


def curve_series(curve: Curve) -> Series:
    """Return the line of a curve from `rockplan.pareto`."""
    points = tuple((p.peak_bytes, p.overhead) for p in curve.points)
    return Series("rockplan (predicted)", points, connected=True)


def plan_series(plan: Plan) -> Series:
    """Return the mark of one plan."""
    return Series("this plan (predicted)", ((plan.peak_bytes, plan.overhead),))


def draw_memory(plan: object, *, format: Format = "svg") -> bytes:
    """Draw predicted memory over time, keeping everything above, the planned step below, on the
    same axes; return the content of an image file. plan: a Plan or a planned module. Raises
    MissingLibrary."""
    drawn_plan = plan_in(plan)
    eager, planned = timelines.eager_timeline(drawn_plan), timelines.planned_timeline(drawn_plan)
    colours = group_colours((*eager.groups, *planned.groups))
    figure = new_figure(9, 5.6)
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    for axis, predicted, budget_bytes in zip(
        axes, (eager, planned), (None, drawn_plan.budget_bytes), strict=True
    ):
        _draw_stack(axis, predicted, colours)
        _draw_lines(axis, predicted, budget_bytes)
    axes[0].set_xlim(0, max(eager.time_ns, planned.time_ns) / 1e6)
    axes[0].set_ylim(0, 1.22 * max(eager.peak_bytes, planned.peak_bytes) / _MIB)
    axes[1].set_xlabel("predicted time, ms")
    legends = [axis.get_legend_handles_labels() for axis in axes]
    entries = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
    labels = [*entries][::-1]
    handles = [entries[label] for label in labels]
    figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    return image_bytes(figure, format)


def _draw_stack(axis: Any, predicted: timelines.MemoryTimeline, colours: Mapping[str, str]) -> None:
    edges_ms = [m.start_ns / 1e6 for m in predicted.moments] + [predicted.time_ns / 1e6]
    base = [0.0] * len(predicted.moments)
    for group, label in enumerate(predicted.groups):
        top = [
            b + m.group_bytes[group] / _MIB for b, m in zip(base, predicted.moments, strict=True)
        ]
        axis.stairs(top, edges_ms, baseline=base, fill=True, color=colours[label], label=label)
        base = top


def _draw_lines(axis: Any, predicted: timelines.MemoryTimeline, budget_bytes: int | None) -> None:
    if budget_bytes is not None and budget_bytes > 1.2 * predicted.peak_bytes:
        budget_bytes = None
    if budget_bytes is not None:
        axis.axhline(budget_bytes / _MIB, color="#B00020", linestyle="--", label="budget")
    axis.axvline(predicted.backward_ns / 1e6, color="#404040", linestyle=":", linewidth=1)
    axis.annotate(
        "backward",
        (predicted.backward_ns / 1e6, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        fontsize=8,
    )
    axis.set_title(predicted.title(budget_bytes), fontsize=10, loc="left")
    axis.set_ylabel("MiB")


def draw_curve(series: Sequence[Series], *, title: str = "", format: Format = "svg") -> bytes:
    """Draw the overhead over eager (%) against the peak (MiB) of the points of each series, and
    return the content of an image file. Raises MissingLibrary, InvalidInput for no points."""
    if not any(s.points for s in series):
        raise InvalidInput("there is nothing to draw: no series has a point")
    figure = new_figure(7.2, 4.4)
    axis = figure.subplots()
    markers = iter(_MARKERS * len(series))
    for number, series_points in enumerate(series):
        x = [peak_bytes / _MIB for peak_bytes, _ in series_points.points]
        y = [100 * overhead for _, overhead in series_points.points]
        style = "o-" if series_points.connected else next(markers)
        size = 3 if len(x) > _MANY_POINTS else 7
        look = {"markersize": size, "color": COLOURS[number % len(COLOURS)]}
        if not series_points.connected:
            look |= {"markeredgecolor": "black", "markeredgewidth": 0.6}
        axis.plot(x, y, style, label=series_points.name, zorder=2 + number, **look)
    axis.set_xlabel("peak of activation memory, MiB")
    axis.set_ylabel("time over eager, %")
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    axis.set_title(title, fontsize=10, loc="left")
    axis.legend(fontsize=9)
    return image_bytes(figure, format)


def draw_schedule(plan: object, *, format: Format = "svg") -> bytes:
    """Draw the schedule as in figure 1 of Rockmate: one row for each block, time to the right;
    above, when its operations run; below, how many bytes of its activations are alive. If the plan
    pages, there is a row of copies each way. plan: a Plan or a planned module. Raises
    MissingLibrary."""
    drawn_plan = plan_in(plan)
    rows = timelines.block_rows(drawn_plan)
    figure = new_figure(9, min(1.2 + 0.42 * len(rows), 120))
    axis = figure.subplots()
    highest = max((alive for row in rows for _, alive in row.alive), default=1)
    for position, row in enumerate(rows):
        _draw_row(axis, position, row, highest)
    boundary = timelines.planned_timeline(drawn_plan).backward_ns / 1e6
    axis.axvline(boundary, color="#404040", linestyle=":", linewidth=1)
    axis.set_ylim(len(rows), -0.35)
    axis.set_xlim(0, drawn_plan.time_ns / 1e6)
    axis.set_yticks([p + 0.5 for p in range(len(rows))], [r.name for r in rows], fontsize=8)
    axis.set_xlabel("predicted time, ms")
    axis.set_title(
        f"schedule: {drawn_plan.overhead:+.1%} time within {format_bytes(drawn_plan.peak_bytes)}; "
        "right: kept for backward",
        fontsize=10,
        loc="left",
    )
    _legend_of_runs(figure, rows)
    return image_bytes(figure, format)


def _draw_row(axis: Any, position: int, row: timelines.BlockRow, highest_bytes: int) -> None:
    axis.axhline(position + 1, color="#80808040", linewidth=0.6)
    for kind, colour in RUN_COLOURS.items():
        spans = [((a / 1e6), (b - a) / 1e6) for a, b, k in row.runs if k == kind]
        axis.broken_barh(spans, (position + 0.08, 0.34), facecolors=colour, edgecolors="none")
    times = [t / 1e6 for t, _ in row.alive]
    if len(times) > 1:
        base = position + 0.95
        heights = [base - 0.47 * alive / max(highest_bytes, 1) for _, alive in row.alive[:-1]]
        axis.stairs(heights, times, baseline=base, fill=True, color=KEPT_COLOUR)
    axis.annotate(
        format_bytes(row.saved_bytes),
        (1, position + 0.5),
        xycoords=("axes fraction", "data"),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def _legend_of_runs(figure: Any, rows: Sequence[timelines.BlockRow]) -> None:
    patches = importlib.import_module("matplotlib.patches")
    kinds = {kind for row in rows for _, _, kind in row.runs}
    entries = [(label, RUN_COLOURS[kind]) for kind, label in RUN_LABELS.items() if kind in kinds]
    entries.append(("activations alive (bytes)", KEPT_COLOUR))
    handles = [patches.Patch(color=colour, label=label) for label, colour in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)


def draw_graph(plan: object, *, format: Literal["svg", "png", "dot"] = "svg") -> bytes:
    """Draw the graph of a Plan or a planned module: blocks, those of a kind in one colour, what
    each keeps, and the bytes that go from one to the other in forward. 'dot': the text for
    Graphviz. Raises MissingLibrary for 'svg' and 'png' without Graphviz's program dot."""
    drawn_plan = plan_in(plan)
    drawing = graphviz.Digraph("rockplan")
    drawing.attr("node", shape="box", style="filled,rounded", fontname="Helvetica", fontsize="10")
    drawing.attr("edge", fontname="Helvetica", fontsize="9", color="#606060")
    kinds = {
        digest: i for i, digest in enumerate(dict.fromkeys(b.digest for b in drawn_plan.blocks))
    }
    rows = timelines.block_rows(drawn_plan)
    for index, (block, row) in enumerate(zip(drawn_plan.blocks, rows, strict=True)):
        counts = f"{len(block.forward)} forward, {len(block.backward)} backward"
        label = f"{row.name}\n{counts}\nkeeps {format_bytes(row.saved_bytes)}"
        drawing.node(f"b{index}", label, fillcolor=FILLS[kinds[block.digest] % len(FILLS)])
    for (source, target), size_bytes in sorted(_crossing_bytes(drawn_plan).items()):
        drawing.edge(f"b{source}", f"b{target}", label=format_bytes(size_bytes))
    if format == "dot":
        return str(drawing.source).encode()
    try:
        return bytes(drawing.pipe(format=format))
    except graphviz.ExecutableNotFound as error:
        raise MissingLibrary(
            "pictures of graphs need Graphviz's program 'dot' (Debian: apt install graphviz); "
            "format='dot' gives its text, to be drawn where it is"
        ) from error


def _crossing_bytes(plan: Plan) -> dict[tuple[int, int], int]:
    """(Block that makes, block that reads in its forward) -> bytes; blocks by position in the
    plan."""
    block_of = {n: i for i, b in enumerate(plan.blocks) for n in b.forward}
    made_by = producers(plan.graph)
    crossing: dict[tuple[int, int], set[int]] = {}
    for node in plan.graph.forward:
        for data in node.reads:
            source = block_of.get(made_by.get(data, -1))
            target = block_of.get(node.index)
            if source is not None and target is not None and source != target:
                crossing.setdefault((source, target), set()).add(data)
    sizes = {d.index: d.size_bytes for d in plan.graph.data}
    return {edge: sum(sizes[d] for d in storages) for edge, storages in crossing.items()}


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of matplotlib, on white so that it is legible on dark pages too.
    width, height: in inches. Raises MissingLibrary."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingLibrary(
            "pictures need matplotlib, which is not installed: pip install 'rockplan[plot]'"
        ) from error
    return figures.Figure(figsize=(width, height), layout="constrained", facecolor="white")


def image_bytes(figure: Any, format: Format) -> bytes:
    """Return the content of an image file; the same figure gives the same bytes."""
    matplotlib = importlib.import_module("matplotlib")
    file = io.BytesIO()
    settings = {"svg.hashsalt": "rockplan", "svg.fonttype": "none"}
    metadata = {"Date": None} if format == "svg" else {"Software": None}
    with matplotlib.rc_context(settings):
        figure.savefig(file, format=format, metadata=metadata, dpi=150)
    return file.getvalue()
