"""Every way to run the backward pass: equal to eager bit for bit, or refused clearly."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

import rockplan
from rockplan.runtime import backward_pass
from testing.models import Case, mean_square, mlp
from testing.training import QUICK, solve_case, train_side_by_side, twin
from testing.zoo_cases import loss_of
from tests.usage import BUDGET, SAMPLE, Net, both, count_programs, net_case, pair


def test_several_forwards_before_one_backward() -> None:
    planned, eager = pair(net_case())
    batches = [torch.randn(32, 16) for _ in range(3)]
    both(planned, eager, lambda m: sum(mean_square(m(b)) for b in batches).backward(), "sum")


def test_backwards_in_another_order() -> None:
    planned, eager = pair(net_case())
    batches = [torch.randn(32, 16) for _ in range(2)]

    def use(module: nn.Module) -> None:
        losses = [mean_square(module(b)) for b in batches]
        losses[0].backward()
        losses[1].backward()

    both(planned, eager, use, "first forward first")


def test_gradient_accumulation_within_budget() -> None:
    case = net_case()
    planned, eager = pair(case)

    def use(module: nn.Module) -> None:
        for _ in range(3):
            case.step(module)

    both(planned, eager, use, "accumulation")

    def step() -> None:
        result = planned(*case.args)
        mean_square(result).backward()

    peak_bytes, _ = rockplan.peak_live_bytes(step)
    assert peak_bytes <= planned.plan.budget_bytes


def test_gradients_of_inputs() -> None:
    case = net_case()
    sample = case.args[0].clone().requires_grad_()
    case = Case("inputs", case.model, (sample,), {}, mean_square)
    planned, eager = pair(case)

    def use(module: nn.Module) -> torch.Tensor:
        leaf = sample.detach().clone().requires_grad_()
        mean_square(module(leaf)).backward()
        inner = (leaf * 2).tanh()
        mean_square(module(inner)).backward()
        assert leaf.grad is not None
        return leaf.grad

    both(planned, eager, use, "inputs")


class Loop(nn.Module):
    """Weights, and an input, that are used in every step of a loop."""

    def __init__(self, width: int = 64, steps: int = 12) -> None:
        super().__init__()
        self.cell, self.shared, self.steps = (
            nn.GRUCell(width, width),
            nn.Linear(width, width),
            steps,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x)
        for _ in range(self.steps):
            h = self.shared(self.cell(x, h)).tanh()
        return h


@pytest.mark.parametrize(("budget", "of_input"), [("min", True), ("100%", False)])
def test_contributions_to_one_gradient_do_not_wait(budget: str, of_input: bool) -> None:
    """Autograd adds each to the first in place, and the plan counts what autograd holds."""
    torch.manual_seed(0)
    x = torch.randn(8, 64, requires_grad=of_input)
    case = Case("loop", Loop(), (x,), {}, loss_of)
    planned, eager = pair(case, budget, options=rockplan.Options(time_limit_s=2))

    def peak_bytes_of(module: nn.Module) -> int:
        def step() -> None:
            case.step(module)
            x.grad = None

        return rockplan.peak_live_bytes(step)[0]

    peak_bytes = peak_bytes_of(planned)
    assert peak_bytes <= planned.plan.peak_bytes <= 1.02 * peak_bytes
    assert peak_bytes <= peak_bytes_of(eager)
    planned.zero_grad()
    eager.zero_grad()
    both(planned, eager, case.step, "once")
    both(planned, eager, lambda m: sum(loss_of(m(x * k)) for k in (1, 2, 3)).backward(), "thrice")


class Loss(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 32, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.linear(x), torch.arange(64) % 32)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_weights_go_before_an_inputs_last(bias: bool) -> None:
    x = torch.randn(64, 40, requires_grad=True)
    planned = rockplan.solve(Loss(bias), x, "100%")
    peak_bytes, left_bytes = rockplan.peak_live_bytes(lambda: planned(x).backward())
    # A plan counts eight bytes for what the caller may make of a loss.
    assert 0 <= planned.plan.peak_bytes - peak_bytes <= 8 and left_bytes == 0


class Recurrent(nn.Module):
    """Its operator returns the gradient of both biases as one, by the shape rule, or as two."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(24, 48, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.rnn(x)[0]
        return result


