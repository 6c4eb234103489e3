"""DistributedDataParallel of a planned module, on two processes with gloo."""

from __future__ import annotations

from pathlib import Path

from tests.processes import torchrun


def test_distributed_data_parallel(compilers: Path, tmp_path: Path) -> None:
    torchrun(["-m", "tests.distributed_worker"], tmp_path)


def test_forwards_that_exchange_data(tmp_path: Path) -> None:
    torchrun(["-m", "tests.collectives_worker"], tmp_path)
