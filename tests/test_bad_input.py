"""Every kind of bad input gets an error of ours that names cause and remedy, and the model is
left exactly as it was."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import rockplan
from rockplan.api import plan_each
from rockplan.graph_builder.operators.layouts import Layouts
from testing.models import Case
from testing.training import solve_case, train_side_by_side, twin
from tests.following import assert_unchanged, state_of
from tests.usage import NormOfTransposed, count_programs


class Opaque:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class DynamicCache(Opaque):
    pass


class FailsHalfWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4)
        self.calls: list[int] = []
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls.append(self.count)
        self.extra = 1
        self.bn(x)
        raise RuntimeError("half way")


class TakesOneDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = self.inner(batch["x"])
        return y


class AssignsData(nn.Module):
    """Gives a parameter, a buffer, an activation or the sample other memory, or the same again."""

    def __init__(self, which: str, same: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.which, self.same = which, same

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        tensor = {"parameter": self.inner.weight, "buffer": self.scale, "input": x}.get(self.which)
        tensor = y if tensor is None else tensor
        tensor.data = tensor.data.contiguous() if self.same else tensor.data.clamp(-0.1, 0.1)
        return self.inner(x) * self.scale + y


class Replaces(nn.Module):
    """Ties a layer to another, or makes one, in its forward."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.a, self.b, self.layer = nn.Linear(4, 4), nn.Linear(4, 4), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer:
            self.c = nn.Linear(4, 4)
            x = self.c(x)
        else:
            self.b.weight = self.a.weight
        return self.b(self.a(x))


