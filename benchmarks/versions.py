"""What the tests of `make matrix` said under each version of PyTorch.

    python -m benchmarks.versions build/matrix

takes: a folder of pytest's JUnit files, each named after a version. Writes
benchmarks/results/versions.md; ends with 1 if a test failed or a file is missing.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers of tests under one version; failed: with errors outside of tests. skips: the reasons,
    each once."""

    version: str
    date: str
    passed: int
    failed: int
    skipped: int
    seconds: int
    skips: tuple[str, ...]


def row_of(path: Path) -> Row:
    suites = list(ET.parse(path).iter("testsuite"))

    def total(name: str) -> int:
        return sum(int(suite.attrib[name]) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    return Row(
        version=path.stem,
        date=suites[0].attrib["timestamp"].partition("T")[0],
        passed=total("tests") - failed - skipped,
        failed=failed,
        skipped=skipped,
        seconds=round(sum(float(suite.attrib["time"]) for suite in suites)),
        skips=tuple(
            sorted({s.attrib["message"] for suite in suites for s in suite.iter("skipped")})
        ),
    )


def report(rows: Iterable[Row], where: str) -> str:
    lines = [
        "# Versions of PyTorch",
        "",
        "`make matrix`: the tests of what differs between versions of PyTorch, each version in an "
        f"environment of its own ({where}).",
        "",
        "| torch | passed | failed | skipped | seconds | date |",
        "|---|---|---|---|---|---|",
    ]
    skips: dict[str, list[str]] = {}
    for row in rows:
        counts = (row.passed, row.failed, row.skipped, row.seconds)
        lines.append(f"| {row.version} | {' | '.join(map(str, counts))} | {row.date} |")
        for reason in row.skips:
            skips.setdefault(reason, []).append(row.version)
    lines += ["", "Skipped:", ""]
    lines += [f"- {reason} ({', '.join(versions)})" for reason, versions in sorted(skips.items())]
    return "\n".join(lines) + "\n"


def main(folder: Path, versions: list[str]) -> int:
    rows = [row_of(folder / f"{version}.xml") for version in versions]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
    ).stdout.strip()
    where = f"{commit}, Python {platform.python_version()}, {os.cpu_count()} cores"
    text = report(rows, f"{where}, {platform.machine()}")
    (RESULTS / "versions.md").write_text(text)
    print(text)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
