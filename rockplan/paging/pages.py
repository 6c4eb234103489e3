"""Pages: functions that the generated code of a plan calls to move storages to the host and back.

takes: the layout of a plan, tensors of a storage. returns: equal tensors in a new storage.
guarantees: a storage is allocated and freed where the code says so, however late its copy is; no
tensor is held. How fast such copies are is measured here, too.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from rockplan.errors import BackwardError, StalePlan
from rockplan.paging.arenas import Arena, ArenaPool, Lease, PageCopy, pool_of
from rockplan.values.sizes import at_sizes


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a plan's pages in an arena. offsets, sizes: in bytes, by name. No two pages
    share a place: at the turn all of them are on the host."""

    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    pool: ArenaPool

    @classmethod
    def of(cls, pages: Iterable[tuple[str, int]], pool: ArenaPool) -> Layout:
        """Lay out pages: (name, bytes)."""
        sizes = dict(pages)
        ends = itertools.accumulate(sizes.values(), initial=0)
        return cls(dict(zip(sizes, ends, strict=False)), sizes, pool)

    def at(self, numbers: Mapping[str, int | float]) -> Layout:
        """Reserve the layout of a call of other sizes. numbers: expression -> its value there."""
        made = Layout.of(((n, at_sizes(b, numbers)) for n, b in self.sizes.items()), self.pool)
        made.reserve()
        return made

    def reserve(self) -> None:
        """Allocate an arena for one call. Raises HostMemoryError if the host has no room."""
        self.pool.take(self.size_bytes)

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class _Look:
    """A tensor without its memory: dtype, offset, shape and strides (in elements)."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Look:
        return cls(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return such a tensor on `storage`, not as a view (views share a version counter)."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, self.offset, self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class _Page:
    """A storage on the host, and the tensors that it had."""

    size_bytes: int
    device: torch.device
    looks: tuple[_Look, ...]


def new_storage(size_bytes: int, device: torch.device | str) -> torch.UntypedStorage:
    """Allocate a storage without filling it, even if PyTorch fills new tensors."""
    return torch.UntypedStorage(size_bytes, device=device)  # type: ignore[no-untyped-call]


class Pages:
    """The pages of one call. layout: of its plan; None if the plan has no pages."""

    __slots__ = ("_copies", "_lease", "_pages", "layout")

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self._lease: Lease | None = None
        self._pages: dict[str, _Page] = {}
        self._copies: dict[str, PageCopy] = {}

    @property
    def has_pages(self) -> bool:
        """True if anything is on the host."""
        return bool(self._pages)

    def page_out(self, name: str, *tensors: torch.Tensor) -> None:
        """Begin to copy the storage of `tensors`, all views of one storage, to the host, as the
        page `name`. The caller frees the storage afterwards. Raises StalePlan while a CUDA graph is
        captured, HostMemoryError if there is no room for one more call in flight."""
        storage = tensors[0].untyped_storage()
        if storage.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StalePlan(
                "this plan pages activations to the host, which cannot be captured in a CUDA "
                "graph: copies out of one graph and into another share events. Plan without host"
            )
        for tensor in tensors:
            assert tensor.untyped_storage().data_ptr() == storage.data_ptr(), name
        assert self.layout is not None
        # An input may be a part of what the caller has.
        is_part = storage.nbytes() > self.layout.sizes[name]
        if is_part:
            tensors = tuple(tensor.clone() for tensor in tensors)
            storage = tensors[0].untyped_storage()
        self._pages[name] = _Page(storage.nbytes(), storage.device, tuple(map(_Look.of, tensors)))
        self._copies[name] = self._arena.begin_out(self._offset(name), storage)
        if is_part:
            self._copies[name].outlive(storage)

    def paged_out(self, name: str) -> None:
        """Wait until the copy to the host is done: then the storage may be freed."""
        self._copies.pop(name).wait()

    def page_in(self, name: str) -> tuple[torch.Tensor, ...]:
        """Allocate a storage for the page `name`, begin to copy it back, and return new tensors on
        it, as `page_out` got them; they may not be read yet. Raises BackwardError after a fork."""
        page = self._pages[name]
        if self._arena.process != os.getpid():
            raise BackwardError(
                "the forward of this call ran before the process was forked, and its activations "
                "are on the host, where they are the parent's; run forward and backward in one"
            )
        storage = new_storage(page.size_bytes, page.device)
        self._copies[name] = self._arena.begin_in(self._offset(name), storage)
        return tuple(look.on(storage) for look in page.looks)

    def paged_in(self, name: str) -> None:
        """Wait until the copy back is done: then the tensors may be read."""
        self._copies.pop(name).wait()

    @property
    def _arena(self) -> Arena:
        if self._lease is None:
            assert self.layout is not None
            self._lease = self.layout.pool.take(self.layout.size_bytes)
        return self._lease.arena

    def _offset(self, name: str) -> int:
        assert self.layout is not None
        return self.layout.offsets[name]

    def let_go_of_pages(self, kept: object = None) -> None:
        """Forget all pages and give the host memory back, without waiting for copies. kept: an
        object that holds memory that copies may still write to; it lives until they are done."""
        for copy in self._copies.values():
            copy.outlive((kept, self._lease))
        self._copies.clear()
        self._pages.clear()
        self._lease = None

    def end_copies(self) -> None:
        """Wait for all copies, and ignore their errors: called while an error is raised, which is
        about to free the memory that they use."""
        for copy in self._copies.values():
            try:
                copy.wait()
            except Exception:  # the error that is being raised says enough
                continue
        self._copies.clear()


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
