"""The budget 'auto': what a device has free, with the answers about it replaced."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rockplan
from rockplan import examples
from rockplan.budget import Budget, parse_budget
from rockplan.cli.main import app
from rockplan.fitting.allocator import rounded
from rockplan.fitting.changes import peak_of
from rockplan.fitting.gpus import Gpu
from rockplan.fitting.optimizer import NAMES, optimizer_steps
from rockplan.machine import total_bytes
from rockplan.solving.free_memory import MARGIN, _Coming, in_bytes, machine_bytes
from rockplan.values.graph import DataKind
from testing import models
from testing.training import QUICK, solve_case

FREE, RESERVED, ALLOCATED = 10_000_000, 700_000, 500_000
CUDA = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of which FREE bytes are free and RESERVED - ALLOCATED are held unused."""
    for name, answer in (
        ("mem_get_info", (FREE, 2 * FREE)),
        ("memory_reserved", RESERVED),
        ("memory_allocated", ALLOCATED),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda asked, a=answer: a if asked == CUDA else None)


class OnCuda(torch.Tensor):
    """A tensor that says it is on a CUDA device."""

    @property
    def device(self) -> torch.device:
        return CUDA


def on_cuda(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.__class__ = type("P", (OnCuda, nn.Parameter), {})
    return module


USABLE = int((FREE + RESERVED - ALLOCATED) * (1 - MARGIN))
WEIGHT, BIAS = 79 * 512, 512
"""Blocks of 512 bytes that the gradients of a 100 x 100 layer take."""


def test_gradients_that_do_not_exist_have_room() -> None:
    model = on_cuda(nn.Linear(100, 100))
    assert in_bytes(parse_budget("auto"), model) == Budget(size_bytes=USABLE - WEIGHT - BIAS)
    model.weight.requires_grad_(False)
    assert in_bytes(parse_budget("auto"), model) == Budget(size_bytes=USABLE - BIAS)
    model.bias.grad = torch.zeros(100)
    assert in_bytes(parse_budget("auto"), model) == Budget(size_bytes=USABLE)


def test_a_parameter_used_twice_has_one_gradient() -> None:
    linear = on_cuda(nn.Linear(100, 100, bias=False))
    once = in_bytes(parse_budget("auto"), linear)
    assert in_bytes(parse_budget("auto"), nn.Sequential(linear, linear)) == once


def test_room_for_what_comes_later() -> None:
    model = on_cuda(nn.Linear(1, 1, bias=False))
    all_of_it, less = (in_bytes(parse_budget(b), model).size_bytes for b in ("auto", "AUTO - 1MB"))
    assert all_of_it - less == 10**6
    with pytest.raises(rockplan.InvalidBudget, match="nothing remains for activations"):
        in_bytes(parse_budget("auto-9.2MB"), model)


@pytest.mark.parametrize("text", ["auto-", "auto-min", "auto-40%", "auto-auto", "auto4GB"])
def test_what_does_not_parse(text: str) -> None:
    with pytest.raises(rockplan.InvalidBudget, match="auto-4GB"):
        parse_budget(text)


def test_other_budgets_are_left_alone() -> None:
    for text in ("1GB", "40%", "min"):
        budget = parse_budget(text)
        assert in_bytes(budget, nn.Linear(1, 1)) is budget


def test_a_model_on_no_device_is_refused() -> None:
    model, x = nn.Linear(4, 4, device="meta"), torch.randn(2, 4)
    for plan in (rockplan.solve, rockplan.plan):
        with pytest.raises(rockplan.RockplanError, match="meta"):
            plan(model, x, budget="auto")
    with pytest.raises(rockplan.InvalidBudget, match="one device.* is on no device"):
        in_bytes(parse_budget("auto"), nn.ReLU())


MEMORY = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n"}
V2 = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.current": "1000"}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/outside/of/here\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000",
}


