"""Planned blocks under fully_shard and DistributedDataParallel, on two and four processes: they
compute what the original does, and a model that is sharded first needs what is promised. (Memory of
a collective goes when that ends, at another moment in each run.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import on_processes


@pytest.mark.parametrize("processes", [2, 4])
def test_planned_blocks_on_several_processes(processes: int, tmp_path: Path) -> None:
    on_processes(processes, tmp_path, "tests.blocks_worker")
