"""What a plan was made under is compared before each call: other arguments, another state."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import rockplan
from rockplan.python_state import writes
from rockplan.runtime.guards import module_signature
from testing.models import mean_square
from tests.usage import both, count_programs

SAMPLE = torch.randn(16, 16)


class Prompted(nn.Module):
    """Is passed what may be a parameter or a buffer of its own, or share memory with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.prompt = nn.Parameter(torch.randn(16, 16))
        self.register_buffer("table", torch.randn(16, 16))

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.linear(x) @ given)
        return y @ self.prompt.exp() @ self.table


class Decays(Prompted):
    """Changes the buffer in place, between two reads of what it is given."""

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) + given)
        self.table.mul_(0.5)
        return torch.tanh(self.linear(y) + given) @ self.prompt


def other(module: nn.Module, kind: int = 0) -> torch.Tensor:
    torch.manual_seed(kind)
    return torch.randn(16, 16)


GIVEN: dict[str, Callable[[Any], torch.Tensor]] = {
    "another parameter": lambda m: nn.Parameter(other(m)),
    "its parameter": lambda m: m.prompt,
    "its other parameter": lambda m: m.linear.weight,
    "another tensor": other,
    "its buffer": lambda m: m.table,
    "view of its buffer": lambda m: m.table.view(16, 16),
}


