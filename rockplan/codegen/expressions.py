"""Expressions: texts of `values.sizes` -> functions.

The texts always come from a recording in this process, never from a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rockplan.graph_builder.costs.open_workspaces import PREFIX


def function_of(names: Iterable[str], texts: Iterable[str]) -> Callable[[tuple[int, ...]], Any]:
    """Return a function: values of the symbols `names` -> tuple of the values of `texts`."""
    lines = ["def evaluate(sizes):"]
    listed = "".join(f"{name}, " for name in names)
    lines += [f"    {listed}= sizes"] if listed else []
    lines += [f"    return ({''.join(f'{text}, ' for text in texts)})"]
    return loaded(lines, "evaluate")


@dataclass(frozen=True, slots=True)
class Expressions:
    """Expressions that are evaluated together."""

    texts: tuple[str, ...]
    function: Callable[[tuple[int, ...]], tuple[int | float, ...]]

    @classmethod
    def of(cls, names: Iterable[str], texts: Iterable[str]) -> Expressions:
        kept = tuple(t for t in dict.fromkeys(texts) if not t.startswith(PREFIX))
        return cls(kept, function_of(names, kept))

    def at(self, sizes: tuple[int, ...]) -> dict[str, int | float]:
        return dict(zip(self.texts, self.function(sizes), strict=True))


def loaded(lines: Iterable[str], name: str) -> Callable[..., Any]:
    """Return the function `name` of Python text in which expressions stand."""
    namespace: dict[str, Any] = {"math": math, "torch": torch}
    exec("\n".join(lines), namespace)
    made: Callable[..., Any] = namespace[name]
    return made