@pytest.mark.parametrize(
    ("files", "left_bytes", "all_bytes"),
    [
        (MEMORY, 5_120_000, 9_216_000),
        (MEMORY | V2 | {"sys/fs/cgroup/a/b/memory.max": "max"}, 5_120_000, 9_216_000),
        (MEMORY | V2 | {"sys/fs/cgroup/a/b/memory.max": "4000"}, 3000, 4000),
        (V2 | {"sys/fs/cgroup/a/b/memory.max": "400"}, 0, 400),
        (
            MEMORY
            | V2
            | {
                "sys/fs/cgroup/a/b/memory.max": "4000",
                "sys/fs/cgroup/a/memory.max": "3500",
                "sys/fs/cgroup/a/memory.current": "2000",
                "sys/fs/cgroup/a/memory.stat": "anon 1500\ninactive_file 500\n",
            },
            2000,
            3500,
        ),
        (MEMORY | V1, 2_000_000, 3_000_000),
        (
            MEMORY | V1 | {"sys/fs/cgroup/memory/memory.stat": "total_inactive_file 7"},
            2_000_007,
            3_000_000,
        ),
    ],
)
def test_what_a_machine_leaves(
    files: dict[str, str], left_bytes: int, all_bytes: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine_bytes(tmp_path) == left_bytes
    assert total_bytes(tmp_path) == all_bytes


def test_where_nobody_says_what_is_free(tmp_path: Path) -> None:
    with pytest.raises(rockplan.InvalidBudget, match="not known here.*Write bytes"):
        machine_bytes(tmp_path)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rockplan.solving.free_memory.machine_bytes", lambda: FREE)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "foreach": lambda p: torch.optim.RMSprop(p, foreach=True),
}


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", [*MAKERS])
def test_an_optimizer_has_room_before_it_has_state(name: str) -> None:
    """However it is given, and the same bytes in all that are there after its first step."""
    model, make = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)), MAKERS[name]
    auto = parse_budget("auto")
    without = in_bytes(auto, model).size_bytes
    optimizer = make(model.parameters())
    found = [in_bytes(auto, model, given).size_bytes for given in (make, optimizer)]
    if name in NAMES:
        found.append(in_bytes(auto, model, name).size_bytes)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    state_bytes = sum(rounded(t.nbytes) for t in tensors)
    assert without is not None
    assert found == [without - state_bytes] * len(found)
    # Now gradients and state are there, but not for a model that the optimizer has besides.
    assert in_bytes(auto, model, optimizer) == in_bytes(auto, model)
    other = nn.Linear(100, 100)
    without = in_bytes(auto, other).size_bytes
    optimizer.add_param_group({"params": [*other.parameters()]})
    found = in_bytes(auto, other, optimizer).size_bytes
    assert without is not None
    assert found == without - state_bytes // 2


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_of_training_stay_within_what_is_free(
    name: str, set_to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From before the first one, of three quarters of what eager's need."""
    case, make = models.mlp(batch=1024), MAKERS[name]

    def peak_bytes(module: nn.Module) -> int:
        case.step(module)  # what operators keep from their first run is no part of a step
        module.zero_grad()
        optimizer = make(module.parameters())

        def steps() -> None:
            for _ in range(3):
                optimizer.zero_grad(set_to_none)
                case.step(module)
                optimizer.step()

        return rockplan.peak_live_bytes(steps).peak_bytes

    usable_bytes = peak_bytes(case.model) * 3 // 4
    free_bytes = int(usable_bytes / (1 - MARGIN))
    monkeypatch.setattr("rockplan.solving.free_memory.machine_bytes", lambda: free_bytes)
    case.model.zero_grad()
    fast = rockplan.solve(case.model, case.args, "auto", optimizer=make)
    assert peak_bytes(fast) <= usable_bytes


@pytest.mark.usefixtures("machine")
def test_a_step_that_does_not_fit_is_refused() -> None:
    """The step of AdamW for a large parameter needs more than what is left by all that stays."""
    size = 10_000_000
    model = nn.Linear(size // 4 // 8, 1, bias=False)
    assert in_bytes(parse_budget("auto"), model, "adamw").size_bytes
    for budget in ("auto-4.8MB", "auto-5.5MB"):
        with pytest.raises(rockplan.InvalidBudget, match="optimizer's state need .* a step of"):
            in_bytes(parse_budget(budget), model, "adamw")
    with pytest.raises(rockplan.InvalidInput, match="no optimizer is named"):
        in_bytes(parse_budget("auto"), model, "adan")


@pytest.mark.usefixtures("machine")
def test_what_else_a_step_does_has_room() -> None:
    """A copy that is averaged, a scaler's tensors; optimizers inside of backward step for one
    parameter at a time."""
    model = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(8)])
    size_bytes, auto = 8 * WEIGHT, parse_budget("auto")

    def left_bytes(text: str = "auto", **how: Any) -> int:
        step = rockplan.TrainingStep(**how)
        found = in_bytes(parse_budget(text), model, MAKERS["adamw foreach"], step).size_bytes
        assert found is not None
        return found

    usual = left_bytes()
    assert left_bytes(average=True) == usual - size_bytes
    assert left_bytes(grad_scaler=True) < usual
    alone = nn.Linear(100, 100, bias=False)
    one_step = peak_of(optimizer_steps(MAKERS["adamw foreach"], {"w": alone.weight}).first)
    inside = left_bytes(in_backward=True)
    assert usual - one_step.size_bytes < inside < usual
    # Temporaries of all of them would not fit.
    small = f"auto-{inside - 1000}"
    assert left_bytes(small, in_backward=True) == 1000
    with pytest.raises(rockplan.InvalidBudget, match="a step of the optimizer needs"):
        left_bytes(small)
    assert in_bytes(auto, model, None, rockplan.TrainingStep(average=True)).size_bytes == (
        (in_bytes(auto, model).size_bytes or 0) - size_bytes
    )


