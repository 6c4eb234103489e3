"""What a SolveReport says is what HiGHS proved."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import highspy
import numpy as np
import pytest

from rockplan.ilp import highs as solve_module
from rockplan.ilp.highs import (
    INFINITY,
    LinearProgram,
    ProgramBuilder,
    SolveReport,
    SolverStatus,
    solve,
)


def knapsack(seed: int, count: int, demands: int = 2) -> LinearProgram:
    """Cover the demands with as little cost as possible."""
    rng = random.Random(seed)
    builder = ProgramBuilder()
    columns = [builder.binary(rng.randint(100, 200)) for _ in range(count)]
    for _ in range(demands):
        weights = [rng.randint(100, 200) for _ in columns]
        builder.at_least([*zip(columns, weights, strict=True)], sum(weights) // 2)
    return builder.build()


def cost(program: LinearProgram, found: SolveReport) -> float:
    assert found.values is not None
    return float(program.costs @ found.values)


def test_optimal_means_within_the_gap() -> None:
    program = knapsack(0, 12)
    found = solve(program, time_limit_s=60, absolute_gap=0.0)
    assert found.status is SolverStatus.OPTIMAL
    assert found.values is not None
    assert found.bound == pytest.approx(cost(program, found))
    assert set(np.unique(found.values)) <= {0.0, 1.0}


def test_infeasible_is_proven() -> None:
    builder = ProgramBuilder()
    columns = [builder.binary() for _ in range(3)]
    builder.at_least([(c, 2) for c in columns], 7)
    found = solve(builder.build(), time_limit_s=60, absolute_gap=0.0)
    assert found.status is SolverStatus.INFEASIBLE
    assert found.values is None
    assert found.bound == float("inf")


def test_a_limit_is_never_called_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound stays below what was found."""
    monkeypatch.setattr(solve_module, "MAX_NODE_ENTRIES", 1)
    program = knapsack(1, 60, 8)
    found = solve(program, time_limit_s=60, absolute_gap=0.0)
    assert found.status is SolverStatus.FEASIBLE
    assert found.bound < cost(program, found)


def test_no_time_proves_nothing() -> None:
    program = knapsack(1, 60, 8)
    found = solve(program, time_limit_s=0.0, absolute_gap=0.0)
    assert found.status in (SolverStatus.STOPPED, SolverStatus.FEASIBLE)
    assert found.values is None or found.bound < cost(program, found)


def test_terms_of_one_column_are_added_up() -> None:
    builder = ProgramBuilder()
    x, y = builder.binary(1), builder.binary(3)
    builder.at_least([(x, 1), (y, 2), (x, 1)], 2)
    builder.at_most([(x, 1)], 0)
    found = solve(builder.build(), time_limit_s=60, absolute_gap=0.0)
    assert found.values is not None
    assert found.values.tolist() == [0.0, 1.0]


def test_other_users_of_highs_do_not_matter() -> None:
    """A scheduler of another size in this thread, and many solves at once."""
    other = highspy.Highs()
    other.setOptionValue("output_flag", False)
    other.setOptionValue("threads", 2)
    other.run()
    program = knapsack(2, 14)
    expected = solve(program, time_limit_s=60, absolute_gap=0.0)

    def again(_: int) -> float:
        return cost(program, solve(program, time_limit_s=60, absolute_gap=0.0))

    with ThreadPoolExecutor(max_workers=4) as threads:
        assert set(threads.map(again, range(8))) == {cost(program, expected)}


def test_a_solve_that_ignores_the_clock_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on in its own thread; what was asked for is answered."""
    done = threading.Event()

    def slow(*_: object) -> SolveReport:
        while not done.is_set():
            sum(range(1_000))
        raise AssertionError("nobody asks for this")

    monkeypatch.setattr(solve_module, "_solve", slow)
    monkeypatch.setattr(solve_module, "PATIENCE_S", 0.01)
    found = solve(knapsack(1, 4), time_limit_s=0.01, absolute_gap=0.0)
    done.set()
    assert found.status is SolverStatus.STOPPED
    assert found.values is None
    assert found.bound == -INFINITY
