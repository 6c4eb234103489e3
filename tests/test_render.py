"""Pictures and page: they open, load nothing, and show the figures of the plan."""

from __future__ import annotations

import base64
import html
import importlib.util
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import rockplan
from rockplan.errors import InvalidInput, MissingLibrary
from rockplan.oracles.simulate import simulate
from rockplan.reports.explain import explanation_text
from rockplan.reports.pictures import Series, curve_series, plan_series
from rockplan.reports.timeline import (
    block_rows,
    eager_timeline,
    module_groups,
    planned_timeline,
    timeline_of,
)
from rockplan.values.plan import Plan
from testing.graphs import random_graph, random_recomputations
from testing.training import QUICK


class Body(nn.Module):
    """Four equal layers between two others, and operations outside submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).pow(2).mean()


X = torch.randn(128, 16)


@pytest.fixture(scope="module")
def planned() -> Any:
    return rockplan.solve(Body(), X, "min", options=QUICK)


@pytest.fixture(scope="module")
def plan(planned: Any) -> Plan:
    return planned.plan


def test_planned_modules_are_drawn_as_their_plans(
    planned: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for draw in (rockplan.draw_memory, rockplan.draw_schedule):
        assert draw(planned) == draw(plan)
        with pytest.raises(InvalidInput, match=r"Linear has no plan.*rockplan\.solve"):
            draw(nn.Linear(2, 2))
    for name in ("matplotlib", "matplotlib.figure"):  # the page has these pictures else
        monkeypatch.setitem(sys.modules, name, None)
    for show in (rockplan.explain, rockplan.html_report):
        assert show(planned) == show(plan)


def test_timelines_peak_where_the_simulator_does(plan: Plan) -> None:
    assert planned_timeline(plan).peak_bytes == plan.peak_bytes
    assert eager_timeline(plan).peak_bytes == plan.eager_peak_bytes
    for seed in range(40):
        rng = random.Random(seed)
        graph = random_graph(rng)
        schedule = random_recomputations(graph, rng)
        found = timeline_of(graph, schedule, "random")
        assert found.peak_bytes == simulate(graph, schedule).peak_bytes
        assert found.time_ns == simulate(graph, schedule).time_ns
        for index, moment in enumerate(found.moments):
            alive = [s.size_bytes for s in found.stays if s.first <= index <= s.last]
            assert sum(moment.group_bytes) == moment.live_bytes == sum(alive)


def test_layers_of_a_stack_are_one_group(plan: Plan) -> None:
    groups = dict.fromkeys(module_groups(plan.graph))
    assert list(groups) == ["stem", "layers.*.0", "layers.*.1", "layers.*.2", "(root)", "head"]


def test_block_rows_keep_what_the_plan_keeps(plan: Plan) -> None:
    rows = block_rows(plan)
    assert sum(r.saved_bytes for r in rows) == plan.saved_bytes
    assert {kind for r in rows for _, _, kind in r.runs} == {"forward", "again", "backward"}
    assert sum(stop - start for r in rows for start, stop, _ in r.runs) == plan.time_ns
    assert all(r.alive[-1][1] == 0 for r in rows[:-1] if r.alive)


@pytest.mark.parametrize("format", ["svg", "png"])
def test_pictures_are_pictures(plan: Plan, format: Any) -> None:
    pytest.importorskip("matplotlib")
    series = [plan_series(plan), Series("line", ((1, 0.5), (plan.peak_bytes, 0.0)), True)]
    for data in (
        rockplan.draw_memory(plan, format=format),
        rockplan.draw_schedule(plan, format=format),
        rockplan.draw_curve(series, title="curve", format=format),
    ):
        if format == "png":
            assert data.startswith(b"\x89PNG")
        else:
            assert ElementTree.fromstring(data).tag.endswith("svg")
    again = rockplan.draw_memory(plan, format=format)
    assert again == rockplan.draw_memory(plan, format=format)


def test_svg_names_groups_budget_and_blocks(plan: Plan) -> None:
    pytest.importorskip("matplotlib")
    memory = rockplan.draw_memory(plan).decode()
    for text in ("layers.*.0", "predicted peak", "budget", "MiB", "backward"):
        assert text in memory
    schedule = rockplan.draw_schedule(plan).decode()
    assert all(row.name in schedule for row in block_rows(plan))


def test_a_curve_without_points_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no series has a point"):
        rockplan.draw_curve([Series("empty", ())])


def test_without_matplotlib_the_error_says_what_to_install(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def missing(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingLibrary, match=r"rockplan\[plot\]"):
        rockplan.draw_schedule(plan)
    page = rockplan.html_report(plan)
    assert page.count("rockplan[plot]") == 3 and "</html>" in page and "<img" not in page


def test_dot_has_every_block_and_edge(plan: Plan) -> None:
    source = rockplan.draw_graph(plan, format="dot").decode()
    nodes = set(re.findall(r"^\s*(b\d+) \[", source, re.M))
    edges = re.findall(r"^\s*(b\d+) -> (b\d+)", source, re.M)
    assert len(nodes) == len(plan.blocks)
    assert edges and all(end in nodes for edge in edges for end in edge)


def test_without_dot_the_error_says_what_to_do(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingLibrary, match="format='dot' gives its text"):
        rockplan.draw_graph(plan)


class Page(HTMLParser):
    """What a page refers to; every opened element must be closed."""

    VOID = frozenset({"meta", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data"):
                self.references.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(plan: Plan) -> None:
    title = "</script><img src=x>"
    series = [Series("<b>peer</b>", ((plan.peak_bytes, 0.3),))]
    text = rockplan.html_report(plan, title=title, series=series)
    page = Page()
    page.feed(text)
    assert page.open == [] and "<b>peer" not in text
    assert not re.search(r"https?://|url\(|@import|<script", text)
    data = "img src=data:image/svg+xml;base64,"
    assert all(reference.startswith(data) for reference in page.references)
    if importlib.util.find_spec("matplotlib"):
        curve, memory, schedule = (base64.b64decode(r[len(data) :]) for r in page.references)
        assert memory == rockplan.draw_memory(plan)
        assert schedule == rockplan.draw_schedule(plan)
        assert ElementTree.fromstring(curve).tag.endswith("svg") and b"peer" in curve


def test_the_page_says_what_is_printed(plan: Plan) -> None:
    text = html.unescape(rockplan.html_report(plan))
    found = rockplan.explain(plan)
    assert found.recomputations and str(plan) in text
    assert explanation_text(found, len(found.tenants)) in text
    assert explanation_text(rockplan.explain(plan, unplanned=True), 1000) in text


def test_the_curve_of_pareto_is_a_series() -> None:
    curve = rockplan.pareto(Body(), X, options=QUICK)
    series = curve_series(curve)
    assert series.connected
    assert [p[0] for p in series.points] == [p.peak_bytes for p in curve.points]
