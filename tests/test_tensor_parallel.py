"""Tensor parallel, in one process: a group of others that are not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import rockplan
from rockplan.fitting.optimizer import OptimizerSteps
from rockplan.fitting.reserved import storage_sizes
from rockplan.fitting.training_step import TrainingStep
from rockplan.python_state.distributed import local_of
from rockplan.python_state.memory import content_of, is_same_content, put_back
from rockplan.runtime.guards import _layout
from rockplan.solving.agreement import ALONE, _largest_of
from rockplan.solving.free_memory import Room, room_of
from testing.ranks import fake_group
from testing.tensor_parallel import Exchanges


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
def test_distributed_parameters_count_by_their_part_here(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rockplan.solving.free_memory._free_bytes", lambda device: 10_000_000)
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


def test_values_are_put_back_without_exchanges() -> None:
    """Of what is here alone: other processes may not be at the same place."""
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        linear = parallelize_module(nn.Linear(8, 8), mesh, {"": ColwiseParallel()})
        weight = linear.weight
        content, before = content_of(weight), local_of(weight).clone()
        with Exchanges() as exchanges:
            assert is_same_content(weight, content.copy)
            with torch.no_grad():
                weight.add_(1)
            assert not is_same_content(weight, content.copy)
            put_back([content])
        assert not exchanges.calls
        assert torch.equal(local_of(weight), before)


def test_planned_parts_of_recordings_are_refused() -> None:
    """Also if all that it is given are DTensors."""
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        planned = rockplan.solve(nn.Linear(8, 8, bias=False), torch.randn(4, 8), "min")
        fakes = FakeTensorMode()
        with fakes:
            given = DTensor.from_local(torch.empty(2, 8), mesh, [Shard(0)], run_check=False)
        with pytest.raises(rockplan.UnsupportedModel, match="planned already"):
            planned(given)


def test_parameters_sharing_their_part_count_once() -> None:
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        part = torch.randn(4, 8)
        shared = [DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for _ in range(2)]
        other = DTensor.from_local(part.clone(), mesh, [Shard(0)], run_check=False)
        assert _layout(shared) != _layout([shared[0], other])
