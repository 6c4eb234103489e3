"""One HTML page about a plan, which opens without a network.

takes: a Plan, and lines beside it. returns: the page as text, with its style and pictures inside;
it loads and runs nothing. guarantees: texts of the model (names, paths) are escaped; words and
figures are those that `print` and `pictures` show.
"""

from __future__ import annotations

import base64
import html
import sys
from collections.abc import Callable, Iterable, Sequence

from rockplan.errors import MissingLibrary
from rockplan.reports import pictures
from rockplan.reports.explain import explain_plan, explanation_text
from rockplan.values.plan import plan_in


def html_report(
    plan: object, *, title: str = "rockplan", series: Sequence[pictures.Series] = ()
) -> str:
    """Return a self-contained HTML page: the plan in words, curve, memory over time, schedule,
    owners of the peak and recomputed operations, those of the step that keeps everything.

    plan: a Plan or a planned module. series: lines and marks beside the plan on the memory-time
    curve, as for `pictures.draw_curve` (`curve_series(rockplan.pareto(...))` is the whole curve).
    Without matplotlib, what to install stands in place of pictures.
    """
    shown = plan_in(plan)
    marked = (*series, pictures.plan_series(shown))
    explained, everything = (
        preformatted(explanation_text(explain_plan(shown, unplanned=unplanned), sys.maxsize))
        for unplanned in (False, True)
    )
    sections = (
        section("The plan", "", preformatted(str(shown))),
        section(
            "Memory against time",
            "Extra time over eager against peak bytes beyond parameters, gradients and inputs.",
            figure("curve", lambda: pictures.draw_curve(marked)),
        ),
        section(
            "Memory over time",
            "Live bytes by module, predicted for the step that keeps everything and for the plan, "
            "over predicted time.",
            figure("memory over time", lambda: pictures.draw_memory(shown)),
        ),
        section(
            "Schedule",
            "One row for each block: above, when its operations run; below, how many bytes of its "
            "activations are alive. Right: what it keeps for the backward pass. Below the blocks, "
            "where the plan pages: the copies to the host and back.",
            figure("schedule", lambda: pictures.draw_schedule(shown)),
        ),
        section("What owns the peak of the plan", "", explained),
        section("What owns the peak where everything is kept", "", everything),
    )
    return page(title, sections)


def page(title: str, sections: Iterable[str]) -> str:
    """Return a whole HTML page with our style. sections: HTML."""
    return _PAGE.format(title=html.escape(title), style=_STYLE, sections="\n".join(sections))


def section(heading: str, text: str, *content: str) -> str:
    """Return HTML of a part of a page. text: what its content shows, '' for nothing to say;
    content: HTML."""
    said = text and f"<p>{html.escape(text)}</p>"
    return "\n".join(
        ("<section>", f"<h2>{html.escape(heading)}</h2>", said, *content, "</section>")
    )


def preformatted(text: str) -> str:
    """Return the HTML of text that keeps its lines."""
    return f"<pre>{html.escape(text)}</pre>"


def figure(name: str, draw: Callable[[], bytes]) -> str:
    """Return the HTML of a picture. draw: returns an SVG. Where matplotlib is missing, what to
    install stands in its place."""
    try:
        data = base64.b64encode(draw()).decode()
    except MissingLibrary as error:
        return f"<p>{html.escape(str(error))}</p>"
    return f'<figure><img alt="{name}" src="data:image/svg+xml;base64,{data}"></figure>'


_STYLE = """\
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 1080px; padding: 1.5rem; font: 15px/1.5 system-ui, sans-serif; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; border-top: 1px solid #888; padding-top: 1.2rem; }
pre { font: 13px/1.5 ui-monospace, monospace; overflow-x: auto; }
figure { margin: 0 0 1rem; }
img { width: 100%; height: auto; display: block; }
"""

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