class Backward(torch.autograd.Function):
    """A checkpoint whose gradients of parameters do not come by autograd."""

    @staticmethod
    def forward(ctx: Any, inner: nn.Module, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.inner = inner
        ctx.save_for_backward(x)
        y: torch.Tensor = inner(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.inner(x), gradient)
        return None, x.grad, None, None


def forked(y: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return y + torch.rand(4)


class AsksForGradients(nn.Module):
    """Has autograd do what its caller finds in `.grad`, beside the gradients of the result."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x: torch.Tensor) -> Any:
        if self.how == "function":
            return Backward.apply(self.b, self.a(x), *self.b.parameters())
        if self.how == "parameter":
            self.b.requires_grad_(False)
        if self.how == "detached":
            return self.a(x).detach().requires_grad_().tanh()
        x = x.detach().clone().requires_grad_() if self.how == "leaf" else self.a(x)
        return self.b(x), x


def with_planned_part() -> nn.Module:
    part = rockplan.solve(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), SAMPLE, "100%")
    return nn.Sequential(part, nn.Linear(4, 4))


SAMPLE = torch.randn(3, 4)


class Classified(nn.Module):
    """Cross entropy inside the module, of targets some of which are ignored."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.loss = nn.CrossEntropyLoss(**settings)
        self.register_buffer("targets", torch.tensor([1, -100, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.loss(self.layer(x), self.targets)
        return found


WEIGHTS = torch.tensor([0.1, 0.7, 0.3, 0.9, 0.2])


class Aligned(nn.Module):
    """A loss over alignments inside the module; `lengths` makes those of the targets."""

    def __init__(self, lengths: Callable[[torch.Tensor, torch.Tensor], Any], **settings: Any):
        super().__init__()
        self.layer, self.lengths = nn.Linear(4, 5), lengths
        self.loss = nn.CTCLoss(**settings)

    def forward(self, x: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).log_softmax(-1)
        lengths = self.lengths(y, valid)
        steps = torch.full((2,), 12) if isinstance(lengths, torch.Tensor) else (12, 12)
        found: torch.Tensor = self.loss(y, targets, steps, lengths)
        return found


def aligned(valid: tuple[int, int] = (3, 2)) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    rows = [torch.arange(4) < n for n in valid]
    return torch.randn(12, 2, 4), torch.randint(1, 5, (2, 4)), torch.stack(rows)


class Nests(nn.Module):
    """Makes a nested tensor of its input."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.make = nn.Linear(4, 4), make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.make(x)).sum()


class Scaled(torch.Tensor):
    """Linear layers return twice of what they return for others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result if func is nn.functional.linear else result


def with_two() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(model.weight.detach(), model.weight.detach()))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, type[Exception], list[str]]] = {
    "lengths of activations": (
        lambda: Aligned(lambda y, valid: y.detach()[0, :, 0].abs().long() + 1),
        aligned(),
        rockplan.ValueDependentControlFlow,
        ["test_bad_input.py:", "torch.nn.functional.ctc_loss reads", "outside of the planned"],
    ),
    "a loss that looks at values": (
        lambda: Followed(lambda y: nn.functional.gaussian_nll_loss(y, y + 1, y.exp())),
        SAMPLE,
        rockplan.ValueDependentControlFlow,
        ["test_bad_input.py:", "torch.nn.functional.gaussian_nll_loss reads", "outside of the"],
    ),
    "a count of batches": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)),
        SAMPLE,
        rockplan.ValueDependentControlFlow,
        ["module '1'", "_BatchNorm.forward reads", "give it a momentum"],
    ),
    "a packed sequence": (
        lambda: Followed(lambda y: nn.utils.rnn.pack_padded_sequence(y[None], [3], True).data),
        SAMPLE,
        rockplan.DataDependentShape,
        ["torch.nn.utils.rnn.pack_padded_sequence", "outside of the planned"],
    ),
    "sample does not fit": (
        lambda: nn.Linear(4, 4),
        torch.randn(3, 5),
        rockplan.CaptureError,
        ["these arguments", "shapes"],
    ),
    "sample is the dictionary that the forward takes": (
        TakesOneDictionary,
        {"x": SAMPLE},
        rockplan.CaptureError,
        ["unexpected keyword argument 'x'", "pass `(batch,)`"],
    ),
    "sample of another dtype": (
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)),
        SAMPLE.double(),
        rockplan.CaptureError,
        [
            "module '0'",
            "test_bad_input.py:",
            "eager fails",
            "mixed dtype",
            "dtypes of sample_input",
        ],
    ),
    "sample of another dtype, seen by a product": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        SAMPLE.double(),
        rockplan.CaptureError,
        ["module '0'", "eager fails", "got Double and Float"],
    ),
    "opaque result and nothing else": (
        lambda: Followed(Opaque),
        SAMPLE,
        rockplan.UnsupportedModel,
        ["Opaque", "return tensors"],
    ),
    "part that is planned": (
        with_planned_part,
        SAMPLE,
        rockplan.UnsupportedModel,
        ["Sequential", "planned already", "original module"],
    ),
    "cache in the result": (
        lambda: Followed(DynamicCache),
        SAMPLE,
        rockplan.UnsupportedModel,
        ["DynamicCache", "use_cache=False"],
    ),
    **{
        f"{which} with other .data": (
            functools.partial(AssignsData, which),
            SAMPLE,
            rockplan.UnsupportedModel,
            ["test_bad_input.py:", "`.data`", "copy_("],
        )
        for which in ("parameter", "activation", "input")
    },
    "ties layers": (lambda: Replaces(False), SAMPLE, rockplan.UnsupportedModel, ["self.weight"]),
    "makes a layer": (
        lambda: Replaces(True),
        SAMPLE,
        rockplan.UnsupportedModel,
        ["self.c ", "once"],
    ),
    "forks the generator": (
        lambda: Followed(forked),
        SAMPLE,
        rockplan.UnsupportedModel,
        ["test_bad_input.py:", "fork_rng"],
    ),
    **{
        f"gradients of its own, {how}": (
            functools.partial(AsksForGradients, how),
            SAMPLE,
            rockplan.NothingToDifferentiate if how == "detached" else rockplan.UnsupportedModel,
            words,
        )
        for how, words in {
            "function": ["`.grad` of the parameter 'b.weight'", "torch.autograd.grad"],
            "parameter": ["`requires_grad` of the parameter 'b.weight'", "before the call"],
            "leaf": ["leaf 1", "requires_grad_()", "pass in"],
            "detached": ["detached"],
        }.items()
    },
    **{
        f"nested tensor inside, {name}": (
            functools.partial(Nests, make),
            SAMPLE,
            rockplan.UnsupportedModel,
            ["test_bad_input.py:", "nested tensor", "pad_sequence"],
        )
        for name, make in {
            "jagged": lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged),
            "of offsets": lambda x: torch.nested.nested_tensor_from_jagged(
                x, torch.tensor([0, 1, 3])
            ),
            "strided": lambda x: torch.nested.nested_tensor([x[:1], x[1:]]),
        }.items()
    },
    **{
        f"tensor of another class, {name}": (
            make,
            sample,
            rockplan.UnsupportedModel,
            [f"{where} is a {kind.__name__}", "as_subclass"],
        )
        for name, make, sample, where, kind in (
            (
                "of two",
                lambda: nn.Linear(4, 4),
                TwoTensor(SAMPLE, SAMPLE),
                "leaf 0 of the arguments",
                TwoTensor,
            ),
            ("parameter", with_two, SAMPLE, "leaf 0 of the module's result", TwoTensor),
        )
    },
    "fails half-way": (FailsHalfWay, SAMPLE, rockplan.CaptureError, ["half way"]),
    "sample on another device": (
        lambda: nn.Linear(4, 4),
        torch.empty(3, 4, device="meta"),
        rockplan.InvalidInput,
        ["meta", "cpu"],
    ),
}


