"""Calls that differ in sizes alone run one program, whose peak is known at every size."""

from __future__ import annotations

import copy
import pickle
import random
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rockplan
from rockplan.graph_builder.costs import price
from rockplan.graph_builder.costs.open_workspaces import OpenWorkspaces
from rockplan.graph_builder.recorded import results
from rockplan.oracles.simulate import simulate
from rockplan.runtime.planned_state import programs_of
from rockplan.search.in_flight import needed_bytes
from rockplan.values.graph import Call
from rockplan.values.sizes import resized
from testing import models
from testing.graphs import repeated_chain
from testing.models import Case
from testing.training import QUICK, assert_same_state, train_side_by_side
from tests.kernels import distance, gradients, interpret
from tests.planning import heard, set_times

OPTIONS = replace(QUICK, cache=False, bound_time_limit_s=0)


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


class OfMask(nn.Module):
    """A loss of the labelled rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        is_labelled = labels >= 0
        return nn.functional.cross_entropy(self.layers(x)[is_labelled], labels[is_labelled])


def labelled(rows: int, count: int) -> dict[str, Tensor]:
    labels = torch.full((rows,), -100)
    labels[torch.randperm(rows)[:count]] = torch.randint(0, 8, (count,))
    return {"x": torch.randn(rows, 8), "labels": labels}


class WithoutLoops(Messages):
    """Drops the edges from nodes to themselves, and gives each node one."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        edges = edges[:, edges[0] != edges[1]]
        return super().forward(x, torch.cat([edges, torch.arange(x.shape[0]).expand(2, -1)], 1))


def with_loops(nodes: int, edges: int, loops: int) -> dict[str, Tensor]:
    sent = torch.randint(0, nodes, (edges,))
    arrived = (sent + torch.randint(1, nodes, (edges,))) % nodes
    arrived[:loops] = sent[:loops]
    return {"x": torch.randn(nodes, 16), "edges": torch.stack([sent, arrived])}


class Segments(nn.Module):
    """Attention inside of segments that lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        lengths = ends.diff()
        longest = lengths.max().item()
        is_inside = torch.arange(longest)[None] < lengths[:, None]
        padded = x.new_zeros(lengths.shape[0], longest, 8)
        padded[is_inside] = self.layers(x)
        mixed = (padded @ padded.mT / longest**0.5).softmax(-1) @ padded
        place = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths)
        return (self.layers(mixed[is_inside]) * place[:, None]).square().mean()


def segments(*lengths: int) -> dict[str, Tensor]:
    return {"x": torch.randn(sum(lengths), 8), "ends": torch.tensor([0, *lengths]).cumsum(0)}


class Recurrent(nn.Module):
    """The result of a scan over chunks is as long as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], dtype=x.dtype)
        x = self.inner(x * steps[:, None]).cumsum(1) / x.shape[1] ** 0.5
        return (x[:, :-1] * weight[:, 1:]).sum()


class Positions(nn.Module):
    """Patches with positions of one size, resampled to that of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.mix = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 16)
        self.positions = nn.Parameter(torch.randn(1, 16, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x)
        h = h + nn.functional.interpolate(self.positions, h.shape[-2:], mode="bicubic")
        rows = h.flatten(2).mT
        attended = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        return (self.mix(attended) + rows).square().mean()


class Windows(nn.Module):
    """Attention in shifted windows of a padded image."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.mix = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, columns, width = x.shape
        x = nn.functional.pad(x, (0, 0, 0, -columns % 4, 0, -rows % 4))
        down, across = x.shape[1] // 4, x.shape[2] // 4
        x = torch.roll(x, (-2, -2), (1, 2)).view(batch, down, 4, across, 4, width)
        q, k, v = self.three(x.transpose(2, 3).reshape(-1, 16, width)).chunk(3, -1)
        x = self.mix(nn.functional.scaled_dot_product_attention(q, k, v))
        x = x.view(batch, down, across, 4, 4, width).transpose(2, 3)
        x = torch.roll(x.reshape(batch, 4 * down, 4 * across, width), (2, 2), (1, 2))
        return x[:, :rows, :columns].square().mean()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0].square().mean()


class Streams(nn.Module):
    """Adds to a view in another order of dimensions (Gemma 3n)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        streams = self.layers(x).permute(2, 0, 1)
        streams += x.permute(2, 0, 1)
        return (streams.contiguous() * streams[:1]).square().mean()


class Shifted(nn.Module):
    """Predicts each token from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.table(x)))
        return nn.functional.cross_entropy(scores.transpose(1, 2), y)


def shifted(batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 16, (batch, length + 1))
    return {"x": ids[:, :-1], "y": ids[:, 1:]}


def of_a_stream(batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 16, (1000,))
    count = batch * length
    return {"x": ids[:count].view(batch, length), "y": ids[1 : count + 1].view(batch, length)}


class Spoken(nn.Module):
    """A CTC loss of padded targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 10))

    def forward(self, x: Tensor, steps: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        scores = self.layers(x).log_softmax(-1).transpose(0, 1)
        return nn.functional.ctc_loss(scores, targets, steps, lengths)


def spoken(batch: int, steps: int, longest: int) -> dict[str, Tensor]:
    lengths = torch.full((batch,), longest)
    lengths[1:] -= 1
    targets = torch.randint(1, 10, (batch, longest))
    x, counts = torch.randn(batch, steps, 8), torch.full((batch,), steps)
    return {"x": x, "steps": counts, "targets": targets, "lengths": lengths}


class Losses(nn.Module):
    """Pairs of a batch, by losses whose kernels keep what they sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, of = self.layers(x)[:, 0], nn.functional
        pairs = of.cross_entropy(h[:, None] * y, torch.arange(len(x)))
        likely = of.binary_cross_entropy(h.sigmoid(), y.sigmoid(), reduction="sum")
        return (
            of.mse_loss(h, y) + of.smooth_l1_loss(h, y) + of.soft_margin_loss(h, y.sign())
        ) * pairs + likely


