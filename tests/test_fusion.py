"""The pass from recorded runs to runs of kernels, and plans of them; nothing is compiled here."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import rockplan
from rockplan.errors import InvalidInput, MissingLibrary
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.costs.ruler import peak_live_bytes
from rockplan.graph_builder.fusion import inductor, kernels
from rockplan.graph_builder.fusion import kinds as kinds_of_kernels
from rockplan.graph_builder.fusion.dataflow import dataflow_of
from rockplan.graph_builder.fusion.fuse import Proposal, fused, proposed
from rockplan.graph_builder.fusion.parts import PartKind, parts_of
from rockplan.graph_builder.fusion.stored import COMPUTED
from rockplan.graph_builder.pipeline import lower
from rockplan.graph_builder.recorded.run import Capture
from rockplan.options import Options
from rockplan.values.graph import Kernel, Phase, TensorSpec, is_kernel, producers
from testing.models import Case, gpt2, llama, mean_square, resnet18, t5, unet
from testing.random_networks import network
from testing.zoo_cases import loss_of
from tests.kernels import distance, gradients, interpret, run, stack

TABLE = inductor.decompositions()
COMPILED = Options(compile=True, cache=False)


def recorded(case: Case) -> Capture:
    return capture(case.model, case.args, case.kwargs)


def kinds(made: Capture) -> dict[str, PartKind]:
    """Operator of each part of the forward phase -> its kind."""
    parts = parts_of(made, frozenset(), TABLE).parts
    return {p.call.op: p.kind for p in parts if p.phase is Phase.FORWARD}


def operators(proposal: Proposal) -> list[str]:
    """What runs, without views."""
    found = proposal.rewritten()
    values = found.values
    return [
        c.call.op
        for c in found.calls
        if not {values[r].storage for r in c.call.made} <= {values[v].storage for v in c.reads}
    ]


# Parts


def test_a_call_becomes_simpler_operators() -> None:
    found = kinds(run(lambda x: functional.softmax(x, -1), (4, 8)))
    assert found["aten.amax.default"] is found["aten.sum.dim_IntList"] is PartKind.REDUCTION
    assert found["aten.exp.default"] is PartKind.POINTWISE
    assert "aten._softmax.default" not in found


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x @ x, "aten.mm.default"),
        (lambda x: x * torch.rand_like(x), "aten.rand.default"),
        (lambda x: x.cumsum(0), "aten.cumsum.default"),
        (lambda x: torch.fft.fft(x).real, "aten._fft_r2c.default"),
        (lambda x: (x * 2).as_strided((4,), (1,)), "aten.as_strided.default"),
        (lambda x: x * (x.long() // x.long()), "aten.floor_divide.default"),
        (lambda x: x * (x.long() % x.long()), "aten.remainder.Tensor"),
        (lambda x: x * torch.fmod(x.long(), x.long()), "aten.fmod.Tensor"),
        (lambda x: x * x.to(torch.uint8).any(0), "aten.any.dim"),
        (lambda x: x * torch.nextafter(x.detach(), x.detach() + 1), "aten.nextafter.default"),
        (
            lambda x: x * torch.div(x.long(), x.long(), rounding_mode="floor"),
            "aten.div.Tensor_mode",
        ),
    ],
)
def test_what_is_not_fused(function: Callable[..., torch.Tensor], operator: str) -> None:
    assert kinds(run(function, (8, 8)))[operator] is PartKind.OPAQUE


def test_divisions_that_cannot_fail_are_fused() -> None:
    found = kinds(run(lambda x: x * (x.long() // 2) * (x % (x + 1)), (8, 8)))
    assert PartKind.OPAQUE not in found.values()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sigmoid().amax(-1),
        lambda x: x.sigmoid().amin(-1),
        lambda x: torch.maximum(x.sigmoid(), x.sin()),
    ],
)
def test_numbers_that_have_to_be_equal_are_stored(function: Callable[..., torch.Tensor]) -> None:
    """A kernel would compare what it computes itself, unrounded, with what was stored."""
    parts = parts_of(run(function, (8, 8)), frozenset(), TABLE).parts
    found = {p.call.op: p.kind for p in parts if p.phase is Phase.BACKWARD}
    assert found["aten.eq.Tensor"] is PartKind.OPAQUE


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: functional.cross_entropy(x, torch.arange(8) % 5),
    "ignored": lambda x: functional.cross_entropy(x, torch.tensor([1, -100] * 4), reduction="sum"),
    "weights": lambda x: functional.cross_entropy(
        x, torch.arange(8) % 5, weight=torch.arange(1.0, 6)
    ),
    "smoothed": lambda x: functional.cross_entropy(x, torch.arange(8) % 5, label_smoothing=0.1),
    "images": lambda x: functional.cross_entropy(
        x.view(2, 5, 2, 2), torch.arange(8).view(2, 2, 2) % 5, reduction="none"
    ).sum(),
    "one row": lambda x: functional.nll_loss(x[0], torch.tensor(3)),
    "one class": lambda x: functional.nll_loss(x[:, :1], torch.zeros(8, dtype=torch.long)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_losss_gradient_is_computed_element_by_element(name: str) -> None:
    """A scatter would need the table in memory; the bits are those of one."""
    case = Case("loss", _Loss(LOSSES[name]), (torch.randn(8, 5),), {}, lambda loss: loss)
    made = capture(case.model, case.args, {})
    parts = parts_of(made, frozenset(), TABLE).parts
    backward = {p.call.op: p.kind for p in parts if p.phase is Phase.BACKWARD}
    assert backward["aten.where.self"] is PartKind.POINTWISE
    assert not any(op.startswith(("aten.scatter", "aten.nll_loss")) for op in backward)
    expected = gradients(case, case.model)
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        planned = rockplan.solve(case.model, case.args, "100%", options=COMPILED)
        assert distance(gradients(case, planned), expected) < 1e-6


class _Loss(nn.Module):
    def __init__(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale, self.loss = nn.Parameter(torch.rand(5)), loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss((x * self.scale).sin())


def test_unchecked_indices_are_scattered_by_the_operator() -> None:
    """It refuses those out of range, which a comparison would not find."""

    def chosen(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x * torch.zeros_like(x).scatter(1, index, 1.0)

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return chosen((x * self.w).sin(), index)

    sample = (torch.randn(8, 5), torch.arange(8).view(8, 1) % 5)
    assert kinds(capture(Chosen(), sample, {}))["aten.scatter.value"] is PartKind.OPAQUE
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        planned = rockplan.solve(Chosen(), sample, "100%", options=COMPILED)
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        planned(sample[0], sample[1] + 5)


def test_nothing_is_fused_before_it_is_written() -> None:
    def late(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = y.exp()  # of what is there now
        y.add_(1)
        return z + y.cos()

    found = kinds(run(late, (8,)))
    assert found["aten.exp.default"] is found["aten.sin.default"] is PartKind.OPAQUE
    assert found["aten.cos.default"] is PartKind.POINTWISE


def test_buffers_that_change_are_not_read_by_kernels() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.seen.exp()
            self.seen += 1
            result: torch.Tensor = (before * self.w * x).sin()
            return result

    found = kinds(capture(Counting(), (torch.randn(8),), {}))
    assert found["aten.exp.default"] is PartKind.OPAQUE
    assert found["aten.sin.default"] is PartKind.POINTWISE


def test_a_decomposition_that_fails_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("broken")

    table = {**TABLE, torch.ops.aten.silu.default: broken}
    parts = parts_of(run(functional.silu, (8, 8)), frozenset(), table).parts
    assert parts[0].kind is PartKind.OPAQUE
    assert "aten.silu.default is not fused" in caplog.text


def test_what_kernels_never_compute_is_silently_opaque(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PyTorch's own rule for products of groups refuses float32, which the product computes."""

    def experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, weights, offs=torch.tensor([3, 8], dtype=torch.int32)) * 2

    found = kinds(run(experts, (8, 16), (2, 16, 16)))
    assert found["aten._grouped_mm.default"] is PartKind.OPAQUE
    assert found["aten.mul.Tensor"] is PartKind.POINTWISE
    assert "is not fused" not in caplog.text


