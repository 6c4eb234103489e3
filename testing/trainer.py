"""Steps of a trainer with pipeline, data and tensor parallel at once, for tests and benchmarks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rockplan
from testing.blocks import Mixer
from testing.sharding import everywhere, sharded


def digest(thing: object) -> str:
    return hashlib.sha256(repr(thing).encode()).hexdigest()


def digest_of_blocks(model: nn.Module) -> str:
    plan = rockplan.blocks_of(model)
    return digest((plan.budget_bytes, plan.moments, plan.options, plan.peak_bytes))


class Stage(nn.Module):
    """One half of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def init_weights(self) -> None:
        """Without random numbers, of which parts of tensors would get others."""
        for parameter in self.parameters():
            local: Any = parameter.detach()
            values = getattr(local, "_local_tensor", local)
            values.copy_(torch.linspace(-0.2, 0.3, values.numel()).view_as(values))


def trainer_step(
    options: rockplan.Options | None, sizes: tuple[int, int, int]
) -> list[torch.Tensor]:
    """As torchtitan has it: pipeline, data and tensor parallel (`sizes`), the meta device, memory,
    weights, plans (with `options`; None: not planned), optimizer. Return losses and gradients of
    two steps."""
    rows, count = 32, 4
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    index = mesh["pp"].get_local_rank()
    with torch.device("meta"):
        part = Stage().train()
    if sizes[2] > 1:
        for layer in part.layers:
            ways = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], ways)
    sharded(part, mesh["dp"])
    part.to_empty(device="cpu")
    part.init_weights()
    if options is not None:
        microbatch = torch.randn(rows, 16).requires_grad_(index > 0)
        part.set_requires_gradient_sync(False)  # of microbatches the last one exchanges
        options = replace(options, in_flight=2 - index)
        loss = lambda y: y.pow(2).mean()  # noqa: E731
        rockplan.solve_blocks(
            part, microbatch, "min", blocks="layers.*", loss=loss, options=options
        )
        plan = rockplan.blocks_of(part)
        digests = everywhere((index, digest_of_blocks(part)))
        assert len({*digests}) == 2 and plan.overhead > 0
    optimizer = torch.optim.SGD(part.parameters(), 0.01)
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, count, loss_fn=lambda y, t: (y - t).pow(2).mean())
    found: list[torch.Tensor] = []
    for number in range(2):
        torch.manual_seed(number + mesh["dp"].get_local_rank())
        x, target = (torch.randn(rows * count, 16) for _ in range(2))
        losses: list[torch.Tensor] = []
        last: dict[str, Any] = {"target": target, "losses": losses} if index else {}
        schedule.step(*(() if index else (x,)), **last)
        found += [*losses, *(p.grad.to_local().clone() for p in part.parameters())]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return found
