"""Every way in which people use a module: equal to eager bit for bit, or refused clearly."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import rockplan
from rockplan.runtime import planned_module as planned_modules
from testing.models import Case, mean_square
from testing.training import (
    QUICK,
    assert_equal_trees,
    assert_same_tensor,
    solve_case,
    train_side_by_side,
    twin,
)
from testing.zoo_cases import loss_of
from tests.planning import heard
from tests.usage import (
    BUDGET,
    SAMPLE,
    Net,
    NormOfTransposed,
    both,
    count_programs,
    encoder_without_dropout,
    net_case,
    pair,
)

CHECKED = replace(QUICK, check=True)


def test_it_recomputes() -> None:
    """The other tests of this file mean something only if plans do recompute."""
    planned, _ = pair(net_case())
    assert planned.plan.overhead > 0
    assert any(n.random for n in recomputed(planned.plan))


def recomputed(plan: rockplan.Plan) -> list[Any]:
    order = plan.schedule.computes
    return [plan.graph.nodes[i] for i in set(order) if order.count(i) > 1]


def copies() -> dict[str, Callable[[nn.Module], nn.Module]]:
    def through_pickle(module: nn.Module) -> nn.Module:
        return pickle.loads(pickle.dumps(module))

    def through_save(module: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    return {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_save}


@pytest.mark.filterwarnings("error:.*LeafSpec")
@pytest.mark.parametrize("way", copies())
def test_copies_are_planned_and_independent(way: str) -> None:
    case = net_case()
    planned, eager = pair(case)
    case.step(planned)
    planned.zero_grad()
    eager.load_state_dict(planned.state_dict())
    eager_before = copy.deepcopy(eager)
    copied = copies()[way](planned)
    assert copied.plan.schedule == planned.plan.schedule
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in planned.parameters()}
    assert not heard(lambda: both(copied, eager, case.step, way))
    assert all(p.grad is None for p in planned.parameters())
    copied.zero_grad()
    both(planned, eager_before, case.step, "the copied module itself")


class Formatted(nn.Module):
    """Attention written out, whose heads become contiguous before they are joined; `like` is a
    literal among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, like: torch.memory_format) -> torch.Tensor:
        q, k, v = self.qkv(x).view(8, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
        heads = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2)
        joined = heads.contiguous(memory_format=like).view(8, 4, 16)
        return self.out(joined.to(torch.float64).tanh().to(torch.float32))


def formatted_case() -> Case:
    torch.manual_seed(0)
    args = (torch.randn(8, 4, 16), torch.contiguous_format)
    return Case("formatted", Formatted().train(), args, {}, mean_square)


def at_each_protocol() -> dict[str, Callable[[nn.Module], nn.Module]]:
    def through(protocol: int, module: nn.Module) -> nn.Module:
        return pickle.loads(pickle.dumps(module, protocol))

    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    return {f"protocol {p}": functools.partial(through, p) for p in protocols}


@pytest.mark.parametrize("way", {**copies(), **at_each_protocol()})
def test_copies_of_plans_with_literals_of_torch(way: str) -> None:
    case = formatted_case()
    planned, eager = pair(case)
    found = {name for n in planned.plan.graph.nodes for c in n.calls for name, _ in c.kwargs}
    assert {"memory_format", "dtype"} <= found
    copied = {**copies(), **at_each_protocol()}[way](planned)
    assert copied.plan == planned.plan
    assert not heard(lambda: both(copied, eager, case.step, way))


def test_state_dict_keys_and_loading_in_both_directions() -> None:
    planned, eager = pair(net_case())
    assert list(planned.state_dict()) == list(eager.state_dict())
    net_case().step(eager)
    planned.load_state_dict(eager.state_dict())
    eager.load_state_dict(planned.state_dict())
    eager.zero_grad()
    both(planned, eager, net_case().step, "after loading")


def test_planned_modules_are_instances_of_their_class() -> None:
    case = net_case()
    planned = solve_case(case, BUDGET, options=QUICK)
    assert isinstance(planned, Net)
    assert type(planned).__name__ == "Net"
    assert all(a is b for a, b in zip(planned.parameters(), case.model.parameters(), strict=True))
    assert [n for n, _ in planned.named_modules()] == [n for n, _ in case.model.named_modules()]


class Sized(nn.Sequential):
    """Makes others of its class."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.size = len(layers)

    def reversed(self) -> nn.Module:
        return type(self)(*reversed(list(self)))

    @classmethod
    def empty(cls) -> nn.Module:
        return cls()


@pytest.mark.parametrize(
    "make",
    [lambda m: m[:-1], lambda m: m[1:][:2], lambda m: m.reversed(), lambda m: type(m).empty()],
    ids=["slice", "slice of a slice", "method", "class method"],
)
def test_instances_of_a_planned_class_are_not_planned(
    make: Callable[[Any], nn.Module],
) -> None:
    model = Sized(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    eager = copy.deepcopy(model)
    planned = rockplan.solve(model, SAMPLE, "100%")
    part, expected = make(planned), make(eager)
    assert type(part) is Sized and part.size == expected.size
    assert_same_tensor(part(SAMPLE), expected(SAMPLE), "made")
    assert_same_tensor(planned(SAMPLE), eager(SAMPLE), "the planned module")


def test_a_planned_module_is_initialized_anew() -> None:
    """As some do to draw new weights; it stays planned."""
    planned = rockplan.solve(nn.Linear(16, 4), SAMPLE, "100%")
    assert inspect.signature(type(planned)) == inspect.signature(nn.Linear)
    planned.__init__(16, 8)  # type: ignore[misc]
    planned(SAMPLE).sum().backward()
    assert "aten.t" in repr(rockplan.plan_of(planned).graph) and planned(SAMPLE).shape[1] == 8


def test_planned_modules_are_replanned_from_their_originals(tmp_path: Path) -> None:
    """As a cell of a notebook does that runs twice."""
    case = net_case()
    first, eager = pair(case, "90%")
    calls = []
    first.register_forward_hook(lambda *_: calls.append(1))
    again = solve_case(Case("again", first, case.args, {}, mean_square), BUDGET)
    assert type(again).__mro__ == type(first).__mro__ and type(again).__qualname__ == "Net"
    assert again.plan.schedule == solve_case(net_case(), BUDGET).plan.schedule
    assert all(a is b for a, b in zip(again.parameters(), case.model.parameters(), strict=True))
    rockplan.save_plan(again, tmp_path / "net.plan.json")
    loaded = rockplan.load(first, case.args, tmp_path / "net.plan.json")
    assert loaded.plan.schedule == again.plan.schedule
    for planned in (again, loaded, first):
        planned.zero_grad()
        eager.zero_grad()
        both(planned, eager, case.step, "planned again")
    assert len(calls) == 3


def test_an_instances_own_forward_is_replanned() -> None:
    model = nn.Linear(16, 16)
    model.forward = lambda x: torch.tanh(x @ model.weight)
    once = rockplan.solve(model, SAMPLE, "100%")
    twice = rockplan.solve(once, SAMPLE, "100%")
    assert "tanh" in rockplan.code_of(twice)
    assert torch.equal(twice(SAMPLE), model(SAMPLE))
    once.forward = lambda x: x
    with pytest.raises(rockplan.InvalidInput, match="forward.*original"):
        rockplan.solve(once, SAMPLE, "100%")


class OwnNames(nn.Module):
    """Has attributes with the names of those that a planned module adds."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Sequential(nn.Linear(16, 32), nn.GELU())
        self.code = nn.Linear(32, 16)
        self.plans = [0.5]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(self.plan(x)) * self.plans[0]


