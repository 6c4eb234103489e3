"""rockplan against the exact solver and the other algorithms: time and peak at several budgets.

Same graph, same fixed prices (a roofline, so that anyone can repeat it), same simulator for all;
`verify` checks every schedule. Rows are written as they come: run the command again to go on.

    python -m benchmarks.alternatives [--models bert unet] [--methods rockplan] [--redo rockplan]

Writes benchmarks/results/alternatives.{json,md,svg} (the picture needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from benchmarks.bounds.prove import lower_bound_ns
from benchmarks.peers.chen import all_segment_schedules, segment_schedule, sqrt_segments
from benchmarks.peers.dtr import SCORES, dtr
from benchmarks.peers.exact import exact, whole_graph_model
from benchmarks.peers.orders import fastest_within
from benchmarks.peers.per_tensor import per_tensor_schedules
from benchmarks.peers.rockmate import grid_families, rockmate
from benchmarks.peers.rotor import rotor
from benchmarks.timing import machine
from rockplan.budget import Budget
from rockplan.dp.chain_solver import ChainSolver
from rockplan.errors import InfeasibleBudget
from rockplan.graph_builder.digests import graph_digest
from rockplan.ilp.blocks.formulate import entries
from rockplan.ilp.blocks.pareto_search import Settings
from rockplan.ilp.blocks.stages import find_stages
from rockplan.ilp.scaling import in_units
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.search import planning
from rockplan.search import problem as problems
from rockplan.search.block_families import families
from rockplan.values.block import Block
from rockplan.values.graph import CDGraph, without_takes
from rockplan.values.schedule import Schedule, keep_all
from testing.priced import BYTES_PER_S, CASES, FLOPS_PER_S, prepared

RESULTS = Path(__file__).parent / "results"
SHARES = (0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GAP = 1e-3
MOST_ENTRIES = 500_000
"""Matrix entries of the largest whole-graph program that is given to the solver."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one method gives at one budget; budget_share 0 is its preparation for all of them.

    time_ns, peak_bytes: simulated; None without a schedule. bound_ns: what the method proves.
    cpu_seconds: user and system time of this process. digest: of the priced graph.
    """

    model: str
    digest: str
    method: str
    budget_share: float
    time_ns: int | None
    peak_bytes: int | None
    bound_ns: int | None
    cpu_seconds: float
    note: str

    @property
    def key(self) -> tuple[str, str, str, float]:
        return self.model, self.digest, self.method, self.budget_share


@dataclass(frozen=True, slots=True)
class Answer:
    schedule: Schedule | None
    bound_ns: int | None = None
    note: str = ""


Planner = Callable[[int], Answer]


@dataclass(frozen=True)
class Problem:
    """One model, captured and priced."""

    name: str
    prepared: problems.Problem

    @property
    def graph(self) -> CDGraph:
        return self.prepared.graph

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.prepared.blocks

    @cached_property
    def digest(self) -> str:
        return graph_digest(self.graph)[:16]

    @cached_property
    def keep_all_bytes(self) -> int:
        return simulate(self.graph, keep_all(self.graph)).peak_bytes


def with_own_storages(made: problems.Problem) -> problems.Problem:
    """Published algorithms and the exact program give every result a storage of its own."""
    return replace(
        made, graph=without_takes(made.graph), constrained=without_takes(made.constrained)
    )


# Methods: each prepares for a problem and then answers budgets


def _rockplan(problem: Problem) -> Planner:
    """What `rockplan.plan` makes of these prices; the time limit does not strike."""
    options = Options(time_limit_s=600.0, bound_time_limit_s=0.0)

    def answer(budget_bytes: int) -> Answer:
        try:
            plan = planning.plan_anew(problem.prepared, Budget(size_bytes=budget_bytes), options)
        except InfeasibleBudget:
            return Answer(None)
        return Answer(plan.schedule)

    return answer


def _chain(problem: Problem) -> Planner:
    found = families(problem.blocks, None, Settings(time_limit_s=600.0), math.inf)
    solver = ChainSolver(problem.graph, problem.blocks, found)
    return lambda budget_bytes: Answer(solver.best_schedule(budget_bytes))


def _exact(problem: Problem, limit_s: float) -> Planner:
    size = entries(find_stages(in_units(problem.graph)))
    if size > MOST_ENTRIES:
        return lambda _: Answer(None, note=f"not tried: {size} matrix entries")
    model = whole_graph_model(problem.graph)

    def answer(budget_bytes: int) -> Answer:
        found = exact(problem.graph, model, budget_bytes, time_limit_s=limit_s, gap=GAP)
        is_proven = found.status.value in ("optimal", "infeasible")
        note = found.status.value if is_proven else f"{found.status.value} after {limit_s:.0f} s"
        return Answer(found.schedule, found.bound_ns, note)

    return answer


def _rockmate(problem: Problem) -> Planner:
    families = grid_families(problem.blocks, time_limit_s=5.0)
    return lambda budget_bytes: Answer(
        rockmate(problem.graph, problem.blocks, families, budget_bytes)
    )


def _rotor(problem: Problem) -> Planner:
    solver = rotor(problem.graph, problem.blocks)
    return lambda budget_bytes: Answer(solver.best_schedule(budget_bytes))


def _any_of(problem: Problem, schedules: Sequence[Schedule]) -> Planner:
    return lambda budget_bytes: Answer(fastest_within(problem.graph, schedules, budget_bytes))


def _chen(problem: Problem) -> Planner:
    segments = sqrt_segments(problem.blocks)
    return _any_of(problem, [segment_schedule(problem.graph, problem.blocks, segments)])


def _chen_searched(problem: Problem) -> Planner:
    return _any_of(problem, all_segment_schedules(problem.graph, problem.blocks))


def _per_tensor(problem: Problem) -> Planner:
    return _any_of(problem, per_tensor_schedules(problem.graph))


def _dtr(problem: Problem, score: str) -> Planner:
    return lambda budget_bytes: Answer(dtr(problem.graph, budget_bytes, SCORES[score]))


def _bound(problem: Problem) -> Planner:
    """What no legal schedule can beat; keep-all stands for the schedule, there is none."""
    return lambda budget_bytes: Answer(
        None, lower_bound_ns(problem.graph, budget_bytes, time_limit_s=20.0), "bound"
    )


def methods(exact_limit_s: float) -> dict[str, Callable[[Problem], Planner]]:
    return {
        "rockplan": _rockplan,
        "rockplan, its chain alone": _chain,
        "proven bound": _bound,
        "Rockmate (20 x 20, slots)": _rockmate,
        "Rotor": _rotor,
        "per tensor": _per_tensor,
        "Chen, best number of segments": _chen_searched,
        "Chen, sqrt(n) segments": _chen,
        **{f"DTR {score}": partial(_dtr, score=score) for score in SCORES},
        "exact, whole graph": partial(_exact, limit_s=exact_limit_s),
    }


# Sweep


def rows(
    problem: Problem, name: str, prepare: Callable[[Problem], Planner], missing: Sequence[float]
) -> Iterator[Row]:
    """One row for each share of `missing`, after the one of the preparation."""

    def row(share: float, answer: Answer, seconds: float) -> Row:
        found = None
        if answer.schedule is not None:
            verify(problem.graph, answer.schedule)
            found = simulate(problem.graph, answer.schedule)
            assert found.peak_bytes <= share * problem.keep_all_bytes
        return Row(
            model=problem.name,
            digest=problem.digest,
            method=name,
            budget_share=share,
            time_ns=found.time_ns if found else None,
            peak_bytes=found.peak_bytes if found else None,
            bound_ns=answer.bound_ns,
            cpu_seconds=round(seconds, 3),
            note=answer.note,
        )

    start = time.process_time()
    planner = prepare(problem)
    yield row(0.0, Answer(None, note="preparation"), time.process_time() - start)
    for share in missing:
        start = time.process_time()
        answer = planner(int(share * problem.keep_all_bytes))
        yield row(share, answer, time.process_time() - start)


def read_rows(path: Path) -> dict[tuple[str, str, str, float], Row]:
    if not path.exists():
        return {}
    found = [Row(**r) for r in json.loads(path.read_text())]
    return {r.key: r for r in found}


def write_rows(path: Path, found: dict[tuple[str, str, str, float], Row]) -> None:
    lines = ",\n".join(json.dumps(asdict(r)) for r in found.values())
    path.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--exact-limit", type=float, default=30.0, help="seconds for each budget")
    parser.add_argument("--methods", nargs="+", default=None, help="only these")
    parser.add_argument("--redo", nargs="+", default=[], help="methods to run again")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ROCKPLAN_CACHE_DIR"] = folder
        sweep(parser.parse_args())


def sweep(arguments: argparse.Namespace) -> None:
    path = RESULTS / "alternatives.json"
    found = {k: r for k, r in read_rows(path).items() if r.method not in arguments.redo}
    table = methods(arguments.exact_limit)
    problems: list[Problem] = []
    for model in arguments.models:
        made = Problem(model, with_own_storages(prepared(model, Options())))
        problems.append(made)
        found = {k: r for k, r in found.items() if r.model != model or r.digest == made.digest}
        for name, prepare in table.items():
            if arguments.methods and name not in arguments.methods:
                continue
            missing = [s for s in SHARES if (model, made.digest, name, s) not in found]
            if not missing:
                continue
            for row in rows(made, name, prepare, missing):
                found[row.key] = row
                write_rows(path, found)
                print(_progress(row, made), file=sys.stderr, flush=True)
    write_report(problems, found, list(table))


def _progress(row: Row, made: Problem) -> str:
    cell = "-" if row.time_ns is None else f"{row.time_ns / made.graph.time_ns - 1:+.2%}"
    return (
        f"{row.model} {row.method} {row.budget_share:.0%} {cell} {row.note} {row.cpu_seconds:.1f} s"
    )


# Report


def write_report(
    problems: Sequence[Problem],
    found: dict[tuple[str, str, str, float], Row],
    names: Sequence[str],
) -> None:
    """The table and the picture of the models of this run."""
    lines = [
        "# Alternatives",
        "",
        "`python -m benchmarks.alternatives`: predicted time over one execution of every node, "
        "in brackets the peak as a share of keep-all's, at budgets that are shares of keep-all's "
        f"peak. Prices: roofline, {BYTES_PER_S:g} B/s and {FLOPS_PER_S:g} flop/s. A dash: no "
        "schedule within the budget. Seconds: CPU time of preparation and of all budgets "
        f"together, one thread, on {machine()}, shared with other work. *: stopped by its time "
        "limit, with the gap to its own bound. An empty cell: not run.",
    ]
    for made in problems:
        lines += ["", *_model_table(made, found, names)]
    (RESULTS / "alternatives.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    draw(problems, found, names)


def _model_table(
    made: Problem, found: dict[tuple[str, str, str, float], Row], names: Sequence[str]
) -> list[str]:
    kinds = len({b.digest for b in made.blocks})
    title = (
        f"## {made.name}: {len(made.graph.nodes)} operations, {len(made.blocks)} blocks of "
        f"{kinds} kinds, keep-all {made.keep_all_bytes / 2**20:.1f} MiB"
    )
    lines = [title, "", "| method | " + " | ".join(f"{s:.0%}" for s in SHARES) + " | seconds |"]
    lines.append("|" + "---|" * (len(SHARES) + 2))
    for name in names:
        own = [found.get((made.name, made.digest, name, s)) for s in (0.0, *SHARES)]
        cells = [_cell(made, row) for row in own[1:]]
        seconds = sum(row.cpu_seconds for row in own if row)
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {seconds:.1f} |")
    return lines


def _cell(made: Problem, row: Row | None) -> str:
    if row is None:
        return ""
    if row.time_ns is None or row.peak_bytes is None:
        is_bound = row.note == "bound" and row.bound_ns is not None
        return f"{row.bound_ns / made.graph.time_ns - 1:+.1%}" if is_bound else "-"
    text = (
        f"{row.time_ns / made.graph.time_ns - 1:+.1%} ({row.peak_bytes / made.keep_all_bytes:.0%})"
    )
    if "after" in row.note and row.bound_ns is not None:
        text += f" * {(row.time_ns - row.bound_ns) / row.time_ns:.1%}"
    return text


def draw(
    problems: Sequence[Problem],
    found: dict[tuple[str, str, str, float], Row],
    names: Sequence[str],
) -> None:
    """One panel for each model: overhead by peak."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rockplan"
    from matplotlib import pyplot

    columns = 2
    height = -(-(len(problems) + 1) // columns)
    figure, axes = pyplot.subplots(height, columns, figsize=(11, 3.6 * height), squeeze=False)
    places = iter(axes.flat)
    colors = pyplot.get_cmap("tab20")
    for made, place in zip(problems, places, strict=False):
        for number, name in enumerate(n for n in names if n != "proven bound"):
            own = [found.get((made.name, made.digest, name, s)) for s in SHARES]
            points = [
                (
                    r.peak_bytes / made.keep_all_bytes * 100,
                    (r.time_ns / made.graph.time_ns - 1) * 100,
                )
                for r in own
                if r and r.time_ns is not None and r.peak_bytes is not None
            ]
            is_ours = name == "rockplan"
            place.plot(
                *zip(*points, strict=True) if points else ([], []),
                marker="o" if is_ours else ".",
                linewidth=2.2 if is_ours else 1,
                color="black" if is_ours else colors(number),
                label=name,
                zorder=3 if is_ours else 2,
            )
        place.set(title=made.name, ylim=(-2, 80), xlim=(15, 100))
        place.set_xlabel("peak, % of keep-all")
        place.set_ylabel("time over keep-all, %")
        place.grid(alpha=0.3)
    legend = next(places)
    legend.axis("off")
    legend.legend(*axes.flat[0].get_legend_handles_labels(), loc="center", ncols=2, fontsize=9)
    for rest in places:
        rest.axis("off")
    figure.tight_layout()
    figure.savefig(RESULTS / "alternatives.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
