"""Small models to try the command line on: `rockplan solve rockplan.examples:transformer`.

A factory takes nothing and returns (model, sample_input) or (model, args, kwargs).
"""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(scores.masked_fill(future, -torch.inf).softmax(-1))
        heads = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        attended: torch.Tensor = self.out(heads)
        return x + attended


class Mlp(nn.Module):
    """Two layers around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.dropout(self.down(self.act(self.up(self.norm(x)))))
        return x + changed


class Layer(nn.Module):
    """Attention, then the two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn = Attention(width, heads)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.mlp(self.attn(x))
        return changed


class Transformer(nn.Module):
    """A decoder that returns the loss of predicting the next token."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embed(tokens)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Four layers of a decoder, 4 x 128 tokens; training mode, dropout on."""
    torch.manual_seed(0)
    return Transformer(4, 64, 4, 256).train(), torch.randint(0, 256, (4, 128))


def mlp() -> tuple[nn.Module, tuple[torch.Tensor], dict[str, object]]:
    """Six layers of linear, GELU and dropout."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers).train(), (torch.randn(256, 64),), {}
