"""Ways to shard a model of several layers by FSDP2, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


def prefetched(model: Any) -> Any:
    layers = [*model.layers]
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])
    return model


def compiled(model: Any) -> Any:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


def accumulating(model: Any) -> Any:
    model.set_requires_gradient_sync(False)
    return model


HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
MODES: dict[str, tuple[dict[str, Any], Callable[[Any], Any] | None]] = {
    "resharding": ({}, None),
    "kept": ({"reshard_after_forward": False}, None),
    "bfloat16": ({"mp_policy": HALF}, None),
    "prefetch of two": ({}, prefetched),
    "compiled blocks": ({}, compiled),
    "accumulation": ({}, accumulating),
    "accumulation in bfloat16": ({"mp_policy": HALF}, accumulating),
}
"""Ways to shard: arguments, and what is done to the model after."""
