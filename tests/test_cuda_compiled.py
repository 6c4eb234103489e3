"""On a CUDA device: plans of compiled kernels, heads in parts, blocks and sizes.

Skipped where there is no device. On the stand-in of `make cuda` bits are not computed, and peaks,
launches, synchronisations, generators, capture and devices are as on a real one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import rockplan
from benchmarks import stand_in
from benchmarks.kernel_record import graph_of, recorded
from benchmarks.tiled import Loss
from rockplan.fitting.allocator import rounded
from rockplan.options import Options
from testing import models
from testing.gpu_cases import LossCase, made_on
from testing.models import Case
from testing.sweep import tolerance_bytes
from testing.training import generator_states, solve_case, train_side_by_side, twin
from tests.cuda import ON_CUDA, captured, deterministic, large  # noqa: F401

pytestmark = ON_CUDA

BF16 = torch.bfloat16
ON_THE_STAND_IN = pytest.mark.skipif(
    not stand_in.is_there(), reason="only the stand-in counts what it is asked for"
)
QUICK = partial(Options, time_limit_s=2.0, bound_time_limit_s=0.2, without=("exchange",))


def llama(device: str = "cuda", **sizes: int) -> LossCase:
    """In bfloat16, of some MiB; a step lets its logits go."""
    usual = {"width": 128, "vocabulary": 1000, "batch": 4, "length": 128}
    made = partial(models.llama, **usual | sizes)
    case = made_on(made, torch.device(device))
    return LossCase("llama", case.model.to(BF16), (), case.kwargs, case.loss, released=(1,))


def gpt2() -> LossCase:
    """With dropout, and attention written out."""
    made = partial(models.gpt2, width=128, vocabulary=1000, attention="eager")
    case = made_on(made, torch.device("cuda"))
    return LossCase("gpt2", case.model, (), case.kwargs, case.loss, released=(1,))


def resnet() -> LossCase:
    case = made_on(partial(models.resnet, batch=4, size=64), torch.device("cuda"))
    return LossCase("resnet", case.model, case.args, {}, case.loss)


CASES = {"llama": llama, "gpt2": gpt2, "resnet": resnet}


@contextmanager
def synchronisations_raise() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_step(case: Case, planned: nn.Module, device: str = "cuda") -> rockplan.Plan:
    """A step is within the budget, as predicted, leaves nothing, and the host waits for nothing."""
    plan = rockplan.plan_of(planned)
    step = partial(case.step, planned)
    peak_bytes, left_bytes = rockplan.peak_live_bytes(step, device=device)
    facts = f"measured {peak_bytes}, predicted {plan.peak_bytes}, budget {plan.budget_bytes}"
    assert left_bytes == 0 and peak_bytes <= plan.budget_bytes, facts
    assert abs(peak_bytes - plan.peak_bytes) <= tolerance_bytes(plan, "cuda"), facts
    with synchronisations_raise():
        step()
    return plan


@pytest.mark.parametrize("budget", ["min", "100%"])
@pytest.mark.parametrize(
    ("name", "kind"), [("llama", True), ("gpt2", True), ("resnet", True), ("llama", "near")]
)
def test_peaks_are_predicted_and_nothing_waits(name: str, kind: Any, budget: str) -> None:
    case = CASES[name]()
    options = QUICK(compile=kind, released=case.released)
    plan = check_step(case, solve_case(case, budget, options=options))
    assert plan.graph.kernels


@pytest.mark.parametrize("name", CASES)
def test_what_runs_again_changes_no_bit(name: str) -> None:
    """Nor where generators end: draws are eager's."""
    case = CASES[name]()
    eager, other = twin(case), replace(case, model=twin(case))
    options = QUICK(compile=True, released=case.released)
    least, kept = (solve_case(c, b, options=options) for c, b in ((case, "min"), (other, "100%")))
    assert rockplan.plan_of(least).overhead > 0
    states = []
    for module in (eager, kept):
        torch.manual_seed(5)
        case.step(module)
        states.append(generator_states())
    for expected, found in zip(*states, strict=True):
        assert torch.equal(expected, found)
    kept.zero_grad()
    case.model.load_state_dict(kept.state_dict())  # statistics of that step
    train_side_by_side(case, least, kept, steps=3)


