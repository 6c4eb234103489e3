"""The model of PyTorch's caching allocator: rules that hold after each request of any sequence, and
sequences whose bytes follow from the constants by hand. Against the allocator itself:
benchmarks/stand_in/allocator.py."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rockplan.fitting.allocator import (
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
    Request,
    replay,
    rounded,
)

MIB = 1 << 20

sizes = st.one_of(
    st.integers(0, 4096),
    st.integers(1, 64 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB, 24 * MIB]),
)
steps = st.lists(st.tuples(st.booleans(), st.integers(0, 2**16), sizes), max_size=80)
modes = st.booleans()
capacities = st.one_of(st.none(), st.integers(20 * MIB, 400 * MIB))


def requests_of(steps: list[tuple[bool, int, int]]) -> list[Request]:
    """Each step frees one of what is alive, if it may and there is some, or allocates."""
    alive: list[int] = []
    requests = []
    for key, (is_free, which, size_bytes) in enumerate(steps):
        if is_free and alive:
            requests.append(Request(alive.pop(which % len(alive)), None))
        else:
            alive.append(key)
            requests.append(Request(key, size_bytes))
    return requests


class AddressRange(NamedTuple):
    """Bytes from `address` on, allocated by the request `key`, or free (None)."""

    address: int
    size_bytes: int
    key: Hashable | None


def segments(allocator: CachingAllocator) -> Iterator[list[AddressRange]]:
    """The blocks of each segment that have memory, by address, as PyTorch's `snapshot` does."""
    for block in map(allocator._heads.get, [*allocator._heads]):
        found = []
        while block is not None:
            if block.is_mapped:
                found.append(AddressRange(block.address, block.size, block.key))
            block = block.next
        yield found


def hold(allocator: CachingAllocator, live: dict[int, int]) -> None:
    """What is true of the allocator while `live` requests (key -> bytes) have memory."""
    ranges = [block for segment in segments(allocator) for block in segment]
    ends = sorted((block.address, block.address + block.size_bytes) for block in ranges)
    assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False))
    given_out = {block.key: block.size_bytes for block in ranges if block.key is not None}
    assert given_out.keys() == {key for key, size_bytes in live.items() if size_bytes}
    assert allocator.allocated_bytes == sum(given_out.values())
    assert allocator.reserved_bytes == sum(block.size_bytes for block in ranges)
    assert allocator.reserved_bytes >= allocator.allocated_bytes
    for segment in segments(allocator):
        joined = [
            (a.key, b.key)
            for a, b in zip(segment, segment[1:], strict=False)
            if a.address + a.size_bytes == b.address
        ]
        assert (None, None) not in joined, "two free blocks side by side"


@settings(max_examples=60, deadline=None)
@given(steps, modes, capacities)
def test_rules_hold_after_each_request(
    steps: list[tuple[bool, int, int]], expandable: bool, capacity_bytes: int | None
) -> None:
    allocator = CachingAllocator(expandable, capacity_bytes)
    live: dict[int, int] = {}
    for request in requests_of(steps):
        if request.size_bytes is None:
            allocator.free(request.key)
            live.pop(request.key, None)
        elif allocator.allocate(request.key, request.size_bytes):
            live[request.key] = request.size_bytes
        else:
            assert capacity_bytes is not None
        hold(allocator, live)
        asked = sum(map(rounded, live.values()))
        kept = allocator.allocated_bytes - asked
        # A rest that is too small to be a block of its own is given out with its block.
        assert 0 <= kept <= (0 if expandable else SMALL_BYTES * len(live))
        assert capacity_bytes is None or allocator.reserved_bytes <= capacity_bytes


@settings(max_examples=30, deadline=None)
@given(steps, modes)
def test_freeing_all_makes_each_segment_one_block(
    steps: list[tuple[bool, int, int]], expandable: bool
) -> None:
    allocator = CachingAllocator(expandable)
    requests = requests_of(steps)
    keys = {request.key for request in requests}
    for request in [*requests, *(Request(key, None) for key in sorted(keys))]:
        if request.size_bytes is None:
            allocator.free(request.key)
        else:
            allocator.allocate(request.key, request.size_bytes)
    assert allocator.allocated_bytes == 0
    assert all(len(segment) == 1 for segment in segments(allocator))


