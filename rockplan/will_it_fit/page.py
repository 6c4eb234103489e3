"""One HTML page about what fits: the frontier of batch and length, a line for each way.

takes: a Fit. returns: the page as text; it loads and runs nothing. guarantees: texts are escaped;
the figures are those of the rows.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rockplan.reports.html import page, section, table
from rockplan.reports.palette import COLOURS
from rockplan.values.plan import format_bytes
from rockplan.will_it_fit.answer import Fit, FitRow

_WIDTH, _HEIGHT = 1000, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 28, 48
_TEXT = (
    "The largest batch of each length that fits, both on scales of powers of two; a way that fits "
    "no batch of a length has no mark there. Point at a mark for what it needs and takes."
)
_HEADS = (
    *("length", "way", "largest batch", "allocated", "reserved", "overhead", "a second"),
    "who has the bytes at the peak",
)


def fit_page(fit: Fit, *, title: str = "Will it fit") -> str:
    """Return a self-contained HTML page of an answer: a drawing of the largest batch over length,
    and a table of the rows with who owns the memory."""
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in fit.notes)
    rows = table(_HEADS, map(_cells, fit.rows), words=(1, 7))
    sections = (
        f'<p class="lead">{html.escape(fit.headline)}.</p>',
        section("frontier", "Batch and length", _TEXT, _frontier(fit.rows), _legend(fit)),
        section("rows", "What each way needs", "", rows, notes),
    )
    return page(title, sections)


@dataclass(frozen=True, slots=True)
class _Scale:
    """A logarithmic scale from 2**least to 2**most, which are at `begin` and `end` on the page."""

    least: int
    most: int
    begin: float
    end: float

    def at(self, size: int) -> float:
        share = (math.log2(size) - self.least) / max(self.most - self.least, 1)
        return self.begin + share * (self.end - self.begin)

    @property
    def ticks(self) -> Iterator[int]:
        return (2**power for power in range(self.least, self.most + 1))


def _scale(sizes: Sequence[int], begin: float, end: float) -> _Scale:
    least, most = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    return _Scale(least, max(most, least + 1), begin, end)


def _frontier(rows: Sequence[FitRow]) -> str:
    """Return an SVG figure of the largest batch over length, a line for each way; rows in which
    nothing fits have no mark."""
    marked = [row for row in rows if row.batch]
    x = _scale([row.length or 1 for row in rows], _LEFT, _WIDTH - _RIGHT)
    y = _scale([row.batch for row in marked] or [1], _HEIGHT - _BOTTOM, _TOP)
    parts = [*_axes(x, y, has_lengths=any(row.length for row in rows))]
    for way, colour in _colours(rows).items():
        own = [(x.at(row.length or 1), y.at(row.batch), row) for row in marked if row.way == way]
        points = " ".join(f"{left:.1f},{top:.1f}" for left, top, _ in own)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts += (
            f'<circle class="mark" cx="{left:.1f}" cy="{top:.1f}" r="5" fill="{colour}">'
            f"<title>{html.escape(_row_text(row))}</title></circle>"
            for left, top, row in own
        )
    label = "largest batch by length, a line for each way"
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<figure><svg {size} role="img" aria-label="{label}">{"".join(parts)}</svg></figure>'


def _axes(x: _Scale, y: _Scale, *, has_lengths: bool) -> Iterator[str]:
    """Yield the SVG elements of the grid and of its labels. x, y: scales of length and batch;
    has_lengths: lengths are labelled."""
    for size in y.ticks:
        at = y.at(size)
        yield f'<line class="grid" x1="{x.begin}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield _label(x.begin - 6, at + 4, "end", size)
    yield _label(4, y.end - 12, "start", "batch")
    if has_lengths:
        yield from (_label(x.at(size), y.begin + 18, "middle", size) for size in x.ticks)
        yield _label(x.end, y.begin + 38, "end", "length")


def _label(x: float, y: float, anchor: str, text: object) -> str:
    return f'<text class="soft" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _colours(rows: Sequence[FitRow]) -> dict[str, str]:
    ways = dict.fromkeys(row.way for row in rows)
    return {way: COLOURS[number % len(COLOURS)] for number, way in enumerate(ways)}


def _legend(fit: Fit) -> str:
    entries = (
        f'<span><i style="background:{colour}"></i>{html.escape(way)}</span>'
        for way, colour in _colours(fit.rows).items()
    )
    return f'<div class="legend">{"".join(entries)}</div>'


def _row_text(row: FitRow) -> str:
    length = "" if row.length is None else f" of length {row.length}"
    reserved = format_bytes(row.reserved_bytes)
    return f"{row.way}: batch {row.samples}{length}, {reserved} reserved, {row.overhead:+.1%}"


def _cells(row: FitRow) -> tuple[str, ...]:
    on_host = [("on the host", row.host_bytes)] if row.host_bytes else []
    owners = ", ".join(f"{owner} {format_bytes(size)}" for owner, size in (*row.owners, *on_host))
    return (*map(html.escape, row.cells), html.escape(owners))
