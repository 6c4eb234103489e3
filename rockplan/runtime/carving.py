"""Carving: blocks of a recorded call lie where a packing of their lifetimes puts them.

takes: a function that records a call in a pool of memory. returns: what that made, in the pool that
takes least. PyTorch's allocator takes the smallest free block that fits, and so reserves more than
is alive at once. Here all free memory of the pool is held while a call is recorded, but for holes
before an operator, of the sizes and in the places that are meant for its blocks. Where a block lies
elsewhere nothing breaks, but that the pool is larger; then the one of before is recorded again.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from rockplan.codegen.executable import Executable
from rockplan.oracles.packing import AskedBlock, packed

Before = Callable[[], None]
Recorded = TypeVar("Recorded")
Span = tuple[int, int]
"""Where something begins in the memory that is shared out, and where it ends, in bytes."""

SMALL_BYTES = 1 << 20
"""Blocks up to this size have segments of their own, which are left as they are; the sizes of other
segments are multiples of twice of it."""


def least(make: Callable[..., Recorded], device: torch.device) -> Recorded:
    """Return what `make` records in a new pool. make: (handle of the pool, what is to be called
    before each operator, if anything) -> something with which the pool ends."""
    pool, calls, tracing = torch.cuda.graph_pool_handle(), itertools.count(), torch.cuda.memory
    if torch._C._cuda_isHistoryEnabled():  # somebody else's
        return make(pool)
    tracing._record_memory_history("all", context=None, max_entries=1 << 20)
    try:
        made = make(pool, lambda: tracing._set_memory_metadata(str(next(calls))))
        events = tracing._snapshot(device)["device_traces"][device.index or 0]
    finally:
        tracing._record_memory_history(None)
        tracing._set_memory_metadata("")
    segments, carved = _segments(pool), torch.cuda.graph_pool_handle()
    carver = _Carver(_blocks(events, segments), device)
    del made
    _let_go()
    with _segments_of_one_size(), contextlib.closing(carver):
        made = make(carved, carver.before)
    if sum(map(len, _segments(carved))) <= sum(map(len, segments)):
        return made
    del made
    _let_go()
    return make(torch.cuda.graph_pool_handle())


def watched(code: Executable, before: Before) -> Executable:
    """Return a program whose functions call `before` before each operator."""

    def watching(operator: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            torch._C._cuda_clearCublasWorkspaces()  # others lie there while no product runs
            before()
            return operator(*args, **kwargs)

        return run

    functions: Any = code.functions
    space = {**functions.forward.__globals__}
    space |= {name: watching(space[name]) for name, _ in code.code.operators}
    forward, *backward = (
        types.FunctionType(of.__code__, space) for of in (functions.forward, *functions.backward)
    )
    return replace(code, functions=replace(functions, forward=forward, backward=(*backward,)))


class _Carver:
    """Shares out one segment. `before` is called before each operator; afterwards it is closed."""

    def __init__(self, blocks: Sequence[AskedBlock], device: torch.device) -> None:
        self._blocks, self._device, places = blocks, device, packed(blocks)
        top, segment_bytes = max((end for _, end in places), default=0), 2 * SMALL_BYTES
        self._whole = 0, -(-top // segment_bytes) * segment_bytes
        self._places = list[Span]()
        self._asked: dict[int, list[Span]] = {}
        for (begin, end), block in zip(places, blocks, strict=True):
            # What is left behind a hole or a block stays a part of it if that is little.
            end = self._whole[1] if self._whole[1] - end <= SMALL_BYTES else end
            self._asked.setdefault(block.opens, []).append((begin, end))
            filled = begin + block.size_bytes
            self._places.append((begin, end if end - filled <= SMALL_BYTES else filled))
        self._call, self._held = -1, dict[Span, int]()

    def before(self) -> None:
        self._call += 1
        if (holes := self._asked.get(self._call)) is None:
            return
        blocks = zip(self._blocks, self._places, strict=True)
        alive = [place for block, place in blocks if block.opens < self._call <= block.closes]
        try:
            if self._call == min(self._asked):  # so that it is one segment
                self._take([self._whole])
            self.close()
            self._cut(_between(alive, self._whole), holes)
        except torch.OutOfMemoryError:  # where no gap beside others is as large
            self._asked.clear()
            self.close()

    def _cut(self, free: Sequence[Span], holes: Sequence[Span]) -> None:
        """Hold what is free but for holes. The allocator takes the smallest that fits: all others
        are held before one is cut."""
        self._take(sorted(free, key=lambda span: (span[1] - span[0], span)))
        for span in free:
            inside = [hole for hole in holes if span[0] <= hole[0] and hole[1] <= span[1]]
            self._give([span])
            self._take(sorted([*_between(inside, span), *inside]))
        self._give([hole for hole in holes if hole in self._held])

    def close(self) -> None:
        """Let go of what is held."""
        self._give([*self._held])

    def _take(self, spans: Sequence[Span]) -> None:
        for begin, end in spans:
            self._held[begin, end] = torch.cuda.caching_allocator_alloc(end - begin, self._device)

    def _give(self, spans: Sequence[Span]) -> None:
        for span in spans:
            torch.cuda.caching_allocator_delete(self._held.pop(span))


def _between(spans: Sequence[Span], whole: Span) -> list[Span]:
    """Return what of `whole` is not in `spans` and has room for a large block."""
    found, place = list[Span](), whole[0]
    for begin, end in sorted([*spans, (whole[1], whole[1])]):
        if begin - place > SMALL_BYTES:
            found.append((place, begin))
        place = max(place, end)
    return found


def _blocks(events: Sequence[Any], segments: Sequence[range]) -> list[AskedBlock]:
    """Of a trace in which the last call of an operator is noted beside each event, those in
    segments."""
    found, number_at = list[AskedBlock](), dict[int, int]()
    last = max((int(event["user_metadata"] or 0) for event in events), default=0)
    for event in events:
        address, size_bytes, call = event["addr"], event["size"], event["user_metadata"]
        if event["action"] == "free_completed" and address in number_at:
            number = number_at.pop(address)
            found[number] = replace(found[number], closes=int(call))
        is_large = event["action"] == "alloc" and size_bytes > SMALL_BYTES
        if is_large and call and any(address in segment for segment in segments):
            number_at[address] = len(found)
            found.append(AskedBlock(int(call), last + 1, size_bytes))
    return found


def _segments(pool: Any) -> list[range]:
    """Addresses of a pool."""
    torch.cuda.empty_cache()
    found = torch.cuda.memory_snapshot(pool)
    return [range(s["address"], s["address"] + s["total_size"]) for s in found]


@contextlib.contextmanager
def _segments_of_one_size() -> Iterator[None]:
    """Segments that expand grow beyond the one that is shared out. Other settings stay."""
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    usual = settings.get("PYTORCH_CUDA_ALLOC_CONF") or "expandable_segments:False"
    torch._C._accelerator_setAllocatorSettings(f"{usual},expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(usual)


def _let_go() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # of which one lies in the pool
    torch.cuda.empty_cache()
