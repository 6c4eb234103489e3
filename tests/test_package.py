"""The package itself: light to import, and its public names are what they say."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import rockplan
from benchmarks import versions

ROOT = Path(__file__).parent.parent


def run(program: str) -> str:
    """What `program` prints in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def test_importing_the_package_does_not_import_torch() -> None:
    assert run("import sys, rockplan; print('torch' in sys.modules)") == "False\n"


def test_every_public_name_exists() -> None:
    assert sorted(rockplan.__all__) == rockplan.__all__
    assert all(hasattr(rockplan, name) for name in rockplan.__all__)


def test_a_module_does_not_hide_the_function_of_its_name() -> None:
    program = "import rockplan, rockplan.values.plan, rockplan.api; print(callable(rockplan.plan))"
    assert run(program) == "True\n"
    assert callable(rockplan.plan)


def test_the_range_of_torch_is_what_the_matrix_ran_on() -> None:
    """The first release that is admitted and the last minor one, with no failure on any."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch_range,) = [
        r.specifier for r in map(Requirement, project["dependencies"]) if r.name == "torch"
    ]
    rows = versions.rows_in((ROOT / "benchmarks" / "results" / "versions.md").read_text())
    for row in rows.values():
        _, passed, failed, *_ = row.split(" | ")
        assert int(passed) > 500 and failed == "0"
    (named,) = re.findall(r"^VERSIONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [*rows] == named.split()
    run = [*map(Version, rows)]
    first, last = min(run), max(run)
    assert str(torch_range) == f"<{last.major}.{last.minor + 1},>={first.major}.{first.minor}"
    assert Version(torch.__version__) in torch_range


JUNIT = """\
<testsuites><testsuite errors="1" failures="2" skipped="1" tests="9" time="7.6"
 timestamp="2026-11-27T18:00:00+00:00"><testcase><skipped message="no CUDA"/></testcase></testsuite>
</testsuites>"""
ROW = "| 2.9.0 | 5 | 3 | 1 | 8 | 2026-11-27, here | no CUDA |"


def test_a_row_of_the_matrix_is_what_pytest_said(tmp_path: Path) -> None:
    path = tmp_path / "2.9.0.xml"
    path.write_text(JUNIT)
    assert versions.row_of(path, "here") == ROW
    table = versions.with_rows("", {"2.11.0": ROW.replace("2.9.0", "2.11.0")})
    table = versions.with_rows(table, {"2.9.0": ROW})
    assert [*versions.rows_in(table)] == ["2.9.0", "2.11.0"]
    assert versions.with_rows(table, {"2.9.0": ROW}) == table


def test_failures_and_missing_results_of_the_matrix_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError):
        versions.main(tmp_path, ["2.9.0"])
    (tmp_path / "2.9.0.xml").write_text(JUNIT)
    assert versions.main(tmp_path, ["2.9.0"]) == 1
    (tmp_path / "2.9.0.xml").write_text(
        JUNIT.replace('"2"', '"0"').replace('errors="1"', 'errors="0"')
    )
    assert versions.main(tmp_path, ["2.9.0"]) == 0
