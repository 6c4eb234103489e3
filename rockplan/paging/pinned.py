"""Pinned memory: pages of modules on a CUDA device, copied on two streams, one for each direction.

takes: bytes, a device. returns: an arena, one mapping that is registered once. guarantees: a copy
waits for earlier work of the current stream, and this stream for the copy where it must; no tensor
is held and no block recorded for a stream, so the caching allocator hands out the same blocks as
without paging.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import resource
import weakref
from typing import Any

import torch

from rockplan.errors import HostMemoryError
from rockplan.machine import available_bytes
from rockplan.values.plan import format_bytes


@functools.cache
def _streams(device: str) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    make: Any = torch.cuda.Stream
    return make(device), make(device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class StreamCopy:
    """As `files.FileCopy`. stream: on which the device memory was allocated."""

    def __init__(self, done: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        self._done, self._stream = done, stream

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self._done)

    def outlive(self, kept: object) -> None:
        # The next owner of the block will write to it on the stream of its allocation.
        self._stream.wait_event(self._done)


class PinnedArena:
    """As `files.FileArena`."""

    def __init__(self, size_bytes: int, device: str) -> None:
        """Raises HostMemoryError if the host has too little memory, or does not pin it."""
        self.size_bytes, self.process = size_bytes, os.getpid()
        known = available_bytes()
        if known is not None and known < size_bytes:
            raise HostMemoryError(_no_room(size_bytes, f"the machine has {known} bytes left"))
        self._bytes = torch.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), dtype=torch.uint8)
        self._streams = _streams(device)
        self._last_in: torch.cuda.Event | None = None
        code = int(_runtime().cudaHostRegister(self._bytes.data_ptr(), len(self._bytes), 0))
        if code:
            # Clear CUDA's error, which the next kernel would report.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            allowed = "any" if limit == resource.RLIM_INFINITY else str(limit)
            why = f"CUDA error {code}; `ulimit -l` allows {allowed} bytes"
            raise HostMemoryError(_no_room(size_bytes, why))
        weakref.finalize(self, _unregister, self._bytes, self._streams).atexit = False

    def begin_out(self, offset_bytes: int, storage: torch.UntypedStorage) -> StreamCopy:
        stream = self._streams[0]
        if self._last_in is not None:  # of an earlier call, which may still read these bytes
            stream.wait_event(self._last_in)
        return self._begin(stream, self._page(offset_bytes, storage), _bytes_of(storage))

    def begin_in(self, offset_bytes: int, storage: torch.UntypedStorage) -> StreamCopy:
        stream = self._streams[1]
        copy = self._begin(stream, _bytes_of(storage), self._page(offset_bytes, storage))
        self._last_in = copy._done
        return copy

    def _page(self, offset_bytes: int, storage: torch.UntypedStorage) -> torch.Tensor:
        return self._bytes[offset_bytes : offset_bytes + storage.nbytes()]

    @staticmethod
    def _begin(stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> StreamCopy:
        compute = torch.cuda.current_stream(stream.device)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return StreamCopy(stream.record_event(), compute)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _unregister(memory: torch.Tensor, streams: tuple[torch.cuda.Stream, ...]) -> None:
    for stream in streams:
        stream.synchronize()
    _runtime().cudaHostUnregister(memory.data_ptr())


def _no_room(size_bytes: int, why: str) -> str:
    return (
        f"{size_bytes} bytes ({format_bytes(size_bytes)}) of activations are to be paged to pinned "
        f"memory of the host: {why}. Allow fewer bytes, Options(host=...), or raise the limit (the "
        "memory of the container, `ulimit -l`)"
    )
