"""Ranges of sizes: the largest is planned first; what it needs is said before training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import rockplan
from rockplan.captures.sizes import sized_calls
from rockplan.cli.main import app
from rockplan.options import SizeRange
from testing import models
from testing.blocks import QUICK, Stack, batch, train
from testing.training import assert_same_state
from tests.planning import heard, set_times

OPTIONS: dict[str, Any] = {**QUICK, "cache": False}


def with_sizes(sizes: Any, **named: Any) -> rockplan.Options:
    return rockplan.Options(**{**OPTIONS, **named}, sizes=sizes)


def calls(sample: dict[str, Tensor], sizes: Any, forward: Callable[..., Any] = dict) -> list[Any]:
    return [*sized_calls(forward, (), sample, with_sizes(sizes))]


# The calls


def test_the_largest_first_then_the_sample_then_the_smallest() -> None:
    ids = torch.arange(6).view(2, 3)
    sample = {"input_ids": ids, "labels": ids, "scale": torch.ones(2), "count": 7}
    largest, given, smallest = calls(sample, {1: (2, 7), 0: (1, 2)})
    expected = torch.tensor([[0, 1, 2, 0, 1, 2, 0], [3, 4, 5, 3, 4, 5, 3]])
    assert torch.equal(largest.kwargs["input_ids"], expected)
    assert largest.kwargs["labels"] is largest.kwargs["input_ids"]
    assert given.kwargs["input_ids"] is ids
    assert torch.equal(smallest.kwargs["input_ids"], torch.tensor([[0, 1]]))
    assert [c.kwargs["scale"].shape[0] for c in (largest, given, smallest)] == [2, 2, 1]
    assert {c.kwargs["count"] for c in (largest, given, smallest)} == {7}
    assert str(largest) == "the largest size (input_ids: 2x7, labels: 2x7, scale: 2)"


def test_a_sample_that_is_the_largest_is_planned_as_it_is() -> None:
    sample = {"x": torch.randn(4, 8)}
    largest, smallest = calls(sample, {1: (3, 8)})
    assert largest.kwargs["x"] is sample["x"] and smallest.kwargs["x"].shape == (4, 3)
    (alone,) = calls(sample, {})
    assert alone.kwargs is sample and alone.name == ""


def test_layouts_and_flags_are_those_of_the_sample() -> None:
    positions = torch.arange(3)[None].expand(2, 3)
    weights = torch.randn(3, 2).t().requires_grad_()
    largest, *_ = calls({"positions": positions, "weights": weights}, {0: (2, 4), 1: (3, 5)})
    assert largest.kwargs["positions"].stride() == (0, 1)
    assert torch.equal(largest.kwargs["positions"][3], torch.tensor([0, 1, 2, 0, 1]))
    found = largest.kwargs["weights"]
    assert found.stride() == (1, 4) and found.requires_grad and found.is_leaf
    assert torch.equal(found, weights.repeat(2, 2)[:, :5])


def test_a_size_of_one_beside_others_stands_for_any() -> None:
    sample = {"x": torch.randn(4, 8), "mask": torch.ones(1, 8)}
    largest, *_ = calls(sample, {0: (2, 6)})
    assert largest.kwargs["x"].shape == (6, 8) and largest.kwargs["mask"] is sample["mask"]


def test_what_is_said_of_one_tensor_comes_first() -> None:
    sample = {"ids": torch.ones(2, 8), "mask": torch.ones(2, 1, 8, 8)}
    sizes = {1: (4, 16), "mask": {1: (1, 1), 2: (4, 16), 3: (4, 16)}}
    largest, *_ = calls(sample, sizes)
    assert largest.kwargs["ids"].shape == (2, 16)
    assert largest.kwargs["mask"].shape == (2, 1, 16, 16)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({2: (9, 12)}, r"\(9, 12\) for dimension 2, and 'image' of the sample has 4"),
        ({2: (1, 3)}, "pass a range with the sample in it"),
        ({5: (1, 2)}, r"dimension 5, which no tensor.*'ids' \(2x8\), 'image' \(2x3x4\)"),
        ({"idx": {1: (1, 8)}}, "'idx', which is no tensor of the sample; its tensors are 'ids'"),
        ({"count": {0: (1, 8)}}, "'count', which is no tensor"),
        ({"ids": {2: (1, 8)}}, "dimension 2 of 'ids', which has 2"),
        ({"ids": {1: (1, 4)}}, "'ids' of the sample has 8"),
        ({1: (1, 16)}, r"which is 8 in 'ids', 3 in 'image'; say which tensors vary: \{'ids': \{1"),
    ],
)
def test_sizes_that_are_not_those_of_the_sample(sizes: Any, words: str) -> None:
    sample = {"ids": torch.ones(2, 8), "image": torch.ones(2, 3, 4), "count": 3}
    with pytest.raises(rockplan.InvalidInput, match=words):
        calls(sample, sizes)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({1: (8, 4)}, "8 is more than 4"),
        ({1: (0, 4)}, "at least 1"),
        ({1: 8}, "smallest and the largest size"),
        ({1: (1, 2, 3)}, "smallest and the largest size"),
        ({1: (1.0, 2)}, "smallest and the largest size"),
        ({-1: (1, 2)}, "count from 0"),
        ({True: (1, 2)}, "count from 0"),
        ({"ids": (1, 2)}, "count from 0"),
        ({"ids": {"1": (1, 2)}}, "count from 0"),
        ({"": {1: (1, 2)}}, "count from 0"),
        ([1, 2], r"write \{1: \(64, 2048\)\}"),
        ("1", r"write \{1: \(64, 2048\)\}"),
    ],
)
def test_sizes_that_mean_nothing(sizes: Any, words: str) -> None:
    with pytest.raises(rockplan.InvalidInput, match=words):
        rockplan.Options(sizes=sizes)


def test_options_with_sizes_are_values() -> None:
    options = with_sizes({1: [2, 4], "x": {0: (1, 3)}})
    assert options.sizes == (SizeRange("", 1, 2, 4), SizeRange("x", 0, 1, 3))
    assert pickle.loads(pickle.dumps(options)) == options == copy.copy(options)
    assert hash(options) == hash(with_sizes(options.sizes))


# Planning


class Lengths(nn.Module):
    """Takes sequences of up to 48."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.places = nn.Parameter(torch.randn(48, 16))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) + self.places[: ids.shape[1]]
        for layer in self.layers:
            h = torch.tanh(layer(h)).exp()
        return h.pow(2).mean()


