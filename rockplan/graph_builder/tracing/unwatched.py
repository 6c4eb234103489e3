"""Unwatched: calls of the backward pass that eager executes differently without a dispatch mode.

takes: a call, and the storages of its tensors. returns: a call with the bits of eager. One case are
zeros without memory, such as the gradient of `sgn`. Nothing may write to them, their operators
cannot be recorded, and a product with them is zero whatever the other operand is, infinity
included. Here they become zeros with memory, and products that eager leaves out are left out.
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
"""Operator -> function: which operands are zeros without memory -> is the result too?"""

# Their gradient is distributed evenly over the elements that equal the result.
_OF_ALL_ELEMENTS = {"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"}

Operands = tuple[Any, ...]


class Unwatched:
    """Rewrites calls of one recording. storage_of: number of a storage; result_of: fake."""

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
        """Return (operator, args, kwargs) to record in place of a call of the backward pass. node:
        name of the autograd node that runs."""
        if func is _WITHOUT_MEMORY:
            return _ZEROS, args, kwargs
        if func not in _KEEP_ZEROS:
            return func, args, kwargs
        of = facts.tensors(args) if self._zeros else []
        if of and _KEEP_ZEROS[func]([self._storage_of(t) in self._zeros for t in of]):
            made = self._result_of(func, args, kwargs)
            return _ZEROS, (tuple(made.shape),), {"dtype": made.dtype, "device": made.device}
        # On CPU eager fills zeros where the mask is set; under a mode, as on CUDA, it multiplies by
        # the mask, which makes NaN of an infinite gradient (evenly_distribute_backward in PyTorch).
        is_masked = func is _MUL and node in _OF_ALL_ELEMENTS and args[0].dtype is torch.bool
        if is_masked and args[0].device.type == "cpu":
            return torch.ops.aten.where.ScalarOther, (*args, 0.0), kwargs
        return func, args, kwargs

    def note(self, called: Any, func: Any, args: Operands, result: Any) -> None:
        """Note the result of a call. called: as autograd called it; func: as it was recorded."""
        if func is _ZEROS and called is not _ZEROS:
            self._zeros.add(self._storage_of(result))


def refuse_other_variants(values: Sequence[RecordedValue], calls: Sequence[RecordedCall]) -> None:
    """Raise CaptureError if eager execution calls other operators than the recording: for cross
    entropy with class weights, label smoothing and the mean.

    Composite operators have a second variant for tensor subclasses and dispatch modes
    (TensorSubclassLikeUtils.h in PyTorch); nearly all differ only in writing out of place. One
    whose bits differ is that loss: eager sums the weights of the targets that count
    (masked_select), the variant sums those of all targets, others set to zero. (The two others
    known are recorded as eager computes them: `Unwatched`, `eager_paths._max_pool1d`.)
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
