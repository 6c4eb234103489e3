"""Planned blocks under fully_shard and DistributedDataParallel, on two and four processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import torchrun


@pytest.mark.parametrize("processes", [2, 4])
def test_planned_blocks_on_several_processes(processes: int, tmp_path: Path) -> None:
    torchrun(["-m", "tests.blocks_worker"], tmp_path, processes)
