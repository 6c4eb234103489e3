"""Capture: an nn.Module with a sample -> one recorded run, forward then backward.

takes: a module, positional and keyword arguments of one call. returns: Capture. guarantees: those
of `tracing.recording`. A recording starts anew after files were imported.
What a Capture becomes: docs/model.md, Capture and lowering.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from rockplan.graph_builder.foreign import opaque_calls, triton_launches
from rockplan.graph_builder.recorded.run import Capture
from rockplan.graph_builder.tracing.eager_paths import refusing
from rockplan.graph_builder.tracing.patches import Patch, unrecorded
from rockplan.graph_builder.tracing.recording import Sample, record
from rockplan.values.interface import Incoming, Precedent
from rockplan.values.sizes import CallSizes


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    forward: Callable[..., Any] | None = None,
    incoming: Incoming | Precedent | None = None,
    only_loss: bool = False,
    earlier: CallSizes | None = None,
    unread: frozenset[int] = frozenset(),
) -> Capture:
    """Record one forward and backward of `module(*args, **kwargs)` over fake tensors.

    forward: called instead of `module.forward`.
    incoming: the leaves that the backward pass starts from; None: those that a step probably starts
    from (`likely_starts`), with only_loss the loss. only_loss: of the result only scalars and the
    leaves that backward starts from are needed. earlier: of another call: sizes that differ are
    symbols in the run, or StaticSizes is raised. unread: positions of leaves that are believed to
    be unread; the result says which are.
    Raises CaptureError (or a subclass) naming the place in the model and the remedy.
    """
    call = forward or module.forward
    sample = Sample(module, call, args, kwargs, incoming, only_loss, _rows, earlier, unread)
    while (recorded := record(sample)) is None:
        sample = replace(sample, imports=sample.imports - 1)
    return recorded


def _rows() -> Iterator[Patch]:
    yield from opaque_calls.patches()
    yield from triton_launches.patches()
    attention: Any = nn.functional.scaled_dot_product_attention
    if str(getattr(attention, "__module__", "")).startswith("torch.distributed."):
        yield Patch(
            nn.functional,
            "scaled_dot_product_attention",
            refusing("context parallel"),
            "context_parallel has put a function in its place that calls kernels by other rules",
        )
    # What DTensor makes of an operator are operators of local tensors, which are recorded as any
    # others. To know shapes it runs operators of the whole tensors beside: none of the step.
    file = sys.modules.get("torch.distributed.tensor._sharding_prop")
    propagator: Any = getattr(file, "ShardingPropagator", None)
    name = "_propagate_tensor_meta_non_cached"
    if hasattr(propagator, name):
        yield Patch(
            propagator,
            name,
            unrecorded,
            "it computes shapes of whole tensors with memory that nothing has written to",
        )
