"""Load: generated text -> functions.

The text always comes from `emit` in this process, never from a file.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rockplan.codegen.emit import Code, emit_guard
from rockplan.values.interface import Interface

SliceFunction = Callable[[Any], tuple[torch.Tensor, ...]]

# Operators that a function of PyTorch calls as they are, given the same arguments in the same
# order: it reads them in 0.4 us less, those of a convolution in 4 us less. (Views are methods of
# tensors in the text already, see `emit`.)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        f"aten.{name}": getattr(torch._C._VariableFunctions, name.split(".")[0])
        for name in (
            "_log_softmax.default", "_log_softmax_backward_data.default", "_safe_softmax.default",
            "_softmax.default", "_softmax_backward_data.default", "add.Tensor", "addmm.default",
            "baddbmm.default", "bmm.default", "cat.default", "clone.default",
            "constant_pad_nd.default", "convolution.default", "cudnn_batch_norm.default",
            "div.Tensor", "embedding.default", "exp.default", "log.default", "mean.dim",
            "minimum.default", "maximum.default", "mm.default", "mul.Tensor",
            "native_batch_norm.default", "native_dropout.default", "native_group_norm.default",
            "native_layer_norm.default", "neg.default", "pow.Tensor_Scalar", "relu.default",
            "relu_.default", "rsqrt.default", "sigmoid.default", "sqrt.default", "sub.Tensor",
            "sum.dim_IntList", "tanh.default", "where.self",
        )
    },
    "aten.add_.Tensor": torch.Tensor.add_,
    "aten.copy_.default": torch.Tensor.copy_,
    "aten.mul_.Tensor": torch.Tensor.mul_,
    "aten.avg_pool2d.default": torch._C._nn.avg_pool2d,
    "aten.gelu.default": torch._C._nn.gelu,
    "aten.max_pool2d_with_indices.default": torch._C._nn.max_pool2d_with_indices,
    "aten.silu.default": torch._C._nn.silu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Functions:
    """forward(frame) -> output tensors; backward[k](frame) -> gradients of slice k;
    guards[i](leaves, constants) -> the value that must equal `expected` of guard i."""

    forward: SliceFunction
    backward: tuple[SliceFunction, ...]
    guards: tuple[Callable[[Any, Any], object], ...]


def load(code: Code, interface: Interface, name: str) -> Functions:
    """Compile the text of a plan; `name` appears in tracebacks."""
    namespace = _execute(code.source, code.operators, f"<rockplan {name}>")
    guards = []
    for number, guard in enumerate(interface.guards):
        text, operators = emit_guard(guard, number)
        guards.append(
            _execute(text, operators, f"<rockplan guard {number} {name}>")[f"guard_{number}"]
        )
    backward = tuple(namespace[f"backward_{k}"] for k in range(len(code.handed)))
    return Functions(namespace["forward"], backward, tuple(guards))


def _execute(text: str, operators: tuple[tuple[str, str], ...], filename: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"torch": torch}
    for identifier, op in operators:
        namespace[identifier] = _FUNCTIONS.get(op) or _operator(op)
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    exec(compile(text, filename, "exec"), namespace)
    return namespace


def _operator(op: str) -> Callable[..., Any]:
    """Without the Python frame of OpOverload.__call__."""
    library, packet, overload = op.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, library), packet), overload)._op
    return found
