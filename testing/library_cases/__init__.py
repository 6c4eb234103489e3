"""Models of libraries beside those of the zoo: each at a size that plans in seconds, with one call.

A library is imported where a model of it is built.
"""

from __future__ import annotations

from testing.library_cases import images, language, science, series
from testing.library_cases.building import BUILDERS
from testing.models import Case
from testing.zoo_cases import loss_of

__all__ = ["images", "language", "library_case", "names", "science", "series"]


def names() -> list[str]:
    return [f"library/{name}" for name in sorted(BUILDERS)]


def library_case(name: str) -> Case:
    """Of 'library/LIBRARY/MODEL', in training mode."""
    built = BUILDERS[name.removeprefix("library/")]()
    return Case(name, built.model.train(), built.args, built.kwargs, loss_of)
