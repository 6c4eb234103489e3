"""On two processes: stages of a pipeline, planned with as many calls in flight as their schedule
has, beside the original ones. Exits with an error where they differ."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import rockplan
from testing.blocks import QUICK, Mixer
from testing.sharding import gloo

MICROBATCHES, ROWS, WIDTH = 4, 32, 16
SCHEDULES: dict[str, tuple[Any, int]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero bubble": (ScheduleInterleavedZeroBubble, 2),
}
"""How it is made, and stages for each process."""


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).pow(2).mean()


def part(index: int) -> nn.Sequential:
    torch.manual_seed(index)
    return nn.Sequential(Mixer(WIDTH), Mixer(WIDTH)).train()


def planned(index: int, how: str, in_flight: int) -> Any:
    sample = torch.randn(ROWS, WIDTH).requires_grad_(index > 0)
    options = rockplan.Options(**QUICK, in_flight=in_flight)
    if how == "solve":
        return rockplan.solve(part(index), sample, "min", options=options)
    stage = part(index)
    loss = lambda y: y.pow(2).mean()  # noqa: E731
    return rockplan.solve_blocks(stage, sample, "min", blocks=[*stage], loss=loss, options=options)


def steps(schedule: str, how: str) -> tuple[list[torch.Tensor], list[Any]]:
    """Losses and gradients of two steps, and the modules of this process."""
    make, each = SCHEDULES[schedule]
    count = each * dist.get_world_size()
    indices = [dist.get_rank() + dist.get_world_size() * i for i in range(each)]
    in_flight = [
        MICROBATCHES if schedule == "GPipe" else min(MICROBATCHES, count - i) for i in indices
    ]
    modules = [
        part(i) if how == "eager" else planned(i, how, k)
        for i, k in zip(indices, in_flight, strict=True)
    ]
    device = torch.device("cpu")
    stages = [
        PipelineStage(module, i, count, device) for module, i in zip(modules, indices, strict=True)
    ]
    pipe = make(stages if each > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
    torch.manual_seed(5)
    x, target = (torch.randn(ROWS * MICROBATCHES, WIDTH) for _ in range(2))
    found: list[torch.Tensor] = []
    for step in range(2):
        torch.manual_seed(step)
        losses: list[torch.Tensor] = []
        is_last = count - 1 in indices
        end: dict[str, Any] = {"target": target, "losses": losses} if is_last else {}
        pipe.step(*((x,) if 0 in indices else ()), **end)
        parameters = [p for module in modules for p in module.parameters()]
        found += [t.detach().clone() for t in (*losses, *(p.grad for p in parameters))]
        torch.optim.SGD(parameters, 0.1).step()
        for parameter in parameters:
            parameter.grad = None
    return found, modules


def compare(schedule: str) -> None:
    expected, _ = steps(schedule, "eager")
    for how in ("solve", "blocks"):
        found, modules = steps(schedule, how)
        assert len(found) == len(expected)
        for number, (ours, eager) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(ours, eager), f"{schedule} {how}: {number}"
        blocks = modules if how == "solve" else [block for module in modules for block in module]
        assert [len(block.plans) for block in blocks] == [1] * len(blocks), f"{schedule} {how}"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare("interleaved")
    try:
        steps("zero bubble", "solve")
    except (rockplan.BackwardError, RuntimeError) as error:
        # Whoever ends first is refused; others may wait for its data, until it is gone.
        assert "use 1F1B" in str(error) or "Connection" in str(error), error
    else:
        raise AssertionError("zero bubble")


def rest() -> None:
    with gloo():
        compare("GPipe")
        compare("1F1B")
