"""Will it fit, with compiled kernels: rows of the device at hand, against steps that run there."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rockplan
from rockplan.cli.main import app
from rockplan.errors import InvalidInput
from rockplan.examples import mlp
from rockplan.fitting.changes import Holding, peak_of
from rockplan.fitting.gpus import CONTEXT_BYTES, gpu
from rockplan.fitting.training_step import USUAL
from rockplan.fitting.ways import compiled_whole, kept_whole
from rockplan.graph_builder.costs.ruler import memory_events, profiled
from rockplan.runtime.planned_state import programs_of
from rockplan.values.graph import in_eager_order, is_kernel
from rockplan.will_it_fit.captured_sizes import SizedCalls
from rockplan.will_it_fit.question import FitQuestion
from testing import models
from testing.models import Case, mean_square
from testing.training import QUICK, solve_case
from tests.kernels import interpret, stack
from tests.paging import with_plan

COMPILED = replace(QUICK, compile=True, cache=False)
CPU = torch.device("cpu")


class WithLoss(nn.Module):
    """The mean square of what a module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean_square(self.module(x))


def with_loss(case: Case) -> Case:
    return replace(case, model=WithLoss(case.model), loss=lambda loss: loss)


def question_of(case: Case, options: rockplan.Options = COMPILED) -> FitQuestion:
    sample = case.args, case.kwargs
    return FitQuestion(case.model, case.model, sample, gpu(CPU), "adamw", USUAL, options)


def peaks_said(question: FitQuestion, *scheduled: Any) -> list[int]:
    """Of two steps, each beside what is there before, without the caller's scalars."""
    return [
        peak_of(c for c in changes if c.owner is not Holding.CALLER).size_bytes
        for changes in question.timeline(*scheduled).steps
    ]


def peaks_of_steps(case: Case, module: nn.Module) -> list[int]:
    """Of two steps from the start, as they run."""
    module.zero_grad()
    optimizer = torch.optim.AdamW(module.parameters())
    found = []
    for _ in range(2):
        gc.collect()
        with profiled() as session:
            optimizer.zero_grad()
            case.step(module)
            optimizer.step()
        changes = (change for _, change in memory_events(session))
        found.append(max(itertools.accumulate(changes, initial=0)))
    return found


def sized(case: Case, batch: int) -> Case:
    return replace(case, args=tuple(torch.randn(batch, *a.shape[1:]) for a in case.args))


def check(case: Case, batch: int, question: FitQuestion, calls: SizedCalls) -> None:
    """Steps of this batch need what is said of it: of the compiled program as it is, and of the
    smallest plan."""
    call, own = calls.at(batch), sized(case, batch)
    fast = solve_case(
        own, "100%", options=replace(COMPILED, without=(*COMPILED.without, "reorder"))
    )
    (program,) = programs_of(fast)
    graph = program.plan.graph
    for whole, (said, schedule) in {
        in_eager_order(graph): compiled_whole(call.graph),
        graph: question.replayed(call),
    }.items():
        module = with_plan(fast, program, replace(program.plan, graph=whole, schedule=schedule))
        own.step(module)  # what operators keep from their first run is no part of a step
        assert peaks_said(question, call, said, schedule) == peaks_of_steps(own, module), batch


CASES: dict[str, Callable[[], Case]] = {
    "gated": lambda: with_loss(stack(layers=1)),
    "layers": lambda: with_loss(models.mlp(depth=3, width=24)),
}


