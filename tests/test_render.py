"""Pictures, page and trace: they open, load nothing, and show the figures of the plan."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import rockplan
from rockplan.errors import InvalidInput, MissingLibrary
from rockplan.graph_builder.costs import ruler
from rockplan.oracles.simulate import simulate
from rockplan.reports.pictures import Series, curve_series, graph_dot, plan_series
from rockplan.reports.timeline import (
    block_rows,
    eager_timeline,
    module_groups,
    planned_timeline,
    timeline_of,
)
from rockplan.values.plan import Plan
from rockplan.values.profile import MeasuredTimeline
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


@pytest.fixture(scope="module")
def measured(planned: Any) -> MeasuredTimeline:
    return rockplan.measured_timeline(lambda: planned(X).backward())


def test_planned_modules_are_drawn_as_their_plans(planned: Any, plan: Plan) -> None:
    kinds = (rockplan.draw_memory, rockplan.draw_schedule, rockplan.draw_graph)
    for show in (rockplan.explain, rockplan.html_report, rockplan.plan_trace):
        assert show(planned) == show(plan)
    for draw in kinds:
        assert draw(planned) == draw(plan)
        with pytest.raises(InvalidInput, match=r"Linear has no plan.*rockplan\.solve"):
            draw(nn.Linear(2, 2))


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


def test_the_measured_timeline_peaks_where_the_ruler_does(
    planned: Any, measured: MeasuredTimeline
) -> None:
    peak, final = rockplan.peak_live_bytes(lambda: planned(X).backward())
    assert (measured.peak_bytes, measured.live_bytes[-1]) == (peak, final)
    assert list(measured.times_ns) == sorted(measured.times_ns)
    with pytest.raises(InvalidInput, match="_record_memory_history"):
        rockplan.measured_timeline(lambda: None, device="cuda")


def test_disturbances_of_one_step_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each interval is the shortest of the steps with the most frequent course of bytes."""
    course, other = (0, 8, 8), (0, 4, 4)
    seen = iter(
        MeasuredTimeline(times_ns, live_bytes)
        for times_ns, live_bytes in (
            ((0, 90, 100), course),
            ((0, 1, 2), other),
            ((0, 20, 70), course),
        )
    )
    monkeypatch.setattr(ruler, "_recorded_timeline", lambda step: next(seen))
    found = rockplan.measured_timeline(lambda: None, repeats=3)
    assert found == MeasuredTimeline((0, 20, 30), course)


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
def test_pictures_are_pictures(plan: Plan, measured: MeasuredTimeline, format: Any) -> None:
    pytest.importorskip("matplotlib")
    series = [plan_series(plan), Series("line", ((1, 0.5, ""), (plan.peak_bytes, 0.0, "")), True)]
    for data in (
        rockplan.draw_memory(plan, measured=measured, format=format),
        rockplan.draw_schedule(plan, format=format),
        rockplan.draw_curve(series, title="curve", format=format),
    ):
        if format == "png":
            assert data.startswith(b"\x89PNG")
        else:
            assert ElementTree.fromstring(data).tag.endswith("svg")
    again = rockplan.draw_memory(plan, measured=measured, format=format)
    assert again == rockplan.draw_memory(plan, measured=measured, format=format)


def test_svg_names_groups_budget_and_blocks(plan: Plan, measured: MeasuredTimeline) -> None:
    pytest.importorskip("matplotlib")
    memory = rockplan.draw_memory(plan, measured=measured).decode()
    for text in ("layers.*.0", "predicted peak", "measured", "MiB", "backward"):
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
    assert "</html>" in rockplan.html_report(plan)


@pytest.mark.parametrize("operations", [False, True])
def test_dot_is_understood_and_has_every_block(plan: Plan, operations: bool) -> None:
    source = graph_dot(plan, operations=operations)
    nodes = set(re.findall(r"^\s*([bn]\d+) \[", source, re.M))
    edges = re.findall(r"^\s*([bn]\d+) -> ([bn]\d+)", source, re.M)
    assert len(nodes) == (len(plan.graph.nodes) if operations else len(plan.blocks))
    assert edges and all(end in nodes for edge in edges for end in edge)
    drawn = rockplan.draw_graph(plan, operations=operations)
    if drawn.suffix == ".svg":  # the program `dot` is installed, and read it
        assert ElementTree.fromstring(drawn.data).tag.endswith("svg") and not drawn.note