class Columns(nn.Module):
    """Windows around each place, whose kernel takes memory for all of them on the way back, and
    an image of windows that do not touch, for which the image is the larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.taps, self.out = nn.Linear(8, 5), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = nn.functional.unfold(x.mT.unsqueeze(-1), (5, 1), padding=(2, 0))
        windows = windows.mT.unflatten(-1, (8, 5)) @ self.taps(x).softmax(-1).unsqueeze(-1)
        y = self.out(windows.squeeze(-1)).mT
        apart = nn.functional.fold(y, (3 * x.shape[1], 1), (1, 1), stride=(3, 1))
        return apart.square().mean()


class Bags(nn.Module):
    """The mean of the rows of a table in each bag."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.EmbeddingBag(50, 8, mode="mean"), nn.Linear(8, 8)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.mix(self.table(ids, offsets).tanh()).square().mean()


class Pooled(nn.Module):
    """The mean of the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor, graphs: Tensor, y: Tensor) -> Tensor:
        own, place, count = torch.unique(graphs, return_inverse=True, return_counts=True)
        sums = x.new_zeros(len(own), 8).index_add(0, place, self.layers(x))
        return nn.functional.mse_loss(sums / count[:, None], y)


def pooled(nodes: int, graphs: int) -> dict[str, Tensor]:
    own = torch.cat([torch.arange(graphs), torch.randint(0, graphs, (nodes - graphs,))])
    return {"x": torch.randn(nodes, 8), "graphs": own, "y": torch.randn(graphs, 8)}


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
    "images with positions": (
        lambda: (Positions(), lambda h, w: {"x": torch.randn(1, 3, 4 * h, 4 * w)}),
        [(5, 6), (8, 7), (6, 11), (4, 9), (12, 5)],
        "100%",
    ),
    "windows": (
        lambda: (Windows(), lambda h, w: {"x": torch.randn(2, 4 * h + 1, 4 * w + 3, 16)}),
        [(3, 2), (4, 5), (6, 3), (2, 7)],
        "100%",
    ),
    "messages": (
        lambda: (
            Messages(),
            lambda n, e: {"x": torch.randn(n, 16), "edges": torch.randint(0, n, (2, e))},
        ),
        [(50, 200), (61, 180), (97, 301), (20, 90), (98, 299)],
        "90%",
    ),
    "rows of a mask": (
        lambda: (OfMask(), labelled),
        [(80, 20), (90, 41), (90, 33), (200, 150), (80, 20), (41, 17)],
        "80%",
    ),
    "rows of a mask alone": (
        lambda: (OfMask(), labelled),
        [(80, 20), (80, 40), (80, 71), (80, 80), (80, 65)],
        "80%",
    ),
    "edges of a mask": (
        lambda: (WithoutLoops(), with_loops),
        [(50, 200, 9), (61, 180, 1), (97, 301, 33), (20, 90, 2), (98, 299, 100), (97, 300, 0)],
        "90%",
    ),
    "segments": (
        lambda: (Segments(), segments),
        [(20, 10, 30), (25, 11, 3, 31), (4, 9, 10, 40, 50), (17, 25, 30, 30), (29, 43)],
        "90%",
    ),
    "ctc": (
        lambda: (Spoken(), spoken),
        [(2, 21, 4), (3, 30, 5), (4, 50, 7), (8, 64, 9)],
        "100%",
    ),
    "losses": (
        lambda: (Losses(), lambda b: {"x": torch.randn(b, 8), "y": torch.randn(b)}),
        [(16,), (24,), (7,), (40,)],
        "100%",
    ),
    "streams": (
        lambda: (Streams(), lambda b, n: {"x": torch.randn(b, n, 8)}),
        [(4, 30), (3, 50), (8, 64), (2, 7)],
        "100%",
    ),
    "columns": (
        lambda: (Columns(), lambda b, n: {"x": torch.randn(b, n, 8)}),
        [(4, 30), (3, 50), (8, 64), (2, 7)],
        "100%",
    ),
    "bags": (
        lambda: (
            Bags(),
            lambda n, b: {"ids": torch.randint(0, 50, (n,)), "offsets": torch.arange(b) * n // b},
        ),
        [(40, 4), (57, 6), (80, 3), (30, 11)],
        "100%",
    ),
    "graphs": (
        lambda: (Pooled(), pooled),
        [(40, 4), (57, 6), (80, 3), (30, 11)],
        "100%",
    ),
    "arguments of one tensor": (
        lambda: (Shifted(), shifted),
        [(4, 30), (3, 50), (8, 64), (2, 7), (3, 51)],
        "90%",
    ),
    "parts of a stream": (
        lambda: (Shifted(), of_a_stream),
        [(4, 30), (3, 50), (8, 64), (2, 7), (3, 51)],
        "90%",
    ),
    "gru of one length": (
        lambda: (Gated(), lambda b: {"x": torch.randn(5, b, 8)}),
        [(4,), (3,), (8,), (2,)],
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


@pytest.mark.parametrize("name", ["messages", "rows of a mask"])
def test_one_program_with_kernels_runs_all_sizes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = interpret(monkeypatch)
    build, sizes, share = MODELS[name]
    torch.manual_seed(0)
    model, call = build()
    options = replace(OPTIONS, compile=True)
    planned: Any = rockplan.solve(model, (), share, sample_kwargs=call(*sizes[0]), options=options)
    eager = copy.deepcopy(model)
    counts = []
    for size in sizes:
        case = case_of(model, call(*size))
        gradients(case, planned)
        counts.append(len(asked))
        expected = gradients(replace(case, model=eager), eager)
        assert distance(gradients(case, planned), expected) < 1e-5, size
        peak_bytes, _ = rockplan.peak_live_bytes(lambda case=case: case.step(planned), 1)
        assert peak_bytes <= planned.plan.peak_bytes, size
    assert counts[0] < counts[1] and len({*counts[1:]}) == 1


def test_pages_and_calls_in_flight_have_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rockplan.search.paging.LEAST_BYTES", 1 << 10)
    paged = {"host": "4MB", "link": "25GB/s"}
    for more, budget, count in [(paged, "60%", 1), ({"in_flight": 3}, "70%", 3)]:
        build, sizes, _ = MODELS["llama"]
        torch.manual_seed(0)
        model, call = build()
        eager = copy.deepcopy(model)
        options = replace(OPTIONS, **more)
        sample = call(*sizes[0])
        planned: Any = rockplan.solve(model, (), budget, sample_kwargs=sample, options=options)
        captured = []
        for size in sizes[:3]:
            case = case_of(model, call(*size))

            def step(case: Case = case, module: Any = planned, count: int = count) -> None:
                losses = [case.loss(module(**case.kwargs)) for _ in range(count)]
                while losses:
                    losses.pop().backward()

            captured.append("capturing the model" in heard(step))
            planned.zero_grad()
            eager.load_state_dict(planned.state_dict())
            train_side_by_side(case, planned, eager, steps=2)
            peak_bytes, _ = rockplan.peak_live_bytes(step, 1)
            plan = planned.plan
            assert peak_bytes <= needed_bytes(plan, count) <= plan.budget_bytes, size
            assert ("frame.page_in" in planned.code) is ("host" in more)
            assert bool(plan.trips) is ("host" in more)
            pages = sum(trip.size_bytes for trip in plan.trips)
            assert pages == simulate(plan.graph, plan.schedule).host_peak_bytes <= 4_000_000
            for module in (planned, eager):
                module.zero_grad()
        assert captured == [False, True, False]


class Treats(nn.Module):
    """`treat` decides by the number of rows."""

    def __init__(self, treat: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.treat = treat

    def forward(self, x: Tensor) -> Tensor:
        return self.treat(self.layers(x), x.shape[0]).square().mean()


# What Python does with a size of which a program for all sizes would know nothing.
UNSEEN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "its class": lambda h, n: h * 2 if isinstance(n, int) else h * 3,
    "its text": lambda h, n: h * len(f"{n:b}"),
    "a table": lambda h, n: h * {5: 2.0, 9: 3.0}.get(n, 1.0),
    "values": lambda h, n: h * sum(torch.arange(n).tolist()),
}
SEEN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a bound": lambda h, n: h * 2 if n > 30 else h * 3,
    "one number": lambda h, n: h * 2 if n == 9 else h * 3,
    "a part": lambda h, n: h[: n // 2 + 1] / n**0.5,
    "padding": lambda h, n: nn.functional.pad(h, (0, 0, 0, -n % 8)),
    "a shortcut": lambda h, n: h[:17],
    "a grid": lambda h, n: h * torch.linspace(-1, 1, steps=n)[:, None],
    "centers of a grid": lambda h, n: h * torch.linspace(0.5, n - 0.5, n, dtype=h.dtype)[:, None],
    "a mean by hand": lambda h, n: h.sum(0).expand(3, 8) / n,
    "a mean of fewer": lambda h, n: h.sum(0).expand(3, 8) / (n - 0.5),
    "a flag": lambda h, n: nn.functional.scaled_dot_product_attention(
        h[None], h[None], h[None], is_causal=n > 30
    ),
    "windows": lambda h, n: nn.functional.max_pool1d(h.t(), 3, 2, 1),
    "a loop": lambda h, n: sum((h[i : i + 64].sum() for i in range(0, n, 64)), h.sum()),
    "the last row": lambda h, n: h[n - 1, 2:] * h[n // 2, None, 2:],
    "a column of half": lambda h, n: h.mT[..., None, n // 2].exp() * h[:n, 1:3].sum(),
    "zeros in a row": lambda h, n: assigned(h, (n - 1, slice(2, 5)), 0.0) * h,
    "a column from a row": lambda h, n: assigned(h[None], (..., n // 2, slice(8)), h[n // 3]),
    "one of a row": lambda h, n: h * h[n // 3, 2] + h[None, n - 1, :1],
}


@pytest.mark.parametrize("name", [*UNSEEN, *SEEN])
def test_what_decides_by_a_size_stays_right(name: str) -> None:
    torch.manual_seed(0)
    model = Treats((UNSEEN | SEEN)[name])
    eager = copy.deepcopy(model)
    planned: Any = rockplan.solve(model, torch.randn(12, 8), "100%", options=OPTIONS)
    for n in (9, 17, 5, 40, 33, 17, 64):
        train_side_by_side(case_of(model, {"x": torch.randn(n, 8)}), planned, eager, steps=1)
    opened = [program.open for program in programs_of(planned)]
    assert any(opened) is (name in SEEN)


# What is another program at some sizes, and the sizes in the order of calls.
SPECIAL: dict[str, tuple[Callable[[Tensor, int], Tensor], Sequence[int]]] = {
    "chunks": (lambda h, n: in_chunks(h), (6, 20, 40, 55, 30, 25, 44, 36, 60, 50, 18)),
    "full chunks": (lambda h, n: in_chunks(h), (6, 16, 32, 20, 25, 30, 18, 21)),
    "a sample of full chunks": (lambda h, n: in_chunks(h), (32, 20, 25, 30, 18, 21)),
    "a size that is another": (lambda h, n: h * 2 if n == h.shape[1] else h, (12, 8, 9, 20, 31)),
    "a sample that is another": (lambda h, n: h * 2 if n == h.shape[1] else h, (8, 9, 20, 31, 7)),
    "a window": (lambda h, n: h[-20:], (12, 30, 13, 20, 40, 15, 25, 18, 33)),
    "the sum of a window": (lambda h, n: h[-20:].sum(), (30, 20, 40, 25, 33)),
    "padding": (lambda h, n: padded(h) if n % 8 else h * 2, (16, 24, 9, 12, 15, 32, 40, 48, 7)),
    "cropped padding": (lambda h, n: cropped(h, n), (16, 24, 9, 12, 15, 32, 40, 48, 7)),
    "a crop in rows": (
        lambda h, n: cropped(h, n).mT[..., : n // 4 * 4],
        (16, 24, 9, 12, 30, 32, 48),
    ),
    "whole windows": (lambda h, n: h[: n // 4 * 4, :].view(-1, 4, 8), (16, 24, 9, 15, 32, 40, 11)),
    "every other row": (lambda h, n: h[::2, :][: n // 2, :] * h[1::2], (16, 24, 9, 15, 32, 40, 8)),
}


def assigned(h: Tensor, index: Any, value: Any) -> Tensor:
    changed = h * 2
    changed[index] = value
    return changed


def cropped(h: Tensor, n: int) -> Tensor:
    return nn.functional.pad(h, (0, 0, 0, -n % 8)).exp()[None, :n, :8][0]


def in_chunks(h: Tensor) -> Tensor:
    return sum(h[i : i + 16].logsumexp(-1).sum() for i in range(0, h.shape[0], 16)) + h.sum()


def padded(h: Tensor) -> Tensor:
    return nn.functional.pad(h, (0, 0, 0, 8 - h.shape[0] % 8))


@pytest.mark.parametrize("name", SPECIAL)
def test_special_sizes_leave_others_open(name: str) -> None:
    treat, sizes = SPECIAL[name]
    torch.manual_seed(0)
    model = Treats(treat)
    eager = copy.deepcopy(model)
    sample = {"x": torch.randn(sizes[0], 8)}
    planned: Any = rockplan.solve(model, (), "100%", sample_kwargs=sample, options=OPTIONS)
    captured = []
    for size in sizes[1:]:
        case = case_of(model, {"x": torch.randn(size, 8)})
        captured.append("capturing the model" in heard(lambda case=case: case.step(planned)))
        train_side_by_side(case, planned, eager, steps=1)
    assert not any(captured[-2:]), captured


class Joined(nn.Module):
    """Windows of 4 x 4 pixels, put together and cropped, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        _, height, width, _ = x.shape
        x = nn.functional.pad(self.layer(x), (0, 0, 0, -width % 4, 0, -height % 4))
        high, wide = x.shape[1] // 4, x.shape[2] // 4
        windows = x.view(-1, high, 4, wide, 4, 8).transpose(2, 3).reshape(-1, 16, 8).softmax(1)
        count = windows.shape[0] // (high * wide)
        x = windows.view(count, high, wide, 4, 4, -1).transpose(2, 3)
        x = x.reshape(count, 4 * high, 4 * wide, -1)[:, :height, :width, :]
        return x.exp().square().mean()


