"""Functions of PyTorch that generated code calls in place of operators call just these."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rockplan.codegen.load import _FUNCTIONS
from rockplan.graph_builder.operators.facts import resolve
from rockplan.graph_builder.operators.rows import ROWS

X, Y, M = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6), torch.randn(6, 6)
B, V, I = torch.randn(2, 6, 6), torch.randn(4), torch.tensor([[1, 2]])  # noqa: E741
CONVOLUTION = (X, torch.randn(4, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
MADE = {
    "dtype": torch.float64,
    "layout": torch.strided,
    "device": torch.device("cpu"),
    "pin_memory": False,
}
NORM = (X, V, V, V, V, True, 0.1, 1e-5)

SAMPLES: dict[str, list[tuple[Any, ...]]] = {
    "aten._log_softmax.default": [(X, -1, False)],
    "aten._log_softmax_backward_data.default": [(X, Y, 1, torch.float32)],
    "aten._safe_softmax.default": [(X, -1)],
    "aten._softmax.default": [(X, 3, False)],
    "aten._softmax_backward_data.default": [(X, Y, -1, torch.float32)],
    "aten.add.Tensor": [(X, Y), (X, 2), (X, 0.5), (X, True), (X, Y, {"alpha": 3})],
    "aten.addmm.default": [(V[:0].new_zeros(6), M, M), (M, M, M, {"beta": 0, "alpha": 2})],
    "aten.baddbmm.default": [(B, B, B), (B, B, B, {"beta": 0.5})],
    "aten.bmm.default": [(B, B)],
    "aten.cat.default": [([X, Y], 1), ([X, Y],)],
    "aten.clone.default": [
        (X,), (X, {"memory_format": torch.contiguous_format}), (X, {"memory_format": None}),
    ],
    "aten.constant_pad_nd.default": [(X, [1, 0, -1, 2], 0.0), (X, [1, 1])],
    "aten.convolution.default": [CONVOLUTION, (*CONVOLUTION[:2], V, *CONVOLUTION[3:])],
    "aten.cudnn_batch_norm.default": [NORM, (X, V, None, None, None, *NORM[5:])],
    "aten.div.Tensor": [(X, Y), (X, 2), (X, 0.5)],
    "aten.embedding.default": [(M, I), (M, I, 2), (M, I, 2, True, False)],
    "aten.exp.default": [(X,)],
    "aten.log.default": [(X,)],
    "aten.mean.dim": [
        (X, [2, 3]), (X, [-1], True), (X, [0], False, {"dtype": torch.float64}), (X, None), (X, []),
    ],
    "aten.minimum.default": [(X, Y)],
    "aten.maximum.default": [(X, Y)],
    "aten.mm.default": [(M, M)],
    "aten.mul.Tensor": [(X, Y), (X, 2), (X, 0.5), (X, 1j)],
    "aten.native_batch_norm.default": [NORM, (X, None, None, None, None, *NORM[5:])],
    "aten.native_dropout.default": [(X, 0.1, True), (X, 0.1, None)],
    "aten.native_group_norm.default": [(X, V, V, 2, 4, 36, 2, 1e-5)],
    "aten.native_layer_norm.default": [(X, [6, 6], M, M, 1e-5), (X, [6], None, None, 1e-5)],
    "aten.neg.default": [(X,)],
    "aten.pow.Tensor_Scalar": [(X, 2), (X, -0.5), (X, 1j)],
    "aten.relu.default": [(X,)],
    "aten.relu_.default": [(X,)],
    "aten.rsqrt.default": [(X,)],
    "aten.sigmoid.default": [(X,)],
    "aten.sqrt.default": [(X,)],
    "aten.sub.Tensor": [(X, Y), (X, 2), (X, Y, {"alpha": 0.5})],
    "aten.sum.dim_IntList": [
        (X, [0]), (X, [0, 2], True), (X, [1], {"dtype": torch.float64}), (X, None, True), (X, []),
    ],
    "aten.tanh.default": [(X,)],
    "aten.where.self": [(X > 0, X, Y)],
    "aten.add_.Tensor": [(X, Y), (X, 1), (X, Y, {"alpha": 2})],
    "aten.copy_.default": [(X, Y), (X, Y, True)],
    "aten.mul_.Tensor": [(X, Y), (X, 0.5)],
    "aten.avg_pool2d.default": [(X, [2, 2]), (X, [2, 2], [2, 2], [0, 0], False, True, None)],
    "aten.gelu.default": [(X,), (X, {"approximate": "tanh"})],
    "aten.max_pool2d_with_indices.default": [(X, [3, 3]), (X, [3, 3], [2, 2], [1, 1], [1, 1])],
    "aten.silu.default": [(X,)],
    "aten.bernoulli_.float": [(X, 0.5), (X, {"p": 0.25})],
    "aten.empty_strided.default": [([2, 3], [3, 1], MADE)],
    "aten.ones.default": [([2, 3], MADE), ([], MADE)],
    "aten.scalar_tensor.default": [(0.5, MADE), (2, MADE)],
    "aten.pow.Tensor_Scalar_out": [(X, 2, {"out": Y}), (X, -0.5, {"out": X})],
}  # fmt: skip
for name in ("exp", "log", "neg", "rsqrt", "sigmoid", "sqrt", "tanh"):
    SAMPLES[f"aten.{name}.out"] = [(X, {"out": Y}), (X, {"out": X})]
for name in ("add", "div", "maximum", "minimum", "mul", "sub"):
    SAMPLES[f"aten.{name}.out"] = [(X, Y, {"out": Y}), (X, M, {"out": X})]
for name in ("add", "div", "mul", "sub"):
    SAMPLES[f"aten.{name}.out"] += [(X, 2, {"out": Y}), (X, 0.5, {"out": X})]


class Reached(Exception):  # noqa: N818
    """An operator was called, with these arguments."""


class Asking(TorchDispatchMode):
    """Runs nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Reached(func, args, kwargs or {})


