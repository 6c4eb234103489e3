"""Solving blocks: seconds of one corner, families, and what their effort buys.

    python -m benchmarks.ilp_blocks [--layers 12]

Blocks of GPT-2 with attention written out, roofline prices (testing/graphs.py). The corner lies at
15 % of the range of peaks and 30 % of the range of saved bytes. Overhead: iteration time of the
chain's schedule over one execution of every node, as simulated, at budgets that are shares of
keep-all's peak; bound: no legal schedule is faster. Seconds are CPU seconds of this process, one
thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from benchmarks.bounds.prove import lower_bound_ns
from benchmarks.family_gap import gap_ns
from rockplan.dp.chain_solver import ChainSolver
from rockplan.ilp.blocks.decode import (
    Solution,
    keep_all_orders,
    pareto,
    price,
    solve_stages,
)
from rockplan.ilp.blocks.formulate import formulate
from rockplan.ilp.blocks.pareto_search import Settings, option_family, search_corners
from rockplan.ilp.blocks.stages import Stages, find_stages
from rockplan.ilp.scaling import Units, in_units
from rockplan.oracles.simulate import simulate
from rockplan.values.block import OptionFamily
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import keep_all
from testing.families import gpt_problems, join
from testing.graphs import attention_block, mlp_block

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

BLOCKS = {"MLP half": mlp_block(), "attention half, written out": attention_block()}
SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
SETTINGS = {
    "default": Settings(),
    "effort / 4": Settings(effort=Settings().effort // 4),
    "effort / 2": Settings(effort=Settings().effort // 2),
    "effort * 4": Settings(effort=Settings().effort * 4, time_limit_s=600),
    "eps 1 %, delta 5 %": Settings(eps=0.01, delta=0.05),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    report_corners()
    report_families()
    report_chain(arguments.layers)


@dataclass(frozen=True, slots=True)
class Corner:
    peak_bytes: int
    saved_bytes: int


def corner(units: Units, family: OptionFamily) -> Corner:
    everything = price(units.graph, keep_all_orders(units.graph))
    least = min(o.peak_bytes for o in family.options)
    least_saved = min(o.saved_bytes for o in family.options)
    return Corner(
        least + int(0.15 * (everything.peak_bytes - least)),
        least_saved + int(0.3 * (everything.saved_bytes - least_saved)),
    )


def report_corners() -> None:
    print("one corner: seconds, overhead, status")
    for name, problem in BLOCKS.items():
        units = in_units(problem)
        stages = find_stages(units)
        kept = replace(stages, transient=frozenset())
        at = corner(units, option_family(problem))
        operations = f"{len(problem.forward)}+{len(problem.backward)} operations"
        print(f"{name}: {operations}, {len(stages.stages)} stages")
        report_solution("stages", problem, *timed(solve_staged, stages, at))
        report_solution("stages, all may be kept", problem, *timed(solve_staged, kept, at))


def solve_staged(stages: Stages, at: Corner) -> Solution:
    model = formulate(stages)
    return solve_stages(model, at.peak_bytes, at.saved_bytes, time_limit_s=600, gap=1e-3)


def report_solution(label: str, problem: CDGraph, seconds: float, found: Solution) -> None:
    overhead = "-"
    if found.orders is not None:
        overhead = f"{price(problem, found.orders).time_ns / problem.time_ns - 1:.4f}"
    print(f"  {label:<28}{seconds:8.2f}  {overhead}  {found.status.value}")


def report_families() -> None:
    print("\nfamilies: options, solves, seconds, gap as a share of the iteration")
    for name, problem in BLOCKS.items():
        for label, settings in SETTINGS.items():
            seconds, search = timed(search_corners, problem, settings)
            proven_ns = gap_ns(search)
            gap = "unknown" if proven_ns is None else f"{proven_ns / problem.time_ns:.4f}"
            options = pareto([price(problem, answer.orders) for answer in search.answers])
            counts = f"{len(options):4d} {search.solves:4d}"
            print(f"  {name:<28}{label:<20}{counts} {seconds:7.2f}  {gap}")


def report_chain(layers: int) -> None:
    graph, blocks = join(gpt_problems(layers))
    peak = simulate(graph, keep_all(graph)).peak_bytes
    budgets = [int(share * peak) for share in SHARES]
    print(f"\n{layers} layers: overhead at shares {SHARES} of keep-all's peak; minimum; seconds")
    for label, settings in SETTINGS.items():
        seconds, families = timed(_families, [b.problem for b in blocks], settings)
        solver = ChainSolver(graph, blocks, families)
        found = [_overhead(graph, solver, budget) for budget in budgets]
        least = f"{solver.minimum_bytes / peak:.3f}"
        print(f"  {label:<20}", *found, "", least, f"{seconds:7.1f}")
    bounds = [lower_bound_ns(graph, b, time_limit_s=30) / graph.time_ns - 1 for b in budgets]
    print(f"  {'bound':<20}", *(f"{bound:.4f}" for bound in bounds))


def _families(problems: Sequence[CDGraph], settings: Settings) -> list[OptionFamily]:
    """One after the other, so that CPU seconds are those of one thread."""
    known: dict[CDGraph, OptionFamily] = {}
    for problem in problems:
        if problem not in known:
            known[problem] = option_family(problem, settings=settings)
    return [known[problem] for problem in problems]


def _overhead(graph: CDGraph, solver: ChainSolver, budget_bytes: int) -> str:
    schedule = solver.best_schedule(budget_bytes)
    if schedule is None:
        return "  -   "
    return f"{simulate(graph, schedule).time_ns / graph.time_ns - 1:.4f}"


def timed(
    run: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> tuple[float, Result]:
    start = time.process_time()
    result = run(*args, **kwargs)
    return time.process_time() - start, result


if __name__ == "__main__":
    main()