def test_a_step_in_a_cuda_graph() -> None:
    case = llama()
    options = QUICK(compile=True, released=case.released)
    kept = solve_case(replace(case, model=twin(case)), "100%", options=options)
    least = solve_case(case, "min", options=options)
    for expected, found in zip(captured(case, kept), captured(case, least), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("compiles", [False, True])
def test_on_another_device_than_the_current_one(compiles: bool) -> None:
    case = llama("cuda:1")
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    options = QUICK(compile=compiles, released=case.released)
    planned = solve_case(case, "min", options=options)
    check_step(case, planned, "cuda:1")
    assert torch.cuda.max_memory_allocated(0) == before
    assert torch.cuda.current_device() == 0


def loss_only() -> Case:
    case = llama(vocabulary=4000)
    return Case("loss", Loss(case.model), (), case.kwargs, lambda loss: loss)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("tile", [False, 4])
def test_heads_in_parts(compiles: bool, tile: Any) -> None:
    case = loss_only()
    plan = check_step(
        case, solve_case(case, "min", options=QUICK(compile=compiles, tile=tile, time_limit_s=60))
    )
    assert plan.graph.tiles == tile


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("budget", ["min", "60%"])
def test_blocks(budget: str, compiles: bool) -> None:
    made = llama(layers=4)
    # A step that holds the logits, as that by which blocks are planned.
    case = Case(made.name, made.model, (), made.kwargs, made.loss)
    eager = twin(case)
    planned = rockplan.solve_blocks(
        case.model,
        case.args,
        budget,
        sample_kwargs=case.kwargs,
        loss=case.loss,
        options=QUICK(compile=compiles),
    )
    plan = rockplan.blocks_of(planned)
    peak = rockplan.peak_live_bytes(partial(case.step, planned), device="cuda")
    assert abs(peak.peak_bytes - plan.peak_bytes) <= tolerance_bytes(plan, "cuda")
    if not compiles:
        planned.zero_grad()
        train_side_by_side(case, planned, eager, 2)


@pytest.mark.parametrize("compiles", [False, True])
def test_sizes(compiles: bool) -> None:
    case = llama()
    options = QUICK(compile=compiles, released=case.released, sizes={1: (64, 128)})
    planned = solve_case(case, "60%", options=options)
    budget_bytes = rockplan.plan_of(planned).budget_bytes
    for length in (128, 64, 100):
        kwargs = {name: given[:, :length] for name, given in case.kwargs.items()}
        step = partial(replace(case, kwargs=kwargs).step, planned)
        peak = rockplan.peak_live_bytes(step, device="cuda")
        assert 0 < peak.peak_bytes <= budget_bytes and peak.final_bytes == 0
        with synchronisations_raise():
            step()


def test_kernels_need_no_more_than_their_largest_result() -> None:
    from benchmarks.gpu_kernels import measured

    with recorded() as record:
        graph_of(llama())
    assert record.made and not [op for op in record.failed if not record.asked[op].over]
    for kernel in record.made.values():
        stands_for = record.asked[kernel.plain] if kernel.over else kernel
        row = measured(kernel, stands_for, torch.device("cuda"))
        largest = max(spec_bytes(spec) for spec in kernel.result_specs)
        assert row["workspace_bytes"] <= largest and row["bits"] == "same", kernel


def spec_bytes(spec: Any) -> int:
    itemsize = getattr(torch, spec.dtype.removeprefix("torch.")).itemsize
    sizes = (n * step for n, step in zip(spec.shape, spec.stride, strict=True))
    return max(itemsize * max(sizes, default=1), 512)


@pytest.mark.parametrize("compiles", [False, True])
def test_reserved_memory_is_little_more_than_the_peak(compiles: bool) -> None:
    """What the allocator holds, in whole segments, beside what is in them."""
    case = large()
    planned = solve_case(case, "min", options=QUICK(compile=compiles))
    plan = rockplan.plan_of(planned)
    case.step(planned)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    case.step(planned)
    more_bytes = torch.cuda.max_memory_reserved() - before
    assert more_bytes <= plan.peak_bytes + SEGMENTS_BYTES


SEGMENTS_BYTES = 2 * (20 << 20)
"""Of small and of large blocks, of which one each may be begun and not full."""


@ON_THE_STAND_IN
def test_launches_are_those_of_the_plan() -> None:
    """Where all is kept, products are eager's, and each kernel is launched, at least once; where
    little is, more of both. Nothing is copied between host and device."""
    case = llama()

    def asked(module: nn.Module) -> dict[str, int]:
        case.step(module)
        before = stand_in.counts()
        case.step(module)
        return stand_in.since(before)

    eager = asked(twin(case))
    options = QUICK(compile=True, released=case.released)
    kept = solve_case(replace(case, model=twin(case)), "100%", options=options)
    least = solve_case(case, "min", options=options)
    of_kept, of_least = asked(kept), asked(least)
    graph = rockplan.plan_of(kept).graph
    ours = {kernel.op for kernel in graph.kernels}
    calls = sum(call.op in ours for node in graph.nodes for call in node.calls)
    assert of_kept["products"] == eager["products"] < of_least["products"]
    assert calls <= of_kept["triton"] < of_least["triton"]
    assert of_kept["launches"] < eager["launches"]
    for found in (of_kept, of_least):
        assert not any(found[what] for what in ("syncs", "to_device", "to_host"))


@pytest.mark.parametrize("batch", [512, 4096])
def test_rows_of_fit_with_compiled_kernels_are_steps(batch: int) -> None:
    """Beside workspaces of cuBLAS, blocks of the allocator, but for a few scalars."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    model, x = LossOf(layers).cuda(), torch.randn(batch, 256, device="cuda")
    options = QUICK(compile=True, cache=False)
    row, _ = rockplan.fit(model, x, torch.device("cuda"), options=options).rows
    assert (row.way, row.batch) == ("kept whole", batch)
    fast = rockplan.solve(
        model, x, "100%", options=replace(options, without=(*options.without, "reorder"))
    )
    held = sum(rounded(t.nbytes) for t in (*model.parameters(), x))
    fast(x).backward()  # workspaces of cuBLAS are there from here on
    fast.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(fast.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        fast(x).backward()
        optimizer.step()
    found = torch.cuda.max_memory_allocated() - before + held
    said = row.allocated_bytes - dict(row.owners)["workspaces"]
    assert 0 <= said - found <= 8 * 512, (said, found)


class LossOf(nn.Module):
    """The mean square of what a module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return models.mean_square(self.module(x))