def test_without_dot_there_is_text_and_a_line(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    drawn = rockplan.draw_graph(plan)
    assert drawn.suffix == ".dot" and drawn.data.decode() == graph_dot(plan)
    assert "not installed" in drawn.note and "\n" not in drawn.note


class Page(HTMLParser):
    """What a page refers to, and its sections; every opened element must be closed."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.identities: list[str] = []
        self.open: list[str] = []
        self.script: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data"):
                self.references.append(f"{tag} {name}={value}")
            if name == "id":
                self.identities.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.script.append(data)


def test_the_page_is_whole_and_loads_nothing(plan: Plan, measured: MeasuredTimeline) -> None:
    title = "</script><img src=x>"
    series = [Series("<b>peer</b>", ((plan.peak_bytes, 0.3, ""),))]
    text = rockplan.html_report(plan, title=title, series=series, measured=measured)
    page = Page()
    page.feed(text)
    assert page.open == [] and page.references == []
    assert "<img" not in text and "<b>peer" not in text
    namespace = "http://www.w3.org/2000/svg"  # a name, not an address that is loaded
    assert not re.search(r"https?://|url\(|@import|fetch\(|import\(", text.replace(namespace, ""))
    sections = {"summary", "curve", "memory", "schedule", "owners-section", "recomputed-section"}
    assert sections <= set(page.identities)
    assert len(set(page.identities)) == len(page.identities)
    data = json.loads(page.script[0])
    assert [t["peak_bytes"] for t in data["timelines"]] == [plan.eager_peak_bytes, plan.peak_bytes]
    assert data["timelines"][1]["measured"]["live_bytes"] == list(measured.live_bytes)
    assert data["series"][-1]["name"] == "<b>peer</b>"


def test_the_page_lists_all_owners_and_recomputations(plan: Plan) -> None:
    text = rockplan.html_report(plan)
    found = rockplan.explain(plan)
    assert found.recomputations
    names = [*(t.name for t in found.tenants), *(r.name for r in found.recomputations)]
    assert all(f"<code>{name}</code>" in text for name in names)


def test_the_page_groups_recomputations_by_layer(plan: Plan) -> None:
    text = rockplan.html_report(plan)
    section = text[text.index('id="recomputed-section"') :]
    grouped, each = section.split("<details>")[:2]
    groups = re.findall(r"<code>([^<]*)</code>( x\d+)?", grouped)
    kinds = {re.sub(r"\d+", "*", r.module) for r in rockplan.explain(plan).recomputations}
    assert {name.partition("/")[0] for name, _ in groups} == {kind or "(root)" for kind in kinds}
    assert any(count for _, count in groups) and len(groups) < each.count("<tr>")


STUB = """
const made = [];
const element = (tag) => ({ tag, attributes: {}, style: {}, textContent: "", children: [],
  setAttribute(key, value) { this.attributes[key] = value; }, addEventListener() {},
  append(...children) { this.children.push(...children); } });
const known = {};
globalThis.document = {
  getElementById: (id) => known[id] ??= element(id),
  createElement: element,
  createElementNS(_, tag) { const found = element(tag); made.push(found); return found; },
};
known.data = { textContent: process.env.DATA };
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="the script of the page needs node")
@pytest.mark.parametrize("lowest", [0.3, -0.02, -0.2, -0.9])
def test_ticks_and_points_are_on_one_scale(
    plan: Plan, measured: MeasuredTimeline, lowest: float
) -> None:
    series = [Series("peer", ((1000, 0.0, ""), (2000, lowest, ""), (3000, 0.1, "")))]
    text = rockplan.html_report(plan, series=series, measured=measured)
    page = Page()
    page.feed(text)
    data = json.loads(page.script[0])
    data["series"] = data["series"][-1:]
    end = "\nconsole.log(JSON.stringify(made));"
    done = subprocess.run(
        ["node", "-e", STUB + "".join(page.script[1:]) + end],
        env={**os.environ, "DATA": json.dumps(data)},
        capture_output=True,
        text=True,
        check=True,
    )
    made = json.loads(done.stdout)
    texts = [m["textContent"] for m in made if m["tag"] == "text"]
    assert any("predicted time of the colours, measured time of the line" in str(t) for t in texts)
    last = next(i for i, m in enumerate(made) if m["textContent"] == "time over eager, %")
    curve = made[:last]
    grid = [m["attributes"]["y1"] for m in curve if m["attributes"].get("class") == "grid"]
    labels = [m["textContent"] for m in curve if m["tag"] == "text"]
    ticks = dict(zip(map(float, labels), grid, strict=False))
    assert 0 in ticks and (min(ticks) < 0 or lowest > -0.1)
    marks = [m for m in made if m["attributes"].get("class") == "mark"]
    # The first point is at 0 %.
    heights = [float(re.findall(r"-?[\d.]+", m["attributes"]["d"])[1]) for m in marks[:3]]
    assert heights[0] - heights[1] == pytest.approx(scale(ticks) * 100 * lowest)


def scale(ticks: dict[float, float]) -> float:
    """Of a picture, upwards for one unit."""
    (low, low_at), *_, (high, high_at) = sorted(ticks.items())
    return (low_at - high_at) / (high - low)


def test_the_trace_follows_the_format(plan: Plan, measured: MeasuredTimeline) -> None:
    trace = json.loads(rockplan.plan_trace(plan, measured=measured))
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    for event in events:
        assert {"ph", "pid", "tid", "ts", "name"} <= event.keys()
        assert event["ph"] in ("M", "X", "C") and event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(v, int) and v >= 0 for v in event["args"].values())
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(plan.graph.nodes) + len(plan.schedule.computes)
    for process in (1, 2):
        ordered = [e for e in slices if e["pid"] == process]
        for first, second in zip(ordered, ordered[1:], strict=False):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-6


def test_counters_are_balanced(plan: Plan, measured: MeasuredTimeline) -> None:
    """Each counter has the same series throughout, rises to the peak and comes back to zero."""
    events = json.loads(rockplan.plan_trace(plan, measured=measured))["traceEvents"]
    peaks = {1: plan.eager_peak_bytes, 2: plan.peak_bytes, 3: measured.peak_bytes}
    for process, peak_bytes in peaks.items():
        counters = [e["args"] for e in events if e["ph"] == "C" and e["pid"] == process]
        assert len({tuple(c) for c in counters}) == 1
        assert max(sum(c.values()) for c in counters) == peak_bytes
        assert sum(counters[-1].values()) == 0


def test_the_curve_of_pareto_is_a_series() -> None:
    curve = rockplan.pareto(Body(), X, options=QUICK)
    series = curve_series(curve)
    assert series.connected
    assert [p[0] for p in series.points] == [p.peak_bytes for p in curve.points]
