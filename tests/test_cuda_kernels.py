"""On a CUDA device: what compiled kernels read, where they write, and where they are timed.

Skipped where there is none. On a stand-in that computes nothing bits are not compared.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import rockplan
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.fusion import in_place
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
