"""By how much does keeping everything need less memory than eager?

    python -m benchmarks.below_eager [gpt2 resnet18 ...]

Nothing is computed again: the budget is 100 %. For each model the peak of eager, of the plan whose
results have storages of their own, of the plan whose results take over the storages of operands
that die, both in eager's order, and of the plan as it is made, in its own order. Peaks are
measured, beside what was predicted. Beside them stands what no order of the operations needs less
than: for each operation a minimum cut finds the least that is alive around it, over all orders
that keep what is read before what reads it.

Writes benchmarks/results/below_eager.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import networkx
import torch

import rockplan
from benchmarks.timing import machine, mebibytes
from rockplan.graph_builder.lowering.backward_order import predecessors
from rockplan.oracles.lifetimes import taken_over
from rockplan.oracles.simulate import simulate, timeline
from rockplan.runtime import planned_module as planned_modules
from rockplan.runtime.program import PlannedProgram, build_program
from rockplan.values.graph import (
    CDGraph,
    DataKind,
    Phase,
    as_eager,
    in_eager_order,
    producers,
    readers,
)
from rockplan.values.schedule import Compute, keep_all
from testing import models as zoo
from testing.models import Case
from testing.priced import CASES

MODELS: dict[str, Callable[[], Case]] = {
    **CASES,
    "vit": lambda: zoo.vit(4, 128, 4, 8, 64, 8),
    "resnet50": lambda: zoo.resnet(width=16, batch=8, size=96),
    "encoder": lambda: zoo.encoder(3, 128, 8, 128),
    "mlp": lambda: zoo.mlp(8, 256, 1024),
    "mlp-wide": lambda: zoo.mlp(6, 1024, 64),
}

RESULT = Path(__file__).parent / "results" / "below_eager.md"


@dataclass(frozen=True, slots=True)
class Row:
    """Peaks of one model; own: in eager's order, every result in a storage of its own; taking: in
    eager's order; bytes: of the plan, in which `taken` results have no storage of their own; least:
    no order needs less."""

    model: str
    eager_bytes: int
    own_predicted_bytes: int
    own_bytes: int
    taking_predicted_bytes: int
    taking_bytes: int
    predicted_bytes: int
    bytes: int
    least_bytes: int
    taken: int
    operations: int


def measure(name: str) -> Row:
    torch.manual_seed(0)
    case = MODELS[name]()
    options = rockplan.Options(cache=False)
    planned = rockplan.solve(
        case.model, case.args, "100%", sample_kwargs=case.kwargs, options=options
    )
    program: PlannedProgram = planned._rockplan.latest
    plan = program.plan
    own, taking = as_eager(plan.graph), in_eager_order(plan.graph)

    def peaks(graph: CDGraph) -> tuple[int, int]:
        """Of running every node of `graph` once, predicted and measured."""
        once = keep_all(graph)
        made = build_program(
            replace(plan, graph=graph, schedule=once),
            program.interface,
            program.constants,
            program.output_spec,
        )
        forward = planned_modules.bound_forward(case.model, made)
        return simulate(graph, once).peak_bytes, peak_bytes(case, forward)

    own_predicted_bytes, own_bytes = peaks(own)
    taking_predicted_bytes, taking_bytes = peaks(taking)
    return Row(
        model=name,
        eager_bytes=peak_bytes(case, case.model),
        own_predicted_bytes=own_predicted_bytes,
        own_bytes=own_bytes,
        taking_predicted_bytes=taking_predicted_bytes,
        taking_bytes=taking_bytes,
        predicted_bytes=plan.peak_bytes,
        bytes=peak_bytes(case, planned),
        least_bytes=least_of_all_orders_bytes(taking),
        taken=len(taken_over(plan.graph, plan.schedule)),
        operations=len(plan.schedule.computes),
    )


def least_of_all_orders_bytes(graph: CDGraph) -> int:
    """No order in which every node of `graph` runs once, forward nodes first, has a lower peak."""
    schedule = keep_all(graph)
    steps = zip(schedule.events, timeline(graph, schedule), strict=True)
    needs = {e.node: s.during_bytes for e, s in steps if isinstance(e, Compute)}
    follows = networkx.DiGraph()
    follows.add_nodes_from(needs)
    follows.add_edges_from((p, n) for n, found in enumerate(predecessors(graph)) for p in found)
    least = 0
    for node in sorted(needs, key=lambda n: -needs[n]):
        if needs[node] <= least:
            break  # no other one can need more than it does here
        least = max(least, _least_around_bytes(graph, follows, node))
    return least


def _least_around_bytes(graph: CDGraph, follows: networkx.DiGraph, node: int) -> int:
    """The least while `node` runs: what has run before it is cut from what has not."""
    runs = graph.nodes[node]
    is_forward = runs.phase is Phase.FORWARD
    before = networkx.ancestors(follows, node)
    after = networkx.descendants(follows, node) | {node}
    other = graph.backward if is_forward else graph.forward
    (after if is_forward else before).update(n.index for n in other)

    def side(n: int) -> object:
        return "before" if n in before else "after" if n in after else n

    cut = networkx.DiGraph()
    cut.add_nodes_from(("before", "after"))
    producer, users = producers(graph), readers(graph)
    for d in graph.data:
        if d.kind.resident or (is_forward and d.kind is DataKind.TANGENT):
            continue
        maker = side(producer[d.index]) if d.index in producer else "before"
        cut.add_edge(maker, ("data", d.index), capacity=d.size_bytes)
        ends = [side(n) for n in users[d.index]]
        if d.index in graph.held or (is_forward and d.index in graph.outputs):
            ends.append("after")
        cut.add_edges_from((("data", d.index), end) for end in ends)
    for first, second in follows.edges:
        if second not in before and second not in after:
            cut.add_edge(second, side(first))
    sizes = [0 if d.kind.resident else d.size_bytes for d in graph.data]
    made_bytes = sum(sizes[d] for d in runs.writes)
    taken_bytes = max((sum(sizes[d] for d in t.operands) for t in runs.takes), default=0)
    alive_bytes = int(networkx.minimum_cut_value(cut, "before", "after"))
    return alive_bytes + made_bytes - taken_bytes + runs.workspace_bytes


def peak_bytes(case: Case, forward: Callable[..., Any]) -> int:
    def step() -> None:
        result = forward(*case.args, **case.kwargs)  # held through backward, as plans assume
        case.loss(result).backward()

    return rockplan.peak_live_bytes(step).peak_bytes


def report(rows: list[Row], models: list[str]) -> str:
    lines = [
        "# Keeping everything, below eager",
        "",
        f"`{' '.join(['python -m benchmarks.below_eager', *models])}` on {machine()}, "
        f"{time.strftime('%Y-%m-%d')}.",
        "",
        "Peaks in MiB beyond parameters, buffers, inputs and `.grad`, measured; in brackets what",
        "was predicted. *Own storages*, *taking over*: in eager's order, without and with results",
        "in the storages of operands. *Plan*: with them, in its own order. *No order below*: the",
        "peak of any order, taking over, is at least this.",
        "",
        "| model | eager | own storages | taking over | plan | no order below | below eager "
        "| results that take over |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model} | {mebibytes(r.eager_bytes)} "
        f"| {mebibytes(r.own_bytes)} ({mebibytes(r.own_predicted_bytes)}) "
        f"| {mebibytes(r.taking_bytes)} ({mebibytes(r.taking_predicted_bytes)}) "
        f"| {mebibytes(r.bytes)} ({mebibytes(r.predicted_bytes)}) "
        f"| {mebibytes(r.least_bytes)} "
        f"| {1 - r.taking_bytes / r.eager_bytes:.1%} -> {1 - r.bytes / r.eager_bytes:.1%} "
        f"| {r.taken} of {r.operations} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], default=[])
    models = parser.parse_args().models
    torch.set_num_threads(1)
    rows = [measure(name) for name in models or MODELS]
    RESULT.write_text(report(rows, models))
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
