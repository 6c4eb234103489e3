"""On a CUDA device: what compiled kernels read, where they write, and where they are timed.

Skipped where there is none. On a stand-in that computes nothing bits are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

import rockplan
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.fusion import in_place, inductor
from rockplan.graph_builder.fusion.indices import trial_inputs
from rockplan.graph_builder.fusion.kernels import functions_of
from rockplan.graph_builder.pipeline import lower
from rockplan.options import Options
from rockplan.solving.side_by_side import interleaved_seconds
from rockplan.values.graph import Kernel, caller_bytes
from testing.models import Case, llama
from tests.cuda import ON_CUDA
from tests.kernels import gradients, stack

pytestmark = ON_CUDA
COMPILED = Options(compile=True, cache=False, time_limit_s=5)


def at(offset: int, rows: int = 4096, width: int = 256) -> torch.Tensor:
    """Rows that begin so many elements after what the allocator gave."""
    flat = torch.randn(rows * width + offset, device="cuda")
    return flat[offset:].view(rows, width)


@pytest.mark.parametrize("planned_at", [0, 1])
def test_odd_addresses_are_read_where_they_lie(planned_at: int) -> None:
    """Nothing is copied, whatever the plan was made with; one plan serves both."""
    case = stack(3, width=256).to("cuda")
    planned = rockplan.solve(case.model, (at(planned_at),), "min", options=COMPILED)
    plan = rockplan.plan_of(planned)
    found = []
    for offset in (0, 1, 3):
        x = at(offset)
        x.copy_(torch.linspace(-1, 1, x.numel(), device="cuda").view_as(x))
        own = Case("odd", case.model, (x,), {}, case.loss)
        peak = rockplan.peak_live_bytes(partial(own.step, planned), device="cuda")
        # Predicted for the caller's loss is the most that losses need.
        assert 0 <= plan.peak_bytes - peak.peak_bytes <= caller_bytes(plan.graph)
        found.append(gradients(own, planned))
    assert len(planned.plans) == 1
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_most_kernels_of_a_transformer_write_in_place() -> None:
    """Among them both gradients of a gated product, and that of a norm."""
    torch.manual_seed(0)
    case = llama(2, 256, 8, 4, vocabulary=1000, batch=4, length=256)
    case.model.bfloat16()
    case = case.to("cuda")
    run = capture(case.model, case.args, case.kwargs)
    ways, found = in_place.tried(lower(run, 0, COMPILED).graph)
    made = {way: kernel for way, kernel in found.items() if isinstance(kernel, Kernel)}
    assert 3 * len(made) >= 2 * len(found), found
    assert any(len(kernel.over) == 2 for kernel in made.values())
    norms = [kernel for kernel in made.values() if "rsqrt" not in kernel.op and "pow" in kernel.op]
    assert norms and all(ways[way] for way in made)


@pytest.fixture(scope="module")
def launched() -> Iterator[list[Any]]:
    """Launches of kernels that are made with this fixture."""
    driver: Any = torch._C._StaticCudaLauncher
    noted: list[Any] = []

    def launch(*given: Any) -> None:
        *before, arguments, stream = given
        looks = [(a.shape, a.stride()) if torch.is_tensor(a) else a for a in arguments]
        noted.append((*before, looks, stream))
        driver._launch_kernel(*given)

    own = SimpleNamespace(_launch_kernel=launch, _load_kernel=driver._load_kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_StaticCudaLauncher", own)
        yield noted


@pytest.fixture(scope="module")
def kernels(launched: list[Any]) -> tuple[Kernel, ...]:
    """Of a small Llama, plain and in place."""
    case = llama(2, 192, 6, 3, vocabulary=1000, batch=4, length=192).to("cuda")
    return lower(capture(case.model, case.args, case.kwargs), 0, COMPILED).graph.kernels


def test_launched_is_what_inductor_launches(
    kernels: tuple[Kernel, ...], launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same functions, grids and arguments; by Inductor's code where a profiler looks."""
    autotuner: Any = CachingAutotuner
    run = autotuner.run
    by_inductor: list[Any] = []

    def noted(*given: Any, **named: Any) -> None:
        by_inductor.append(given)
        run(*given, **named)

    monkeypatch.setattr(autotuner, "run", noted)
    assert any(kernel.over for kernel in kernels)
    for kernel in kernels:
        launched.clear()
        by_inductor.clear()
        function: Any = inductor.compiled([kernel])[kernel.op]  # tries both
        half = len(by_inductor)
        assert half > 0 and launched[:half] == launched[half:], kernel.op
        with torch.autograd.profiler.profile():
            function([*trial_inputs(kernel)])
        assert len(by_inductor) == 2 * half


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_kernels_run_on_their_device(kernels: tuple[Kernel, ...]) -> None:
    with torch.cuda.device(1):
        for kernel in kernels:
            made = functions_of([kernel])[kernel.op]([*trial_inputs(kernel)])
            assert {str(t.device) for t in made} == {"cuda:0"}
            assert torch.cuda.current_device() == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_steps_are_timed_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8, device="cuda:1")
    x = torch.randn(4, 8, device="cuda:1")
    seen = []
    record = torch.cuda.Event.record

    def recorded(event: torch.cuda.Event, *stream: torch.cuda.Stream) -> None:
        seen.append(torch.cuda.current_device())
        record(event, *stream)

    monkeypatch.setattr(torch.cuda.Event, "record", recorded)
    interleaved_seconds({"there": lambda: model(x)}, 2, device="cuda:1")
    assert seen == [1, 1] * 2 and torch.cuda.current_device() == 0
