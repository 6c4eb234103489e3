"""Rows of `benchmarks.gpu` as text: a table for each kind of task, whose columns are what its rows
have. Bytes are shown in MiB."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

Row = dict[str, Any]
FIRST = ("task", "way")
DETAIL = "detail"
"""Of a row that is kept and no line of a table."""


def line(row: Row) -> str:
    """One row on the screen."""
    known = [key for key in row if key not in FIRST and row[key] is not None]
    cells = [f"{_title(key)} {_text(key, row[key])}" for key in known]
    return f"{row['task']} | {row['way']} | {', '.join(cells)}"


def table(rows: Sequence[Row]) -> str:
    """Of all rows, those of one kind after each other."""
    shown = [row for row in rows if not row.get(DETAIL)]
    parts = [_table(list(of_kind)) for _, of_kind in groupby(shown, key=_kind)]
    return "\n".join(parts)


def _kind(row: Row) -> str:
    return str(row["task"]).split()[0]


def _table(rows: Sequence[Row]) -> str:
    keys = list(dict.fromkeys([*FIRST, *(key for row in rows for key in row)]))
    lines = [_cells(map(_title, keys)), "|---" * len(keys) + "|"]
    lines += [_cells(_text(key, row.get(key)) for key in keys) for row in rows]
    return "\n".join(lines) + "\n"


def _cells(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _title(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ") + (" MiB" if key.endswith("_bytes") else "")


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key.endswith("_bytes"):
        return f"{value / 2**20:.2f}"
    if key.split("_")[-1] in ("ms", "s"):
        return f"{value:.1f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
