"""Planned blocks under fully_shard and DistributedDataParallel, on two and four processes: they
compute what the original does. No peak is compared: memory of a collective goes when that ends, at
another moment in each run (a step of 210 KB needed 214 KB to 281 KB)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import on_processes


@pytest.mark.parametrize("processes", [2, 4])
def test_planned_blocks_on_several_processes(processes: int, tmp_path: Path) -> None:
    on_processes("tests.blocks_worker", processes, tmp_path)
