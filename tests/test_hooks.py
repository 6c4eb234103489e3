"""Hooks on parameters that change them while the backward pass runs: optimizers that step as soon
as they have a gradient, as PyTorch's tutorial shows. Equal to eager bit for bit, or refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rockplan
from rockplan.oracles.verify import verify
from rockplan.search import planning
from rockplan.values.schedule import Compute, Free, with_waits
from testing.graphs import random_graph, random_schedule
from testing.models import Case, gpt2
from testing.training import QUICK, assert_same_state, solve_case
from testing.zoo_cases import loss_of
from tests.usage import pair

BUDGETS = ["min", "100%", "60%"]


class Gated(nn.Module):
    """The input's gradient is made after those of the weights that it reads."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        y: torch.Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return y


class TiedEmbedding(nn.Module):
    """Logits by the table that the forward starts with, and reads again where it recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.inner = nn.Sequential(Gated(16), nn.Dropout(0.1), Gated(16))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.inner(self.table(x)))
        return y


class Shared(nn.Module):
    """One cell in every step of a loop, and a view of its weight besides."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(4):
            h = self.cell(x, h) + F.linear(h, self.cell.weight_ih[:16]).tanh()
        return h


def gated_case() -> Case:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Gated() for _ in range(3)])
    return Case("gated", blocks, (torch.randn(32, 32),), {}, loss_of)


def encoder_case() -> Case:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)]
    return Case("encoder", nn.Sequential(*layers).train(), (torch.randn(4, 8, 32),), {}, loss_of)


def tied_case() -> Case:
    torch.manual_seed(0)
    return Case("tied", TiedEmbedding().train(), (torch.randint(40, (4, 8)),), {}, loss_of)


def shared_case() -> Case:
    torch.manual_seed(0)
    return Case("shared", Shared(), (torch.randn(32, 16),), {}, loss_of)


def gpt2_case() -> Case:
    pytest.importorskip("transformers")
    return gpt2(layers=2, width=32, batch=2, length=16)


CASES: dict[str, Callable[[], Case]] = {
    "gated": gated_case,
    "encoder": encoder_case,
    "tied": tied_case,
    "shared": shared_case,
    "gpt2": gpt2_case,
}


def descend(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.5)
    parameter.grad = None