def test_windows_of_images_leave_sizes_open() -> None:
    torch.manual_seed(0)
    model = Joined()
    eager = copy.deepcopy(model)
    planned: Any = rockplan.solve(model, torch.randn(2, 12, 20, 8), "100%", options=OPTIONS)
    captured = []
    for size in ((3, 16, 24), (5, 20, 12), (4, 24, 28)):
        x = torch.randn(*size, 8)
        captured.append("capturing the model" in heard(lambda x=x: planned(x).backward()))
        eager(x).backward()
        assert_same_state(planned, eager, str(size))
    assert captured == [True, False, False]


RESAMPLED = [("linear", 1), ("nearest-exact", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)]


@pytest.mark.parametrize(("mode", "dimensions"), RESAMPLED)
def test_resampling_to_one_size_leaves_others_open(mode: str, dimensions: int) -> None:
    class Resampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x).mT[(None,) * (dimensions - 1)]
            return nn.functional.interpolate(h, (8, 8, 20)[-dimensions:], mode=mode).square().mean()

    torch.manual_seed(0)
    model = Resampled()
    eager = copy.deepcopy(model)
    sample = {"x": torch.randn(8, 12, 8)}
    planned: Any = rockplan.solve(model, (), "100%", sample_kwargs=sample, options=OPTIONS)
    captured = []
    for rows in (9, 31, 20, 7):
        case = case_of(model, {"x": torch.randn(8, rows, 8)})
        captured.append("capturing the model" in heard(lambda case=case: case.step(planned)))
        train_side_by_side(case, planned, eager, steps=1)
    assert captured == [True, False, False, False]


