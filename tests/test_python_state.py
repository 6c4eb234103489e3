"""Models that keep something in Python are planned as eager execution, or refused, with no fake
tensor left: one case of each kind that `benchmarks/python_state.py` draws."""

from __future__ import annotations

import copy
import gc
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rockplan
from benchmarks.python_state import UNCLEAR, description, examine, first_difference
from rockplan.python_state.elements import SLOTS, row_of
from rockplan.python_state.walk import walk_of
from rockplan.values.garbage_collection import paused_collection
from testing.python_state_cases import (
    Case,
    alias_case,
    asked_case,
    draw,
    given_case,
    history_case,
    plain,
    registered_case,
    result_case,
    state,
)
from testing.training import QUICK

OPTIONS = replace(QUICK, cache=False)

ANOTHER_SIZE, EVALUATION_FIRST, WITHOUT_GRADIENTS = 2, 3, 4
"""Steps of the training loop, by number (`python_state_cases.STEPS`)."""

ON_MODULES = (
    state("attribute", "list", "detached activation", "replaced, read in the next call"),
    state("attribute", "dict", "activation", "replaced, for the caller"),
    state("attribute", "dict of lists", "table", "set once"),
    state("attribute", "deque", "detached clone", "appended"),
    state("attribute", "full deque", "mean of an activation", "replaced, for the caller"),
    state("attribute", "tuple", "activation", "replaced, then read"),
    state("attribute", "set", "activation", "appended"),
    state("attribute", "defaultdict", "detached activation", "appended and read"),
    state("attribute", "OrderedDict", "mean of an activation", "cleared and refilled"),
    state("attribute", "Counter", "count", "counted"),
    state("attribute", "list", "table", "popped"),
    state("attribute", "namespace", "activation", "replaced, for the caller"),
    state("attribute", "dataclass", "count", "counted", parts=2),
    state("attribute", "slots", "detached activation", "replaced, read in the next call", parts=1),
    state("attribute", "Namespace of argparse", "shape", "replaced, then read", 0, ANOTHER_SIZE),
    state("attribute", "object with a list", "list of numbers", "changed where it is"),
    state("attribute", "array of objects", "activation", "put there and cleared again"),
    state("attribute", "itself", "flag", "in training alone", 1, EVALUATION_FIRST),
    state("attribute", "cell", "table", "changed by the caller", 1),
    state("attribute", "cell", "list of numbers", "in evaluation alone", 0, EVALUATION_FIRST),
    state("attribute", "array of objects", "table", "in training alone", 0, EVALUATION_FIRST),
    state("attribute behind a property", "itself", "table", "set once"),
    state("attribute of a module that is not registered", "itself", "count", "counted"),
    state("local of a thread on the module", "itself", "detached mean", "set once"),
)

IN_FILES = (
    state("class attribute", "itself", "table", "set once"),
    state("class attribute", "dict by size", "mask by length", "set once if absent"),
    state("class attribute", "named tuple", "node of autograd", "changed by the caller"),
    state("attribute of a base class", "itself", "float", "changed by the caller"),
    state("attribute of a class of PyTorch", "dict", "detached activation", "set once if absent"),
    state("attribute of another class", "itself", "enum", "counted"),
    state("global", "itself", "count", "counted, not read"),
    state("global", "itself", "string", "changed by the caller"),
    state("global", "dict", "table by length", "set once if absent", 0, ANOTHER_SIZE),
    state("global", "list", "activation", "appended", 2),
    state("global", "itself", "random table", "set once"),
    state("global", "itself", "table", "without gradients alone", 0, WITHOUT_GRADIENTS),
    state("global of another file", "itself", "array", "changed by the caller"),
    state("global of another file, by a function", "dict", "table", "set once if absent"),
    state("helper object of another file", "list", "detached activation", "appended"),
    state("singleton", "itself", "activation", "replaced, for the caller"),
    state("cell of a closure", "itself", "count", "counted"),
    state("cell of a closure on the module", "list", "activation", "replaced, then read"),
    state("function attribute", "itself", "table", "set once"),
    state("default argument of forward", "list", "count", "appended"),
    state("default argument of forward by keyword", "dict", "activation", "popped again"),
    state("default argument of a function", "deque", "detached activation", "appended and read"),
    state("argument of a partial", "list", "count", "counted"),
    state("local of a thread", "itself", "table", "set once"),
    state("cell of a closure", "itself", "table", "in training alone", 0, EVALUATION_FIRST),
    state("context variable", "list", "table", "in training alone", 0, EVALUATION_FIRST),
    state("context variable", "itself", "detached activation", "replaced, read in the next call"),
    state("weak dictionary by submodule", "itself", "table", "set once"),
)

