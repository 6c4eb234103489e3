"""Processes of gloo: planned modules and blocks do what originals do, wrapped for data parallelism,
where forwards exchange data, as stages of pipelines, in parallel over tensors, and under
fully_shard, where a model that is sharded first needs what is promised."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import on_processes


def test_wrapped_modules_exchanges_and_pipelines(compilers: Path, tmp_path: Path) -> None:
    parts = ("distributed", "collectives", "pipeline")
    on_processes(2, tmp_path, *(f"tests.{part}_worker" for part in parts))


def test_blocks_and_tensor_parallel(tmp_path: Path) -> None:
    on_processes(2, tmp_path, "tests.blocks_worker", "tests.tensor_parallel_worker")


@pytest.mark.parametrize("part", ["blocks", "tensor_parallel"])
def test_four_processes(part: str, tmp_path: Path) -> None:
    on_processes(4, tmp_path, f"tests.{part}_worker")


def test_processes_that_plan_together(tmp_path: Path) -> None:
    on_processes(4, tmp_path, "tests.agreement_worker")