def reached(function: Callable[..., Any], sample: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first operator that `function` calls, and all that it passes to it."""
    kwargs = sample[-1] if isinstance(sample[-1], dict) else {}
    args = sample[:-1] if kwargs else sample
    with Asking(), torch._C._AutoDispatchBelowAutograd(), pytest.raises(Reached) as info:
        function(*args, **kwargs)
    operator, *passed = info.value.args
    leaves, structure = pytree.tree_flatten(passed)
    return str(operator), structure, [described(leaf) for leaf in leaves]


def described(leaf: Any) -> Any:
    return id(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)


def test_functions_call_their_operator_alone() -> None:
    for op, function in _FUNCTIONS.items():
        for sample in SAMPLES[op]:
            found = reached(function, sample)
            assert found[0] == op
            assert found == reached(resolve(op), sample)


TENSOR_METHODS = {
    "aten._unsafe_view.default": (X, [-1]),
    "aten.as_strided.default": (X, [2], [1], 1),
    "aten.expand.default": (X[None], [2, *X.shape]),
    "aten.permute.default": (X[0], [1, 0]),
    "aten.select.int": (X, 0, 1),
    "aten.squeeze.dim": (X, 0),
    "aten.t.default": (X[0],),
    "aten.transpose.int": (X, 0, 1),
    "aten.unsqueeze.default": (X, 0),
    "aten.view.default": (X, [-1]),
}


def test_methods_call_their_operator_alone() -> None:
    for row in ROWS:
        if row.method:
            sample = TENSOR_METHODS[row.name]
            found = reached(operator.methodcaller(row.method, *sample[1:]), sample[:1])
            # What `_unsafe_view` makes is a view to all but autograd.
            assert found[0] == row.name.replace("_unsafe_view", "view")
            assert found == reached(resolve(found[0]), sample)
