"""Refusals are rows: each is printed in docs/limits.md, and each names the test that shows it."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from rockplan.errors import CaptureError, InvalidInput, RockplanError
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.recorded.results import Results
from rockplan.graph_builder.tracing.addresses import of_address
from rockplan.graph_builder.tracing.outputs import foreign_gradient
from rockplan.graph_builder.tracing.refusals import (
    NAMED,
    REFUSALS,
    Refusal,
    When,
    as_markdown,
    refuse,
)

TESTS = Path(__file__).parent
LIMITS = TESTS.parent / "docs" / "limits.md"
BEGIN, END = "<!-- printed by refusals.as_markdown -->\n", "<!-- end -->\n"


def test_limits_has_the_list_as_it_is_printed() -> None:
    text = LIMITS.read_text()
    _, listed = text.split(BEGIN)
    printed, rest = listed.split(END)
    assert not rest.strip()
    assert printed.strip() == as_markdown().strip()


def test_names_are_unique() -> None:
    assert len(NAMED) == len(REFUSALS)


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.name)
def test_each_names_the_test_that_shows_it(row: Refusal) -> None:
    file, function = row.test.split(".")
    assert f"def {function}(" in (TESTS / f"{file}.py").read_text()


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.name)
def test_each_makes_an_error_of_ours(row: Refusal) -> None:
    places = set(re.findall(r"\{(\w+)\}", row.says + row.remedy))
    found = {place: f"<{place}>" for place in places}
    error = row.error(None, **found)
    assert isinstance(error, RockplanError)
    assert all(text in str(error) for text in found.values())
    if isinstance(error, CaptureError):
        at = row.at("layer", "file.py:3", **found)
        assert str(at) == f"in module 'layer' at file.py:3: {error}"


def test_each_is_raised_somewhere() -> None:
    """By its name, unless a rule finds it."""
    folder = TESTS.parent / "rockplan"
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    for row in REFUSALS:
        names = text.count(f'"{row.name}"') + text.count(f"'{row.name}'")
        assert row.rule is not None or names > 1, row.name


def test_what_is_found_may_have_a_remedy_of_its_own() -> None:
    row = NAMED["value"]
    assert row.text(who="a", what="b").endswith(f". {row.remedy}")
    assert row.text(who="a", what="b", remedy="Call it later").endswith("planned. Call it later")


def test_the_first_rule_that_finds_something_says_so() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    refuse(When.RESULT, module)
    with pytest.raises(InvalidInput, match=r"^1.weight is lazy: run the module once"):
        refuse(When.MODULE, module)
    with pytest.raises(InvalidInput, match=r"^0.weight is on the meta device"):
        refuse(When.MODULE, nn.Sequential(nn.Linear(2, 2, device="meta"), nn.LazyLinear(2))[:1])
    refuse(When.MODULE, nn.Sequential(nn.Linear(2, 2)))
    assert torch.is_grad_enabled()


class Does(nn.Module):
    """What `step` makes of a hidden tensor and the argument."""

    def __init__(self, step: Callable[[Any, torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), step
        self.register_buffer("kept", torch.zeros(3, 4))
        self.flag, self.table = 0, None

    def forward(self, x: Any) -> Any:
        first = x if isinstance(x, torch.Tensor) else next(t for t in x if t is not None)
        return self.step(self, self.linear(first), x)


def hooked(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    h.register_hook(lambda gradient: gradient)
    return h


def nested(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([h, h], layout=torch.jagged).values()


def sparse(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    return torch.sparse.mm(h.to_sparse(), module.linear.weight)


def noted(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    h.note = 1  # type: ignore[attr-defined]
    return h


def into_buffer(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    module.kept.copy_(h)
    return h * 2


TABLE = torch.zeros(3, 4)


def into_table(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    TABLE.copy_(h)
    return h * 2


def asked(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    return h if x._version == 0 else h * 2


def compared(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    return h if x is module.linear.last else h * 2


@functools.cache
def remembered(h: torch.Tensor) -> torch.Tensor:
    return h * 2


@functools.cache
def three() -> int:
    return 3


def flagged(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    module.flag = three()
    return h


SAMPLE = torch.randn(3, 4)
MARKED = torch.randn(3, 4)
MARKED.fake_device = "cpu"  # type: ignore[attr-defined]
CASES: dict[str, tuple[Callable[[Any, torch.Tensor, Any], Any], Any]] = {
    "hook on a tensor": (hooked, SAMPLE),
    "nested tensor": (nested, SAMPLE),
    "layout": (sparse, SAMPLE),
    "attribute of a result": (noted, SAMPLE),
    "attribute of a fake tensor": (lambda module, h, x: h, MARKED),
    "write of what has a gradient": (into_buffer, SAMPLE),
    "write into another tensor": (into_table, SAMPLE),
    "question": (asked, SAMPLE),
    "kept argument": (compared, SAMPLE),
    "kept in a cache": (lambda module, h, x: remembered(h), SAMPLE),
    "result that is an argument": (
        lambda module, h, x: (h, x[0]), torch.randn(3, 4, requires_grad=True)
    ),
    "cached change": (flagged, SAMPLE),
    "iterator as an argument": (lambda module, h, x: h, iter([SAMPLE])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_is_said_in_the_words_of_its_row(name: str) -> None:
    step, x = CASES[name]
    module = Does(step)
    if name == "kept argument":
        module.linear.last = x  # type: ignore[assignment]
    with pytest.raises(CaptureError) as info:
        capture(module, (x,), {})
    words = re.split(r"\{\w+\}", NAMED[name].says)
    if name == "nested tensor":
        # Where the process has made others before, an operator says it instead of the forward.
        words = ["a nested tensor, whose sizes a plan cannot follow"]
    assert all(part in str(info.value) for part in words)
    assert re.split(r"\{\w+\}", NAMED[name].remedy)[0] in str(info.value)


@pytest.mark.parametrize("of", ["weight", "activation"])
@pytest.mark.parametrize(
    "ask",
    [
        copy.copy,
        copy.deepcopy,
        lambda t: t.as_subclass(torch.Tensor),
        lambda t: t * len(dir(t)),
        lambda t: t * len(vars(t)),
        lambda t: t * t.is_pinned(),
        lambda t: t * t.is_shared(),
        lambda t: t * t._is_view(),
    ],
)
def test_questions_that_no_plan_answers(ask: Callable[[torch.Tensor], Any], of: str) -> None:
    module = Does(lambda module, h, x: h + ask(h if of == "activation" else module.linear.weight))
    with pytest.raises(CaptureError, match="the forward asks .* for `"):
        capture(module, (torch.ones(4, 4),), {})
    assert type(module.linear.weight) is nn.Parameter


def test_an_operator_of_whose_result_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(results: Results, operator: Any, *_: Any) -> NoReturn:
        raise UnsupportedOperatorException(operator)

    monkeypatch.setattr(Results, "of", fails)
    with pytest.raises(CaptureError, match=r"what aten\.t\.default returns is not known before"):
        capture(nn.Linear(2, 2), (torch.randn(1, 2),), {})


def test_addresses_that_no_code_of_the_user_asks_for() -> None:
    assert of_address(iter(())) == NAMED["address by a library"].text(kernel="foreign code")


def test_parameters_that_are_parts_of_one() -> None:
    flat = nn.Parameter(torch.zeros(2))
    assert "neither a parameter" in str(foreign_gradient(flat))
    flat._is_flat_param = True  # type: ignore[attr-defined]
    assert str(foreign_gradient(flat)) == NAMED["flat parameters"].text()