class Followed(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.prod(1),
        lambda x: x.prod(),
        lambda x: x.prod(0, keepdim=True),
        lambda x: x.masked_fill(SAMPLE > 0, x.sum()),
    ],
    ids=["product of rows", "of all", "of columns", "what a mask is filled with"],
)
def test_gradients_that_depend_on_values(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(rockplan.UnsupportedModel, match=r"test_bad_input\.py:\d+: .*values"):
        rockplan.solve(Followed(function), SAMPLE, "100%")


@pytest.mark.parametrize(
    "factors", [torch.sigmoid, torch.relu], ids=["without a zero", "with zeros"]
)
def test_cumulative_products(factors: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What the refusal of a product advises; before torch 2.13 they are refused as well."""
    model = Followed(lambda x: factors(x).cumprod(1).select(1, -1))
    if torch.__version__ < "2.13":
        with pytest.raises(rockplan.UnsupportedModel, match="cumprod"):
            rockplan.solve(model, SAMPLE, "100%")
        return
    case = Case("product", model, (SAMPLE,), {}, lambda y: y.square().sum())
    train_side_by_side(case, solve_case(case, "100%"), twin(case), steps=2)


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: x.masked_fill(SAMPLE > 0, torch.tensor(2.0)),
        lambda x: torch.where(SAMPLE > 0, x.sum(), x),
    ],
    ids=["with a constant", "by where"],
)
def test_masks_that_are_filled(fill: Callable[[torch.Tensor], torch.Tensor]) -> None:
    case = Case("masked", Followed(fill), (SAMPLE,), {}, lambda y: y.square().sum())
    train_side_by_side(case, solve_case(case, "100%"), twin(case), steps=2)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_cause_and_remedy(kind: str) -> None:
    make, sample, error, words = REFUSED[kind]
    model = make()
    before = state_of(model)
    generator = torch.get_rng_state()
    with pytest.raises(error) as caught:
        rockplan.solve(model, sample, "50%")
    assert isinstance(caught.value, rockplan.RockplanError)
    for word in words:
        assert word in str(caught.value)
    assert_unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_refusals_are_errors_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(rockplan.CaptureError, match="reduction dim"):
        rockplan.solve(nn.Linear(4, 4), torch.randn(3, 5), "50%")
    assert not caplog.records
    logging.getLogger("torch._subclasses.fake_tensor").error("failed while attempting to run meta")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"weight": WEIGHTS},
        {"label_smoothing": 0.1},
        {"weight": WEIGHTS, "label_smoothing": 0.1, "reduction": "sum"},
    ],
)
def test_other_cross_entropies_are_planned(settings: dict[str, Any]) -> None:
    model = Classified(**settings)
    planned = rockplan.solve(copy.deepcopy(model), SAMPLE, "min")
    for module in (model, planned):
        module(SAMPLE).backward()
    for found, expected in zip(planned.parameters(), model.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        assert torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize(
    ("lengths", "settings"),
    [
        (lambda y, valid: valid.sum(-1), {}),
        (lambda y, valid: valid.sum(-1).int(), {"reduction": "sum", "zero_infinity": True}),
        (lambda y, valid: valid.sum(-1).tolist(), {"reduction": "none", "blank": 4}),
        (lambda y, valid: (3, 2), {}),
    ],
    ids=["tensor", "small integers", "read", "constant"],
)
def test_losses_over_alignments_are_planned(lengths: Any, settings: dict[str, Any]) -> None:
    case = Case("ctc", Aligned(lengths, **settings), aligned(), {}, lambda y: y.sum())
    train_side_by_side(case, solve_case(case, "100%"), twin(case), steps=2)


@pytest.mark.filterwarnings("error:.*costs that were measured")
def test_alignments_are_planned_for_each_longest_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where lengths are tensors, the plan takes them as such."""
    made = count_programs(monkeypatch)
    case = Case("ctc", Aligned(lambda y, valid: valid.sum(-1)), aligned(), {}, lambda y: y.sum())
    planned, eager = solve_case(case, "100%"), twin(case)
    for valid, plans in [((3, 2), 1), ((1, 3), 1), ((4, 1), 2), ((2, 4), 2), ((3, 3), 2)]:
        other = Case("ctc", case.model, aligned(valid), {}, case.loss)
        train_side_by_side(other, planned, eager, steps=1)
        assert len(made) == plans


def test_views_of_results_in_other_strides_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The strides of batch normalization as PyTorch's shape rule says, not as they are."""
    monkeypatch.setattr(Layouts, "corrected", lambda self, operator, args, kwargs, result: result)
    with pytest.raises(rockplan.UnsupportedModel, match="native_batch_norm.*contiguous"):
        rockplan.solve(NormOfTransposed(), torch.randn(2, 32, 16), "min")


def test_what_eager_refuses_is_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a profile in the cache has an estimate of it."""
    monkeypatch.setattr("rockplan.graph_builder.costs.call_costs._OF_DTYPES", re.compile("$^"))
    model, sample = nn.Linear(4, 4), SAMPLE.double()
    assert "1 calls estimated" in rockplan.plan(model, sample, "100%").profile_source
    monkeypatch.undo()
    with pytest.raises(rockplan.CaptureError, match="same dtype"):
        rockplan.plan(model, sample, "min")


def test_not_a_module() -> None:
    with pytest.raises(rockplan.InvalidInput, match="function"):
        rockplan.solve(lambda x: x, SAMPLE, "50%")  # type: ignore[arg-type]


def test_sample_of_unknown_kind() -> None:
    with pytest.raises(rockplan.InvalidInput, match="sample_input"):
        rockplan.solve(nn.Linear(4, 4), 3, "50%")


@pytest.mark.parametrize(
    "budget", ["", "much", "5 parsecs", "-1GB", "0", 0, -5, "0%", float("nan"), True, None, []]
)
def test_budgets_that_are_none(budget: Any) -> None:
    with pytest.raises(rockplan.InvalidBudget, match="GiB"):
        rockplan.solve(nn.Linear(4, 4), SAMPLE, budget)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("differentiated", 0, r"\(0,\)"),
        ("differentiated", "0", r"\(0,\)"),
        ("differentiated", (True,), r"\(0,\)"),
        ("time_limit_s", "5", "seconds"),
        ("time_limit_s", -1, "at least 0"),
        ("time_limit_s", float("nan"), "at least 0"),
        ("time_limit_s", None, "seconds"),
        ("bound_time_limit_s", -0.1, "at least 0"),
        ("keep", 0, "sequence of patterns"),
        ("recompute", [0], "sequence of patterns"),
        ("rerun_collectives", "yes", "False or True"),
    ],
)
def test_options_that_are_none(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(rockplan.InvalidInput, match=f"{name} is .*{remedy}"):
        rockplan.Options(**{name: value})


def test_collectives_that_run_again_have_one_plan(tmp_path: Path) -> None:
    with pytest.raises(rockplan.InvalidInput, match="leave out sizes, and pad"):
        rockplan.Options(rerun_collectives=True, sizes={0: (8, 16)})
    options = rockplan.Options(rerun_collectives=True)
    with pytest.raises(rockplan.InvalidInput, match=r"rerun_collectives=.*no effect in .*load"):
        rockplan.load(nn.Linear(4, 4), SAMPLE, tmp_path / "plan.json", options=options)


def test_options_that_are_written_otherwise() -> None:
    options = rockplan.Options(differentiated=[0], time_limit_s=numpy.float32(3))
    assert options.differentiated == (0,) and options.time_limit_s == 3


def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * y


class Gated(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x), self.last(x))


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_scripted_functions_compute_what_they_do_in_python() -> None:
    """Where TorchScript takes formulas of its own, last bits of eager's gradients differ."""
    torch.manual_seed(0)
    eager = Gated(gate)
    scripted = Gated(torch.jit.script(gate))
    scripted.load_state_dict(eager.state_dict())
    planned = rockplan.solve(scripted, SAMPLE, "min")
    for module in (eager, planned):
        module(SAMPLE).pow(2).sum().backward()
    for ours, theirs in zip(planned.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_wrapped_modules_are_refused() -> None:
    with pytest.raises(rockplan.InvalidInput, match="inside"):
        rockplan.solve(nn.DataParallel(nn.Linear(4, 4)), SAMPLE, "50%")


def test_an_argument_of_another_tensor_class_is_noticed() -> None:
    planned = rockplan.solve(nn.Linear(4, 4), SAMPLE, "100%")
    planned(SAMPLE)
    with pytest.raises(rockplan.UnsupportedModel, match=r"computes is a Scaled.*as_subclass"):
        planned(SAMPLE.as_subclass(Scaled))


def test_compiled_modules_are_refused_by_name() -> None:
    compiled = torch.compile(nn.Linear(4, 4), backend="eager")
    with pytest.raises(rockplan.InvalidInput, match=r"torch\.compile.*_orig_mod"):
        rockplan.solve(compiled, SAMPLE, "50%")


class Compiles(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compiled: Any = torch.compile(torch.sin, backend="eager")
        made: torch.Tensor = compiled(super().forward(x))
        return made


def test_functions_compiled_in_the_forward_are_refused() -> None:
    with pytest.raises(rockplan.UnsupportedModel, match=r"calls torch\.compile.*flex_attention"):
        rockplan.solve(Compiles(4, 4), SAMPLE, "100%")


def test_planning_inside_a_compiled_function_is_refused() -> None:
    @torch.compile(backend="eager")
    def plans(x: torch.Tensor) -> Any:
        return rockplan.solve(nn.Linear(4, 4), x, "100%")

    with pytest.raises(rockplan.InvalidInput, match=r"torch\.compile; plan the module before"):
        plans(SAMPLE)


def test_planning_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    model[1].eval()
    before = state_of(model)
    rockplan.solve(model, SAMPLE, "100%")
    assert_unchanged(model, before)


class CountsInPlace(nn.Module):
    """Reads what it has just changed; a check of it at every call would change it again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        steps.add_(1)
        return self.inner(x) * int(steps)


def test_values_changed_before_they_are_read_are_refused() -> None:
    norm = nn.BatchNorm1d(4, momentum=None)
    with pytest.raises(rockplan.ValueDependentControlFlow, match="the buffer 'num_batch"):
        rockplan.solve(norm, SAMPLE, "100%")
    steps = torch.tensor(1)
    with pytest.raises(rockplan.ValueDependentControlFlow):
        rockplan.solve(CountsInPlace(), (SAMPLE, steps), "100%")
    assert steps == 1


class Reads(nn.Module):
    """Scales by what `read` finds in itself and the layer's result."""

    def __init__(self, read: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.read = nn.Linear(4, 4), read
        self.register_buffer("table", torch.rand(4))
        self.plain = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y * self.read(self, y)


@pytest.mark.parametrize(
    "read",
    [
        lambda m, y: float(y.detach().tolist()[0][0]),
        lambda m, y: float(y.detach().numpy()[0, 0]),
        lambda m, y: float(numpy.asarray(y.detach())[0, 0]),
        lambda m, y: float(numpy.from_dlpack(y.detach())[0, 0]),
        lambda m, y: float(len(str(y))),
        lambda m, y: float(len(f"{y}")),
        lambda m, y: float(torch.allclose(y, y + 1)),
        lambda m, y: float(numpy.abs(m.inner.bias.detach()).sum()),
    ],
    ids=["list", "array", "made array", "exchanged", "text", "format", "closeness", "by numpy"],
)
def test_values_of_activations_that_python_reads_are_refused(read: Any) -> None:
    with pytest.raises(
        rockplan.ValueDependentControlFlow,
        match=r"test_bad_input\.py:\d+: .*the parameter 'inner\.",
    ):
        rockplan.solve(Reads(read), SAMPLE, "100%")


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.from_numpy(m.plain.numpy()),
        lambda m: torch.from_numpy(m.array.copy()),
        lambda m: torch.as_tensor([1.0, 2.0, 3.0, 4.0])[1:3].view(2, 1),
    ],
    ids=["array of a tensor", "array", "list"],
)
def test_what_is_made_of_data_and_written(make: Callable[[Any], torch.Tensor]) -> None:
    """The plan would write to the tensor that capture saw; a clone is made at every call."""
    model: Any = Reads(lambda m, y: make(m).mul_(2).sum())
    model.array = numpy.ones(4, numpy.float32)
    with pytest.raises(rockplan.UnsupportedModel, match=r"test_bad_input\.py:\d+: .*a clone"):
        rockplan.solve(model, SAMPLE, "100%")
    assert torch.equal(model.plain, torch.ones(4))
    model.read = lambda m, y: make(m).clone().mul_(2).sum()
    planned = rockplan.solve(model, SAMPLE, "100%")
    for _ in range(2):
        assert torch.equal(planned(SAMPLE), model(SAMPLE))


def test_reads_of_a_table_are_refused_by_name() -> None:
    model = Reads(lambda m, y: float(m.table.min()))
    with pytest.raises(
        rockplan.ValueDependentControlFlow, match=r"the buffer 'table'.*plain attribute"
    ):
        rockplan.solve(model, SAMPLE, "100%")


class Inverts(nn.Module):
    """The inverse transform looks whether windows overlap enough."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(9, 1))
        window = torch.hann_window(16)
        if is_buffer:
            self.register_buffer("window", window)
        else:
            self.window = window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.stft(x, 16, 4, window=self.window, return_complex=True)
        return torch.istft(found * self.scale, 16, 4, window=self.window)


def test_what_functions_of_torch_read_of_a_buffer() -> None:
    """The refusal names the buffer, and what it advises works."""
    x = torch.randn(2, 64)
    with pytest.raises(
        rockplan.ValueDependentControlFlow, match=r"function of PyTorch.*the buffer 'window'.*plain"
    ):
        rockplan.solve(Inverts(is_buffer=True), x, "100%")
    model = Inverts(is_buffer=False)
    planned = rockplan.solve(model, x, "100%")
    for window in (model.window, torch.hamming_window(16)):
        model.window.copy_(window)
        assert torch.equal(planned(x), model(x))


class DropsLayers(nn.Module):
    """Layer drop as transformers writes it."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw = torch.rand([])
        if draw < self.share:
            return x * 0 + self.inner.bias
        return self.inner(x)


def test_random_decisions_are_refused_unless_they_are_certain() -> None:
    with pytest.raises(rockplan.ValueDependentControlFlow, match="random draw.*layerdrop"):
        rockplan.solve(nn.Sequential(*(DropsLayers(0.1) for _ in range(9))), SAMPLE, "100%")
    model = DropsLayers(0.0)
    planned = rockplan.solve(model, SAMPLE, "100%")
    torch.manual_seed(0)
    expected = model(SAMPLE)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(planned(SAMPLE), expected)
    assert torch.equal(torch.get_rng_state(), state)


class DrawsOutside(nn.Module):
    def __init__(self, library: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.library = library

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = random.random() if self.library == "random" else float(numpy.random.rand())
        return self.inner(x) * scale


class DrawsFromIts(nn.Module):
    """Scales by the next draw of what it holds, somewhere in `held`."""

    def __init__(self, held: Any, draw: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.held, self.draw, self.read = nn.Linear(4, 4), held, draw, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(self.draw(self.read(self.held)))


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "numpy's Generator": (lambda: numpy.random.default_rng(0), lambda g: g.random()),
    "numpy's RandomState": (lambda: numpy.random.RandomState(0), lambda g: g.rand()),
    "Random of Python": (lambda: random.Random(0), lambda g: g.random()),
    "count": (lambda: itertools.count(1), next),
    "cycle": (lambda: itertools.cycle([2, 3]), next),
    "generator": (lambda: (n for n in range(1, 100)), next),
    "iterator of a list": (lambda: iter([1, 2, 3, 4, 5, 6, 7]), next),
}
HELD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda g: g, lambda held: held),
    "in a dictionary": (lambda g: {"g": g}, lambda held: held["g"]),
    "in an object": (lambda g: Opaque(g), lambda held: held.tensor),
}


@pytest.mark.parametrize(("kind", "where"), [*zip(GENERATORS, itertools.cycle(HELD))])
def test_draws_from_what_the_module_holds_are_refused(kind: str, where: str) -> None:
    (make, draw), (hold, read) = GENERATORS[kind], HELD[where]
    model = nn.Sequential(DrawsFromIts(hold(make()), draw, read))
    with pytest.raises(rockplan.UnsupportedModel, match=r"'0'.*a planned step would.*as a tensor"):
        rockplan.solve(model, SAMPLE, "100%")
    assert draw(read(model[0].held)) == draw(make())
    model = nn.Sequential(DrawsFromIts(hold(make()), lambda g: 2.0, read))
    planned = rockplan.solve(model, SAMPLE, "100%")
    assert torch.equal(planned(SAMPLE), model(SAMPLE))
    assert draw(read(model[0].held)) == draw(make())


RANDOM = numpy.random.default_rng(0)


class DrawsFromGlobal(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(RANDOM.random())


@pytest.mark.parametrize("package", ["tests", "torch_utils"])
def test_draws_from_a_global_generator_are_refused(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrawsFromGlobal, "__module__", f"{package}.layers")
    before = copy.deepcopy(RANDOM)
    with pytest.raises(rockplan.UnsupportedModel, match=r"draws from .*RANDOM .a Generator"):
        rockplan.solve(DrawsFromGlobal(4, 4), SAMPLE, "100%")
    assert RANDOM.random() == before.random()


@pytest.mark.parametrize(
    ("library", "name"), [("random", "Python's `random`"), ("numpy", r"numpy\.random")]
)
def test_randomness_outside_torch_is_refused(library: str, name: str) -> None:
    before = random.getstate(), repr(numpy.random.get_state())
    with pytest.raises(rockplan.UnsupportedModel, match=f"draws from {name}.*draw before the call"):
        rockplan.solve(DrawsOutside(library), SAMPLE, "100%")
    assert (random.getstate(), repr(numpy.random.get_state())) == before


@pytest.mark.parametrize("which", ["parameter", "buffer", "activation", "input"])
def test_data_that_stays_in_its_memory_is_planned(which: str) -> None:
    model = AssignsData(which, same=True)
    planned = rockplan.solve(copy.deepcopy(model), SAMPLE, "100%")
    assert torch.equal(planned(SAMPLE), model(SAMPLE))
    assert "data" not in vars(torch.Tensor)


@pytest.mark.parametrize(
    ("model", "owners"),
    [
        (nn.Sequential(nn.Linear(8, 500)), ["0/addmm"]),
        (
            nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 500), nn.Tanh()),
            ["2/addmm", "3/tanh"],
        ),
        (nn.Sequential(nn.Linear(8, 500), nn.LogSoftmax(-1)), ["0/addmm", "1/log_softmax"]),
    ],
)
def test_a_too_small_budget_names_shares_and_owners(model: nn.Module, owners: list[str]) -> None:
    x, options = torch.randn(16, 8), rockplan.Options(cache=False, time_limit_s=5)
    strict = replace(options, on_infeasible="error")
    with pytest.raises(rockplan.InfeasibleBudget) as caught:
        rockplan.solve(model, x, "5%", options=strict)
    error = caught.value
    assert (
        error.unplanned_bytes == rockplan.plan(model, x, "100%", options=options).eager_peak_bytes
    )
    assert error.minimum_share == error.minimum_bytes / error.unplanned_bytes
    assert "(5% of what is needed with everything kept)" in str(error)
    assert error.owner in owners and error.module_path == error.owner.partition("/")[0]
    assert error.source is not None and error.source in str(error)
    (share,) = re.findall(r"or '([\d.]+%)'", str(error))
    assert rockplan.plan(model, x, share, options=strict).peak_bytes <= error.minimum_bytes
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and vars(again) == vars(error)
    if error.minimum_share >= 1:
        assert "100%, so computing again hardly lowers it" in str(error)


def test_a_few_bytes_are_taken_for_a_share() -> None:
    model, options = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), rockplan.Options(cache=False)
    asks = {50: rockplan.InfeasibleBudget, "50": rockplan.InvalidBudget}
    for budget, kind in asks.items():
        with pytest.raises(kind, match="was a share meant.*'50%'"):
            rockplan.plan(model, torch.randn(4, 8), budget, options=options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"options": {"cache": False}},
        {"options": None},
        {"options": "replan"},
        {"sample_kwargs": [1]},
        {"sample_kwargs": "scale"},
    ],
)
@pytest.mark.parametrize("call", ["solve", "plan", "pareto"])
def test_arguments_of_the_wrong_kind_are_named(call: str, wrong: dict[str, Any]) -> None:
    budget = [] if call == "pareto" else ["100%"]
    with pytest.raises(rockplan.InvalidInput, match=f"^{next(iter(wrong))} is a"):
        getattr(rockplan, call)(nn.Linear(4, 4), torch.randn(2, 4), *budget, **wrong)


