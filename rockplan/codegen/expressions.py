"""Expressions: texts of `values.sizes` -> functions.

The texts always come from a recording in this process, never from a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


def function_of(names: Iterable[str], texts: Iterable[str]) -> Callable[[tuple[int, ...]], Any]:
    """Return a function: values of the symbols `names` -> tuple of the values of `texts`."""
    lines = ["def evaluate(sizes):"]
    listed = "".join(f"{name}, " for name in names)
    lines += [f"    {listed}= sizes"] if listed else []
    lines += [f"    return ({''.join(f'{text}, ' for text in texts)})"]
    return loaded(lines, "evaluate")


def loaded(lines: Iterable[str], name: str) -> Callable[..., Any]:
    """Return the function `name` of Python text in which expressions stand."""
    namespace: dict[str, Any] = {"math": math, "torch": torch}
    exec("\n".join(lines), namespace)
    made: Callable[..., Any] = namespace[name]
    return made