ON_TENSORS = (
    state("attribute of a parameter", "itself", "table", "set once"),
    state("attribute of a buffer", "dict", "count", "counted"),
    state("attribute of an argument", "itself", "activation", "replaced, for the caller"),
    state("attribute of a kept tensor", "itself", "detached activation", "replaced, then read"),
)

OF_THE_CALLER = (
    state("argument", "list", "mean of an activation", "appended"),
    state("argument", "dict", "activation", "replaced, for the caller"),
    state("argument", "set", "string", "appended"),
    state("argument that the caller keeps", "deque", "count", "counted"),
    state("argument by keyword", "dict of lists", "detached activation", "replaced, then read"),
    state("argument by keyword", "dataclass", "table", "set once"),
    given_case("list of tensors emptied"),
    given_case("iterator of numbers", keeps=True),
    given_case("generator of tensors", "by keyword"),
    given_case("callback"),
    given_case("append of a list", "in further ones"),
    given_case("object counted", "in further ones by keyword", keeps=True),
    given_case("array of array", keeps=True),
    given_case("set of tensors", keeps=True),
    given_case("random generator", keeps=True),
)

ASKED = (
    asked_case("the argument", "class is Tensor"),
    asked_case("a weight", "class is Parameter"),
    asked_case("a bias", "name of the class"),
    asked_case("a special parameter", "isinstance of a class"),
    asked_case("the argument", "is_leaf", change="not a leaf"),
    asked_case("the argument", "grad_fn is None", change="not a leaf"),
    asked_case("a weight", "_version"),
    asked_case("a weight", "grad is None"),
    asked_case("a weight", "storage", "a tied weight", before="tied"),
    asked_case("a weight", "data_ptr", "a tied weight", before="tied"),
    asked_case("another argument", "is", "held elsewhere", change="held"),
    asked_case("a weight", "sum of main_grad", before="main_grad", change="main_grad"),
    asked_case("a weight", "hasattr", before="a flag"),
    asked_case("a frozen weight", "scale", before="a flag", change="a flag"),
    asked_case("the argument", "tag", before="a flag", change="a flag"),
    asked_case("a kept tensor", "flag", change="a flag"),
)

WRITTEN = (
    history_case("an argument", "add_", "an activation", is_read=False),
    history_case("an argument in a list", "setitem", "an activation", is_read=True),
    history_case("a part of an argument", "mul_", "a weight", is_read=False),
    history_case("a buffer that the caller detaches", "copy_", "an activation", is_read=False),
    history_case("a tensor in a list", "index_put_", "an activation", is_read=False),
    history_case("a tensor of another file", "setitem of a row", "an activation", is_read=True),
    history_case("an attribute of a parameter", "add_", "a detached activation", is_read=False),
)

HELD_TWICE = (
    alias_case("one list", "is"),
    alias_case("one list", "appended"),
    alias_case("one dictionary", "set item to an activation"),
    alias_case("one tensor until the last", "is"),
    alias_case("a weight", "is the weight"),
    alias_case("what the module keeps", "is kept"),
    alias_case("the global list", "is the global list"),
    registered_case("list", "weight", "multiplied"),
    registered_case("tuple", "weight", "is"),
    registered_case("list", "buffer", "written", "the buffer replaced"),
    registered_case("closure", "weight", "added", "the parameter replaced"),
    registered_case("global", "weight", "its attribute set"),
    registered_case("object", "module", "called"),
)

