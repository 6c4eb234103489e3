"""Refusals are rows: each is printed in docs/limits.md, and each names the test that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from rockplan.errors import CaptureError, InvalidInput, RockplanError
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
