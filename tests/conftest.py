"""One cache for the whole test run, outside the user's."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# First of all: lets torchvision be imported beside a CPU build of torch.
import testing  # noqa: F401
from rockplan.errors import MissingLibrary
from rockplan.graph_builder import pipeline
from rockplan.graph_builder.fusion import inductor
from rockplan.ilp.whole_graph import refine
from rockplan.search import planning
from tests.planning import THOROUGH_ITERATIONS, plan_quickly, thorough_limits
from tests.sweeps import left_to_sweeps

# What a loaded machine takes for an example says nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

plan_quickly()

# What each pass makes is held against the rules of its form.
pipeline.CHECKED.set(True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep", action="store_true", help="run all members of tests/sweeps.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.sweep or any("::" in name for name in config.args):
        return
    left = {*left_to_sweeps(items)}
    config.hook.pytest_deselected(items=[*left])
    items[:] = [item for item in items if item not in left]


_MANY_MODULES = 50
"""So many that are new are worth a collection of everything."""

_imported = 0
"""Modules that there were at the last one."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Each measured step collects cycles before: .4 s where that goes through all that test files
    and libraries made when they were imported. Much of a library is imported when a test first uses
    it."""
    global _imported
    if len(sys.modules) >= _imported + _MANY_MODULES:
        _imported = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_collection_finish() -> None:
    pytest_runtest_teardown()


@pytest.fixture
def thorough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Searches take the effort that they take for users, and find nothing in the cache that others
    left there."""
    monkeypatch.setattr(planning, "limits_of", thorough_limits)
    monkeypatch.setattr(refine, "ITERATIONS", THOROUGH_ITERATIONS)
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path / "thorough"))


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "cache"
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROCKPLAN_CACHE_DIR", str(folder))
        # One for all workers and all that they start: what one has planned others find, and headers
        # take 7 s to compile.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared / "inductor"))
        yield folder


@pytest.fixture(scope="session")
def compilers() -> Path:
    """Inductor's cache. Tests that compile are skipped where nothing can."""
    try:
        inductor.check_compiler("cpu")
    except MissingLibrary as error:
        pytest.skip(str(error))
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
