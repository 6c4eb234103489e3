"""Steps that run for us leave what they find: a forward may write to parameters, as codebooks and
momentum encoders do, to buffers and to other tensors."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rockplan
from rockplan.cli.main import app
from testing.blocks import QUICK, Mixer

OPTIONS = rockplan.Options(**QUICK)


class Writing(nn.Module):
    """`write` changes something of it in every forward, and what it changes is read."""

    def __init__(self, write: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.layers = nn.ModuleList(Mixer(16) for _ in range(2))
        self.center = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16), persistent=False)
        self.plain = torch.zeros(16)
        self.key = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.query = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.layers:
            h = layer(h)
        with torch.no_grad():
            self.write(self, h.mean(0))
        h = self.scale * self.query(h) + self.key(x)
        return (h - self.center - self.mean - self.plain - self.count).square().mean()

    def state(self) -> dict[str, torch.Tensor]:
        named = (*self.named_parameters(), *self.named_buffers(), ("plain", self.plain))
        return dict(named)


def codebook(model: Any, mean: torch.Tensor) -> None:
    model.center.data.copy_(mean)


def in_place(model: Any, mean: torch.Tensor) -> None:
    model.center.lerp_(mean, 0.5)


def part_of_trainable(model: Any, mean: torch.Tensor) -> None:
    model.scale.data[:4] += mean[:4]


def momentum_as_moco(model: Any, mean: torch.Tensor) -> None:
    for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
        key.data = key.data * 0.9 + query.data * 0.1


def momentum_as_byol(model: Any, mean: torch.Tensor) -> None:
    torch._foreach_lerp_([*model.key.parameters()], [*model.query.parameters()], 0.1)


def loaded(model: Any, mean: torch.Tensor) -> None:
    model.key.load_state_dict({"weight": 0.5 * model.key.weight})


def buffers(model: Any, mean: torch.Tensor) -> None:
    model.count.add_(1)
    torch.add(model.mean, mean, out=model.mean)


def plain_tensor(model: Any, mean: torch.Tensor) -> None:
    model.plain.add_(mean)


def new_parameter(model: Any, mean: torch.Tensor) -> None:
    model.center = nn.Parameter(mean.clone(), requires_grad=False)


WRITES = (codebook, in_place, part_of_trainable, momentum_as_moco, momentum_as_byol, loaded)
WRITES += (buffers, plain_tensor, new_parameter)
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def solve_blocks(model: nn.Module) -> None:
    rockplan.solve_blocks(model, X, "min", options=OPTIONS)


def compare(model: nn.Module) -> None:
    found = rockplan.compare(model, X, (), rounds=1, options=OPTIONS)
    measured = [row for row in found.rows if not row.note]
    assert {(row.gradients, row.buffers) for row in measured} == {2 * ("equal bit for bit",)}
    assert len(measured) > 1


@pytest.mark.parametrize("entry", [solve_blocks, compare])
@pytest.mark.parametrize("write", WRITES)
def test_what_a_forward_writes_is_put_back(
    entry: Callable[[nn.Module], None], write: Callable[..., None]
) -> None:
    model = Writing(write)
    with torch.no_grad():
        model(X)
    eager = copy.deepcopy(model)
    before = {n: (id(t), t.data_ptr(), t._version) for n, t in model.state().items()}
    entry(model)
    assert {n: (id(t), t.data_ptr(), t._version) for n, t in model.state().items()} == before
    for step in range(2):
        for name, tensor in model.state().items():
            assert torch.equal(tensor, eager.state()[name]), (step, name)
        losses = []
        for one in (model, eager):
            torch.manual_seed(step)
            losses.append(one(X))
            losses[-1].backward()
        assert torch.equal(*losses)
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad), name


class Centered(nn.Module):
    """A loss with a center that moves, as DINO has it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(()))

    def forward(self, result: torch.Tensor) -> torch.Tensor:
        loss = (result - self.center).square()
        with torch.no_grad():
            self.center.lerp_(result.detach(), 0.5)
        return loss


