"""What tests on a CUDA device share. The device may be the stand-in of `make cuda`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from benchmarks import stand_in
from testing.models import Case
from testing.sweep import FOR_CUDA
from testing.zoo_cases import loss_of

ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# Read when cuBLAS and the allocator are first used.
for name, value in FOR_CUDA.items():
    os.environ.setdefault(name, value)

if stand_in.is_there():
    stand_in.install()


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Eager execution repeats itself."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def large(width: int = 1111, depth: int = 12, batch: int = 1500, dropout: float = 0.1) -> Case:
    """Blocks of some MiB and no round sizes, which the allocator may leave unsplit."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(dropout))
        for _ in range(depth)
    ]
    model = nn.Sequential(*layers).cuda()
    sample = torch.randn(batch, width, device="cuda")
    return Case("large", model, (sample,), {}, loss_of)


def captured(case: Case, module: nn.Module) -> list[torch.Tensor]:
    """Gradients of two replays of a step that a CUDA graph has captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            case.step(module)
    torch.cuda.current_stream().wait_stream(side)
    module.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.step(module)
    torch.manual_seed(5)
    gradients = []
    for _ in range(2):
        graph.replay()
        gradients += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return gradients
