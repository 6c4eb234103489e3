"""Sweeps: `make test` runs the members that the table says, `make sweep` all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sweeps import RUN, left_to_sweeps


def test_a_row_names_a_test() -> None:
    for name in RUN:
        file, function = name.split("::")
        assert f"def {function}(" in (Path(__file__).parent / file).read_text(), name


def test_members_that_run_are_evenly_spaced(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"tests/test_a.py::test[{i}]" for i in range(6)] + ["tests/test_a.py::other"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    monkeypatch.setattr("tests.sweeps.RUN", {"test_a.py::test": 2})
    assert [item.nodeid[-2] for item in left_to_sweeps(items)] == ["1", "2", "3", "4"]
    monkeypatch.setattr("tests.sweeps.RUN", {"test_a.py::test": 0, "test_b.py::test": 1})
    assert len(left_to_sweeps(items)) == 6