# What is stored, and which kernels there are


def test_a_layer_has_the_expected_kernels() -> None:
    case = stack(layers=3)
    found = Counter(operators(proposed(recorded(case), False, TABLE, frozenset())))
    of_kernels = sorted(n for op, n in found.items() if is_kernel(op))
    assert found["aten.mm.default"] == 3 * 9 + 2 and found["aten.addmm.default"] == 1
    # Once a layer: norm, gated product, its gradient; that of the norm, with the sum of residuals,
    # for the first layer without; the gradient of the head.
    assert of_kernels == [1, 1, 2, 3, 3, 3]


def test_values_between_matrix_products_are_not_stored() -> None:
    """Of a gated product and its gradient only what matrix products read is made."""

    def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (functional.silu(x @ gate) * (x @ up)) @ up.t()

    proposal = proposed(run(gated, (64, 32), (32, 48), (32, 48)), False, TABLE, frozenset())
    made = [(one.group.phase, len(one.results)) for one in proposal.fused]
    assert made == [(Phase.FORWARD, 1), (Phase.BACKWARD, 2)]
    stored = {s for one in proposal.fused for s in (*one.group.reads, *one.group.targets)}
    assert len(stored) == 6  # gate, up, their product, its gradient, those of gate and up


@pytest.mark.parametrize("is_fast", [False, True])
def test_masks_are_stored_where_writing_them_is_fast(
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of where an activation was cut off, which several kernels of the backward phase ask."""
    if is_fast:
        monkeypatch.setattr("rockplan.graph_builder.fusion.stored.BOOL_BYTES", {})
    proposal = proposed(recorded(unet(levels=3, width=16, batch=4)), False, TABLE, frozenset())
    written = [spec for one in proposal.fused for spec in one.kernel.result_specs]
    assert any(spec.dtype == "torch.bool" for spec in written) == is_fast


def test_statistics_are_stored_once() -> None:
    """The norm in forward makes its statistic, which the norm in backward reads."""
    proposal = proposed(recorded(stack(layers=1)), False, TABLE, frozenset())
    norm = proposal.fused[0]
    sizes = [proposal.flow.size_bytes[t] for t in norm.group.targets]
    assert min(sizes) * 8 <= max(sizes)
    statistic = norm.group.targets[sizes.index(min(sizes))]
    readers = [one for one in proposal.fused if statistic in one.group.reads]
    assert readers and all(one.group.phase is Phase.BACKWARD for one in readers)


def test_kernels_read_earlier_results_and_feed_later_ones() -> None:
    """Tensor by tensor, views included."""
    for case in (stack(2, dropout=0.1), gpt2(attention="eager"), llama()):
        fusion = proposed(recorded(case), False, TABLE, frozenset()).rewritten()
        # What is changed in place is there before.
        results = [{*c.call.results} - {None, *c.writes} for c in fusion.calls]
        there = set(range(len(fusion.values))) - set().union(*results)
        for call, made in zip(fusion.calls, results, strict=True):
            assert set(call.reads) <= there and not made & there
            there |= made
        needed = {v for c in fusion.calls for v in c.reads}
        needed |= {o.value for o in fusion.outputs} | {g for _, g in fusion.gradients}
        storages = {fusion.values[v].storage for v in needed if v is not None}
        of_kernels = {v for c in fusion.calls if is_kernel(c.call.op) for v in c.call.results}
        assert {fusion.values[v].storage for v in of_kernels if v is not None} <= storages


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).as_strided((64,), (1,)).sum(),
        lambda x: ((y := x * 2).as_strided((64,), (1,)) * y.view(64)).sum(),
    ],
)
def test_reads_through_views_that_no_kernel_makes(
    function: Callable[..., torch.Tensor],
) -> None:
    """What makes it runs before the view, what reads it after."""
    made = proposed(run(function, (8, 8)), False, TABLE, frozenset()).rewritten()
    names = [c.call.op.split(".")[1] for c in made.calls if c.phase is Phase.FORWARD]
    assert names[:2] == ["mul", "as_strided"] and "sum" in names[2]


def test_kinds_do_not_depend_on_layers() -> None:
    def names(layers: int) -> set[str]:
        proposal = proposed(recorded(stack(layers)), False, TABLE, frozenset())
        return {one.kernel.op for one in proposal.fused}

    assert names(3) == names(8)


def test_kernels_of_recurrences_begin_past_step_one() -> None:
    """Each would compute all steps before it."""

    def recurrence(steps: int) -> list[Kernel]:
        def of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            h, made = w, []
            for step in range(steps):
                h = (h.sigmoid() * w + x[step].sin()).tanh() * h
                made.append(h @ w)
            return torch.stack(made)

        made = proposed(run(of, (steps, 4), (4,)), False, TABLE, frozenset())
        return [one.kernel for one in made.fused]

    few, many = (recurrence(steps) for steps in (20, 60))
    computed = [sum(len(k.calls) for k in kernels) for kernels in (few, many)]
    assert computed[1] < 4 * computed[0]
    assert max(len(k.calls) for k in many) < 200
    assert len({k.op for k in many}) < 1.5 * len({k.op for k in few})


def test_no_kernel_exceeds_what_a_compiler_takes() -> None:
    """Of a long chain, and of many results side by side."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(150):
            x = x.sin() * 2
        return x

    def many(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([(p.sin() * 2).exp().cos() for p in parts])

    for function, shapes in ((chain, [(4, 4)]), (many, [(4, 4)] * 40)):
        found = proposed(run(function, *shapes), False, TABLE, frozenset()).fused
        assert max(len(one.kernel.calls) for one in found) <= 3 * COMPUTED, function


def test_kernels_differ_by_all_that_they_compute() -> None:
    def name(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> str:
        proposal = proposed(run(function, *shapes), False, TABLE, frozenset())
        return proposal.fused[0].kernel.op

    base = name(lambda x: (x * 2).exp().sin(), (8, 8))
    assert base == name(lambda x: (x * 2).exp().sin(), (8, 8))
    assert base != name(lambda x: (x * 2.0).exp().sin(), (8, 8))
    assert base != name(lambda x: (x * 3).exp().sin(), (8, 8))
    assert base != name(lambda x: (x * 2).exp().sin(), (8, 9))
    assert base != name(lambda x: (x.t() * 2).exp().sin(), (8, 8))


def test_a_kernel_says_what_it_computes() -> None:
    kernel = proposed(run(lambda x: (x * 2).exp(), (8,)), False, TABLE, frozenset()).fused[0].kernel
    first, *lines = str(kernel).split("\n")
    assert first == f"{kernel.name}(float32[8]) -> %2"
    assert lines == [
        "  %1 = aten.mul.Tensor(%0, 2)",
        "  %2 = aten.exp.default(%1)",
    ]


def test_what_backward_alone_needs_runs_there() -> None:
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward((x.sin() * 2).exp())
            return x.cos() + 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (saved,) = ctx.saved_tensors
            return gradient @ saved

    made = proposed(run(Late.apply, (8, 8)), False, TABLE, frozenset())
    assert [one.group.phase for one in made.fused] == [Phase.FORWARD, Phase.BACKWARD]


# Plans of kernels


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    yield interpret(monkeypatch)


CASES: dict[str, Callable[[], Case]] = {
    "stack": lambda: stack(3, dropout=0.1),
    "gpt2": lambda: gpt2(attention="eager"),
    "llama": llama,
}


def test_one_of_an_operators_two_results_is_stored(interpreted: list[str]) -> None:
    """The backward pass computes again which element is the largest, and reads the largest."""

    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.inner(x))
            z = y * y.max(1, keepdim=True).values
            return z + z.tanh()

    torch.manual_seed(0)
    case = Case("largest", Largest(), (torch.randn(8, 64, 32),), {}, mean_square)
    planned = rockplan.solve(case.model, case.args, "100%", options=COMPILED)
    assert distance(gradients(case, planned), gradients(case, case.model)) < 1e-5
    for kernel in rockplan.plan_of(planned).graph.kernels:
        made = [r for call in kernel.calls for r in call.made]
        assert len(set(made)) == len(made) and not set(made) & set(range(len(kernel.inputs)))
    assert any(None in c.results for k in rockplan.plan_of(planned).graph.kernels for c in k.calls)


def test_what_each_layer_makes_anew_is_made_once(interpreted: list[str]) -> None:
    """But for what the caller gets, or what is changed later."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 8))
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            masks = []
            for number, layer in enumerate(self.layers):
                masks.append(torch.where(self.table > 0, self.table.exp(), 0.5))
                if number == 3:
                    masks[3].t().index_fill_(0, torch.tensor([1]), 2)
                x = layer(x) @ masks[number]
            return x, masks[2]

    model = Masked()
    case = Case(
        "masked", model, (torch.randn(4, 8),), {}, lambda made: sum(y.tanh().sum() for y in made)
    )
    made = fused(capture(model, case.args, {}), False)
    calls = [c.call for c in made.calls if is_kernel(c.call.op) and c.phase is Phase.FORWARD]
    assert len(calls) == 2 and calls[0].args == calls[1].args  # operators make what is changed
    planned = rockplan.solve(model, case.args, "100%", options=COMPILED)
    assert distance(gradients(case, planned), gradients(case, model)) < 1e-5


def test_what_one_operator_reads_twice_is_made_twice(interpreted: list[str]) -> None:
    """An LSTM of oneDNN needs more where its two states share memory."""
    model = nn.LSTM(3, 3, 2)
    case = Case("states", model, (torch.randn(2, 4, 3),), {}, lambda made: made[0].square().mean())
    planned: Any = rockplan.solve(model, case.args, "100%", options=COMPILED)
    graph = rockplan.plan_of(planned).graph
    assert sum(not n.reads for n in graph.forward) == 2
    assert peak_live_bytes(lambda: case.step(planned)).peak_bytes <= planned.plan.peak_bytes


def test_what_forward_operators_read_is_made_there(interpreted: list[str]) -> None:
    """Though the backward pass alone needs what the operator makes."""

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward((x.sin() * 2).exp().cumsum(0))
            return x.cos() + 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (saved,) = ctx.saved_tensors
            return gradient @ saved

    graph = lower(fused(run(Late.apply, (8, 8)), False), 0).graph
    made = producers(graph)
    assert [n.phase for n in graph.nodes if "exp" in n.name] == [Phase.FORWARD]
    assert all(made[d] < n.index for n in graph.nodes for d in n.reads if d in made)


@pytest.mark.parametrize("name", CASES)
def test_plans_compute_what_the_module_does(name: str, interpreted: list[str]) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    expected = gradients(case, case.model)
    state = torch.get_rng_state()
    kept = rockplan.solve(
        case.model, case.args, "100%", sample_kwargs=case.kwargs, options=COMPILED
    )
    assert distance(gradients(case, kept), expected) < 1e-5
    assert torch.equal(torch.get_rng_state(), state)
    half = rockplan.solve(case.model, case.args, "70%", sample_kwargs=case.kwargs, options=COMPILED)
    for one, other in zip(gradients(case, half), gradients(case, kept), strict=True):
        assert torch.equal(one, other)
    assert interpreted and len(interpreted) == len(set(interpreted))


@pytest.mark.parametrize(
    ("make", "kernel"),
    [(resnet18, "rockplan.le_where_sum_sub_"), (t5, "rockplan.ge_where_add_amax_")],
)
def test_kinds_of_networks(make: Callable[[], Case], kernel: str, interpreted: list[str]) -> None:
    """Convolutions with changes in place and running statistics; encoders beside decoders."""
    torch.manual_seed(0)
    case = make()
    state = copy.deepcopy(case.model.state_dict())
    expected = gradients(case, case.model)
    buffers = [b.clone() for b in case.model.buffers()]
    case.model.load_state_dict(state)
    planned = rockplan.solve(
        case.model, case.args, "100%", sample_kwargs=case.kwargs, options=COMPILED
    )
    assert distance(gradients(case, planned), expected) < 1e-5
    assert all(map(torch.equal, case.model.buffers(), buffers))
    # The gradient of a normalization by its batch, below that of the activation; an attention with
    # a bias of positions.
    assert any(op.startswith(kernel) for op in interpreted)


# Networks that eager execution trains, without a cumprod, whose gradient is refused before torch
# 2.13.
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_networks_of_many_operators(seed: int, interpreted: list[str]) -> None:
    torch.manual_seed(seed)
    model, inputs = network(random.Random(seed))
    state = copy.deepcopy(model.state_dict())
    found = []
    for planned in (False, True):
        model.load_state_dict(state)
        module = rockplan.solve(model, inputs, "100%", options=COMPILED) if planned else model
        model.zero_grad()
        torch.manual_seed(1)
        results = module(*(x.detach().requires_grad_(x.requires_grad) for x in inputs))
        loss_of(results).backward()
        tensors = [t.detach() for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
        found.append((tensors, [p.grad for p in model.parameters() if p.grad is not None]))
    for one, other in zip(found[1], found[0], strict=True):
        assert distance(one, other) < 1e-4
    assert interpreted


def test_what_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan is that without kernels, and each kind is named once. The compiler does work."""
    case = stack(3)
    asked = interpret(monkeypatch, fails=lambda kernel: len(kernel.calls) > 1)
    plan = rockplan.plan(case.model, case.args, "70%", options=COMPILED)
    asked = asked[:-1]
    plain = rockplan.plan(case.model, case.args, "70%", options=Options(cache=False))
    assert plan.graph_digest == plain.graph_digest and plan.compiled == ""
    said = "cannot be compiled (a test says so); its operators run one by one"
    assert caplog.text.count(said) == len(set(asked)) > 1


@pytest.mark.parametrize("make", [stack, lambda: gpt2(attention="eager")])
def test_a_compiler_that_makes_nothing_is_missing(
    make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason, as eager operators would not be what was asked for."""
    case = make()
    interpret(monkeypatch, fails=lambda kernel: True)
    with pytest.raises(MissingLibrary, match="compiles nothing here: a test says so.*leave"):
        rockplan.plan(case.model, case.args, "min", sample_kwargs=case.kwargs, options=COMPILED)


def test_some_that_cannot_be_compiled_leave_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    case = stack(2)
    interpret(monkeypatch, fails=lambda kernel: "rsqrt" in kernel.name)
    planned = rockplan.solve(case.model, case.args, "min", options=COMPILED)
    names = [kernel.name for kernel in rockplan.plan_of(planned).graph.kernels]
    assert names and not any("rsqrt" in name for name in names)
    assert distance(gradients(case, planned), gradients(case, case.model)) < 1e-5


def test_a_kernel_that_fails_takes_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each waits for its own compilers, which other threads do as ever."""
    from torch._inductor.async_compile import AsyncCompile

    compilers: Any = AsyncCompile
    functions = (torch.exp, torch.cos, torch.tan)
    made = [
        proposed(run(lambda x, f=f: f(x * 2), (8,)), False, TABLE, frozenset()) for f in functions
    ]
    first, broken, last = (proposal.fused[0].kernel for proposal in made)
    waited: list[tuple[str, int]] = []

    def wait(one: Any, scope: dict[str, Any]) -> None:
        waited.append((scope["name"], threading.get_ident()))
        if scope["name"] == broken.name:
            raise RuntimeError("no")

    def begun(kernel: Kernel) -> Any:
        compilers.wait(None, {"name": kernel.name})
        other = threading.Thread(target=compilers.wait, args=(None, {"name": "other"}))
        other.start()
        other.join()
        assert waited[-1][0] == "other"
        return functools.partial(kernels.computed, kernel)

    monkeypatch.setattr(compilers, "wait", wait)
    monkeypatch.setattr(inductor, "_begun", begun)
    found = inductor.compiled((first, broken, last))
    assert found[broken.op] == "RuntimeError: no"
    assert callable(found[first.op]) and callable(found[last.op])
    here = [name for name, thread in waited if thread == threading.get_ident()]
    assert here == [first.name, broken.name, last.name]


def test_a_plan_in_a_file_is_compiled_again(interpreted: list[str], tmp_path: Path) -> None:
    case = stack(2)
    planned = rockplan.solve(case.model, case.args, "70%", options=COMPILED)
    rockplan.save_plan(planned, tmp_path / "plan.json")
    assert "aten" not in (tmp_path / "plan.json").read_text()
    (stored,) = rockplan.read_plans(tmp_path / "plan.json")
    assert stored.compiled == "yes" and "compiled kernels" in str(stored)
    loaded = rockplan.load(case.model, case.args, tmp_path / "plan.json")
    assert rockplan.plan_of(loaded).graph == rockplan.plan_of(planned).graph
    with pytest.raises(rockplan.PlanMismatch):
        other = stack(2, width=48)
        rockplan.load(other.model, other.args, tmp_path / "plan.json")


def test_files_where_some_calls_have_no_kernels(interpreted: list[str], tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, is_plain: bool) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y if is_plain else (y * 2).exp().sin()

    model, x = Two(), torch.randn(8, 16)
    planned: Any = rockplan.solve(model, (x, False), "100%", options=COMPILED)
    planned(x, True)
    assert [plan.compiled for plan in planned.plans] == ["yes", ""]
    rockplan.save_plan(planned, tmp_path / "plan.json")
    for is_plain in (False, True):
        loaded = rockplan.load(model, (x, is_plain), tmp_path / "plan.json")
        assert bool(rockplan.plan_of(loaded).graph.kernels) is not is_plain


def test_plans_are_copied_and_pickled(
    interpreted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = stack(2)
    planned = rockplan.solve(case.model, case.args, "70%", options=COMPILED)
    expected = case.loss(planned(*case.args))
    copied, pickled = copy.deepcopy(planned), pickle.dumps(planned)
    before = len(interpreted)
    monkeypatch.setattr(kernels, "_functions", {})  # as in another process
    for other in (copied, pickle.loads(pickled)):
        assert torch.equal(case.loss(other(*case.args)), expected)
    assert set(interpreted[before:]) == {op for op in interpreted[:before] if "_over_" not in op}


def test_check_compares_the_kernels_and_states_distances(
    interpreted: list[str],
) -> None:
    case = stack(2, dropout=0.1)
    options = Options(compile=True, cache=False, check=True)
    checked = rockplan.plan_of(
        rockplan.solve(case.model, case.args, "70%", options=options)
    ).checked
    start = "equal to the same kernels where nothing runs again bit for bit on the sample; "
    assert checked.startswith(f"{start}gradients differ from eager's by ")
    assert float(checked.split(" by ")[1].split()[0]) < 1e-5


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda results: [r * 1.01 for r in results], "results differ by .*e-0"),
        (lambda results: [r * float("nan") for r in results], "results differ by nan"),
        (
            lambda results: torch.rand(1) * 0 and results or results,
            "generator states differ by inf",
        ),
    ],
)
def test_check_refuses_kernels_that_are_wrong(
    wrong: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interpret(monkeypatch)
    computed = kernels.computed
    monkeypatch.setattr(kernels, "computed", lambda kernel, given: wrong(computed(kernel, given)))
    case, options = stack(1), Options(compile=True, cache=False, check=True)
    with pytest.raises(rockplan.CheckFailed, match=f"too far from eager: .*{says}"):
        rockplan.solve(case.model, case.args, "100%", options=options)


def test_check_knows_gradients_zero_but_for_rounding(interpreted: list[str]) -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) * 2).softmax(-1)

    options = Options(compile=True, cache=False, check=True)
    planned = rockplan.solve(Shares(), (torch.randn(8, 16),), "100%", options=options)
    assert "gradients differ from eager's by" in rockplan.plan_of(planned).checked


