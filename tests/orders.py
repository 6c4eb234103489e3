"""Orders in which nodes may run for the first time, and plans in one of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from torch import nn

import rockplan
from rockplan import Options
from rockplan.codegen import rng_replay
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.costs.estimate import Rates, roofline
from rockplan.graph_builder.lowering.backward_order import predecessors, renumbered
from rockplan.graph_builder.pipeline import lower
from rockplan.oracles.simulate import simulate
from rockplan.search.local import greedy_eviction
from rockplan.search.planning import plan_of
from rockplan.search.problem import Problem, problem_of
from rockplan.store.plan_file import dump_plans
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule, first_executions, with_frees
from testing.models import Case


def roofline_problem(case: Case) -> Problem:
    captured = capture(case.model, case.args, case.kwargs)
    device = next(case.model.parameters()).device
    graph = lower(captured, rng_replay.state_bytes(device)).graph
    return problem_of(graph, roofline(graph, Rates(1e11, 2e12)), Options(cache=False))


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


def schedule_in(graph: CDGraph, order: Sequence[int]) -> Schedule:
    """One with a small peak and these first executions."""
    found = greedy_eviction.thriftiest(renumbered(graph, order)).schedule
    forward, backward = (tuple(order[i] for i in phase) for phase in found.phases)
    return with_frees(graph, forward, backward)


def planned_in(case: Case, rng: random.Random, path: Path) -> nn.Module:
    """With a plan whose first executions come in a random order, which a file brings."""
    problem = roofline_problem(case)
    graph = problem.constrained
    order = topological(rng, graph)
    schedule = schedule_in(graph, order)
    assert first_executions(schedule) == order != tuple(sorted(order))
    made = plan_of(problem, schedule, simulate(graph, schedule).peak_bytes)
    assert made is not None
    path.write_text(dump_plans([made]))
    planned = rockplan.load(case.model, case.args, path, sample_kwargs=case.kwargs)
    assert first_executions(planned.plan.schedule) == order
    return planned
