"""A CUDA device that computes nothing, so that the host's side of CUDA runs where there is none.

With libcuda.so.1 of this folder, which `make cuda` builds, a CUDA build of PyTorch believes in an
H200, and runs its own caching allocator, streams, events, generators, capture of graphs, Inductor,
and Triton down to ptxas. Real are: which operators and kernels run in which order, every byte that
the allocator gives out, synchronisations, copies, what may not be captured, devices, what the host
needs for a step, whether a kernel compiles. Not real are results (memory is zeros), times of the
device, workspaces of cuDNN and cuBLAS, spills of registers, asserts of kernels.

What Inductor's kernels compute, and whether programs of one get in each other's way, is seen by
Triton's interpreter: `benchmarks.stand_in.races`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

NAME = "computes nothing"
_kept: list[torch.library.Library] = []


def is_there() -> bool:
    """Whether the CUDA device of this process is the stand-in."""
    return torch.cuda.is_available() and NAME in torch.cuda.get_device_name()


def install() -> None:
    """To be called before anything uses the device. cuDNN is not part of the stand-in: its
    operators allocate their results, and no workspace. Tensors of one shape are equal, since
    nothing is computed."""
    if not is_there():
        raise SystemExit("this is a real device, or none: see the target cuda of Makefile")
    if _kept:
        return
    library = torch.library.Library("aten", "IMPL")
    for name, function in (_CUDNN | _AT_RUN_TIME).items():
        library.impl(name, function, "CUDA")
    _kept.append(library)
    equal = torch.equal

    def equal_if_computed(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.shape == b.shape if a.is_cuda and b.is_cuda else equal(a, b)

    torch.equal = equal_if_computed


def counts() -> dict[str, int]:
    """What the device was asked for so far: launches of eager kernels and of Triton's, matrix
    products, copies, synchronisations."""
    library = ctypes.CDLL("libcuda.so.1")
    library.stand_in_names.restype = ctypes.c_char_p
    names = library.stand_in_names().decode().split()
    numbers = (ctypes.c_longlong * len(names)).in_dll(library, "stand_in_counts")
    return dict(zip(names, numbers, strict=True))


def since(before: dict[str, int]) -> dict[str, int]:
    """What was asked for after `counts()` returned `before`."""
    return {name: number - before[name] for name, number in counts().items()}


# -- operators of cuDNN --------------------------------------------------------------------------


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    with_sums: bool,
    *rest: Any,
    **named: Any,
) -> tuple[Any, ...]:
    batch, heads, length, _ = query.shape
    result = query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)
    sums = query.new_empty((batch, heads, length, 1), dtype=torch.float32)
    seed = torch.empty((), dtype=torch.int64, device=query.device)
    mask = torch.Tensor()
    return result, sums, None, None, length, key.shape[2], seed, torch.empty_like(seed), mask


def _attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *flags: bool,
) -> torch.Tensor:
    with torch.no_grad():
        shape = torch.ops.aten.convolution.default(
            x.to("meta"), weight.to("meta"), None, stride, padding, dilation, False, [0, 0], groups
        ).shape
    last = x.dim() == 4 and (_is_channels_last(x) or _is_channels_last(weight))
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    last = tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()


def _convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    of_input, of_weight, of_bias = rest[-1]
    return (
        torch.empty_like(x) if of_input else None,
        torch.empty_like(weight) if of_weight else None,
        grad.new_empty(grad.shape[1]) if of_bias else None,
    )


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    *rest: float,
) -> tuple[torch.Tensor, ...]:
    saved = x.new_empty(x.shape[1] if training else 0, dtype=torch.float32)
    reserve = torch.empty(0, dtype=torch.uint8, device=x.device)
    return torch.empty_like(x), saved, torch.empty_like(saved), reserve


def _batch_norm_backward(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _flatten_weights(weights: Sequence[torch.Tensor], *rest: Any) -> torch.Tensor:
    """Of recurrent layers, when they are moved; they stay where they are."""
    return weights[0].new_empty(0)


_CUDNN = {
    "_cudnn_rnn_flatten_weight": _flatten_weights,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "cudnn_convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
}

_AT_RUN_TIME = {
    "erfinv": lambda x: torch.empty_like(x),
    "erfinv_": lambda x: x,
    "erfinv.out": lambda x, *, out: out,
}
"""What PyTorch would compile when it is called first, by NVRTC, which looks at the driver."""
