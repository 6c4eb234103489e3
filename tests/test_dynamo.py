"""`torch.compile(backend="rockplan")`: graphs of Dynamo are planned, with eager's own bits, buffers
and draws, within the budget; and modules of torch.fx and torch.export are planned like others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rockplan
from rockplan.integrations.dynamo import backend
from testing.training import assert_same_state

Compile = Callable[..., Any]
FAST = {"time_limit_s": 2, "bound_time_limit_s": 0.2, "without": ("exchange",)}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The planned modules that backends made."""
    made: list[nn.Module] = []

    def kept(*args: Any, **kwargs: Any) -> nn.Module:
        made.append(rockplan.solve(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("rockplan.integrations.dynamo.solve", kept)
    return made


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        (nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 32))
        for _ in range(3)
    ]
    return nn.Sequential(*(module for layer in layers for module in layer))


class Checkpointed(nn.Module):
    """Draws again in backward, which `backend="eager"` does with other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = make_net()[:1], make_net()[2:5]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.second, self.first(x), use_reentrant=False)
        return y


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class InALoop(nn.Module):
    """Dynamo leaves the loop to Python, and captures what is called in it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
            torch._dynamo.graph_break()
        return x


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = make_net(), make_net()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        y: Tensor = self.second(x)
        return y


def same_training(model: nn.Module, budget: Any, rows: tuple[int, ...], **more: Any) -> None:
    """Train `model` compiled and eager, a step of each number of rows."""
    eager = copy.deepcopy(model)
    options = FAST | {"budget": budget}
    compiled = torch.compile(model, backend="rockplan", options=options, **more)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, eager)]
    for step, count in enumerate(rows):
        for call, optimizer in zip((compiled, eager), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            call(torch.randn(count, 32)).square().mean().backward()
        assert_same_state(model, eager, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("budget", ["min", "auto"])
def test_whole_graphs_train_as_eager(budget: str, graphs: list[nn.Module]) -> None:
    same_training(make_net(), budget, (16, 16, 24, 20, 12), fullgraph=True)
    assert len(graphs) == 2  # the second has sizes that vary, which are Dynamo's
    recomputed = [rockplan.plan_of(graph).overhead > 0 for graph in graphs]
    assert recomputed == [budget == "min"] * 2


def test_checkpoints_draw_again_as_eager(graphs: list[nn.Module]) -> None:
    same_training(Checkpointed(), "min", (16, 16, 16), fullgraph=True)
    assert rockplan.plan_of(graphs[0]).overhead > 0


def test_gradients_are_handed_over_within_the_budget(graphs: list[nn.Module]) -> None:
    net, x = make_net(), torch.randn(256, 32)
    options = FAST | {"budget": "70%"}
    loss = torch.compile(lambda t: net(t).square().mean(), backend=backend, options=options)

    def step() -> None:
        net.zero_grad(set_to_none=False)
        loss(x).backward()

    step()
    plan = rockplan.plan_of(graphs[0])
    assert plan.overhead > 0
    assert rockplan.peak_live_bytes(step).peak_bytes <= plan.peak_bytes <= plan.budget_bytes


def test_replaced_parameters_and_frozen_ones_are_met() -> None:
    net = make_net()
    compiled = torch.compile(net, backend=backend, options=FAST | {"budget": "min"})
    for change in (
        lambda m: None,
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach() * 2)),
        lambda m: m[5].weight.requires_grad_(False),
        lambda m: setattr(m[1], "running_mean", torch.ones(64)),
        lambda m: m.eval(),
    ):
        change(net)
        eager = copy.deepcopy(net)
        for call, module in ((compiled, net), (eager, eager)):
            torch.manual_seed(0)
            module.zero_grad()
            call(torch.randn(16, 32)).square().mean().backward()
        assert_same_state(net, eager, "after a change")


