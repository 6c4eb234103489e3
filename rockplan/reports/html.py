"""One HTML page about a plan, which opens without a network.

takes: a Plan, and measurements or comparisons beside it. returns: the page as text, with its style
and pictures inside; it loads and runs nothing. guarantees: texts of the model (names, paths) are
escaped; tables and figures are those of `explain`, `pictures` and the plan.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import resources

from rockplan.errors import MissingLibrary
from rockplan.reports import pictures
from rockplan.reports.explain import (
    Explanation,
    Recomputation,
    Tenant,
    explain_plan,
    price_text,
    recomputation_groups,
)
from rockplan.values.plan import Plan, format_bytes, plan_in
from rockplan.values.profile import MeasuredTimeline


def html_report(
    plan: object,
    *,
    title: str = "rockplan",
    series: Sequence[pictures.Series] = (),
    measured: MeasuredTimeline | None = None,
    eager_measured: MeasuredTimeline | None = None,
) -> str:
    """Return a self-contained HTML page: summary, curve, memory over time, schedule, owners of the
    peak, recomputed operations. Without matplotlib, what to install stands in place of pictures.

    plan: a Plan or a planned module. series: lines and marks beside the plan on the memory-time
    curve, as for `pictures.draw_curve` (`curve_series(rockplan.pareto(...))` is the whole curve).
    measured, eager_measured: as for `pictures.draw_memory`.
    """
    shown_plan = plan_in(plan)
    explanation = explain_plan(shown_plan)
    everything = explain_plan(shown_plan, unplanned=True)
    lines = {"measured": measured, "eager_measured": eager_measured}
    marked = (*series, pictures.plan_series(shown_plan))
    curve = figure("curve", lambda: pictures.draw_curve(marked))
    memory = figure("memory over time", lambda: pictures.draw_memory(shown_plan, **lines))
    schedule = figure("schedule", lambda: pictures.draw_schedule(shown_plan))
    sections = [
        _summary(shown_plan, explanation, everything),
        section("curve", "Memory against time", _CURVE_TEXT, curve),
        section("memory", "Memory over time", _MEMORY_TEXT, memory),
        section("blocks", "Schedule", _SCHEDULE_TEXT, schedule),
        _owners(explanation),
        _recomputed(explanation),
    ]
    return page(title, sections)


def page(title: str, sections: Iterable[str]) -> str:
    """Return a whole HTML page with our style. sections: HTML."""
    return _PAGE.format(title=html.escape(title), style=_style(), sections="\n".join(sections))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
{sections}
</body>
</html>
"""

_CURVE_TEXT = "Extra time over eager against peak bytes beyond parameters, gradients and inputs."
_MEMORY_TEXT = (
    "Live bytes by module, predicted for the step that keeps everything and for the plan, over "
    "predicted time; the line, where there is one, is what the allocator recorded of a step of the "
    "original and of the planned module, over the time that this step took under the profiler."
)
_SCHEDULE_TEXT = (
    "One row for each block: above, when its operations run; below, how many bytes of its "
    "activations are alive. Right: what it keeps for the backward pass. Below the blocks, where "
    "the plan pages: the copies to the host and back."
)


def _style() -> str:
    return resources.files("rockplan.reports").joinpath("report.css").read_text(encoding="utf-8")


def section(identity: str, heading: str, text: str, *content: str) -> str:
    body = "\n".join(content)
    return (
        f'<section id="{identity}-section">\n<h2>{html.escape(heading)}</h2>\n'
        f"<p>{html.escape(text)}</p>\n{body}\n</section>"
    )


def figure(name: str, draw: Callable[[], bytes]) -> str:
    """Return the HTML of a picture. draw: returns an SVG. Where matplotlib is missing, what to
    install stands in its place."""
    try:
        data = base64.b64encode(draw()).decode()
    except MissingLibrary as error:
        return f"<p>{html.escape(str(error))}</p>"
    return f'<figure><img alt="{name}" src="data:image/svg+xml;base64,{data}"></figure>'


def _summary(plan: Plan, explanation: Explanation, everything: Explanation) -> str:
    share = plan.peak_bytes / max(plan.eager_peak_bytes, 1)
    gap = plan.certificate.gap
    cards = (
        (format_bytes(plan.peak_bytes), f"predicted peak, {share:.0%} of keeping everything"),
        (format_bytes(plan.eager_peak_bytes), "peak of keeping everything"),
        (format_bytes(plan.budget_bytes), f"budget ({plan.budget_bytes} bytes)"),
        (f"{plan.overhead:+.1%}", f"predicted time, at most {gap:.1%} above the proven bound"),
        (format_bytes(plan.saved_bytes), "kept between forward and backward"),
        (str(sum(r.times for r in explanation.recomputations)), "operations run again"),
    )
    shown = "\n".join(
        f'<div class="card"><b>{html.escape(figure)}</b><span>{html.escape(label)}</span></div>'
        for figure, label in cards
    )
    basis = (
        f"{len(plan.graph.nodes)} operations in {len(plan.blocks)} blocks; profile "
        f"{plan.profile_source}; captured with torch {plan.torch_version}."
    ) + (f" Checked: {plan.checked}." if plan.checked else "")
    return (
        f'<section id="summary">\n{_lead("The plan", explanation)}\n'
        f"{_lead('Keeping everything', everything)}\n"
        f'<div class="cards">\n{shown}\n</div>\n<p>{html.escape(basis)}</p>\n</section>'
    )


