"""Versions: of the package (pyproject.toml reads it from here), and of all code that plans."""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata
from pathlib import Path

VERSION = "0.1.0"


@functools.cache
def planner() -> str:
    """Return a text that changes with what plans depend on besides graph, profile, budget and
    options: the sources of this package and the version of the solver."""
    sources = hashlib.sha256()
    folder = Path(__file__).parent.parent
    for path in sorted(folder.rglob("*.py")):
        sources.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        sources.update(path.read_bytes())
    solver = metadata.version("highspy")
    return f"rockplan {VERSION} [{sources.hexdigest()[:12]}], highspy {solver}"
