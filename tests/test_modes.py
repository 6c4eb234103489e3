"""Modes of PyTorch around planning, calls and backward passes: function modes, among them the
default device, and dispatch modes."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rockplan
from testing.models import mean_square
from testing.training import assert_same_state, assert_same_tensor
from tests.usage import BUDGET, SAMPLE, both, count_programs, net_case, pair


class Doubled(TorchFunctionMode):
    """GELU returns twice what it does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is nn.functional.gelu else result


class Listed(TorchDispatchMode):
    """Keeps the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


class MakesTensors(nn.Module):
    """Where its forward makes a tensor, the default device decides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) + torch.ones(16))


def step(module: nn.Module) -> None:
    mean_square(module(SAMPLE)).backward()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def test_function_modes_are_refused_by_name() -> None:
    model = network()
    eager = copy.deepcopy(model)
    planned = rockplan.solve(model, SAMPLE, "100%")
    with Doubled():
        for use in (planned, lambda x: rockplan.solve(model, x, BUDGET)):
            with pytest.raises(rockplan.UnsupportedModel, match=r"Doubled .*outside of it"):
                use(SAMPLE)
        with torch.no_grad():
            assert_same_tensor(planned(SAMPLE), eager(SAMPLE), "the original")
    both(planned, eager, step, "outside of it")
    traced = make_fx(planned)(SAMPLE)  # under modes that change nothing
    assert_same_tensor(traced(SAMPLE).detach(), eager(SAMPLE).detach(), "traced")


def test_function_modes_around_the_original() -> None:
    options = rockplan.Options(on_mismatch="original")
    model = network()
    eager = copy.deepcopy(model)
    planned = rockplan.solve(model, SAMPLE, "100%", options=options)
    with Doubled():
        both(planned, eager, step, "with the mode")
    both(planned, eager, step, "without")
    with Doubled(), torch._C.DisableTorchFunction():
        both(planned, eager, step, "a mode that does nothing")


def test_the_default_device_makes_kinds_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_model = MakesTensors()
    eager = copy.deepcopy(planned_model)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(planned_model, SAMPLE, "100%")
    for _ in range(2):
        with torch.device("cpu"):
            both(planned, eager, step, "on the device")
    assert len(made) == 2
    both(planned, eager, step, "without one")
    assert len(made) == 2
    with torch.device("meta"), pytest.raises(RuntimeError):
        eager(SAMPLE)
    with torch.device("meta"), pytest.raises(rockplan.RockplanError):
        planned(SAMPLE)


def test_planning_under_a_default_device() -> None:
    planned_model = MakesTensors()
    eager = copy.deepcopy(planned_model)
    torch.set_default_device("cpu")
    try:
        planned = rockplan.solve(planned_model, SAMPLE, "100%")
        both(planned, eager, step, "with a default device")
        both(copy.deepcopy(planned), copy.deepcopy(eager), step, "a copy")
    finally:
        torch.set_default_device(None)  # type: ignore[arg-type]
    both(planned, eager, step, "without")


@pytest.mark.parametrize("layers", [1, 8])
def test_the_default_device_does_not_slow_calls(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python asks its mode about each function and property of a tensor."""
    planned = rockplan.solve(nn.Sequential(*(nn.Linear(16, 16),) * layers), SAMPLE, "100%")
    asked: list[Any] = []
    original = DeviceContext.__torch_function__

    def ask(self: Any, func: Any, *args: Any) -> Any:
        asked.append(func)
        return original(self, func, *args)

    with torch.device("cpu"):
        step(planned)
        monkeypatch.setattr(DeviceContext, "__torch_function__", ask)
        planned(SAMPLE)
        assert 0 < len(asked) < 40
        with pytest.raises(RuntimeError), torch.device("cpu"):
            planned(SAMPLE[:, :3])
        assert torch.get_default_device() == torch.device("cpu")
    assert not _get_current_function_mode_stack()


class CountsModes(nn.Module):
    """What its forward computes depends on the modes around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * (1 + len(_get_current_function_mode_stack()))


@pytest.mark.parametrize("around", ["the forward pass", "the backward pass"])
def test_backward_is_planned_under_its_calls_default_device(
    around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CountsModes()
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, SAMPLE, "100%")
    device = torch.device("cpu")
    for module in (planned, eager):
        with device if around == "the forward pass" else contextlib.nullcontext():
            result = module(SAMPLE).sum()  # a gradient in other strides
        with device if around == "the backward pass" else contextlib.nullcontext():
            result.backward()
    assert_same_state(planned, eager, around)
    assert len(made) == (3 if around == "the forward pass" else 2)
    assert not _get_current_function_mode_stack()


def test_backward_under_another_default_dtype_is_refused() -> None:
    model = MakesTensors()
    eager = copy.deepcopy(model)
    planned = rockplan.solve(model, SAMPLE, "min")
    loss = mean_square(planned(SAMPLE))
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(rockplan.BackwardError, match=r"set_default_dtype"):
            loss.backward(retain_graph=True)
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    mean_square(eager(SAMPLE)).backward()
    assert_same_state(planned, eager, "under the same")


@contextlib.contextmanager
def other_attention() -> Iterator[None]:
    """What context_parallel does."""
    original = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = lambda *args, **kwargs: original(*args, **kwargs)
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


@pytest.mark.parametrize("within", [loss_parallel, implicit_replication, other_attention])
def test_other_rules_of_distributed_tensors_have_plans(
    within: Callable[[], contextlib.AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = count_programs(monkeypatch)
    planned = rockplan.solve(network(), SAMPLE, "100%")
    for count in (1, 2):
        step(planned)
        assert len(made) == count
        with within():
            step(planned)
        assert len(made) == 2


def test_operations_of_planned_steps_are_counted() -> None:
    model = network()
    eager = copy.deepcopy(model)

    def count(module: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            step(module)
        return int(counter.get_total_flops())

    with FlopCounterMode(display=False) as counter:
        planned = rockplan.solve(model, SAMPLE, BUDGET)
    assert counter.get_total_flops() == 0, "planning is not counted"
    runs = [planned.plan.graph.nodes[i] for i in planned.plan.schedule.computes]
    products = [n for n in runs if {c.op.split(".")[1] for c in n.calls} & {"addmm", "mm"}]
    assert len(products) > 5, "some of them run again"
    assert count(eager) == 5 * 2 * 32 * 16 * 64
    assert count(planned) == len(products) * 2 * 32 * 16 * 64
    assert_same_state(planned, eager, "counted")


def test_dispatch_modes_see_steps_and_no_planning() -> None:
    case = net_case()
    planned, eager = pair(case)
    seen = Listed()

    def watched(module: nn.Module) -> None:
        with seen:
            case.step(module)

    with pytest.warns(UserWarning, match=r"TorchDispatchMode Listed .*run again"):
        both(planned, eager, watched, "watched")
    assert seen.operators.count("aten.native_batch_norm.default") >= 4
    seen.operators.clear()
    with seen:
        assert rockplan.solve(case.model, case.args, BUDGET).plan.overhead > 0
    assert not seen.operators
    with warnings.catch_warnings(), FlopCounterMode(display=False):
        warnings.simplefilter("error")
        planned(*case.args)
