"""Planning during training: what changed is named, it is said, bounded, and stands in nobody's way:
a forward's own exceptions leave a planned call as they leave an eager one."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import rockplan
from rockplan.values import progress
from testing.training import assert_same_state, assert_same_tensor

QUICK: dict[str, Any] = {"cache": False, "time_limit_s": 5, "without": ("exchange",)}
OPTIONS = rockplan.Options(**QUICK)
STRICT = rockplan.Options(**QUICK, on_mismatch="error")


def rows(count: int) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.0)
        self.gain = 1.0
        self.settings = {"bias": 0.5}
        self.register_buffer("seen", torch.zeros(8))

    def forward(
        self,
        x: Tensor,
        other: Tensor | None = None,
        *rest: Tensor,
        power: float = 1.0,
        lengths: Tensor | None = None,
        batch: Any = None,
    ) -> Tensor:
        y: Tensor = self.drop(torch.tanh(self.a(x) * self.gain + self.settings["bias"]) * power)
        for more in (other, *rest, *(batch or {}).values()):
            y = y if more is None else y + more.sum()
        if lengths is not None:
            y = y[: max(lengths.tolist())]
        return self.b(y)


def loss(y: Tensor) -> Tensor:
    return y.pow(2).mean()


def planned_with(options: rockplan.Options = STRICT, **given: Any) -> Any:
    torch.manual_seed(0)
    return rockplan.solve(Net(), {"x": rows(4), **given}, "min", options=options)


planned_once = functools.cache(planned_with)


def planned_net(options: rockplan.Options = OPTIONS) -> Any:
    """A copy of a module that was planned once."""
    return copy.deepcopy(planned_once(options))


def refused(planned: Any, *args: Any, **kwargs: Any) -> str:
    """What StalePlan says of a call."""
    with pytest.raises(rockplan.StalePlan) as caught:
        planned(*args, **kwargs)
    return str(caught.value)


# What is changed in a call -> what must be said of it, and what must not.
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shape": (lambda m: m(x=rows(5)), "x: 5x8, planned 4x8"),
    "dtype": (lambda m: m(x=rows(4).double()), "x: float64, planned float32"),
    "gradient": (
        lambda m: m(x=rows(4).requires_grad_()),
        "x: requires a gradient, planned requires no gradient",
    ),
    "strides": (
        lambda m: m(x=rows(8)[:, :4].clone().t()),
        "x: strides (1, 4), planned strides (8, 1)",
    ),
    "a new argument": (lambda m: m(x=rows(4), other=rows(4)), "other: 4x8, planned without"),
    "a literal": (lambda m: m(x=rows(4), power=2.0), "power: 2.0, planned without"),
    "autocast": (
        lambda m: torch.autocast("cpu", torch.bfloat16)(m)(x=rows(4)),
        "autocast: bfloat16 on cpu, planned off",
    ),
    "the default device": (
        lambda m: under(torch.device("cpu"), m),
        "the default device: cpu, planned none",
    ),
    "a mode of attention": (
        lambda m: under(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), m),
        "kernels of attention: math, planned",
    ),
    "an attribute": (
        lambda m: changed(m, gain=2.0)(x=rows(4)),
        "'gain' of the module: 2.0, planned 1",
    ),
    "in a dictionary": (
        lambda m: (m.settings.update(bias=1.0), m(x=rows(4))),
        "'settings' of the module, or something in it",
    ),
    "of a submodule": (
        lambda m: (setattr(m.drop, "p", 0.5), m(x=rows(4))),
        "'drop.p' of the module: 0.5, planned 0.0",
    ),
    "a training flag": (
        lambda m: (m.drop.eval(), m(x=rows(4))),
        "training flag of 'drop': eval, planned train",
    ),
    "frozen": (
        lambda m: (m.a.weight.requires_grad_(False), m(x=rows(4))),
        "parameter 'a.weight': frozen, planned trained",
    ),
    "a submodule": (
        lambda m: (setattr(m, "a", nn.Linear(8, 8, bias=False)), m(x=rows(4))),
        "submodules of the module",
    ),
}


def under(context: Any, module: Any) -> None:
    with context:
        module(x=rows(4))


def changed(module: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize("name", CALLS)
def test_what_changed_is_named_and_nothing_else(name: str) -> None:
    call, expected = CALLS[name]
    with pytest.raises(rockplan.StalePlan) as caught:
        call(planned_net(STRICT))
    message = str(caught.value)
    assert message.startswith(f"this call does not match what was planned: {expected}")
    others = [words.partition(":")[0] for n, (_, words) in CALLS.items() if n != name]
    rest = message.removeprefix(f"this call does not match what was planned: {expected}")
    assert not any(f"{word}:" in rest for word in others), message


def test_arguments_have_the_forwards_names() -> None:
    torch.manual_seed(0)
    planned = rockplan.solve(Net(), (rows(4), rows(4), rows(3)), "min", options=STRICT)
    assert "other: 2x8, planned 4x8" in refused(planned, rows(4), rows(2), rows(3))
    assert "rest[0]: 2x8, planned 3x8" in refused(planned, rows(4), rows(4), rows(2))
    x = rows(4)
    message = refused(planned, x, x, rows(3))
    assert "which arguments are one tensor: other: the same tensor as x" in message


def test_arguments_in_containers_have_their_path() -> None:
    planned = planned_with(batch={"k": rows(2)})
    assert "batch['k']: 3x8, planned 2x8" in refused(planned, x=rows(4), batch={"k": rows(3)})


def test_values_that_the_forward_reads_are_named() -> None:
    planned = planned_with(lengths=torch.tensor([2, 4]))
    message = refused(planned, x=rows(4), lengths=torch.tensor([2, 3]))
    assert "values of lengths that the forward reads" in message
    assert "test_replanning.py" in message


def test_the_nearest_kind_is_compared() -> None:
    planned = planned_net()
    planned(x=rows(12), other=rows(12))
    state = planned._rockplan
    state.settings = replace(state.settings, on_mismatch="error")
    assert "planned 12x8" in refused(planned, x=rows(13), other=rows(12))
    message = refused(planned, x=rows(12))
    assert "other: not passed, planned 12x8" in message or "x: 12x8, planned 4x8" in message


def steps(planned: Any, counts: Iterable[int]) -> None:
    for count in counts:
        loss(planned(x=rows(count))).backward()


def test_a_share_is_under_its_own_autocast(caplog: pytest.LogCaptureFixture) -> None:
    autocast = torch.autocast("cpu", torch.bfloat16)
    net, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))), rows(64)
    with autocast:
        expected = rockplan.solve(net, x, "60%", options=OPTIONS).plan
    planned: Any = rockplan.solve(net, x, "60%", options=OPTIONS)
    for _ in range(2):
        autocast(planned)(x).float().sum().backward()
        assert planned.plan.budget_bytes == expected.budget_bytes
    autocast(planned)(x[:32]).float().sum().backward()
    assert planned.plan.budget_bytes == expected.budget_bytes
    assert "with torch.autocast(...):` around the call of rockplan" in caplog.messages[0]


def test_planning_in_training_is_said(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_net()
    with caplog.at_level(logging.INFO, logger="rockplan"):
        assert caplog.messages == []
        steps(planned, [4, 5])
        (message,) = caplog.messages
        for words in ("Net", "2nd", "x: 5x8, planned 4x8", " s. ", "of other sizes run it too"):
            assert words in message
        steps(planned, [6, 5, 6, 4])
        loss(planned(x=rows(6), other=rows(2))).backward()
        assert "3rd" in caplog.messages[1] and "other: 2x8, planned without" in caplog.messages[1]
        assert "sample" in caplog.messages[1]
    assert "\n" not in "".join(caplog.messages)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.WARNING]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_far_planning_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        with progress.listening(lambda step: shown.append(step.stage)):
            yield

    planned = planned_net()
    monkeypatch.setattr("rockplan.reports.progress_bars.waiting", waiting)
    steps(planned, [4])
    assert shown == []
    monkeypatch.setattr(sys, "stderr", Terminal())
    steps(planned, [5])
    assert "capturing the model" in shown


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_go_on_counting(how: Any, caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_net()
    steps(planned, [5])
    copied = how(planned)
    caplog.set_level(logging.INFO)
    loss(copied(x=rows(5), power=2.0)).backward()
    assert "power: 2.0, planned without" in caplog.text


def test_backward_passes_that_are_planned_again_are_said(caplog: pytest.LogCaptureFixture) -> None:
    planned = rockplan.solve(Two(is_apart=True), rows(4), "min", options=rockplan.Options(**QUICK))
    planned(rows(4))[0].mean().backward()
    assert "the backward pass starts from other outputs" in caplog.text


def test_what_nobody_can_change_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A sample that is not quite like the steps, but strides of gradients."""
    planned = planned_net()
    with caplog.at_level(logging.INFO, logger="rockplan"):
        loss(planned(x=rows(4), other=rows(4))).backward()
        planned(x=rows(4), other=rows(4)).sum().backward()
    said = [r for r in caplog.records if "another kind" in r.getMessage()]
    assert [record.levelno for record in said] == [logging.INFO, logging.WARNING]
    assert "other: 4x8, planned without" in said[0].getMessage()
    assert "strides" in said[1].getMessage() and "loss=" in said[1].getMessage()