def tokens(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 16, (4, length), generator=generator)


@pytest.fixture(autouse=True)
def _set_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch)


def test_all_ends_are_planned_before_training_within_the_bytes_of_the_largest() -> None:
    torch.manual_seed(0)
    eager = Lengths()
    options = with_sizes({1: (8, 48)})
    planned: Any = rockplan.solve(copy.deepcopy(eager), tokens(20), "60%", options=options)
    largest, given, smallest = planned.plans
    assert planned.plan is largest
    alone = rockplan.plan(Lengths(), tokens(48), "60%", options=rockplan.Options(**OPTIONS))
    assert largest.budget_bytes == alone.budget_bytes == given.budget_bytes
    assert largest.graph_digest == alone.graph_digest
    for ids in (tokens(20), tokens(48), tokens(8)):
        assert not heard(lambda ids=ids: planned(ids).backward())
        measured = rockplan.peak_live_bytes(lambda ids=ids: planned(ids).backward(), 1)
        assert measured.peak_bytes <= planned.plan.peak_bytes <= largest.budget_bytes
    planned.zero_grad()
    eager(tokens(31)).backward()
    planned(tokens(31)).backward()
    assert_same_state(planned, eager, "a length in between")
    assert len(planned.plans) == 4


def test_a_larger_end_than_the_budget_is_said_before_training() -> None:
    largest = rockplan.plan(Lengths(), tokens(48), "min", options=rockplan.Options(**OPTIONS))
    asked = largest.peak_bytes * 3 // 4
    assert rockplan.solve(Lengths(), tokens(20), asked, options=rockplan.Options(**OPTIONS))
    options = with_sizes({"ids": {1: (8, 48)}})
    words = r"the largest size \(ids: 4x48\) cannot be planned: .* below the minimum of \d+ bytes"
    for plans in (rockplan.solve, rockplan.plan):
        with pytest.raises(rockplan.InfeasibleBudget, match=words) as caught:
            plans(Lengths(), tokens(20), asked, options=options)
        assert caught.value.minimum_bytes > asked == caught.value.budget_bytes
    with pytest.warns(UserWarning, match="runs all the same"):
        smallest = with_sizes({1: (8, 48)}, on_infeasible="smallest")
        planned: Any = rockplan.solve(Lengths(), tokens(20), asked, options=smallest)
    assert planned.plan.peak_bytes > asked >= max(p.peak_bytes for p in planned.plans[1:])


