"""One HTML page about what fits: bytes over batch, a line for each way.

takes: a Fit. returns: the page as text; it loads and runs nothing. guarantees: texts are escaped;
the figures are those of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rockplan.reports.html import figure, page, preformatted, section
from rockplan.reports.pictures import COLOURS, image_bytes, new_figure
from rockplan.values.columns import aligned
from rockplan.values.plan import format_bytes
from rockplan.will_it_fit.answer import Fit, FitRow

_ABOVE = 1.2
"""How far bytes are drawn, in those of the device."""
_TEXT = (
    "What a step needs at its peak over the batch, at the batches that were looked at (of plans by "
    "the smallest one), beside what the device has (dashed). A mark is the largest batch that "
    "fits. A way that fits no batch has none."
)


def fit_page(fit: Fit) -> str:
    """Return a self-contained HTML page of an answer: for each length a drawing of bytes over
    batch, and who owns the memory. Without matplotlib, what to install
    stands in place of drawings."""
    of_length: dict[str, list[FitRow]] = {}
    for row in fit.rows:
        name = "batch" if row.length is None else f"batch, at length {row.length}"
        of_length.setdefault(name, []).append(row)
    drawings = (
        figure(name, partial(_drawing, name, found, fit.usable_bytes))
        for name, found in of_length.items()
    )
    sections = (
        section("The answer", "", preformatted(str(fit))),
        section("Bytes and batch", _TEXT, *drawings),
        section("Who has the bytes at the peak", "", preformatted(_owners(fit.rows))),
    )
    return page("Will it fit", sections)


def _drawing(name: str, rows: Sequence[FitRow], usable_bytes: int) -> bytes:
    drawn = new_figure(9, 3.4)
    axis = drawn.subplots()
    axis.set_xscale("log", base=2)
    for number, row in enumerate(rows):
        peaks, colour = dict(row.peaks), COLOURS[number % len(COLOURS)]
        axis.plot([*peaks], [*peaks.values()], color=colour, label=row.way)
        if row.batch:
            axis.plot(row.batch, peaks.get(row.batch, row.allocated_bytes), "o", color=colour)
    axis.axhline(usable_bytes, color="#B00020", linestyle="--")
    axis.set_ylim(0, _ABOVE * usable_bytes)
    ticks = [usable_bytes * quarters // 4 for quarters in range(5)]
    axis.set_yticks(ticks, [*map(format_bytes, ticks)])
    axis.grid(alpha=0.3)
    axis.set_xlabel(name)
    drawn.legend(loc="outside right upper", fontsize=9)
    return image_bytes(drawn, "svg")


def _owners(rows: Sequence[FitRow]) -> str:
    lines = []
    for row in rows:
        on_host = [("on the host", row.host_bytes)] if row.host_bytes else []
        owned = (f"{owner} {format_bytes(size)}" for owner, size in (*row.owners, *on_host))
        lines.append((*row.cells[:3], ", ".join(owned)))
    return "\n".join(aligned((("length", "way", "largest batch", ""), *lines), numbers=(0, 2)))
