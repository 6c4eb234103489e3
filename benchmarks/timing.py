"""Side-by-side measurements, as `rockplan.compare` makes them, and where they were made."""

from __future__ import annotations

import os
import subprocess
import time
from importlib.metadata import version

from rockplan.solving.side_by_side import interleaved_seconds, machine, median_ratio

__all__ = ["interleaved_seconds", "machine", "mebibytes", "median_ratio", "where"]


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"


def where() -> str:
    """Commit, date, machine and versions of a row."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return (
        f"{commit}, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {machine()}, "
        f"HiGHS {version('highspy')}"
    )