@pytest.mark.parametrize("name", [*CASES])
def test_steps_of_compiled_kernels_need_what_is_said(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels run by their operators, which take memory while they run."""
    interpret(monkeypatch)
    case = CASES[name]()
    question = question_of(case)
    calls = SizedCalls(question.whole, 2, 1024)
    for batch in (200, 600):
        check(case, batch, question, calls)
    assert any(is_kernel(c.op) for n in calls.at(200).graph.nodes for c in n.calls)


@pytest.mark.usefixtures("compilers")
def test_rows_of_compiled_kernels_are_steps_that_run() -> None:
    """Of C++, which a compiler made of them."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU())
    case = with_loss(Case("compiled", model, (torch.randn(64, 16),), {}, mean_square))
    question = question_of(case)
    check(case, 64, question, SizedCalls(question.whole, 64, 64))


def on_cpu(more_bytes: int) -> Any:
    """The CPU of this machine, as if it had so many bytes beside Python and its libraries."""
    return replace(gpu(CPU), memory_bytes=CONTEXT_BYTES + more_bytes)


def test_the_largest_batches_of_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more sample does not fit."""
    interpret(monkeypatch)
    case = CASES["layers"]()
    first = rockplan.fit(
        case.model, case.args, on_cpu(300_000), sizes={0: (2, 4096)}, options=COMPILED
    )
    assert [row.way for row in first.rows] == ["kept whole", "rockplan"]
    whole, planned = first.rows
    assert 128 < whole.batch < planned.batch < 4096
    assert "kernels are those that were compiled here" in first.notes[-1]
    question = question_of(case)
    for batch in (whole.batch, whole.batch + 1):
        call = question.whole((batch, None))
        peak = question.timeline(call, *compiled_whole(call.graph)).peak
        assert (peak.size_bytes <= 300_000) is (batch == whole.batch)
        if batch == whole.batch:
            assert whole.allocated_bytes == whole.reserved_bytes == peak.size_bytes


def test_unknown_kernels_name_a_device_that_knows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The remedy is followed, in Python and on the command line."""
    interpret(monkeypatch)
    with torch.device("meta"):
        model, (x,), _ = mlp()
    options = replace(COMPILED, time_limit_s=1)
    with pytest.raises(InvalidInput, match=r"device=torch.device\('cpu'\) \(--gpu cpu\)"):
        rockplan.fit(model, x, "t4", options=options)
    found = rockplan.fit(model, x, CPU, options=options)
    words = ["fit", "rockplan.examples:mlp", "--gpu", "cpu", "--compile", "--json"]
    done = CliRunner().invoke(app, [*words, "--time-limit", "1"])
    assert rockplan.Fit.from_json(done.stdout).rows == found.rows
    assert found.rows[0].batch == len(x)
    elsewhere = replace(gpu(CPU), at_hand="cuda")
    with pytest.raises(InvalidInput, match=r"on cuda .* the model is on .*\.to\('cuda'\)"):
        rockplan.fit(model, x, elsewhere, options=options)
    with pytest.raises(InvalidInput, match="compile says something of the whole module"):
        rockplan.fit(model, x, CPU, gpus=2, options=options)
    assert len(rockplan.fit(model, x, CPU, gpus=2, shard="ddp", options=options).rows) == 2


def test_too_large_to_try_is_said_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of that size runs: it counts as too large."""
    interpret(monkeypatch)
    case = CASES["layers"]()
    monkeypatch.setattr("rockplan.will_it_fit.question.available_bytes", lambda: 1 << 20)
    with pytest.raises(InvalidInput, match=r"batch 100000: .* reads and writes .* smaller sizes"):
        rockplan.fit(case.model, case.args, CPU, sizes={0: (100_000, 100_000)}, options=COMPILED)
    found = rockplan.fit(case.model, case.args, CPU, sizes={0: (2, 100_000)}, options=COMPILED)
    batches = {row.batch for row in found.rows}
    assert max(batches) < 100_000 and len(batches) == 1
    assert f"batches from {max(batches) + 1} on may fit, too" in found.notes[-1]


class OfPairs(nn.Module):
    """Takes memory for each pair of samples, which no line says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return (h @ h.T).softmax(-1).pow(2).mean()


def test_an_answer_cut_by_trials_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def largest() -> tuple[list[int], tuple[str, ...]]:
        options = replace(QUICK, cache=True)
        found = rockplan.fit(OfPairs(), torch.randn(4, 8), CPU, sizes={0: (2, 64)}, options=options)
        return [row.batch for row in found.rows], found.notes

    with monkeypatch.context() as patch:
        patch.setattr("rockplan.will_it_fit.question.available_bytes", lambda: 50_000)
        batches, notes = largest()
    assert max(batches) < 64
    assert f"batches from {batches[0] + 1} on may fit, too" in notes[-1]
    batches, notes = largest()
    assert batches == [64, 64] and "may fit, too" not in notes[-1]


def test_a_model_without_parameters_fits_by_a_name() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    found = rockplan.fit(WithLoss(nn.Tanh()), x, "h100-80", options=replace(QUICK, cache=False))
    assert [row.batch for row in found.rows] == [4, 4]


def test_eager_on_this_cpu_has_all_rows() -> None:
    case = with_loss(stack())
    found = rockplan.fit(case.model, case.args, CPU, options=replace(QUICK, cache=False))
    assert [row.way for row in found.rows] == ["kept whole", "checkpoint per block", "rockplan"]
    question = question_of(case, QUICK)
    call = question.whole((512, None))
    said, real = (
        peaks_said(question, call, *kept_whole(call.graph)),
        peaks_of_steps(case, case.model),
    )
    assert all(0.999 <= a / b <= 1.001 for a, b in zip(said, real, strict=True))
