"""Blocks of recorded calls that lie where a packing of their lifetimes puts them."""

from __future__ import annotations

import gc
import random
from typing import Any
from unittest import mock

import pytest
import torch

import rockplan
from benchmarks import stand_in
from rockplan.oracles import packing
from rockplan.runtime import carving
from tests.cuda import ON_CUDA, large

MIB = 1 << 20


def drawn(seed: int) -> list[packing.AskedBlock]:
    rng, found = random.Random(seed), []
    for call in range(120):
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            closes = min(call + int(rng.expovariate(0.1)), 120)
            found.append(packing.AskedBlock(call, closes, rng.randrange(MIB + 512, 40 * MIB, 512)))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_blocks_alive_at_once_lie_apart(seed: int) -> None:
    blocks = drawn(seed)
    placed = [*zip(blocks, packing.packed(blocks), strict=True)]
    for number, (block, (start, end)) in enumerate(placed):
        assert start + block.size_bytes <= end
        for other, (begin, until) in placed[:number]:
            is_one_call = other.opens == block.opens
            room = packing.UNITS_BYTES[0] if is_one_call else 0
            is_above = until + room <= start
            are_alike = is_one_call and until - begin == end - start
            are_apart = is_above or (end + room <= begin and not are_alike)
            assert other.closes < block.opens or are_apart
    assert max(end for _, (_, end) in placed) < 1.15 * most_alive(blocks)


def most_alive(blocks: list[packing.AskedBlock]) -> int:
    ends = 1 + max(b.closes for b in blocks)
    return max(sum(b.size_bytes for b in blocks if b.opens <= n <= b.closes) for n in range(ends))


@pytest.mark.parametrize("mib", [1.25, 1.125, 1.53125])
def test_units_divide_the_sizes_of_blocks(mib: float) -> None:
    sizes = [int(mib * count * MIB) for count in (5, 15, 8, 20, 5)]
    blocks = [packing.AskedBlock(call, 9, size) for call, size in enumerate(sizes)]
    assert max(end for _, end in packing.packed(blocks)) == sum(sizes)


def test_what_lies_highest_is_tried_first() -> None:
    """Largest first, or those that are alive for long, or where most is, take more."""
    for seed in range(40):
        blocks = drawn(seed)[:40]
        found = max(end for _, end in packing.packed(blocks))
        with mock.patch.object(packing, "TRIES", 1):
            assert found <= (without := max(end for _, end in packing.packed(blocks)))
        if found < without:
            return
    raise AssertionError("nothing came of it")


def test_no_blocks_take_no_memory() -> None:
    assert packing.packed([]) == []


@pytest.fixture
def settings() -> Any:
    before = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    yield lambda one: torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{one}")
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{bool(before)}")


def reserved(planned: Any, step: Any) -> int:
    """What is reserved for a planned module that has been recorded, without gradients."""
    for _ in range(3):
        step(planned)
        planned.zero_grad()
    torch.cuda.empty_cache()
    assert not planned._rockplan.pool._said
    assert not torch._C._cuda_isHistoryEnabled()
    return torch.cuda.memory_reserved()


@ON_CUDA
@pytest.mark.skipif(not stand_in.is_there(), reason="no stand-in: make cuda")
@pytest.mark.parametrize("is_expandable", [False, True])
@pytest.mark.parametrize("budget", ["min", "50%"])
def test_blocks_lie_where_they_are_meant(
    budget: str, is_expandable: bool, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(is_expandable)
    held: list[tuple[int, int]] = []
    real = carving._Carver._cut

    def cut(self: Any, *given: Any) -> None:
        real(self, *given)
        held.extend((place - begin, end - begin) for (begin, end), place in self._held.items())

    monkeypatch.setattr(carving._Carver, "_cut", cut)
    case = large(width=1024, batch=1536)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    options = rockplan.Options(graph=True, time_limit_s=20)
    planned: Any = rockplan.solve(case.model, case.args, budget, options=options)
    found = reserved(planned, case.step) - before
    assert held and len({base for base, _ in held}) == 1, "something lies elsewhere than meant"
    # 32 MiB of cuBLAS, segments of small blocks.
    assert found <= 1.04 * planned.plan.pool_bytes + 40 * MIB
    snapshot = torch.cuda.memory._snapshot()["allocator_settings"]
    assert bool(snapshot["expandable_segments"]) == is_expandable


@ON_CUDA
@pytest.mark.parametrize("seed", range(8))
def test_blocks_of_any_sizes_lie_as_packed(seed: int) -> None:
    device, blocks = torch.device("cuda", 0), drawn(seed)
    stream = torch.cuda.current_stream(device)
    alive: dict[int, int] = {}
    found = []
    with carving._segments_of_one_size(), torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        carver = carving._Carver(blocks, device)
        for call in range(1 + max(block.closes for block in blocks)):
            carver.before()
            for number, block in enumerate(blocks):
                if block.opens == call:
                    place = torch.cuda.caching_allocator_alloc(block.size_bytes, device, stream)
                    found.append(place - carver._places[number][0])
                    alive[number] = place
            for number in [number for number in alive if blocks[number].closes == call]:
                torch.cuda.caching_allocator_delete(alive.pop(number))
        carver.close()
    assert len({*found}) == 1 and len(found) == len(blocks)


@ON_CUDA
@pytest.mark.skipif(not stand_in.is_there(), reason="no stand-in: make cuda")
def test_workspaces_of_products_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    found, real = [], carving._blocks
    monkeypatch.setattr(carving, "_blocks", lambda *given: found.append(real(*given)) or found[-1])
    case = large(width=1024, batch=1536)
    options = rockplan.Options(graph=True, time_limit_s=20)
    reserved(rockplan.solve(case.model, case.args, "min", options=options), case.step)
    largest = max(block.size_bytes for block in found[0])
    workspaces = [block for block in found[0] if block.size_bytes == largest]
    assert largest >= 32 * MIB and len(workspaces) > 24  # a product forward, two backward
    assert all(block.opens == block.closes for block in workspaces)


@ON_CUDA
def test_what_takes_more_is_recorded_again(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(False)
    case, found = large(width=1024, batch=1536), []
    options = rockplan.Options(graph=True, time_limit_s=20)
    for is_placed in (False, True):
        if is_placed:  # all in one place
            monkeypatch.setattr(carving, "packed", lambda of: [(0, b.size_bytes) for b in of])
        else:
            monkeypatch.setattr(carving, "_blocks", lambda *_: [])
        planned: Any = rockplan.solve(case.model, case.args, "min", options=options)
        reserved(planned, case.step)
        pool = torch.cuda.memory_snapshot(planned._rockplan.pool._memory)
        found.append(sum(segment["total_size"] for segment in pool))
        monkeypatch.undo()
    assert 0 < found[1] <= found[0]


@ON_CUDA
def test_other_settings_of_the_allocator_stay(settings: Any) -> None:
    def now() -> tuple[Any, ...]:
        found = torch.cuda.memory._snapshot()["allocator_settings"]
        return found["max_split_size"], found["garbage_collection_threshold"]

    settings("True,max_split_size_mb:512,garbage_collection_threshold:0.5")
    before = now()
    with carving._segments_of_one_size():
        assert not torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
        assert now() == before
    assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    assert now() == before
