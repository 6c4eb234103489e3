"""`Options.best()`: options that training tolerates, each taken where a plan gains by it."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import rockplan
from rockplan.cli.main import app
from rockplan.errors import InvalidInput, MissingLibrary
from rockplan.graph_builder.fusion import inductor
from rockplan.integrations import lightning, transformers
from rockplan.options import Options
from rockplan.solving.remedies import Figure, best_options
from testing.training import QUICK
from tests.planning import set_times

BEST = replace(QUICK, numerics="best")


class Classifier(nn.Module):
    """A large head, whose logits are returned beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 512)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x).tanh())
        return {"loss": functional.cross_entropy(logits, y), "logits": logits}


def classifier() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Classifier(), (torch.randn(1024, 16), torch.randint(512, (1024,)))


class Chain(nn.Module):
    """Many small operators in a row, which one kernel does at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(12):
            h = h * 0.9 + 0.1
        return h


def chain() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Chain(), torch.randn(16_384, 16)


@pytest.fixture
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise MissingLibrary("there is none here")

    monkeypatch.setattr(inductor, "check_compiler", missing)


def said(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """Change -> what the logger says of it."""
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Options(")]
    pairs = (line.partition(") is ")[::2] for line in lines)
    return {f"{change})": text for change, text in pairs}


ALL = {
    "Options(only_loss=True)": {"only_loss": True},
    "Options(tile=True)": {"tile": True},
    "Options(only_loss=True, tile=True)": {"only_loss": True, "tile": True},
    "Options(compile=True)": {"compile": True},
    "Options(host=True)": {"host": True},
}


@pytest.mark.parametrize("gaining", ["only_loss", "tile", "compile", "host"])
def test_one_that_gains_is_taken_and_named(gaining: str, caplog: pytest.LogCaptureFixture) -> None:
    def figure_of(options: Options) -> Figure:
        return Figure(0, 7_000_000 if getattr(options, gaining) else 10_000_000)

    chosen = best_options(BEST, figure_of, on_cuda=True)
    assert chosen == replace(QUICK, **{gaining: True})
    found = said(caplog)
    assert found[f"Options({gaining}=True)"] == "taken: 7 ms a step; without it 10 ms a step"
    others = [text for change, text in found.items() if gaining not in change]
    assert others and all(text.startswith("not taken") for text in others)


def test_bytes_come_before_time_and_small_gains() -> None:
    fits, fast = Figure(0, 20), Figure(0, 10)
    assert fits.gains_over(Figure(100, 0)) and not Figure(100, 0).gains_over(fits)
    assert Figure(90, 20).gains_over(Figure(100, 10))
    assert fast.gains_over(fits) and not Figure(0, 9_900).gains_over(Figure(0, 10_000))
    assert not Figure(90, 0).gains_over(Figure(90, 0))


@pytest.mark.usefixtures("without_a_compiler")
def test_the_loss_alone_is_taken_for_less_memory(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = classifier()
    eager = model(*batch)["loss"]
    expected = torch.autograd.grad(eager, [*model.parameters()])
    fast = rockplan.solve(model, batch, "min", options=replace(BEST, without=("tile",)))
    found = said(caplog)
    assert found["Options(only_loss=True)"].startswith("taken: ")
    assert "there is none here" in found["Options(compile=True)"]
    assert "Options(host=True)" not in found
    result = fast(*batch)
    with pytest.raises(rockplan.ResultNotMade):
        result["logits"].sum()
    actual = torch.autograd.grad(result["loss"], [*model.parameters()])
    assert torch.equal(result["loss"], eager)
    assert all(map(torch.equal, actual, expected))
    alone = rockplan.plan(model, batch, "min", options=replace(QUICK, only_loss=True))
    assert fast.plan.budget_bytes == alone.budget_bytes


@pytest.mark.usefixtures("without_a_compiler")
@pytest.mark.parametrize("budget", ["1GB", "50%"])
def test_what_gains_nothing_leaves_the_bits_of_eager(
    budget: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = chain()
    plan = rockplan.plan(model, x, budget, options=BEST)
    plain = rockplan.plan(model, x, budget, options=QUICK)
    assert (plan.graph_digest, plan.budget_bytes) == (plain.graph_digest, plain.budget_bytes)
    assert all(text.startswith("not taken") for text in said(caplog).values())


@pytest.mark.usefixtures("without_a_compiler")
def test_a_budget_that_only_the_best_meets(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = classifier()
    least = rockplan.plan(model, batch, "min", options=replace(QUICK, only_loss=True, tile=True))
    with pytest.raises(rockplan.InfeasibleBudget):
        rockplan.plan(model, batch, least.budget_bytes, options=QUICK)
    plan = rockplan.plan(model, batch, least.budget_bytes, options=BEST)
    assert plan.peak_bytes <= least.budget_bytes
    assert any("no plan fits, by" in text for text in said(caplog).values())


def test_compiled_kernels_are_taken_where_they_are_faster(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = chain()
    fast = rockplan.solve(model, x, "1GB", options=replace(BEST, check=True))
    found = said(caplog)["Options(compile=True)"]
    assert found.startswith("taken: ") and " ms a step; without it " in found
    assert fast.plan.compiled == "yes" and "gradients differ" in fast.plan.checked


@pytest.mark.usefixtures("without_a_compiler")
def test_doors_take_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for callback in (transformers.RockplanCallback, lightning.RockplanCallback):
        assert callback(numerics="best").options == Options.best()
        assert callback(options=Options.best()).options == Options.best()
    model, x = chain()
    settings: Any = {"budget": "min", "numerics": "best", "cache": False}
    torch.compile(model, backend="rockplan", fullgraph=True, options=settings)(x).sum().backward()
    assert "Options(tile=True)" in said(caplog)
    shown = CliRunner().invoke(app, ["solve", "rockplan.examples:mlp", "-b", "60%", "--best"])
    assert shown.exit_code == 0 and "predicted peak" in shown.stdout


@pytest.mark.parametrize("budget", ["min", "6MB"])
def test_blocks_take_kernels_that_gain(
    budget: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_times(monkeypatch)
    _, x = chain()
    model = nn.Sequential(*[nn.Sequential(Chain(), nn.Tanh()) for _ in range(2)])
    eager = copy.deepcopy(model)
    rockplan.solve_blocks(model, x, budget, blocks="*", options=BEST)
    tried = said(caplog)
    assert [*tried] == ["Options(compile=True)"]
    assert tried["Options(compile=True)"].startswith("taken: ")
    code = next(block.code for block in model if hasattr(block, "code"))
    assert "mul_sub_sum" in code  # of several operators
    for module in (model, eager):
        module(x).square().mean().backward()
    for own, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.usefixtures("without_a_compiler")
def test_blocks_without_a_compiler_stay_eager(caplog: pytest.LogCaptureFixture) -> None:
    _, x = chain()
    model = nn.Sequential(*[nn.Sequential(Chain(), nn.Tanh()) for _ in range(2)])
    eager = copy.deepcopy(model)
    rockplan.solve_blocks(model, x, "60%", blocks="*", options=BEST)
    assert said(caplog) == {"Options(compile=True)": "not taken: there is none here"}
    for module in (model, eager):
        module(x).square().mean().backward()
    for own, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


def test_it_is_refused_where_nothing_is_chosen() -> None:
    model, x = chain()
    with pytest.raises(InvalidInput, match="pareto, which looks for no options"):
        rockplan.pareto(model, x, options=Options.best())
    with pytest.raises(InvalidInput, match="choose 'eager' or 'best'"):
        Options(numerics="fast")  # type: ignore[arg-type]
