"""Sweep over models of libraries beside those of the zoo: is the planned one eager's, bit for bit?

`make libraries` makes an environment of its own (`.venv-libraries`, of the releases in
`benchmarks/libraries.txt`) and runs this in it. Each model is examined as in `benchmarks.zoo`, in a
process of its own, at '50%' of what everything kept needs and at 'min'; outcomes are explained
there. The models: `testing/library_cases/`.

Command: OMP_NUM_THREADS=1 python -m benchmarks.libraries [--jobs 2] [--only monai] [--again]
         [--retry refused]
Results: benchmarks/results/libraries.jsonl, one line a model with the commit that it was examined
at, kept and continued (--again: anew); libraries.md, the table.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import zoo

RESULTS = zoo.RESULTS / "libraries.jsonl"
REQUIREMENTS = Path(__file__).with_name("libraries.txt")
BUDGETS = ("50%", "min")
TIME_LIMIT_S = 300


def releases() -> dict[str, str]:
    """The libraries with models here, as they are installed."""
    from testing import library_cases

    found = {name.split("/")[1] for name in library_cases.names()}
    return {library: metadata.version(library) for library in sorted(found)}


def table(rows: dict[str, dict[str, Any]], command: str) -> str:
    """The counts, and every model, as Markdown."""
    versions = releases()
    counts = collections.Counter(row["outcome"] for row in rows.values())
    listed = ", ".join(
        f"{counts[outcome]} {outcome}" for outcome in zoo.OUTCOMES if counts[outcome]
    )
    commits = sorted({row["package"] for row in rows.values()})
    lines = [
        "# Models of libraries",
        "",
        f"`{command}` on {platform.machine()}, {os.cpu_count()} cores, one thread each, Python "
        f"{platform.python_version()}, torch {metadata.version('torch')}, {datetime.date.today()}; "
        f"commits {', '.join(commits)}. Outcomes are explained in `benchmarks/zoo.py`. "
        f"{len(rows)} models of {len({name.split('/')[1] for name in rows})} libraries: {listed}.",
        "",
        "| library | model | outcome | operations | everything kept | 50% | min |",
        "|---|---|---|---|---|---|---|",
        *(_line(row, versions) for _, row in sorted(rows.items())),
    ]
    for outcome in zoo.OUTCOMES[1:]:
        chosen = [row for _, row in sorted(rows.items()) if row["outcome"] == outcome]
        if chosen:
            lines += ["", f"## {outcome}", ""]
            lines += [f"- {row['name'].removeprefix('library/')}: {_why(row)}" for row in chosen]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any], versions: dict[str, str]) -> str:
    _, library, model = row["name"].split("/")
    cells = [f"{library} {versions[library]}", model, row["outcome"]]
    least = row.get("min")
    if least is not None:
        half = row["50%"]
        middle = "below min" if isinstance(half, str) else f"{half['measured_bytes']:,}"
        cells += [str(least["operations"]), f"{least['unplanned_bytes']:,}", middle]
        cells += [f"{least['measured_bytes']:,}"]
    else:
        cells += [""] * 4
    return f"| {' | '.join(cells)} |"


def _why(row: dict[str, Any]) -> str:
    text = f"{row['error']}: {row['message']}".replace("\n", " ")
    return re.sub(r"([*_<>|])", r"\\\1", text if len(text) <= 600 else text[:597] + "...")


def main() -> None:
    from testing import library_cases

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", default="", help="part of the names to examine")
    parser.add_argument("--again", action="store_true", help="what was examined before, too")
    parser.add_argument(
        "--retry", nargs="+", choices=zoo.OUTCOMES[1:], default=[], help="outcomes to examine again"
    )
    arguments = parser.parse_args()
    listed = library_cases.names()
    rows = {n: row for n, row in zoo.read_results(RESULTS).items() if n in listed}
    known = {n for n, row in rows.items() if row["outcome"] not in arguments.retry}
    known = set() if arguments.again else known
    wanted = [n for n in listed if arguments.only in n and n not in known]
    start = functools.partial(zoo.Worker, list(BUDGETS), TIME_LIMIT_S)
    zoo.sweep(wanted, RESULTS, arguments.jobs, start, cases_of_a_worker=1)
    rows |= zoo.read_results(RESULTS)
    lines = "".join(json.dumps(rows[name]) + "\n" for name in listed if name in rows)
    RESULTS.write_text(lines, encoding="utf-8")
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.libraries --jobs {arguments.jobs}"
    kept = {name: rows[name] for name in listed if name in rows}
    RESULTS.with_suffix(".md").write_text(table(kept, command), encoding="utf-8")


if __name__ == "__main__":
    main()
