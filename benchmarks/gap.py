"""How far plans are above the proven bounds, at ten budgets from the minimum to keep-all.

    python -m benchmarks.gap [gpt2 resnet18 ...] [--limit 60] [--bound-limit 40]
                             [--again [--budgets 0 1 ...]]

Roofline prices (100 GB/s, 2 Tflop/s), so that anyone can repeat all but the seconds. For each model
the smallest budget against the proven bound on the peak; for each budget the plan that
`rockplan.plan` makes of these prices in --limit seconds, against a bound on the time that is given
--bound-limit seconds, offline. Rows are written as they come: run the command again to go on. With
--again everything is planned anew, or --budgets 0 1 of it; what was proved about a graph and a
budget is kept. `benchmarks.proof` proves more of single rows.

Writes benchmarks/results/gap.jsonl and gap.md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.bounds.pebbles import pebbled_peak_bytes
from benchmarks.bounds.prove import lower_bound_ns, peak_lower_bound_bytes
from benchmarks.timing import where
from rockplan.budget import Budget
from rockplan.errors import InfeasibleBudget
from rockplan.graph_builder.digests import graph_digest
from rockplan.graph_builder.lowering.backward_order import renumbered
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.search import planning
from rockplan.search.problem import Problem
from rockplan.values.schedule import first_executions, keep_all
from testing.priced import BYTES_PER_S, CASES, FLOPS_PER_S, prepared

RESULTS = Path(__file__).parent / "results"
BUDGETS = 10

PROVEN = 1e-4
"""Share of the iteration time: of a plan so near a bound in hand no other bound is looked for."""


@dataclass(frozen=True, slots=True)
class Least:
    """The smallest budget of a model, and what no schedule goes below; digest: of its graph."""

    model: str
    digest: str
    operations: int
    keep_all_bytes: int
    minimum_bytes: int
    bound_bytes: int
    cpu_seconds: float
    where: str

    @property
    def key(self) -> tuple[str, str, int]:
        return self.model, self.digest, -1


@dataclass(frozen=True, slots=True)
class Row:
    """The plan for budget `index` of ten; once_ns: of every node once. bound_where: the run that
    proved the bound, in bound_cpu_seconds beside the plan. order: in which the plan runs operations
    for the first time, as does what the bound holds for; empty if it is that of the graph.
    graph_bound_ns: proven of what runs them in the order of the graph; 0 if that is the bound."""

    model: str
    digest: str
    index: int
    budget_bytes: int
    peak_bytes: int
    once_ns: int
    time_ns: int
    bound_ns: int
    status: str
    plan_cpu_seconds: float
    bound_cpu_seconds: float
    bound_where: str
    where: str
    order: tuple[int, ...] = ()
    graph_bound_ns: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        return self.model, self.digest, self.index

    @property
    def in_graphs_order_ns(self) -> int:
        return self.graph_bound_ns if self.order else self.bound_ns


Found = dict[tuple[str, str, int], Least | Row]


def least(name: str, made: Problem, minimum_bytes: int, seconds: float) -> Least:
    start = time.process_time()
    pebbled_bytes = pebbled_peak_bytes(made.graph, minimum_bytes)
    bound_bytes = max(pebbled_bytes, peak_lower_bound_bytes(made.graph, time_limit_s=60))
    seconds += time.process_time() - start
    return Least(
        model=name,
        digest=graph_digest(made.graph)[:16],
        operations=len(made.graph.nodes),
        keep_all_bytes=simulate(made.graph, keep_all(made.graph)).peak_bytes,
        minimum_bytes=minimum_bytes,
        bound_bytes=bound_bytes,
        cpu_seconds=round(seconds, 1),
        where=where(),
    )


def row(
    name: str,
    made: Problem,
    index: int,
    size: Least,
    options: Options,
    bound_s: float,
    known: Row | None,
) -> Row:
    """known: of the same graph, before; its bound holds for the same budget and order."""
    span = size.keep_all_bytes - size.minimum_bytes
    budget_bytes = size.minimum_bytes + span * index // (BUDGETS - 1)
    start = time.process_time()
    plan = planning.plan_anew(made, Budget(size_bytes=budget_bytes), options)
    planned = time.process_time()
    proofs = [(plan.certificate.bound_ns, 0.0, where())]
    first = first_executions(plan.schedule)
    order = first if first != tuple(range(len(first))) else ()
    graph_bound_ns = 0
    if known is not None and known.budget_bytes == budget_bytes:
        if known.order == order:
            proofs.insert(0, (known.bound_ns, known.bound_cpu_seconds, known.bound_where))
        graph_bound_ns = known.in_graphs_order_ns
    if order and not graph_bound_ns:
        graph_bound_ns = lower_bound_ns(made.graph, budget_bytes, time_limit_s=bound_s)
    if plan.time_ns - max(proof[0] for proof in proofs) > PROVEN * made.graph.time_ns:
        graph = renumbered(made.graph, first)
        bound_ns = lower_bound_ns(graph, budget_bytes, time_limit_s=bound_s)
        proofs.append((bound_ns, round(time.process_time() - planned, 1), where()))
    # Of equal ones the first.
    bound_ns, bound_seconds, bound_where = max(proofs, key=lambda proof: proof[0])
    return Row(
        model=name,
        digest=size.digest,
        index=index,
        budget_bytes=budget_bytes,
        peak_bytes=plan.peak_bytes,
        once_ns=made.graph.time_ns,
        time_ns=plan.time_ns,
        bound_ns=bound_ns,
        status=plan.certificate.status.value,
        plan_cpu_seconds=round(planned - start, 1),
        bound_cpu_seconds=bound_seconds,
        bound_where=bound_where,
        where=where(),
        order=order,
        graph_bound_ns=graph_bound_ns if order else 0,
    )


def smallest_budget(made: Problem, options: Options) -> int:
    """What InfeasibleBudget says of a budget of one byte."""
    try:
        planning.plan_anew(made, Budget(size_bytes=1), options)
    except InfeasibleBudget as error:
        return error.minimum_bytes
    raise AssertionError("a plan within one byte")


def measure(name: str, found: Found, options: Options, arguments: argparse.Namespace) -> None:
    made = prepared(name, options)
    digest = graph_digest(made.graph)[:16]
    size = found.get((name, digest, -1))
    if not isinstance(size, Least) or arguments.again:
        start = time.process_time()
        minimum_bytes = smallest_budget(made, options)
        size = least(name, made, minimum_bytes, time.process_time() - start)
        add(found, size)
    for index in arguments.budgets:
        known = found.get((name, digest, index))
        if known is None or arguments.again:
            assert not isinstance(known, Least)
            add(found, row(name, made, index, size, options, arguments.bound_limit, known))


def add(found: Found, new: Least | Row) -> None:
    found[new.key] = new
    with (RESULTS / "gap.jsonl").open("a") as file:
        file.write(json.dumps(asdict(new)) + "\n")
    print(new, flush=True)


def read() -> Found:
    """Of each model what is known of the graph that was planned last."""
    path = RESULTS / "gap.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    made = [row_of(r) if "index" in r else Least(**r) for r in rows]
    latest = {r.model: r.digest for r in made}
    return {r.key: r for r in made if latest[r.model] == r.digest}


def row_of(line: dict[str, Any]) -> Row:
    return Row(**{**line, "order": tuple(line.get("order", ()))})


def report(found: Found) -> str:
    sizes = [r for r in found.values() if isinstance(r, Least)]
    rows = [r for r in found.values() if isinstance(r, Row)]
    of = {(size.model, size.digest): size for size in sizes}
    nothing_fits = {r for r in rows if r.budget_bytes < of[r.model, r.digest].bound_bytes}
    near = sum(r.time_ns - r.bound_ns <= 0.01 * r.once_ns for r in rows)
    near_graphs = sum(
        r in nothing_fits or r.time_ns - r.in_graphs_order_ns <= 0.01 * r.once_ns for r in rows
    )

    def in_graphs_order(row: Row) -> str:
        if row in nothing_fits:
            return "nothing fits"
        return f"{row.graph_bound_ns / row.once_ns - 1:+.2%}" if row.order else ""

    lines = [
        "# Plans and proven bounds",
        "",
        "`python -m benchmarks.gap`: roofline prices, "
        f"{BYTES_PER_S:g} B/s and {FLOPS_PER_S:g} flop/s. Where and when: `gap.jsonl`.",
        "",
        "Smallest budget, and what no schedule that executes everything for the first time in the "
        "order of the graph goes below (the larger of `pebbles` and of the relaxation), as "
        "shares of keep-all's peak; seconds of CPU time with the options of blocks.",
        "",
        "| model | operations | smallest budget | bound | above the bound | seconds |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model} | {r.operations} | {r.minimum_bytes / r.keep_all_bytes:.2%} | "
        f"{r.bound_bytes / r.keep_all_bytes:.2%} | {r.minimum_bytes / r.bound_bytes - 1:.2%} | "
        f"{r.cpu_seconds} |"
        for r in sizes
    ]
    lines += [
        "",
        "Predicted time over one execution of every node, the bound of schedules in the same order "
        "of first executions, and the gap between them as "
        "a share of one execution of every node, at budgets from the smallest (0) to keep-all (9); "
        "some bounds are proven by `python -m benchmarks.proof`. "
        f"Within 1 %: {near} of {len(rows)}. Where the plan has an order of its own, what is "
        "proven in the order of the graph is given too, which such a plan may be below; within 1 % "
        f"of that or below it: {near_graphs}.",
        "",
        "| model | budget | of keep-all | plan | bound | gap | in the graph's order | status "
        "| seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model} | {r.index} | {r.budget_bytes / of[r.model, r.digest].keep_all_bytes:.1%} | "
        f"{r.time_ns / r.once_ns - 1:+.2%} | {r.bound_ns / r.once_ns - 1:+.2%} | "
        f"{(r.time_ns - r.bound_ns) / r.once_ns:.2%} | {in_graphs_order(r)} | "
        f"{r.status} | {r.plan_cpu_seconds} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def write(found: Found) -> None:
    rows = "".join(json.dumps(asdict(row)) + "\n" for row in found.values())
    (RESULTS / "gap.jsonl").write_text(rows)
    (RESULTS / "gap.md").write_text(report(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES), metavar="MODEL")
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--bound-limit", type=float, default=40.0)
    parser.add_argument("--again", action="store_true", help="plan what was planned before")
    parser.add_argument("--budgets", type=int, nargs="*", default=range(BUDGETS), metavar="0..9")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = Options(time_limit_s=arguments.limit, bound_time_limit_s=0.1)
    found = read()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ROCKPLAN_CACHE_DIR"] = folder
        for name in arguments.models:
            measure(name, found, options, arguments)
            write(found)


if __name__ == "__main__":
    main()
