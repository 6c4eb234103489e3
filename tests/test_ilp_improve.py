"""Windows are the stage formulation of what they leave open; improving is never slower."""

from __future__ import annotations

import random
import time

import pytest

from rockplan.eviction import thriftiest
from rockplan.graph import CDGraph
from rockplan.ilp.decode import Orders, keep_all_orders, peak_bytes, price
from rockplan.ilp.formulate import formulate
from rockplan.ilp.improve import improve
from rockplan.ilp.seeds import seed_orders
from rockplan.ilp.solve import SolverStatus, solve
from rockplan.ilp.units import UNLIMITED, in_units
from rockplan.ilp.window import make_window, read_window, start_values
from rockplan.schedule import with_frees
from rockplan.simulate import simulate
from rockplan.verify import verify
from tests.exhaustive import stage_schedules
from tests.graphs import Ranges, mlp_block, random_chain, random_graph

RANGES = Ranges(random_percent=0, max_rng_state_bytes=0, pinned_percent=15)


def draw(seed: int) -> CDGraph:
    rng = random.Random(seed)
    return random_graph(rng, 3, RANGES) if seed % 2 else random_chain(rng, (1, 2), RANGES)[0]


def legal_orders(graph: CDGraph) -> list[Orders]:
    """The thriftiest seed first."""
    return sorted(seed_orders(graph), key=lambda orders: peak_bytes(price(graph, orders)))


def budgets(graph: CDGraph) -> list[int]:
    """From what the thriftiest seed needs to just below keep-all."""
    low = peak_bytes(price(graph, legal_orders(graph)[0]))
    high = peak_bytes(price(graph, keep_all_orders(graph)))
    return sorted({low, (low + high) // 2, high - 1} & set(range(low, high)))


def test_a_window_of_everything_is_the_stage_formulation() -> None:
    solved = 0
    for seed in range(24):
        graph = draw(seed)
        units = in_units(graph, tiny_share=0.0)
        points = [(found.peak_bytes, found.time_ns) for _, found in stage_schedules(graph)]
        for start in legal_orders(graph):
            window = make_window(graph, units, start, range(len(graph.forward)))
            if window is None:
                continue
            model = formulate(window.stages)
            for budget_bytes in budgets(graph):
                program = model.within(budget_bytes, UNLIMITED)
                found = solve(program, time_limit_s=60, absolute_gap=0.0)
                assert found.status is SolverStatus.OPTIMAL and found.values is not None
                rerun = [key for key, column in model.rerun.items() if found.values[column] > 0.5]
                option = price(graph, read_window(window, rerun, start.forward))
                assert peak_bytes(option) <= budget_bytes
                assert option.time_ns == min(t for p, t in points if p <= budget_bytes)
                solved += 1
    assert solved >= 40


def test_a_window_reads_the_schedule_in_hand_and_leaves_the_rest() -> None:
    for seed in range(40):
        graph = draw(seed)
        rng = random.Random(seed)
        units = in_units(graph, tiny_share=0.0)
        start = rng.choice(legal_orders(graph))
        nodes = rng.sample(range(len(graph.forward)), 2)
        window = make_window(graph, units, start, nodes)
        if window is None:
            continue
        model = formulate(window.stages)
        values = start_values(window, model, start)
        again = [key for key, column in model.rerun.items() if values[column] > 0.5]
        assert read_window(window, again, start.forward) == start
        program = model.within(peak_bytes(price(graph, start)), UNLIMITED)
        found = solve(program, time_limit_s=60, absolute_gap=0.0)
        assert found.values is not None
        rerun = [key for key, column in model.rerun.items() if found.values[column] > 0.5]
        others = [i for i in start.backward if i not in nodes]
        decided = read_window(window, rerun, start.forward).backward
        assert [i for i in decided if i not in nodes and i >= len(graph.forward)] == [
            i for i in others if i >= len(graph.forward)
        ]
        assert price(graph, Orders(start.forward, decided)).time_ns <= price(graph, start).time_ns


def test_schedules_by_eviction_can_be_improved() -> None:
    """Backward nodes that run again there stay as they are."""
    faster = 0
    for graph in (mlp_block(), *map(draw, range(24))):
        before = thriftiest(graph)
        for budget_bytes in budgets(graph):
            if simulate(graph, before).peak_bytes > budget_bytes:
                continue
            found = improve(graph, before, budget_bytes, deadline=time.monotonic() + 60)
            verify(graph, found.schedule)
            after = simulate(graph, found.schedule)
            assert after.peak_bytes <= budget_bytes
            assert after.time_ns <= simulate(graph, before).time_ns
            faster += after.time_ns < simulate(graph, before).time_ns
    assert faster >= 1


@pytest.mark.parametrize("seed", range(12))
def test_improving_is_legal_within_budget_and_no_slower(seed: int) -> None:
    graph = draw(seed)
    start = legal_orders(graph)[0]
    before = with_frees(graph, start.forward, start.backward)
    for budget_bytes in budgets(graph):
        found = improve(graph, before, budget_bytes, deadline=time.monotonic() + 60)
        verify(graph, found.schedule)
        after = simulate(graph, found.schedule)
        assert found.is_complete
        assert after.peak_bytes <= budget_bytes
        assert after.time_ns <= simulate(graph, before).time_ns


def test_improving_finds_most_optima_of_small_graphs() -> None:
    optimal = total = 0
    for seed in range(24):
        graph = draw(seed)
        points = [(found.peak_bytes, found.time_ns) for _, found in stage_schedules(graph)]
        start = legal_orders(graph)[0]
        before = with_frees(graph, start.forward, start.backward)
        for budget_bytes in budgets(graph):
            found = improve(graph, before, budget_bytes, deadline=time.monotonic() + 60)
            least = min(t for p, t in points if p <= budget_bytes)
            optimal += simulate(graph, found.schedule).time_ns == least
            total += 1
    assert total >= 20
    assert optimal >= 0.9 * total


def test_without_time_the_schedule_stays_and_that_is_said() -> None:
    graph = mlp_block()
    start = legal_orders(graph)[0]
    before = with_frees(graph, start.forward, start.backward)
    high = peak_bytes(price(graph, keep_all_orders(graph)))
    found = improve(graph, before, high - 1, deadline=time.monotonic() - 1)
    assert found.schedule == before and not found.is_complete
    again = improve(graph, before, high - 1, deadline=time.monotonic() + 60)
    assert again.is_complete
    assert simulate(graph, again.schedule).time_ns < simulate(graph, before).time_ns
