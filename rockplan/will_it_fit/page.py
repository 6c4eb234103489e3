"""One HTML page about what fits: bytes over batch, a line for each way.

takes: a Fit. returns: the page as text; it loads and runs nothing. guarantees: texts are escaped;
the figures are those of the rows.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from rockplan.reports.html import page, section, table
from rockplan.reports.pictures import COLOURS
from rockplan.values.plan import format_bytes
from rockplan.will_it_fit.answer import Fit, FitRow

_WIDTH, _HEIGHT = 1000, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 28, 40
_ABOVE = 1.2
"""How far bytes are drawn, in those of the device."""
_TEXT = (
    "What a step needs at its peak over the batch, at the batches that were looked at (of plans by "
    "the smallest one), beside what the device has (dashed). A mark is the largest batch that "
    "fits; point at it for what it takes. A way that fits no batch has none."
)
_HEADS = (
    *("length", "way", "largest batch", "allocated", "reserved", "overhead", "a second"),
    "who has the bytes at the peak",
)


def fit_page(fit: Fit, *, title: str = "Will it fit") -> str:
    """Return a self-contained HTML page of an answer: for each length a drawing of bytes over
    batch, and a table of the rows with who owns the memory."""
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in fit.notes)
    rows = table(_HEADS, map(_cells, fit.rows), words=(1, 7))
    lengths = dict.fromkeys(row.length for row in fit.rows)
    drawings = "".join(_drawing(fit, length) for length in lengths)
    entries = (
        f'<span><i style="background:{colour}"></i>{html.escape(way)}</span>'
        for way, colour in _colours(fit.rows).items()
    )
    legend = f'<div class="legend">{"".join(entries)}</div>'
    sections = (
        f'<p class="lead">{html.escape(fit.headline)}.</p>',
        section("batches", "Bytes and batch", _TEXT, drawings, legend),
        section("rows", "What each way needs", "", rows, notes),
    )
    return page(title, sections)


def _drawing(fit: Fit, length: int | None) -> str:
    rows = [row for row in fit.rows if row.length == length]
    batches = [batch for row in rows for batch, _ in row.peaks] or [1]
    least, most = math.log2(min(batches)), math.log2(max(batches))

    def x(batch: int) -> float:
        share = (math.log2(batch) - least) / max(most - least, 1)
        return _LEFT + share * (_WIDTH - _RIGHT - _LEFT)

    def y(size_bytes: float) -> float:
        share = min(size_bytes / fit.usable_bytes, _ABOVE) / _ABOVE
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    powers = [2**n for n in range(math.ceil(least), math.floor(most) + 1)]
    parts = [_label(x(n), _HEIGHT - _BOTTOM + 18, "middle", n) for n in powers]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        size_bytes = int(share * fit.usable_bytes)
        ends = (
            f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(size_bytes):.1f}" y2="{y(size_bytes):.1f}"'
        )
        parts.append(f'<line class="{"budget" if share == 1 else "grid"}" {ends}/>')
        parts.append(_label(_LEFT - 6, y(size_bytes) + 4, "end", format_bytes(size_bytes)))
    for row in rows:
        colour = _colours(fit.rows)[row.way]
        points = " ".join(f"{x(batch):.1f},{y(size):.1f}" for batch, size in row.peaks)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        if row.batch:
            at = y(dict(row.peaks).get(row.batch, row.allocated_bytes))
            of_length = "" if length is None else f" of length {length}"
            reserved = f"{format_bytes(row.reserved_bytes)} reserved, {row.overhead:+.1%}"
            said = f"{row.way}: batch {row.samples}{of_length}, {reserved}"
            parts.append(
                f'<circle class="mark" cx="{x(row.batch):.1f}" cy="{at:.1f}" r="5" fill="{colour}">'
                f"<title>{html.escape(said)}</title></circle>"
            )
    name = "batch" if length is None else f"batch, at length {length}"
    parts.append(_label(_WIDTH - _RIGHT, _HEIGHT - 4, "end", name))
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<figure><svg {size} role="img" aria-label="{name}">{"".join(parts)}</svg></figure>'


def _label(x: float, y: float, anchor: str, text: object) -> str:
    return f'<text class="soft" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _colours(rows: Sequence[FitRow]) -> dict[str, str]:
    ways = dict.fromkeys(row.way for row in rows)
    return {way: COLOURS[number % len(COLOURS)] for number, way in enumerate(ways)}


def _cells(row: FitRow) -> tuple[str, ...]:
    on_host = [("on the host", row.host_bytes)] if row.host_bytes else []
    owners = ", ".join(f"{owner} {format_bytes(size)}" for owner, size in (*row.owners, *on_host))
    return (*map(html.escape, row.cells), html.escape(owners))
