"""Attention with score functions (flex_attention), recorded as the operators of its dense form.

In eager execution the compiler's front end turns `score_mod` and `mask_mod` into graphs, whose free
tensors become arguments of an operator; its forward and backward consist of ordinary operators.
While a forward is recorded nothing is compiled, so one run of each function finds the free tensors,
and they are passed as arguments here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.graph_builder.tracing.patches import Patch, unrecorded
from rockplan.graph_builder.tracing.recorder import Recorder

# By import_module, because attributes of the packages with these names are functions.
_PUBLIC = importlib.import_module("torch.nn.attention.flex_attention")
_DENSE = importlib.import_module("torch._higher_order_ops.flex_attention")
_NOT_COMPILED = "the compiler's front end, which finds the tensors of its functions, does not run"
_INDICES = 4


class _FreeTensors(TorchFunctionMode):
    """Collects tensors that functions of PyTorch get and that none of them made."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known: dict[int, torch.Tensor] = {id(t): t for t in known}
        self.free: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            if id(tensor) not in self._known:
                self._known[id(tensor)] = tensor
                self.free.append(tensor)
        made = func(*args, **(kwargs or {}))
        self._known |= {id(t): t for t in _tensors(made)}
        return made


class _InPlaceOfFree(TorchFunctionMode):
    """Replaces the free tensors in arguments of PyTorch functions by others."""

    def __init__(self, free: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._others = {id(t): other for t, other in zip(free, others, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def other(tensor: torch.Tensor) -> torch.Tensor:
            return self._others.get(id(tensor), tensor)

        args, kwargs = pytree.tree_map_only(torch.Tensor, other, (args, kwargs or {}))
        return func(*args, **kwargs)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _with_free_tensors(
    function: Callable[..., Any], examples: Sequence[torch.Tensor]
) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """Return (`function` with its free tensors as further arguments, these tensors)."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with TransformGetItemToIndex(), _FreeTensors(examples) as run:
        function(*examples)
    free = tuple(run.free)

    def closed(*args: torch.Tensor) -> Any:
        own, others = args[: len(examples)], args[len(examples) :]
        with _InPlaceOfFree(free, others):
            return function(*own)

    return closed, free


def _operator(original: Any, recorder: Recorder) -> Any:
    # With the free tensors of `score_mod` and of the mask as further arguments, as the compiler's
    # front end calls it.
    def flex_attention(
        query: torch.Tensor, key: Any, value: Any, score_mod: Any, block_mask: Any, *others: Any
    ) -> Any:
        if not recorder.is_active():
            return original(query, key, value, score_mod, block_mask, *others)
        *blocks, mask_mod = block_mask
        with _disable_current_modes(), torch.no_grad():
            indices = [query.new_zeros((), dtype=torch.int) for _ in range(_INDICES)]
            scores, free = _with_free_tensors(score_mod, [query.new_zeros(()), *indices])
            masks, free_of_mask = _with_free_tensors(mask_mod, indices)
        return original(query, key, value, scores, (*blocks, masks), *others, free, free_of_mask)

    return flex_attention


def _in_strides(original: Any, recorder: Recorder) -> Any:
    def permute_strides(made: torch.Tensor, strides: Sequence[int]) -> Any:
        caller = sys._getframe(2).f_code
        if not recorder.is_active() or caller is not _DENSE.sdpa_dense_backward.__code__:
            return original(made, strides)
        with _disable_current_modes():
            like = original(torch.empty(made.shape, device="meta"), strides)
        return made.new_empty_strided(made.shape, like.stride())

    return permute_strides


PATCHES: tuple[Patch, ...] = (
    Patch(_PUBLIC, "flex_attention_hop", _operator, _NOT_COMPILED),
    Patch(
        _DENSE,
        "create_fw_bw_graph",
        unrecorded,
        "the derivative of a function of scores is traced with tensors that are no part of the run",
    ),
    Patch(
        _DENSE,
        "_permute_strides",
        _in_strides,
        "the backward copies memory that nothing has written to, to write it all afterwards",
    ),
)
