"""Calls that differ in sizes alone run one program, whose peak is known at every size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockplan
from testing import models
from testing.models import Case
from testing.training import train_side_by_side
from tests.planning import heard, set_times

OPTIONS = rockplan.Options(cache=False, time_limit_s=2, bound_time_limit_s=0)


@pytest.fixture(autouse=True)
def _times_of_a_set_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16)
        pairs = zip(widths, widths[1:], strict=False)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, widths[1:]))
        self.head = nn.Linear(widths[-1], 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = nn.functional.max_pool2d(norm(layer(x)).relu(), 2)
        x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
        return self.head(x.mean((2, 3))).square().mean()


class Messages(nn.Module):
    """Sums what comes along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for sent in self.sent:
            arrived = torch.zeros_like(x).index_add(0, edges[1], sent(x)[edges[0]])
            x = nn.functional.dropout(x + arrived.tanh(), 0.1)
        return x.square().mean()


class Recurrent(nn.Module):
    """The result of a scan over chunks is as long as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], dtype=x.dtype)
        x = self.inner(x * steps[:, None]).cumsum(1) / x.shape[1] ** 0.5
        return (x[:, :-1] * weight[:, 1:]).sum()


def tokens(model: Callable[[], Case]) -> Callable[[], tuple[nn.Module, Callable[..., Any]]]:
    def made() -> tuple[nn.Module, Callable[..., Any]]:
        case = model()

        def call(batch: int, length: int) -> dict[str, Any]:
            return {k: t[:batch, :length].contiguous() for k, t in case.kwargs.items()}

        return case.model, call

    return made


MODELS: dict[str, tuple[Callable[[], Any], Sequence[tuple[int, ...]], str]] = {
    "llama": (
        tokens(lambda: models.llama(layers=2, width=32, batch=6, length=96)),
        [(4, 40), (3, 64), (5, 96), (2, 17), (6, 95), (4, 41)],
        "70%",
    ),
    "gpt2": (
        tokens(lambda: models.gpt2(layers=2, width=32, batch=4, length=96)),
        [(4, 40), (4, 64), (4, 96), (4, 17), (4, 95)],
        "70%",
    ),
    "bert": (
        tokens(lambda: models.bert(layers=2, width=32, batch=4, length=96)),
        [(4, 40), (4, 64), (4, 96), (4, 17), (4, 95)],
        "70%",
    ),
    "t5": (
        tokens(lambda: models.t5(layers=1, width=32, batch=4, length=64)),
        [(3, 32), (2, 48), (4, 64), (2, 9)],
        "80%",
    ),
    "convolutions": (
        lambda: (Convolutions(), lambda b, h, w: {"x": torch.randn(b, 3, h, w)}),
        [(4, 32, 32), (3, 24, 48), (5, 40, 16), (2, 64, 20), (4, 33, 35)],
        "90%",
    ),
    "messages": (
        lambda: (
            Messages(),
            lambda n, e: {"x": torch.randn(n, 16), "edges": torch.randint(0, n, (2, e))},
        ),
        [(50, 200), (61, 180), (97, 301), (20, 90), (98, 299)],
        "90%",
    ),
    "recurrent": (
        lambda: (
            Recurrent(),
            lambda b, n: {"x": torch.randn(b, n, 8), "weight": torch.randn(b, n, 8)},
        ),
        [(4, 30), (3, 50), (8, 64), (2, 7)],
        "90%",
    ),
}


def case_of(model: nn.Module, kwargs: dict[str, Any]) -> Case:
    return Case("sized", model, (), kwargs, lambda result: getattr(result, "loss", result))


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_one_program_runs_all_sizes(name: str, is_tight: bool) -> None:
    build, sizes, share = MODELS[name]
    budget = share if is_tight else "100%"
    torch.manual_seed(0)
    model, call = build()
    eager = copy.deepcopy(model)
    planned: Any = rockplan.solve(model, (), budget, sample_kwargs=call(*sizes[0]), options=OPTIONS)
    captured = []
    for size in sizes:
        case = case_of(model, call(*size))
        captured.append("capturing the model" in heard(lambda case=case: case.step(planned)))
        planned.zero_grad()
        eager.load_state_dict(planned.state_dict())
        train_side_by_side(case, planned, eager, steps=2)
        peak_bytes, _ = rockplan.peak_live_bytes(lambda case=case: case.step(planned), 1)
        plan = planned.plan
        assert peak_bytes <= plan.peak_bytes <= plan.budget_bytes, size
        assert peak_bytes >= 0.95 * plan.peak_bytes, size
        for module in (planned, eager):
            module.zero_grad()
    assert captured == [False, True, *[False] * (len(sizes) - 2)]
