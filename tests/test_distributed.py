"""Processes of gloo: planned modules and blocks do what originals do, wrapped for data parallelism,
where forwards exchange data, as stages of pipelines, in parallel over tensors, and under
fully_shard, where a model that is sharded first needs what is promised, and fit what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import on_processes


def of(parts: tuple[str, ...], function: str = "main") -> list[str]:
    return [f"tests.{part}_worker:{function}" for part in parts]


# Imports take longer than some of them: few processes run many.
BLOCKS = ("blocks", "tensor_parallel", "ranks")
MODULES = ("distributed", "collectives", "pipeline", "log_probs")


@pytest.mark.parametrize("parts", [BLOCKS, MODULES], ids=["blocks", "modules"])
def test_two_processes(parts: tuple[str, ...], tmp_path: Path) -> None:
    on_processes(2, tmp_path, *of(parts))


def test_other_ways_of_two_processes(compilers: Path, tmp_path: Path) -> None:
    on_processes(2, tmp_path, *of((*BLOCKS, "distributed", "pipeline"), "rest"))


def test_four_processes(tmp_path: Path) -> None:
    parts = of(("blocks", "tensor_parallel")), of(("agreement",), "rest")
    on_processes(4, tmp_path, *parts[0], *parts[1])


def test_processes_that_plan_together(tmp_path: Path) -> None:
    on_processes(4, tmp_path, *of(("agreement",)))
