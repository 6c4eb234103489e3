"""Layers of a Llama and the ways in which torchtitan parallelizes them, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

HEAD, WORDS = 8, 32


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in "qkvo")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = (w(x).view(rows, length, -1, HEAD).transpose(1, 2) for w in (self.wq, self.wk))
        values = self.wv(x).view(rows, length, -1, HEAD).transpose(1, 2)
        found = functional.scaled_dot_product_attention(*heads, values, is_causal=True)
        made: torch.Tensor = self.wo(found.transpose(1, 2).reshape(rows, length, -1))
        return made


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, 3 * width, bias=False) for _ in "13")
        self.w2 = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return made


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = Attention(width), FeedForward(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.drop(self.attention(self.attention_norm(x)))
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """Returns its loss."""

    def __init__(self, depth: int = 2, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.tok(ids)
        for layer in self.layers:
            h = layer(h)
        logits = self.output(self.norm(h))
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def words(seed: int = 0, rows: int = 4, length: int = 16) -> torch.Tensor:
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """Linear layers by columns, then by rows."""
    for layer in model.layers:
        ways = {f"attention.w{name}": ColwiseParallel() for name in "qkv"}
        ways |= {f"feed_forward.w{name}": ColwiseParallel() for name in "13"}
        by_rows = {name: RowwiseParallel() for name in ("attention.wo", "feed_forward.w2")}
        parallelize_module(layer, mesh, {**ways, **by_rows})
    return model


def sequence_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """And all between these by positions in a sequence."""
    root: dict[str, Any] = {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, root)
    for layer in model.layers:
        ways: dict[str, Any] = {}
        for name, norm in (("attention", "attention_norm"), ("feed_forward", "ffn_norm")):
            ways[norm] = SequenceParallel()
            ways[name] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
        ways |= {f"attention.w{name}": ColwiseParallel() for name in "qkv"}
        ways |= {f"feed_forward.w{name}": ColwiseParallel() for name in "13"}
        for name in ("attention.wo", "feed_forward.w2"):
            ways[name] = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(layer, mesh, ways)
    return model


class Exchanges(TorchDispatchMode):
    """Collectives in order. (Who waits for them sees eager execution's tensors alone.)"""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it calls with local tensors comes here next
        library, name = func._schema.name.split("::")
        if library == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.calls.append(name)
        return func(*args, **(kwargs or {}))