def test_results_that_share_a_storage_by_rule_only() -> None:
    x = torch.randn(2, 3, 24)
    planned = rockplan.solve(Recurrent(), x, "100%")
    peak_bytes, left_bytes = rockplan.peak_live_bytes(lambda: planned(x).sum().backward())
    assert peak_bytes <= planned.plan.peak_bytes and left_bytes == 0


def test_shared_results_may_not_change_behind_the_plan() -> None:
    torch.manual_seed(0)
    case = Case("net", Net().train(), (torch.randn(32, 16),), {}, mean_square)
    planned = solve_case(case, BUDGET)
    result = planned(*case.args)
    loss = mean_square(result)
    with torch.no_grad():
        planned.head.weight.add_(1.0)
    with pytest.raises(rockplan.BackwardError, match="modified in place"):
        loss.backward()


class Scaled(nn.Module):
    """Eager's backward pass reads neither the first layer nor the scale nor the input."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sigmoid(torch.tanh(self.first(x * self.scale + 1))))


def _new_weight(module: Any, x: torch.Tensor) -> None:
    module.first.weight.data = module.first.weight.data + 1


def _new_scale(module: Any, x: torch.Tensor) -> None:
    module.scale.data = module.scale + 1


def _new_input(module: Any, x: torch.Tensor) -> None:
    x.data = torch.randn(8, 16)


def _set_bias(module: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        module.first.bias.set_(torch.ones(16))


def _moved(module: Any, x: torch.Tensor) -> None:
    module.double()


def _loaded(module: Any, x: torch.Tensor) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()))


@pytest.mark.parametrize(
    "change", [_new_weight, _new_scale, _new_input, _set_bias, _moved, _loaded]
)
@pytest.mark.parametrize("again", [False, True], ids=["first", "second backward"])
def test_other_memory_between_forward_and_backward_is_refused(
    change: Callable[[Any, torch.Tensor], None], again: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    options = rockplan.Options(cache=False, time_limit_s=5)
    planned = rockplan.solve(Scaled(), torch.randn(8, 16), "min", options=options)
    result = planned(x)
    if again:
        mean_square(result).backward(retain_graph=True)
    change(planned, x)
    with pytest.raises(rockplan.BackwardError, match="modified in place, or given other memory"):
        mean_square(result).backward()
    # The next step is a step as any.
    planned = planned.float()
    planned(torch.randn(8, 16)).sum().backward()


def test_other_memory_that_backward_does_not_read() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    planned, eager = pair(Case("scaled", Scaled(), (x,), {}, mean_square))

    def use(module: Any) -> None:
        loss = mean_square(module(x))
        module.last.bias.data = module.last.bias.data + 1
        loss.backward()

    both(planned, eager, use, "bias")


class Heads(Net):
    """Two heads with parameters of their own, and a mean of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        return x, self.other(x.tanh())


def heads_case() -> Case:
    torch.manual_seed(0)
    return Case("heads", Heads().train(), (torch.randn(32, 16),), {}, lambda r: mean_square(r[0]))


def test_a_loss_of_some_outputs_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_programs(monkeypatch)
    case = heads_case()
    planned, eager = pair(case)
    for step in range(3):
        both(planned, eager, case.step, f"one head, step {step}")
        for module in (planned, eager):
            assert module.other.weight.grad is None
            torch.optim.SGD(module.parameters(), 0.1).step()
    assert len(made) == 2, "one plan for all outputs, one for those that the loss uses"

    def step_in_budget() -> None:
        result = planned(*case.args)
        case.loss(result).backward()

    peak_bytes, _ = rockplan.peak_live_bytes(step_in_budget)
    assert peak_bytes <= planned.plan.budget_bytes


