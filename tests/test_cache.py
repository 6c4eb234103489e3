"""The cache: nothing is measured or solved twice, and nothing in it is trusted."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rockplan
from rockplan.cache import Cache
from rockplan.serial import dump_family, dump_profile, parse_family, parse_profile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    return tmp_path


def make_plan(budget: str = "min") -> rockplan.Plan:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])
    return rockplan.plan(model, torch.randn(64, 16), budget)


def forbidden(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("solved again")


def test_second_plan_measures_and_solves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_plan()
    monkeypatch.setattr("rockplan.ilp.options.option_family", forbidden)
    monkeypatch.setattr("rockplan.graph_builder.measure._measure_time", forbidden)
    again = make_plan()
    assert again.schedule == first.schedule
    assert again.profile_digest == first.profile_digest
    assert str(again) == str(first)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"kind": "profile", "version": 99}',
        b'{"kind": "options", "version": 1, "options": [], "gap_ns": 0, "solves": 0}',
        b"cos\nsystem\n(S'echo hostile'\ntR.",
        b"__import__('os').system('echo hostile')",
        b"[" * 100_000,
    ],
)
def test_damaged_and_hostile_entries_are_set_aside_and_made_again(
    folder: Path, content: bytes
) -> None:
    first = make_plan()
    damaged = entries(folder)
    assert damaged
    for path in damaged:
        path.write_bytes(content)
    with pytest.warns(UserWarning, match="set aside"):
        again = make_plan()
    assert again.peak_bytes == first.peak_bytes
    assert list(folder.rglob("*.damaged"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_plan()


def test_an_option_that_lies_is_not_used(folder: Path) -> None:
    first = make_plan()
    for path in (folder / "v1" / "options").glob("*.json"):
        document = json.loads(path.read_text())
        for option in document["options"]:
            option["time_ns"] = 1
            option["backward_peak_bytes"] = 0
        path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="not legal"):
        again = make_plan()
    assert again.peak_bytes == first.peak_bytes


def test_no_partial_files_are_left(folder: Path) -> None:
    make_plan()
    assert not list(folder.rglob("*.part"))


def test_interrupted_write_keeps_the_old_entry(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan()
    before = {p: p.read_text() for p in entries(folder)}
    monkeypatch.setattr("rockplan.cache.os.replace", forbidden)
    cache = Cache(folder)
    with pytest.raises(AssertionError):
        cache._write(entries(folder)[0], "half")
    assert {p: p.read_text() for p in entries(folder)} == before
    assert not list(folder.rglob("*.part"))


def test_round_trips(folder: Path) -> None:
    make_plan()
    for path in entries(folder):
        text = path.read_text()
        if path.parent.name == "profile":
            assert dump_profile(parse_profile(text)) == text
        else:
            assert dump_family(parse_family(text)) == text


def test_without_cache_nothing_is_written(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    rockplan.plan(model, torch.randn(64, 16), "min", options=rockplan.Options(cache=False))
    assert not entries(folder)