def test_graphs_of_evaluation_are_not_missed() -> None:
    net, x = make_net(), torch.randn(16, 32)
    compiled = torch.compile(net, backend=backend, options=FAST | {"budget": "min"})
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a planned .* is trained without its plan")
        for _ in range(2):
            for _ in range(3):
                compiled(x).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                net.eval()
                compiled(x)
                net.train()


def test_a_graph_inside_of_a_wrapper(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        eager, net = make_net(), make_net()
        options = FAST | {"budget": "min"}
        compiled = torch.compile(net, backend=backend, fullgraph=True, options=options)
        for step in range(2):
            for module in (DistributedDataParallel(eager), DistributedDataParallel(compiled)):
                torch.manual_seed(step)
                module(torch.randn(16, 32)).square().mean().backward()
        assert_same_state(net, eager, "wrapped")
    finally:
        dist.destroy_process_group()


def test_a_share_is_one_of_each_graph(graphs: list[nn.Module]) -> None:
    same_training(Broken(), "min", (16, 16))
    assert len(graphs) == 2


@pytest.mark.parametrize(
    "model, given, error",
    [
        (Broken, {"budget": "1GB"}, "InvalidBudget: a budget in bytes.* is one for a whole step"),
        (InALoop, {"budget": "1GB"}, "InvalidBudget: a budget in bytes.* is one for a whole step"),
        (make_net, {}, "InvalidBudget: .*pass fullgraph=True.*or a share"),
        (make_net, {"budgt": "1GB"}, "InvalidInput: options={'budgt'"),
        (make_net, {"budget": "x"}, "InvalidBudget"),
        (make_net, {"tile": "x"}, "InvalidInput: tile is 'x'"),
    ],
)
def test_what_is_refused_says_what_to_do(model: Any, given: dict[str, Any], error: str) -> None:
    compiled = torch.compile(model(), backend=backend, options=given)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=f"(?s){error}"):
        compiled(torch.randn(16, 32))


def test_modes_are_refused() -> None:
    with pytest.raises(rockplan.InvalidInput, match="no mode 'max-autotune'"):
        backend(torch.fx.symbolic_trace(make_net()), (), mode="max-autotune")


def test_tensors_without_memory_are_refused() -> None:
    with FakeTensorMode():
        x = torch.ones(16, 32)
    with pytest.raises(rockplan.InvalidInput, match="wrap what is compiled"):
        backend(torch.fx.symbolic_trace(make_net()), (x,))


@pytest.mark.parametrize(
    "traced",
    [torch.fx.symbolic_trace, lambda m: torch.export.export(m, (torch.randn(16, 32),)).module()],
    ids=["fx", "export"],
)
def test_traced_modules_are_planned(traced: Callable[[nn.Module], nn.Module]) -> None:
    eager = traced(make_net())
    x = torch.randn(16, 32)
    fast = rockplan.solve(traced(make_net()), x, "min", options=rockplan.Options(**FAST))  # type: ignore[arg-type]
    for step in range(2):
        for module in (fast, eager):
            torch.manual_seed(step)
            module(x).square().mean().backward()
    assert_same_state(fast, eager, "traced")
    assert rockplan.plan_of(fast).overhead > 0


def test_compiled_kernels_are_planned(graphs: list[nn.Module]) -> None:
    net, eager = (nn.Sequential(nn.Linear(64, 8), nn.GELU(), nn.Tanh()).double() for _ in range(2))
    net.load_state_dict(eager.state_dict())
    options = FAST | {"budget": "auto", "compile": True}
    compiled = torch.compile(net, backend=backend, options=options, fullgraph=True)
    x = torch.randn(8, 64).double()
    for call in (compiled, eager):
        torch.manual_seed(0)
        call(x).square().mean().backward()
    assert rockplan.plan_of(graphs[0]).compiled
    for own, expected in zip(net.parameters(), eager.parameters(), strict=True):
        assert own.grad is not None and torch.allclose(own.grad, expected.grad)
