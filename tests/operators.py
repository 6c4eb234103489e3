"""Calls of operators on tensors whose bits are compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.recorded.evaluate import substitute
from rockplan.values.graph import Call, ValueRef

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


SHAPE = (3, 5, 7, 33)


PERMUTATIONS = {"contiguous": (0, 1, 2, 3), "channels last": (0, 3, 1, 2), "reversed": (3, 2, 1, 0)}


# Arguments that follow the operator's tensors.
LITERALS: dict[str, tuple[Any, ...]] = {
    "aten.add.Scalar": (1.7,),
    "aten.sub.Scalar": (1.7,),
    "aten.mul.Scalar": (1.7,),
    "aten.div.Scalar": (1.7,),
    "aten.masked_fill.Scalar": (-1.5,),
    "aten.pow.Tensor_Scalar": (3,),
    "aten.clamp.default": (-0.5, 0.5),
    "aten.clamp_min.default": (0.1,),
    "aten.threshold_backward.default": (0,),
    "aten.leaky_relu_backward.default": (0.01, False),
    "aten.hardtanh_backward.default": (-0.5, 0.5),
    "aten._softmax_backward_data.default": (3, None),
    "aten._log_softmax_backward_data.default": (3, None),
}


KEYWORDS: dict[str, tuple[tuple[tuple[str, Any], ...], ...]] = {
    "aten.add.Tensor": ((("alpha", 0.3),), (("alpha", -1),)),
    "aten.sub.Tensor": ((("alpha", 0.3),),),
    "aten.addcmul.default": ((("value", 0.3),),),
    "aten.addcdiv.default": ((("value", -1),),),
    "aten.gelu.default": ((("approximate", "tanh"),),),
    "aten.gelu_backward.default": ((("approximate", "tanh"),),),
}


# Take a number in the place of their second tensor.
WITH_NUMBERS = {f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div")}


def in_layout(values: torch.Tensor, layout: str) -> torch.Tensor:
    """A dense tensor of the values whose elements lie in another order."""
    order = PERMUTATIONS[layout]
    back = sorted(range(len(order)), key=order.__getitem__)
    return values.permute(order).contiguous().permute(back)


def drawn(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Numbers, some of them infinite, tiny or -0, and NaNs of two kinds."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    flat = values.reshape(-1)
    special = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, 3e4, 0.5, -0.5], dtype=dtype
    )
    places = torch.randperm(flat.numel(), generator=generator)
    flat[places[: 4 * len(special)]] = special.repeat(4)[: flat.numel()]
    bits = flat.view(integers(dtype))
    bits[flat != flat] |= 5 * (torch.arange(len(bits[flat != flat])) % 2).to(bits.dtype)
    return values


def integers(dtype: torch.dtype) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = a.dtype if a.dtype is torch.bool else integers(a.dtype)
    return a.stride() == b.stride() and torch.equal(a.view(kind), b.view(kind))


def execute(call: Call, tensors: list[torch.Tensor]) -> torch.Tensor:
    operator = facts.resolve(call.op)
    args = [substitute(a, tensors.__getitem__) for a in call.args]
    kwargs = {k: substitute(a, tensors.__getitem__) for k, a in call.kwargs}
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args, **kwargs)


def operand_sets(op: str, dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    """Tensors for `op`: in equal and in different layouts, and broadcast against the first."""
    arguments = facts.resolve(op)._schema.arguments
    tensors = [a.name for a in arguments if str(a.type) == "Tensor"]

    def made(names: list[str], layouts: tuple[str, ...], shapes: list[tuple[int, ...]]) -> Any:
        found = []
        for i, (name, layout, shape) in enumerate(zip(names, layouts, shapes, strict=True)):
            values = drawn(dtype, shape, i)
            if name in ("condition", "mask"):
                values = values > 0
            found.append(in_layout(values, layout) if len(shape) == 4 else values)
        return found

    for layouts in itertools.product(PERMUTATIONS, repeat=len(tensors)):
        yield made(tensors, layouts, [SHAPE] * len(tensors))
    if len(tensors) > 1 and "backward" not in op:
        for small in ((33,), (5, 1, 1), (1, 1, 7, 1), ()):
            for place in range(len(tensors)):
                shapes = [small if i == place else SHAPE for i in range(len(tensors))]
                for layout in PERMUTATIONS:
                    yield made(tensors, (layout,) * len(tensors), shapes)


def calls(op: str, dtype: torch.dtype) -> Iterator[tuple[Call, list[torch.Tensor]]]:
    """Calls of `op` as they are recorded, with their tensors."""
    literals = tuple(dtype if v is None else v for v in LITERALS.get(op, ()))
    for tensors in operand_sets(op, dtype):
        refs = [ValueRef(i) for i in range(len(tensors))]
        results = (len(tensors),)
        args: tuple[Any, ...] = (*refs, *literals)
        if op == "aten.elu_backward.default":
            args = (refs[0], 1.0, 1.0, 1.0, False, refs[1])
        yield Call(op, args, (), results), tensors
        for kwargs in KEYWORDS.get(op, ()):
            yield Call(op, args, kwargs, results), tensors
        if op in WITH_NUMBERS:
            for number in (1.7, -3, 1e-3):
                yield Call(op, (refs[0], number), (), (1,)), tensors[:1]