class Two(nn.Module):
    """Two results: with `is_apart` no one of them reaches all parameters."""

    def __init__(self, is_apart: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.is_apart = is_apart

    def forward(self, x: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.a(x)) * gain
        return self.b(y), self.c(y) if self.is_apart else y


def of_one(results: tuple[Tensor, Tensor]) -> None:
    loss(results[0]).backward()


def expanded(results: tuple[Tensor, Tensor]) -> None:
    sum(r.sum() for r in results).backward()  # type: ignore[union-attr]


def transposed(results: tuple[Tensor, Tensor]) -> None:
    result = results[0]
    result.backward(torch.linspace(0, 1, result.numel()).view(*result.shape[::-1]).T)


@pytest.mark.parametrize("backward", [of_one, expanded, transposed])
def test_new_kinds_are_planned_for_earlier_backwards(backward: Any) -> None:
    torch.manual_seed(0)
    eager = Two()
    planned: Any = rockplan.solve(copy.deepcopy(eager), {"x": rows(4)}, "min", options=OPTIONS)
    for kind, (count, gain) in enumerate(((4, 1.0), (5, 1.0), (6, 1.0), (6, 0.5))):
        for module in (planned, eager):
            backward(module(rows(count), gain=gain))
        assert_same_state(planned, eager, f"kind {kind}")
        # The sample was planned for both results, and then as it was trained.
        assert len(planned.plans) == 2 + kind


def test_the_sample_stays_for_calls_of_its_size() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    fast = rockplan.solve(model, torch.randn(16, 8), "min", options=OPTIONS)
    for rows in (4, 6, 16):
        fast(torch.randn(rows, 8)).square().mean().backward()
    assert [bounds[-1].program.open is None for bounds in fast._rockplan.programs.values()] == [
        True,
        False,
    ]


def test_unused_results_are_left_out_of_kinds() -> None:
    """Twice it is planned for first, with the parameters that it alone reaches."""
    torch.manual_seed(0)
    eager = Two(is_apart=True)
    planned: Any = rockplan.solve(copy.deepcopy(eager), {"x": rows(4)}, "min", options=OPTIONS)
    for count, plans in ((4, 2), (5, 3), (6, 4), (7, 5)):
        for module in (planned, eager):
            of_one(module(rows(count)))
        assert_same_state(planned, eager, f"{count} rows")
        assert len(planned.plans) == plans


def test_new_kinds_may_start_from_more() -> None:
    torch.manual_seed(0)
    eager = Two(is_apart=True)
    planned: Any = rockplan.solve(copy.deepcopy(eager), {"x": rows(4)}, "min", options=OPTIONS)
    for count, backward in ((4, of_one), (5, expanded), (6, of_one), (7, expanded)):
        for module in (planned, eager):
            backward(module(rows(count)))
        assert_same_state(planned, eager, f"{count} rows")


class Deep(nn.Module):
    """Twice the rows need twice the bytes, whatever is made again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.norm(self.layers(x)))
        return y


def deep(on_infeasible: Any, count: int = 64) -> tuple[Any, nn.Module]:
    """Planned under the fewest bytes that its sample takes, and an eager copy."""
    torch.manual_seed(0)
    model = Deep()
    least = rockplan.plan(model, rows(64), "min", options=OPTIONS).peak_bytes
    options = rockplan.Options(**QUICK, on_infeasible=on_infeasible)
    eager = copy.deepcopy(model)
    return rockplan.solve(model, rows(count), least, options=options), eager


def same_step(planned: Any, eager: Any, count: int) -> None:
    results = [module(rows(count)) for module in (planned, eager)]
    for result in results:
        loss(result).backward()
    assert_same_tensor(*results, "result")
    assert_same_state(planned, eager, "step")


def test_where_nothing_fits_the_smallest_plan_runs(caplog: pytest.LogCaptureFixture) -> None:
    planned, eager = deep("smallest")
    budget_bytes = planned.plan.budget_bytes
    same_step(planned, eager, 128)
    (said,) = (r.getMessage() for r in caplog.records if "no plan fits" in r.getMessage())
    smallest = rockplan.plan(Deep(), rows(128), "min", options=OPTIONS)
    assert planned.plan.peak_bytes == smallest.peak_bytes > budget_bytes
    assert f"budget of {budget_bytes} bytes" in said
    assert f"{smallest.peak_bytes - budget_bytes} more" in said
    same_step(planned, eager, 128)
    same_step(planned, eager, 64)
    assert planned.plan.peak_bytes <= budget_bytes


def test_where_nothing_fits_the_original_runs() -> None:
    planned, eager = deep("original")
    with pytest.warns(UserWarning, match="original forward.*x: 128x8, planned 64x8") as caught:
        same_step(planned, eager, 128)
    with warnings.catch_warnings():  # is not said again, and not planned again
        warnings.simplefilter("error")
        same_step(planned, eager, 128)
    assert len(caught) == 1 and len(planned.plans) == 1
    same_step(planned, eager, 64)
    copied = copy.deepcopy(planned)
    same_step(copied, copy.deepcopy(eager), 128)


def test_where_nothing_fits_the_change_is_named() -> None:
    planned, _ = deep("error")
    with pytest.raises(rockplan.InfeasibleBudget) as caught:
        planned(rows(128))
    (note,) = caught.value.__notes__
    assert "x: 128x8, planned 64x8" in note and "on_infeasible='smallest'" in note


def test_where_nothing_fits_at_planning(caplog: pytest.LogCaptureFixture) -> None:
    planned, eager = deep("smallest", 128)
    assert "no plan fits" in caplog.text
    same_step(planned, eager, 128)
    for choice in ("error", "original"):
        with pytest.raises(rockplan.InfeasibleBudget):
            deep(choice, 128)
    with pytest.raises(rockplan.InvalidInput, match="on_infeasible"):
        rockplan.Options(on_infeasible="never")  # type: ignore[arg-type]


def test_plan_files_know_what_to_do_then(tmp_path: Any) -> None:
    planned, eager = deep("error")
    path = tmp_path / "deep.plan.json"
    rockplan.save_plan(planned, path)
    options = rockplan.Options(**QUICK, on_infeasible="original")
    loaded = rockplan.load(copy.deepcopy(eager), rows(64), path, options=options)
    with pytest.warns(UserWarning, match="original forward"):
        same_step(loaded, eager, 128)


class Rejected(Exception):
    """Of the user's; has no message and a field."""

    def __init__(self, rows: int, kept: Any = None) -> None:
        super().__init__()
        self.rows = rows
        self.kept = kept


class Picky(nn.Module):
    """Raises for some calls, after it has drawn and changed a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.known = {"a": 1.0}

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        y: Tensor = self.drop(self.norm(self.a(x)))
        match how:
            case "stop":
                raise StopIteration("bad batch")
            case "value":
                raise ValueError(f"not for {tuple(y.shape)}")
            case "own":
                raise Rejected(len(y), y)
            case "assert":
                raise AssertionError("no rows")  # as `testing.training.ensure`
            case "key":
                y = y * self.known["b"]
            case "chained":
                try:
                    raise KeyError("inner")
                except KeyError as error:
                    raise Rejected(1) from error
            case "interrupt":
                raise KeyboardInterrupt
            case "runtime":
                raise RuntimeError("not now")
            case "operator":
                y = y @ y
            case "library":
                nn.functional.cross_entropy(y, torch.zeros(1, dtype=torch.long))
        return y


RAISES = ["stop", "value", "own", "assert", "key", "chained", "runtime", "library"]


def raised(module: Any, how: str) -> BaseException:
    torch.manual_seed(1)
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        module(rows(4), how)
    return caught.value


@pytest.mark.parametrize("how", RAISES)
def test_the_forwards_errors_leave_as_themselves(how: str) -> None:
    torch.manual_seed(0)
    eager = Picky()
    planned: Any = rockplan.solve(copy.deepcopy(eager), rows(4), "min", options=OPTIONS)
    expected = raised(eager, how)
    after = torch.get_rng_state()
    found = raised(planned, how)
    assert type(found) is type(expected) and str(found) == str(expected)
    assert type(found.__cause__) is type(expected.__cause__)
    assert found.__context__ is None or found.__context__ is found.__cause__
    assert torch.equal(torch.get_rng_state(), after)
    assert_same_state(planned, eager, "raised")
    if isinstance(found, Rejected) and isinstance(expected, Rejected) and expected.kept is not None:
        assert_same_tensor(found.kept, expected.kept, "kept by the exception")
        assert type(found.kept) is Tensor
    for module in (planned, eager):  # and the training goes on
        torch.manual_seed(2)
        loss(module(rows(4))).backward()
    assert_same_state(planned, eager, "next step")
    assert len(planned.plans) == 1


def remembering() -> Callable[[Tensor], Tensor]:
    """A function that is kept, with variables of its own."""
    made: dict[str, Tensor] = {}

    def remember(x: Tensor) -> Tensor:
        made["last"] = x
        if len(x) > 4:
            raise ValueError("too many")
        return x * len(made)

    return remember


class Remembers(nn.Module):
    """Calls what no name leads to: libraries are not looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch._remember(self.a(x))  # type: ignore[attr-defined]


def test_variables_of_functions_that_are_kept_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    remember = remembering()
    monkeypatch.setattr(torch, "_remember", remember, raising=False)
    for _ in range(2):
        with pytest.raises(rockplan.ForwardRaises):
            rockplan.solve(Remembers(), rows(8), "100%", options=OPTIONS)
    assert type(remember(rows(4))) is Tensor


def test_an_operators_error_says_where_to_look() -> None:
    torch.manual_seed(0)
    eager = Picky()
    planned: Any = rockplan.solve(copy.deepcopy(eager), rows(4), "min", options=OPTIONS)
    raised(eager, "operator")
    after = torch.get_rng_state()
    found = raised(planned, "operator")
    assert torch.equal(torch.get_rng_state(), after)
    assert_same_state(planned, eager, "raised")
    assert isinstance(found, rockplan.ForwardRaises) and isinstance(found, RuntimeError)
    assert "shapes, dtypes and devices" in str(found) and type(found.__cause__) is RuntimeError
    loss(planned(rows(4))).backward()


def test_an_interrupt_leaves_a_planned_call() -> None:
    planned: Any = rockplan.solve(Picky(), rows(4), "min", options=OPTIONS)
    assert isinstance(raised(planned, "interrupt"), KeyboardInterrupt)
    loss(planned(rows(4))).backward()


@pytest.mark.parametrize("how", RAISES)
def test_at_planning_it_is_our_error_with_cause(how: str) -> None:
    with pytest.raises(rockplan.CaptureError) as caught:
        rockplan.solve(Picky(), (rows(4), how), "min", options=OPTIONS)
    assert isinstance(caught.value, rockplan.ForwardRaises)
    assert type(caught.value.__cause__) is type(raised(Picky(), how))


class Follows(nn.Module):
    """What it does cannot be captured, where it runs in eager execution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, strange: bool = False) -> Tensor:
        y: Tensor = self.norm(self.a(x))
        if strange and _get_current_dispatch_mode() is not None:
            raise ValueError("not a mode that I know")
        return torch.dropout(y, 0.5, train=True)


def test_errors_of_captures_alone_stay_ours() -> None:
    torch.manual_seed(0)
    eager = Follows()
    planned = rockplan.solve(copy.deepcopy(eager), rows(4), "min", options=OPTIONS)
    eager(rows(4), strange=True)
    eager = copy.deepcopy(planned)
    before = torch.get_rng_state()
    with pytest.raises(rockplan.CaptureError) as caught:
        planned(rows(4), strange=True)
    assert isinstance(caught.value.__cause__, ValueError)
    assert_same_state(planned, eager, "refused")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shallow_copy_is_one() -> None:
    planned = planned_net()
    steps(planned, [4])
    copied = copy.copy(planned)
    assert copied is not planned and copied.a is planned.a
    assert [*map(id, copied.parameters())] == [*map(id, planned.parameters())]
    assert type(copied) is type(planned) and len(copied.plans) == 1
    assert_same_tensor(copied(x=rows(4)), planned(x=rows(4)), "copy")
    steps(copied, [5])
    assert (len(copied.plans), len(planned.plans)) == (2, 1)  # each finds its own
    copied.gain = 3.0
    assert planned.gain == 1.0
    eager = Net()
    eager.load_state_dict(planned.state_dict())
    assert_same_tensor(planned(x=rows(4)), eager(x=rows(4)), "the first is as it was")
    eager.gain = 3.0
    for module in (copied, copy.copy(copied), pickle.loads(pickle.dumps(copied))):
        assert_same_tensor(module(x=rows(4)), eager(x=rows(4)), "changed copy")
        assert_same_tensor(copy.deepcopy(module)(x=rows(5)), eager(x=rows(5)), "deep")


class CopiesItself(Net):
    def __copy__(self) -> Any:
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(self.__dict__)
        copied._parameters, copied._modules = dict(self._parameters), dict(self._modules)
        copied.gain = self.gain * 2
        return copied


def test_classes_are_copied_as_they_say() -> None:
    torch.manual_seed(0)
    eager = CopiesItself()
    planned = rockplan.solve(copy.deepcopy(eager), {"x": rows(4)}, "min", options=OPTIONS)
    copies = [copy.copy(planned), copy.copy(eager)]
    assert [c.gain for c in copies] == [2.0, 2.0]
    for copied in copies:
        copied.b = nn.Linear(8, 8, bias=False)
        nn.init.ones_(copied.b.weight)
    assert_same_tensor(copies[0](x=rows(4)), copies[1](x=rows(4)), "copies")
    assert_same_tensor(planned(x=rows(4)), eager(x=rows(4)), "where they come from")


class Reader(nn.Module):
    """Has an attribute `outcome`, as this file has a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.outcome(x))).square().mean()


