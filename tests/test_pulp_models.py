"""Programs of blocks as PuLP models: read, written, and solved by whatever solver PuLP finds."""

from __future__ import annotations

import random
from pathlib import Path

import pulp
import pytest
import torch
from typer.testing import CliRunner

import rockplan
from rockplan.cli.main import app
from rockplan.errors import InvalidInput
from rockplan.ilp.blocks.decode import solve_stages
from rockplan.ilp.blocks.formulate import formulate
from rockplan.ilp.blocks.pareto_search import Settings, search_corners
from rockplan.ilp.blocks.stages import find_stages
from rockplan.ilp.highs import SolverStatus
from rockplan.ilp.pulp_models import HIGHS, at_hand, check_solver
from rockplan.ilp.scaling import UNLIMITED, in_units
from testing.exhaustive import assert_agrees, exact_model
from testing.graphs import attention_block, mlp_block, random_graph

OTHERS = [name for name in at_hand() if name != HIGHS]
"""PuLP comes with CBC, but for machines that it has none for."""

needs_another = pytest.mark.skipif(not OTHERS, reason="PuLP finds HiGHS alone here")


@needs_another
@pytest.mark.parametrize("seed", range(4))
def test_another_solver_finds_the_optimum_of_the_listing(seed: int) -> None:
    rng = random.Random(seed)
    graphs = (random_graph(rng, 3) for _ in range(20))
    graph = next(g for g in graphs if exact_model(g) is not None)
    assert_agrees(graph, rng, count=4, solver=OTHERS[0])


@needs_another
def test_another_solver_has_the_options_of_highs() -> None:
    """Times at corners agree, whichever of equal schedules is found."""
    problem = mlp_block()
    found = {}
    for solver in (HIGHS, OTHERS[0]):
        search = search_corners(problem, Settings(eps=0.0, gap=0.0, solver=solver))
        found[solver] = [search.best((UNLIMITED, saved)) for saved in (10**9, 20_000_000, 10**7)]
    times = [[a.time_ns if a else None for a in answers] for answers in found.values()]
    assert times[0] == times[1] and times[0][0] == problem.time_ns


@needs_another
def test_another_solvers_time_limit_is_not_optimal() -> None:
    problem = attention_block()
    model = formulate(find_stages(in_units(problem)))
    least = max(row.constant_bytes for row in model.peak)
    for limit_s in (0.0, 0.02):
        found = solve_stages(
            model, 2 * least, 10**7, time_limit_s=limit_s, gap=0.0, solver=OTHERS[0]
        )
        assert found.status in (SolverStatus.STOPPED, SolverStatus.FEASIBLE)
        assert found.bound_ns == problem.time_ns


def test_values_of_the_program_before_are_no_incumbent() -> None:
    """A corner that nothing fits has no schedule, though variables have values."""
    problem = mlp_block()
    model = formulate(find_stages(in_units(problem)))
    for solver in (HIGHS, *OTHERS[:1]):
        some = solve_stages(model, UNLIMITED, UNLIMITED, time_limit_s=60, gap=0.0, solver=solver)
        none = solve_stages(model, 1, UNLIMITED, time_limit_s=60, gap=0.0, solver=solver)
        assert some.orders is not None and none.orders is None
        assert none.status is SolverStatus.INFEASIBLE


def test_a_missing_solver_names_those_at_hand() -> None:
    missing = sorted(set(pulp.listSolvers()) - set(at_hand()))[0]
    with pytest.raises(InvalidInput, match=f"'{missing}' is not installed.*HiGHS"):
        check_solver(missing)
    options = rockplan.Options(solver="abacus", cache=False)
    with pytest.raises(InvalidInput, match="'abacus' is none that PuLP knows.*HiGHS"):
        rockplan.plan(torch.nn.Linear(2, 2), torch.randn(2, 2), "100%", options=options)


def test_a_program_reads_as_what_it_says(tmp_path: Path) -> None:
    """Golden: d1 is kept, or n0 makes it again, before n3, which reads it."""
    model = exact_model(random_graph(random.Random(1), 2))
    assert model is not None
    model.limited(12, 6).writeLP(str(tmp_path / "block.lp"))
    assert (tmp_path / "block.lp").read_text() == GOLDEN


GOLDEN = r"""\* time_of_what_runs_again *\
Minimize
OBJ: 333.333333333 again_n0_before_n3
Subject To
d1_before_n3_is_kept_or_made_again: again_n0_before_n3 + keep_d1_before_n3
 <= 1
_dummy: __dummy = 0
memory_after_the_last_stage: __dummy <= 56172
memory_at_n0_again_before_n3: 5 again_n0_before_n3 + 2 keep_d1_before_n3 <= 8
memory_at_n0_first: __dummy <= 32767
memory_at_n1_first: __dummy <= 37448
memory_at_n3: __dummy <= 9362
memory_at_the_turn: keep_d1_before_n3 <= 0
memory_up_to_n3: keep_d1_before_n3 <= -2
n3_reads_d1: again_n0_before_n3 + keep_d1_before_n3 >= 1
saved_at_the_turn: keep_d1_before_n3 <= 3
Binaries
again_n0_before_n3
keep_d1_before_n3
End
"""


def test_the_command_writes_a_program_a_kind(tmp_path: Path) -> None:
    command = ["solve", "rockplan.examples:mlp", "-b", "60%", "--no-cache"]
    result = CliRunner().invoke(app, [*command, "--write-lp", str(tmp_path / "lp")])
    assert result.exit_code == 0, result.output
    files = sorted((tmp_path / "lp").iterdir())
    assert files and all(file.name.endswith("-60pct.lp") for file in files)
    assert all("Subject To" in file.read_text() for file in files)
    assert CliRunner().invoke(app, ["solve", "rockplan.examples:mlp", "--write-lp", "x"]).exit_code
