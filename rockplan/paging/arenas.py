"""Arenas: host memory that holds paged storages while they are away from the device.

takes: bytes, a place. returns: arenas, one for each call in flight. guarantees: an arena that a
call gave back is used again, by any plan that pages to the same place; HostMemoryError is raised
for bytes that cannot be had, before anything is copied.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable

import torch

from rockplan.errors import InvalidInput
from rockplan.paging.files import FileArena, FileCopy
from rockplan.paging.pinned import PinnedArena, StreamCopy

PageCopy = FileCopy | StreamCopy
Arena = FileArena | PinnedArena


class Lease:
    """An arena in use; it goes back to its pool when the lease is no longer referred to."""

    def __init__(self, pool: ArenaPool, arena: Arena) -> None:
        self._pool, self.arena = pool, arena

    def __del__(self) -> None:
        self._pool.give_back(self.arena)


class ArenaPool:
    """Arenas at one place, as many as were ever in use at once."""

    def __init__(self, make: Callable[[int], Arena]) -> None:
        self._make = make
        self._free: list[Arena] = []
        # Held here: else a garbage collection that finds a lease would finalize its arena, too.
        self._used: list[Arena] = []
        self._lock = threading.RLock()  # a lease may end while this thread takes one

    def take(self, size_bytes: int) -> Lease:
        """Lease an arena (a region of host memory) of at least size_bytes: the smallest free one
        that is large enough, else a new one. It comes back when the lease is dropped. Raises
        HostMemoryError."""
        with self._lock:
            self._free = [a for a in self._free if a.process == os.getpid()]
            fits = [a for a in self._free if a.size_bytes >= size_bytes]
            if fits:
                arena = min(fits, key=lambda a: a.size_bytes)
                self._free.remove(arena)
            else:
                self._free.clear()  # arenas that are too small make room for it
                arena = self._make(size_bytes)
            self._used.append(arena)
        return Lease(self, arena)

    def give_back(self, arena: Arena) -> None:
        with self._lock:
            self._used.remove(arena)
            self._free.append(arena)


_Place = tuple[str, str | None]
"""(device, folder)"""
_pools: weakref.WeakValueDictionary[_Place, ArenaPool] = weakref.WeakValueDictionary()


def pool_of(device: str, path: str | None = None) -> ArenaPool:
    """Return the arenas of a device: pinned memory for 'cuda:0', files in the folder `path` for
    'cpu' (None: the folder of temporary files). A pool is freed when nobody refers to it any more.

    Raises InvalidInput for a path beside a CUDA device, and for other devices.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise InvalidInput(
            f"activations on {device} cannot be paged to the host; plan without host"
        )
    if kind == "cuda" and path is not None:
        raise InvalidInput(
            "host_path is for modules on the CPU: from CUDA devices, activations go to pinned "
            "memory. Leave it out"
        )
    known = _pools.get((device, path))
    if known is None:
        make: Callable[[int], Arena] = functools.partial(FileArena, folder=path)
        if kind == "cuda":
            make = functools.partial(PinnedArena, device=device)
        known = _pools.setdefault((device, path), ArenaPool(make))
    return known