def test_check_tells_rounding_from_wrong_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients of shares that are summed up are zero, whatever comes from above, but for
    roundings, which kernels have at other places."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) * 2).softmax(-1).sum(-1)

    interpret(monkeypatch)
    computed, error = kernels.computed, 1e-7
    monkeypatch.setattr(
        kernels,
        "computed",
        lambda kernel, given: [r * (1 + error) for r in computed(kernel, given)],
    )
    torch.manual_seed(0)
    model, x = Sums(), torch.randn(64, 16)
    before = copy.deepcopy(model.state_dict())
    options = Options(compile=True, cache=False, check=True)
    with pytest.warns(UserWarning, match="so is eager from itself where parameters and inputs"):
        rockplan.solve(model, (x,), "100%", options=options)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    monkeypatch.setattr(kernels, "_functions", {})
    error = 0.01
    with pytest.raises(rockplan.CheckFailed, match="gradients differ by"):
        rockplan.solve(model, (x,), "100%", options=options)


def test_kernels_are_the_same_under_the_callers_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autocast does is in the capture; decompositions and compilers run without it."""
    seen: list[bool] = []

    def begun(kernel: Kernel) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return functools.partial(kernels.computed, kernel)

    monkeypatch.setattr(inductor, "_begun", begun)
    low, found = torch.bfloat16, []
    made = run(lambda x: functional.mse_loss(x.to(low).sin(), x.to(low).cos()), (8, 8))
    for enabled in (False, True):
        monkeypatch.setattr(kernels, "_functions", {})
        with torch.autocast("cpu", low, enabled=enabled):
            found.append(fused(made, False).kernels)
    assert found[0] == found[1] and "sin_cos_sub" in found[0][0].name
    assert seen == [False] * 2 * len(found[0])


def test_several_backward_patterns(interpreted: list[str]) -> None:
    """Another result is differentiated than was planned for: what then runs is compiled, too."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = functional.gelu(self.a(x)).sin()
            return h.exp(), functional.silu(self.b(h))

    model, x = Two(), torch.randn(8, 16)
    options = Options(compile=True, cache=False, differentiated=(0, 1))
    planned = rockplan.solve(model, x, "min", options=options)
    for which in ((0, 1), (0,), (1,)):
        found = []
        for module in (model, planned):
            model.zero_grad()
            results = module(x)
            sum(results[i].square().sum() for i in which).backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        assert distance(found[1], found[0]) < 1e-5