@pytest.mark.parametrize("cut", [lambda h: h[:20], lambda h: h[:20, :], lambda h: h[-20:]])
def test_a_slice_of_all_is_none(cut: Callable[[Tensor], Tensor]) -> None:
    """Eager's indexing makes none, so that gradients come in other strides."""
    torch.manual_seed(0)
    model = Treats(lambda h, n: cut(h))
    planned: Any = rockplan.solve(model, torch.randn(40, 8), "100%", options=OPTIONS)
    captured = []
    for size in (33, 25, 20):
        x = torch.randn(size, 8)
        captured.append("capturing the model" in heard(lambda x=x: planned(x).backward()))
    assert captured == [True, False, True]


def test_results_overlap_at_some_sizes() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.layer(x)
            return h[:-3], h[20:]

    torch.manual_seed(0)
    planned: Any = rockplan.solve(Parts(), torch.randn(21, 8), "100%", options=OPTIONS)
    for size in (22, 23, 40, 22):
        first, last = planned(torch.randn(size, 8))
        last.mul_(2)
        if size < 40:
            first.sum().backward()
        else:
            with pytest.raises(rockplan.BackwardError, match="share memory"):
                first.sum().backward()


# What Python does with a number that it reads from values.
COUNTS: dict[str, tuple[Callable[[Tensor, Any], Tensor], bool]] = {
    "a factor": (lambda h, n: h * n, True),
    "a bound": (lambda h, n: h * 2 if n > 6 else h * 3, True),
    "a part": (lambda h, n: h[:n] / n, True),
    "an int": (lambda h, n: h * int(n), False),
    "a loop": (lambda h, n: sum((h * i for i in range(n)), h), False),
    "a table": (lambda h, n: h * {2: 2.0, 9: 3.0}.get(n, 1.0), False),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_decides_by_a_count_stays_right(name: str) -> None:
    treat, is_open = COUNTS[name]

    class Counts(Treats):
        def forward(self, x: Tensor, of: Tensor) -> Tensor:
            return treat(self.layers(x), of.max().item()).square().mean()

    torch.manual_seed(0)
    model = Counts(lambda h, n: h)
    eager = copy.deepcopy(model)
    sample = {"x": torch.randn(12, 8), "of": torch.tensor([1, 5])}
    planned: Any = rockplan.solve(model, (), "100%", sample_kwargs=sample, options=OPTIONS)
    captured = []
    for n in (5, 1, 0, 9, 2, 8, 3, 1, 9):
        call = {"x": torch.randn(12, 8), "of": torch.tensor([n, -3])}
        case = case_of(model, call)
        captured.append("capturing the model" in heard(lambda case=case: case.step(planned)))
        planned.zero_grad()
        train_side_by_side(case, planned, eager, steps=1)
    # Counts of 0 and 1 are kinds of their own.
    assert captured[:4] == [False, *[True] * 3] and not any(captured[7:])
    assert any(captured[4:]) is not (is_open and name != "a bound")
    assert any(program.open for program in programs_of(planned)) is is_open


# What the forward does with a number among its arguments.
NUMBERS: dict[str, tuple[Callable[[Tensor, Any], Tensor], bool]] = {
    "a divisor": (lambda h, n: h / n, True),
    "a shift": (lambda h, n: h.clamp(max=n) + torch.full_like(h, n) * n, True),
    "a factor in an operator": (lambda h, n: torch.add(h, h, alpha=n), True),
    "a power": (lambda h, n: h.abs() ** n, False),
    "a constant": (lambda h, n: h * torch.tensor(n), False),
    "a text": (lambda h, n: h * len(f"{n:.3f}"), False),
    "its class": (lambda h, n: h * 2 if isinstance(n, int | float) else h, True),
}


@pytest.mark.parametrize("numbers", [(5, 9, 0, 1, 7, 100, 2), (0.5, 0.75, 0.0, -0.0, 2.0, 7.25)])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_in_arithmetic_are_data(name: str, numbers: Sequence[float]) -> None:
    treat, is_open = NUMBERS[name]

    class Takes(Treats):
        def forward(self, x: Tensor, n: float) -> Tensor:
            return treat(self.layers(x), n).square().mean()

    torch.manual_seed(0)
    model = Takes(lambda h, n: h)
    eager = copy.deepcopy(model)
    planned: Any = rockplan.solve(
        model, (), "100%", sample_kwargs={"x": torch.randn(12, 8), "n": numbers[0]}, options=OPTIONS
    )
    captured = []
    for n in numbers:
        case = case_of(model, {"x": torch.randn(12, 8), "n": n})
        captured.append("capturing the model" in heard(lambda case=case: case.step(planned)))
        for module in (planned, eager):
            module.zero_grad()
            module.load_state_dict(model.state_dict())
        train_side_by_side(case, planned, eager, steps=1)
    assert any(captured[4:]) is not is_open


def test_a_loop_over_chunks_leaves_sizes_free() -> None:
    """As many calls of it as there are chunks; a size that fills one is a kind of its own, and does
    not end others."""

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 50)

        def forward(self, x: Tensor) -> Tensor:
            h, total = self.layer(x), x.new_zeros(())
            for start in range(0, h.shape[0], 16):
                end = min(start + 16, h.shape[0])
                total = total + self.head(h[start:end]).logsumexp(-1).sum()
            return total / h.shape[0] + len([*range(4, 2, -1)]) + isinstance(range(3), range)

    torch.manual_seed(0)
    model = Chunked()
    eager = copy.deepcopy(model)
    sample = {"x": torch.randn(6, 8)}
    planned: Any = rockplan.solve(model, (), "100%", sample_kwargs=sample, options=OPTIONS)
    captured = []
    for size in (7, 8, 5, 16, 15, 20, 22, 25, 30):
        case = case_of(model, {"x": torch.randn(size, 8)})
        captured.append("capturing the model" in heard(lambda case=case: case.step(planned)))
        train_side_by_side(case, planned, eager, steps=1)
    assert captured == [True, False, False, True, False, True, True, False, False]
    assert range(3)[-1] == 2 and type(range(3)) is range


