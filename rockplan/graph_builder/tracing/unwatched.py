"""Unwatched: calls of the backward pass as eager executes them when no dispatch mode watches.

takes: a call, and where its tensors live. returns: the call whose bits are those of eager.

Zeros without memory, the gradient of `sgn`, are such a case: nothing may write to them, their
operators are none that can be recorded, and what they are multiplied by is not looked at, so that
they stay zeros where infinity meets them. Here they are zeros with memory, and what eager would not
compute is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.recorded.run import RecordedCall, RecordedValue
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.values.graph import ValueRef

_ZEROS = torch.ops.aten.zeros.default
_WITHOUT_MEMORY = torch.ops.aten._efficientzerotensor.default
_MUL = torch.ops.aten.mul.Tensor
_KEEP_ZEROS: dict[Any, Callable[[list[bool]], bool]] = {
    _MUL: any,
    torch.ops.aten.div.Tensor: lambda zeros: zeros[0],
    torch.ops.aten.add.Tensor: all,
    torch.ops.aten.sub.Tensor: all,
}
"""Operator -> whether eager returns zeros without memory, by which operands are such."""

# Their gradient goes to the elements that are equal to the result, in equal parts.
_OF_ALL_ELEMENTS = {"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"}

Operands = tuple[Any, ...]


class Unwatched:
    """Of one recording. storage_of: ordinal of a tensor's storage; result_of: what a call returns,
    a fake tensor."""

    def __init__(
        self,
        storage_of: Callable[[torch.Tensor], int],
        result_of: Callable[[Any, Operands, dict[str, Any]], torch.Tensor],
    ) -> None:
        self._storage_of = storage_of
        self._result_of = result_of
        self._zeros: set[int] = set()

    def call(
        self, func: Any, args: Operands, kwargs: dict[str, Any], node: str
    ) -> tuple[Any, Operands, dict[str, Any]]:
        """node: of autograd that runs, by name."""
        if func is _WITHOUT_MEMORY:
            return _ZEROS, args, kwargs
        if func not in _KEEP_ZEROS:
            return func, args, kwargs
        if self._is_zero(func, args):
            made = self._result_of(func, args, kwargs)
            return _ZEROS, (tuple(made.shape),), {"dtype": made.dtype, "device": made.device}
        # On CPU eager fills zeros where the mask is set; under a mode, as on CUDA, it multiplies by
        # the mask, which makes NaN of an infinite gradient (evenly_distribute_backward in PyTorch).
        is_masked = func is _MUL and node in _OF_ALL_ELEMENTS and args[0].dtype is torch.bool
        if is_masked and args[0].device.type == "cpu":
            return torch.ops.aten.where.ScalarOther, (*args, 0.0), kwargs
        return func, args, kwargs

    def note(self, called: Any, func: Any, args: Operands, result: Any) -> None:
        """What became of a call. called: as autograd has it; func: what was recorded."""
        if func is _ZEROS and called is not _ZEROS:
            self._zeros.add(self._storage_of(result))

    def _is_zero(self, func: Any, args: Operands) -> bool:
        """Does eager return zeros without memory?"""
        if not self._zeros:
            return False
        return _KEEP_ZEROS[func]([self._storage_of(t) in self._zeros for t in facts.tensors(args)])


def refuse_other_variants(values: Sequence[RecordedValue], calls: Sequence[RecordedCall]) -> None:
    """Raise where eager execution calls other operators than it does while they are recorded.

    Composite operators have a second variant for tensor subclasses and dispatch modes
    (TensorSubclassLikeUtils.h in PyTorch); nearly all only write out of place. One whose bits
    differ is cross entropy with class weights, label smoothing and the mean: eager sums the
    weights of the targets that count (masked_select), the variant those of all targets, others
    set to zero. (The two others known are recorded as eager computes them:
    `Unwatched`, `eager_paths._max_pool1d`.)
    """
    filled: dict[int, ValueRef] = {}
    gathered: dict[int, ValueRef] = {}
    for recorded in calls:
        call = recorded.call
        refs = [a for a in call.args if isinstance(a, ValueRef)]
        if call.op == "aten.masked_fill.Scalar" and call.results[0] is not None:
            filled[call.results[0]] = refs[1]
        elif call.op == "aten.gather.default" and refs[1].index in filled:
            if call.results[0] is not None and len(values[refs[0].index].spec.shape) == 1:
                gathered[call.results[0]] = filled[refs[1].index]
        elif call.op == "aten.masked_fill_.Scalar" and gathered.get(refs[0].index) == refs[1]:
            raise NAMED["cross entropy"].at(recorded.module, recorded.source)
