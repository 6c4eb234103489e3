"""Ways to shard a model of several layers by FSDP2, and steps of it, for tests and benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rockplan import peak_live_bytes


@contextlib.contextmanager
def gloo() -> Iterator[None]:
    """The processes of a test, which end together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def sharded(model: Any, mesh: DeviceMesh, **how: Any) -> Any:
    """Each layer, and the rest."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def everywhere(value: Any) -> list[Any]:
    """The values of all processes."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


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


def in_mode(model: Any, mesh: DeviceMesh, mode: str) -> Any:
    how, then = MODES[mode]
    model = sharded(model, mesh, **how)
    return model if then is None else then(model)


def peaks(model: Any, x: torch.Tensor, mode: str, count: int) -> list[int]:
    """Of so many steps of a model that is sharded in one of these ways, in bytes, from the least
    on. A collective of gloo lets go of its memory at another moment in each step."""
    exchanges = (False, False, True) if MODES[mode][1] is accumulating else (True,)

    def step() -> None:
        for is_exchange in exchanges:
            model.set_requires_gradient_sync(is_exchange)
            model(x)["loss"].backward()

    return sorted(peak_live_bytes(step, 1).peak_bytes for _ in range(count))