def step_in_backward(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(descend)


def train_in_backward(case: Case, planned: nn.Module, eager: nn.Module, steps: int = 3) -> None:
    for step in range(steps):
        for module in (planned, eager):
            torch.manual_seed(step)
            case.step(module)
        assert_same_state(planned, eager, f"step {step}")


@pytest.mark.parametrize("budget", ["100%", "min"])
@pytest.mark.parametrize("kind", CASES)
def test_an_optimizer_may_step_inside_backward(kind: str, budget: str) -> None:
    case = CASES[kind]()
    planned, eager = pair(case, budget, options=QUICK)
    for module in (planned, eager):
        step_in_backward(module)
    train_in_backward(case, planned, eager)


def test_a_smallest_budget_where_no_plan_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_within(plan: rockplan.Plan, _: object) -> rockplan.Plan:
        return replace(plan, peak_bytes=plan.budget_bytes + 1024)

    model = encoder_case().model
    step_in_backward(model)
    monkeypatch.setattr(planning, "waiting", never_within)
    plan = rockplan.plan(model, encoder_case().args, "min", options=QUICK)
    assert plan.peak_bytes == plan.budget_bytes


@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_that_wait_are_within_the_budget(budget: str) -> None:
    case = gated_case()
    step_in_backward(case.model)
    planned = solve_case(case, budget, options=QUICK)
    peak_bytes, left_bytes = rockplan.peak_live_bytes(lambda: case.step(planned))
    assert left_bytes == 0
    assert 0.99 * planned.plan.peak_bytes <= peak_bytes <= planned.plan.peak_bytes
    assert planned.plan.peak_bytes <= planned.plan.budget_bytes


def test_hooks_of_the_start_are_planned_once() -> None:
    case = gated_case()
    eager = copy.deepcopy(case.model)
    for module in (case.model, eager):
        step_in_backward(module)
    planned = solve_case(case, "60%")
    train_in_backward(case, planned, eager)
    assert len(planned._rockplan.programs.popitem()[1]) == 1


@pytest.mark.parametrize("on_mismatch", ["original", "error"])
def test_hooks_registered_later_are_another_kind(on_mismatch: Any) -> None:
    case = gated_case()
    planned, eager = pair(case, "60%", options=rockplan.Options(on_mismatch=on_mismatch))
    for module in (planned, eager):
        step_in_backward(module)
    if on_mismatch == "error":
        with pytest.raises(rockplan.StalePlan, match="hooks on parameters"):
            planned(*case.args)
    else:
        train_in_backward(case, planned, eager)


def test_hooks_of_a_plan_on_disk(tmp_path: Any) -> None:
    case = gated_case()
    eager = copy.deepcopy(case.model)
    rockplan.save_plan(solve_case(case, "100%"), tmp_path / "plan.json")
    for module in (case.model, eager):
        step_in_backward(module)
    planned = rockplan.load(case.model, case.args, tmp_path / "plan.json")
    train_in_backward(case, planned, eager)


@pytest.mark.parametrize("budget", BUDGETS)
def test_hooks_may_change_what_had_its_gradient(budget: str) -> None:
    """As LOMO does: a hook that gets a gradient descends along all that are there."""
    case = gated_case()
    planned, eager = pair(case, budget)
    for module in (planned, eager):

        def descend_all(_: torch.Tensor, module: nn.Module = module) -> None:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    descend(parameter)

        for parameter in module.parameters():
            parameter.register_hook(descend_all)
        case.step(module)
        descend_all(torch.empty(0))
    assert_same_state(planned, eager, "after")


@pytest.mark.parametrize("budget", BUDGETS)
def test_incoming_gradients_of_another_pattern(budget: str) -> None:
    case = tied_case()
    planned, eager = pair(case, budget)
    for module in (planned, eager):
        step_in_backward(module)
        for step in range(2):
            torch.manual_seed(step)
            module(*case.args).sum().backward()
    assert_same_state(planned, eager, "after sums")


class Offset(nn.Module):
    """The gradient of its parameter is the one that comes in, which the caller holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).pow(2).mean() + self.offset


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_a_gradient_that_the_caller_holds(budget: str) -> None:
    case = Case("offset", Offset(), (torch.randn(16, 8, requires_grad=True),), {}, torch.sum)
    planned, eager = pair(case, budget)
    for module in (planned, eager):
        step_in_backward(module)
    train_in_backward(case, planned, eager)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last((self.first(x) * self.scale).tanh())
        return y


@pytest.mark.parametrize("changed", ["first.weight", "scale"])
def test_hooks_may_not_change_what_is_read(changed: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16, requires_grad=True)
    planned = rockplan.solve(Scaled(), x, "100%")
    other = dict([*planned.named_parameters(), *planned.named_buffers()])[changed]

    def change(_: torch.Tensor) -> None:
        with torch.no_grad():
            other.mul_(2)

    handle = planned.last.bias.register_post_accumulate_grad_hook(change)
    with pytest.raises(rockplan.BackwardError, match="by a hook"):
        loss_of(planned(x)).backward()
    handle.remove()
    loss_of(planned(x)).backward()


def test_changes_by_hooks_on_autograd_nodes_are_seen() -> None:
    case = gated_case()
    planned = solve_case(case, "60%")
    nodes = []
    for parameter in planned.parameters():
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_hook(lambda *_, p=parameter: descend(p))  # type: ignore[union-attr]
        nodes.append(node)
    with pytest.raises(rockplan.BackwardError, match="by a hook"):
        case.step(planned)


def test_a_budget_without_room_for_what_waits() -> None:
    """Hooks that only look still work in it; others are told."""
    case = gated_case()
    least_bytes = solve_case(case, "min", options=QUICK).plan.budget_bytes
    planned, eager = pair(case, least_bytes)
    handles = []
    for module in (planned, eager):
        for parameter in module.parameters():
            handles.append(parameter.register_hook(lambda gradient: gradient * 2))
    for _ in range(2):
        case.step(planned)
        case.step(eager)
        assert_same_state(planned, eager, "scaled")
    assert planned.plan.peak_bytes <= least_bytes
    assert len(planned.plans) == 1
    for handle in handles:
        handle.remove()
    planned.zero_grad()
    step_in_backward(planned)
    with pytest.raises(rockplan.BackwardError, match="larger budget"):
        case.step(planned)


def test_the_smallest_budget_with_hooks_has_a_plan() -> None:
    """By the whole search: what leads to the least peak is not what leads to a plan within it."""
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated())
    x = torch.randn(8, 32)
    step_in_backward(model)
    smallest = rockplan.plan(model, x, "min")
    assert rockplan.plan(model, x, smallest.budget_bytes).schedule == smallest.schedule


@pytest.mark.parametrize("seed", range(10))
def test_schedules_in_which_gradients_wait_are_legal(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng)
    schedule = random_schedule(rng, graph)
    residents = [d.index for d in graph.data if d.kind.resident]
    handed = list(graph.handed)
    rng.shuffle(handed)
    waits = tuple(((g,), rng.choice(residents)) for g in handed)
    waiting = with_waits(graph, schedule, waits)
    verify(graph, waiting)
    assert waiting.computes == schedule.computes
    assert sorted(map(repr, waiting.events)) == sorted(map(repr, schedule.events))
    for (gradient,), parameter in waits:
        after = waiting.events[waiting.events.index(Free(gradient)) :]
        later = [graph.nodes[e.node] for e in after if isinstance(e, Compute)]
        assert not any(parameter in node.reads for node in later)
