"""Several calls between forward and backward at once, as in a pipeline, within one budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rockplan
from rockplan.api import plan_each
from rockplan.search.in_flight import needed_bytes
from rockplan.solving.free_memory import MARGIN
from testing.blocks import QUICK, Mixer

OPTIONS = rockplan.Options(**QUICK)
X = torch.randn(128, 32, generator=torch.Generator().manual_seed(0))


def stage(has_head: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    head = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)] if has_head else []
    return nn.Sequential(*[Mixer(32) for _ in range(3)], *head).train()


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.pow(2).mean()


def step(module: Any, count: int) -> list[torch.Tensor]:
    """As a stage under GPipe: all forwards, then all backwards."""
    torch.manual_seed(3)
    inputs = [(X + i).requires_grad_() for i in range(count)]
    results = [module(x) for x in inputs]
    for result in results:
        result.backward(torch.ones_like(result))
    return [t for x in inputs if (t := x.grad) is not None]


def measured_bytes(module: nn.Module, count: int) -> int:
    """Of such a step, beyond the inputs and their gradients."""
    inputs = [(X + i).requires_grad_() for i in range(count)]
    ones = torch.ones_like(X)

    def run() -> None:
        results = [module(x) for x in inputs]
        while results:
            results.pop(0).backward(ones)

    return rockplan.peak_live_bytes(run).peak_bytes


@pytest.mark.parametrize(("count", "has_head"), [(2, True), (4, False)])
def test_plans_for_calls_in_flight_keep_the_budget(count: int, has_head: bool) -> None:
    eager, sample = stage(has_head), X.clone().requires_grad_()
    options = replace(OPTIONS, in_flight=count)
    for budget in ("min", "35%", "100%"):
        planned = rockplan.solve(stage(has_head), sample, budget, options=options)
        plan = rockplan.plan_of(planned)
        assert needed_bytes(plan, count) <= plan.budget_bytes, budget
        assert measured_bytes(planned, count) <= plan.budget_bytes, budget
        for ours, theirs in zip(step(planned, count), step(eager, count), strict=True):
            assert torch.equal(ours, theirs), budget
        assert len(planned.plans) == 1  # type: ignore[arg-type]


def test_auto_has_room_for_calls_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside gradients and the optimizer's state, whose room a timeline of one call would use."""
    model, sample, count = stage(has_head=True), X.clone().requires_grad_(), 3
    options = replace(OPTIONS, in_flight=count)
    later_bytes = 3 * sum(p.nbytes for p in model.parameters())
    needed = needed_bytes(rockplan.plan(model, sample, "min", options=options), count)
    usable_bytes = later_bytes + needed * 5 // 4
    free_bytes = int(usable_bytes / (1 - MARGIN))
    monkeypatch.setattr("rockplan.solving.free_memory.machine_bytes", lambda: free_bytes)
    for plan in (
        rockplan.plan(model, sample, "auto", optimizer="adamw", options=options),
        rockplan.plan_of(rockplan.solve(model, sample, "auto", optimizer="adamw", options=options)),
    ):
        assert later_bytes + needed_bytes(plan, count) <= usable_bytes


def test_fit_of_calls_in_flight_is_refused() -> None:
    options = replace(OPTIONS, in_flight=2)
    with pytest.raises(rockplan.InvalidInput, match=r"leave it out.*rockplan\.plan"):
        rockplan.fit(stage(), X, "8GiB", options=options)


@pytest.mark.parametrize(("count", "has_head"), [(4, True), (2, False)])
def test_blocks_of_calls_in_flight_keep_the_budget(count: int, has_head: bool) -> None:
    eager, sample = stage(has_head), X.clone().requires_grad_()
    options = replace(OPTIONS, in_flight=count)
    for budget in ("min", "50%", "100%"):
        planned = stage(has_head)
        blocks = [*planned][:3]
        rockplan.solve_blocks(planned, sample, budget, blocks=blocks, loss=loss_of, options=options)
        plan = rockplan.blocks_of(planned)
        assert plan.peak_bytes <= plan.budget_bytes, budget
        assert measured_bytes(planned, count) <= plan.peak_bytes, budget
        assert f"{count - 1} more calls in flight" in str(plan)
        for ours, theirs in zip(step(planned, count), step(eager, count), strict=True):
            assert torch.equal(ours, theirs), budget


