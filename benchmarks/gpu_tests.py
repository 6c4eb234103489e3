"""A worker of `benchmarks.gpu`: a file of tests, how many passed so far, and which did not."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.gpu_table import DETAIL
from benchmarks.gpu_worker import Row, Worker, worker


class Outcomes:
    """A plugin of pytest that writes rows. A test has a row of its own where it failed."""

    def __init__(self, own: Worker, name: str) -> None:
        self.own, self.name = own, name
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.own.begin(nodeid.split("::")[-1], self.own.limit.at_most(120))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        row: Row = {DETAIL: True}
        if report.outcome == "failed":
            last = str(report.longrepr).strip().splitlines()[-1]
            row = {"error": last.replace("|", "/")[:200]}
        if report.when == "teardown" or report.outcome == "failed":
            self.own.add(report.nodeid.split("::")[-1], row)
            self.own.add(self.name, dict(self.counts))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.name not in self.own.begun]


def main() -> None:
    own, given = worker(__doc__, "name")

    def run() -> Row:
        import pytest

        outcomes = Outcomes(own, given.name)
        file = f"tests/{given.name}.py"
        pytest.main([file, "-q", "-p", "no:cacheprovider"], plugins=[outcomes])
        return dict(outcomes.counts)

    own.tries(given.name, run, own.limit.left_s, again=True)
    own.leave()


if __name__ == "__main__":
    main()