class Stacking(Reader):
    """Calls a function of PyTorch's with a name that others have that look variables up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.stack([self.outcome(x), x])).square().mean()


@pytest.mark.parametrize("kind", [Reader, Stacking])
def test_script_variables_named_like_attributes_are_others(
    kind: type[Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = rockplan.solve(kind(), torch.randn(8, 16), "100%")
    monkeypatch.setattr(
        "rockplan.solving.programs.captured_call", lambda *args: pytest.fail("planned again")
    )
    for _ in range(3):
        monkeypatch.setitem(globals(), "outcome", planned(torch.randn(8, 16)))
        globals()["outcome"].backward()


class ByName(type):
    """Its classes have no hash."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, ByName) and cls.__name__ == other.__name__


class Settings(metaclass=ByName):
    gain = 1.0


class Unhashable(Reader, metaclass=ByName):
    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.settings.gain)


@pytest.mark.parametrize("make", [Settings, lambda: Settings])
def test_classes_without_a_hash(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make()
    planned: Any = rockplan.solve(Unhashable(settings), torch.randn(8, 16), "100%", options=OPTIONS)
    eager = Unhashable(settings)
    eager.load_state_dict(planned.state_dict())
    for gain in (1.0, 3.0):
        monkeypatch.setattr(settings, "gain", gain)
        x = torch.randn(8, 16)
        assert_same_tensor(planned(x), eager(x), f"gain {gain}")
    assert len(planned.plans) == 2


SCALE = 2.0


def by_name(self: Reader, x: Tensor) -> Tensor:
    return Reader.forward(self, x) * SCALE


def in_a_nested_class(self: Reader, x: Tensor) -> Tensor:
    class Of:
        scale = SCALE

    return Reader.forward(self, x) * Of.scale


def in_a_comprehension(self: Reader, x: Tensor) -> Tensor:
    loss = Reader.forward(self, x)
    return torch.stack([loss * scale for scale in (SCALE, 1.0) if SCALE]).mean()


def in_a_nested_function(self: Reader, x: Tensor) -> Tensor:
    def scale() -> float:
        return SCALE

    return Reader.forward(self, x) * scale()


def by_text(self: Reader, x: Tensor) -> Tensor:
    return Reader.forward(self, x) * float(globals()["SCALE"])


def of_the_frame(self: Reader, x: Tensor) -> Tensor:
    return Reader.forward(self, x) * sys._getframe().f_globals["SCALE"]


def of_an_import(self: Reader, x: Tensor) -> Tensor:
    import tests.settings_of_a_user as file

    return Reader.forward(self, x) * file.SCALE


def from_an_import(self: Reader, x: Tensor) -> Tensor:
    def scale() -> float:
        from tests.settings_of_a_user import SCALE as found

        return found

    return Reader.forward(self, x) * scale()


# No file of ours has a relative import.
exec(
    """
def relative(self, x):
    from . import settings_of_a_user

    return Reader.forward(self, x) * settings_of_a_user.SCALE
""",
    globals(),
)


READING = (
    *(by_name, in_a_nested_class, in_a_comprehension, in_a_nested_function, by_text),
    *(of_the_frame, of_an_import, from_an_import, globals()["relative"]),
)


@pytest.mark.parametrize("forward", READING, ids=lambda f: f.__name__)
def test_a_variable_that_is_read_is_noticed(forward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    file = types.ModuleType("tests.settings_of_a_user")
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setattr("tests.settings_of_a_user", file, raising=False)
    monkeypatch.setattr(file, "SCALE", 2.0, raising=False)
    eager = type("Reading", (Reader,), {"forward": forward, "__module__": __name__})()
    planned: Any = rockplan.solve(copy.deepcopy(eager), torch.randn(8, 16), "100%", options=OPTIONS)
    for value in (2.0, 5.0):
        monkeypatch.setitem(globals(), "SCALE", value)
        monkeypatch.setattr(file, "SCALE", value)
        x = torch.randn(8, 16)
        assert_same_tensor(planned(x), eager(x), forward.__name__)
    assert len(planned.plans) == 2
