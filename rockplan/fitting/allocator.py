"""PyTorch's caching allocator, without a device: requests -> bytes allocated and reserved.

takes: allocations and frees in order. returns: Usage. guarantees: the behaviour of
`DeviceCachingAllocator` of c10/cuda/CUDACachingAllocator.cpp on one stream, with the constants of
c10/core/AllocatorConfig.h, with `expandable_segments` or without, no other setting
(`max_split_size_mb`, `garbage_collection_threshold`, `roundup_power2_divisions`). Among free blocks
of equal size it takes the one at the lowest address, as PyTorch does; a driver chooses addresses of
segments, here they are in the order in which segments are asked for.

Other streams, pools of graphs, and memory that libraries take from the driver are not modelled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

MIN_BLOCK_BYTES = 512
"""kMinBlockSize: sizes are multiples of this (`round_size`)."""

SMALL_BYTES = 1 << 20
"""kSmallSize: the largest request that the small pool serves (`get_pool`); in the large pool a
block is split only if the rest is larger (`should_split`)."""

SMALL_SEGMENT_BYTES = 2 << 20
"""kSmallBuffer: segments of the small pool, and its pages if segments expand."""

LARGE_SEGMENT_BYTES = 20 << 20
"""large_segment_size: segments for requests below MIN_LARGE_BYTES, and pages of the large pool."""

MIN_LARGE_BYTES = 10 << 20
"""kMinLargeAlloc: larger requests get a segment of their own."""

ROUND_LARGE_BYTES = 2 << 20
"""kRoundLarge: the size of such a segment is a multiple of this (`get_allocation_size`)."""

_ADDRESS_SPACE_BYTES = LARGE_SEGMENT_BYTES << 32
"""Addresses of an expandable segment. (PyTorch reserves a device's bytes and an eighth: they never
run out.)"""


class Request(NamedTuple):
    """A request for memory by `key`, which must hold none; PyTorch ignores 0 bytes. size_bytes
    None: free the memory of `key`."""

    key: Hashable
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes at the peak and at the end. allocated: by requests, rounded up to blocks; reserved:
    given by the device.

    segments: held at the end; with `expandable` one for each pool. retries: how often cached
    segments were given back to a full device, which waits for that. failed_at: index of the request
    that found no memory even so, None if all did; the replay ends there.
    """

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    segments: int
    retries: int
    failed_at: int | None


def replay(
    requests: Iterable[Request],
    expandable: bool = False,
    capacity_bytes: int | None = None,
) -> Usage:
    """Serve `requests` in order by a model of PyTorch's caching allocator, which begins with no
    memory; return what it allocated and reserved. Stops at the first request that the device cannot
    serve (`failed_at` of the result).

    expandable: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. capacity_bytes: of the device,
    beside the context; None if it has enough.
    """
    allocator = CachingAllocator(expandable, capacity_bytes)
    failed_at = None
    for position, (key, size_bytes) in enumerate(requests):
        if size_bytes is None:
            allocator.free(key)
        elif not allocator.allocate(key, size_bytes):
            failed_at = position
            break
    return allocator.usage(failed_at)


def rounded(size_bytes: int) -> int:
    """Return the bytes of the block for a request (`round_size`); 0 for 0."""
    return _rounded_up(size_bytes, MIN_BLOCK_BYTES)