class Quantized(nn.Module):
    """Its scalar is a part of the loss alone, as of a VQ-VAE or of the balance of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code = self.encoder(x)
        return self.decoder(code), (code - code.round().detach()).pow(2).mean()


def test_a_scalar_that_is_part_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_programs(monkeypatch)
    torch.manual_seed(0)
    case = Case("quantized", Quantized().train(), (SAMPLE,), {}, lambda r: mean_square(r[0]) + r[1])
    planned, eager = pair(case)
    for step in range(3):
        both(planned, eager, case.step, f"step {step}")
    both(planned, eager, lambda m: m(SAMPLE)[1].backward(), "the scalar alone")
    assert len(made) == 2, "one plan for both outputs, one for the scalar"


@dataclass
class Losses:
    """A result as a library has it."""

    total: torch.Tensor
    parts: dict[str, torch.Tensor]


pytree.register_dataclass(Losses)


class Regularized(nn.Module):
    """A loss that is the sum of two, of which each reaches every parameter or not."""

    def __init__(self, result: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.head, self.result = nn.Linear(16, 32), nn.Linear(32, 4), result

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        y = self.head(hidden)
        return self.result(y.pow(2).mean(), 0.1 * hidden.pow(2).mean(), y)


LOSSES: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda a, b, y: (a + b, b), lambda r: r[0]),
    "last of a tuple": (lambda a, b, y: (y, a, b, a + b), lambda r: r[3]),
    "nested": (lambda a, b, y: {"sum": a + b, "parts": [a, {"b": b}]}, lambda r: r["sum"]),
    "dataclass": (lambda a, b, y: Losses(a + b, {"a": a, "b": b}), lambda r: r.total),
    "of parts of parts": (lambda a, b, y: ((c := a + b), c * 2, a), lambda r: r[1]),
    "named, beside another": (lambda a, b, y: {"aux": 3 * a, "loss": a + b}, lambda r: r["loss"]),
    "of a library": (
        lambda a, b, y: MoeCausalLMOutputWithPast(loss=a, aux_loss=a.exp() + b, logits=y),
        lambda r: r.loss,
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_and_its_parts_need_one_plan(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_programs(monkeypatch)
    result, loss = LOSSES[kind]
    torch.manual_seed(0)
    case = Case("losses", Regularized(result).train(), (SAMPLE,), {}, loss)
    planned, eager = pair(case)
    for step in range(2):
        both(planned, eager, case.step, f"step {step}")
    assert len(made) == 1


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0)])
def test_heads_in_turn(order: tuple[int, ...]) -> None:
    planned, eager = pair(heads_case(), options=rockplan.Options(differentiated=(0, 1)))
    for head in order:
        both(planned, eager, lambda m, h=head: mean_square(m(SAMPLE)[h]).backward(), f"head {head}")


def test_an_output_that_was_never_differentiated() -> None:
    planned, eager = pair(heads_case(), options=rockplan.Options(differentiated=(0,)))
    both(planned, eager, lambda m: mean_square(m(SAMPLE)[0]).backward(), "first")
    with pytest.raises(rockplan.BackwardError, match="differentiated"):
        mean_square(planned(SAMPLE)[1]).backward()
    with pytest.raises(rockplan.InvalidInput, match="differentiated"):
        pair(heads_case(), options=rockplan.Options(differentiated=(7,)))


class Apart(nn.Module):
    """Nothing else reads the gradient of either use of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x)) * torch.sigmoid(x)


