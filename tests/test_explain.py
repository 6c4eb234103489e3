"""Explain: bytes at the peak add up, a replay finds what recomputations buy, text says it first."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn

import rockplan
from rockplan.oracles.lifetimes import alive_at, lifetimes
from rockplan.oracles.simulate import simulate, timeline
from rockplan.reports.explain import Explanation, explain_schedule
from rockplan.values.graph import CDGraph, Phase, as_eager, without_takes
from rockplan.values.names import activation_names, operation_names
from rockplan.values.schedule import Schedule, keep_all, with_frees
from testing.graphs import random_graph, random_recomputations
from tests.usage import wide


def cases(count: int = 60) -> list[tuple[CDGraph, Schedule]]:
    found = []
    for seed in range(count):
        rng = random.Random(seed)
        graph = random_graph(rng, forward_nodes=rng.randrange(2, 7))
        found.append((graph, random_recomputations(graph, rng)))
    return found


def orders(schedule: Schedule) -> tuple[list[int], list[int]]:
    forward = Schedule(schedule.events[: schedule.forward_length], schedule.forward_length)
    count = len(forward.computes)
    return list(schedule.computes[:count]), list(schedule.computes[count:])


def test_lifetimes_add_up_to_the_simulator() -> None:
    recomputing = 0
    for graph, schedule in cases():
        found = lifetimes(graph, schedule)
        for position, step in enumerate(timeline(graph, schedule)):
            alive = alive_at(found, position)
            assert sum(f.size_bytes for f in alive) == step.during_bytes
        recomputing += len(schedule.computes) > len(graph.nodes)
    assert recomputing > 20  # the claim is about schedules that recompute


def test_tenants_and_shares_add_up_to_the_peak() -> None:
    for graph, schedule in cases():
        found = explain_schedule(graph, schedule)
        assert found.peak_bytes == simulate(graph, schedule).peak_bytes
        assert sum(t.size_bytes for t in found.tenants) == found.peak_bytes
        assert sum(s.size_bytes for s in found.shares) == found.peak_bytes
        assert all(t.reason for t in found.tenants)
        known = {*operation_names(graph), *activation_names(graph)}
        assert {t.name for t in found.tenants} <= known


def test_recomputations_state_what_a_replay_without_them_finds() -> None:
    count = 0
    for graph, schedule in cases():
        found = explain_schedule(graph, schedule)
        names = operation_names(graph)
        again = {n: schedule.computes.count(n) - 1 for n in schedule.computes}
        expected = [names[n] for n, times in sorted(again.items()) if times]
        assert [r.name for r in found.recomputations] == expected
        extra_ns = sum(r.time_ns for r in found.recomputations)
        assert extra_ns == found.time_ns - graph.time_ns
        for r in found.recomputations:
            node = names.index(r.name)
            assert len(r.at_ns) == len(r.readers) == r.times == again[node]
            forward, backward = orders(schedule)
            first = len(forward)
            both = [*forward, *backward]
            kept = [n for i, n in enumerate(both) if n != node or i == both.index(node)]
            without = with_frees(graph, kept[:first], kept[first:])
            assert graph.nodes[node].phase is Phase.FORWARD
            assert simulate(graph, without).peak_bytes == r.peak_without_bytes
            assert r.buys_bytes == r.peak_without_bytes - found.peak_bytes
            count += 1
    assert count > 50


class Tower(nn.Module):
    """A narrow body under a head with very many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 2000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).relu().sum()


@pytest.fixture(scope="module")
def found() -> Explanation:
    plan = rockplan.plan(Tower(), torch.randn(64, 16), "100%")
    return rockplan.explain(plan)


def test_the_first_line_names_the_owner(found: Explanation) -> None:
    first, *second = str(found).partition("\n\n")[0].splitlines()
    share = found.shares[0].size_bytes / found.peak_bytes
    assert first.startswith(f"{share:.0%} of the peak: ")
    assert "head" in first or "(root)" in first
    assert "phase" in second[0] and found.peak_operation in " ".join(second)


def test_json_and_text_are_the_same_every_time(found: Explanation) -> None:
    plan = rockplan.plan(Tower(), torch.randn(64, 16), "100%")
    again = rockplan.explain(plan)
    parsed = json.loads(json.dumps(again.as_json()))
    assert sum(t["size_bytes"] for t in parsed["tenants"]) == parsed["peak_bytes"]
    assert [t.name for t in again.tenants] == [t.name for t in found.tenants]


def test_unplanned_explains_keeping_everything() -> None:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    plan = rockplan.plan(nn.Sequential(*layers), torch.randn(64, 32), "min")
    assert rockplan.explain(plan).peak_bytes == plan.peak_bytes
    everything = rockplan.explain(plan, unplanned=True)
    assert everything.peak_bytes == plan.eager_peak_bytes
    assert everything.recomputations == ()


def test_unplanned_explains_eagers_order() -> None:
    """Not the order that plans run in, which needs less with storages like eager's."""
    case = wide(width=512, batch=256)
    options = rockplan.Options(cache=False)
    plan = rockplan.plan(case.model, case.args, "100%", options=options)
    eager = as_eager(plan.graph)
    found = rockplan.explain(plan, unplanned=True)
    assert found == explain_schedule(eager, keep_all(eager))
    assert found.peak_bytes == plan.eager_peak_bytes
    planned = without_takes(plan.graph)
    assert simulate(planned, keep_all(planned)).peak_bytes < found.peak_bytes
