"""The package itself: light to import, and its public names are what they say."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import rockplan
from benchmarks import versions
from rockplan import api
from testing import smoke

ROOT = Path(__file__).parent.parent


def run(program: str) -> str:
    """What `program` prints in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True
    )
    return done.stdout


def test_importing_the_package_does_not_import_torch() -> None:
    assert run("import sys, rockplan; print('torch' in sys.modules)") == "False\n"


def test_nothing_stays_of_the_function_that_imports() -> None:
    program = """
import gc, weakref
class Local: pass
def first():
    local = Local()
    import rockplan
    rockplan.solve
    return weakref.ref(local)
local = first()
gc.collect()
print(local())
"""
    assert run(program) == "None\n"


def test_every_public_name_exists() -> None:
    assert sorted(rockplan.__all__) == rockplan.__all__
    assert all(hasattr(rockplan, name) for name in rockplan.__all__)


def test_modules_do_not_hide_functions_of_their_name() -> None:
    importlib.import_module("rockplan.values.plan")
    assert callable(rockplan.plan)
    beside = {path.stem for path in (ROOT / "rockplan").iterdir()}
    assert not beside & {*rockplan.__all__}, "importing one hides the name"


def test_the_range_of_torch_is_the_matrixs() -> None:
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
    assert str(torch_range) == f">={first.major}.{first.minor}"
    assert (last.major, last.minor) == api.LAST_TORCH
    assert Version(torch.__version__) in torch_range


def test_an_untested_torch_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for version, is_said in (("2.15.3+cpu", False), ("2.16.0", True), ("3.0.0a0", True)):
        caplog.clear()
        monkeypatch.setattr(torch, "__version__", version)
        api._say_newer_torch()
        assert (f"torch {version} is newer" in caplog.text) is is_said


def test_what_an_installed_package_has_to_do() -> None:
    smoke.main()


def test_a_wheel_has_every_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path)]
    source = tmp_path / "source"
    shutil.copytree(ROOT / "rockplan", source / "rockplan")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=500)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("rockplan/")}
    files = {f for f in (ROOT / "rockplan").rglob("*") if f.is_file() and f.suffix != ".pyc"}
    assert names == {str(f.relative_to(ROOT)) for f in files}


JUNIT = """\
<testsuites><testsuite errors="1" failures="2" skipped="1" tests="9" time="7.6"
 timestamp="2026-11-27T18:00:00+00:00"><testcase><skipped message="no CUDA"/></testcase></testsuite>
</testsuites>"""
ROW = "| 2.9.0 | 5 | 3 | 1 | 8 | 2026-11-27, here | no CUDA |"


def test_rows_of_the_matrix_are_what_pytest_said(tmp_path: Path) -> None:
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
