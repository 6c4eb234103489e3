"""What every stage of the search, and every operator of the local search, is worth.

Each cell is a model and a budget: a share of the way from the smallest budget to that of keeping
everything, the peak of `torch.utils.checkpoint` around each layer, or "min". Prices are those of a
roofline, effort is counted, and no clock strikes. A column leaves one mechanism out. A mechanism
stays if it gains .5 % of an iteration in a cell at 10, 25 or 50 % of the way or at the peak of
checkpointing, or 3 % of "min", or is the only way to anything at all.

The column "paging" is everything with a host to page to, over a link that is as fast beside the
memory of these prices as 55 GB/s are beside that of an H200; everything is the same without the
stage (`tests/test_paging_plans.py`), so its row "no paging" is what everything loses against it.

Command: OMP_NUM_THREADS=1 python -m benchmarks.ablation [MODEL ...] [--columns everything moves]
Results: benchmarks/results/ablation.jsonl, one line a cell and column, kept and continued;
ablation.md, the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import where
from rockplan.graph_builder.costs.ruler import peak_live_bytes
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.runtime import checkpointing
from rockplan.search.incumbent import Incumbent
from rockplan.search.limits import Limits
from rockplan.search.local import greedy_eviction
from rockplan.search.local.exchange import ExchangeLimits
from rockplan.search.minimum_peak import least_peak
from rockplan.search.pipeline import POLISH, STAGES, run
from rockplan.search.problem import Goal, Problem
from rockplan.values.copies import Host, HostLink
from rockplan.values.schedule import keep_all
from testing import models
from testing.models import Case
from testing.priced import BYTES_PER_S, CASES, prepared_case

RESULTS = Path(__file__).parent / "results" / "ablation.jsonl"
WAYS = ("3%", "10%", "25%", "50%", "checkpoint", "min")

ALL: dict[str, Callable[[], Case]] = {
    **CASES,
    "gpt2-12": lambda: models.gpt2(
        12, width=256, heads=8, vocabulary=1024, batch=4, length=256, attention_dropout=0.0
    ),
    "gpt2-48": lambda: models.gpt2(
        48, width=256, heads=8, vocabulary=1024, batch=4, length=256, attention_dropout=0.0
    ),
    "llama-12": lambda: models.llama(
        12, width=256, heads=8, key_value_heads=4, vocabulary=1024, batch=4, length=256
    ),
    "llama-48": lambda: models.llama(
        48, width=256, heads=8, key_value_heads=4, vocabulary=1024, batch=4, length=256
    ),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A search with something left out. ways: where it runs at all. host: where it may page to."""

    limits: Limits = Limits()
    rules: int = len(greedy_eviction.RULES)
    ways: tuple[str, ...] = WAYS
    host: Host | None = None


LINK = HostLink(int(55e9 / 3.38e12 * BYTES_PER_S), int(55e9 / 3.38e12 * BYTES_PER_S))
"""Of an H200, in proportion to the memory of `testing.priced`."""

WITHIN, SHORT = WAYS[:-1], ("3%", "min")


def _without(name: str, ways: tuple[str, ...] = WAYS) -> Column:
    return Column(Limits(without=frozenset({name})), ways=ways)


