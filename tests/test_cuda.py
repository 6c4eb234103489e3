"""On a CUDA device: the same bits as eager execution, measured peak within budget, generators.

Skipped where there is none. Eager execution must repeat itself: algorithms are deterministic here.
`python -m benchmarks.zoo --device cuda` and `python -m benchmarks.fuzz --device cuda` check more.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import rockplan
from benchmarks import stand_in
from testing.models import CASES, Case, gpt2, mean_square
from testing.sweep import tolerance_bytes
from testing.training import generator_states, solve_case, train_side_by_side, twin
from testing.zoo_cases import loss_of
from tests.cuda import ON_CUDA, captured, deterministic, large  # noqa: F401
from tests.orders import planned_in
from tests.usage import LookupByCount, classifier

pytestmark = ON_CUDA
ON_A_DEVICE = pytest.mark.skipif(stand_in.is_there(), reason="the stand-in has no cuDNN")


def on_cuda(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]().to("cuda")


def measured_peak(case: Case, module: nn.Module) -> int:
    peak_bytes, left_bytes = rockplan.peak_live_bytes(lambda: case.step(module), device="cuda")
    assert left_bytes == 0
    return peak_bytes


def check(case: Case, budget: str | int, steps: int = 3) -> rockplan.Plan:
    """Plans `case`; the same as eager execution over some steps, within budget, as predicted."""
    eager = twin(case)
    before = generator_states()
    planned = solve_case(case, budget)
    for now, then in zip(generator_states(), before, strict=True):
        assert torch.equal(now, then), "planning moved a generator"
    train_side_by_side(case, planned, eager, steps)
    plan: rockplan.Plan = planned.plan
    peak_bytes = measured_peak(case, planned)
    facts = f"measured {peak_bytes}, predicted {plan.peak_bytes}, budget {plan.budget_bytes}"
    assert peak_bytes <= plan.budget_bytes, facts
    assert abs(peak_bytes - plan.peak_bytes) <= tolerance_bytes(plan, "cuda"), facts
    return plan


@pytest.mark.parametrize("budget", ["min", "50%", "100%"])
@pytest.mark.parametrize("name", CASES)
def test_models_are_as_eager_execution(name: str, budget: str) -> None:
    case = on_cuda(name)
    try:
        check(case, budget)
    except rockplan.InfeasibleBudget as error:
        assert budget == "50%"
        check(case, error.minimum_bytes)


class Attention(nn.Module):
    """Self-attention with dropout of probabilities, then of the result, in one kernel of CUDA."""

    def __init__(self, width: int, backend: SDPBackend, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.backend, self.heads = backend, heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.backend):
            y = functional.scaled_dot_product_attention(
                *parts.unbind(), dropout_p=0.1 * self.training, is_causal=True
            )
        y = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + functional.dropout(y, 0.1, self.training)


BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name.lower())
def test_attention_kernels_with_dropout(backend: SDPBackend, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [Attention(256, backend) for _ in range(4)]
    model = nn.Sequential(*layers).to("cuda", dtype)
    sample = torch.randn(4, 128, 256, device="cuda", dtype=dtype)
    plan = check(Case("attention", model, (sample,), {}, mean_square), "min")
    assert plan.overhead > 0


class Mixed(nn.Module):
    """Convolutions and normalization of channels last, a recurrent network, dropout."""

    def __init__(self, width: int = 32, with_cudnn: bool = False) -> None:
        super().__init__()
        convolutions = [
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(4)
        ]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*convolutions)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(width, 10))
        self.with_cudnn = with_cudnn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(self.first(x)).mean(2).transpose(1, 2)
        with torch.backends.cudnn.flags(enabled=self.with_cudnn, deterministic=True):
            y, _ = self.lstm(y)
        result: torch.Tensor = self.head(y)
        return result


def mixed(with_cudnn: bool = False) -> Case:
    torch.manual_seed(0)
    model = Mixed(with_cudnn=with_cudnn).to("cuda", memory_format=torch.channels_last)
    sample = torch.randn(8, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    return Case("mixed", model, (sample,), {}, mean_square)


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_convolutions_of_cudnn(budget: str) -> None:
    check(mixed(), budget)


def test_made_up_indices_leave_the_device_alone() -> None:
    torch.manual_seed(0)
    sample = torch.rand(8, 32, device="cuda")
    check(Case("counting", LookupByCount().cuda(), (sample,), {}, loss_of), "100%")


@ON_A_DEVICE
def test_recurrent_layers_of_cudnn_are_refused() -> None:
    case = mixed(with_cudnn=True)
    with pytest.raises(rockplan.UnsupportedModel, match="switch cuDNN off"):
        solve_case(case, "min")
    case.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_with_scaled_gradients(dtype: torch.dtype) -> None:
    case = mixed()
    eager = twin(case)
    results = []
    with torch.autocast("cuda", dtype):
        planned = solve_case(case, "min")
    for module in (eager, planned):
        scaler = torch.amp.GradScaler("cuda")
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype):
                loss = case.loss(module(*case.args))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([loss, *module.parameters(), *module.buffers(), *generator_states()])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("budget", ["min", "40%", "100%"])
def test_blocks_of_odd_sizes_stay_within_the_budget(budget: str) -> None:
    check(large(), budget)


def test_the_budget_auto_is_what_is_free() -> None:
    case = large()
    planned = solve_case(case, "auto")
    free_bytes, _ = torch.cuda.mem_get_info()
    assert free_bytes // 2 < planned.plan.budget_bytes < free_bytes
    assert planned.plan.overhead == 0
    case.step(planned)


def test_on_a_stream_of_the_callers() -> None:
    case = large()
    eager = twin(case)
    planned = solve_case(case, "min")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train_side_by_side(case, planned, eager)
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_planned_modules(reentrant: bool) -> None:
    case = large(width=256, depth=4, batch=512)
    case.args[0].requires_grad_()
    eager = twin(case)
    planned = solve_case(case, "min")

    def twice(module: nn.Module) -> torch.Tensor:
        def call(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = module(module(x) + x)
            return y

        y: torch.Tensor = checkpoint(call, *case.args, use_reentrant=reentrant)
        return y

    for step in range(2):
        found = []
        for module in (eager, planned):
            torch.manual_seed(step)
            twice(module).sum().backward()
            gradients = [t.grad for t in (*case.args, *module.parameters())]
            found.append([*gradients, *generator_states()])
            case.args[0].grad = None
        for expected, other in zip(*found, strict=True):
            assert torch.equal(expected, other)
    held: list[torch.Tensor] = []
    left = {
        rockplan.peak_live_bytes(lambda m=module: held.append(twice(m)), device="cuda")[1]
        for module in (eager, planned)
    }
    assert len(left) == 1 and min(left) > 0


def test_first_executions_in_another_order(tmp_path: Path) -> None:
    case = large(width=256, depth=6, batch=512)
    eager = twin(case)
    planned = planned_in(case, random.Random(0), tmp_path / "plan.json")
    train_side_by_side(case, planned, eager)


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_leaves_that_are_let_go_are_not_counted(budget: str) -> None:
    torch.manual_seed(0)
    case = classifier(batch=4096).to("cuda")
    eager = twin(case)
    planned = solve_case(case, budget, options=rockplan.Options(released=(1,)))
    plan = planned.plan
    peak_bytes, left_bytes = rockplan.peak_live_bytes(
        lambda: planned(*case.args)[0].backward(), device="cuda"
    )
    assert left_bytes == 0 and peak_bytes <= plan.budget_bytes
    assert abs(peak_bytes - plan.peak_bytes) <= tolerance_bytes(plan, "cuda")
    planned.zero_grad()
    train_side_by_side(case, planned, eager)


def test_a_plan_of_a_file_and_a_copy(tmp_path: Path) -> None:
    case = on_cuda("gpt2")
    eager = twin(case)
    path = tmp_path / "plan.json"
    rockplan.save_plan(solve_case(case, "min"), path)
    case = on_cuda("gpt2")
    planned = rockplan.load(case.model, case.args, path, sample_kwargs=case.kwargs)
    train_side_by_side(case, planned, eager)
    train_side_by_side(case, copy.deepcopy(planned), copy.deepcopy(eager), 1)


def test_a_step_in_a_cuda_graph() -> None:
    case = large(width=256, depth=4, batch=512, dropout=0.0)
    eager = twin(case)
    planned = solve_case(case, "min")
    assert planned.plan.overhead > 0
    for expected, found in zip(captured(case, eager), captured(case, planned), strict=True):
        assert torch.equal(expected, found)


def test_draws_not_repeated_in_a_cuda_graph() -> None:
    case = large(width=256, depth=4, batch=512)
    eager = twin(case)
    planned = solve_case(case, "100%")
    for expected, found in zip(captured(case, eager), captured(case, planned), strict=True):
        assert torch.equal(expected, found)


def test_draws_repeated_in_a_cuda_graph_are_refused() -> None:
    case = large(width=256, depth=4, batch=512)
    drops = rockplan.Options(recompute=("[0-2].3",))
    planned = solve_case(case, "100%", options=drops)
    case.step(planned)
    with pytest.raises(rockplan.StalePlan, match="CUDA graph"):
        captured(case, planned)


def test_compare_measures_on_the_device() -> None:
    case = gpt2().to("cuda")
    found = rockplan.compare(case.model, case.args, ["40%"], sample_kwargs=case.kwargs, rounds=2)
    rows = {row.name: row for row in found.rows}
    assert rows["rockplan 40%"].peak_bytes < rows["eager"].peak_bytes


def test_a_module_on_two_devices_is_refused() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8).cuda()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.b(self.a(x).cuda())
            return y

    with pytest.raises(rockplan.InvalidInput, match="one device"):
        rockplan.solve(Halves(), torch.randn(4, 8), "min")


@pytest.mark.parametrize("budget", ["min", "60%"])
def test_blocks_that_are_planned_in_place(budget: str) -> None:
    case = gpt2(layers=4).to("cuda")
    eager = twin(case)
    planned = rockplan.solve_blocks(
        case.model, case.args, budget, sample_kwargs=case.kwargs, loss=case.loss
    )
    plan = rockplan.blocks_of(planned)
    assert abs(measured_peak(case, planned) - plan.peak_bytes) <= tolerance_bytes(plan, "cuda")
    planned.zero_grad()
    train_side_by_side(case, planned, eager)


class MeanSquare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean_square(x)


class FourBits(nn.Module):
    """A frozen layer that bitsandbytes keeps in 4 bits, with an adapter."""

    def __init__(self, width: int, dtype: torch.dtype, is_double: bool) -> None:
        super().__init__()
        from bitsandbytes.nn import LinearNF4

        kind = {"bias": False, "compute_dtype": dtype, "compress_statistics": is_double}
        self.base = LinearNF4(width, width, **kind).requires_grad_(False)
        self.a = nn.Linear(width, 16, bias=False, dtype=dtype)
        self.b = nn.Linear(16, width, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.base(x) + self.b(self.a(x)))


@pytest.mark.parametrize("budget", ["min", "50%", "100%"])
@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peaks_of_layers_in_four_bits(dtype: torch.dtype, is_double: bool, budget: str) -> None:
    pytest.importorskip("bitsandbytes", reason="it is in no extra of this package")
    torch.manual_seed(0)
    layers = (FourBits(512, dtype, is_double) for _ in range(6))
    model = nn.Sequential(*layers, MeanSquare()).cuda()
    x = torch.randn(4, 512, 512, device="cuda", dtype=dtype)
    check(Case("four bits", model, (x,), {}, lambda loss: loss), budget, steps=2)
