"""What the tests of `make matrix` said under each version of PyTorch.

    python -m benchmarks.versions build/matrix 2.11.0 2.15.0

takes: a folder of pytest's JUnit files, each named after a version. Writes a row of each into
benchmarks/results/versions.md, where rows of other versions stay; ends with 1 if a test failed.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

HEAD = """\
# Versions of PyTorch

`make matrix`: the tests of what differs between versions of PyTorch, each version in an environment
of its own.

| torch | passed | failed | skipped | seconds | when, where | reasons of skips |
|---|---|---|---|---|---|---|
"""


def row_of(path: Path, where: str) -> str:
    """Errors outside of tests count as failures; a reason is told once."""
    suites = list(ET.parse(path).iter("testsuite"))

    def total(name: str) -> int:
        return sum(int(suite.attrib[name]) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    passed = total("tests") - failed - skipped
    seconds = round(sum(float(suite.attrib["time"]) for suite in suites))
    date = suites[0].attrib["timestamp"].partition("T")[0]
    reasons = sorted({s.attrib["message"] for suite in suites for s in suite.iter("skipped")})
    cells = (path.stem, passed, failed, skipped, seconds, f"{date}, {where}", "; ".join(reasons))
    return f"| {' | '.join(map(str, cells))} |"


def rows_in(table: str) -> dict[str, str]:
    """Version -> its row."""
    return {m[1]: m[0] for m in re.finditer(r"^\| (\d[\d.]*) \|.*$", table, re.MULTILINE)}


def with_rows(table: str, rows: dict[str, str]) -> str:
    """A table with these rows exchanged or added, in the order of versions."""
    by_version = rows_in(table) | rows
    order = sorted(by_version, key=lambda version: [*map(int, version.split("."))])
    return HEAD + "".join(f"{by_version[version]}\n" for version in order)


def main(folder: Path, versions: list[str]) -> int:
    python, machine = platform.python_version(), platform.machine()
    where = f"Python {python}, {os.cpu_count()} cores, {machine}"
    rows = {v: row_of(folder / f"{v}.xml", where) for v in versions}
    path = RESULTS / "versions.md"
    text = with_rows(path.read_text() if path.exists() else "", rows)
    path.write_text(text)
    print(text)
    return int(any(row.split(" | ")[2] != "0" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