def test_on_cuda_workspaces_are_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_cuda(nn.Linear(100, 100, bias=False))
    monkeypatch.setattr(
        "rockplan.solving.free_memory._of_optimizer",
        lambda given, model, step: _Coming(1000 if given else 0),
    )
    monkeypatch.setattr(
        "rockplan.solving.free_memory.gpu", lambda device: Gpu("own", 1 << 34, (8, 0))
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE + 10**8, 1 << 34))
    left = [in_bytes(parse_budget("auto"), model, o).size_bytes for o in (None, "adamw")]
    assert left[0] is not None
    assert left[1] == left[0] - 1000 - 2 * Gpu("own", 1 << 34, (8, 0)).cublas_bytes


@pytest.mark.usefixtures("machine")
def test_the_largest_size_is_planned_with_the_rest() -> None:
    model, x = nn.Linear(100, 100), torch.randn(8, 100)
    options = rockplan.Options(sizes={0: (8, 32)})
    fast = rockplan.solve(model, x, "auto", optimizer="adamw", options=options)
    left = in_bytes(parse_budget("auto"), model, "adamw").size_bytes
    planned = rockplan.plan(model, x, "auto", optimizer="adamw", options=options)
    assert left is not None
    gradients_bytes = sum(rounded(p.nbytes) for p in model.parameters())
    assert fast.plan.budget_bytes == planned.budget_bytes == left + gradients_bytes
    for made in (rockplan.plan_of(fast), planned):
        inputs = [d.index for d in made.graph.data if d.kind is DataKind.INPUT]
        assert [v.spec.shape for v in made.graph.values if v.data in inputs] == [(32, 100)]