class Residual(Apart):
    """The gradient that comes in is that of one use of its input, and is read to make the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(torch.tanh(x))


class Around(nn.Module):
    """Uses what it passes on to its block besides."""

    def __init__(self, block: nn.Module, is_apart: bool) -> None:
        super().__init__()
        self.pre, self.block, self.is_apart = nn.Linear(16, 16), block, is_apart

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.pre(x))
        y: torch.Tensor = self.block(h.view_as(h) if self.is_apart else h) + 2 * h
        return y


@pytest.mark.parametrize("budget", ["100%", "min"])
@pytest.mark.parametrize("block", [Apart, Residual])
def test_an_input_used_outside_adds_as_documented(block: type[nn.Module], budget: str) -> None:
    """What a view's node gets is added before it is passed on."""
    torch.manual_seed(0)
    eager = Around(block(), is_apart=block is Residual)
    planned = Around(copy.deepcopy(eager.block), is_apart=False)
    planned.load_state_dict(eager.state_dict())
    planned.block = rockplan.solve(planned.block, torch.randn(32, 16, requires_grad=True), budget)
    x = torch.randn(32, 16)
    both(planned, eager, lambda module: mean_square(module(x)).backward(), "as docs/limits.md says")


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_an_input_used_inside_adds_as_in_eager(budget: str) -> None:
    torch.manual_seed(0)
    case = Case("around", Around(Residual(), False), (torch.randn(32, 16),), {}, mean_square)
    planned, eager = pair(case, budget)
    both(planned, eager, case.step, "all uses")


class Tied(nn.Module):
    """Its parameter has two contributions to its gradient from the loss, and seven from the rest;
    what they add up to depends on the order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        used = [torch.tanh(x * self.weight + k / 3) for k in range(7)]
        return (used[0] + used[6]).mean(), torch.cat(used)


@pytest.mark.parametrize("loss", [0, 1])
def test_contributions_of_another_plan_add_as_in_eager(loss: int) -> None:
    torch.manual_seed(0)
    case = Case("tied", Tied(), (torch.randn(32, 16),), {}, lambda r: mean_square(r[1 - loss]))
    planned, eager = pair(case, "100%", options=rockplan.Options(differentiated=(loss,)))
    for step in range(2):
        both(planned, eager, case.step, f"step {step}")


def test_other_outputs_than_planned_without_replanning() -> None:
    planned, _ = pair(heads_case(), options=rockplan.Options(on_mismatch="error"))
    with pytest.raises(rockplan.BackwardError, match="differentiated"):
        mean_square(planned(SAMPLE)[0]).backward()


def test_a_recurrent_network_for_its_output_alone() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(16, 8, 2, dropout=0.2).train()
    case = Case("lstm", lstm, (torch.randn(6, 4, 16),), {}, lambda r: mean_square(r[0]))
    planned, eager = pair(case)
    train_side_by_side(case, planned, eager, steps=3)


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda y: y.sum(),
    "transposed": lambda y: y.t().contiguous().tanh().pow(2).sum(),
    "part of a larger gradient": lambda y: mean_square(torch.cat([y, torch.ones(32, 3)], 1)),
}


@pytest.mark.parametrize("kind", STRIDES)
def test_incoming_gradients_in_other_strides(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels look at strides, so the plan is made for those that come."""
    torch.manual_seed(0)
    case = Case(kind, Net().train(), (torch.randn(32, 16),), {}, STRIDES[kind])
    planned, eager = pair(case)
    train_side_by_side(case, planned, eager, steps=3)
    assert "in other strides" in caplog.text and "rockplan.solve(..., loss=...)" in caplog.text


@pytest.mark.parametrize("kind", STRIDES)
@pytest.mark.parametrize("has_sample", [True, False])
def test_gradients_of_a_known_loss_need_one_plan(kind: str, has_sample: bool) -> None:
    torch.manual_seed(0)
    case = Case(kind, Net().train(), (torch.randn(32, 16),), {}, STRIDES[kind])
    sample, options = (
        case.args if has_sample else None,
        dataclasses.replace(QUICK, on_mismatch="error"),
    )
    planned = rockplan.solve(case.model, sample, BUDGET, loss=case.loss, options=options)
    train_side_by_side(case, planned, copy.deepcopy(case.model), steps=3)
    (plan,) = planned.plans
    made = rockplan.plan(case.model, case.args, BUDGET, loss=case.loss, options=options)
    assert (made.graph_digest, made.budget_bytes) == (plan.graph_digest, plan.budget_bytes)