@pytest.mark.parametrize("kind", [Prompted, Decays])
@pytest.mark.parametrize("sample", GIVEN)
def test_which_argument_is_a_tensor_of_the_module(
    kind: type[Prompted], sample: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned for one, called with all."""
    torch.manual_seed(0)
    model = kind()
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, (SAMPLE, GIVEN[sample](model)), "min")

    def use(module: nn.Module, given: str) -> Any:
        argument = GIVEN[given](module)
        result = module(SAMPLE, argument)
        mean_square(result).backward()
        return result, argument.grad

    for given in (*GIVEN, sample):
        both(planned, eager, lambda m, given=given: use(m, given), given)
    count = len(made)
    assert count > 2
    for given in GIVEN:
        both(planned, eager, lambda m, given=given: use(m, given), f"{given}, again")
    assert len(made) == count


def test_the_modules_tensors_as_arguments_of_copies() -> None:
    torch.manual_seed(0)
    model = Decays()
    planned = rockplan.solve(model, (SAMPLE, model.table), "min")
    strict = rockplan.Options(on_mismatch="error")
    copied = copy.deepcopy(rockplan.solve(model, (SAMPLE, model.table), "min", options=strict))
    both(copied, copy.deepcopy(planned), lambda m: m(SAMPLE, m.table), "a copy")
    for given in (model.table, copied.table[:]):
        with pytest.raises(rockplan.StalePlan, match="which arguments are"):
            copied(SAMPLE, given)


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 1.0


@dataclasses.dataclass
class Derived(Slotted):
    """In its dictionary and in a slot that it inherits."""

    shift: float = 0.0


class Settings:
    """A configuration that also holds `held`."""

    def __init__(self, held: Any) -> None:
        self.scale, self.held = 1.0, held
        self._calls, self.record = 0, [1.0]


class Child:
    """Knows what it is in."""

    def __init__(self, parent: Any) -> None:
        self.parent, self.scale = parent, 1.0


class Schedule:
    """Is called, and not a function."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self) -> float:
        return self.scale


class WithLock(Schedule):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> WithLock:
        return WithLock()


def first_of(found: list[float]) -> float:
    return found[0]


class Scaled(nn.Module):
    """Scales by what `read` finds in its attribute."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.held, self.read = held, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.linear(x) * self.read(self.held))
        return y


def with_child() -> Settings:
    settings = Settings(None)
    settings.held = Child(settings)
    return settings


def set_scale(held: Any, value: float = 2.0) -> None:
    held.scale = value


def set_first(held: Any) -> None:
    held[0] = 2


class DictionaryWithAttributes(dict[str, float]):
    """As configurations of other libraries are."""

    scale = 1.0


def scale(held: Any) -> float:
    return float(held.scale)


def exchange(held: Any) -> None:
    held.held = torch.tensor([2.0, 3.0])


READS: dict[str, Callable[[torch.Tensor], float]] = {
    "list": lambda held: float(held.tolist()[0]),
    "array": lambda held: float(held.numpy()[0]),
    "array made": lambda held: float(numpy.asarray(held)[0]),
    "sum by numpy": lambda held: float(numpy.nansum(held)),
    "array exchanged": lambda held: float(numpy.from_dlpack(held)[0]),
    "text": lambda held: float(len(str(held))) if "2." in str(held) else 1.0,
    "formatted text": lambda held: 2.0 if "2." in f"{held}" else 1.0,
}


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "inherited slot": (Derived, scale, set_scale),
    "beside a module": (lambda: Settings(nn.Linear(2, 2)), scale, set_scale),
    "callable": (Schedule, lambda held: held(), set_scale),
    "in a configuration that it refers to": (
        with_child,
        lambda held: held.held.scale,
        lambda held: set_scale(held.held),
    ),
    "tensor of a configuration": (
        lambda: Settings(torch.tensor([2.0, 1.0])),
        lambda held: held.held[1],
        exchange,
    ),
    "array of a configuration": (
        lambda: Settings(numpy.ones(3)),
        lambda held: float(held.held[0]),
        lambda held: held.held.__setitem__(0, 2.0),
    ),
    "array of Python": (lambda: array.array("d", [1.0]), lambda held: held[0], set_first),
    "dictionary with attributes": (DictionaryWithAttributes, scale, set_scale),
    "dictionary of a class of its own": (
        lambda: collections.UserDict(scale=1.0),
        lambda held: held["scale"],
        lambda held: held.update(scale=2.0),
    ),
    "dictionary with an order": (
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        lambda held: next(iter(held.values())),
        lambda held: held.move_to_end("a"),
    ),
    "dictionary with a default": (
        lambda: collections.defaultdict(lambda: 1.0),
        lambda held: dict(held).get("scale", held.default_factory()),
        lambda held: setattr(held, "default_factory", lambda: 2.0),
    ),
    "object of a method": (
        lambda: Schedule().__call__,
        lambda held: held(),
        lambda held: set_scale(held.__self__),
    ),
    "object of a method of a class of C": (
        lambda: {"scale": 1.0}.__getitem__,
        lambda held: held("scale"),
        lambda held: held.__self__.update(scale=2.0),
    ),
    "object of a method beside a lock": (
        lambda: WithLock().__call__,
        lambda held: held(),
        lambda held: set_scale(held.__self__),
    ),
    "number in a tensor, by its data": (
        lambda: torch.tensor([0.0, 1.0]),
        lambda held: float(held.sum()),
        lambda held: held.data.fill_(2.0),
    ),
    "number in a tensor, none at first": (
        lambda: torch.tensor(float("nan")),
        lambda held: 3.0 if math.isnan(held.item()) else held.item(),
        lambda held: held.fill_(2.0),
    ),
    "decision on a tensor": (
        lambda: torch.tensor([True, False]),
        lambda held: 1.0 if held.all() else 2.0,
        lambda held: held.fill_(True),
    ),
    **{
        f"{way} of a tensor": (
            lambda: torch.tensor([[1.0, float("nan")], [0.0, 1.0]])[0],
            read,
            lambda held: held.mul_(2.0),
        )
        for way, read in READS.items()
    },
    "sign of a zero in a list": (
        lambda: torch.tensor([0.0, 1.0]),
        lambda held: math.copysign(1.0, held.tolist()[0]),
        lambda held: held[0].neg_(),
    ),
    "list of integers": (
        lambda: torch.tensor([1, 2]),
        lambda held: float(held.flip(0).tolist()[1]),
        lambda held: held.fill_(3),
    ),
    "closeness of tensors": (
        lambda: torch.tensor([1.0, 2.0]),
        lambda held: 1.0 if torch.allclose(held, torch.tensor([1.0, 2.0])) else 2.0,
        lambda held: held.fill_(3.0),
    ),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_what_the_forward_reads_of_an_attribute(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, read, change = CHANGED[kind]
    torch.manual_seed(0)
    model = Scaled(make(), read)
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, SAMPLE, "min")
    for _ in range(2):
        both(planned, eager, lambda m: mean_square(m(SAMPLE)).backward(), "as planned")
    assert len(made) == 1
    copied = copy.deepcopy(planned)
    for module in (planned, eager, copied):
        change(module.held)
    for module in (planned, copied):
        for _ in range(2):
            eager.zero_grad()
            module.zero_grad()
            both(module, eager, lambda m: mean_square(m(SAMPLE)).backward(), "changed")
    assert len(made) == 3


class ScalesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient * ctx.module.scale


def number(value: Any) -> float:
    return float(value or 1)


# Ways to read the attribute of a module, and whether it is read at all.
ATTRIBUTE: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], bool]] = {
    "by name": (lambda m, x: x * m.scale, True),
    "by a computed name": (lambda m, x: x * getattr(m, "sc" + "ale"[:3]), True),
    "of the dictionary": (lambda m, x: x * m.__dict__["scale"], True),
    "of vars": (lambda m, x: x * number(vars(m).get("scale")), True),
    "of a copy": (lambda m, x: x * number(copy.copy(m).scale), True),
    "if it is there": (lambda m, x: x * (2 if hasattr(m, "later") else 1), True),
    "in backward": (ScalesBackward.apply, True),
    "not at all": (lambda m, x: x, False),
    "while it is set": (lambda m, x: setattr(m, "seen", 1) or x, False),
}


class OneAttribute(nn.Module):
    def __init__(self, read: Any) -> None:
        super().__init__()
        self.inner, self.read, self.scale = nn.Linear(16, 16), [read], 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.inner(self.read[0](self, x)))
        return y


@pytest.mark.parametrize("way", ATTRIBUTE)
def test_attributes_that_are_not_read_make_no_kind(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, is_read = ATTRIBUTE[way]
    torch.manual_seed(0)
    model, x = OneAttribute(read), SAMPLE.clone().requires_grad_()
    model(x)  # what the first call sets is there when it is planned
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, x, "min")
    for name, value in (("scale", 2.5), ("scale", 3.5), ("later", 1)):
        for module in (planned, eager):
            setattr(module, name, value)
            setattr(module.inner, name, value)
            module.zero_grad()
        both(planned, eager, lambda m: mean_square(m(x)).backward(), name)
    assert (len(made) > 1) is is_read


class KeepsNumber(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, given: Any) -> torch.Tensor:
        ctx.given = given
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * to_two(ctx.given), None


def to_two(given: Any) -> int:
    return 2 if (given if isinstance(given, int) else len(given)) > 3 else 1


# What a forward does with an argument (a number, a tensor), and whether it looks at it.
LOOKS: dict[str, tuple[Callable[[Any, torch.Tensor, Any], Any], bool]] = {
    "computes": (lambda m, x, given: x * to_two(given), True),
    "decides": (lambda m, x, given: x * 2 if to_two(given) == 2 else x, True),
    "counts": (lambda m, x, given: sum((x for _ in range(to_two(given))), x), True),
    "reads its text": (lambda m, x, given: x * len(str(given)), True),
    "asks for its class, then for it": (
        lambda m, x, given: x * to_two(given) if type(given) in (int, torch.Tensor) else x,
        True,
    ),
    "keeps it for backward": (lambda m, x, given: KeepsNumber.apply(x, given), True),
    "returns it": (lambda m, x, given: (x, given), True),
    "passes it on": (lambda m, x, given: m.pass_on(x, given=given), False),
    "asks whether it is there": (lambda m, x, given: x if given is not None else -x, False),
    "asks what it is": (
        lambda m, x, given: x if isinstance(given, int | torch.Tensor) else -x,
        False,
    ),
}


class Looks(nn.Module):
    def __init__(self, look: Any) -> None:
        super().__init__()
        self.inner, self.look = nn.Linear(16, 16), [look]

    def forward(self, x: torch.Tensor, given: Any = None) -> Any:
        return self.look[0](self, torch.tanh(self.inner(x)), given)

    def pass_on(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("of", ["number", "tensor"])
@pytest.mark.parametrize("name", LOOKS)
def test_arguments_that_are_not_read_make_no_kind(
    name: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, is_read = LOOKS[name]
    torch.manual_seed(0)
    model = Looks(look)
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    numbers: Any = (2, 3, 5, 2, 7, 4)
    sizes = numbers if of == "number" else [torch.ones(n, dtype=torch.long) for n in numbers]
    planned = rockplan.solve(model, (SAMPLE, sizes[0]), "min")
    for given in sizes:

        def use(m: Any, given: Any = given) -> Any:
            result = m(SAMPLE, given)
            first, *others = result if isinstance(result, tuple) else (result,)
            mean_square(first).backward()
            return first, *others

        both(planned, eager, use, f"{name}: {given}")
    # Sizes of tensors may be open, whether they are read or not.
    assert len(made) <= 2 if not is_read else of == "tensor" or len(made) > 2


class Cuts(nn.Module):
    """Runs over parts of its input, as long as another one says."""

    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(16, 16), read

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        parts = [torch.tanh(self.linear(part)) for part in x.split(list(self.read(lengths)))]
        return torch.cat([part * (i + 1) for i, part in enumerate(parts)])


@pytest.mark.parametrize(
    "read",
    [
        lambda lengths: lengths.tolist(),
        lambda lengths: (lengths + 1).sub(1).numpy().tolist(),
        lambda lengths: [int(n) for n in numpy.asarray(lengths)],
        lambda lengths: map(int, re.findall(r"\d+", str(lengths))),
    ],
    ids=["list", "array of a sum", "array", "text"],
)
def test_integer_inputs_that_python_reads(
    read: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Cuts(read)
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, (SAMPLE, torch.tensor([4, 12])), "min")
    for lengths in ([4, 12], [8, 8], [4, 12], [8, 8]):
        given = torch.tensor(lengths)
        both(planned, eager, lambda m, given=given: mean_square(m(SAMPLE, given)), "cut")
    assert len(made) == 2
    assert not {"tolist", "numpy"} & vars(torch.Tensor).keys()


class Equal(nn.Module):
    """Its results tell apart values that are equal to Python."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), held

    def forward(self, x: torch.Tensor, given: Any = None) -> Any:
        value = self.held if given is None else given
        number = getattr(value, "scale", value)
        number = number[0] if isinstance(number, list | tuple | numpy.ndarray) else number
        return self.linear(x), torch.arange(3) * number, torch.full((1,), number).reciprocal()


@dataclasses.dataclass(frozen=True)
class Scale:
    scale: Any


EQUAL: dict[str, Callable[[Any], Any]] = {
    "number": lambda value: value,
    "tuple": lambda value: (value,),
    "list": lambda value: [value],
    "object": Scale,
    "array": lambda value: numpy.array([value]),
}


@pytest.mark.parametrize("inside", EQUAL)
@pytest.mark.parametrize(("before", "after"), [(2, 2.0), (1, True), (0.0, -0.0)], ids=str)
def test_values_that_python_calls_equal_differ(
    inside: str, before: Any, after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count_programs(monkeypatch)
    model, x = Equal(EQUAL[inside](before)), torch.randn(2, 4)
    planned = rockplan.solve(copy.deepcopy(model), x, "100%")
    for value in (before, after, before):
        model.held = planned.held = EQUAL[inside](value)
        for args in ((x,), (x, EQUAL[inside](value))):
            for found, expected in zip(planned(*args), model(*args), strict=True):
                assert found.dtype is expected.dtype
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    # The attribute and the argument, before and after; a call with the argument does not read the
    # attribute, but that is not known.
    assert len(made) <= 6


@pytest.mark.parametrize("inside", EQUAL)
def test_what_is_no_number_is_itself(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh() -> Any:
        return EQUAL[inside](float("inf") - float("inf"))

    made = count_programs(monkeypatch)
    planned = rockplan.solve(Equal(fresh()), torch.randn(2, 4), "100%")
    for _ in range(3):
        planned.held = fresh()
        planned(torch.randn(2, 4))
        planned(torch.randn(2, 4), fresh())
    assert len(made) == 2


@dataclasses.dataclass(eq=False)
class Adjustable:
    scale: Any
    lock: Any = None


@pytest.mark.parametrize("lock", [False, True])
def test_an_argument_that_is_changed(lock: bool) -> None:
    given = Adjustable(2.0, threading.Lock() if lock else None)
    model, x = Equal(None), torch.randn(2, 4)
    planned = rockplan.solve(model, (x, given), "100%")
    for value in (2.0, 3.0, 2.0):
        given.scale = value
        assert torch.equal(planned(x, given)[1], model(x, given)[1])


@pytest.mark.parametrize("lazily", [torch.conj, lambda z: z.conj().imag], ids=["conj", "neg"])
def test_views_that_are_conjugated_or_negated_when_read(lazily: Any) -> None:
    class Imaginary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(z.imag if z.is_complex() else z)
            return y

    torch.manual_seed(0)
    z = torch.randn(6, 8, dtype=torch.cfloat)
    view = lazily(z)
    plain = z if view.is_complex() else z.imag
    assert view.is_conj() or view.is_neg()
    for order in ((plain, view), (view, plain)):
        eager = Imaginary()
        planned = rockplan.solve(copy.deepcopy(eager), order[0], "100%")
        for given in (*order, *order):
            both(planned, eager, lambda m, z=given: m(z), "view")


def test_what_a_locked_object_keeps_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be a cache or a record; what it shows as a plain value is."""
    model = Scaled(Settings(threading.Lock()), scale)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, SAMPLE, "100%")
    model.held._calls += 1
    model.held.record.append(2.0)
    model.held.held = threading.Lock()
    planned(SAMPLE)
    assert len(made) == 1
    model.held.scale = 3.0
    assert torch.equal(planned(SAMPLE), model(SAMPLE))
    assert len(made) == 2


def test_what_changes_from_call_to_call_is_named() -> None:
    model = nn.Sequential(Scaled(Settings(None), lambda held: 1.0))
    planned = rockplan.solve(model, SAMPLE, "100%")
    for _ in range(3):
        set_scale(planned[0].held, planned[0].held.scale + 1)
        planned(SAMPLE)
    set_scale(planned[0].held, 0.0)
    with pytest.warns(UserWarning, match=r"the 5th time, because '0\.held'.*outside of the module"):
        planned(SAMPLE)
    planned(SAMPLE)


class EqualAlone:
    """Has no hash, since its class says what is equal and nothing else."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualAlone)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, what: Any) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y[:, what] * 2 if isinstance(what, slice) else y


@pytest.mark.parametrize(
    ("first", "second", "others"),
    [(slice(0, 3), slice(1, None), 1), (slice(0, 3), slice(0, 3), 0), (EqualAlone(), 1, 1)],
    ids=["slices", "the same slice", "without a hash"],
)
def test_arguments_without_a_hash(
    first: Any, second: Any, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Part()
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, (SAMPLE, first), "100%")
    for what in (first, second, first):
        both(planned, eager, lambda m, what=what: mean_square(m(SAMPLE, what)).backward(), "part")
    assert len(made) == 1 + others


class OfBuffers(nn.Module):
    """Reads boolean and integer buffers, as vector quantizers do that are filled at first."""

    def __init__(self, read: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.read = read
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("is_filled", torch.tensor(False))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("sizes", torch.tensor([4, 12]))
        self.register_buffer("mask", torch.arange(16) % 3 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.read(self, self.first(x))))
        return y


def counted(module: Any, y: torch.Tensor) -> torch.Tensor:
    """A warmup, which ends once."""
    y = y * 2 if module.steps < 100 else y
    module.steps += 1
    return y


READ_OF_BUFFERS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str, Any]] = {
    "a flag": (lambda m, y: torch.sin(y) if m.is_filled else y, "is_filled", True),
    "a number": (lambda m, y: y * int(m.steps), "steps", 3),
    "a list": (lambda m, y: torch.cat(y.split(m.sizes.tolist(), 1)[::-1], 1), "sizes", [6, 10]),
    "an array": (lambda m, y: y[:, : m.sizes.numpy()[0]].repeat(1, 4), "sizes", [4, 2]),
    "a selection": (lambda m, y: y + y[:, m.mask].sum(1, keepdim=True), "mask", [True] * 16),
    "all of it": (lambda m, y: y.square() if m.mask.all() else y, "mask", [True] * 16),
    "a count of calls": (counted, "steps", 200),
}


@pytest.mark.parametrize("kind", READ_OF_BUFFERS)
def test_boolean_and_integer_buffers_that_python_reads(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compared at each call, as plain attributes are."""
    read, name, other = READ_OF_BUFFERS[kind]
    torch.manual_seed(0)
    model = OfBuffers(read)
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, SAMPLE, "min")

    def train(module: nn.Module) -> Any:
        result = module(SAMPLE)
        mean_square(result).backward()
        return result

    for step in range(2):
        both(planned, eager, train, f"{kind}, {step}")
    assert len(made) == 1
    for module in (planned, eager):
        module.get_buffer(name).copy_(torch.tensor(other))
    for step in range(2, 4):
        both(planned, eager, train, f"{kind}, {step}")
    assert len(made) == 2


def filled_at_first(module: Any, y: torch.Tensor) -> torch.Tensor:
    if not module.is_filled:
        y = y * 2
        module.is_filled.fill_(True)
    return y


def count_first(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.steps += 1
    return y * int(module.steps)


def count_last(module: Any, y: torch.Tensor) -> torch.Tensor:
    y = y * int(module.steps)
    module.steps += 1
    return y


def of_an_activation(module: Any, y: torch.Tensor) -> torch.Tensor:
    y = y * int(module.steps)
    module.steps.copy_((y > 0).sum())
    return y


@pytest.mark.parametrize(
    "read", [filled_at_first, count_first, count_last, of_an_activation], ids=lambda f: f.__name__
)
def test_buffers_that_the_forward_changes_and_python_reads(read: Any) -> None:
    """Refused, unless the next call reads the same; after the first call a flag stays."""
    torch.manual_seed(0)
    model = OfBuffers(read)
    model.steps.fill_(2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(rockplan.CaptureError, match="the buffer '(is_filled|steps)'"):
        rockplan.solve(model, SAMPLE, "min")
    assert all(torch.equal(model.state_dict()[n], t) for n, t in before.items())
    if read is filled_at_first:  # what the refusal advises
        model(SAMPLE)
        eager = copy.deepcopy(model)
        planned = rockplan.solve(model, SAMPLE, "min")
        both(planned, eager, lambda m: mean_square(m(SAMPLE)).backward(), "run once")


VARIABLES = {"scale": 1.0}


class Free:
    """Holds what it is given."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Holder(nn.Module):
    """Refers to one of each kind of what a signature compares."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.table, self.steps, self.names = {"a": 1.0}, [1.0, 2.0], {"a"}
        self.held = Free(inner=Free(scale=1.0), table={})
        self.derived = collections.defaultdict(float, a=1.0)
        self.plain = torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) * VARIABLES["scale"] * first_of(self.steps)


def transposed(m: Any) -> None:
    m.part[0].weight.data = m.part[0].weight.data.t()


WRITES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda m: setattr(m, "more", 1),
    "mode": lambda m: m.part[1].eval(),
    "mode as a number": lambda m: setattr(m.part[1], "training", 1),
    "number of the same value": lambda m: setattr(m.part[1], "momentum", numpy.float64(0.1)),
    "class": lambda m: setattr(m.part[0], "__class__", nn.Identity),
    "attributes": lambda m: setattr(m.part[0], "__dict__", {**vars(m.part[0]), "bias_of": 1}),
    "submodule": lambda m: setattr(m.part, "0", nn.Linear(4, 4)),
    "submodule more": lambda m: m.part.append(nn.ReLU()),
    "parameter": lambda m: setattr(m.part[0], "bias", nn.Parameter(m.part[0].bias.detach())),
    "table of parameters": lambda m: vars(m.part[0]).update(_parameters={}),
    "buffer more": lambda m: m.part[0].register_buffer("more", torch.ones(1)),
    "frozen": lambda m: m.part[0].weight.requires_grad_(False),
    "strides": transposed,
    "dtype": lambda m: m.part.double(),
    "hook": lambda m: m.part[0].register_forward_hook(lambda *given: None),
    "item": lambda m: m.table.update(a=2.0),
    "item of another type": lambda m: m.table.update(a=1),
    "item more": lambda m: m.held.table.update(b=1),
    "element": lambda m: m.steps.__setitem__(1, 3.0),
    "element of a set": lambda m: m.names.add("b"),
    "attribute of an object": lambda m: setattr(m.held.inner, "scale", 2.0),
    "attributes of an object": lambda m: setattr(m.held.inner, "__dict__", {"scale": 2.0}),
    "class of an object": lambda m: setattr(m.held, "__class__", Child),
    "default of a dictionary": lambda m: setattr(m.derived, "default_factory", int),
    "variable": lambda m: VARIABLES.update(scale=2.0),
    "flag of a tensor": lambda m: m.plain.requires_grad_(),
    "default of a function": lambda m: setattr(first_of, "__defaults__", ([1.0],)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen_after_calls(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.VARIABLES", {"scale": 1.0})
    monkeypatch.setattr(first_of, "__defaults__", None)
    model = Holder().train()
    signature = module_signature(model, model.forward, (model.plain,))
    assert signature.holds() and signature.holds()
    WRITES[write](model)
    assert not signature.holds() and not signature.holds()


def without_dynamos_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    by_content = writes._BY_CONTENT
    monkeypatch.setattr(writes, "FILLED", by_content)
    monkeypatch.setattr(writes, "_ATTRIBUTES", writes._of_attributes(by_content))
    monkeypatch.setattr("rockplan.runtime.guards._GUARDS", None)


def test_writes_are_seen_without_dynamos_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from Python 3.13 on, where attributes are written past the versions of dictionaries."""
    without_dynamos_functions(monkeypatch)
    for write in WRITES.values():
        with monkeypatch.context() as patch:
            patch.setattr(f"{__name__}.VARIABLES", {"scale": 1.0})
            patch.setattr(first_of, "__defaults__", None)
            model = Holder().train()
            signature = module_signature(model, model.forward, (model.plain,))
            assert signature.holds() and signature.holds()
            write(model)
            assert not signature.holds()


EQUAL_WRITES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "nothing": (lambda m: None, WRITES["attribute of an object"]),
    "modes": (lambda m: m.eval().train(), WRITES["mode"]),
    "another table": (lambda m: setattr(m, "table", {"a": 1.0}), WRITES["item"]),
    "another object": (
        lambda m: setattr(m.held, "inner", Free(scale=1.0)),
        WRITES["attribute of an object"],
    ),
    "table of submodules": (
        lambda m: vars(m.part).update(_modules=dict(m.part._modules)),
        WRITES["submodule more"],
    ),
    "a hook for a while": (
        lambda m: m.part[0].register_forward_hook(print).remove(),
        WRITES["hook"],
    ),
    "values there and back": (lambda m: m.table.update(b=1) or m.table.pop("b"), WRITES["item"]),
}


@pytest.mark.parametrize("is_by_content", (False, True))
@pytest.mark.parametrize("way", EQUAL_WRITES)
def test_a_write_after_equal_values_is_seen(
    way: str, is_by_content: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_by_content:
        without_dynamos_functions(monkeypatch)
    equal, other_value = EQUAL_WRITES[way]
    model = Holder().train()
    signature = module_signature(model, model.forward, (model.plain,))
    assert signature.holds()
    equal(model)
    assert signature.holds() and signature.holds()
    other_value(model)
    assert not signature.holds()
