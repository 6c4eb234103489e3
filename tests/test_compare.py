"""compare: every variant measured side by side, and what a peer does not do is said."""

from __future__ import annotations

import functools
import json
import sys

import pytest
import torch
from torch import nn

import rockplan
from benchmarks.compare import at_equal_memory, comparison_of
from rockplan.budget import Budget
from rockplan.comparison import Comparison, Row, measured_series
from rockplan.runtime.checkpointing import repeated_blocks
from testing.models import ResNet, UNet
from testing.training import QUICK
from tests.usage import StackWithCount


@pytest.fixture(scope="module")
def found() -> rockplan.Comparison:
    torch.manual_seed(0)
    return rockplan.compare(
        StackWithCount(layers=2), torch.randn(256, 32), ["90%", "1B"], rounds=2, options=QUICK
    )


def test_variants(found: rockplan.Comparison) -> None:
    rows = {row.name: row for row in found.rows}
    eager, planned = rows["eager"], rows["rockplan 90%"]
    assert eager.peak_bytes is not None and planned.peak_bytes is not None
    for name in ("eager", "checkpoint per block", "selective, saves matmuls", "rockplan 90%"):
        row = rows[name]
        assert row.gradients == "equal bit for bit", name
        assert row.peak_bytes is not None and len(row.times_ns) == 2
    assert rows["checkpoint per block"].peak_bytes < eager.peak_bytes
    assert planned.peak_bytes <= planned.budget_bytes < eager.peak_bytes
    assert abs(planned.predicted_peak_bytes - planned.peak_bytes) <= 0.02 * planned.peak_bytes


def test_budgets_are_read_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    module = sys.modules["rockplan.comparison"]
    monkeypatch.setattr(module, "_makers", lambda *args: made.append(args[3]) or 1 / 0)
    for budgets in ("much", ["50%", "much"], ["auto-"], 0.5, None):
        with pytest.raises(rockplan.InvalidBudget):
            rockplan.compare(StackWithCount(layers=1), torch.randn(8, 32), budgets)
    for budgets in ("50%", 2000, Budget(is_minimum=True)):
        with pytest.raises(ZeroDivisionError):
            rockplan.compare(StackWithCount(layers=1), torch.randn(8, 32), budgets)
        assert made.pop() == (budgets,)


def test_what_does_not_apply_is_said(found: rockplan.Comparison) -> None:
    rows = {row.name: row for row in found.rows}
    assert "no nn.Sequential" in rows["checkpoint_sequential"].note
    assert "below the minimum" in rows["rockplan 1B"].note
    assert rows["rockplan 1B"].peak_bytes is None
    assert rows["rockplan 1B"].minimum_bytes is not None
    assert rows["rockplan 90%"].minimum_bytes is None


def test_a_planned_module_is_compared_with_its_original(found: rockplan.Comparison) -> None:
    torch.manual_seed(0)
    model, x = StackWithCount(layers=2), torch.randn(256, 32)
    planned = rockplan.solve(model, x, "min", options=QUICK)
    again = rockplan.compare(planned, x, ["90%"], rounds=1, options=QUICK)
    assert [r.peak_bytes for r in again.rows] == [r.peak_bytes for r in found.rows[:-1]]


def test_text_and_json(found: rockplan.Comparison) -> None:
    text = str(found)
    assert all(row.name in text for row in found.rows)
    document = json.loads(found.to_json())
    assert [row["name"] for row in document["rows"]] == [row.name for row in found.rows]


def test_what_was_measured_is_drawn(found: rockplan.Comparison) -> None:
    """Each row that ran is a point at its own peak and time; the others are not drawn."""
    series = measured_series(found)
    drawn = {s.name.removesuffix(" (measured)"): s.points for s in series}
    for row in found.rows:
        name = "rockplan" if row.budget_bytes is not None else row.name
        if row.peak_bytes is None:
            assert name == "rockplan" or name not in drawn
        else:
            assert (row.peak_bytes, row.overhead) in drawn[name]
    assert len(drawn["rockplan"]) == 1 and not any(s.connected for s in series)


def test_the_benchmark_compares_at_equal_memory() -> None:
    """Beside each way of PyTorch's that needs less than eager the largest budget within its peak;
    its results are read as they were written."""
    rows = (
        Row("eager", peak_bytes=100),
        Row("checkpoint per block", peak_bytes=50),
        Row("checkpoint_sequential", note="does not apply"),
        Row("compile 0.5", peak_bytes=120),
        Row("compile 0.2", peak_bytes=9),
        *(Row(f"rockplan {b}", budget_bytes=b, peak_bytes=b - 1) for b in (10, 50, 60)),
    )
    found = Comparison(rows, "here", 1)
    assert comparison_of(json.loads(found.to_json())) == found
    assert [(a.name, b.name) for a, b in at_equal_memory(found)] == [
        ("checkpoint per block", "rockplan 50")
    ]


