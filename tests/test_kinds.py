"""`rockplan.kinds`: which kinds of step a loader makes, by planning for them; none is run."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rockplan
from testing.training import QUICK


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(m for _ in range(3) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()))
        )

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y: Tensor = self.layers(x)
        return y if scale is None else y * scale


def test_kinds_are_those_of_training() -> None:
    x = [torch.randn(n, 8) for n in (16, 16, 24, 12, 16, 20)]
    batches = [*x, {"x": x[0], "scale": torch.ones(1)}, x[2]]
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = rockplan.kinds(net, batches, "min", options=QUICK)
    assert [kind.steps for kind in found.each] == [3, 4, 1]
    assert [kind.is_of_all_sizes for kind in found.each] == [False, True, False]
    assert found.each[0].why == "" and "x: 24x8, planned 16x8" in found.each[1].why
    assert "scale" in found.each[2].why
    assert found.planning_s > 0 and str(found).startswith("8 steps, 3 kinds, planned in")
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])

    fast = rockplan.solve(net, budget="min", options=QUICK)
    for batch in batches:
        out = fast(**batch) if isinstance(batch, dict) else fast(batch)
        out.square().mean().backward()
    assert len(fast._rockplan.programs) == len(found.each)  # type: ignore[union-attr]


def test_training_finds_the_plans_that_kinds_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    net, options = Net(), rockplan.Options(time_limit_s=2)
    batches = [torch.randn(n, 8) for n in (16, 24, 20)]
    rockplan.kinds(net, batches, "min", options=options)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    fast = rockplan.solve(net, budget="min", options=options)
    for batch in batches:
        fast(batch).square().mean().backward()
    assert before and before == {path for path in tmp_path.rglob("*") if path.is_file()}


def test_the_original_may_be_trained_afterwards() -> None:
    net, x = Net(), torch.randn(16, 8)
    rockplan.kinds(net, [x], options=QUICK)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a planned .* is trained without its plan")
        for _ in range(3):
            net(x).square().mean().backward()
            optimizer.step()


def test_only_the_first_steps_are_looked_at() -> None:
    def ever_new() -> object:
        for n in range(16, 10**6):
            yield torch.randn(n, 8)

    found = rockplan.kinds(Net(), ever_new(), steps=5, options=QUICK)  # type: ignore[arg-type]
    assert [kind.steps for kind in found.each] == [1, 4]


def test_steps_without_a_plan_are_counted() -> None:
    found = rockplan.kinds(Net().eval(), [torch.randn(4, 8)] * 3, options=QUICK)
    assert found.each == () and found.unplanned == 3
    assert "3 steps run the original" in str(found)


def test_errors_name_the_batch() -> None:
    batches = [torch.randn(16, 8), torch.randn(16, 7)]
    with pytest.raises(rockplan.ForwardRaises) as caught:
        rockplan.kinds(Net(), batches, options=QUICK)
    assert "batch 1 of the loader" in "".join(caught.value.__notes__)
    with pytest.raises(rockplan.InvalidInput, match="at least 1"):
        rockplan.kinds(Net(), batches, steps=0)
