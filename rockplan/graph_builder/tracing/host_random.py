"""Draws: which line of a forward draws from a generator of random numbers of Python or numpy.

takes: the generator, and the forward. guarantees: the first such line, and the argument that takes
what it draws, if there is one.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from rockplan.graph_builder.tracing.source_lines import is_of_python, is_of_users
from rockplan.python_state.elements import GENERATOR


class DrawingLine:
    """The first line of Python that draws from a generator, and the module in which that runs.

    argument: says which argument takes what the line draws, '' if none is known: one of a forward
    that is running, whose name the drawn value gets."""

    def __init__(self, generator: Any, module: Callable[[], str]) -> None:
        self._generator, self._path = generator, module
        self.module, self.source, self.argument = module(), "", ""

    def find(self, again: Callable[[], object]) -> None:
        """Run `again` with an eye on each line. Its errors do not matter."""
        self._start = GENERATOR.read(self._generator)
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            with contextlib.suppress(Exception):
                again()
        finally:
            sys.settrace(before)

    def _entered(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if self.source or is_of_python(name) or not is_of_users(name):
            return None
        line = frame.f_lineno

        def follow(frame: types.FrameType, event: str, arg: Any) -> Any:
            nonlocal line
            if not self.source and GENERATOR.read(self._generator) != self._start:
                self.module, self.source = self._path(), f"{frame.f_code.co_filename}:{line}"
                self.argument = _argument(frame, line)
            line = frame.f_lineno
            return follow

        return follow


def _argument(frame: types.FrameType | None, line: int) -> str:
    # By the name that the value gets in the functions that are running.
    names: set[str] = set()
    while frame is not None:
        owner = frame.f_locals.get("self")
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        found = sorted(names & {*arguments})
        if found and isinstance(owner, nn.Module) and frame.f_code.co_name == "forward":
            return f"pass {found[0]!r} to the {type(owner).__name__}, which draws where it is None"
        text = linecache.getline(frame.f_code.co_filename, line)
        names |= {*re.findall(r"^\s*(\w+)\s*=[^=]", text)}
        frame = frame.f_back
        line = frame.f_lineno if frame else 0
    return ""