COLUMNS: dict[str, Column] = {
    "everything": Column(),
    "paging": Column(ways=("10%", "25%", "50%", "checkpoint"), host=Host(1 << 40, LINK)),
    "no relaxation": _without("relaxation", WITHIN),
    "no exchange": _without("exchange"),
    "one round": Column(Limits(exchange=ExchangeLimits(rounds=0, most_rounds=0)), ways=WITHIN),
    "no moves": Column(Limits(exchange=ExchangeLimits(moves=False)), ways=WITHIN),
    "no eviction": _without("eviction", SHORT),
    "one rule": Column(rules=1, ways=SHORT),
    "no blocks": _without("blocks", SHORT),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """overhead: of the iteration time, None where nothing fits; peak_bytes: of the schedule."""

    model: str
    way: str
    column: str
    budget_bytes: int | None
    overhead: float | None
    peak_bytes: int | None
    cpu_s: float


def checkpointed_bytes(case: Case) -> int | None:
    """The measured peak of a step with each layer in `torch.utils.checkpoint`."""
    try:
        module = checkpointing.per_block(case.model)
    except checkpointing.NotApplicable:
        return None
    return peak_live_bytes(lambda: case.step(module)).peak_bytes


def budgets(problem: Problem, case: Case, least_bytes: int) -> Iterator[tuple[str, int | None]]:
    graph = problem.constrained
    most_bytes = simulate(graph, keep_all(graph)).peak_bytes
    for way in WAYS:
        if way == "min":
            yield way, None
        elif way == "checkpoint":
            peak_bytes = checkpointed_bytes(case)
            if peak_bytes is not None and least_bytes < peak_bytes < most_bytes:
                yield way, peak_bytes
        else:
            share = float(way.removesuffix("%")) / 100
            yield way, int(least_bytes + share * (most_bytes - least_bytes))


def solved(problem: Problem, budget_bytes: int | None, column: Column) -> Incumbent:
    """What the stages lead to, without a clock, a cache, or a plan around the schedule."""
    graph, limits = problem.constrained, column.limits
    rules = greedy_eviction.RULES
    greedy_eviction.RULES = rules[: column.rules]
    try:
        least = Goal(graph, problem.blocks, None)
        if budget_bytes is None:
            return least_peak(least, limits)
        goal = replace(least, budget_bytes=budget_bytes, host=column.host)
        found = run(STAGES, goal, limits)
        if found.schedule is None:
            found = found.improved(goal, least_peak(least, limits).schedule)
            if found.schedule is not None:
                found = run(POLISH, goal, limits, found)
        return found
    finally:
        greedy_eviction.RULES = rules


def cell(name: str, way: str, column: str, problem: Problem, budget_bytes: int | None) -> Cell:
    since = time.process_time()
    found = solved(problem, budget_bytes, COLUMNS[column])
    cpu_s = time.process_time() - since
    overhead = peak_bytes = None
    if (paged := found.fastest_paged) is not None:
        overhead = paged.time_ns / problem.graph.time_ns - 1
        peak_bytes = simulate(paged.graph, paged.schedule).peak_bytes
    elif found.schedule is not None:
        overhead = found.time_ns / problem.graph.time_ns - 1
        peak_bytes = found.peak_bytes
    return Cell(name, way, column, budget_bytes, overhead, peak_bytes, round(cpu_s, 1))


Rows = dict[tuple[str, str, str], dict[str, Any]]
"""By model, way and column, as `Cell` has them."""


def known_cells() -> Rows:
    if not RESULTS.exists():
        return {}
    rows = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    return {(r["model"], r["way"], r["column"]): r for r in rows}


def measure(name: str, columns: list[str], again: bool) -> None:
    """All cells of one model that are not known."""
    known = known_cells()
    torch.manual_seed(0)
    case = ALL[name]()
    problem = prepared_case(case, Options(cache=False))
    least = known.get((name, "min", "everything"))
    if least is None or again:
        made = cell(name, "min", "everything", problem, None)
        keep(made)
        least = asdict(made)
    for way, budget_bytes in budgets(problem, case, int(least["peak_bytes"])):
        for column in columns:
            is_known = (name, way, column) in known_cells() and not again
            if is_known or way not in COLUMNS[column].ways:
                continue
            made = cell(name, way, column, problem, budget_bytes)
            print(made, flush=True)
            keep(made)


def keep(made: Cell) -> None:
    rows = known_cells()
    rows[made.model, made.way, made.column] = {**asdict(made), "where": where()}
    text = "".join(json.dumps(rows[key]) + "\n" for key in sorted(rows))
    RESULTS.write_text(text, encoding="utf-8")


def table(rows: Rows) -> str:
    """Overheads, and for "min" bytes above those of the column "everything"."""
    columns = [c for c in COLUMNS if any(key[2] == c for key in rows)]
    lines = [
        "# Ablation",
        "",
        "`python -m benchmarks.ablation`: predicted overhead in % of one iteration (CPU seconds in "
        'brackets) under roofline prices, effort counted, no clock; in the rows of "min" the '
        "smallest budget, in % above the column `everything`. A dash: nothing fits. `paging` is "
        f"`everything` with a host, over {LINK.out_bytes_per_s / 1e9:.1f} GB/s. Where and when: "
        "`ablation.jsonl`.",
        "",
        f"| model | budget | {' | '.join(columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for model in ALL:
        for way in WAYS:
            found = [rows.get((model, way, column)) for column in columns]
            if any(found):
                base = rows.get((model, way, "everything"))
                cells = " | ".join(_text(row, way, base) for row in found)
                lines.append(f"| {model} | {way} | {cells} |")
    left_out = [c for c in columns if c not in ("everything", "paging")]
    pairs = [*((c, c, "everything") for c in left_out), ("no paging", "everything", "paging")]
    worth = "\n".join(f"| {name} | {_worth(rows, c, base)} |" for name, c, base in pairs)
    heading = "| left out | loses at most, in % of an iteration, from 10 % on | of min | refuses |"
    lines += ["", heading, "|---|---|---|---|", worth, ""]
    return "\n".join([*lines, ""])


def _loss(row: dict[str, Any], base: dict[str, Any]) -> float:
    """In % of an iteration, of "min" in % of its bytes; infinite where nothing fits."""
    if row["budget_bytes"] != base["budget_bytes"]:
        raise ValueError(
            f"{row['model']} {row['way']}: {row['column']} was measured at another budget; --again"
        )
    if row["overhead"] is None:
        return math.inf
    if row["way"] == "min":
        return float(100 * (row["peak_bytes"] / base["peak_bytes"] - 1))
    return float(100 * (row["overhead"] - base["overhead"]))


def _text(row: dict[str, Any] | None, way: str, base: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["overhead"] is None:
        return f"- ({row['cpu_s']:.0f})"
    if way == "min":
        above = 0.0 if base is None else _loss(row, base)
        return f"{above:+.2f} ({row['cpu_s']:.0f})"
    return f"{100 * row['overhead']:.2f} ({row['cpu_s']:.0f})"


def _worth(rows: Rows, column: str, beside: str) -> str:
    """The largest losses of a column beside another one, with their cells."""
    slower, larger, refused = [(0.0, "")], [(0.0, "")], 0
    for (model, way, name), row in rows.items():
        base = rows.get((model, way, beside))
        if name != column or base is None or base["overhead"] is None:
            continue
        loss = _loss(row, base)
        if row["overhead"] is None:
            refused += 1
        elif way == "min":
            larger.append((loss, model))
        elif way != "3%":
            slower.append((loss, f"{model} {way}"))
    most, least = max(slower), max(larger)
    return f"{most[0]:.2f} {most[1]} | {least[0]:.2f} {least[1]} | {refused}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(ALL), metavar="MODEL")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--again", action="store_true", help="cells that are known as well")
    arguments = parser.parse_args()
    for name in arguments.models:
        measure(name, arguments.columns, arguments.again)
    RESULTS.with_suffix(".md").write_text(table(known_cells()), encoding="utf-8")


if __name__ == "__main__":
    main()