def test_a_size_that_the_forward_cannot_take_is_said_before_training() -> None:
    options = with_sizes({1: (8, 49)})
    words = r"the largest size \(ids: 4x49\) cannot be planned: .*\[48, 16\].*\[4, 49, 16\]"
    with pytest.raises(rockplan.CaptureError, match=words):
        rockplan.solve(Lengths(), tokens(20), "60%", options=options)


def test_the_smallest_budget_is_that_of_the_largest() -> None:
    options = with_sizes({1: (8, 48)})
    planned: Any = rockplan.solve(Lengths(), tokens(20), "min", options=options)
    largest, given, smallest = planned.plans
    assert largest is planned.plan
    assert max(given.peak_bytes, smallest.peak_bytes) <= largest.peak_bytes


def test_the_curve_is_that_of_the_largest() -> None:
    curve = rockplan.pareto(Lengths(), tokens(20), options=with_sizes({1: (8, 48)}))
    largest = rockplan.plan(Lengths(), tokens(48), "100%", options=rockplan.Options(**OPTIONS))
    assert curve.unplanned_bytes == largest.eager_peak_bytes


def test_what_a_trainer_adds_replays_the_known_plans() -> None:
    """The plan of the largest is not forgotten for the first call that is like none."""
    case = models.llama(layers=1, width=32, batch=4, length=64)
    sample = {name: t[:, :24] for name, t in case.kwargs.items()}
    options = with_sizes({1: (16, 64)})
    planned: Any = rockplan.solve(case.model, sample, "70%", options=options)
    count = len(planned.plans)
    mask = torch.ones_like(sample["input_ids"])
    planned(**sample, attention_mask=mask, num_items_in_batch=96).loss.backward()
    stages = heard(lambda: planned(**case.kwargs, num_items_in_batch=256).loss.backward())
    assert "measuring times" not in stages and len(planned.plans) > count


def test_a_plan_file_with_all_ends_is_loaded(tmp_path: Any) -> None:
    options = with_sizes({1: (8, 48)})
    model = Lengths()
    planned: Any = rockplan.solve(copy.deepcopy(model), tokens(20), "60%", options=options)
    rockplan.save_plan(planned, tmp_path / "sizes.plan.json")
    loaded: Any = rockplan.load(model, tokens(20), tmp_path / "sizes.plan.json", options=options)
    assert [p.graph_digest for p in loaded.plans] == [p.graph_digest for p in planned.plans]
    assert not heard(lambda: loaded(tokens(8)).backward())


def test_blocks_are_planned_for_the_largest() -> None:
    options = rockplan.Options(**QUICK, sizes={0: (8, 64)})
    model = rockplan.solve_blocks(Stack().train(), batch(20), "50%", options=options)
    plan = rockplan.blocks_of(model)

    largest = batch(64)

    def step() -> None:
        model(largest)["loss"].backward()

    assert rockplan.peak_live_bytes(step).peak_bytes == plan.peak_bytes
    model.zero_grad()
    eager = Stack().train()
    assert train(model, lambda m: m(batch(20))) == train(eager, lambda m: m(batch(20)))
    with pytest.raises(rockplan.InfeasibleBudget, match=r"the largest size \(x: 64x16\)"):
        rockplan.solve_blocks(Stack().train(), batch(20), 20_000, options=options)


def test_the_command_line_plans_the_largest() -> None:
    run = CliRunner().invoke
    model = ["solve", "tests.test_sizes:subject", "-b", "60%", "--no-cache", "--time-limit", "2"]
    largest = run(app, [*model, "--size", "1=8:48"])
    named = run(app, [*model, "--size", "ids.1=8:48"])
    plain = run(app, model)
    assert largest.exit_code == named.exit_code == plain.exit_code == 0
    assert "planned for the largest size (ids: 4x48)" in largest.stderr
    budgets = [r.stdout.splitlines()[0] for r in (largest, named, plain)]
    assert budgets[0] == budgets[1] != budgets[2]
    wrong = run(app, [*model, "--size", "1:8-48"])
    assert wrong.exit_code == 2 and "--size 1:8-48: write 1=64:2048" in wrong.stderr
    wrong = run(app, [*model, "--size", "1=48:8"])
    assert wrong.exit_code == 2 and "48 is more than 8" in wrong.stderr


def subject() -> tuple[nn.Module, Tensor]:
    return Lengths(), tokens(20)
