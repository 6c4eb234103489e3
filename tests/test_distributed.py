"""DistributedDataParallel of a planned module, on two processes with gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import on_processes


def test_distributed_data_parallel(compilers: Path, tmp_path: Path) -> None:
    on_processes("tests.distributed_worker", 2, tmp_path)


def test_forwards_that_exchange_data(tmp_path: Path) -> None:
    on_processes("tests.collectives_worker", 2, tmp_path)


@pytest.mark.parametrize("processes", [2, 4])
def test_tensor_parallel(processes: int, tmp_path: Path) -> None:
    on_processes("tests.tensor_parallel_worker", processes, tmp_path)


def test_processes_that_plan_together(tmp_path: Path) -> None:
    on_processes("tests.agreement_worker", 4, tmp_path)


def test_stages_of_pipelines(tmp_path: Path) -> None:
    on_processes("tests.pipeline_worker", 2, tmp_path)
