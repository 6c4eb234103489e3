"""What the order of operations gives to plans: each model planned in eager's order and in its own.

    python -m benchmarks.order [gpt2 resnet18 ...]
    python -m benchmarks.order --second gpt2 transformers/causal-lm/qwen3_next ...
    python -m benchmarks.order --moves gpt2 transformers/causal-lm/qwen3_next ...

Roofline prices, as in benchmarks/gap.py. For each model the least peak, and the time at three
budgets, 1/9, 2/9 and 3/9 of the way from the least peak in eager's order to keep-all's peak there.

With the default time limit, at some parts of the way from the smallest budget to keep-all's peak,
and for cases of benchmarks/zoo.py, too:

--second: planned in the order of the graph alone, and in the second one as well;
--moves: without and with exchanges that move first executions; what is proven of the latter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from benchmarks import zoo
from benchmarks.priced import CASES, prepared, prepared_case
from rockplan.budget import Budget
from rockplan.errors import InfeasibleBudget
from rockplan.graph_builder.partition import partition
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.search import planning
from rockplan.search.local.exchange import annealed_again
from rockplan.values.graph import in_eager_order
from rockplan.values.schedule import Schedule, keep_all

OPTIONS = Options(cache=False, time_limit_s=120, bound_time_limit_s=0.1)

DEFAULT = Options(cache=False)

PARTS = (0.03, 0.07, 0.15)
"""Of the way from the smallest budget to keep-all's peak."""


def smallest_bytes(made: planning.Problem) -> int:
    """What InfeasibleBudget says of a budget of one byte."""
    try:
        planning.plan_anew(made, Budget(size_bytes=1), OPTIONS)
    except InfeasibleBudget as error:
        return error.minimum_bytes
    raise AssertionError("a plan within one byte")


def overhead(made: planning.Problem, budget_bytes: int) -> str:
    try:
        plan = planning.plan_anew(made, Budget(size_bytes=budget_bytes), OPTIONS)
    except InfeasibleBudget:
        return "infeasible"
    return f"{plan.time_ns / made.graph.time_ns - 1:+.2%}"


def row(name: str) -> str:
    """Least peaks, and times over one execution of every node: eager's order -> its own."""
    own = prepared(name, OPTIONS)
    graph = in_eager_order(own.graph)
    eager = replace(own, graph=graph, constrained=graph, blocks=partition(graph))
    least, most = smallest_bytes(eager), simulate(graph, keep_all(graph)).peak_bytes
    budgets = [least + (most - least) * i // 9 for i in (1, 2, 3)]
    times = [f"{overhead(eager, b)} -> {overhead(own, b)}" for b in budgets]
    return " | ".join([f"| {name}", f"{smallest_bytes(own) / least:.4f}", *times, ""]).rstrip()


def row_of_second(name: str) -> str:
    """Times over one execution of every node: in the order of the graph -> in either order."""

    def planned(made: planning.Problem, budget: Budget, common: planning.Common) -> str:
        alone = replace(common, others=lambda: ())
        plans = [planning.plan_anew(made, budget, DEFAULT, c) for c in (alone, common)]
        return " -> ".join(over_once(made, plan.time_ns) for plan in plans)

    return row_of_parts(name, planned)


def row_of_moves(name: str) -> str:
    """Times over one execution of every node: without -> with moves (at least)."""

    def planned(made: planning.Problem, budget: Budget, common: planning.Common) -> str:
        with mock.patch.object(planning, "annealed_again", without_moves):
            stays = planning.plan_anew(made, budget, DEFAULT, common)
        moves = planning.plan_anew(made, budget, DEFAULT, common)
        least = over_once(made, moves.certificate.bound_ns)
        return " -> ".join(over_once(made, plan.time_ns) for plan in (stays, moves)) + f" ({least})"

    return row_of_parts(name, planned)


def without_moves(*args: Any, moves: bool = False, **kwargs: Any) -> Schedule:
    return annealed_again(*args, **kwargs)


def over_once(made: planning.Problem, time_ns: int) -> str:
    return f"{time_ns / made.graph.time_ns - 1:+.1%}"


def row_of_parts(
    name: str, planned: Callable[[planning.Problem, Budget, planning.Common], str]
) -> str:
    """What `planned` says, for each of PARTS."""
    made = prepared(name, DEFAULT) if name in CASES else of_zoo(name)
    graph = made.constrained
    common = planning.common_of(made, DEFAULT)
    least = common.smallest(time.monotonic() + DEFAULT.time_limit_s).peak_bytes
    most = simulate(graph, keep_all(graph)).peak_bytes
    budgets = [Budget(size_bytes=int(least + (most - least) * part)) for part in PARTS]
    cells = [planned(made, budget, common) for budget in budgets]
    return " | ".join([f"| {name}", f"{len(graph.nodes)}", *cells, ""]).rstrip()


def of_zoo(name: str) -> planning.Problem:
    case = zoo.make_case(name)
    case.model.train()
    return prepared_case(case, DEFAULT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="model")
    parser.add_argument("--second", action="store_true", help="what the second order gives")
    parser.add_argument("--moves", action="store_true", help="what moves give")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made_row, heads = row, ("least peak", "budget 1", "budget 2", "budget 3")
    if arguments.second or arguments.moves:
        made_row = row_of_moves if arguments.moves else row_of_second
        heads = ("operations", *map(str, PARTS))
    print(f"| {' | '.join(('model', *heads))} |\n{'|---' * (len(heads) + 1)}|")
    for name in arguments.models or CASES:
        print(made_row(name), flush=True)


if __name__ == "__main__":
    main()
