"""Kernels are tried on indices by which they read within their tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import rockplan
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.fusion import indices, inductor
from rockplan.graph_builder.fusion.fuse import proposed
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.options import Options
from rockplan.values.graph import Kernel
from tests.kernels import distance

TABLE = inductor.decompositions()
COMPILED = Options(compile=True, cache=False)
Chooses = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Of(nn.Module):
    def __init__(self, function: Chooses) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.ones(16)), function

    def forward(self, x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return self.function((x * self.w).exp(), i, j).sin()


def kernels_of(function: Chooses, i: torch.Tensor, j: torch.Tensor) -> list[Kernel]:
    """Those that look something up."""
    recorded = capture(Of(function), (torch.randn(8, 16), i, j), {})
    found = [f.kernel for f in proposed(recorded, False, TABLE, frozenset()).fused]
    return [k for k in found if any(indices._lookups(k))]


WHOLE = torch.arange(8).view(8, 1)
CHOICES: dict[str, Chooses] = {
    "as it is": lambda x, i, j: x.gather(1, i),
    "one before": lambda x, i, j: x.gather(1, i - 1),
    "rows": lambda x, i, j: x[i[:, 0] - 1],
    "far down": lambda x, i, j: x.gather(1, i - 1000),
    "of a half": lambda x, i, j: x.gather(1, (i - 500) * 2),
    "mirrored": lambda x, i, j: x.gather(1, 15 - 2 * i),
    "of two": lambda x, i, j: x.gather(1, i - j - 1),
    "after positions": lambda x, i, j: x.gather(1, i + torch.arange(8).view(8, 1) - 20),
    "of few": lambda x, i, j: x[:, :2].gather(1, i + 1 - 17),
    "not outside": lambda x, i, j: x.gather(1, torch.where(i < 0, 0, i - 3)),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", CHOICES)
def test_trials_read_within_tensors(name: str, dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return CHOICES[name](x, i.long(), j.long())

    found = kernels_of(function, WHOLE.to(dtype), WHOLE.to(dtype))
    assert found
    for kernel in found:
        inputs = indices.trial_inputs(kernel)
        assert indices.is_within(kernel, inputs)
        assert [t.dtype for t in inputs] == [dtype_of(s) for s in kernel.inputs]
        assert all(
            t.stride() == s.stride and tuple(t.shape) == s.shape
            for t, s in zip(inputs, kernel.inputs, strict=True)
        )
        indices.computed(kernel, inputs)


def test_where_nothing_is_found_operators_run_singly(
    compilers: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indices, "_MOST_TRIES", 0)
    model, sample = Of(CHOICES["mirrored"]), (torch.randn(8, 16), WHOLE, WHOLE)
    planned = rockplan.solve(model, sample, "100%", options=COMPILED)
    assert any("no integers are found" in r.getMessage() for r in caplog.records)
    torch.testing.assert_close(planned(*sample), model(*sample))


@pytest.mark.parametrize("name", ["one before", "of two"])
def test_kernels_are_compiled_and_right(
    name: str, compilers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Of(CHOICES[name])
    sample = (torch.randn(8, 16), WHOLE + 5, WHOLE // 2)
    planned = rockplan.solve(copy.deepcopy(model), sample, "100%", options=COMPILED)
    assert not [r for r in caplog.records if "cannot be compiled" in r.getMessage()]
    kernels = rockplan.plan_of(planned).graph.kernels
    assert any(call.op == "aten.gather.default" for k in kernels for call in k.calls)
    found = []
    for module in (planned, model):
        module(*sample).pow(2).mean().backward()
        found.append([p.grad for p in module.parameters() if p.grad is not None])
    assert distance(*found) < 1e-6
    with pytest.raises(IndexError, match="out of bounds"):
        planned(sample[0], WHOLE - 20, WHOLE)