@pytest.mark.parametrize("way", copies())
def test_names_of_the_original_come_first(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = Case("own names", OwnNames().train(), (torch.randn(64, 16),), {}, mean_square)
    planned, eager = pair(case)
    found = rockplan.plan_of(planned)
    assert found.overhead > 0 and "def forward" in rockplan.code_of(planned)
    train_side_by_side(case, planned, eager)
    planned.eval()
    eager.eval()
    both(planned, eager, lambda m: m(case.args[0]), "evaluation")
    assert list(planned.state_dict()) == list(eager.state_dict())
    assert planned.plan is case.model.plan and planned.plans is case.model.plans
    planned.plans = [0.25]
    assert planned.plans == [0.25]
    copied = copies()[way](planned)
    assert isinstance(copied.code, nn.Linear)
    assert rockplan.plan_of(copied).schedule == found.schedule
    rockplan.save_plan(planned, tmp_path / "plan.json")
    assert rockplan.read_plans(tmp_path / "plan.json")[0].schedule == found.schedule


def test_what_is_not_planned_has_no_plan() -> None:
    planned, eager = pair(net_case())
    assert {"plan", "plans", "code"} <= set(dir(planned))
    assert planned.plan is rockplan.plan_of(planned)
    for name in ("plan", "absent"):
        with pytest.raises(AttributeError, match=name):
            getattr(eager if name == "plan" else planned, name)
    for read in (rockplan.plan_of, rockplan.code_of):
        with pytest.raises(rockplan.InvalidInput, match="Net has no plan"):
            read(eager)


def test_training_and_evaluation_in_any_order() -> None:
    case = net_case()
    planned, eager = pair(case)

    def use(module: nn.Module) -> list[Any]:
        found: list[Any] = []
        case.step(module)
        module.eval()
        found.append(module(*case.args).detach())
        with torch.no_grad():
            found.append(module(*case.args))
            module.train()
            found.append(module(*case.args))
        with torch.inference_mode():
            found.append(module(*case.args).clone())
        case.step(module)
        return found

    both(planned, eager, use, "train and eval")


def test_evaluation_with_gradients() -> None:
    case = net_case()
    planned, eager = pair(case)
    planned.eval()
    eager.eval()
    both(planned, eager, case.step, "eval with gradients")


def test_mismatch_by_option() -> None:
    case = net_case()
    other = torch.randn(8, 16)
    strict = solve_case(case, BUDGET, options=rockplan.Options(on_mismatch="error"))
    with pytest.raises(rockplan.StalePlan, match="replan"):
        strict(other)
    case = net_case()
    planned, eager = pair(case, options=rockplan.Options(on_mismatch="original"))
    with pytest.warns(UserWarning, match="x: 8x16, planned 128x16") as said:
        for _ in range(2):
            both(planned, eager, lambda m: mean_square(m(other)).backward(), "original")
    assert len(said) == 1
    with pytest.raises(rockplan.InvalidInput, match="on_mismatch"):
        rockplan.Options(on_mismatch="sometimes")  # type: ignore[arg-type]


@pytest.mark.parametrize("outside", [False, True])
def test_autocast(outside: bool) -> None:
    class Inside(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=not outside):
                return super().forward(x).float()

    torch.manual_seed(0)
    case = Case("autocast", Inside().train(), (torch.randn(32, 16),), {}, mean_square)

    def use(module: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            loss = case.loss(module(*case.args))
        loss.backward()

    eager = twin(case)
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        planned = solve_case(case, BUDGET, options=QUICK)
    assert planned.plan.overhead > 0
    both(planned, eager, use, "autocast")
    both(planned, eager, case.step, "autocast changed between calls")
    both(planned, eager, use, "and back")


def test_backward_inside_autocast() -> None:
    case = net_case()
    eager = twin(case)

    def use(module: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            case.step(module)

    with torch.autocast("cpu", torch.bfloat16):
        planned = solve_case(case, BUDGET, options=QUICK)
    both(planned, eager, use, "backward inside autocast")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    case = net_case()
    case = Case("dtype", case.model.to(dtype), (case.args[0].to(dtype),), {}, mean_square)
    planned, eager = pair(case)
    train_side_by_side(case, planned, eager, steps=2)


def test_dtype_changed_after_planning() -> None:
    case = net_case()
    planned, eager = pair(case)
    sample = case.args[0].double()
    planned.double()
    eager.double()
    both(planned, eager, lambda m: mean_square(m(sample)).backward(), "to double")


def test_gradient_scaler() -> None:
    case = net_case()
    planned, eager = pair(case)

    def use(module: nn.Module) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        scaler.scale(case.loss(module(*case.args))).backward()
        scaler.step(optimizer)
        scaler.update()

    both(planned, eager, use, "scaler")


def test_frozen_parameters() -> None:
    case = net_case()
    case.model.first.requires_grad_(False)
    planned, eager = pair(case)
    both(planned, eager, case.step, "frozen")
    planned.first.requires_grad_(True)
    eager.first.requires_grad_(True)
    both(planned, eager, case.step, "thawed after planning")
    planned.head.requires_grad_(False)
    eager.head.requires_grad_(False)
    both(planned, eager, case.step, "frozen after planning")


@pytest.mark.parametrize("on_mismatch", ["replan", "error"])
def test_nothing_requires_a_gradient_for_a_while(on_mismatch: Any) -> None:
    """The generator of a GAN is frozen while the discriminator trains."""
    options = rockplan.Options(on_mismatch=on_mismatch)
    planned, eager = pair(net_case(32), "100%", options=options)

    def use(module: nn.Module) -> torch.Tensor:
        module.requires_grad_(False)
        result: torch.Tensor = module(SAMPLE)
        module.requires_grad_(True)
        mean_square(module(SAMPLE)).backward()
        return result

    for step in range(2):
        both(planned, eager, use, f"step {step}")
    assert len(planned.plans) == 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.inner = nn.Linear(16, 16)
        self.out = nn.Linear(16, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = x + torch.tanh(self.inner(x))
        return self.out(x)


class SpectralNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.b = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class NormsByHook(nn.Module):
    """The older spelling: hooks compute the attribute `weight` before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.spectral_norm(nn.Linear(16, 16))
        self.b = nn.utils.weight_norm(nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_norms_by_hook_in_training_and_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_programs(monkeypatch)
    torch.manual_seed(0)
    eager = NormsByHook().train()
    torch.manual_seed(0)
    case = Case("norms", NormsByHook().train(), (vectors(),), {}, mean_square)
    planned = solve_case(case, BUDGET, options=QUICK)
    for step in range(3):
        both(planned, eager, case.step, f"step {step}")
        for module in (planned, eager):
            module.eval()
        with torch.no_grad():
            both(planned, eager, lambda m: m(*case.args), f"evaluation {step}")
        for module in (planned, eager):
            module.train()
    assert len(made) == 1


class Recurs(SpectralNet):
    """Uses each computed weight several times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


def recurs_case() -> Case:
    torch.manual_seed(0)
    return Case("recurs", Recurs().train(), (vectors(),), {}, mean_square)


class RecursCached(Recurs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return super().forward(x)


def test_cached_parametrizations() -> None:
    """In a block around a call refused, and planned where the forward enters it."""
    case = recurs_case()
    planned = solve_case(case, BUDGET, options=QUICK)
    with parametrize.cached():
        case.model(*case.args)
        kept = dict(parametrize._cache)
        for refused in (lambda: planned(*case.args), lambda: solve_case(case, BUDGET)):
            with pytest.raises(rockplan.UnsupportedModel, match="inside of the forward"):
                refused()
        assert all(parametrize._cache[key] is value for key, value in kept.items())
        with torch.no_grad():
            assert torch.equal(planned(*case.args), case.model(*case.args))
    torch.manual_seed(0)
    eager = RecursCached().train()
    case = Case("recurs", copy.deepcopy(eager), (vectors(),), {}, mean_square)
    planned = solve_case(case, BUDGET, options=CHECKED)
    for step in range(2):
        both(planned, eager, case.step, f"step {step}")


def prunes_a_layer() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model


def prunes_twice() -> nn.Module:
    model = prunes_a_layer()
    prune.ln_structured(model[0], "weight", 0.2, n=2, dim=0)
    prune.random_unstructured(model[2], "bias", 0.5)
    return model


def prunes_a_recurrence() -> nn.Module:
    model = nn.LSTM(16, 16)
    prune.random_unstructured(model, "weight_hh_l0", 0.5)
    return ResultOf(model)


@pytest.mark.parametrize("make", [prunes_a_layer, prunes_twice, prunes_a_recurrence])
def test_pruned_layers(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as norms by hook: what a hook computes before each forward is part of the plan."""
    made = count_programs(monkeypatch)
    torch.manual_seed(0)
    eager = make().train()
    torch.manual_seed(0)
    case = Case("pruned", make().train(), (vectors(),), {}, mean_square)
    planned = solve_case(case, BUDGET, options=CHECKED)
    for step in range(2):
        both(planned, eager, case.step, f"step {step}")
        with torch.no_grad():
            both(planned, eager, lambda m: m(*case.args), f"evaluation {step}")
    assert len(made) == 1


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.head(self.second(x))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(torch.tanh(x), 0.3)


class CheckpointedFirst(Net):
    """Of an input without gradients: in eager, `first` gets none, whatever it switches on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = checkpoint(self.inner, x, use_reentrant=True)
        return self.head(self.second(x))

    def inner(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = self.first(x)
        with torch.enable_grad():
            return x * torch.sigmoid(next(self.first.parameters()).mean()), None


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.name = "square"  # hides the method of autograd's node
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class WithFunction(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Square.apply(super().forward(Square.apply(x)))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y[:, :4].mul_(2.0)
        z = torch.zeros_like(y)
        z[:, 2:6] = y[:, :4]
        z.add_(torch.sin(y))
        return self.b(z.relu_())


class ShapeInPlace(nn.Module):
    """What is read before the shape changes in place keeps the shape that it had."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) * 2.0
        before = torch.tanh(y)
        y.unsqueeze_(0).transpose_(1, 2)
        z = y + 1.0
        return self.b(z.squeeze_(0)) + before.sum()


class LateShortcut(nn.Module):
    """Another batch normalization between one and the addition in place to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.linear(x))
        out += self.other(self.linear(x))
        return out.relu_()


class TransposedGradients(nn.Module):
    """Operators whose backward PyTorch describes with other strides than it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functions = nn.functional
        x = self.linear(x)
        found = [functions.softplus(x), functions.elu(x), functions.hardswish(x)]
        found += [functions.layer_norm(x, [4]), functions.log_softmax(x, -1)]
        weights = torch.linspace(-1, 1, 64).view(4, 16)
        return sum((f.transpose(1, 2) * self.weight * weights).reshape(2, 64) for f in found)


class OtherLayoutsThanShapeRulesSay(nn.Module):
    """Results whose layout decides how later operators round: contiguous ones of transposed
    tensors, with pooling that has a kernel of its own where no gradient is needed."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.linear = first, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.transpose(1, 2)).transpose(1, 2)
        y: torch.Tensor = self.linear(nn.functional.normalize(x, dim=-1).tanh())
        return y


class Signs(nn.Module):
    """The gradient of `sgn` is a tensor of zeros without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * torch.sgn(y * 2).t().mul(3).t()


class ViewOfWritten(nn.Module):
    """A view, used after its base was written to: its gradient has the layout of the base."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.shift
        view = x.transpose(1, 2)
        x.mul_(2)
        return view.softmax(-1)


class ViewAddedToView(nn.Module):
    """A view is read once, by what writes to a view that nothing else reads: it is not made again,
    and its gradient has a layout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(x)
        right[:, :4].add_(left[:, 4:8])
        transposed = left.t().contiguous().tanh()
        return right.pow(2).sum(1) + transposed.square().sum(0)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
        ).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 9, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight[0], n=16).tanh()


class ResultOf(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


def vectors() -> torch.Tensor:
    return torch.randn(32, 16)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "tied weights, module used three times": (Tied, lambda: torch.randint(0, 20, (4, 8))),
    "parametrizations": (SpectralNet, vectors),
    "checkpoint inside, reentrant": (lambda: Checkpointed(True), vectors),
    "checkpoint inside, reentrant, of an input": (CheckpointedFirst, vectors),
    "checkpoint inside, non-reentrant": (lambda: Checkpointed(False), vectors),
    "custom autograd function": (WithFunction, vectors),
    "in place on views": (InPlace, vectors),
    "shape changed in place": (ShapeInPlace, vectors),
    "late shortcut": (LateShortcut, vectors),
    "transposed gradients": (TransposedGradients, lambda: torch.randn(2, 16, 8)),
    "batch norm of a transposed tensor": (NormOfTransposed, lambda: torch.randn(2, 32, 16)),
    "pooling of an input": (
        lambda: OtherLayoutsThanShapeRulesSay(nn.MaxPool1d(3, 1, 1)),
        lambda: torch.randn(4, 8, 32),
    ),
    "noise on a transposed tensor": (
        lambda: OtherLayoutsThanShapeRulesSay(nn.RReLU()),
        lambda: torch.randn(4, 8, 32),
    ),
    "signs": (Signs, vectors),
    "view of what is written to": (ViewOfWritten, lambda: torch.randn(8, 40, 64)),
    "view added to a view": (ViewAddedToView, vectors),
    "expanded integer input": (
        lambda: nn.Embedding(4, 16),
        lambda: torch.arange(64).remainder(4).expand(7, 64),
    ),
    "channels last": (
        ChannelsLast,
        lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    ),
    "complex numbers": (Complex, vectors),
    "LSTM": (lambda: ResultOf(nn.LSTM(16, 8, 2, dropout=0.3)), lambda: torch.randn(6, 4, 16)),
    "LSTM without bias": (
        lambda: ResultOf(nn.LSTM(16, 8, bias=False)),
        lambda: torch.randn(6, 4, 16),
    ),
    "LSTM with a weight computed in a hook": (
        lambda: ResultOf(nn.utils.weight_norm(nn.LSTM(16, 8), "weight_hh_l0")),
        lambda: torch.randn(6, 4, 16),
    ),
    "GRU": (lambda: ResultOf(nn.GRU(16, 8, 2, dropout=0.3)), lambda: torch.randn(6, 4, 16)),
    "embedding with max_norm": (
        lambda: nn.Sequential(nn.Embedding(20, 16, max_norm=1.0), nn.Linear(16, 4)),
        lambda: torch.randint(0, 20, (4, 8)),
    ),
}


@pytest.mark.parametrize("kind", MODULES)
def test_modules(kind: str) -> None:
    make, sample = MODULES[kind]

    def make_again() -> nn.Module:
        torch.manual_seed(0)
        return make().train()

    case = Case(kind, make_again(), (sample(),), {}, mean_square)
    eager = make_again()
    planned = solve_case(case, BUDGET, options=CHECKED)
    train_side_by_side(case, planned, eager, steps=3)


@dataclass
class Parts:
    """A dataclass that pytree knows."""

    features: torch.Tensor
    name: str


pytree.register_dataclass(Parts)


class Structured(Net):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0, extra: Any = None) -> Any:
        x = x + self.second(self.norm(self.first(x))) * scale
        logits = self.head(x)
        shift = 0 if extra is None else extra["shift"][0]
        return {
            "logits": logits + shift,
            "inner": [Parts(x.tanh(), "x"), (None, 3, "text")],
            "mask": logits > 0,
            "same": (logits, logits.view(-1)),
        }


def structured_loss(result: Any) -> torch.Tensor:
    same = result["same"][0].sum() + result["same"][1].pow(2).sum()
    return result["logits"].pow(2).mean() + result["inner"][0].features.mean() + same


def test_structured_results_and_arguments() -> None:
    torch.manual_seed(0)
    kwargs = {"scale": 0.5, "extra": {"shift": [torch.randn(4), "ignored"]}}
    case = Case("structured", Structured().train(), (torch.randn(32, 16),), kwargs, structured_loss)
    planned, eager = pair(case)
    train_side_by_side(case, planned, eager, steps=2)
    default = Case("default", case.model, case.args, {}, structured_loss)
    train_side_by_side(default, planned, eager, steps=1)


def test_hook_on_a_submodule_after_planning_is_refused() -> None:
    case = net_case()
    planned = solve_case(case, BUDGET, options=QUICK)
    planned.head.register_forward_hook(lambda m, a, r: None)
    with pytest.raises(rockplan.UnsupportedModel, match="head"):
        planned(*case.args)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min")
def test_quantization_aware_training() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(quantization.QuantStub(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    net.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    eager = quantization.prepare_qat(net.train())
    eager(SAMPLE)
    planned = rockplan.solve(copy.deepcopy(eager), SAMPLE, BUDGET)
    both(planned, eager, lambda m: mean_square(m(SAMPLE)).backward(), "observed")
    for module in (planned, eager):
        module.apply(quantization.disable_observer)
    both(planned, eager, lambda m: mean_square(m(2 * SAMPLE)).backward(), "not observed")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min")
@pytest.mark.parametrize("has_run", [True, False])
def test_quantization_aware_training_is_planned_after_one_step(has_run: bool) -> None:
    net = nn.Sequential(quantization.QuantStub(), nn.Linear(16, 16))
    net.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    model = quantization.prepare_qat(net.train())
    if has_run:
        model(SAMPLE)
    options = rockplan.Options(on_mismatch="error")
    planned = rockplan.solve(model, SAMPLE, "100%", options=options)
    mean_square(planned(SAMPLE)).backward()
    with contextlib.nullcontext() if has_run else pytest.raises(rockplan.StalePlan):
        planned(SAMPLE)


def test_hooks_on_all_modules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, SAMPLE, "100%")

    def step(module: nn.Module) -> None:
        mean_square(module(SAMPLE)).backward()

    with register_module_forward_hook(lambda m, a, r: 2 * r if type(m) is nn.Linear else None):
        for use in (planned, lambda x: rockplan.solve(model, x, BUDGET)):
            with pytest.raises(rockplan.UnsupportedModel, match=r"on all modules.*remove it"):
                use(SAMPLE)
    both(planned, eager, step, "without the hook")
    with FlopCounterMode(display=False):  # follows modules by hooks
        both(planned, eager, step, "counted")
    assert len(made) == 3  # the first, and those that were refused


def test_a_check_under_autocast_goes_backward_without() -> None:
    class Precise(Net):
        """Matrix products of its backward would be cast, those of its forward are not."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    torch.manual_seed(0)
    case = Case("precise", Precise().train(), (SAMPLE,), {}, mean_square)
    planned, eager = pair(case, "100%", options=CHECKED)

    def use(module: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            result = module(SAMPLE)
        mean_square(result.float()).backward()

    both(planned, eager, use, "under autocast")


def test_no_hook_sees_the_gradients_of_a_check() -> None:
    case = net_case()
    seen: list[str] = []
    x = case.args[0].clone().requires_grad_() * 2
    x.register_hook(lambda _: seen.append("input"))
    planned = solve_case(replace(case, args=(x,)), BUDGET, options=CHECKED)
    planned.head.weight.register_hook(lambda _: seen.append("weight"))
    mean_square(planned(x[:-1])).backward()  # another kind of call: planned and checked, too
    assert seen == ["weight", "input"]


def test_a_check_amid_backward_does_not_disturb() -> None:
    class TwoResults(Net):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.norm(self.first(x))
            return y.tanh(), self.head(self.second(y))

    torch.manual_seed(0)
    case = Case("two", TwoResults().train(), (SAMPLE,), {}, mean_square)
    planned, eager = pair(case, "100%", options=CHECKED)
    # From one output alone: planned and checked in the backward pass, buffers are written.
    both(planned, eager, lambda m: mean_square(m(SAMPLE)[1]).backward(), "from the second")


@torch.library.custom_op("rockplan_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@square.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


square.register_autograd(
    lambda ctx, gradient: 2 * ctx.saved_tensors[0] * gradient,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("rockplan_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """Differs from run to run, whatever the seed."""
    return x + time.perf_counter_ns() % 1_000_003


noise.register_fake(lambda x: torch.empty_like(x))


noise.register_autograd(
    lambda ctx, gradient: gradient, setup_context=lambda ctx, inputs, output: None
)


class WithSquare(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(square(self.head(square(x))).repeat(1, 4))


class WithNoise(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noise(super().forward(x))


def test_operators_of_other_libraries() -> None:
    torch.manual_seed(0)
    case = Case("operator", WithSquare().train(), (SAMPLE,), {}, mean_square)
    planned, eager = pair(case)
    train_side_by_side(case, planned, eager, steps=2)


def test_check_says_where_eager_does_not_repeat_itself() -> None:
    torch.manual_seed(0)
    case = Case("noise", WithNoise().train(), (SAMPLE,), {}, mean_square)
    with pytest.warns(UserWarning, match="eager does not repeat itself.*cannot be compared"):
        planned = solve_case(case, BUDGET, options=CHECKED)
    assert "eager does not repeat itself" in planned.plan.checked
    assert "by up to" in planned.plan.checked


class DrawsFromItsOwn(Net):
    """Scales by draws of a generator that nobody watches, which a plan takes for a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(numpy.random.default_rng().random())


def test_check_refuses_what_only_the_plan_freezes() -> None:
    torch.manual_seed(0)
    case = Case("own generator", DrawsFromItsOwn().train(), (SAMPLE,), {}, mean_square)
    with pytest.raises(rockplan.CheckFailed, match="output 0.*stands still.*draw with torch"):
        solve_case(case, BUDGET, options=CHECKED)


class AsksItsInput(Net):
    """Decides by what a tensor says of itself, whatever its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_parameter, is_leaf = isinstance(x, nn.Parameter), x.is_leaf and self.head.bias.is_leaf
        return super().forward(x) * (2 if is_parameter else 3) + (x.mean() if is_leaf else 1)


@pytest.mark.parametrize("given", ["a leaf", "computed", "a parameter", "frozen", "a view"])
def test_a_check_gives_inputs_like_the_callers(given: str) -> None:
    torch.manual_seed(0)
    own = SAMPLE.clone().requires_grad_(given != "frozen")
    x = {"computed": own * 2, "a parameter": nn.Parameter(own), "a view": own[:]}.get(given, own)
    planned = rockplan.solve(AsksItsInput(), x, BUDGET, options=CHECKED)
    assert planned.plan.checked == "equal to eager bit for bit on the sample"


class Follows(Net):
    """A second layer that follows the first under no_grad, a table that it keeps in a dictionary,
    and an input written in place."""

    def __init__(self, remember: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        self.tables = {"seen": torch.zeros(4)}
        self.queue = deque([1], maxlen=9)
        self.remember = remember

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                t.mul_(0.5).add_(s, alpha=0.5)
        y = super().forward(x) - self.teacher(x)
        self.remember(self, y.detach().mean(0))
        return y * self.tables["seen"] + len(self.queue)


def writes_in_place(module: Any, y: torch.Tensor) -> None:
    module.tables["seen"].mul_(0.9).add_(y)


def makes_anew(module: Any, y: torch.Tensor) -> None:
    module.tables["seen"] = module.tables["seen"] * 0.9 + y


def queues(module: Any, y: torch.Tensor) -> None:
    module.queue.append(2)


def state_of_follows(module: Any, x: torch.Tensor) -> list[Any]:
    kept = [*module.state_dict(keep_vars=True).values(), x]
    contents = [(t, t.clone(), t._version, t.grad_fn) for t in kept]
    return [list(module.queue), module.tables["seen"].clone(), *contents]


@pytest.mark.parametrize("remember", [writes_in_place, makes_anew, queues])
def test_a_check_leaves_model_and_sample_alone(
    remember: Callable[[Any, torch.Tensor], None],
) -> None:
    torch.manual_seed(0)
    case = Case("follows", Follows(remember).train(), (SAMPLE.clone(),), {}, mean_square)
    before = state_of_follows(case.model, case.args[0])
    if remember is writes_in_place:
        planned, eager = pair(case, options=CHECKED)
        assert planned.plan.checked == "equal to eager bit for bit on the sample"
        assert_equal_trees(state_of_follows(case.model, case.args[0]), before, "checked")
        both(planned, eager, lambda m: mean_square(m(SAMPLE.clone())).backward(), "step")
        assert_equal_trees(planned.tables, eager.tables, "table")
        return
    words = r"changes self\.queue" if remember is queues else r"tensor to self\.tables"
    with pytest.raises(rockplan.UnsupportedModel, match=words):
        solve_case(case, BUDGET, options=CHECKED)
    assert_equal_trees(state_of_follows(case.model, case.args[0]), before, "refused")


def test_a_check_compares_parameters_and_inputs_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clamps(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            with torch.no_grad():
                self.head.bias.mul_(0.5)
            return y

    original = planned_modules.bound_forward

    def bound_to_a_copy(module: nn.Module, program: Any) -> Callable[..., Any]:
        return original(copy.deepcopy(module), program)

    monkeypatch.setattr(planned_modules, "bound_forward", bound_to_a_copy)
    torch.manual_seed(0)
    x = SAMPLE.clone().requires_grad_()
    model = Clamps().requires_grad_(False)
    model.norm.eval()
    with pytest.raises(rockplan.CheckFailed, match=r"parameter head\.bias"):
        rockplan.solve(model, x, BUDGET, options=CHECKED)


class Passing(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return {"y": super().forward(x), "x": x, "part": x.view(-1)[3:], "mask": x > 0}


def test_results_that_are_inputs() -> None:
    torch.manual_seed(0)
    case = Case("passing", Passing().train(), (SAMPLE,), {}, lambda r: mean_square(r["y"]))
    planned, eager = pair(case)
    both(planned, eager, lambda m: m(SAMPLE)["y"].sum().backward(), "step")
    result = planned(SAMPLE)
    assert result["x"].data_ptr() == SAMPLE.data_ptr()
    assert result["part"].data_ptr() == SAMPLE.view(-1)[3:].data_ptr()


class TwoInputs(nn.Module):
    """The gradient of the second input is there long before the backward pass ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        self.late = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.tanh(self.layers(x)) + self.late(y)
        return found


@pytest.mark.parametrize("budget", ["min", "70%", "100%"])
def test_gradients_of_inputs_count_to_the_end(budget: str) -> None:
    """The engine holds them: what made the inputs runs backward after all of the module."""
    torch.manual_seed(0)
    inputs = tuple(torch.randn(64, 32, requires_grad=True).clone() for _ in range(2))
    planned = rockplan.solve(TwoInputs(), inputs, budget)

    def step() -> None:
        result = planned(*inputs)
        loss_of(result).backward()

    plan = planned.plan
    peak_bytes, _ = rockplan.peak_live_bytes(step)
    assert 0.98 * plan.peak_bytes <= peak_bytes <= plan.peak_bytes <= plan.budget_bytes


@functools.cache
def table() -> torch.Tensor:
    return torch.arange(4.0).sin()


class Tabled(nn.Module):
    """Returns a table that outlives the call, with and without anything having read it."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
        self.read = read

    def forward(self, x: torch.Tensor) -> Any:
        y = self.b(torch.tanh(self.a(x)))
        return {"y": y + table() if self.read else y, "table": table(), "rows": table()[1:]}


@pytest.mark.parametrize("read", [False, True])
def test_results_that_outlive_the_call(read: bool) -> None:
    torch.manual_seed(0)
    table()
    case = Case("tabled", Tabled(read).train(), (SAMPLE,), {}, lambda r: mean_square(r["y"]))
    planned, eager = pair(case)
    train_side_by_side(case, planned, eager, steps=2)
    assert planned(SAMPLE)["table"].data_ptr() == table().data_ptr()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_a_planned_module(reentrant: bool) -> None:
    planned, eager = pair(net_case(32))

    def use(module: nn.Module) -> Any:
        x = SAMPLE.clone().requires_grad_()
        mean_square(checkpoint(module, x, use_reentrant=reentrant)).backward()
        return x.grad

    for step in range(2):
        both(planned, eager, use, f"step {step}")


def test_checkpoints_keep_the_same_of_planned_modules() -> None:
    """Between forward and backward nothing but the result, nor what flows between the modules."""
    planned, eager = pair(net_case(32))
    x = SAMPLE.clone().requires_grad_()

    def forward_alone(module: nn.Module) -> int:
        def call(x: torch.Tensor) -> torch.Tensor:
            return module(module(x).repeat(1, 4) + x)

        held = []
        return rockplan.peak_live_bytes(
            lambda: held.append(checkpoint(call, x, use_reentrant=False))
        )[1]

    assert forward_alone(planned) == forward_alone(eager) > 0


def test_checkpoints_around_planned_modules_and_other_gradients() -> None:
    """Backward passes that no forward was planned for, one of a retained graph among them."""
    planned, eager = pair(net_case(32))

    def use(module: nn.Module) -> Any:
        x = SAMPLE.clone().requires_grad_()
        loss = checkpoint(lambda x: module(x).tanh(), x, use_reentrant=False).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        checkpoint(module, x, use_reentrant=False).sum().backward()
        return x.grad

    for step in range(2):
        both(planned, eager, use, f"step {step}")


@pytest.mark.parametrize("around", ["nothing", "checkpoint", "save_on_cpu"])
def test_a_graph_that_is_not_retained_is_gone(around: str) -> None:
    """Whatever saved tensors become, the error is eager's."""
    for module in pair(net_case(32)):
        if around == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                loss = module(SAMPLE).sum()
        elif around == "checkpoint":
            loss = checkpoint(module, SAMPLE, use_reentrant=False).sum()
        else:
            loss = module(SAMPLE).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


class ChangesOtherInput(nn.Module):
    """Its backward pass reads nothing of its forward."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2.0, other.add_(1.0)


def test_checkpoints_rerun_nothing_that_is_not_needed() -> None:
    """It could not: an argument was changed."""
    x, other = SAMPLE.clone().requires_grad_(), SAMPLE.clone()
    planned, eager = pair(Case("changes", ChangesOtherInput(), (x, other), {}, loss_of))

    def use(module: nn.Module) -> Any:
        x, other = SAMPLE.clone().requires_grad_(), SAMPLE.clone()
        mean_square(checkpoint(module, x, other, use_reentrant=False)[0]).backward()
        return x.grad, other

    both(planned, eager, use, "changes")


def test_what_backward_needed_goes_with_it() -> None:
    """As in eager: also where the loss is still held, what came into the module is not."""
    planned, eager = pair(net_case(32))

    def bytes_left(module: nn.Module) -> int:
        first = nn.Linear(16, 16)

        def step() -> None:
            held.append(mean_square(module(first(SAMPLE).exp())))
            held[-1].backward()
            first.zero_grad()
            module.zero_grad()

        held: list[torch.Tensor] = []
        return rockplan.peak_live_bytes(step)[1]

    assert bytes_left(planned) == bytes_left(eager)


def test_saved_tensors_hooks_of_the_caller() -> None:
    planned, eager = pair(net_case(32))
    with torch.autograd.graph.save_on_cpu():
        both(planned, eager, lambda m: mean_square(m(SAMPLE)).backward(), "save_on_cpu")
    compressed = torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float())
    with compressed, pytest.warns(UserWarning, match=r"saved tensors.*have no effect"):
        planned(SAMPLE)


def test_a_plan_checked_inside_a_checkpoint() -> None:
    planned, eager = pair(net_case(32), options=replace(QUICK, check=True))

    def use(module: nn.Module) -> None:
        mean_square(checkpoint(module, SAMPLE[:8], use_reentrant=False)).backward()

    both(planned, eager, use, "another kind of call")


def test_functional_call() -> None:
    planned, eager = pair(net_case(32))
    values = {n: (p.detach() * 1.1).requires_grad_() for n, p in eager.named_parameters()}

    def use(module: nn.Module) -> Any:
        result = torch.func.functional_call(module, values, SAMPLE)
        return torch.autograd.grad(mean_square(result), list(values.values()))

    both(planned, eager, use, "functional_call")


def replaced(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: (p.detach() * 1.1).requires_grad_() for n, p in module.named_parameters()}


@pytest.mark.parametrize("assign", [False, True])
def test_parameters_that_are_replaced_are_let_go(
    assign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count_programs(monkeypatch)
    planned, eager = pair(net_case(32))
    seen: list[weakref.ref[torch.Tensor]] = []

    def use(module: nn.Module) -> Any:
        values = replaced(module)
        seen.append(weakref.ref(values["head.weight"]))
        if assign:
            module.load_state_dict({**module.state_dict(), **values}, assign=True)
            seen.append(weakref.ref(next(module.head.parameters())))
            mean_square(module(SAMPLE)).backward()
            return [p.grad for p in module.parameters()]
        result = torch.func.functional_call(module, values, SAMPLE)
        return torch.autograd.grad(mean_square(result), list(values.values()))

    for step in range(3):
        both(planned, eager, use, f"step {step}")
        both(planned, eager, lambda m: mean_square(m(SAMPLE)).backward(), f"its own, {step}")
    assert len(made) == 1
    assert len([r for r in seen if r() is not None]) == (2 if assign else 0)
    assert len(planned.plans) == 1


def scaled(module: nn.Module, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a hypernetwork makes of one tensor: parameters that are no leaves."""
    return {n: p.detach() * scale for n, p in module.named_parameters()}


@pytest.mark.parametrize("kind", ["leaves", "results of others", "frozen", "buffers too"])
def test_functional_calls_backward_is_planned_with_its_parameters(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module has its own back when the gradients come, whose strides need another plan."""
    planned, eager = pair(net_case(32))
    made = count_programs(monkeypatch)

    def use(module: nn.Module) -> Any:
        scale = torch.tensor(1.1, requires_grad=kind != "frozen")
        values = replaced(module) if kind != "results of others" else scaled(module, scale)
        if kind == "frozen":
            values = {n: v.detach() for n, v in values.items()}
        if kind == "buffers too":
            values |= {n: b.clone() for n, b in module.named_buffers()}
        x = SAMPLE.clone().requires_grad_(kind == "frozen")
        own = [*module.parameters()]
        first = torch.func.functional_call(module, values, x)
        second = torch.func.functional_call(module, {**values, "head.bias": own[-1]}, x)
        for result in (first, second, first):
            result.sum().backward(retain_graph=True)
        assert all(a is b for a, b in zip(module.parameters(), own, strict=True))
        return [t.grad for t in (x, scale, *values.values()) if t.is_leaf]

    counts: list[int] = []
    for step in range(3):
        both(planned, eager, use, f"step {step}")
        both(planned, eager, lambda m: m(SAMPLE).sum().backward(), f"its own, {step}")
        counts.append(len(made))
    assert 0 < counts[0] == counts[-1]


def test_a_module_changed_before_its_backward_is_planned() -> None:
    planned, _ = pair(net_case(32))
    result = planned(SAMPLE)
    planned.eval()
    with pytest.raises(rockplan.BackwardError, match=r"changed between forward and backward"):
        result.sum().backward()
    planned.train()
    result.sum().backward()


@pytest.mark.parametrize("change", ["tied", "strides", "frozen"])
def test_parameters_of_another_kind_are_planned_for(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count_programs(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    eager = copy.deepcopy(model)
    planned = rockplan.solve(model, SAMPLE, "100%")
    first = torch.randn(16, 16)
    if change == "strides":
        first = first.t()
    values: dict[str, torch.Tensor] = {"0.weight": first.requires_grad_(change != "frozen")}
    if change == "tied":
        values["2.weight"] = first

    def use(module: nn.Module) -> Any:
        result = torch.func.functional_call(module, values, SAMPLE, tie_weights=False)
        wanted = list({id(v): v for v in values.values() if v.requires_grad}.values())
        bias: Any = module[2].bias  # type: ignore[index]
        return torch.autograd.grad(mean_square(result), [*wanted, bias])

    for _ in range(2):
        both(planned, eager, use, change)
    assert len(made) == 2


def test_function_transforms_are_refused() -> None:
    planned, _ = pair(net_case(32))
    values = {n: p.detach() for n, p in planned.named_parameters()}
    with pytest.raises(rockplan.StalePlan, match="torch.func"):
        torch.func.grad(lambda v: mean_square(torch.func.functional_call(planned, v, SAMPLE)))(
            values
        )


@pytest.mark.parametrize("of", ["input", "parameters"])
def test_forward_mode_derivatives_are_refused(of: str) -> None:
    planned, eager = pair(net_case(32))
    values = {n: p.detach() for n, p in eager.named_parameters()}
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(v, torch.ones_like(v)) for n, v in values.items()}
        x = forward_ad.make_dual(SAMPLE, torch.ones_like(SAMPLE))
        call = (values, x) if of == "input" else (duals, SAMPLE)
        result = torch.func.functional_call(eager, *call)
        assert forward_ad.unpack_dual(result).tangent is not None
        with pytest.raises(rockplan.StalePlan, match="forward-mode.*original module"):
            torch.func.functional_call(planned, *call)
        with torch.no_grad():
            assert forward_ad.unpack_dual(planned(x)).tangent is not None
    eager.load_state_dict(planned.state_dict())
    both(planned, eager, lambda m: mean_square(m(SAMPLE)).backward(), "afterwards")


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_tracing_sees_the_original() -> None:
    """As TensorBoard's `add_graph` traces."""
    planned, eager = pair(Case("net", Net().eval(), (SAMPLE,), {}, mean_square), "100%")
    traced = torch.jit.trace(planned, SAMPLE)
    assert traced.code == torch.jit.trace(eager, SAMPLE).code
    assert_same_tensor(traced(SAMPLE), eager(SAMPLE), "traced")
    whole = torch.jit.trace(nn.Sequential(planned, nn.Tanh()), SAMPLE)
    assert_same_tensor(whole(SAMPLE), eager(SAMPLE).tanh(), "a part of what is traced")
    both(planned, eager, lambda m: mean_square(m(SAMPLE)).backward(), "afterwards")


def test_compile_leaves_a_planned_module_alone() -> None:
    planned, eager = pair(net_case(32))
    compiled = torch.compile(planned, backend="eager")
    with pytest.warns(UserWarning, match=r"compiles nothing.*Options\(compile=True\)"):
        both(
            planned,
            eager,
            lambda m: mean_square((compiled if m is planned else m)(SAMPLE)).backward(),
            "compiled",
        )


@torch.compile(backend="eager")
def compiled_gelu(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x)


class CallsCompiled(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(compiled_gelu(x))


def wraps_a_part(model: Any) -> None:
    model.first = torch.compile(model.first, backend="eager")


def compiles_a_part_in_place(model: Any) -> None:
    model.second.compile(backend="eager")


def compiles_itself(model: Any) -> None:
    model.compile(backend="eager")


@pytest.mark.parametrize("compile_part", [wraps_a_part, compiles_a_part_in_place, compiles_itself])
@pytest.mark.parametrize("is_warm", [False, True])
def test_compiled_parts_are_planned_as_in_eager(
    compile_part: Callable[[Any], None], is_warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler does not run in a plan, and not while one is made."""
    torch.manual_seed(0)
    model = CallsCompiled().train()
    eager = copy.deepcopy(model)
    compile_part(model)
    if is_warm:
        mean_square(model(SAMPLE)).backward()
        values = model.state_dict().values()
        eager.load_state_dict(dict(zip(eager.state_dict(), values, strict=True)))
        model.zero_grad()
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, SAMPLE, BUDGET, options=CHECKED)
    assert planned.plan.checked == "equal to eager bit for bit on the sample"
    for step in range(2):
        for module in (eager, planned):
            torch.manual_seed(5)
            mean_square(module(SAMPLE)).backward()
        pairs = zip(planned.parameters(), eager.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs), step
        pairs = zip(planned.buffers(), eager.buffers(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), step
    assert len(made) == 1
    assert torch.compiler.is_compiling() is False and not stance_is_forced()


def stance_is_forced() -> bool:
    return torch._dynamo.eval_frame._stance.stance != "default"


@pytest.mark.parametrize("before", [True, False])
def test_plans_run_under_compilation_of_the_module(before: bool) -> None:
    case = net_case(512)
    if before:
        case.model.compile(backend="eager")
    planned = solve_case(case, BUDGET, options=QUICK)
    if not before:
        planned.compile(backend="eager")
    case.step(planned)
    peak_bytes, _ = rockplan.peak_live_bytes(lambda: case.step(planned))
    assert peak_bytes <= planned.plan.budget_bytes
    for copied in (copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))):
        both(copied, copy.deepcopy(planned), case.step, "a copy")
        assert all(p.grad is not None for p in copied.parameters())


def test_one_planned_module_in_several_threads() -> None:
    """Each brings a batch size of its own, so that all plan at once."""
    case = encoder_without_dropout()
    planned, eager = pair(case)
    (sample,) = case.args
    parameters = {m: list(m.parameters()) for m in (planned, eager)}
    found: dict[int, Any] = {}

    def gradients_of(module: nn.Module, number: int) -> Any:
        loss = case.loss(module(sample[: number + 1]))
        return torch.autograd.grad(loss, parameters[module])

    def work(number: int) -> None:
        for _ in range(2):
            found[number] = gradients_of(planned, number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    for number, gradients in found.items():
        assert_equal_trees(gradients, gradients_of(eager, number), "thread")


def test_another_thread_leaves_a_module_amid_capture() -> None:
    """Hooks that see every module see those of other threads too."""
    entered, release = threading.Event(), threading.Event()

    class Elsewhere(nn.Module):
        def forward(self) -> None:
            entered.set()
            release.wait(600)

    elsewhere = Elsewhere()
    # Without a hook of its own it would not look for others at its end.
    elsewhere.register_forward_hook(lambda *_: None)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert entered.wait(600)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            release.set()
            thread.join()
            return self.second(x).tanh()

    plan = rockplan.plan(Net(), torch.randn(2, 4), "100%")
    assert [n.module for n in plan.graph.forward] == ["first", "second", ""]


def test_autocast_changed_between_calls() -> None:
    planned, eager = pair(net_case(32))

    def use(module: nn.Module) -> None:
        for enabled in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                result = module(SAMPLE)
            mean_square(result.float()).backward()

    for step in range(2):
        both(planned, eager, use, f"step {step}")


def test_autocast_without_its_cache_of_weights() -> None:
    """A weight is cast, and its gradient cast back, at each use."""
    torch.manual_seed(0)
    case = Case("shared", Repeated(), (torch.randn(32, 16),), {}, mean_square)
    planned, eager = pair(case, "100%")

    def use(module: nn.Module) -> None:
        for cache in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                result = module(SAMPLE)
            mean_square(result.sum(1).float()).backward()

    for step in range(2):
        both(planned, eager, use, f"step {step}")


class Repeated(nn.Module):
    """The same layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.linear(x))
        return x


@pytest.mark.parametrize(
    "mode",
    [torch.inference_mode, functools.partial(torch.autograd.set_detect_anomaly, True)],
    ids=["inference_mode", "anomaly"],
)
def test_planning_under_a_mode(mode: Any) -> None:
    case = net_case(32)
    eager = twin(case)
    with mode():
        planned = solve_case(case, "100%", options=rockplan.Options(cache=False))
    both(planned, eager, case.step, "afterwards")


INFINITE = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1.0, -2.0, 100.0])
SIGNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: torch.sgn(x * x * x),
    "exponential": lambda x: torch.sgn(x.exp()),
    "quotient": lambda x: torch.sgn(x.exp() / x),
    "logarithm": lambda x: torch.sgn(x.abs().log()),
    "sum of rows": lambda x: torch.sgn(x.exp().sum(1, keepdim=True)),
    "view": lambda x: torch.sgn(x.exp().t()).t(),
    "parts": lambda x: torch.sgn(torch.cat([x.exp(), x])).view(2, 8, 8).sum(0),
    "twice": lambda x: (lambda e: torch.sgn(e) * torch.sgn(e * 2))(x.exp() * x),
    "product of matrices": lambda x: torch.sgn(x.exp() @ torch.eye(8)),
    "sign": lambda x: torch.sign(x.exp()),
}


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("name", SIGNS)
def test_signs_at_infinity_have_gradients_of_eager(name: str, is_last: bool) -> None:
    """Zeros without memory stay zeros, whatever they are multiplied by."""

    class Signed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            signs = SIGNS[name](x * self.w)
            return signs if is_last else signs + (x * self.w).tanh()

    sample = INFINITE.repeat(8, 1).requires_grad_()
    eager = Signed()
    planned = rockplan.solve(copy.deepcopy(eager), sample, "min", options=QUICK)
    found = []
    for module in (planned, eager):
        sample.grad = None
        result = module(sample)
        result.backward(torch.ones_like(result))
        found.append((result.detach(), module.w.grad, sample.grad))
    assert_equal_trees(*found, name)
