"""A model of equal blocks, and steps of it, for tests and benchmarks of `solve_blocks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

QUICK = {"time_limit_s": 20.0, "bound_time_limit_s": 0.0, "without": ("exchange",)}
"""Options where what is checked does not depend on how good a plan is."""


class Mixer(nn.Module):
    """A block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(inner))


class Stack(nn.Module):
    """Blocks between two layers; returns a loss, as models of transformers do."""

    def __init__(self, depth: int = 4, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, width)
        self.layers = nn.ModuleList(Mixer(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        logits = self.head(h)
        return {"loss": logits.pow(2).mean(), "logits": logits}


def batch(rows: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 16, generator=generator)


def factory() -> tuple[nn.Module, torch.Tensor]:
    """As the command line takes it."""
    return Stack().train(), batch()


def train(module: Any, call: Callable[[Any], Any], steps: int = 3) -> list[torch.Tensor]:
    """Losses of steps by SGD, each from a seed of its own."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = call(module)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses
