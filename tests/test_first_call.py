"""A model that is planned at its first call in training: by `solve` without a sample, or in place,
where it, its decoder or its blocks are planned, whichever can be."""

from __future__ import annotations

import copy
import logging
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockplan
from rockplan.graph_builder.costs.ruler import peak_live_bytes
from rockplan.integrations.in_place import PlanWhenCalled, planned_no_more
from rockplan.runtime.planned_state import is_in_place
from testing.training import QUICK, assert_same_state

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(*(module for layer in layers for module in layer))


def same_steps(one: Any, other: Any, what: str, count: int = 2) -> None:
    for step in range(count):
        for module in (one, other):
            torch.manual_seed(step)
            result = module(X)
            (result["loss"] if isinstance(result, dict) else result).square().mean().backward()
    assert_same_state(one, other, what)


def test_the_first_call_in_training_is_planned() -> None:
    eager = make_net()
    fast = rockplan.solve(copy.deepcopy(eager), budget="min", options=QUICK)
    assert torch.equal(fast.eval()(X), eager.eval()(X))
    with torch.no_grad():
        fast.train()(X)
    with pytest.raises(rockplan.InvalidInput, match="nothing is planned yet"):
        rockplan.plan_of(fast)
    eager.train()
    copies = [copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), copy.copy(fast)]
    same_steps(fast, eager, "planned")
    assert rockplan.plan_of(fast).overhead > 0 and len(fast.plans) == 1
    for copied in copies[:2]:
        copied.load_state_dict(eager.state_dict())
        same_steps(copied, make_net().train(), "copied")
        assert len(copied.plans) == 1


def test_planning_holds_no_variable_of_the_loop() -> None:
    """Neither of the loop nor of what calls it; not until these return, either."""
    fast, held = rockplan.solve(make_net(), budget="min", options=QUICK), []

    def step(batch: Tensor, given: dict[str, Any]) -> None:
        fast(batch).square().mean().backward()
        assert given is locals()["given"]

    for rows in (4, 6, 6):
        batch = torch.randn(rows, 8)
        held.append(weakref.ref(batch))
        step(batch, {})
        del batch
        assert held[-1]() is None
    mine = locals()
    fast(torch.randn(7, 8)).square().mean().backward()
    assert mine["held"] is held


def test_the_default_leaves_out_the_optimizers_room() -> None:
    net = make_net()
    plain = rockplan.solve(net, options=QUICK)
    counted = rockplan.solve(net, optimizer=torch.optim.AdamW(net.parameters()), options=QUICK)
    for fast in (plain, counted):
        fast(X).sum().backward()
        assert fast.plan.overhead == 0 and fast.plan.budget_bytes > 1e6


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_net()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y if y.sum() > 0 else -y


def test_what_is_refused_is_said_at_the_call(caplog: pytest.LogCaptureFixture) -> None:
    fast = rockplan.solve(Refused(), budget="min", options=QUICK)
    for _ in range(2):
        with pytest.raises(rockplan.ValueDependentControlFlow):
            fast(X)
    few = rockplan.solve(make_net(), budget=1000, options=QUICK)
    with pytest.raises(rockplan.InfeasibleBudget):
        few(X)
    with pytest.raises(rockplan.InvalidInput, match="sizes"):
        rockplan.solve(make_net(), options=rockplan.Options(sizes={0: (1, 2)}))
    with pytest.raises(rockplan.ForwardRaises, match="does not run on these arguments"):
        rockplan.solve(make_net(), budget="min", options=QUICK)(X.T)
    caplog.clear()
    left = rockplan.solve(Refused(), options=rockplan.Options(on_refused="leave"))
    same_steps(left, Refused(), "as it is")
    (said,) = caplog.messages
    assert said.startswith("Refused runs as it is: ")


class Block(nn.Module):
    def __init__(self, is_refused: bool) -> None:
        super().__init__()
        self.up, self.down, self.is_refused = nn.Linear(8, 32), nn.Linear(32, 8), is_refused

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        if self.is_refused:
            self.kept = y
        return x + y


class Decoder(nn.Module):
    def __init__(self, refuses: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(refuses == "blocks") for _ in range(3))
        self.is_refused = refuses in ("decoder", "blocks")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if not self.is_refused or x.sum() > -1e9 else -x


class Model(nn.Module):
    """As a causal model of transformers has a decoder, and returns a loss."""

    def __init__(self, refuses: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.head, self.refuses = Decoder(refuses), nn.Linear(8, 8), refuses

    def get_decoder(self) -> nn.Module:
        return self.model

    def forward(self, x: Tensor) -> Any:
        y = self.head(self.model(x))
        is_positive = bool(y.sum() > 0) if self.refuses else True
        return {"loss": y.mean() if is_positive else -y.mean()}


PLANNED: dict[str, tuple[str, Callable[[Any], list[nn.Module]]]] = {
    "": ("planned Model at its first call", lambda m: [m]),
    "whole": ("its decoder is tried", lambda m: [m.model]),
    "decoder": ("so 3 of its parts are, in place", lambda m: [*m.model.layers]),
    "blocks": ("nothing is planned", lambda m: []),
}


@pytest.mark.parametrize("sample", [None, X], ids=["first call", "sample"])
def test_parts_instead_of_the_whole(sample: Any, caplog: pytest.LogCaptureFixture) -> None:
    options = replace(QUICK, on_refused="blocks")
    model, eager = Decoder("decoder"), Decoder("decoder")
    eager.load_state_dict(model.state_dict())
    fast = rockplan.solve(model, sample, "50%", options=options)
    same_steps(fast, eager, "parts", count=3)
    assert [m for m in model.modules() if is_in_place(m)] == [*model.layers]
    plan = rockplan.blocks_of(fast)
    peak = peak_live_bytes(lambda: fast(X).square().mean().backward()).peak_bytes
    assert peak <= plan.budget_bytes
    assert "so 3 of its parts are, in place. Of the whole: " in caplog.text

    fast.zero_grad(), eager.zero_grad()
    model.layers[1].is_refused = True
    rockplan.restore_blocks(model)
    fast = rockplan.solve(model, sample, "50%", options=options)
    same_steps(fast, eager, "one left", count=1)
    assert "'layers.1' is left: " in caplog.text and len(rockplan.blocks_of(fast).blocks) == 2


@pytest.mark.parametrize("option", ["tile", "only_loss"])
@pytest.mark.parametrize("sample", [None, X], ids=["first call", "sample"])
def test_parts_without_options_of_the_whole(
    option: str, sample: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What has no effect beside blocks does not take the blocks away."""
    options = replace(QUICK, on_refused="blocks", **{option: True})
    model, eager = Model("whole"), Model("whole")
    fast = rockplan.solve(model, sample, "50%", options=options)
    for module in (fast, eager):
        module(X)["loss"].backward()
    assert_same_state(fast, eager, option)
    assert [m for m in model.modules() if is_in_place(m)] == [*model.model.layers]
    assert f"Options({option}=...) is left out" in caplog.text


@pytest.mark.parametrize("sample", [None, X], ids=["first call", "sample"])
def test_no_part_can_be_planned(sample: Any) -> None:
    options = replace(QUICK, on_refused="blocks")
    for _ in range(2):
        with pytest.raises(rockplan.CaptureError, match="Of its parts: "):
            rockplan.solve(Decoder("blocks"), sample, "50%", options=options)(X)


@pytest.mark.parametrize("only_loss", [False, True])
@pytest.mark.parametrize("refuses", PLANNED)
def test_in_place_what_can_be_is_planned(
    refuses: str, only_loss: bool, caplog: pytest.LogCaptureFixture
) -> None:
    says, planned = PLANNED[refuses]
    model, eager = Model(refuses), Model(refuses)
    with caplog.at_level(logging.WARNING, logger="rockplan"):
        PlanWhenCalled("50%", None, replace(QUICK, only_loss=only_loss)).begin(model)
        same_steps(model, eager, refuses)
    assert says in caplog.text
    assert [m for m in model.modules() if is_in_place(m)] == planned(model)
    planned_no_more(model)
    assert all(type(a) is type(b) for a, b in zip(model.modules(), eager.modules(), strict=True))
    same_steps(model, eager, "afterwards")