def test_replanning_under_the_autocast_of_the_forward() -> None:
    planned, eager = pair(heads_case())

    def use(module: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            result = module(SAMPLE)[0]
        mean_square(result.float()).backward()

    for step in range(2):
        both(planned, eager, use, f"step {step}")


class Shifted(nn.Module):
    """The gradient of its input is that of the sum, which is read three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 0.1
        return y.tanh() * y.sigmoid() + y.sin()


def test_gradients_inside_are_added_before_those_outside() -> None:
    torch.manual_seed(0)
    block = rockplan.solve(Shifted(), torch.randn(8, 16, requires_grad=True), "100%", options=QUICK)
    x = torch.randn(8, 16)
    found = []
    for module in (block, Shifted()):
        leaf = x.clone().requires_grad_()
        h = leaf * 2
        mean_square(torch.cat([module(h), h.exp(), h.cos()])).backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


class Readers(nn.Module):
    """Two products read the input, and one weight is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).tanh() * self.b(x) + self.a(x.sin())


def view_of_a_leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().view_as(x).requires_grad_()


GIVEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a leaf": lambda x: x,
    "computed": lambda x: x * 1.5,
    "a view": view_of_a_leaf,
}
"""Autocast keeps casts of leaves that are no views, and adds their gradients in 16 bits."""


@pytest.mark.parametrize("sample", GIVEN)
@pytest.mark.parametrize("sizes", [(), {0: (8, 64)}])
def test_autocast_casts_inputs_as_in_eager(sample: str, sizes: Any) -> None:
    options = dataclasses.replace(QUICK, check=True, sizes=sizes)
    x = torch.randn(32, 16, requires_grad=True)
    eager = Readers()
    with torch.autocast("cpu", torch.bfloat16):
        planned = rockplan.solve(copy.deepcopy(eager), GIVEN[sample](x), "min", options=options)

    def use(module: nn.Module) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            given = GIVEN[kind](leaf)
            result = module(given)
        return torch.autograd.grad(mean_square(result), [given, *module.parameters()])

    for kind, size in itertools.product(GIVEN, (32, 24)):
        leaf = x.detach()[:size].clone().requires_grad_()
        both(planned, eager, use, f"{kind}, {size}")


def test_autocast_casts_computed_parameters_as_in_eager() -> None:
    eager = Readers()
    with torch.autocast("cpu", torch.bfloat16):
        planned = rockplan.solve(copy.deepcopy(eager), torch.ones(4, 16), "min", options=QUICK)

    def use(give: Callable[[torch.Tensor], torch.Tensor], module: nn.Module) -> Any:
        values = {n: give(p.detach().requires_grad_()) for n, p in module.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16):
            result = torch.func.functional_call(module, values, SAMPLE)
        return torch.autograd.grad(mean_square(result), list(values.values()))

    for step, (kind, give) in enumerate([*GIVEN.items()] * 2):
        both(planned, eager, functools.partial(use, give), f"step {step}, {kind}")


class Momentum(nn.Module):
    """What the forward reads is what it changes. width: of what is read besides, and changed."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(4, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean.lerp_(y.detach().mean(0).unsqueeze(1), 0.1)
        return torch.tanh(y - self.mean.sum(1))


class Renorm(nn.Module):
    """Divides by the statistics that a batch norm keeps, after and before it has changed them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.linear = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x / self.norm.running_var
        y = self.norm(x)
        return self.linear(before + y / self.norm.running_var + self.norm.running_mean)