def test_calls_in_flight_beat_plans_of_one_call() -> None:
    sample, options = X.clone().requires_grad_(), replace(OPTIONS, without=())
    ours = rockplan.plan(stage(), sample, "30%", options=replace(options, in_flight=4))
    budgets = [f"{percent}%" for percent in range(100, 20, -10)]
    each = plan_each(stage(), sample, budgets, options=options)
    plans = (plan for plan in each if isinstance(plan, rockplan.Plan))
    fitting = [plan for plan in plans if needed_bytes(plan, 4) <= ours.budget_bytes]
    assert fitting and ours.overhead > 0
    assert all(ours.time_ns < plan.time_ns for plan in fitting)


def test_too_little_for_flight_says_the_need() -> None:
    sample, options = X.clone().requires_grad_(), replace(OPTIONS, in_flight=3)
    with pytest.raises(rockplan.InfeasibleBudget, match=r"in_flight=3") as found:
        rockplan.solve(stage(), sample, 20_000, options=options)
    needed = found.value.minimum_bytes
    plan = rockplan.plan(stage(), sample, needed, options=options)
    assert needed_bytes(plan, 3) <= needed
    with pytest.raises(rockplan.InfeasibleBudget, match="2 more calls in flight") as found:
        rockplan.solve_blocks(stage(), sample, 20_000, loss=loss_of, options=options)
    needed = found.value.minimum_bytes
    model = rockplan.solve_blocks(stage(), sample, needed, loss=loss_of, options=options)
    assert rockplan.blocks_of(model).peak_bytes <= needed


def test_a_file_says_its_calls_in_flight(tmp_path: Path) -> None:
    """What is planned after it was read is for as many, unless other options are asked for."""
    path, sample = tmp_path / "stage.plan.json", X.clone().requires_grad_()
    options = replace(OPTIONS, in_flight=4)
    rockplan.save_plan(rockplan.solve(stage(), sample, "35%", options=options), path)
    for given in (OPTIONS, options):
        loaded: Any = rockplan.load(stage(), sample, path, options=given)
        result = loaded(X[:100].clone().requires_grad_())
        result.backward(torch.ones_like(result))
        first, other = loaded.plans
        assert first.in_flight == other.in_flight == 4
        assert other.overhead > 0 and needed_bytes(other, 4) <= first.budget_bytes
    with pytest.raises(rockplan.InvalidInput, match=r"for 4 calls in flight, not for 2"):
        rockplan.load(stage(), sample, path, options=replace(OPTIONS, in_flight=2))


def test_gradients_that_wait_count_beside_flight(tmp_path: Path) -> None:
    path, sample = tmp_path / "stage.plan.json", X.clone().requires_grad_()
    options = replace(OPTIONS, in_flight=4)
    planned = rockplan.solve(stage(), sample, "min", options=options)
    rockplan.save_plan(planned, path)
    hooked = stage()
    for parameter in hooked.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    plan = rockplan.plan_of(rockplan.load(hooked, sample, path, options=options))
    assert needed_bytes(plan, 4) <= plan.budget_bytes


def test_the_need_in_flight_with_other_options() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = stage(), nn.Linear(32, 512)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(self.body(x))
            labels = torch.zeros(len(x), dtype=torch.int64)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    options = replace(OPTIONS, in_flight=4)
    planned = rockplan.solve(Logits().train(), X, "100%", options=options)
    found = [
        rockplan.explain(planned, unplanned=True, sample_input=X, options=o).needed_bytes_with
        for o in (OPTIONS, options)
    ]
    one, all_four = found
    assert one and one.keys() <= all_four.keys()
    assert all(all_four[name] > 2 * one[name] for name in one)


@pytest.mark.parametrize(
    ("function", "names"),
    [("pareto", ("group", "in_flight")), ("plan_each", ("group",)), ("load", ("group",))]
    + [("explain", ("group",))],
)
def test_options_without_effect_are_refused(
    function: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "stage.plan.json"
    planned = rockplan.solve(stage(), X, "100%", options=OPTIONS)
    rockplan.save_plan(planned, path)
    calls = {
        "pareto": lambda o: rockplan.pareto(stage(), X, options=o),
        "plan_each": lambda o: plan_each(stage(), X, ["min"], options=o),
        "load": lambda o: rockplan.load(stage(), X, path, options=o),
        "explain": lambda o: rockplan.explain(planned, sample_input=X, options=o),
    }
    for name in names:
        given: dict[str, Any] = {name: 2 if name == "in_flight" else object()}
        with pytest.raises(rockplan.InvalidInput, match=rf"Options\({name}=.*{function}.*leave it"):
            calls[function](replace(OPTIONS, **given))


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2", None])
def test_the_calls_in_flight_are_a_number(count: Any) -> None:
    with pytest.raises(rockplan.InvalidInput, match="in_flight is .*at least 1"):
        rockplan.Options(in_flight=count)
