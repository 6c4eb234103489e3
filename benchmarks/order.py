"""What the order of operations gives to plans: each model planned in eager's order and in its own.

    python -m benchmarks.order [gpt2 resnet18 ...]
    python -m benchmarks.order --second gpt2 transformers/causal-lm/qwen3_next ...

Roofline prices, as in benchmarks/gap.py. For each model the least peak, and the time at three
budgets, 1/9, 2/9 and 3/9 of the way from the least peak in eager's order to keep-all's peak there.

With --second: planned in the order of the graph alone, and in the second one as well, with the
default time limit, at some parts of the way. Models are cases of benchmarks/zoo.py, too.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

from benchmarks import zoo
from benchmarks.priced import CASES, prepared, prepared_case
from rockplan import planning
from rockplan.budget import Budget
from rockplan.errors import InfeasibleBudget
from rockplan.graph import in_eager_order
from rockplan.graph_builder.partition import partition
from rockplan.options import Options
from rockplan.schedule import keep_all
from rockplan.simulate import simulate

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
    made = prepared(name, DEFAULT) if name in CASES else of_zoo(name)
    graph = made.constrained
    common = planning.common_of(made, DEFAULT)
    alone = replace(common, others=lambda: ())
    least = common.smallest(time.monotonic() + DEFAULT.time_limit_s).peak_bytes
    most = simulate(graph, keep_all(graph)).peak_bytes
    cells: list[str] = []
    for part in PARTS:
        budget = Budget(size_bytes=int(least + (most - least) * part))
        plans = [planning.plan_anew(made, budget, DEFAULT, c) for c in (alone, common)]
        times = (f"{plan.time_ns / made.graph.time_ns - 1:+.1%}" for plan in plans)
        cells.append(" -> ".join(times))
    return " | ".join([f"| {name}", f"{len(graph.nodes)}", *cells, ""]).rstrip()


def of_zoo(name: str) -> planning.Problem:
    case = zoo.make_case(name)
    case.model.train()
    return prepared_case(case, DEFAULT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="model")
    parser.add_argument("--second", action="store_true", help="what the second order gives")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.second:
        heads = ("model", "operations", *map(str, PARTS))
    else:
        heads = ("model", "least peak", "budget 1", "budget 2", "budget 3")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in arguments.models or CASES:
        print(row_of_second(name) if arguments.second else row(name), flush=True)


if __name__ == "__main__":
    main()
