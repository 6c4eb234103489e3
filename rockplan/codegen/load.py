"""Load: generated text, and expressions of sizes (`values.sizes`) -> functions.

The texts always come from `emit` or a recording in this process, never from a file.
"""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rockplan.codegen.emit import Code, emit_guard
from rockplan.graph_builder.costs.open_workspaces import PREFIX
from rockplan.graph_builder.fusion.kernels import functions_of
from rockplan.graph_builder.operators.facts import resolve
from rockplan.graph_builder.operators.rows import ROWS
from rockplan.graph_builder.operators.symbols import function_of
from rockplan.values.graph import Kernel
from rockplan.values.interface import Interface

SliceFunction = Callable[[Any], tuple[torch.Tensor, ...]]

# Operators with a function of PyTorch that takes the same arguments in the same order.
# (Views are methods of tensors in the text already, see `emit`.)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    row.name: operator.attrgetter(row.function.removeprefix("torch."))(torch)
    for row in ROWS
    if row.function
}


@dataclass(frozen=True, slots=True)
class Functions:
    """forward(frame) -> output tensors; backward[k](frame) -> gradients of slice k;
    guards[i](leaves, constants, buffers, sizes) -> the value that must equal `expected` of guard
    i."""

    forward: SliceFunction
    backward: tuple[SliceFunction, ...]
    guards: tuple[Callable[[Any, Any, Any, Any], object], ...]


def load(code: Code, interface: Interface, name: str, kernels: Sequence[Kernel] = ()) -> Functions:
    """Compile the text of a plan and of the interface's guards; return the functions. name: of the
    plan, in tracebacks; kernels: those of its graph, compiled here if need be."""
    filename = f"<rockplan {name}>"
    called_ops = {op for _, op in code.operators}
    called_ops |= {kernel.plain for kernel in kernels if kernel.op in called_ops}
    functions = functions_of(kernel for kernel in kernels if kernel.op in called_ops)
    namespace = _execute(code.source, code.operators, filename, functions)
    guards = []
    for number, guard in enumerate(interface.guards):
        text, operators = emit_guard(guard, number, interface.sizes.names)
        guards.append(
            _execute(text, operators, f"<rockplan guard {number} {name}>")[f"guard_{number}"]
        )
    backward = tuple(namespace[f"backward_{k}"] for k in range(len(code.handed)))
    return Functions(namespace["forward"], backward, tuple(guards))


def _execute(
    text: str,
    operators: tuple[tuple[str, str], ...],
    filename: str,
    kernels: Mapping[str, Callable[..., Any]] | None = None,
) -> dict[str, Any]:
    known = {**_FUNCTIONS, **(kernels or {})}
    namespace: dict[str, Any] = {"torch": torch, "math": math}
    for identifier, op in operators:
        namespace[identifier] = known.get(op) or resolve(op)._op
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    exec(compile(text, filename, "exec"), namespace)
    return namespace


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