class Tied(nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + functional.gelu(layer(functional.layer_norm(x, (16,))))
        result: torch.Tensor = self.head(x)
        return result


def images_in_channels_last() -> tuple[nn.Module, torch.Tensor]:
    layers = [m for _ in range(3) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))]
    model = nn.Sequential(*layers[:2], nn.SiLU(), *layers[2:4], nn.GELU(), *layers[4:])
    layout = torch.channels_last
    return model.to(memory_format=layout), torch.randn(4, 8, 12, 12).to(memory_format=layout)


TRAINED: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "tied weights": lambda: (Tied(), torch.randint(0, 32, (8, 12))),
    "batch norm in channels_last": images_in_channels_last,
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_training_with_gradients_that_accumulate(
    name: str, autocast: bool, interpreted: list[str]
) -> None:
    """Two steps of two batches each: the bits of the kernels of which none runs again."""
    torch.manual_seed(0)
    model, x = TRAINED[name]()
    modules = [model, copy.deepcopy(model), copy.deepcopy(model)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for place, budget in ((1, "100%"), (2, "min")):
            modules[place] = rockplan.solve(modules[place], x, budget, options=COMPILED)
    assert modules[2].plan.overhead > 0
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in modules]
    for _ in range(2):
        for module, optimizer in zip(modules, optimizers, strict=True):
            optimizer.zero_grad()
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    result = module(x)
                mean_square(result.float()).backward()
        grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in modules]
        for one, other in zip(grads[2], grads[1], strict=True):
            assert torch.equal(one, other)
        assert all(map(torch.equal, modules[2].buffers(), modules[1].buffers()))
        assert distance(grads[2], grads[0]) < (0.05 if autocast else 1e-5)
        for optimizer in optimizers:
            optimizer.step()
    assert interpreted


