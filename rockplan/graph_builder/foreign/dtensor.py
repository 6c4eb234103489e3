"""DTensor: what of it is another while a forward is recorded.

What DTensor makes of an operator are operators of local tensors, which are recorded as any others.
To know shapes it runs operators of the whole tensors beside: these are none of the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.graph_builder.tracing.patches import Patch, RecordingAccess
from rockplan.graph_builder.tracing.refusals import NAMED


def _unrecorded(original: Any, recording: RecordingAccess) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return run


def _of_context_parallel(original: Any, recording: RecordingAccess) -> Callable[..., Any]:
    """Return a replacement for the attention that `context_parallel` has put in place of PyTorch's:
    a call raises the refusal."""

    def attention(*args: Any, **kwargs: Any) -> NoReturn:
        recording.refuse(NAMED["context parallel"].text())

    return attention


def patches() -> Iterator[Patch]:
    """Yield the patches for what is in use of `torch.distributed.tensor`: the attention of
    context_parallel, and the shape rules of DTensor."""
    attention: Any = nn.functional.scaled_dot_product_attention
    if str(getattr(attention, "__module__", "")).startswith("torch.distributed."):
        yield Patch(
            nn.functional,
            "scaled_dot_product_attention",
            _of_context_parallel,
            "context_parallel has put a function in its place that calls kernels by other rules",
        )
    file = sys.modules.get("torch.distributed.tensor._sharding_prop")
    propagator: Any = getattr(file, "ShardingPropagator", None)
    name = "_propagate_tensor_meta_non_cached"
    if hasattr(propagator, name):
        yield Patch(
            propagator,
            name,
            _unrecorded,
            "it computes shapes of whole tensors with memory that nothing has written to",
        )