class CachingAllocator:
    """The allocator of one device and one stream.

    address_of: returns the address of a new segment of so many bytes; None: one after another. (Not
    for expandable segments.)
    """

    def __init__(
        self,
        expandable: bool = False,
        capacity_bytes: int | None = None,
        address_of: Callable[[int], int] | None = None,
    ) -> None:
        self.allocated_bytes = self.allocated_peak_bytes = 0
        self.reserved_bytes = self.reserved_peak_bytes = 0
        self.retries = 0
        self._expandable = expandable
        self._capacity_bytes = capacity_bytes
        self._small = _Pool(SMALL_SEGMENT_BYTES, is_small=True)
        self._large = _Pool(LARGE_SEGMENT_BYTES, is_small=False)
        self._blocks: dict[Hashable, _Piece] = {}
        self._heads: dict[int, _Piece] = {}
        self._address_of = address_of or self._following
        self._next_address = 0

    def allocate(self, key: Hashable, size_bytes: int) -> bool:
        """Allocate size_bytes for `key` (`malloc` of PyTorch's CUDACachingAllocator), after a
        return of cached memory if need be. Returns False if the device has none. Raises ValueError
        if `key` has some."""
        if key in self._blocks:
            raise ValueError(f"{key} is allocated already")
        if size_bytes == 0:
            return True
        size = rounded(size_bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = pool.best(size, self._expandable) or self._new(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new(pool, size)
        if block is None:
            return False
        if self._is_split(block, size):  # the rest is free (`alloc_found_block`)
            block.pool.add(self._cut(block, size))
        block.key = key
        self._blocks[key] = block
        self.allocated_bytes += block.size
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return True

    def free(self, key: Hashable) -> None:
        """Free the block of `key`, which stays reserved, merged with free neighbours
        (`free_block`). Nothing for a key of 0 bytes."""
        block = self._blocks.pop(key, None)
        if block is None:  # a request of 0 bytes
            return
        self.allocated_bytes -= block.size
        block.key = None
        self._merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give reserved memory without allocations back to the device: whole segments, or pages of
        expandable ones (`release_cached_blocks`)."""
        for pool in (self._large, self._small):
            for block in pool.cached():
                if self._expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    del self._heads[block.address]
                    self.reserved_bytes -= block.size

    def usage(self, failed_at: int | None = None) -> Usage:
        """Return bytes allocated and reserved, now and at their peaks, and how often cached memory
        was given back. failed_at: position of the request that failed, None for none."""
        return Usage(
            self.allocated_peak_bytes,
            self.reserved_peak_bytes,
            self.allocated_bytes,
            self.reserved_bytes,
            len(self._heads),
            self.retries,
            failed_at,
        )

    # -- memory of the device ----------------------------------------------------------------------

    def _new(self, pool: _Pool, size: int) -> _Piece | None:
        """A free block of at least `size` bytes (`alloc_block`); None if the device has no
        memory."""
        if self._expandable:
            return self._expanded(pool, size)
        # `get_allocation_size`
        if size < MIN_LARGE_BYTES:
            size = SMALL_SEGMENT_BYTES if size <= SMALL_BYTES else LARGE_SEGMENT_BYTES
        else:
            size = _rounded_up(size, ROUND_LARGE_BYTES)
        if not self._reserve(size):
            return None
        block = _Piece(pool, self._address_of(size), size)
        self._heads[block.address] = block
        return block

    def _following(self, size: int) -> int:
        self._next_address += size
        return self._next_address - size

    def _reserve(self, size: int) -> bool:
        """False if the device has no more."""
        if self._capacity_bytes is not None and self.reserved_bytes + size > self._capacity_bytes:
            return False
        self.reserved_bytes += size
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        return True

    # -- segments that expand ----------------------------------------------------------------------

    def _expanded(self, pool: _Pool, size: int) -> _Piece | None:
        """At the lowest address where free memory and addresses without memory suffice, which get
        some (`try_allocate_expandable_block`); None if the device is full."""
        block = pool.room(size) or self._new_segment(pool)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            # Mapping merges it with the free block before it.
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _new_segment(self, pool: _Pool) -> _Piece:
        block = _Piece(pool, self._following(_ADDRESS_SPACE_BYTES), _ADDRESS_SPACE_BYTES)
        block.is_mapped = False
        self._heads[block.address] = block
        pool.add(block)
        return block

    def _map(self, block: _Piece, size: int) -> bool:
        """Whole pages at the beginning get memory, at least `size` bytes (`map_block`). Returns
        False if the device is full."""
        pool = block.pool
        size = _rounded_up(size, pool.page_bytes)
        if not self._reserve(size):
            return False
        pool.remove(block)
        if size < block.size:
            pool.add(self._cut(block, size))
        block.is_mapped = True
        self._merge(block)
        pool.add(block)
        return True

    def _unmap(self, block: _Piece) -> None:
        """Pages that lie wholly in a free block are given back (`unmap_block`); its addresses
        stay."""
        pool = block.pool
        page = pool.page_bytes
        begin = _rounded_up(block.address, page)
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            rest = self._cut(block, begin - block.address)
            pool.add(block)
            block = rest
        if end - begin < block.size:
            pool.add(self._cut(block, end - begin))
        block.is_mapped = False
        self.reserved_bytes -= block.size
        self._merge(block)
        pool.add(block)
        if block.previous is None and block.next is None:
            pool.remove(block)
            del self._heads[block.address]

    # -- blocks of a segment -----------------------------------------------------------------------

    def _is_split(self, block: _Piece, size: int) -> bool:
        """`should_split`"""
        if block.pool.is_small or self._expandable:
            return block.size - size >= MIN_BLOCK_BYTES
        return block.size - size > SMALL_BYTES

    def _cut(self, block: _Piece, size: int) -> _Piece:
        """The rest is a block of its own, which is in no free list yet."""
        rest = _Piece(block.pool, block.address + size, block.size - size)
        rest.is_mapped = block.is_mapped
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.size = size
        return rest

    def _merge(self, block: _Piece) -> None:
        """Free neighbours are taken from their lists (`try_merge_blocks`)."""
        before, after = block.previous, block.next
        if before is not None and before.is_like(block):
            before.pool.remove(before)
            if self._heads.get(before.address) is before:
                self._heads[before.address] = block
            block.address, block.size = before.address, before.size + block.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and after.is_like(block):
            after.pool.remove(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block


class _Piece:
    """A block of one segment, linked to the blocks before and after it in address. is_mapped: it
    has memory."""

    __slots__ = ("pool", "address", "size", "key", "is_mapped", "previous", "next")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.key: Hashable | None = None
        self.is_mapped = True
        self.previous: _Piece | None = None
        self.next: _Piece | None = None

    def is_like(self, other: _Piece) -> bool:
        return self.key is None and self.is_mapped is other.is_mapped

    @property
    def expandable_bytes(self) -> int:
        after = self.next
        return self.size + (0 if after is None or after.is_mapped else after.size)


class _Pool:
    """Free blocks: mapped ones by size, then address; unmapped ones by address."""

    def __init__(self, page_bytes: int, is_small: bool) -> None:
        self.page_bytes, self.is_small = page_bytes, is_small
        self._free: list[tuple[int, int, _Piece]] = []
        self._unmapped: list[tuple[int, _Piece]] = []

    def add(self, block: _Piece) -> None:
        if block.is_mapped:
            insort(self._free, (block.size, block.address, block))
        else:
            insort(self._unmapped, (block.address, block))

    def remove(self, block: _Piece) -> None:
        if block.is_mapped:
            del self._free[bisect_left(self._free, (block.size, block.address))]
        else:
            del self._unmapped[bisect_left(self._unmapped, (block.address,))]

    def cached(self) -> list[_Piece]:
        return [block for _, _, block in self._free]

    def best(self, size: int, expandable: bool) -> _Piece | None:
        """None if there is none (`get_free_block`). For expandable segments, unmapped addresses
        after a block count as its size."""
        position = bisect_left(self._free, (size,))
        if position == len(self._free):
            return None
        if expandable:
            last = len(self._free) - 1
            while position < last and self._expandable(position + 1) < self._expandable(position):
                position += 1
        return self._free.pop(position)[2]

    def _expandable(self, position: int) -> int:
        return self._free[position][2].expandable_bytes

    def room(self, size: int) -> _Piece | None:
        """Return the first of neighbouring blocks of a segment, free or unmapped, that together
        have `size` bytes of addresses; None if there are none (`find_expandable_block`)."""
        for _, unmapped in self._unmapped:
            before = unmapped.previous
            first = before if before is not None and before.key is None else unmapped
            found_bytes = 0
            block: _Piece | None = first
            while found_bytes < size and block is not None and block.key is None:
                found_bytes += block.size
                block = block.next
            if found_bytes >= size:
                return first
        return None


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