def test_graphs_are_refused_wherever_none_is_made() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    options = rockplan.Options(graph=True, cache=False)
    with pytest.raises(rockplan.InvalidInput, match="computes on cpu"):
        plan_each(model, x, ["100%"], options=options)
    with pytest.raises(rockplan.InvalidInput, match=r"rockplan\.pareto, which runs no plan"):
        rockplan.pareto(model, x, options=options)


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return torch.tanh(self.linear(x))


class Running(Counts):
    """Keeps a running mean of its own, in what is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = [torch.zeros(8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean[0].mul_(0.9).add_(0.1 * x.mean(0))
        return torch.tanh(self.linear(x) - self.mean[0])


class CheckpointOf(nn.Module):
    """Without `uses_checkpoint`, what the refusal advises."""

    def __init__(self, body: nn.Module, is_reentrant: bool, is_frozen: bool = False) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(8, 8), body
        self.is_reentrant, self.uses_checkpoint = is_reentrant, True
        self.first.requires_grad_(not is_frozen)
        self.body.requires_grad_(not is_frozen)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.uses_checkpoint:
            x = checkpoint(self.body, x, use_reentrant=self.is_reentrant)
        else:
            x = self.body(x)
        return self.last(x)


WRITING: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()),
    "a counter": Counts,
    "a mean of its own": Running,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "spectral norm by a hook": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8))),
}


@pytest.mark.parametrize(("body", "is_reentrant"), [*zip(WRITING, itertools.cycle([False, True]))])
def test_what_is_changed_inside_a_checkpoint_is_refused(body: str, is_reentrant: bool) -> None:
    """Eager changes it once more in the backward pass. What the refusal advises is planned."""
    torch.manual_seed(0)
    model, x = CheckpointOf(WRITING[body](), is_reentrant), torch.randn(16, 8)
    before = state_of(model)
    with pytest.raises(rockplan.UnsupportedModel, match=r"inside of torch\.utils\.checkpoint"):
        rockplan.solve(model, x, "min")
    assert_unchanged(model, before)
    model.uses_checkpoint = False
    case = Case("advised", model, (x,), {}, lambda y: y.square().mean())
    train_side_by_side(case, solve_case(case, "min"), twin(case), steps=2)


class SharesKeys(nn.Module):
    """Layers of which every other one makes keys for those after it."""

    def __init__(self, writes_inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.writes_inside = writes_inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared: dict[str, torch.Tensor] = {}
        for layer in self.layers:
            if not self.writes_inside:
                shared["key"] = layer(x)
            x = checkpoint(self.step, layer, x, shared, use_reentrant=False)
        return x.square().mean()

    def step(self, layer: Any, x: torch.Tensor, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.writes_inside:
            shared["key"] = layer(x)
        return x + shared["key"].tanh()


@pytest.mark.parametrize("writes_inside", [False, True])
def test_dictionaries_that_checkpoints_share_are_refused(writes_inside: bool) -> None:
    with pytest.raises(
        rockplan.UnsupportedModel, match=r"changes an argument\['key'\].*Leave the checkpoint out"
    ):
        rockplan.solve(SharesKeys(writes_inside), torch.randn(4, 8), "100%")


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("how", ["in evaluation mode", "frozen"])
def test_checkpoints_that_change_nothing_more_are_planned(how: str, is_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = CheckpointOf(WRITING["BatchNorm"](), is_reentrant, is_frozen=how == "frozen")
    if how == "in evaluation mode":
        model.body.eval()
    case = Case(how, model, (torch.randn(16, 8),), {}, lambda y: y.square().mean())
    train_side_by_side(case, solve_case(case, "min"), twin(case), steps=2)


ROWS = torch.arange(9)
"""Of a compressed matrix with one element a row."""


def compressed(make: Any, *block: int) -> Callable[[], torch.Tensor]:
    return lambda: make(ROWS, ROWS[:-1], torch.ones(8, *block), (8, 8))


SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.sparse_coo_tensor(ROWS[:-1].expand(2, 8), torch.ones(8), (8, 8)),
    "csr": compressed(torch.sparse_csr_tensor),
    "csc": compressed(torch.sparse_csc_tensor),
    "bsr": compressed(torch.sparse_bsr_tensor, 1, 1),
    "bsc": compressed(torch.sparse_bsc_tensor, 1, 1),
    "csr by its layout": lambda: torch.sparse_compressed_tensor(
        ROWS, ROWS[:-1], torch.ones(8), (8, 8), layout=torch.sparse_csr
    ),
    "csr of a dense one": lambda: torch.eye(8).to_sparse_csr(),
}


class Multiplies(nn.Module):
    """By a sparse matrix: one that it makes, or that it has in a buffer and reads, or does not."""

    def __init__(self, make: Callable[[], torch.Tensor], where: str) -> None:
        super().__init__()
        self.linear, self.make, self.where = nn.Linear(8, 8), make, where
        if where != "made":
            self.register_buffer("matrix", make(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.linear(x))
        if self.where == "unread":
            return y
        return (self.make() if self.where == "made" else self.matrix) @ y


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize(("kind", "where"), [*zip(SPARSE, itertools.cycle(["made", "read"]))])
def test_sparse_matrices_are_refused_by_their_layout(kind: str, where: str) -> None:
    model = Multiplies(SPARSE[kind], where)
    layout = SPARSE[kind]().layout
    with pytest.raises(rockplan.UnsupportedModel, match=rf"layout {layout}.*use dense") as said:
        rockplan.solve(model, torch.randn(8, 8), "min")
    assert f"{__file__}:" in str(said.value)


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_sparse_buffers_that_nobody_reads_do_not_matter(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Multiplies(SPARSE[kind], "unread"), torch.randn(8, 8)
    planned: Any = rockplan.solve(model, x, "min", options=rockplan.Options(check=True))
    assert planned.matrix is model.matrix
    assert torch.equal(planned(x), model(x))
    assert len(planned.plans) == 1
    blocks = nn.Sequential(*(Multiplies(SPARSE[kind], "unread") for _ in range(3)))
    expected = blocks(x)
    rockplan.solve_blocks(blocks, x, "100%")
    assert torch.equal(blocks(x), expected)
    if kind == "coo":  # modules with others cannot be copied
        assert "equal bit for bit" in str(rockplan.compare(model, x, ["min"]))


_OF_A_LIBRARY = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        if h.sum() > 0:
            h = -h
        return h
"""