@pytest.mark.filterwarnings("ignore:the TorchDispatchMode")
def test_what_sizes_decide_is_asked_once() -> None:
    """On CUDA the host would wait for each answer."""

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any, kwargs: Any = None
        ) -> Any:
            Reads.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            steps = torch.arange(x.shape[0]).diff()
            h = self.layer(x)
            return (h if (steps == 1).all() else h.flip(0)).square().mean()

    torch.manual_seed(0)
    model, sample = Ordered(), {"x": torch.randn(6, 8)}
    planned: Any = rockplan.solve(model, (), "100%", sample_kwargs=sample, options=OPTIONS)
    reads = []
    for size in (6, 7, 9, 9, 7, 9):
        with Reads():
            planned(torch.randn(size, 8)).backward()
        reads.append(Reads.count)
    assert reads[2] > reads[1] and len({*reads[2:]}) == 1


@pytest.mark.parametrize("kind", [numpy.float64, numpy.float32, numpy.int64, numpy.bool_])
def test_numbers_of_numpy_are_kinds_of_call(kind: Any) -> None:
    class Takes(Treats):
        def forward(self, x: Tensor, n: Any) -> Tensor:
            return (self.layers(x) * float(n)).square().mean()

    torch.manual_seed(0)
    model = Takes(lambda h, n: h)
    eager = copy.deepcopy(model)
    calls = [{"x": torch.randn(size, 8), "n": kind(n)} for size, n in [(12, 1), (9, 0), (5, 1)]]
    planned = rockplan.solve(model, (), "100%", sample_kwargs=calls[0], options=OPTIONS)
    for kwargs in calls:
        train_side_by_side(case_of(model, kwargs), planned, eager, steps=1)