class Transposed(nn.Module):
    """A buffer that does not lie side by side is not copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(4, 2).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean.lerp_(y.detach()[:2], 0.1)
        return torch.tanh(y - self.mean.sum(0))


def discriminator(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(16, 32)), nn.LeakyReLU(0.2), norm(nn.Linear(32, 1)))


READ_AND_CHANGED: dict[str, Callable[[], nn.Module]] = {
    "momentum": Momentum,
    "statistics": Renorm,
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 8)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "spectral norm": lambda: discriminator(nn.utils.parametrizations.spectral_norm),
    "spectral norm by hook": lambda: discriminator(nn.utils.spectral_norm),
}


def momentum_case(make: Callable[[], nn.Module] = Momentum) -> Case:
    torch.manual_seed(0)
    x = torch.randn(512, 16, requires_grad=True)
    return Case("momentum", make().train(), (x,), {}, mean_square)


@pytest.mark.parametrize("budget", ["min", "100%"])
@pytest.mark.parametrize("kind", READ_AND_CHANGED)
def test_forwards_that_change_what_they_read_use_copies(kind: str, budget: str) -> None:
    case = momentum_case(READ_AND_CHANGED[kind])
    planned, eager = pair(case, budget)

    def use(module: nn.Module) -> None:
        result = module(*case.args)
        other = module(case.args[0] + 1)
        result.mean().backward(retain_graph=True)
        case.loss(other).backward()
        case.loss(result).backward(retain_graph=True)
        result.mean().backward()

    for step in range(3):
        both(planned, eager, use, f"step {step}")


def test_copies_of_buffers_are_within_the_budget() -> None:
    case = momentum_case(READ_AND_CHANGED["spectral norm"])
    planned = solve_case(case, "min")

    def twice() -> None:
        loss = case.loss(planned(*case.args))
        loss.backward(retain_graph=True)
        loss.backward()

    once_bytes, _ = rockplan.peak_live_bytes(lambda: case.step(planned), warmup=1)
    twice_bytes, _ = rockplan.peak_live_bytes(twice, warmup=1)
    assert once_bytes == planned.plan.peak_bytes
    assert twice_bytes <= planned.plan.budget_bytes


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "much to copy": lambda: Momentum(4096),
    "not side by side": Transposed,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_forward_that_cannot_run_again_says_so(kind: str) -> None:
    case = momentum_case(REFUSED[kind])
    planned, eager = pair(case)
    both(planned, eager, case.step, "as planned")
    loss = case.loss(planned(*case.args))
    loss.backward(retain_graph=True)
    with pytest.raises(rockplan.BackwardError, match="cannot run again"):
        loss.backward()


def test_a_forward_without_rerun_names_the_loss() -> None:
    case = momentum_case(REFUSED["much to copy"])
    case = dataclasses.replace(case, loss=torch.sum)
    planned, eager = pair(case)
    with pytest.raises(rockplan.BackwardError, match=r"strides.*loss=lambda y: y.sum\(\)"):
        case.step(planned)
    planned = rockplan.solve(eager, case.args, BUDGET, loss=case.loss, options=QUICK)
    both(planned, copy.deepcopy(eager), case.step, "as planned")


def test_root_hooks_and_parameter_hooks_run() -> None:
    case = net_case()
    planned, eager = pair(case)

    def use(module: nn.Module) -> list[Any]:
        seen: list[Any] = []
        handles = [
            module.register_forward_pre_hook(lambda m, a: seen.append("pre")),
            module.register_forward_hook(lambda m, a, r: r * 2),
            module.register_full_backward_hook(lambda m, a, b: seen.append(b[0].clone())),
            module.head.weight.register_hook(lambda g: g * 3),
            module.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append("bias")),
        ]
        case.step(module)
        for handle in handles:
            handle.remove()
        return seen

    both(planned, eager, use, "hooks")


@pytest.mark.parametrize("budget", [BUDGET, "100%"])
def test_second_backward_through_a_retained_graph(budget: str) -> None:
    case = net_case()
    planned, eager = pair(case, budget)

    def use(module: nn.Module) -> Any:
        result = module(*case.args)
        loss = case.loss(result)
        head = torch.autograd.grad(loss, module.head.weight, retain_graph=True)
        loss.backward(retain_graph=True)
        torch.rand(3)  # the draws of the forward are replayed, whatever happened since
        module(*case.args)
        (result[:2] * 3).sum().backward()
        return head

    for step in range(2):
        both(planned, eager, use, f"step {step}")


def test_a_second_backward_is_refused_as_in_eager() -> None:
    case = net_case()
    planned, eager = pair(case)
    for module in (planned, eager):
        torch.manual_seed(0)
        loss = case.loss(module(*case.args))
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    both(planned, eager, case.step, "after")


def test_second_backward_after_a_change_is_refused() -> None:
    case = net_case()
    planned = solve_case(case, BUDGET)
    loss = case.loss(planned(*case.args))
    loss.backward(retain_graph=True)
    with torch.no_grad():
        planned.first[0].weight.add_(1.0)
    with pytest.raises(rockplan.BackwardError, match="modified in place"):
        loss.backward()


def test_hooks_on_results() -> None:
    case = net_case()
    planned, eager = pair(case)

    def use(module: nn.Module) -> torch.Tensor:
        result = module(*case.args)
        result.register_hook(lambda g: g * 2)
        result.retain_grad()
        case.loss(result).backward()
        assert result.grad is not None
        return result.grad

    both(planned, eager, use, "hook on the result")


def test_double_backward_is_refused() -> None:
    case = net_case()
    planned = solve_case(case, BUDGET)
    loss = case.loss(planned(*case.args))
    with pytest.raises(rockplan.BackwardError, match="twice.*takes the first derivatives itself"):
        torch.autograd.grad(loss, list(planned.parameters()), create_graph=True)


class Force(nn.Module):
    """Takes the first derivative itself, as the refusal says."""

    def __init__(self, energy: nn.Module) -> None:
        super().__init__()
        self.energy = energy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force


def test_double_backward_inside_of_the_forward_is_planned() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16, requires_grad=True)
    layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    case = Case("force", Force(layers), (x,), {}, lambda force: force.square().sum())
    train_side_by_side(case, solve_case(case, BUDGET), twin(case))


class Sides(nn.Module):
    """The input's gradient is there before those of parameters that come later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = self.b(torch.tanh(self.a(SAMPLE)))
        return torch.tanh(self.c(x)) + torch.sigmoid(side)


