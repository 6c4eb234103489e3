"""Processes of gloo: planned modules do what originals do, wrapped for data parallelism, where
forwards exchange data, as stages of pipelines, and in parallel over tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import on_processes


def test_wrapped_modules_exchanges_and_pipelines(compilers: Path, tmp_path: Path) -> None:
    parts = ("distributed", "collectives", "pipeline")
    on_processes(2, tmp_path, *(f"tests.{part}_worker" for part in parts))


@pytest.mark.parametrize("processes", [2, 4])
def test_tensor_parallel(processes: int, tmp_path: Path) -> None:
    on_processes(processes, tmp_path, "tests.tensor_parallel_worker")


def test_processes_that_plan_together(tmp_path: Path) -> None:
    on_processes(4, tmp_path, "tests.agreement_worker")