def test_a_size_that_is_constant_leaves_others_free() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, images: Tensor) -> Tensor:
            summed = sum(self.layer(image).mean(0) for image in images.unbind())
            return (self.layer(x) + summed).square().mean()

    torch.manual_seed(0)
    model = Both()
    eager = copy.deepcopy(model)

    def call(rows: int, images: int) -> dict[str, Tensor]:
        return {"x": torch.randn(rows, 8), "images": torch.randn(images, 4, 8)}

    planned: Any = rockplan.solve(model, (), "100%", sample_kwargs=call(5, 2), options=OPTIONS)
    captured = []
    for rows, images in [(7, 3), (9, 3), (11, 3), (6, 2), (8, 2), (40, 3), (12, 2)]:
        case = case_of(model, call(rows, images))
        captured.append("capturing the model" in heard(lambda case=case: case.step(planned)))
        planned.zero_grad()
        train_side_by_side(case, planned, eager, steps=1)
    assert captured == [True, True, False, True, False, False, False]


def test_rows_say_what_a_simulation_finds() -> None:
    build, sizes, _ = MODELS["llama"]
    torch.manual_seed(0)
    model, call = build()
    planned: Any = rockplan.solve(model, (), "50%", sample_kwargs=call(*sizes[0]), options=OPTIONS)
    case_of(model, call(*sizes[1])).step(planned)
    (program,) = (p for p in programs_of(planned) if p.open is not None)
    for batch, length in [(2, 2), (3, 17), (6, 96), (5, 33)]:
        numbers = program.open.numbers((batch, length), ())
        simulation = simulate(resized(program.plan.graph, numbers), program.plan.schedule)
        found = program.open.rows.bytes_at(numbers)
        assert found == (simulation.peak_bytes, simulation.saved_bytes, 0)


def test_cached_schedules_are_for_their_prices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    options = replace(OPTIONS, cache=True)
    for slower in (1, 3):
        torch.manual_seed(0)
        build, sizes, share = MODELS["gpt2"]
        model, call = build()
        set_times(monkeypatch, slower)
        sample = call(*sizes[0])
        planned: Any = rockplan.solve(model, (), share, sample_kwargs=sample, options=options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for size in sizes[1:3]:
                case_of(model, call(*size)).step(planned)
        shutil.rmtree(tmp_path / "profile")


@pytest.mark.parametrize("how", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy])
def test_copies_run_all_sizes(how: Callable[[Any], Any]) -> None:
    build, sizes, share = MODELS["bert"]
    torch.manual_seed(0)
    model, call = build()
    eager = copy.deepcopy(model)
    planned: Any = rockplan.solve(model, (), share, sample_kwargs=call(*sizes[0]), options=OPTIONS)
    case_of(model, call(*sizes[1])).step(planned)
    planned.zero_grad()
    copied = how(planned)
    case = case_of(model, call(*sizes[2]))
    assert "capturing the model" not in heard(lambda: case.step(copied))
    copied.zero_grad()
    train_side_by_side(case, copied, eager, steps=2)


def test_blocks_and_loaded_plans_run_all_sizes(tmp_path: Path) -> None:
    build, sizes, _ = MODELS["gpt2"]
    for is_of_blocks in (True, False):
        torch.manual_seed(0)
        model, call = build()
        eager = copy.deepcopy(model)
        sample = call(4, 90)
        if is_of_blocks:
            planned: Any = rockplan.solve_blocks(
                model, (), "100%", sample_kwargs=sample, options=OPTIONS
            )
        else:
            solved = rockplan.solve(model, (), "70%", sample_kwargs=sample, options=OPTIONS)
            rockplan.save_plan(solved, tmp_path / "plan.json")
            planned = rockplan.load(
                model, (), tmp_path / "plan.json", sample_kwargs=sample, options=OPTIONS
            )
        captured = []
        for size in ((4, 90), *sizes[:1], *sizes[3:4]):
            case = case_of(model, call(*size))
            stages = heard(lambda case=case, planned=planned: case.step(planned))
            captured.append("capturing the model" in stages)
            planned.zero_grad()
            train_side_by_side(case, planned, eager, steps=1)
        assert captured == [False, True, False]


def test_a_file_of_many_sizes_is_recorded_once(tmp_path: Path) -> None:
    build, _, share = MODELS["gpt2"]
    torch.manual_seed(0)
    model, call = build()
    eager = copy.deepcopy(model)
    calls = [call(4, length) for length in (90, 64, 40, 17)]
    largest = rockplan.plan(model, (), share, sample_kwargs=calls[0], options=OPTIONS)
    budget = largest.budget_bytes // 2
    plans = [rockplan.plan(model, (), budget, sample_kwargs=c, options=OPTIONS) for c in calls[:3]]
    rockplan.save_plan(plans, tmp_path / "plan.json")
    loaded: Any = rockplan.load(
        model, (), tmp_path / "plan.json", sample_kwargs=calls[0], options=OPTIONS
    )
    captured = []
    for kwargs in calls:
        case = case_of(model, kwargs)
        captured.append("capturing the model" in heard(lambda case=case: case.step(loaded)))
        loaded.zero_grad()
        train_side_by_side(case, loaded, eager, steps=1)
    assert captured == [False, True, False, False]
    found = [plan.schedule for plan in loaded.plans[:2]]
    assert found == [plan.schedule for plan in plans[:2]]


