"""Columns: rows of short texts as aligned lines, for prints of graphs, schedules and programs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> list[str]:
    """Return one line of text for each row, cells padded to columns with two spaces between them.
    Columns at the positions `numbers` are aligned to the right."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if position in numbers else cell.ljust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return [line(row) for row in table]