def _lead(what: str, explanation: Explanation) -> str:
    owner = ""
    for first in explanation.shares[:1]:
        share = f"{first.size_bytes / max(explanation.peak_bytes, 1):.0%}"
        owner = f" {_code(first.pattern)} owns {share} of it."
    return (
        f'<p class="lead">{html.escape(what)}: peak {format_bytes(explanation.peak_bytes)} in the '
        f"{explanation.peak_phase} phase, at {_code(explanation.peak_operation)}.{owner}</p>"
    )


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[int] = (0,)
) -> str:
    """Return an HTML table. words: columns that are no numbers; cells of rows are HTML already."""
    classes = ["" if i in words else ' class="number"' for i in range(len(heads))]
    head = "".join(f"<th{c}>{html.escape(t)}</th>" for c, t in zip(classes, heads, strict=True))
    lines = [
        "<tr>" + "".join(f"<td{c}>{x}</td>" for c, x in zip(classes, row, strict=True)) + "</tr>"
        for row in rows
    ]
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _owners(explanation: Explanation) -> str:
    shares = table(
        ("share", "bytes", "tensors", "of"),
        (
            (
                f"{s.size_bytes / max(explanation.peak_bytes, 1):.1%}",
                format_bytes(s.size_bytes),
                str(s.tenants),
                f'{_code(s.pattern)}<br><span class="bar" '
                f'style="width:{60 * s.size_bytes / explanation.peak_bytes:.1f}%"></span>',
            )
            for s in explanation.shares
        ),
        words=(3,),
    )
    heads = ("bytes", "tensor", "kind", "why, and what to drop it")
    rows = (_tenant_row(t, explanation) for t in explanation.tenants)
    tenants = table(heads, rows, words=(1, 2, 3))
    text = (
        f"Every byte that is alive at the peak, {format_bytes(explanation.peak_bytes)} at "
        f"{explanation.peak_operation}."
    )
    summary = f"Each of {len(explanation.tenants)} tensors"
    each = f"<details><summary>{summary}</summary>\n{tenants}\n</details>"
    return section("owners", "What owns the peak", text, shares, each)


def _tenant_row(tenant: Tenant, explanation: Explanation) -> tuple[str, ...]:
    price = price_text(tenant.price, explanation) if tenant.price else tenant.undroppable
    return (
        format_bytes(tenant.size_bytes),
        _code(tenant.name),
        html.escape(tenant.kind),
        f"{html.escape(tenant.reason)}<br>{html.escape(price)}",
    )


def _recomputed(explanation: Explanation) -> str:
    if not explanation.recomputations:
        return section("recomputed", "Recomputed operations", "No operation runs again.")
    costly = sorted(explanation.recomputations, key=lambda r: (-r.time_ns, r.name))
    text = (
        "What runs again in the backward pass, layers of a stack together, costliest first. Buys: "
        "by how much keeping the results of one of them alone would raise the peak, at most."
    )
    found = recomputation_groups(explanation)
    heads = ("operations", "times", "time", "makes", "buys")
    groups = table(heads, (_group_row(p, g) for p, g in found))
    heads_of_each = ("operation", "times", "at", "for", "time", "makes", "buys")
    operations = table(heads_of_each, map(_recomputation_row, costly), words=(0, 3))
    each = f"<details><summary>Each of {len(costly)} operations</summary>\n{operations}\n</details>"
    return section("recomputed", "Recomputed operations", text, groups, each)


def _group_row(pattern: str, group: Sequence[Recomputation]) -> tuple[str, ...]:
    count = f" x{len(group)}" if len(group) > 1 else ""
    return (
        f"{_code(pattern)}{count}",
        str(sum(r.times for r in group)),
        f"{sum(r.time_ns for r in group) / 1e6:.2f} ms",
        format_bytes(sum(r.results_bytes * r.times for r in group)),
        format_bytes(max(0, *(r.buys_bytes for r in group))),
    )


def _recomputation_row(again: Recomputation) -> tuple[str, ...]:
    return (
        _code(again.name),
        str(again.times),
        ", ".join(f"{at / 1e6:.1f} ms" for at in again.at_ns[:3]),
        ", ".join(map(_code, dict.fromkeys(again.readers[:3]))),
        f"{again.time_ns / 1e6:.2f} ms",
        format_bytes(again.results_bytes),
        format_bytes(max(again.buys_bytes, 0)),
    )
