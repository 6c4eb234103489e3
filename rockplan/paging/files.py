"""Files: pages of modules on the CPU, copied by two threads, one for each direction.

takes: bytes, a folder. returns: an arena, which is a file without a name. guarantees: all of its
room is reserved when it is made; a copy holds no tensor, only the address of its bytes; an error of
a copy is raised by `wait`.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from rockplan.errors import HostMemoryError
from rockplan.machine import available_bytes, is_in_memory
from rockplan.values.plan import format_bytes

_threads: dict[str, ThreadPoolExecutor] = {}
# A forked process has none of its parent's threads.
os.register_at_fork(after_in_child=_threads.clear)


def submit(direction: str, work: Callable[[], None]) -> Future[None]:
    """Run `work` after all that was submitted before for this direction."""
    if direction not in _threads:
        _threads.setdefault(direction, ThreadPoolExecutor(1, f"rockplan-{direction}"))
    return _threads[direction].submit(work)


class FileCopy:
    """A copy that has begun. `wait` makes later computations of the device come after it, and
    raises HostMemoryError if it failed; `outlive` keeps an object alive until it is done."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()

    def outlive(self, kept: object) -> None:
        # Waiting could deadlock: a garbage collection may run this in the thread that copies.
        self._done.add_done_callback(lambda done: kept)  # which holds it


class FileArena:
    """A region of host memory, of the process that has this id. `begin_out` begins to copy a
    storage to a place in it, once the storage is computed, `begin_in` to fill one from there."""

    def __init__(self, size_bytes: int, folder: str | None = None) -> None:
        """Raises HostMemoryError if the folder has no room, or is not writable."""
        self.size_bytes, self.process = size_bytes, os.getpid()
        self._folder = folder or tempfile.gettempdir()
        known = available_bytes() if is_in_memory(Path(self._folder)) else None
        if known is not None and known < size_bytes:
            raise HostMemoryError(self._no_room(f"it is in memory, which has {known} bytes left"))
        try:
            self._file = tempfile.TemporaryFile(  # noqa: SIM115
                buffering=0, prefix="rockplan-", dir=self._folder
            )
            weakref.finalize(self, self._file.close)
            os.posix_fallocate(self._file.fileno(), 0, max(size_bytes, 1))
        except OSError as error:
            raise HostMemoryError(self._no_room(str(error))) from error

    def _no_room(self, why: str) -> str:
        return (
            f"{self.size_bytes} bytes ({format_bytes(self.size_bytes)}) of activations are to be "
            f"paged to the folder {self._folder}: {why}. Name a folder that is writable and has "
            "room, Options(host_path=...), or allow fewer bytes, Options(host=...)"
        )

    def begin_out(self, offset_bytes: int, storage: torch.UntypedStorage) -> FileCopy:
        return self._begin("out", os.pwritev, offset_bytes, storage)

    def begin_in(self, offset_bytes: int, storage: torch.UntypedStorage) -> FileCopy:
        return self._begin("in", os.preadv, offset_bytes, storage)

    def _begin(
        self,
        direction: str,
        transfer: Callable[[int, list[memoryview], int], int],
        offset_bytes: int,
        storage: torch.UntypedStorage,
    ) -> FileCopy:
        memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        view = memoryview(memory).cast("B")
        return FileCopy(submit(direction, partial(self._copy, transfer, offset_bytes, view)))

    def _copy(
        self,
        transfer: Callable[[int, list[memoryview], int], int],
        offset_bytes: int,
        memory: memoryview,
    ) -> None:
        done = 0
        try:
            while done < len(memory):
                moved = transfer(self._file.fileno(), [memory[done:]], offset_bytes + done)
                if not moved:
                    raise OSError("the file ends before its pages do")
                done += moved
        except OSError as error:
            raise HostMemoryError(
                f"a page of {len(memory)} bytes could not be copied between memory and the folder "
                f"{self._folder}: {error}. This call cannot go on; parameters and gradients that "
                "were complete are as they were. Name another folder, Options(host_path=...)"
            ) from error
