"""Refusals are rows: each is printed in docs/limits.md, and is an error of ours."""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from rockplan.errors import CaptureError, InvalidInput, RockplanError
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.operators.rows import ROWS as OPERATORS
from rockplan.graph_builder.recorded.results import Results
from rockplan.graph_builder.tracing.addresses import of_address
from rockplan.graph_builder.tracing.outputs import foreign_gradient
from rockplan.graph_builder.tracing.refusals import (
    NAMED,
    REFUSALS,
    When,
    refuse,
)

TESTS = Path(__file__).parent
LIMITS = TESTS.parent / "docs" / "limits.md"
BEGIN, END = "<!-- printed by tests/test_refusals.py -->\n", "<!-- end -->\n"


def as_markdown() -> str:
    """Return all refusals as a Markdown text, as docs/limits.md has it: by stage, then those of
    operators."""
    lines: list[str] = []
    for when in When:
        lines += [f"### {when}", ""]
        lines += [_item(row.says, row.remedy) for row in REFUSALS if row.when is when]
        lines.append("")
    lines += ["### Operators that are refused by name", ""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in OPERATORS:
        if row.refused_because:
            called = row.called or row.name.removeprefix("*.")
            names = reasons.setdefault((row.refused_because, row.instead), [])
            names += [] if f"`{called}`" in names else [f"`{called}`"]
    for (because, instead), names in reasons.items():
        of_each = "each of " if len(names) > 1 else ""
        lines.append(_item(f"{of_each}{', '.join(names)} {because}", instead))
    return "\n".join(lines).rstrip() + "\n"


def _item(says: str, remedy: str) -> str:
    """Return a message and its remedy as an item of a Markdown list, with '...' for places to fill
    in; without remedy the message alone."""
    said, todo = (re.sub(r"('?\{\w+\}'?)+", "...", text) for text in (says, remedy))
    return textwrap.fill(
        f"- {said}{f' - *{todo}*' if todo else ''}",
        width=100,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def test_limits_has_the_list_as_it_is_printed() -> None:
    text = LIMITS.read_text()
    _, listed = text.split(BEGIN)
    printed, rest = listed.split(END)
    assert not rest.strip()
    assert printed.strip() == as_markdown().strip()


def test_names_are_unique() -> None:
    assert len(NAMED) == len(REFUSALS)


def test_each_makes_an_error_of_ours() -> None:
    for row in REFUSALS:
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


def test_what_is_found_may_have_own_remedies() -> None:
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
    with pytest.raises(CaptureError, match="the forward asks .* for `") as info:
        capture(module, (torch.ones(4, 4),), {})
    # The user's line, not one of Python's copy.py.
    assert f" at {__file__}:" in str(info.value)
    assert type(module.linear.weight) is nn.Parameter


def test_an_operator_of_whose_result_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(results: Results, operator: Any, *_: Any) -> NoReturn:
        raise UnsupportedOperatorException(operator)

    monkeypatch.setattr(Results, "of", fails)
    with pytest.raises(CaptureError, match=r"what aten\.t\.default returns is not known before"):
        capture(nn.Linear(2, 2), (torch.randn(1, 2),), {})


def test_addresses_that_no_user_code_asks_for() -> None:
    assert of_address(iter(())).startswith("the forward asks for the address of a tensor")


def test_parameters_that_are_parts_of_one() -> None:
    flat = nn.Parameter(torch.zeros(2))
    assert "neither a parameter" in str(foreign_gradient(flat))
    flat._is_flat_param = True  # type: ignore[attr-defined]
    assert str(foreign_gradient(flat)) == NAMED["flat parameters"].text()
