"""Link: how fast pages are copied between device and host."""

from __future__ import annotations

import statistics
import time

import torch

from rockplan.paging.arenas import pool_of
from rockplan.paging.pages import new_storage

PAGE_BYTES = 64 << 20
ROUNDS = 5


def measured_link(device: str, path: str | None = None, page_bytes: int = PAGE_BYTES) -> float:
    """Measure how many bytes a second go each way between `device` and the host while copies run
    both ways: the median of ROUNDS rounds, each of a page of page_bytes each way. path: folder to
    page to from the CPU; None: that of temporary files. Raises HostMemoryError if the host has no
    room, InvalidInput as `pool_of`."""
    lease = pool_of(device, path).take(2 * page_bytes)
    storages = [new_storage(page_bytes, device) for _ in range(2)]
    lease.arena.begin_out(page_bytes, storages[1]).wait()
    seconds = []
    for _ in range(ROUNDS):
        _synchronize(device)
        begin = time.perf_counter()
        copies = [
            lease.arena.begin_out(0, storages[0]),
            lease.arena.begin_in(page_bytes, storages[1]),
        ]
        for copy in copies:
            copy.wait()
        _synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return page_bytes / statistics.median(seconds)


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