@pytest.mark.parametrize(("build", "in_blocks"), [(Net, False), (Sides, False), (Sides, True)])
def test_gradients_of_inputs_and_parameters_apart_are_refused(
    build: Callable[[], nn.Module], in_blocks: bool
) -> None:
    """As schedules of pipelines with zero bubble ask for them."""
    stage, x = build().train(), SAMPLE.clone().requires_grad_()
    if in_blocks:
        blocks = [*stage.children()]
        rockplan.solve_blocks(stage, x, "min", blocks=blocks, loss=mean_square, options=QUICK)
    else:
        stage = rockplan.solve(stage, x, "min", options=QUICK)
    result = stage(x)
    with pytest.raises(rockplan.BackwardError, match="use 1F1B"):
        _, groups = stage_backward_input(
            [result], [torch.ones_like(result)], [x], stage.parameters()
        )
        stage_backward_weight(stage.parameters(), groups)
    result = stage(x)
    torch.autograd.grad(result.sum(), x)  # and of inputs alone they are there


def test_autograd_grad() -> None:
    case = net_case()
    planned, eager = pair(case)

    def use(module: nn.Module) -> Any:
        loss = case.loss(module(*case.args))
        return torch.autograd.grad(loss, [module.head.weight, module.first[0].bias])

    both(planned, eager, use, "autograd.grad")


