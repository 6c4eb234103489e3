"""Orders in which nodes may run for the first time, and plans in one of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rockplan.graph_builder.lowering.backward_order import predecessors
from rockplan.search import planning
from rockplan.values.graph import CDGraph


def topological(rng: random.Random, graph: CDGraph) -> tuple[int, ...]:
    """Nodes in a random order in which they may run for the first time."""
    before = predecessors(graph)
    order = list(range(len(graph.forward)))
    left = [n.index for n in graph.backward]
    while left:
        ready = [n for n in left if before[n].issubset(order)]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return tuple(order)


def plan_in(order_of: Callable[[CDGraph], tuple[int, ...]], monkeypatch: Any) -> None:
    """Has plans be made in another order than the graph's alone."""
    common_of = planning.common_of

    def in_other(problem: planning.Problem, *args: Any) -> planning.Common:
        common = common_of(problem, *args)
        first = common.in_order(order_of(problem.constrained))
        return replace(common, first=first, others=lambda: ())

    monkeypatch.setattr(planning, "common_of", in_other)
