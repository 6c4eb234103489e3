"""Tensor parallel, in one process: a group of others that are not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import rockplan
from rockplan.agreement import ALONE, _largest_of
from rockplan.fitting.optimizer import OptimizerSteps
from rockplan.fitting.reserved import storage_sizes
from rockplan.fitting.training_step import TrainingStep
from rockplan.free_memory import Room, room_of
from testing.ranks import fake_group


def test_processes_of_several_meshes_are_to_be_named() -> None:
    """A set has its largest in any order, which is another one on each process."""
    with fake_group(4):
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "tensor"))
        experts, tensors = whole["expert"], whole["tensor"]
        assert _largest_of([]) == ()
        assert _largest_of([tensors, tensors]) == (0, 1)
        assert _largest_of([experts, whole, tensors]) == (0, 1, 2, 3)
        with pytest.raises(rockplan.InvalidInput, match=r"ranks 0, 1 and .* 0, 2; .*group="):
            _largest_of([experts, tensors])


@pytest.mark.parametrize("state", ["none", "comes", "there"])
def test_of_distributed_parameters_the_part_of_this_process_counts(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rockplan.free_memory._free_bytes", lambda device: 10_000_000)
    step = TrainingStep(average=True)

    def room(model: nn.Module) -> tuple[Room, tuple[int, ...]]:
        optimizer = torch.optim.AdamW(model.parameters())
        if state == "there":
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        given = None if state == "none" else optimizer
        found = room_of("auto", model, given, step, ALONE, rockplan.Options())
        return replace(found, steps=OptimizerSteps("none")), storage_sizes(model.parameters())

    with fake_group(2):
        whole = nn.Sequential(nn.Linear(64, 64, bias=False))
        ours = parallelize_module(whole, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
        assert room(ours) == room(nn.Linear(64, 32, bias=False))
