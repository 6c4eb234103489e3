"""Calls that look at the shape of an argument alone are captured without it, and make the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rockplan.graph_builder.operators.facts import without_argument
from testing.models import Case
from testing.training import solve_case, train_side_by_side, twin

aten = torch.ops.aten
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.empty_like.default, (), {}),
    (aten.new_empty.default, ([4, 3],), {}),
    (aten.new_empty_strided.default, ([4, 3], [1, 4]), {}),
    (aten.zeros_like.default, (), {}),
    (aten.ones_like.default, (), {"dtype": torch.int64}),
    (aten.full_like.default, (2.5,), {}),
    (aten.rand_like.default, (), {}),
    (aten.randn_like.default, (), {"dtype": torch.float64}),
    (aten.new_zeros.default, ([4, 3],), {"dtype": torch.bool}),
    (aten.new_ones.default, ([4, 3],), {}),
    (aten.new_full.default, ([4, 3], 7), {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("operator", "rest", "named"), CALLS, ids=lambda v: str(v))
def test_the_same_is_made(
    operator: Any, rest: tuple[Any, ...], named: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    made = operator(torch.randn(5, 6).to(dtype), *rest, **named)
    alone = without_argument(operator, (None, *rest), made)
    assert alone is not None
    call, args, kwargs = alone
    torch.manual_seed(0)
    torch.randn(5, 6)
    again = call(*args, **kwargs)
    assert (again.shape, again.stride()) == (made.shape, made.stride())
    assert (again.dtype, again.device) == (made.dtype, made.device)
    assert "empty" in str(operator) or torch.equal(again, made)


def test_strides_are_kept_or_the_argument_is() -> None:
    transposed = torch.randn(5, 6).t()
    empty = torch.empty_like(transposed)
    alone = without_argument(aten.empty_like.default, (transposed,), empty)
    assert alone is not None
    assert alone[0](*alone[1], **alone[2]).stride() == empty.stride()
    zeros = torch.zeros_like(transposed)
    assert without_argument(aten.zeros_like.default, (transposed,), zeros) is None


def test_what_reads_its_argument_keeps_it() -> None:
    x = torch.randn(3)
    assert without_argument(aten.bernoulli.default, (x,), x) is None
    assert without_argument(aten.clone.default, (x,), x) is None


class Masked(nn.Module):
    """What it drops, adds and scales at random depends on no activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3)
            x = x + 0.1 * torch.randn_like(x) * torch.full_like(x, 0.5)
            keep = x.new_empty((x.shape[0], 1)).bernoulli_(0.8)
            x = torch.sin(x * keep) + torch.rand_like(x.t()).t()
        return x


def test_masks_wait_for_nothing() -> None:
    case = Case("masked", Masked(), (torch.randn(8, 16),), {}, lambda y: y.square().mean())
    planned, eager = solve_case(case, "min"), twin(case)
    draws = [node for node in planned.plan.graph.nodes if node.random]
    assert len(draws) == 12
    # The transposed one alone has other strides than a new tensor.
    assert sum(bool(node.reads) for node in draws) == 3
    train_side_by_side(case, planned, eager, steps=3)