OTHERWISE = (
    result_case("attribute of the result"),
    result_case("kept list as result"),
    result_case("lru_cache", parts=2),
    result_case("lru_cache of the module"),
    result_case("cache of random numbers"),
    result_case("cached_property"),
    result_case("count of itertools in the file"),
    result_case("generator that keeps"),
    result_case("queue on the module"),
    result_case("weak values"),
    result_case("module added"),
    result_case("warning once", parts=2),
    result_case("class of the module replaced"),
    result_case("class of the module replaced", parts=1),
    result_case("function replaced"),
)

CASES = (
    plain(),
    *ON_MODULES,
    *IN_FILES,
    *ON_TENSORS,
    *OF_THE_CALLER,
    *ASKED,
    *WRITTEN,
    *HELD_TWICE,
    *OTHERWISE,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_is_planned_as_eager_or_refused(case: Case) -> None:
    outcome = examine(case, options=OPTIONS)
    assert outcome.kind in ("equal", "refused", "refused later"), f"{outcome.said}\n{case}"
    is_in_words_of_the_user = not any(word in outcome.said for word in UNCLEAR)
    assert is_in_words_of_the_user, f"{outcome.said}\n{case}"


def test_what_keeps_nothing_is_planned() -> None:
    assert examine(plain()).kind == "equal"


@pytest.mark.parametrize("collects", [False, True])
def test_a_classifier_settles_its_configuration_as_in_eager(collects: bool) -> None:
    """Also where hooks of transformers collect what submodules return."""
    transformers = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    config = transformers.ViTConfig(
        **sizes, num_attention_heads=2, num_hidden_layers=2, image_size=8, patch_size=4
    )
    model = transformers.ViTForImageClassification(config)
    eager = copy.deepcopy(model)
    call = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    call["output_hidden_states"] = collects  # type: ignore[assignment]
    planned: Any = rockplan.solve(model, call, "min", options=OPTIONS)
    assert torch.equal(planned(**call).loss, eager(**call).loss)
    assert model.config.problem_type == eager.config.problem_type == "single_label_classification"
    assert not any(m._forward_hooks for m in model.modules())


def test_what_is_refused_settles_nothing() -> None:
    transformers = pytest.importorskip("transformers")

    class Settles(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.config.problem_type, self.count = "regression", self.count + 1
            return super().forward(x)

    model = Settles(4, 4)
    model.config, model.count = transformers.PretrainedConfig(problem_type=None), 0
    with pytest.raises(rockplan.UnsupportedModel, match=r"self\.count"):
        rockplan.solve(model, torch.ones(2, 4), "min", options=OPTIONS)
    assert (model.config.problem_type, model.count) == (None, 0)


def nameless(x: torch.Tensor) -> torch.Tensor:
    return x * 2


nameless.__module__ = None  # type: ignore[assignment]


class KeepsNameless(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = nameless
        return self.kept(super().forward(x))


def test_functions_without_module_are_told_by_code() -> None:
    """As those of Dynamo's graph modules are."""
    model, x = KeepsNameless(4, 4), torch.ones(2, 4)
    with pytest.raises(rockplan.UnsupportedModel, match=r"self\.kept .*a function.* once"):
        rockplan.solve(model, x, "min", options=OPTIONS)
    expected = model(x)
    assert torch.equal(rockplan.solve(model, x, "min", options=OPTIONS)(x), expected)


def test_a_submodule_of_another_class_is_planned_again() -> None:
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    planned = rockplan.solve(model, (x,), "min", options=OPTIONS)
    planned(x)
    model[1].__class__ = nn.Tanh
    assert torch.equal(planned(x), model(x))


class InACycle(nn.Linear):
    """A tensor that it makes is in a cycle; collects: one that is as old as all libraries."""

    def __init__(self, collects: bool) -> None:
        super().__init__(4, 4)
        self.collects = collects

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        cycle: list[Any] = [result.exp()]
        cycle.append(cycle)
        if self.collects:
            gc.collect()
        return result.tanh()


@pytest.mark.parametrize("collects", (False, True))
def test_cycles_are_forgotten_without_a_full_walk(collects: bool) -> None:
    model, x = InACycle(collects), torch.ones(2, 4)
    generations: list[int] = []
    gc.callbacks.append(lambda phase, info: generations.append(info["generation"]))
    try:
        with paused_collection():  # those that Python begins by itself
            planned = rockplan.solve(model, (x,), "min", options=OPTIONS)
    finally:
        gc.callbacks.pop()
    assert 0 in generations
    assert collects or max(generations) == 0
    assert torch.equal(planned(x), model(x))


def test_planned_modules_set_class_attributes_of_all() -> None:
    class Net(nn.Linear):
        scale = 2.0

    model = Net(4, 4)
    planned = rockplan.solve(model, (torch.ones(2, 4),), "min", options=OPTIONS)
    type(planned).scale = 3.0
    assert (Net.scale, model.scale, planned.scale) == (3.0, 3.0, 3.0)
    del type(planned).scale
    assert not hasattr(Net, "scale")


# --- The oracle sees what it should ---------------------------------------------------------------


COUNTED = state("global", "itself", "count", "counted")


def solved_by(monkeypatch: pytest.MonkeyPatch, solve: Any) -> None:
    monkeypatch.setattr(
        rockplan, "solve", lambda model, args, *_, sample_kwargs, options: solve(model, args)
    )


def test_the_original_itself_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    solved_by(monkeypatch, lambda model, args: model)
    assert {examine(draw(seed)).kind for seed in range(4)} <= {"equal", "unrepeated"}
    assert examine(COUNTED).kind == "equal"


def test_a_forward_during_planning_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(model: nn.Module, args: tuple[Any, ...]) -> nn.Module:
        model(*args)
        return model

    solved_by(monkeypatch, solve)
    outcome = examine(COUNTED)
    assert outcome.kind == "wrong" and "result" in outcome.said


def test_a_refusal_that_changed_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(model: nn.Module, args: tuple[Any, ...]) -> nn.Module:
        model(*args)
        raise rockplan.UnsupportedModel("no")

    solved_by(monkeypatch, solve)
    assert examine(COUNTED).kind == "wrong"
    assert examine(plain()).kind == "refused"


def test_a_foreign_error_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(model: nn.Module, args: tuple[Any, ...]) -> nn.Module:
        raise KeyError("no")

    solved_by(monkeypatch, solve)
    assert examine(plain()).kind == "wrong"


def test_a_fake_tensor_that_is_left_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def solve(model: nn.Module, args: tuple[Any, ...]) -> nn.Module:
        with FakeTensorMode():
            held.append(torch.ones(2))
        return model

    solved_by(monkeypatch, solve)
    assert examine(plain()).kind == "left"


def test_differences_are_told_by_their_place() -> None:
    tensor = torch.ones(2)
    same = description({"a": [tensor, 1]})
    assert first_difference(description({"a": [tensor.clone(), 1]}), same) is None
    for other in ([tensor, 1.0], [-tensor, 1], [tensor.clone().requires_grad_(), 1], [tensor], {}):
        difference = first_difference(description({"a": other}), same)
        assert difference is not None and difference.startswith("['a']"), difference


def test_what_is_drawn_is_python() -> None:
    for seed in range(200):
        case = draw(seed)
        compile(case.source.replace("<other>", "other"), case.name, "exec")
        compile(case.other, case.name, "exec")
        assert draw(seed) == case


class Asserting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.ndim == 2, "rows"
        return super().forward(x)


def test_assertions_do_not_lead_to_all_tests() -> None:
    """Pytest makes calls of its own functions of those in test files."""
    model, x = Asserting(2, 2), torch.ones(1, 2)
    assert len(walk_of(model, model.forward, (x,)).objects) < 1000


def test_an_object_that_answers_no_question_holds_nothing() -> None:
    class Answerless:
        __slots__ = ()

        def __getattr__(self, name: str) -> object:
            raise RuntimeError(f"{name} is not there yet")

    row = row_of(Answerless)
    assert row is not None and [key for key, _ in row.read(Answerless())] == ["__class__", ""]


_LAZY = {
    "__init__.py": """
import importlib
import torch

FOUND, TRIED = {}, {}

def register(name):
    return lambda function: FOUND.setdefault(name, function)

def twice(x):
    if "twice" not in TRIED:
        TRIED["twice"] = x.shape
        importlib.import_module(f"{__name__}.functions")
    return FOUND["twice"](x)
""",
    "functions.py": """
import lazily_registered

@lazily_registered.register("twice")
def twice(x):
    return x * 2
""",
}


def test_what_imports_in_forwards_register_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import is done once: what it leaves is found by the next recording, and by later calls."""
    package = tmp_path / "site-packages" / "lazily_registered"
    package.mkdir(parents=True)
    for name, text in _LAZY.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(str(package.parent))
    importlib.import_module("lazily_registered")

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import lazily_registered  # type: ignore[import-not-found]

            found: torch.Tensor = lazily_registered.twice(self.linear(x)).square().mean()
            return found

    x = torch.randn(3, 4)
    net = Lazy()
    planned: Any = rockplan.solve(net, x, "min", options=rockplan.Options(cache=False))
    planned(x).backward()
    gradient = net.linear.weight.grad
    net.linear.weight.grad = None
    net(x).backward()
    assert torch.equal(net.linear.weight.grad, gradient)
    for name in ("lazily_registered", "lazily_registered.functions"):
        del sys.modules[name]


# --- Slots, and what libraries keep for themselves ------------------------------------------------


class Number:
    __slots__ = ("scale",)

    def __init__(self, scale: Any = 2.0) -> None:
        Number.scale.__set__(self, scale)  # type: ignore[attr-defined]


class ByProperty(Number):
    """Overrides a slot by what makes something new at each access, and cannot be set."""

    @property
    def scale(self) -> Any:
        return [3.0, len("x")][0] * torch.ones(1).item()


class ByAttribute(Number):
    scale = 4.0


class BySlot(Number):
    """Has two slots of one name."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__(1.0)
        self.scale = 5.0


class Mangled:
    __slots__ = ("__held", "empty")

    def __init__(self) -> None:
        self.__held = 6.0

    @property
    def scale(self) -> float:
        return self.__held


class Refuses(Number):
    """Lets nobody set anything by name, as frozen classes do."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


NUMBERS = (Number, ByProperty, ByAttribute, BySlot, Mangled, Refuses)


class Scaled(nn.Module):
    def __init__(self, number: Any) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.linear(x)) * self.number.scale
        return y


@pytest.mark.parametrize("kind", NUMBERS)
def test_slots_are_read_and_written_by_themselves(kind: type) -> None:
    """Whatever classes that are derived from theirs make of their names."""
    x, number = torch.randn(3, 4), kind()
    model = Scaled(number)
    planned = rockplan.solve(model, x, "min", options=OPTIONS)
    assert torch.equal(planned(x), model(x))
    if kind in (Number, BySlot):
        number.scale = 7.0
    elif kind is ByAttribute:
        ByAttribute.scale = 8.0
    assert torch.equal(planned(x), model(x))
    ByAttribute.scale = 4.0
    elements = SLOTS.read(number)
    assert len(elements) == (2 if kind is BySlot else 1)
    SLOTS.write(number, [(key, 9.0) for key, _ in elements])
    assert [value for _, value in SLOTS.read(number)] == [9.0] * len(elements)
    SLOTS.write(number, [])
    assert SLOTS.read(number) == []


_DRAWING = """
import random

python = random.Random(0)

def scale():
    return 1 + python.random()
"""


@pytest.fixture
def drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A library with generators of its own."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "drawing_for_itself.py").write_text(_DRAWING)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("drawing_for_itself")
    del sys.modules["drawing_for_itself"]


def test_sympys_draws_are_not_the_forwards() -> None:
    class Trying(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = sympy.Symbol("n")
            y: torch.Tensor = self.linear(x)
            return y * int(sympy.simplify((n**2 - 1) / (n - 1)).subs(n, x.shape[0]))

    model, x = Trying(None), torch.randn(4, 4)
    planned = rockplan.solve(model, x, "min", options=OPTIONS)
    assert torch.equal(planned(x), model(x))
    assert len(planned.plans) == 1


def test_draws_by_a_library_are_refused(drawing: Any) -> None:
    class Drawing(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import drawing_for_itself

            return self.linear(x) * drawing_for_itself.scale()  # type: ignore[no-any-return]

    state = drawing.python.getstate()
    with pytest.raises(rockplan.UnsupportedModel, match=r"draws from .*python"):
        rockplan.solve(Drawing(None), torch.randn(3, 4), "min", options=OPTIONS)
    assert drawing.python.getstate() == state