@pytest.mark.parametrize("rest", ["vision/models.py", "_geometric/nn.py", "diffeq.py", "/nn/x.py"])
def test_packages_named_like_pytorch_are_not_it(rest: str) -> None:
    """Torchvision lies beside torch: its lines are named, as those of any package."""
    names: dict[str, Any] = {"__name__": "torch_named"}
    name = torch.__path__[0] + rest
    exec(compile(_OF_A_LIBRARY, name, "exec"), names)
    with pytest.raises(rockplan.ValueDependentControlFlow) as caught:
        rockplan.solve(names["Model"](), torch.randn(4, 8), "min")
    is_own = rest.startswith("/")
    assert (f"{name}:11" in str(caught.value)) is not is_own
    assert ("function of PyTorch torch_named" in str(caught.value)) is is_own


@pytest.mark.parametrize("build", [functools.partial(nn.Linear, device="meta"), nn.LazyLinear])
def test_models_without_memory_are_refused_everywhere(build: Callable[[int, int], Any]) -> None:
    made = build(4, 4) if build is not nn.LazyLinear else nn.LazyLinear(4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(made)).train()
    samples: tuple[torch.Tensor, ...] = (SAMPLE,)
    words = r"1\.0\.weight is (on the meta|lazy).*plan"
    for plan in (
        lambda: rockplan.solve(model, samples, "min"),
        lambda: rockplan.solve_blocks(model, samples, "min", blocks=[model[1]]),
        lambda: rockplan.solve_blocks(model, samples, "min"),
        lambda: rockplan.pareto(model, samples),
        lambda: rockplan.compare(model, samples),
    ):
        with pytest.raises(rockplan.InvalidInput, match=words):
            plan()