def test_gradients_that_add_up_leave_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is kept in the room of gradients that come later, unless they are there."""
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(100, 100), nn.GELU())])
    x = torch.randn(256, 100)
    kept_bytes = rockplan.plan(model, x, "100%", options=QUICK).peak_bytes
    leave(monkeypatch, model, kept_bytes - sum(p.nbytes for p in model.parameters()) // 2)
    left = in_bytes(parse_budget("auto"), model, "adamw").size_bytes
    usual, adding = (
        rockplan.plan(model, x, "auto", optimizer="adamw", step=step, options=QUICK)
        for step in (rockplan.TrainingStep(), rockplan.TrainingStep(accumulate=2))
    )
    assert left is not None
    assert adding.peak_bytes <= left < usual.peak_bytes == kept_bytes


def leave(monkeypatch: pytest.MonkeyPatch, model: nn.Module, left_bytes: int) -> None:
    """Of a machine, for activations beside AdamW and all gradients, or a few bytes more."""

    def has(free_bytes: int) -> None:
        monkeypatch.setattr("rockplan.solving.free_memory.machine_bytes", lambda: free_bytes)

    has(1 << 30)
    left = in_bytes(parse_budget("auto"), model, "adamw").size_bytes
    assert left is not None
    later_bytes = int((1 << 30) * (1 - MARGIN)) - left
    has(int((left_bytes + later_bytes) / (1 - MARGIN)) + 1)


WIDE = {
    "mlp": lambda: models.mlp(8, 256, batch=256),
    "llama": lambda: models.llama(3, width=128, batch=1, length=64),
    "vit": lambda: models.vit(3, width=128, batch=4),
}


@pytest.mark.parametrize("name", [*WIDE])
def test_gradients_take_room_as_they_come(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More is kept than with room for all of them at once, and steps stay within what there is."""
    case, make = WIDE[name](), MAKERS["adamw"]
    state_bytes = 3 * sum(p.nbytes for p in case.model.parameters())
    kept_bytes = rockplan.plan(
        case.model, case.args, "100%", sample_kwargs=case.kwargs, options=QUICK
    ).peak_bytes
    usable_bytes = state_bytes + int(0.7 * kept_bytes)
    free_bytes = int(usable_bytes / (1 - MARGIN))
    monkeypatch.setattr("rockplan.solving.free_memory.machine_bytes", lambda: free_bytes)
    fast = solve_case(case, "auto", optimizer=make, options=QUICK)
    careful = in_bytes(parse_budget("auto"), case.model, make).size_bytes
    assert careful is not None and fast.plan.peak_bytes > careful
    case.step(fast)  # what operators keep from their first run is no part of a step
    for accumulate in (1, 2):
        step = rockplan.TrainingStep(accumulate)
        fast.zero_grad()
        fast = solve_case(case, "auto", optimizer=make, step=step, options=QUICK)
        steps = functools.partial(train, case, fast, make(fast.parameters()), accumulate)
        assert rockplan.peak_live_bytes(steps, warmup=0).peak_bytes <= usable_bytes


def train(
    case: models.Case, module: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int
) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(accumulate):
            case.step(module)
        optimizer.step()


def test_blocks_and_commands_leave_room_for_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    case = models.encoder(3, width=32)
    monkeypatch.setattr("rockplan.solving.free_memory.machine_bytes", lambda: 1 << 30)
    for optimizer in (None, "adamw"):
        left = in_bytes(parse_budget("auto"), case.model, optimizer).size_bytes
        model = rockplan.solve_blocks(
            case.model, case.args, "auto", optimizer=optimizer, options=QUICK
        )
        assert rockplan.blocks_of(model).budget_bytes == left
    mlp, args, _ = examples.mlp()
    plan = rockplan.plan(mlp, args, "80%", options=QUICK)
    leave(monkeypatch, mlp, plan.peak_bytes - 1000)  # which it needs beside gradients that add up
    words = ["rockplan.examples:mlp", "-b", "auto", "--json", "--no-cache", "--time-limit", "2"]
    found = []
    for more in ([], ["--optimizer", "adamw"], ["--optimizer", "adamw", "--accumulate", "2"]):
        result = CliRunner().invoke(app, ["solve", *words, *more])
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout)["plans"][0]["budget_bytes"])
    assert found[2] < found[1] < found[0]


def test_solve_plans_under_the_bytes_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is replaced; model and plan are of the CPU."""
    monkeypatch.setattr("rockplan.solving.free_memory._device", lambda model: CUDA)
    model, x = nn.Linear(100, 100), torch.randn(8, 100)
    fast = rockplan.solve(model, x, budget="auto")
    assert fast.plan.budget_bytes == USABLE - WEIGHT - BIAS
    (found,) = rockplan.api.plan_each(model, x, ["auto"])
    assert found.budget_bytes == fast.plan.budget_bytes
    x.requires_grad_()
    fast(torch.cat([x, x])).sum().backward()
    assert fast.plan.budget_bytes == USABLE - WEIGHT - BIAS