class Holding(nn.Module):
    """Python holds what nothing reads any more until the forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.up(x)
        second = first + 1
        third = second + 1
        return third.exp().mean()


def test_eager_may_need_more_than_keeping_everything() -> None:
    """A plan frees what the names of a forward hold for no one, so it stays within its promise."""
    model, x = Holding(), torch.randn(256, 8)
    found = rockplan.compare(model, x, ["100%"], rounds=1, options=QUICK)
    rows = {row.name: row for row in found.rows}
    planned, eager = rows["rockplan 100%"], rows["eager"]
    assert planned.predicted_overhead == 0 and planned.gradients == "equal bit for bit"
    assert planned.peak_bytes <= planned.predicted_peak_bytes < eager.peak_bytes


class Wrong(nn.Module):
    """Draws from a generator of its own, which checkpointing does not put back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.rand(x.shape, generator=self.own)


def test_a_peer_that_computes_something_else_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Wrong(), Wrong(), nn.Linear(16, 1))
    result = rockplan.compare(model, torch.randn(64, 16), [], rounds=1, options=QUICK)
    rows = {row.name: row for row in result.rows}
    assert "differ" in rows["checkpoint per block"].gradients


def deep() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(6)]
    return nn.Sequential(*layers), torch.randn(512, 32)


def test_checkpointing_of_a_sequential() -> None:
    """As a whole in segments, and each of its equal parts: less memory, the same gradients."""
    found = rockplan.compare(*deep(), [], rounds=1, options=QUICK)
    rows = {row.name: row for row in found.rows}
    for name in ("checkpoint_sequential", "checkpoint per block"):
        assert rows[name].peak_bytes < 0.7 * rows["eager"].peak_bytes
        assert rows[name].gradients == "equal bit for bit" and len(rows[name].times_ns) == 1


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).tanh()


def test_a_peer_that_changes_buffers_twice_is_named() -> None:
    """checkpoint runs batch normalization again, and its running statistics with it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Normalized() for _ in range(3)]), torch.randn(64, 8)
    found = rockplan.compare(model, x, ["90%"], rounds=1, options=QUICK)
    rows = {row.name: row for row in found.rows}
    assert rows["checkpoint per block"].gradients == "equal bit for bit"
    assert "9 of 9 buffers differ" in rows["checkpoint per block"].buffers
    assert "buffers differ" in str(found)
    assert rows["rockplan 90%"].buffers == rows["eager"].buffers == "equal bit for bit"


def test_compiled_under_a_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ratio is in force where its own graph is partitioned. (Partitioned, then run without
    inductor, which needs a C++ compiler and a minute.)"""
    seen: list[float] = []
    backend = torch._dynamo.lookup_backend("aot_eager_decomp_partition")

    def partitioned(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(torch._functorch.config.activation_memory_budget)
        return backend(graph, inputs)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=partitioned))
    before = torch._functorch.config.activation_memory_budget
    found = rockplan.compare(*deep(), [], compile_budgets=(1.0, 0.2), rounds=1, options=QUICK)
    rows = {row.name: row for row in found.rows}
    assert seen == [1.0, 0.2] and before == torch._functorch.config.activation_memory_budget
    assert rows["compile 0.2"].peak_bytes < rows["compile 1.0"].peak_bytes
    assert all(rows[f"compile {r}"].gradients for r in seen)


def test_a_compiler_that_fails_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: object) -> object:
        raise OSError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    found = rockplan.compare(*deep(), [], compile_budgets=(0.5,), rounds=1, options=QUICK)
    row = {row.name: row for row in found.rows}["compile 0.5"]
    assert row.note.startswith("fails") and "no C++ compiler" in row.note
    assert row.peak_bytes is None and row.times_ns == ()
    with pytest.raises(rockplan.InvalidInput, match="from 0 to 1"):
        rockplan.compare(*deep(), [], compile_budgets=(50,))


def test_others_are_compared_where_eager_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["rockplan.comparison"]
    peak_of, failures = module.peak_live_bytes, iter([torch.OutOfMemoryError("out of memory")])

    def peak(*args: object, **kwargs: object) -> object:
        for error in failures:
            raise error
        return peak_of(*args, **kwargs)

    monkeypatch.setattr(module, "peak_live_bytes", peak)
    x = torch.randn(64, 32)
    made = rockplan.compare(StackWithCount(layers=2), x, ["90%"], rounds=2, options=QUICK)
    rows = {row.name: row for row in made.rows}
    assert rows["eager"].note == "fails: OutOfMemoryError: out of memory"
    assert rows["checkpoint per block"].overhead == 0
    planned = rows["rockplan 90%"]
    assert planned.gradients == "equal bit for bit" and planned.overhead is not None
    assert "eager" in str(made) and not measured_series(made)[0].connected


def test_a_model_that_fails_is_not_compared() -> None:
    with pytest.raises(rockplan.InvalidInput, match="no variant runs on these .* RuntimeError"):
        rockplan.compare(nn.Linear(4, 4), torch.randn(2, 5), "90%", rounds=1, options=QUICK)


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = StackWithCount(layers=2), torch.randn(256, 32)
    before = {n: b.clone() for n, b in model.named_buffers()}
    state = torch.get_rng_state()
    rockplan.compare(model, x, [], rounds=1, options=QUICK)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_repeated_blocks() -> None:
    assert repeated_blocks(StackWithCount(layers=2)) == ("layers.0", "layers.1")
    stages = repeated_blocks(ResNet((2, 1), 4, 2))
    assert stages == ("stages.0.0", "stages.0.1")
    assert repeated_blocks(UNet(1, 4)) == ("down.0", "down.1")
    assert repeated_blocks(nn.Linear(2, 2)) == ()