def test_slices_that_nobody_asks_for_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node hands over the gradients of all of them."""
    case = mlp(depth=4, width=16)
    planned: Any = solve_case(case, "100%")
    code = planned._rockplan.latest.executable.code
    ran: list[int] = []
    assert code.groups == (range(len(code.handed)),)
    run = backward_pass.run_slices
    monkeypatch.setattr(backward_pass, "run_slices", lambda *a: (ran.extend(a[2]), run(*a))[1])
    torch.autograd.grad(case.loss(planned(*case.args)), planned[-1].weight)
    assert len(ran) < len(code.handed)
    ran.clear()
    case.loss(planned(*case.args)).backward(inputs=[planned[0].weight])
    assert ran == [*range(len(code.handed))]
    ran.clear()
    seen: list[int] = []
    planned[-1].weight.register_hook(lambda _: seen.append(len(ran)))
    case.loss(planned(*case.args)).backward()
    assert 0 < seen[0] < len(code.handed)  # a hook is called as soon as there is a gradient


@pytest.mark.parametrize("budget", ["min", "70%", "100%"])
def test_gradients_that_come_together_are_within_the_budget(budget: str) -> None:
    """Also where there are others, to which they are added."""
    case = mlp(depth=12, width=64, batch=40)
    planned = solve_case(case, budget)
    for _ in range(2):
        peak_bytes, _ = rockplan.peak_live_bytes(lambda: case.step(planned))
        assert peak_bytes <= planned.plan.peak_bytes


def test_anomaly_mode() -> None:
    case = net_case()
    planned, eager = pair(case)
    with torch.autograd.set_detect_anomaly(True):
        both(planned, eager, case.step, "anomaly mode")


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interruption_leaves_nothing_behind(phase: str, error: type[BaseException]) -> None:
    case = net_case()
    planned, eager = pair(case)
    both(planned, eager, case.step, "before")
    with pytest.raises(error):
        interrupted_step(case, planned, phase, error)
    planned.load_state_dict(eager.state_dict())
    planned.zero_grad()
    eager.zero_grad()
    both(planned, eager, case.step, "after")


def interrupted_step(
    case: Case, planned: nn.Module, phase: str, error: type[BaseException]
) -> None:
    """Fail in the middle of a phase: at a random draw, replayed in the backward phase."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Interrupt(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if "bernoulli" in str(func):
                raise error("interrupted")
            return func(*args, **(kwargs or {}))

    state = torch.get_rng_state()
    if phase == "forward":
        with Interrupt():
            case.step(planned)
    result = planned(*case.args)
    state = torch.get_rng_state()
    try:
        with Interrupt():
            case.loss(result).backward()
    finally:
        assert torch.equal(torch.get_rng_state(), state), "the replay was not undone"


def test_dropping_the_result_frees_what_was_saved() -> None:
    case = net_case()
    planned = solve_case(case, "100%")
    gc.collect()
    gc.disable()
    try:
        result = planned(*case.args)
        frame = weakref.ref(result.grad_fn.call)
        assert frame() is not None
        del result
        assert frame() is None, "a reference cycle keeps the frame alive"
    finally:
        gc.enable()


def test_live_bytes_stay_constant_over_many_steps() -> None:
    case = net_case()
    planned = solve_case(case, BUDGET)
    left = []
    for _ in range(3):

        def steps() -> None:
            for _ in range(30):
                result = planned(*case.args)
                case.loss(result).backward()

        left.append(rockplan.peak_live_bytes(steps, warmup=1))
    assert len(set(left)) == 1 and left[0][1] == 0


class OfExtreme(nn.Module):
    def __init__(self, extreme: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.extreme = extreme

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        return hidden - self.extreme(hidden)


@pytest.mark.parametrize("extreme", [torch.max, torch.min, torch.median, torch.nanmedian])
@pytest.mark.parametrize("last", [1.0, float("inf")])
def test_gradients_of_extremes_also_where_they_overflow(
    extreme: Callable[[torch.Tensor], torch.Tensor], last: float
) -> None:
    """Eager fills zeros; recorded under a mode it would multiply, and infinity makes NaN."""
    eager = OfExtreme(extreme)
    x = torch.randn(4, 8, requires_grad=True)
    planned = rockplan.solve(copy.deepcopy(eager), (x,), "min")
    tangent = torch.full((4, 8), -1.0)
    tangent[-1, -1] = last
    expected, found = (
        torch.autograd.grad(module(x), [x, *module.parameters()], tangent)
        for module in (eager, planned)
    )
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_a_batch_of_incoming_gradients_is_refused() -> None:
    planned, _ = pair(net_case(32))
    result = planned(SAMPLE)
    with pytest.raises(rockplan.BackwardError, match="is_grads_batched"):
        torch.autograd.grad(
            result, list(planned.parameters()), torch.ones(3, *result.shape), is_grads_batched=True
        )
