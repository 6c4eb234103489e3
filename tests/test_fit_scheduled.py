"""What a schedule allocates and gives back, on random graphs and schedules."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import rockplan
from rockplan.fitting.changes import Changes, MemoryChange
from rockplan.fitting.gpus import Gpu
from rockplan.fitting.scheduled import scheduled_changes
from rockplan.oracles.lifetimes import taken_over
from rockplan.oracles.simulate import simulate
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule
from testing.graphs import (
    random_graph,
    random_schedule,
    varied_graph,
    with_random_takes,
)
from testing.training import QUICK


def graph_and_schedule(seed: int) -> tuple[CDGraph, Schedule]:
    rng = random.Random(seed)
    graph = with_random_takes(rng, random_graph(rng, 6)) if seed % 2 else varied_graph(seed)
    return graph, random_schedule(rng, graph)


def most_alive(changes: tuple[MemoryChange, ...]) -> tuple[int, int]:
    """Bytes that are alive at most, and at the end. A key is alive once at a time."""
    alive: dict[object, int] = {}
    most = 0
    for change in changes:
        if change.is_free:
            assert alive.pop(change.key) == change.size_bytes
        else:
            assert change.key not in alive
            alive[change.key] = change.size_bytes
            most = max(most, sum(alive.values()))
    return most, sum(alive.values())


@pytest.mark.parametrize("seed", range(60))
def test_the_most_bytes_are_the_simulators_peak(seed: int) -> None:
    graph, schedule = graph_and_schedule(seed)
    changes = scheduled_changes(graph, schedule, {})
    assert most_alive(changes) == (simulate(graph, schedule).peak_bytes, 0)
    # A step after another one begins with what that one left: nothing.
    assert most_alive(changes + changes) == most_alive(changes)


def test_random_schedules_take_over_storages() -> None:
    """Otherwise nothing above is said of them."""
    graphs = (graph_and_schedule(seed) for seed in range(60))
    assert sum(len(taken_over(*pair)) for pair in graphs) > 10


@pytest.mark.parametrize("seed", range(20))
def test_what_stays_is_alive_in_later_steps(seed: int) -> None:
    graph, schedule = graph_and_schedule(seed)
    taken = {
        operand
        for takeover in taken_over(graph, schedule).values()
        for operand in takeover.operands
    }
    stays = {str(d): d for d in graph.handed if d not in taken}
    kept_bytes = sum(graph.data[d].size_bytes for d in stays.values())
    first = scheduled_changes(graph, schedule, stays)
    assert most_alive(first)[1] == kept_bytes
    later = scheduled_changes(graph, schedule, {})
    peak_bytes = simulate(graph, schedule).peak_bytes
    assert most_alive(first + later) == (kept_bytes + peak_bytes, kept_bytes)


def test_products_ask_once_a_phase_for_workspaces() -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    plan = rockplan.plan_of(rockplan.solve(model, torch.randn(4, 16), "100%"))
    plain = scheduled_changes(plan.graph, plan.schedule, {})
    changes = scheduled_changes(plan.graph, plan.schedule, {}, workspace_bytes=12345)
    forward, backward = (c for c in changes if c.size_bytes == 12345)
    assert [c for c in changes if c not in (forward, backward)] == list(plain)
    # The norm and the first product's result are there before, the rest is not.
    asked = [c for c in changes[: changes.index(forward)] if not c.is_free]
    assert len(asked) > 1
    assert asked[-1].size_bytes == 4 * 16 * 4
    assert changes.index(forward) + 1 < changes.index(backward) < len(changes) - 1


@pytest.mark.parametrize("expandable", [False, True])
def test_reserved_is_at_least_the_promised_peak(expandable: bool) -> None:
    for seed in range(20):
        graph, schedule = graph_and_schedule(seed)
        changes = scheduled_changes(graph, schedule, {})
        found = Changes(changes).usage((), expandable=expandable)
        assert found.reserved_peak_bytes >= found.allocated_peak_bytes
        assert found.allocated_peak_bytes >= simulate(graph, schedule).peak_bytes
        assert found.allocated_bytes == 0


def test_plans_say_what_the_devices_allocator_reserves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of no other; the device is replaced."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)], nn.GELU())
    x, options = torch.randn(4096, 256), QUICK
    assert rockplan.plan(model, x, "min", options=options).reserved_bytes is None
    monkeypatch.setattr("rockplan.fitting.reserved.device_of", lambda graph: torch.device("cuda"))
    monkeypatch.setattr("rockplan.fitting.reserved.gpu", lambda device: Gpu("own", 1 << 34, (8, 0)))
    plan = rockplan.plan(model, x, "min", options=options)
    assert plan.reserved_bytes is not None
    workspaces_bytes = 2 * Gpu("own", 1 << 34, (8, 0)).cublas_bytes
    reserved_bytes = plan.reserved_bytes - workspaces_bytes
    assert plan.peak_bytes <= reserved_bytes < 3 * plan.peak_bytes
    assert "by PyTorch's allocator" in str(plan)
    fast = rockplan.solve(model, x, "min", options=options)
    assert rockplan.plan_of(fast).reserved_bytes == plan.reserved_bytes
