"""As on CUDA: what PyTorch does with a model on a CUDA device, while one on the CPU is captured.

takes: nothing. returns: a context in which operators on the CPU take CUDA's ways, where these need
other memory: dropout, attention with dropout, autocast. guarantees: kernels of the CPU are as they
were afterwards; which operators autocast casts on CUDA is asked of the dispatcher of this PyTorch.
Not followed: recurrent layers of cuDNN, and what sorting kernels and convolutions take inside.

Sources (PyTorch 2.13): `is_fused_kernel_acceptable` of aten/src/ATen/native/Dropout.cpp, aten/src/
ATen/native/transformers/cuda/sdp_utils.cpp, AT_FORALL_* of aten/src/ATen/autocast_mode.h.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.library import _scoped_library, fallthrough_kernel
from torch.nn import functional

from rockplan.python_state import trees

_aten = torch.ops.aten

# fmt: off
_TO_ITS_DTYPE = {
    "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "addmv",
    "addr", "mv", "einsum", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
}
_TO_THE_WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot",
    "scatter_add",
}
_BY_ARGUMENT = {
    "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
}
# fmt: on
"""Of what CUDA's lists have beyond the CPU's: cast to the dtype of autocast; to the widest of its
arguments; given dtype=float32 if they have no dtype. The others are cast to float32."""

_LARGEST_HEAD, _ALIGNED = 256, 8
"""Of flash attention: elements of a head, of which the number is padded to a multiple."""

_16_BITS = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """While active, operators on the CPU call what they call on CUDA, autocast of either device
    counts."""
    dtype = autocast_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        library = stack.enter_context(_scoped_library("aten", "IMPL"))
        for key in ("AutogradCPU", "CPU"):
            library.impl("dropout", _dropout, key)
            library.impl("scaled_dot_product_attention", _attention, key)
        if dtype is not None:
            _take_lists_of_cuda(library)
            stack.enter_context(torch.autocast("cpu", dtype))
        yield


def autocast_dtype() -> torch.dtype | None:
    """Return the dtype of autocast, of CUDA or of the CPU; None outside of it."""
    kinds = (k for k in ("cuda", "cpu") if torch.is_autocast_enabled(k))
    return next(map(torch.get_autocast_dtype, kinds), None)


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or not 0 < p < 1 or not input.numel():
        whole: torch.Tensor = _aten.dropout.default.decompose(input, p, train)
        return whole
    dropped: torch.Tensor = _aten.native_dropout(input, p, True)[0]
    return dropped


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the kernel that CUDA takes. Without dropout that of the CPU needs the same."""
    found: torch.Tensor
    head, heads = query.shape[-1], (query.shape[-3:-2], key.shape[-3:-2])
    how = {"scale": scale if scale is not None else head**-0.5}
    is_batch = query.dim() == 4 and dropout_p > 0
    if is_batch and attn_mask is None and query.dtype in _16_BITS and head <= _LARGEST_HEAD:
        missing = -head % _ALIGNED
        padded = [functional.pad(x, (0, missing)) if missing else x for x in (query, key, value)]
        found = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, **how)[0]
        return found[..., :head] if missing else found
    if is_batch and heads[0] == heads[1]:
        if attn_mask is not None:
            bias = attn_mask
            if bias.dtype is torch.bool:
                bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, -torch.inf)
            attn_mask = bias.expand(*query.shape[:-1], key.shape[-2])
        needs = any(x.requires_grad for x in (query, key, value))
        of_memory = _aten._scaled_dot_product_efficient_attention
        found = of_memory(query, key, value, attn_mask, needs, dropout_p, is_causal, **how)[0]
        return found
    found = _aten.scaled_dot_product_attention.default.decompose(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return found


def _take_lists_of_cuda(library: Any) -> None:
    names = torch._C._dispatch_get_all_op_names()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in (n.removeprefix("aten::") for n in names if n.startswith("aten::")):
        cuda, cpu = (has(f"aten::{name}", f"Autocast{kind}") for kind in ("CUDA", "CPU"))
        if cuda and not cpu:
            library.impl(name, _cast(name), "AutocastCPU")
        elif cpu and not cuda:
            library.impl(name, fallthrough_kernel, "AutocastCPU")


def _cast(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(_aten, packet), overload or "default")
    has_dtype = name in _BY_ARGUMENT
    names = [argument.name for argument in operator._schema.arguments]
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def cast(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in trees.tree_leaves((args, kwargs)) if _is_cast(x)]
        dtype = torch.float32
        if packet in _TO_ITS_DTYPE:
            dtype = torch.get_autocast_dtype("cpu")
        elif packet in _TO_THE_WIDEST:
            wide = any(x.dtype is torch.float32 for x in tensors)
            dtype = dtype if wide else torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            if has_dtype:
                named = dict(zip(names, args, strict=False)) | kwargs
                if args[0].dtype in _16_BITS and named.get("dtype") is None:
                    named["dtype"] = dtype
                return operator(**named)
            leaves, spec = trees.tree_flatten((args, kwargs))
            leaves = [x.to(dtype) if _is_cast(x) else x for x in leaves]
            args, kwargs = trees.tree_unflatten(leaves, spec)
            return operator(*args, **kwargs)

    return cast


def _is_cast(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (*_16_BITS, torch.float32)
