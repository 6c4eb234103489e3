"""What the models of libraries are made with.

A library is imported where a model of it is built. Those whose audio parts import torchaudio, which
does not load beside a CPU build of torch, get an empty module of that name.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Built:
    """A model and one call of it."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


BUILDERS: dict[str, Callable[[], Built]] = {}


def case(name: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    def add(build: Callable[[], Built]) -> Callable[[], Built]:
        BUILDERS[name] = build
        return build

    return add


def without_torchaudio() -> None:
    module = types.ModuleType("torchaudio")
    module.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    sys.modules.setdefault("torchaudio", module)


def ids(*shape: int, below: int = 50) -> Tensor:
    return torch.randint(1, below, shape)


class Wrapped(nn.Module):
    """A function of a module and arguments as a model."""

    def __init__(self, module: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *args: Any) -> Any:
        return self.call(self.module, *args)
