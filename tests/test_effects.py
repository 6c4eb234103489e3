"""What eager runs for its effect runs in a plan: as often, in the same order, and never again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # its operators
from torch import nn
from torch.utils.checkpoint import checkpoint

import rockplan
from rockplan.graph_builder.costs import price
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.rows import Effect
from testing.models import Case
from testing.training import (
    QUICK,
    assert_equal_trees,
    assert_same_state,
    ensure,
    train_side_by_side,
)
from tests.kernels import interpret

LIMIT = 1000.0
CALLS: list[str] = []
"""What operators of ours did, in order."""


def note(name: str, x: torch.Tensor) -> None:
    CALLS.append(name)
    ensure(not bool((x.abs() > LIMIT).any()))


@torch.library.custom_op("effects_test::check", mutates_args=())
def check(x: torch.Tensor, name: str) -> None:
    """Without a rule for fake tensors, which a call without a result needs none of."""
    note(name, x)


_LIBRARY = torch.library.Library("effects_test", "FRAGMENT")
_LIBRARY.define("look(Tensor x) -> ()")
_LIBRARY.impl("look", lambda x: note("look", x), "CompositeExplicitAutograd")


@torch.library.custom_op("effects_test::stamp", mutates_args=())
def stamp(x: torch.Tensor) -> torch.Tensor:
    note("stamp", x)
    return x + 1


@torch.library.custom_op("effects_test::stamp_backward", mutates_args=())
def stamp_backward(gradient: torch.Tensor) -> torch.Tensor:
    note("stamp_backward", gradient)
    return gradient.clone()


stamp.register_fake(lambda x: torch.empty_like(x))
stamp_backward.register_fake(lambda gradient: torch.empty_like(gradient))
stamp.register_autograd(lambda ctx, gradient: stamp_backward(gradient))


@torch.library.custom_op("effects_test::log_into", mutates_args=("log",))
def log_into(log: torch.Tensor, x: torch.Tensor) -> None:
    note("log_into", x)
    log.add_(x.mean())


class Checked(torch.autograd.Function):
    """Looks at its argument, and at the gradient that comes in."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        check(x, "forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        check(gradient, "backward")
        return gradient


class Net(nn.Module):
    """Layers, of which a plan for "min" computes most again, with `act` in each."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(self.act(torch.tanh(layer(x))) * 1.5) + x
        return x.pow(2).mean()


def no_result(x: torch.Tensor) -> torch.Tensor:
    check(x, "check")
    return x


def of_library(x: torch.Tensor) -> torch.Tensor:
    torch.ops.effects_test.look(x)
    return x


def asserted(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x.abs() < LIMIT).all(), "too large")
    return x


def unused_result(x: torch.Tensor) -> torch.Tensor:
    stamp(x.detach() * 2)
    return x


def with_result(x: torch.Tensor) -> torch.Tensor:
    return stamp(x)


def checked(x: torch.Tensor) -> torch.Tensor:
    return Checked.apply(x)


def mixed(x: torch.Tensor) -> torch.Tensor:
    check(x, "before")
    x = stamp(x)
    check(x.mean(), "after")
    return Checked.apply(x)


def written(x: torch.Tensor) -> torch.Tensor:
    log = torch.zeros((), dtype=x.dtype)
    log_into(log, x.detach())
    return x * 2


def in_checkpoint(x: torch.Tensor) -> torch.Tensor:
    """Whose replay is the plan's decision: what acts is not done again."""
    return checkpoint(lambda t: torch.sin(mixed(t)), x, use_reentrant=False)


def drawing(x: torch.Tensor) -> torch.Tensor:
    check(x, "before")
    x = nn.functional.dropout(x, 0.2)
    check(x, "after")
    return x


ACTS = [
    no_result,
    of_library,
    asserted,
    unused_result,
    with_result,
    mixed,
    written,
    in_checkpoint,
    drawing,
    checked,
]


@pytest.fixture(autouse=True)
def without_calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


def calls_of(step: Callable[[], object]) -> list[str]:
    CALLS.clear()
    step()
    return CALLS[:]


SAMPLE = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def train(module: nn.Module, x: torch.Tensor = SAMPLE) -> torch.Tensor:
    torch.manual_seed(3)
    module.zero_grad()
    loss = module(x)
    loss.backward()
    return loss.detach()


def names(calls: list[str], act: Any) -> list[str]:
    """Of eager's calls, without those of a checkpoint's replay."""
    if act is not in_checkpoint:
        return calls
    forwards = 4 * len(["before", "stamp", "after", "forward"])
    return calls[:forwards] + [c for c in calls[forwards:] if "backward" in c]


@pytest.mark.parametrize("budget", ["min", "100%"])
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__ if callable(act) else act)
def test_calls_are_those_of_eager(act: Any, budget: str) -> None:
    eager = Net(act).train()
    planned = rockplan.solve(copy.deepcopy(eager), SAMPLE, budget, options=QUICK)
    assert CALLS == [], "planning calls nothing that acts"
    for _ in range(2):
        expected = names(calls_of(lambda: train(eager)), act)
        found = calls_of(lambda: train(planned))
        assert found == expected
        assert_equal_trees(train(planned), train(eager), "loss")
        assert_same_state(planned, eager, "step")
    if budget == "min":
        assert planned.plan.overhead > 0