def test_arguments_that_nothing_reads_keep_no_size_shut() -> None:
    class Reads(Treats):
        def forward(self, x: Tensor, beside: Tensor, number: int) -> Tensor:
            return super().forward(x)

    torch.manual_seed(0)
    model = Reads(SEEN["a part"])
    eager = copy.deepcopy(model)

    def call(rows: int) -> dict[str, Any]:
        return {"x": torch.randn(rows, 8), "beside": torch.zeros(3, rows), "number": rows}

    planned: Any = rockplan.solve(model, (), "100%", sample_kwargs=call(12), options=OPTIONS)
    captured = []
    for rows in (12, 9, 40, 17, 12):
        case = case_of(model, call(rows))
        captured.append("capturing the model" in heard(lambda case=case: case.step(planned)))
        planned.zero_grad()
        train_side_by_side(case, planned, eager, steps=1)
    assert captured == [False, True, False, False, False]


# Kinds of an argument: absent, without leaves, of several, with sizes of its own.
OTHERS: dict[str, Callable[[int], Any]] = {
    "none": lambda n: None,
    "a tensor": lambda n: torch.randn(n),
    "no list": lambda n: [],
    "a dictionary": lambda n: {"a": torch.randn(n), "b": ()},
    "a number": lambda n: n,
}


@pytest.mark.parametrize("name", OTHERS)
def test_arguments_change_their_kind_and_size(name: str) -> None:
    class Takes(Treats):
        def forward(self, x: Tensor, y: Any = None) -> Tensor:
            return super().forward(x if y is None else x * 2)

    torch.manual_seed(0)
    model = Takes(SEEN["a part"])
    eager = copy.deepcopy(model)
    planned: Any = rockplan.solve(model, torch.randn(12, 8), "100%", options=OPTIONS)
    for rows, size in [(12, 0), (9, 0), (9, 3), (9, 5), (20, 5), (20, 0), (7, 6)]:
        kwargs = {"x": torch.randn(rows, 8)} | ({"y": OTHERS[name](size)} if size else {})
        train_side_by_side(case_of(model, kwargs), planned, eager, steps=1)


def test_sizes_beyond_the_budget_are_refused() -> None:
    torch.manual_seed(0)
    model = Treats(SEEN["a part"])
    planned: Any = rockplan.solve(model, torch.randn(12, 8), 4000, options=OPTIONS)
    planned(torch.randn(13, 8)).backward()
    for n in (500, 14, 600):
        if n > 100:
            with pytest.raises(rockplan.InfeasibleBudget, match=f"x: {n}x8"):
                planned(torch.randn(n, 8))
        else:
            planned(torch.randn(n, 8)).backward()
    assert all(plan.peak_bytes <= 4000 for plan in planned.plans)


def test_symbols_that_take_too_long_are_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(results, "ANY_S", 0.0)
    monkeypatch.setattr(results, "CALL_S", 0.0)
    torch.manual_seed(0)
    model = Treats(lambda h, n: h.flatten().view(-1, 4))
    eager = copy.deepcopy(model)
    planned: Any = rockplan.solve(model, torch.randn(12, 8), "100%", options=OPTIONS)
    for rows in (20, 33, 20):
        case = case_of(model, {"x": torch.randn(rows, 8)})
        train_side_by_side(case, planned, eager, steps=1)
    assert not any(program.open for program in programs_of(planned))
    assert caplog.text.count("take too long with symbols") == 1


@torch.library.custom_op("rockplan_sizes::part", mutates_args=())
def part(x: Tensor) -> Tensor:
    """Returns a part of twice as much."""
    return torch.cat([x, x])[: x.shape[0]]


part.register_fake(torch.empty_like)
rockplan.pure("rockplan_sizes::part")
part.register_autograd(lambda _, gradient: gradient)