def test_what_a_loss_writes_is_put_back() -> None:
    loss = Centered()
    rockplan.solve_blocks(Writing(codebook), X, "min", loss=loss, options=OPTIONS)
    assert loss.center == 0
    rockplan.compare(Writing(codebook), X, (), loss=loss, rounds=1, options=OPTIONS)
    assert loss.center == 0


MADE: list[Writing] = []


def factory() -> tuple[nn.Module, torch.Tensor]:
    MADE.append(Writing(codebook))
    return MADE[-1], X


@pytest.mark.parametrize(
    "command",
    [
        ("blocks", "tests.test_untouched:factory", "layers.*", "-b", "min"),
        ("compare", "tests.test_untouched:factory", "-b", "100%", "--rounds", "1"),
    ],
)
def test_commands(command: tuple[str, ...]) -> None:
    MADE.clear()
    result = CliRunner().invoke(app, [*command])
    assert result.exit_code == 0, result.output
    expected = Writing(codebook).state()
    (made,) = MADE
    assert all(torch.equal(t, expected[name]) for name, t in made.state().items())


@pytest.mark.parametrize(
    "entry",
    [
        functools.partial(rockplan.solve, budget="min", options=OPTIONS),
        functools.partial(rockplan.pareto, options=OPTIONS),
    ],
)
def test_planning_the_whole_writes_nothing(entry: Callable[..., object]) -> None:
    for write in (codebook, buffers):
        model = Writing(write)
        before = copy.deepcopy(model.state())
        try:
            entry(model, X)
        except rockplan.CaptureError as error:
            assert write is codebook, error
        assert all(torch.equal(t, before[name]) for name, t in model.state().items())


# How a file keeps what others register with it -> (what makes it, registers with it, finds it)
REGISTRIES = {
    "a dictionary": ("MADE = {}", "registry.MADE['gate'] = gate", "MADE['gate']"),
    "a list": ("MADE = []", "registry.MADE.append(gate)", "MADE[0]"),
    "a set": ("MADE = set()", "registry.MADE.add(gate)", "next(iter(MADE))"),
    "the file": ("", "registry.gate = gate", "gate"),
    "a class": ("class Made:\n    made = {}", "registry.Made.made[0] = gate", "Made.made[0]"),
    "an object": ("class Made: ...\nMADE = Made()", "registry.MADE.gate = gate", "MADE.gate"),
}


class FindsItsGate(nn.Module):
    def __init__(self, find: Callable[[], Callable[[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.find = find

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.find()(self.linear(x))


@pytest.mark.parametrize("kind", REGISTRIES)
def test_files_imported_by_the_first_forward_stay_registered(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes, registers, finds = REGISTRIES[kind]
    find = f"def find():\n    importlib.import_module('registered')\n    return {finds}\n"
    (tmp_path / "registry.py").write_text(f"import importlib\n{makes}\n{find}")
    gate = "def gate(x):\n    return x * x.sigmoid()\n"
    (tmp_path / "registered.py").write_text(f"import registry\n{gate}{registers}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("registry", "registered"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    eager = FindsItsGate(importlib.import_module("registry").find)
    x = torch.randn(4, 8)
    planned = rockplan.solve(copy.deepcopy(eager), x, "min")
    for module in (planned, eager):
        module(x).sum().backward()
    assert torch.equal(planned.linear.weight.grad, eager.linear.weight.grad)


class ImportsAnew(nn.Linear):
    """Each call imports a file, and says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.imported = f"made_anew_{len(sys.modules)}"
        sys.modules[self.imported] = types.ModuleType(self.imported)
        return super().forward(x)


def test_files_imported_by_each_forward_are_refused() -> None:
    with pytest.raises(rockplan.UnsupportedModel, match="self.imported"):
        rockplan.solve(ImportsAnew(4, 4), torch.ones(2, 4), "min", options=OPTIONS)
    for name in [n for n in sys.modules if n.startswith("made_anew_")]:
        del sys.modules[name]
