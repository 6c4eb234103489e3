"""Display: tables for people, JSON rows for machines.

takes: plans, curves, entries of the cache. returns: rows, or prints them. Nothing here needs torch.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rockplan.errors import InfeasibleBudget
from rockplan.oracles.simulate import simulate
from rockplan.reports.explain import WIDTH
from rockplan.values.curve import Curve
from rockplan.values.graph import ComputeNode, as_eager
from rockplan.values.plan import Plan, format_bytes, recomputations
from rockplan.values.schedule import keep_all, kept_data

PLAIN_WIDTH = 200
"""Columns of a table if stdout is no terminal."""

Row = dict[str, object]


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: Collection[int] = (0,),
    plain_width: int = PLAIN_WIDTH,
) -> None:
    """Print a table to stdout. words: positions of columns of words, which are left-aligned and
    folded where too wide; others are numbers, aligned right. plain_width: characters if stdout is
    no terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, column in enumerate(columns):
        is_words = position in words
        justify: Literal["left", "right"] = "left" if is_words else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=not is_words)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else plain_width, highlight=False)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    print("\n".join(lines if sys.stdout.isatty() else map(str.rstrip, lines)))


def printable(text: str) -> str:
    """Return `text` without characters that control a terminal (names from a file can hold
    anything)."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def milliseconds(time_ns: int) -> str:
    return f"{time_ns / 1e6:.1f} ms"


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2))


def members(value: object, names: str) -> Row:
    """Return the attributes of these names, written with blanks between, as members of a row."""
    return {name: getattr(value, name) for name in names.split()}


# Plans


def plan_row(asked: str, plan: Plan) -> Row:
    """Return the figures of a plan as a row for JSON: bytes and ns, shares as fractions. asked: the
    budget as the user wrote it."""
    return {
        "budget": asked,
        "feasible": True,
        **members(plan, "budget_bytes peak_bytes"),
        **({} if plan.reserved_bytes is None else {"reserved_bytes": plan.reserved_bytes}),
        **({} if plan.pool_bytes is None else {"pool_bytes": plan.pool_bytes}),
        **members(plan, "saved_bytes time_ns overhead eager_peak_bytes eager_time_ns"),
        "operations": len(plan.graph.nodes),
        "recomputed_operations": len(recomputations(plan)),
        "certificate": {
            "status": plan.certificate.status.value,
            **members(plan.certificate, "objective_ns bound_ns gap"),
        },
        **members(plan, "graph_digest profile_digest profile_source torch_version checked"),
        **({"tiles": plan.graph.tiles} if plan.graph.tiles else {}),
    }


def infeasible_row(asked: str, error: InfeasibleBudget) -> Row:
    """Return the row for JSON of a budget that is too small: how many bytes it is and how many are
    needed, where and for what. asked: the budget as the user wrote it."""
    return {
        "budget": asked,
        "feasible": False,
        **members(error, "budget_bytes minimum_bytes unplanned_bytes operation owner owner_bytes"),
        "module": error.module_path,
        "source": error.source,
    }


def show_plans(asked: Sequence[str], plans: Sequence[Plan | InfeasibleBudget]) -> None:
    """Print a table with a row for each budget: its plan's figures, or the least bytes if it is too
    small. asked: the budgets as the user wrote them."""
    rows = []
    for text, plan in zip(asked, plans, strict=True):
        if isinstance(plan, InfeasibleBudget):
            minimum = f"infeasible: needs {plan.minimum_bytes} bytes"
            rows.append([text, format_bytes(plan.budget_bytes), minimum, "", "", "", ""])
            continue
        rows.append(
            [
                text,
                format_bytes(plan.budget_bytes),
                format_bytes(plan.peak_bytes),
                format_bytes(plan.saved_bytes),
                milliseconds(plan.time_ns),
                f"{plan.overhead:+.1%}",
                f"{plan.certificate.gap:.1%}",
            ]
        )
    show_table(["asked", "budget", "peak", "saved", "time", "overhead", "gap at most"], rows)


def curve_row(curve: Curve) -> list[Row]:
    """Return the points of a curve as rows for JSON: bytes and ns, overhead as a fraction."""
    return [
        {
            **members(p, "peak_bytes saved_bytes time_ns overhead"),
            "bound_ns": p.certificate.bound_ns,
            "status": p.certificate.status.value,
        }
        for p in curve.points
    ]


# Profiles


@dataclass(frozen=True, slots=True)
class CostShare:
    """The cost, with everything kept, of operations of one module or of one kind.

    time_ns: forward and backward; kept_bytes: of their results between forward and backward.
    """

    name: str
    operations: int
    time_ns: int
    kept_bytes: int


def kept_whole(plan: Plan) -> Plan:
    """Return the plan in which eager executes the graph of `plan`, everything kept."""
    graph = as_eager(plan.graph)
    schedule = keep_all(graph)
    saved_bytes = simulate(graph, schedule).saved_bytes
    return replace(plan, graph=graph, schedule=schedule, saved_bytes=saved_bytes)


def shares(plan: Plan, name_of: Callable[[ComputeNode], str]) -> list[CostShare]:
    """Return the shares of operations, those of one name together, those that keep most first."""
    kept = kept_data(plan.graph, plan.schedule)
    operations, times, sizes = Counter[str](), Counter[str](), Counter[str]()
    for node in plan.graph.nodes:
        name = name_of(node)
        operations[name] += 1
        times[name] += node.time_ns
        sizes[name] += sum(plan.graph.data[d].size_bytes for d in node.writes if d in kept)
    found = [CostShare(name, operations[name], times[name], sizes[name]) for name in operations]
    return sorted(found, key=lambda s: (-s.kept_bytes, -s.time_ns, s.name))


def show_shares(title: str, shares: Sequence[CostShare], top: int) -> None:
    """Print a table of the first `top` shares, with percentages of all; a last row sums up the
    rest. title: of the column of names."""
    time_ns = max(sum(s.time_ns for s in shares), 1)
    kept_bytes = max(sum(s.kept_bytes for s in shares), 1)
    shown = list(shares[:top])
    if shares[top:]:
        rest = shares[top:]
        shown.append(
            CostShare(
                f"({len(rest)} more)",
                sum(s.operations for s in rest),
                sum(s.time_ns for s in rest),
                sum(s.kept_bytes for s in rest),
            )
        )
    show_table(
        [title, "operations", "keeps", "of kept", "time", "of time"],
        [
            [
                s.name,
                str(s.operations),
                format_bytes(s.kept_bytes),
                f"{s.kept_bytes / kept_bytes:.1%}",
                milliseconds(s.time_ns),
                f"{s.time_ns / time_ns:.1%}",
            ]
            for s in shown
        ],
        plain_width=WIDTH,
    )
