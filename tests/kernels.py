"""What tests of compiled kernels share: kernels that run by their operators, and small blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.fusion import inductor, kernels
from rockplan.graph_builder.recorded.run import Capture
from rockplan.values.graph import Kernel
from testing.models import Case, mean_square

Failing = Callable[[Kernel], bool]


def interpret(monkeypatch: pytest.MonkeyPatch, fails: Failing = lambda kernel: False) -> list[str]:
    """Kernels run by the operators that they fuse, nothing is compiled; those that `fails` names
    cannot be. Returns the names of those that are asked for, as they are."""
    asked: list[str] = []

    def compiled(wanted: Sequence[Kernel]) -> dict[str, Any]:
        asked.extend(kernel.op for kernel in wanted)
        return {k.op: "a test says so" if fails(k) else functools.partial(_run, k) for k in wanted}

    monkeypatch.setattr(inductor, "compiled", compiled)
    monkeypatch.setattr(kernels, "_functions", {})
    monkeypatch.setattr(kernels, "_refused", {})
    return asked


def _run(kernel: Kernel, arguments: Sequence[Any]) -> list[torch.Tensor]:
    count = len(kernel.sizes)
    return kernels.computed(kernels.at_sizes(kernel, arguments[:count]), arguments[count:])


def run(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> Capture:
    """A recording of a function of parameters."""

    class Of(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = nn.ParameterList(torch.randn(shape) for shape in shapes)

        def forward(self) -> torch.Tensor:
            return function(*self.given)

    return capture(Of(), (), {})


class Norm(nn.Module):
    """Root mean square norm, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


class Block(nn.Module):
    """Norm, gated MLP, residual."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = Norm(width), nn.Dropout(dropout)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        result: torch.Tensor = x + self.drop(self.down(functional.silu(self.gate(h)) * self.up(h)))
        return result


class Stack(nn.Module):
    """Blocks and a head; the loss is the caller's."""

    def __init__(self, layers: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = functional.gelu(self.head(self.norm(x)))
        return result


class LossOf(nn.Module):
    """Of a model of transformers, the loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**given).loss
        return loss


def stack(layers: int = 2, width: int = 32, dropout: float = 0.0, rows: int = 512) -> Case:
    torch.manual_seed(0)
    model = Stack(layers, width, dropout).train()
    return Case(f"stack-{layers}", model, (torch.randn(rows, width),), {}, mean_square)


def gradients(case: Case, module: nn.Module) -> list[torch.Tensor]:
    """Of a step from the same generator state."""
    torch.manual_seed(1)
    case.model.zero_grad()
    case.step(module)
    return [p.grad.clone() for p in case.model.parameters() if p.grad is not None]


def distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """As a share of the norm of `expected`."""
    pairs = zip(found, expected, strict=True)
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return float((error / sum(float(b.double().square().sum()) for b in expected)) ** 0.5)
