"""Arenas: host memory in which paged storages lie while they are away from the device.

takes: bytes, a place. returns: arenas, one for each call in flight. guarantees: what a call gave
back is used again, by any plan whose pages lie at the same place; bytes that cannot be had raise
HostMemoryError before anything is copied.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from rockplan.errors import InvalidInput
from rockplan.paging.files import FileArena
from rockplan.paging.pinned import PinnedArena


class PageCopy(Protocol):
    """One that was begun."""

    def wait(self) -> None:
        """What the device computes from here on comes after it. Raises HostMemoryError where it
        failed."""

    def outlive(self, kept: object) -> None:
        """Without waiting: what `kept` holds is not freed before it is done."""


class Arena(Protocol):
    """So many bytes of the host."""

    size_bytes: int
    process: int

    def begin_out(self, offset_bytes: int, storage: torch.UntypedStorage) -> PageCopy:
        """Copy a storage to a place in the arena, as soon as it is computed."""

    def begin_in(self, offset_bytes: int, storage: torch.UntypedStorage) -> PageCopy:
        """Fill a storage from a place in the arena."""


class Lease:
    """An arena in use; it goes back when nobody holds this."""

    def __init__(self, pool: ArenaPool, arena: Arena) -> None:
        self._pool, self.arena = pool, arena

    def __del__(self) -> None:
        self._pool.give_back(self.arena)


class ArenaPool:
    """Arenas at one place, as many as were ever in use at once."""

    def __init__(self, make: Callable[[int], Arena]) -> None:
        self._make = make
        self._free: list[Arena] = []
        # Held here, or a garbage collection that finds a lease would end its arena with it.
        self._used: list[Arena] = []
        self._lock = threading.RLock()  # a lease may end while this thread takes one

    def take(self, size_bytes: int) -> Lease:
        """An arena of at least so many bytes. Raises HostMemoryError where they cannot be had."""
        with self._lock:
            self._free = [a for a in self._free if a.process == os.getpid()]
            fits = [a for a in self._free if a.size_bytes >= size_bytes]
            if fits:
                arena = min(fits, key=lambda a: a.size_bytes)
                self._free.remove(arena)
            else:
                self._free.clear()  # what is too small makes room for it
                arena = self._make(size_bytes)
            self._used.append(arena)
        return Lease(self, arena)

    def give_back(self, arena: Arena) -> None:
        with self._lock:
            self._used.remove(arena)
            self._free.append(arena)


def _made(size_bytes: int, device: str, path: str | None) -> Arena:
    is_cuda = torch.device(device).type == "cuda"
    return PinnedArena(size_bytes, device) if is_cuda else FileArena(size_bytes, path)


_Place = tuple[str, str | None]
_pools: weakref.WeakValueDictionary[_Place, ArenaPool] = weakref.WeakValueDictionary()


def pool_of(device: str, path: str | None = None) -> ArenaPool:
    """The arenas of a device: pinned memory for 'cuda:0', files in the folder `path` for 'cpu' (in
    the folder of temporary files without one). They go with the last who holds it.

    Raises InvalidInput for a path beside a CUDA device, and for other devices."""
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
        known = ArenaPool(lambda size: _made(size, device, path))
        known = _pools.setdefault((device, path), known)
    return known
