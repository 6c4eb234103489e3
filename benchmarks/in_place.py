"""What it is worth that kernels write results over operands that die.

    OMP_NUM_THREADS=1 python -m benchmarks.in_place [--models llama gpt2]

Plans of the models of `benchmarks.compiled`, by predicted bytes and times: with no kernel in place,
with those of one result, and with all of them; for "min", and for the smallest budget without and
1.25, 1.6 and 2.2 times as much. The machine measures its prices once, so that the ways of a model
differ in nothing else. Prints a table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import rockplan
from benchmarks.compiled import CASES
from benchmarks.timing import mebibytes
from rockplan.graph_builder.fusion import in_place
from rockplan.options import Options
from testing.models import Case

SHARES = (1, 1.25, 1.6, 2.2)

WAYS = {"none": 0, "one result": 1, "all": 99}
"""Results of kernels that are in place, at most."""


@contextmanager
def limited(results: int) -> Iterator[None]:
    """Only kernels of so many results are in place."""
    ways = in_place.ways_of

    def fewer(*given: Any) -> dict[Any, Any]:
        known = given[1]
        found = ways(*given)
        return {w: n for w, n in found.items() if len(known[w[0]].kernel.results) <= results}

    in_place.ways_of = fewer
    try:
        yield
    finally:
        in_place.ways_of = ways


def planned(case: Case, budget: str | int) -> rockplan.Plan:
    options = Options(compile=True)
    return rockplan.plan(case.model, case.args, budget, sample_kwargs=case.kwargs, options=options)


def rows(name: str) -> Iterator[str]:
    torch.manual_seed(0)
    case = CASES[name]()
    budgets: list[int] = []
    for way, results in WAYS.items():
        with limited(results):
            least = planned(case, "min")
            budgets = budgets or [int(share * least.peak_bytes) for share in SHARES]
            cells = [f"{mebibytes(least.peak_bytes)} MiB, {_more(least)}"]
            cells += [_within(case, budget) for budget in budgets]
        if way == "none":
            asked = " | ".join(f"{mebibytes(budget)} MiB" for budget in budgets)
            yield f"| {name} | min | {asked} |"
            yield "|---" * (2 + len(budgets)) + "|"
        yield f"| {way} | {' | '.join(cells)} |"


def _within(case: Case, budget_bytes: int) -> str:
    try:
        return _more(planned(case, budget_bytes))
    except rockplan.InfeasibleBudget:
        return "no plan"


def _more(plan: rockplan.Plan) -> str:
    return f"+{100 * plan.overhead:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    for name in parser.parse_args().models:
        for line in rows(name):
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