def test_calls_of_other_sizes_run_the_known_plan(interpreted: list[str]) -> None:
    case = stack(3)
    planned: Any = rockplan.solve(case.model, case.args, "70%", options=COMPILED)
    other = replace(case, args=(torch.randn(384, 32),))
    assert distance(gradients(other, planned), gradients(other, case.model)) < 1e-5
    first, second = planned.plans
    assert f"from those of graph {first.graph_digest[:12]}" in second.profile_source
    assert second.graph.kernels and second.graph.kernels != first.graph.kernels


def test_kernels_of_a_plan_are_compiled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that unpickles it."""
    case = stack(2)
    interpret(monkeypatch)
    pickled = pickle.dumps(rockplan.solve(case.model, case.args, "70%", options=COMPILED))
    interpret(monkeypatch)
    together: list[int] = []
    compiled: Any = inductor.compiled
    monkeypatch.setattr(
        inductor, "compiled", lambda wanted: (together.append(len(wanted)), compiled(wanted))[1]
    )
    planned: Any = pickle.loads(pickled)
    planned(*case.args)
    assert [n for n in together if n] == [len(planned.plan.graph.kernels)]


def test_settings_of_inductor_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, config

    kernel = proposed(run(lambda x: (x * 2).exp(), (8,)), True, TABLE, frozenset()).fused[0].kernel
    seen: list[tuple[bool, ...]] = []

    def compiling(*args: Any, **kwargs: Any) -> Any:
        seen.append(
            (config.graph_partition, config.triton.cudagraphs, config.emulate_precision_casts)
        )
        return functools.partial(kernels.computed, kernel)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compiling)
    with config.patch({"graph_partition": True, "triton.cudagraphs": True}):
        assert callable(inductor.compiled((kernel,))[kernel.op])
    assert seen == [(False, False, True)]


@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (lambda x, i: (x * 2).exp().gather(1, i) + 1, (0, 15), (-1, 16)),
        (lambda x, i: (x * 2).exp()[i[:, 0]] + 1, (-8, 7), (-9, 8)),
        (
            lambda x, i: functional.cross_entropy(x * 2, functional.pad(i[:, 0], (0, 1))[1:]),
            (0, 15, -100),
            (-1, 16),
        ),
    ],
)
def test_indices_are_looked_at_before_a_kernel_runs(
    function: Callable[..., torch.Tensor],
    good: tuple[int, ...],
    bad: tuple[int, ...],
    interpreted: list[str],
) -> None:
    class Of(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return function(x * self.w, i)

    x, i = torch.randn(8, 16), torch.zeros(8, 3, dtype=torch.int64)
    planned = rockplan.solve(Of(), (x, i), "100%", options=COMPILED)
    found = {c.op for k in rockplan.plan_of(planned).graph.kernels for c in k.calls}
    assert found & {"aten.gather.default", "aten.index.Tensor"}
    for index in good:
        i[3, 0] = index
        torch.testing.assert_close(planned(x, i), Of()(x, i))
    for index in bad:
        i[3, 0] = index
        with pytest.raises(IndexError, match=f"index {index} is out of bounds for dimension"):
            planned(x, i)


def test_indices_of_larger_tensors_stay_outside_kernels(
    interpreted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def best(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).exp()
        return y.gather(1, y.argmax(1, keepdim=True)) + 1

    calls = [c.call.op for c in fused(run(best, (8, 16)), False).calls]
    assert "aten.gather.default" in calls
    assert "its indices are made of what is larger than they are" in caplog.text


def test_what_reads_more_than_an_operator_takes(
    interpreted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Stays as it is; other kernels do not grow to that."""
    made = fused(run(lambda *x: torch.cat([one * 2 for one in x]), *[(4, 4)] * 65), False)
    assert "it reads 65 tensors, of 64 at most" in caplog.text
    assert "aten.cat.default" in [c.call.op for c in made.calls]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, *by: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*by)
            return x + y

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            by = ctx.saved_tensors
            of_each = (gradient.exp() * torch.stack(by[i::2]).sin().sum() for i in (0, 1))
            return (*of_each, *[None] * len(by))

    made = fused(run(Scaled.apply, (512,), (512,), *[()] * 66), False)
    assert made.kernels and all(len(k.inputs) <= 64 for k in made.kernels)


