"""What the order of operations gives to plans: each model planned in eager's order and in its own.

    python -m benchmarks.order [gpt2 resnet18 ...]

Roofline prices, as in benchmarks/gap.py. For each model the least peak, and the time at three
budgets, 1/9, 2/9 and 3/9 of the way from the least peak in eager's order to keep-all's peak there.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks.priced import CASES, prepared
from rockplan import planning
from rockplan.budget import Budget
from rockplan.errors import InfeasibleBudget
from rockplan.graph import in_eager_order
from rockplan.graph_builder.partition import partition
from rockplan.options import Options
from rockplan.schedule import keep_all
from rockplan.simulate import simulate

OPTIONS = Options(cache=False, time_limit_s=120, bound_time_limit_s=0.1)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[[], *CASES], default=[])
    models = parser.parse_args().models
    torch.set_num_threads(1)
    print("| model | least peak | budget 1 | budget 2 | budget 3 |\n|---|---|---|---|---|")
    for name in models or CASES:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