@settings(max_examples=20, deadline=None)
@given(steps, modes, capacities)
def test_usage_is_the_same_each_time(
    steps: list[tuple[bool, int, int]], expandable: bool, capacity_bytes: int | None
) -> None:
    requests = requests_of(steps)
    assert replay(requests, expandable, capacity_bytes) == replay(
        iter(requests), expandable, capacity_bytes
    )


@pytest.mark.parametrize(
    ("size_bytes", "reserved", "expanded"),
    [
        (0, 0, 0),
        (1, SMALL_SEGMENT_BYTES, SMALL_SEGMENT_BYTES),
        (SMALL_BYTES, SMALL_SEGMENT_BYTES, SMALL_SEGMENT_BYTES),
        (SMALL_BYTES + 1, LARGE_SEGMENT_BYTES, LARGE_SEGMENT_BYTES),
        (10 * MIB - 512, LARGE_SEGMENT_BYTES, LARGE_SEGMENT_BYTES),
        (10 * MIB, 10 * MIB, LARGE_SEGMENT_BYTES),
        (21 * MIB, 22 * MIB, 2 * LARGE_SEGMENT_BYTES),
    ],
)
def test_segment_of_a_first_request(size_bytes: int, reserved: int, expanded: int) -> None:
    assert replay([Request(0, size_bytes)]).reserved_peak_bytes == reserved
    assert replay([Request(0, size_bytes)], expandable=True).reserved_peak_bytes == expanded


def test_the_smallest_block_large_enough_is_taken() -> None:
    """A block of 32 MiB and one of 12: the request of 12 does not cut the larger one."""
    first = [Request(0, 32 * MIB), Request(1, 12 * MIB), Request(0, None), Request(1, None)]
    usage = replay([*first, Request(2, 12 * MIB), Request(3, 32 * MIB)])
    assert usage.reserved_peak_bytes == usage.allocated_peak_bytes == 44 * MIB
    # The other way round it is cut, and what is left is too small for 32 MiB.
    usage = replay([*first, Request(2, 13 * MIB), Request(3, 32 * MIB)])
    assert (usage.reserved_peak_bytes, usage.segments) == (76 * MIB, 3)


def test_a_full_device_gets_its_cache_back() -> None:
    """Blocks of many lengths: without expandable segments none of them serves a longer one."""
    requests = [
        request
        for key in range(8)
        for request in (Request(key, (40 + 4 * key) * MIB), Request(key, None))
    ]
    roomy, full = replay(requests), replay(requests, capacity_bytes=100 * MIB)
    assert (roomy.retries, roomy.reserved_peak_bytes) == (0, sum(range(40, 72, 4)) * MIB)
    assert full.retries > 0
    assert full.reserved_peak_bytes <= 100 * MIB
    assert full.failed_at is None
    expandable = replay(requests, expandable=True)
    assert expandable.reserved_peak_bytes == 80 * MIB
    assert replay(requests, capacity_bytes=60 * MIB).failed_at == 12


def test_a_key_has_memory_once() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(0, 1)
    with pytest.raises(ValueError, match="allocated already"):
        allocator.allocate(0, 1)


def test_addresses_decide_among_equal_blocks() -> None:
    """Two free blocks of 30 MiB, one at the end of a segment of 60: where it is the lower one, the
    segment of 60 is used, and the next request of 60 needs a new one."""

    def reserved(addresses: list[int]) -> int:
        allocator = CachingAllocator(address_of=lambda size: addresses.pop(0))
        for key, size_bytes in ((0, 60 * MIB), (1, 30 * MIB)):
            assert allocator.allocate(key, size_bytes)
        allocator.free(0)
        assert allocator.allocate(2, 30 * MIB)
        allocator.free(1)
        assert allocator.allocate(3, 30 * MIB)
        allocator.free(2)
        assert allocator.allocate(4, 60 * MIB)
        return allocator.reserved_bytes

    far = 1 << 40
    assert reserved([0, far, 2 * far]) == 150 * MIB
    assert reserved([far, 0]) == 90 * MIB