@pytest.mark.parametrize("act", [a for a in ACTS if a not in (unused_result, with_result)])
def test_errors_are_those_of_eager(act: Any) -> None:
    eager = Net(act).train()
    planned = rockplan.solve(copy.deepcopy(eager), SAMPLE, "min", options=QUICK)
    for parameter in (*eager.parameters(), *planned.parameters()):
        parameter.data.mul_(float("nan") if act is asserted else 1.0)
    bad = SAMPLE * float("nan") if act is asserted else SAMPLE
    global LIMIT
    before, LIMIT = LIMIT, 0.1
    try:
        raised = [error_of(lambda m=m: train(m, bad)) for m in (eager, planned)]
    finally:
        LIMIT = before
    assert raised[0] == raised[1] != ""


def error_of(step: Callable[[], object]) -> str:
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


EXPECTED = {
    "aten._linalg_check_errors": Effect.CHECKS,
    "aten._assert_async.msg": Effect.CHECKS,
    "aten._assert_scalar": Effect.CHECKS,
    "aten._print": Effect.CHECKS,
    "aten._foreach_add_.List": Effect.NONE,
    "aten.linalg_cholesky_ex": Effect.NONE,
    "profiler._record_function_exit": Effect.NONE,
    "_c10d_functional.all_reduce": Effect.COMMUNICATES,
    "_c10d_functional.all_gather_into_tensor_coalesced": Effect.COMMUNICATES,
    "_c10d_functional.wait_tensor": Effect.WAITS,
    "_dtensor.shard_dim_alltoall": Effect.COMMUNICATES,
    "effects_test.check": Effect.UNKNOWN,
    "effects_test.stamp": Effect.UNKNOWN,
    "effects_test.log_into": Effect.UNKNOWN,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_effects_of_operators(name: str) -> None:
    if not name.startswith("aten.") and not dist.is_available():
        pytest.skip("a PyTorch without torch.distributed has no such operator")
    full = name if name.count(".") == 2 else f"{name}.default"
    assert facts.facts_of(full).effect is EXPECTED[name]


@rockplan.pure
@torch.library.custom_op("effects_test::declared", mutates_args=())
def declared(x: torch.Tensor) -> torch.Tensor:
    note("declared", x)
    return torch.sinh(x)


declared.register_fake(lambda x: torch.empty_like(x))
declared.register_autograd(
    lambda ctx, gradient: gradient * torch.cosh(ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@pytest.mark.parametrize(
    "form", [declared, "effects_test::declared", torch.ops.effects_test.declared.default]
)
def test_declared_pure_runs_again_and_is_measured(form: Any) -> None:
    assert rockplan.pure(form) is form
    eager = Net(lambda x: declared(x)).train()
    planned = rockplan.solve(copy.deepcopy(eager), SAMPLE, "min", options=QUICK)
    assert len(calls_of(lambda: train(planned))) > len(calls_of(lambda: train(eager)))
    assert_equal_trees(train(planned), train(eager), "loss")
    assert_same_state(planned, eager, "step")


@pytest.mark.parametrize("form", ["no operator", torch.sin, None, 3])
def test_what_is_no_operator_cannot_be_declared_pure(form: Any) -> None:
    with pytest.raises(rockplan.InvalidInput, match="takes an operator"):
        rockplan.pure(form)


def test_operators_that_nobody_knows_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    price._said.clear()
    for _ in range(2):
        rockplan.solve(Net(with_result).train(), SAMPLE, "min", options=QUICK)
    (line,) = [r.getMessage() for r in caplog.records if "rockplan.pure" in r.getMessage()]
    assert "effects_test.stamp.default" in line and "effects_test.check" not in line


class Factorized(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.function(x @ x.mT * self.scale)).sum()


FACTORIZATIONS = [
    torch.linalg.cholesky,
    torch.linalg.inv,
    torch.inverse,
    torch.linalg.lu_factor,
    lambda k: torch.linalg.solve(k, k),
    lambda k: torch.linalg.inv(k).detach() * 0 + k,
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("function", FACTORIZATIONS)
def test_factorizations_that_fail(
    function: Callable[[torch.Tensor], Any], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret(monkeypatch)

    def of_tensor(k: torch.Tensor) -> torch.Tensor:
        result = function(k)
        return result if isinstance(result, torch.Tensor) else result[0]

    good = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model = Factorized(of_tensor)
    options = rockplan.Options(compile=compiled)
    planned = rockplan.solve(copy.deepcopy(model), good, "min", options=options)
    expected = error_of(lambda: train(model, torch.zeros(4, 8)))
    assert "linalg" in expected
    assert error_of(lambda: train(planned, torch.zeros(4, 8))) == expected
    assert error_of(lambda: train(planned, good)) == ""


@pytest.mark.parametrize("act", [no_result, mixed, in_checkpoint])
def test_plans_of_kernels_call_what_acts(act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    eager = Net(act).train()
    options = rockplan.Options(compile=True)
    planned = rockplan.solve(copy.deepcopy(eager), SAMPLE, "min", options=options)
    assert planned.plan.graph.kernels
    expected = names(calls_of(lambda: train(eager)), act)
    assert calls_of(lambda: train(planned)) == expected


class Result(nn.Module):
    """Returns a tensor, of which the caller makes a loss."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.act(self.first(x)))
        return torch.sin(self.last(self.act(h)))


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_gradients_in_other_strides_call_nothing_twice(act: Any) -> None:
    """The forward runs again for them, without what acts in it."""
    eager = Result(act).train()
    planned = rockplan.solve(copy.deepcopy(eager), SAMPLE, "100%", options=QUICK)

    def step(module: nn.Module) -> None:
        torch.manual_seed(3)
        module.zero_grad()
        module(SAMPLE).sum().backward()

    for _ in range(2):
        expected = calls_of(lambda: step(eager))
        found = calls_of(lambda: step(planned))
        if act is not in_checkpoint:
            assert found == expected
        assert_same_state(planned, eager, "step")


def test_a_second_backward_pass_calls_nothing_twice() -> None:
    eager = Result(mixed).train()
    planned = rockplan.solve(copy.deepcopy(eager), SAMPLE, "100%", options=QUICK)
    result = planned(SAMPLE).pow(2).mean()
    result.backward(retain_graph=True)
    CALLS.clear()
    with pytest.raises(rockplan.BackwardError, match=r"effects_test\.stamp.*rockplan\.pure"):
        result.backward()
    assert CALLS == []
    planned = rockplan.solve(Result(checked).train(), SAMPLE, "100%", options=QUICK)
    result = planned(SAMPLE).pow(2).mean()
    result.backward(retain_graph=True)
    assert calls_of(result.backward) == ["backward"] * 2


@torch.library.custom_op("effects_test::wide", mutates_args=())
def wide(x: torch.Tensor) -> torch.Tensor:
    """With a workspace of 64 times its argument."""
    return x.repeat(64, 1).sum(0, keepdim=True).expand_as(x) + x


wide.register_fake(torch.empty_like)
wide.register_autograd(lambda ctx, gradient: gradient * 1.0)


def test_unknown_memory_of_an_operator_comes_on_top(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And is measured, once it is declared."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(wide(self.a(x).sin()).sin()).sum()

    model, x = Net(), torch.randn(32, 64)
    options = rockplan.Options(cache=False, time_limit_s=1)
    workspace_bytes = 64 * x.nbytes
    for is_known in (False, True):
        if is_known:
            rockplan.pure(torch.ops.effects_test.wide)
        caplog.clear()
        planned = rockplan.solve(model, x, "100%", options=options)
        measured = rockplan.peak_live_bytes(lambda f=planned: f(x).backward()).peak_bytes
        predicted = rockplan.plan_of(planned).peak_bytes
        assert ("on top of the predicted peak" in caplog.text) is not is_known
        if is_known:
            assert predicted - 16 <= measured <= predicted
        else:
            assert predicted < measured <= predicted + workspace_bytes


@torch.library.custom_op("effects_test::product", mutates_args=())
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Autocast casts inside, which its rule for fake tensors does not say."""
    return x @ y


@torch.library.custom_op("effects_test::pure_product", mutates_args=())
def pure_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


for _of in (product, pure_product):
    _of.register_fake(lambda x, y: x.new_empty(len(x), y.shape[1]))
    _of.register_autograd(
        lambda ctx, g: (g.float() @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ g.float()),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
rockplan.pure(pure_product)


def grid(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = nn.functional.affine_grid(x[:, :6].view(-1, 2, 3), [len(x), 1, 2, 4], align_corners=True)
    return made.flatten(1)


def looked_at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    check(x, "check")
    return x * y[0]


class CastsInside(nn.Module):
    def __init__(self, of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.of = of
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor, casts: bool = True) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.b(self.a(x).float().tanh()).float()
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                return self.c(self.of(h, self.weight).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("budget", ["100%", "min"])
@pytest.mark.parametrize(
    "of",
    [
        lambda x, y: pure_product(x, y),
        grid,
        lambda x, y: nn.functional.bilinear(x, x, y.expand(16, 16, 16)),
        looked_at,
    ],
)
def test_kernels_cast_inside_as_in_eager(of: Any, budget: str) -> None:
    torch.manual_seed(0)
    model = CastsInside(of)
    case = Case("casts", model, (torch.randn(32, 16),), {}, lambda r: r.float().square().mean())
    planned = rockplan.solve(model, case.args, budget, options=QUICK)
    train_side_by_side(case, planned, copy.deepcopy(model))


def test_other_dtypes_than_its_rule_says_are_refused() -> None:
    model, x = CastsInside(lambda x, y: product(x, y)), torch.randn(32, 16)
    planned = rockplan.solve(model, x, "min", options=QUICK)
    with pytest.raises(rockplan.UnsupportedModel, match=r"pure\('effects_test::product'\)"):
        planned(x)
    assert torch.equal(planned(x, casts=False), model(x, casts=False))