@pytest.mark.parametrize("kept", [lambda h: part(h).square(), lambda h: nn.LSTM(8, 8)(h)[0]])
def test_what_kernels_keep_is_within_the_peak(kept: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Treats(lambda h, n: kept(h))
    planned: Any = rockplan.solve(model, torch.randn(12, 8), 10**6, options=OPTIONS)
    for rows in (9, 40, 300):
        case = case_of(model, {"x": torch.randn(rows, 8)})
        case.step(planned)
        peak_bytes, _ = rockplan.peak_live_bytes(lambda case=case: case.step(planned), 1)
        assert peak_bytes <= planned.plan.peak_bytes, rows


def test_later_sizes_search_no_smallest_plan() -> None:
    build, sizes, _ = MODELS["llama"]
    torch.manual_seed(0)
    model, call = build()
    planned: Any = rockplan.solve(model, (), "min", sample_kwargs=call(*sizes[0]), options=OPTIONS)
    case_of(model, call(*sizes[1])).step(planned)
    least = planned.plan.budget_bytes
    for size in sizes[2:]:
        case = case_of(model, call(*size))
        stages = heard(lambda case=case: case.step(planned))
        assert "looking for the smallest peak" not in stages, size
        peak_bytes, _ = rockplan.peak_live_bytes(lambda case=case: case.step(planned), 1)
        plan = planned.plan
        assert peak_bytes <= plan.peak_bytes <= plan.budget_bytes, size
        assert plan.budget_bytes <= max(least, 0.9 * plan.eager_peak_bytes), size


def test_sizes_in_a_range_mismatch_nothing() -> None:
    torch.manual_seed(0)
    model = Treats(SEEN["padding"])
    options = replace(OPTIONS, sizes={0: (4, 40)}, on_mismatch="error")
    planned: Any = rockplan.solve(model, {"x": torch.randn(12, 8)}, "100%", options=options)
    eager = copy.deepcopy(model)
    for n in (40, 4, 31, 8):
        train_side_by_side(case_of(model, {"x": torch.randn(n, 8)}), planned, eager, steps=1)
    with pytest.raises(rockplan.StalePlan):
        planned(x=torch.randn(12, 8).double())


def test_workspaces_are_bounded_by_their_own_sizes() -> None:
    graph, _ = repeated_chain(random.Random(0), 2)
    convolution = Call("aten.convolution.default", (), (), ())
    nodes = (*graph.nodes[:-1], replace(graph.nodes[-1], calls=(convolution,)))
    on = {"of the first": (0,), "of both": (0, 1), "by size": (0,)}
    known = {
        "of the first": {(4,): 40, (8,): 80},
        "of both": {(4, 9): 49, (8, 3): 83},
        "by size": {(4,): 7, (8,): 5},
    }
    of = {**dict.fromkeys(on, 0), "by size": len(nodes) - 1}
    open_ones = OpenWorkspaces(replace(graph, nodes=nodes), of, on, known)
    here = {"of the first": 40, "of both": 49, "by size": 7}
    assert open_ones.bounds((4, 9)) == (here, here)
    assert open_ones.bounds((4, 2)) == ({**here, "of both": 0}, here)
    between = {"of the first": 40, "of both": 49, "by size": 0}
    assert open_ones.bounds((5, 9)) == (between, {"of the first": 80})


def test_only_convolutions_run_at_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    measure = price.measure_memory

    def measured(inputs: Any, calls: dict[str, Call], *more: Any) -> Any:
        ran.extend(call.op for call in calls.values())
        return measure(inputs, calls, *more)

    monkeypatch.setattr(price, "measure_memory", measured)
    torch.manual_seed(0)
    model = Convolutions()
    sizes = [(5, 40, 36), (4, 48, 44), (4, 36, 32), (3, 28, 24), (4, 36, 32)]
    calls = [{"x": torch.randn(b, 3, h, w)} for b, h, w in sizes]
    planned: Any = rockplan.solve(model, (), 10**9, sample_kwargs=calls[0], options=OPTIONS)
    run = []
    for call in calls[1:]:
        ran.clear()
        case_of(model, call).step(planned)
        run.append({op.split(".")[1] for op in ran})
    convolutions = {"convolution", "convolution_backward"}
    assert run[1:] == [convolutions, convolutions, set()]


def test_the_loss_alone_is_learned_at_once() -> None:
    class Shows(Treats):
        """Returns what its loss is not made of beside it, as Llava does the last of its images."""

        def __init__(self) -> None:
            super().__init__(SEEN["a part"])
            self.shown = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(x), "shown": self.shown(x)}

    torch.manual_seed(0)
    model = Shows()
    planned: Any = rockplan.solve(model, torch.randn(12, 8), "100%", options=OPTIONS)
    eager = copy.deepcopy(model)
    captured = []
    for rows in (20, 9, 40, 17):
        case = Case("shows", model, (torch.randn(rows, 8),), {}, lambda result: result["loss"])
        captured.append("capturing the model" in heard(lambda case=case: case.step(planned)))
        planned.zero_grad()
        train_side_by_side(case, planned, eager, steps=1)
    assert captured == [True, True, False, False]


ADVISED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "whole parts": lambda h, n: h[:, : n // 7],
    "a root": lambda h, n: h / n**0.5,
    "a factor": lambda h, n: h * n,
    "the largest": lambda h, n: h.mT.max(2, keepdim=True).values,
}
"""What docs/limits.md says to write for a size that becomes a number."""


@pytest.mark.parametrize("name", ADVISED)
def test_what_limits_advise_leaves_sizes_open(name: str) -> None:
    class Advised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return ADVISED[name](self.layer(x), x.shape[1]).square().mean()

    torch.manual_seed(0)
    model = Advised()
    eager, sample = copy.deepcopy(model), {"x": torch.randn(2, 30, 8)}
    planned: Any = rockplan.solve(model, (), "100%", sample_kwargs=sample, options=OPTIONS)
    captured = []
    for length in (51, 44, 65):
        case = case_of(model, {"x": torch.randn(2, length, 8)})
        captured.append("capturing the model" in heard(lambda case=case: case.step(planned)))
        train_side_by_side(case, planned, eager, steps=1)
    assert captured == [True, False, False]


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "columns": lambda h, mask: h[mask, :40],
    "columns after all": lambda h, mask: h[mask, ..., :40],
    "one row's": lambda h, mask: h[:, mask[0], :40],
}


@pytest.mark.parametrize("name", MASKED)
def test_crops_beside_masks_leave_sizes_open(name: str) -> None:
    """A mask stands for as many dimensions as it has: the crop is of 64, not of the length."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 64)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return MASKED[name](self.layer(x), mask).square().mean()

    def sample(length: int) -> dict[str, Tensor]:
        return {"x": torch.randn(2, length, 8), "mask": torch.rand(2, length) > 0.5}

    torch.manual_seed(0)
    model = Masked()
    eager = copy.deepcopy(model)
    planned: Any = rockplan.solve(model, (), "100%", sample_kwargs=sample(30), options=OPTIONS)
    captured = []
    for length in (28, 51, 44, 37, 65, 40):
        case = case_of(model, sample(length))
        captured.append("capturing the model" in heard(lambda case=case: case.step(planned)))
        train_side_by_side(case, planned, eager, steps=1)
    assert not any(captured[2:])