def test_the_code_calls_kernels_by_their_operators(interpreted: list[str]) -> None:
    case = stack(1)
    planned = rockplan.solve(case.model, case.args, "100%", options=COMPILED)
    code = rockplan.code_of(planned)
    (norm,) = [k.name for k in rockplan.plan_of(planned).graph.kernels if "rsqrt" in k.name][:1]
    assert f"= rockplan_{norm}([" in code and "# layers.0.norm" in code


# Errors


def test_options() -> None:
    assert Options(compile="near").compile == "near"
    with pytest.raises(InvalidInput, match="compile is 'far'"):
        Options(compile="far")  # type: ignore[arg-type]


def test_without_a_compiler_the_error_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def none() -> str:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    case = stack(1)
    with pytest.raises(MissingLibrary, match=r"install g\+\+"):
        rockplan.plan(case.model, case.args, "min", options=COMPILED)


def test_without_triton_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import _triton

    monkeypatch.setattr(_triton, "has_triton_package", lambda: False)
    with pytest.raises(MissingLibrary, match="pip install triton"):
        inductor.check_compiler("cuda")


def test_other_devices_are_refused() -> None:
    with pytest.raises(InvalidInput, match="not for mps"):
        inductor.check_compiler("mps")


def test_a_compiler_that_is_interrupted_leaves_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._guards import TracingContext
    from torch._inductor import compile_fx, config
    from torch._inductor.async_compile import AsyncCompile

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        assert config.emulate_precision_casts and TracingContext.try_get() is not None
        raise KeyboardInterrupt

    case = stack(1)
    monkeypatch.setattr(kernels, "_functions", {})  # as in a process that has compiled nothing
    wait = AsyncCompile.wait
    before = copy.deepcopy(case.model.state_dict())
    monkeypatch.setattr(compile_fx, "compile_fx_inner", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fused(recorded(case), keeps_roundings=True)
    assert AsyncCompile.wait is wait
    assert not config.emulate_precision_casts and TracingContext.try_get() is None
    after = case.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert type(case.model.layers) is nn.ModuleList and case.model.training


def test_kernels_are_measured_as_code_calls_them(
    interpreted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the operator, which takes 8 us more."""

    def refusing(kernel: Kernel) -> Callable[..., Any]:
        def run(*arguments: torch.Tensor) -> Any:
            raise AssertionError("by the operator")

        return run

    monkeypatch.setattr(kernels, "_implementation", refusing)
    case = stack(1, width=24, rows=40)  # kernels of no other test
    plan = rockplan.plan(case.model, case.args, "100%", options=COMPILED)
    assert interpreted and "estimated" not in plan.profile_source


CALLERS: dict[str, Any] = {
    "max_autotune": True,
    "max_autotune_pointwise": True,
    "coordinate_descent_tuning": True,
    "cpp_wrapper": True,
    "deterministic": False,
    "unroll_reductions_threshold": 64,
    "max_fusion_size": 2,
    "use_fast_math": True,
    "size_asserts": True,
    "triton.cooperative_reductions": True,
    "triton.multi_kernel": 1,
    "cpp.simdlen": 1,
}
"""What someone may have set for code of their own."""


def test_the_callers_settings_do_not_change_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import compile_fx, config

    seen: list[dict[str, Any]] = []

    def stopped(*args: Any, **kwargs: Any) -> Any:
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        seen.append({**config.save_config_portable(), "of torch": is_deterministic})
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "_functions", {})  # as in a process that has compiled nothing
    monkeypatch.setattr(compile_fx, "compile_fx_inner", stopped)
    for settings in ({}, CALLERS):
        torch.use_deterministic_algorithms(bool(settings))
        with config.patch(settings), pytest.raises(KeyboardInterrupt):
            fused(recorded(stack(1)), keeps_roundings=False)
        assert torch.are_deterministic_algorithms_enabled() == bool(settings)
        torch.use_deterministic_algorithms(False)
    assert seen[0] == seen[1] and seen[0]["deterministic"] and not seen[0]["size_asserts"]


def test_what_the_caller_has_may_lie_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, whose kernels ask; on CPU none does, and the kinds are fewer."""
    proposal = proposed(recorded(stack(1)), False, TABLE, frozenset())
    assert all(spec.offset == 0 for one in proposal.fused for spec in one.kernel.inputs)
    spec = TensorSpec((4,), (1,), 0, "torch.float32", "cuda:0")
    looks = [
        (kinds_of_kernels._as_input(replace(spec, offset=offset), is_given).offset)
        for offset, is_given in ((0, False), (4, False), (6, False), (0, True), (4, True))
    ]
    assert looks == [0, 0, 2, 1, 1]


def test_what_nothing_needs_is_not_computed() -> None:
    parts = parts_of(run(lambda x: (x.sin().exp(), x.cos())[1], (8,)), frozenset(), TABLE)
    (root,) = [p.makes[0] for p in parts.parts if p.call.op == "aten.cos.default"]
    flow = dataflow_of(parts, frozenset([root]), frozenset())
    assert len(flow.made) == 1


def test_infinities_hide_no_difference() -> None:
    """A mask of attention has them."""
    one, other = (torch.tensor([-torch.inf, n, torch.nan]) for n in (1.0, 2.0))
    assert kernels.squares(one, other) == (1.0, 4.0)
    assert kernels.squares(other, other) == (0.0, 4.0)
    assert kernels.squares(torch.tensor([torch.inf]), torch.ones(1))[0] == torch.inf
