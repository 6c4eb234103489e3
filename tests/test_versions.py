"""Changes in place: plans make new tensors where eager changes old ones, and not a bit differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rockplan
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.costs.ruler import peak_live_bytes
from rockplan.graph_builder.lowering.reinplace import out_of_place
from rockplan.graph_builder.operators import facts, rows
from rockplan.graph_builder.pipeline import lower
from rockplan.values.plan import Plan
from testing.models import Case
from testing.training import solve_case, train_side_by_side, twin
from testing.zoo_cases import loss_of
from tests.operators import DTYPES, calls, execute, same_bits

ROWS, WIDTH = 64, 32
ROW_BYTES = 4 * ROWS * WIDTH


class Halving(torch.autograd.Function):
    """Its backward adds in place, to what is no gradient that is handed over."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient * 0.25
        for factor in (0.5, 0.125, -0.25):
            total += (gradient * factor).sin()
        return total * 0.5


class Changing(nn.Module):
    """One way to change tensors in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.convolution = nn.Conv2d(2, 2, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self, self.kind)(x)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), WIDTH)
        for layer in self.layers:
            total += layer(x).tanh()
        return total.sin()

    def returned(self, x: torch.Tensor) -> torch.Tensor:
        total = self.layers[0](x)
        for layer in self.layers:
            total += layer(x).tanh()
        return total

    def read_between(self, x: torch.Tensor) -> Any:
        total, means = torch.zeros(len(x), WIDTH), x.new_zeros(())
        for layer in self.layers:
            total += layer(x)
            means = means + total.mean()
        return total, means

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        for layer in self.layers:
            h += layer(h.mean(-1, keepdim=True) + self.mean)
        return h.relu_().cos()

    def by_view(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        h.view(-1).add_(self.layers[1](x + h.mean()).flatten(), alpha=0.3)
        return self.layers[2](h)

    def view_made_before(self, x: torch.Tensor) -> Any:
        h = self.layers[0](x)
        part, turned = h[:, 4:9], h.t()
        h *= self.layers[1](x).exp().mean(-1, keepdim=True).detach()
        h -= self.layers[2](part.mean(-1, keepdim=True) + self.mean)
        return part.sin() + turned.sum(), h

    def part(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(len(x), 2 * WIDTH)
        for i, layer in enumerate(self.layers):
            h[:, 4 * i : 4 * i + WIDTH] += layer(x)
            h += layer(x).repeat(1, 2)
        return h

    def detached(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        plain = h.detach()
        plain += self.layers[1](x + h.mean()).detach()
        return self.layers[2](h) + plain

    def running_mean(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.layers[0](x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        h += self.layers[1](x)
        h += self.layers[2](x)
        return h * 2

    def under_autocast(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), WIDTH)
        half = torch.zeros(len(x), WIDTH, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                total += layer(x)
                half += layer(x)
                half += total.detach()
        return total + half

    def backward_sums(self, x: torch.Tensor) -> torch.Tensor:
        return Halving.apply(self.layers[0](x)).sin()

    def other_operators(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        h.addcmul_(self.layers[1](x), x, value=0.5)
        h.masked_fill_(self.layers[2](x) > 0, 0.25)
        h.div_(self.layers[3](x).detach().abs().amax() + 1).clamp_(-0.5, 0.5)
        return h.neg_()

    def layouts(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(4, 2, 16, -1)
        h = self.convolution(image)
        h += self.convolution(image.to(memory_format=torch.channels_last)).tanh()
        last = h.to(memory_format=torch.channels_last) * 2
        last += self.convolution(image).tanh()
        last += h.mean()
        return last.sum((2, 3))

    def random(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.layers[0](x), 0.3)
        for layer in self.layers:
            h += F.dropout(layer(x), 0.2)
            h.add_(torch.randn_like(h))
        return h.sin_()


KINDS = [name for name, found in vars(Changing).items() if callable(found) and name[0] != "_"]
KINDS.remove("forward")


def case_of(kind: str) -> Case:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    return Case(kind, Changing(kind), (x,), {}, loss_of)


@pytest.mark.parametrize("budget", ["min", "100%"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_and_peak_are_those_of_eager_execution(kind: str, budget: str) -> None:
    case = case_of(kind)
    eager = twin(case)
    planned = solve_case(case, budget)
    train_side_by_side(case, planned, eager)

    def step() -> None:
        held = planned(*case.args)
        loss_of(held).backward()

    measured, final = peak_live_bytes(step)
    assert final == 0
    assert 0.98 * planned.plan.peak_bytes <= measured <= planned.plan.budget_bytes


class Sum(nn.Module):
    """Of as many layers as there are, in place or not."""

    def __init__(self, layers: int, in_place: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(layers))
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), WIDTH)
        for layer in self.layers:
            if self.in_place:
                total += layer(x)
            else:
                total = total + layer(x)
        return total


@pytest.mark.parametrize("layers", [4, 16])
def test_sums_in_place_need_no_more_room(layers: int) -> None:
    def least(in_place: bool) -> Plan:
        return rockplan.plan(Sum(layers, in_place), torch.randn(ROWS, 8), "min")

    assert least(True).peak_bytes <= least(False).peak_bytes
    assert least(True).eager_peak_bytes <= least(False).eager_peak_bytes


def test_what_can_run_together_does() -> None:
    """An activation in place, and a sum of what is there before: no operation of its own."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 1))
    lowered = lower(capture(model, (torch.randn(ROWS, WIDTH),), {}), 0)
    ops = [[call.op for call in node.calls] for node in lowered.graph.forward]
    assert ops == [["aten.addmm.default", "aten.relu_.default"], ["aten.addmm.default"]]


ADMITTED = sorted(row.name for row in rows.ROWS if row.may_write_into == rows.OPERAND)
IN_PLACE = [
    f"aten.{name}_.{overload}"
    for name, overload in (op.split(".")[1:] for op in ADMITTED)
    if hasattr(torch.ops.aten, f"{name}_")
    and overload in getattr(torch.ops.aten, f"{name}_").overloads()
]


def test_operators_in_place_have_a_counterpart() -> None:
    found = {op for op in IN_PLACE if out_of_place(op)}
    assert {"aten.add_.Tensor", "aten.relu_.default", "aten.masked_fill_.Scalar"} <= found
    assert out_of_place("aten.mul_.Scalar") is None  # rounds otherwise in half precision
    assert out_of_place("aten.copy_.default") is None
    assert out_of_place("aten.bernoulli_.float") is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [op for op in IN_PLACE if out_of_place(op)])
def test_the_counterpart_makes_the_same_bits(op: str, dtype: torch.dtype) -> None:
    compared = 0
    found = out_of_place(op)
    assert found is not None
    for call, tensors in calls(found, dtype):
        made = execute(call, tensors)
        first = tensors[0]
        if (made.shape, made.stride(), made.dtype) != (first.shape, first.stride(), first.dtype):
            continue
        copied = [tensors[0].clone(), *tensors[1:]]
        operator = facts.resolve(op)
        with torch._C._AutoDispatchBelowAutograd():
            args = [copied[a.index] if hasattr(a, "index") else a for a in call.args]
            operator(*args, **dict(call.kwargs))
        assert same_bits(copied[0], made), (op, call)
        compared += 1
    assert compared
