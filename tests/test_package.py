"""The package itself: light to import, and its public names are what they say."""

from __future__ import annotations

import subprocess
import sys

import rockplan


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
