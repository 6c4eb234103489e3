"""The model of the caching allocator beside PyTorch's own, which runs on the stand-in.

    python -m benchmarks.stand_in.run build/stand_in -m benchmarks.stand_in.allocator [--write FILE]

Prints a row of JSON for each way, with and without expandable segments. Random requests are asked
of both, one by one; steps of training a Llama with AdamW are asked of PyTorch, which records what
it was asked for, from the making of the model on, and that is asked of the model. `other`: after
how many requests, or steps, bytes allocated or reserved, now or at most, are not the same.
Addresses of segments are the device's: by them the allocator chooses among free blocks of one size.
`in order`: what the model reserves where it puts one segment after another, which is all that a
prediction can do. `by schedule`: what it makes of a plan's schedule alone, of three steps without
an optimizer.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Hashable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rockplan
from benchmarks import stand_in
from benchmarks.gpu_table import table
from rockplan.fitting.allocator import CachingAllocator, Request, replay
from rockplan.fitting.gpus import gpu
from rockplan.fitting.scheduled import scheduled_changes
from testing import models
from testing.gpu_cases import language, made_on
from testing.models import Case

ALLOC, FREE = "alloc", "free_completed"
ACTIONS = (ALLOC, FREE, "segment_alloc", "segment_free", "segment_unmap")
"""Of entries that PyTorch records, those that matter."""

ENOUGH, FULL = "random requests", "random requests, device full"
STEPS = 3
LLAMA = {
    "layers": 4,
    "width": 512,
    "heads": 8,
    "vocabulary": 8000,
    "batch": 4,
    "length": 512,
}
WAYS: dict[str, tuple[str, bool] | None] = {
    "eager": None,
    "rockplan, 50 %": ("50%", False),
    "rockplan, smallest": ("min", False),
    "rockplan compiled, smallest": ("min", True),
}
PREDICTED = {f"{way}, from its schedule": way for way, budget in WAYS.items() if budget}
ALL_WAYS = (ENOUGH, FULL, *WAYS, *PREDICTED)


class Device:
    """PyTorch's allocator with nothing in it, on a device that has `capacity_bytes` for it."""

    def __init__(self, expandable: bool, capacity_bytes: int | None = None) -> None:
        empty()
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
        self._library = ctypes.CDLL("libcuda.so.1")
        self._others = ctypes.c_void_p()
        if capacity_bytes is not None:
            others_bytes = torch.cuda.mem_get_info()[0] - capacity_bytes
            self._library.cudaMalloc(ctypes.byref(self._others), ctypes.c_size_t(others_bytes))
            assert torch.cuda.mem_get_info()[0] == capacity_bytes

    def close(self) -> None:
        self._library.cudaFree(self._others)


def beside_the_device(expandable: bool, capacity_bytes: int | None) -> CachingAllocator:
    """The model, with segments where the device has put them: it is asked second."""
    model = CachingAllocator(expandable, capacity_bytes, lambda size: new_segment(model))
    return model


def new_segment(model: CachingAllocator) -> int:
    """Where the device has just put a segment that the model does not have."""
    there = {segment["address"] for segment in torch.cuda.memory_snapshot()}
    (found,) = there - model._heads.keys()
    return int(found)


def empty() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    assert held == 0, f"{held} bytes are held"


def held() -> tuple[int, int]:
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


# -- random requests -----------------------------------------------------------------------------


def random_requests(seed: int, number: int) -> Iterator[Request]:
    """Some of a dozen sizes as layers have them, some of any; more and more of them are alive, then
    fewer, again and again."""
    rng = random.Random(seed)
    dozen = [int(2 ** rng.uniform(4, 27)) for _ in range(12)]
    alive: list[int] = []
    for key in range(number):
        share_of_frees = 0.35 if key // 300 % 2 == 0 else 0.65
        if alive and rng.random() < share_of_frees:
            yield Request(alive.pop(rng.randrange(len(alive))), None)
            continue
        alive.append(key)
        is_usual = seed % 2 == 0 or rng.random() < 0.2
        yield Request(key, rng.choice(dozen) if is_usual else int(2 ** rng.uniform(4, 27)))


def random_row(seeds: int, number: int, expandable: bool, is_full: bool) -> dict[str, Any]:
    """is_full: two thirds of what the requests reserve where there is enough."""
    requests = failed = other = retries = segments = 0
    for seed in range(seeds):
        asked = list(random_requests(seed, number))
        capacity_bytes = None
        if is_full:
            capacity_bytes = replay(asked, expandable).reserved_peak_bytes // 3 * 2
        device, live = Device(expandable, capacity_bytes), dict[Hashable, torch.Tensor]()
        model = beside_the_device(expandable, capacity_bytes)
        for request in asked:
            if request.size_bytes is None:
                live.pop(request.key, None)
                model.free(request.key)
            else:
                try:
                    live[request.key] = bytes_on_device(request.size_bytes)
                except torch.OutOfMemoryError:
                    failed += 1
                is_there = model.allocate(request.key, request.size_bytes)
                assert is_there is (request.key in live)
            other += held() != (model.allocated_bytes, model.reserved_bytes)
        usage = model.usage()
        requests, segments = requests + len(asked), segments + usage.segments
        retries += usage.retries
        live.clear()
        device.close()
    return {
        "way": FULL if is_full else ENOUGH,
        "expandable": expandable,
        "requests": requests,
        "segments": segments,
        "retries": retries,
        "failed": failed,
        "other": other,
    }


def bytes_on_device(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


# -- steps ---------------------------------------------------------------------------------------


def trace() -> list[dict[str, Any]]:
    """What the allocator was asked for, and what it asked the device for, since recording began."""
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    return [entry for entry in entries if entry["action"] in ACTIONS]


def replay_trace(model: CachingAllocator, entries: Iterable[dict[str, Any]]) -> None:
    for entry in entries:
        if entry["action"] == ALLOC:
            assert model.allocate(entry["addr"], entry["size"])
        elif entry["action"] == FREE:
            model.free(entry["addr"])
        elif entry["action"] != "segment_alloc":
            # The device has enough: something called torch.cuda.empty_cache().
            model.empty_cache()


def made(budget: tuple[str, bool] | None) -> tuple[Case, nn.Module]:
    case = made_on(lambda: language(models.llama, **LLAMA), torch.device("cuda"))
    if budget is None:
        return case, case.model
    options = rockplan.Options(compile=budget[1], released=case.released, cache=False)
    planned = rockplan.solve(
        case.model, case.args, budget[0], sample_kwargs=case.kwargs, options=options
    )
    return case, planned


def step_row(way: str, expandable: bool) -> dict[str, Any]:
    """The model is made, planned and trained: bytes are compared after each of these."""
    Device(expandable)
    torch.cuda.memory._record_memory_history(max_entries=10**7, context=None)
    torch.cuda.reset_peak_memory_stats()
    ends: list[tuple[int, Bytes]] = []
    for _ in training(WAYS[way]):
        ends.append((len(trace()), real_bytes()))
        torch.cuda.reset_peak_memory_stats()
    entries = trace()
    addresses = iter([e["addr"] for e in entries if e["action"] == "segment_alloc"])
    model = CachingAllocator(expandable, address_of=lambda size: next(addresses))
    following = CachingAllocator(expandable)
    begin = other = 0
    for end, real in ends:
        other += modelled_bytes(model, entries[begin:end]) != real
        in_order = modelled_bytes(following, entries[begin:end])
        begin = end
    _, _, allocated_bytes, reserved_bytes = ends[-1][1]
    return {
        "way": way,
        "expandable": expandable,
        "requests": sum(entry["action"] in (ALLOC, FREE) for entry in entries),
        "segments": model.usage().segments,
        "other": other,
        "allocated_bytes": allocated_bytes,
        "reserved_bytes": reserved_bytes,
        "in_order_bytes": in_order[-1],
    }


Bytes = tuple[int, int, int, int]
"""Allocated and reserved, then the peaks of both since it was asked last."""


def real_bytes() -> Bytes:
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return (*held(), *peaks)


def modelled_bytes(model: CachingAllocator, entries: Iterable[dict[str, Any]]) -> Bytes:
    model.allocated_peak_bytes = model.allocated_bytes
    model.reserved_peak_bytes = model.reserved_bytes
    replay_trace(model, entries)
    now = model.allocated_bytes, model.reserved_bytes
    return (*now, model.allocated_peak_bytes, model.reserved_peak_bytes)


def training(budget: tuple[str, bool] | None) -> Iterator[None]:
    case, module = made(budget)
    optimizer = torch.optim.AdamW(case.model.parameters(), 1e-4)
    yield
    for _ in range(STEPS):
        case.step(module)
        optimizer.step()
        optimizer.zero_grad()
        yield


# -- steps as the schedule has them --------------------------------------------------------------


def predicted_row(way: str, expandable: bool) -> dict[str, Any]:
    """Forward and backward of a plan, three times, with nothing cached before: what the model makes
    of the schedule alone, beside what the device gave. Gradients of the first step stay."""
    Device(expandable)
    case, module = made(WAYS[way])
    plan = rockplan.plan_of(module)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        case.step(module)
    _, _, allocated_bytes, reserved_bytes = real_bytes()
    model = CachingAllocator(expandable)
    resident = (*case.model.parameters(), *case.model.buffers(), *case.kwargs.values())
    for number, tensor in enumerate(resident):
        assert model.allocate(number, tensor.nbytes)
    graph, schedule = plan.graph, plan.schedule
    stays = {str(data): data for data in graph.handed}
    cublas_bytes = gpu(torch.device("cuda")).cublas_bytes
    first = scheduled_changes(graph, schedule, stays, cublas_bytes)
    later = scheduled_changes(graph, schedule, {})
    for change in itertools.chain(first, *[later] * (STEPS - 1)):
        if change.is_free:
            model.free(change.key)
        else:
            assert model.allocate(change.key, change.size_bytes)
    return {
        "way": f"{way}, from its schedule",
        "expandable": expandable,
        "segments": model.usage().segments,
        "allocated_bytes": allocated_bytes,
        "reserved_bytes": reserved_bytes,
        "by_schedule_allocated_bytes": model.allocated_peak_bytes,
        "by_schedule_reserved_bytes": model.reserved_peak_bytes,
    }


# -- each in a process of its own, which begins with nothing allocated ---------------------------


def row_of(way: str, expandable: bool, given: argparse.Namespace) -> dict[str, Any]:
    stand_in.install()
    if way in PREDICTED:
        return predicted_row(PREDICTED[way], expandable)
    if way in WAYS:
        return step_row(way, expandable)
    return random_row(given.seeds, given.requests, expandable, way == FULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--ways", nargs="+", choices=ALL_WAYS, default=ALL_WAYS)
    parser.add_argument("--write", type=Path, help="a table into this file")
    parser.add_argument("--expandable", choices=("True", "False"), help="here, the first way alone")
    given = parser.parse_args()
    if given.expandable:
        print(json.dumps(row_of(given.ways[0], given.expandable == "True", given)))
        return
    rows = []
    for way, expandable in itertools.product(given.ways, (False, True)):
        command = [*sys.argv[1:], "--ways", way, "--expandable", str(expandable)]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.stand_in.allocator", *command],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
        if given.write:
            given.write.write_text(written(rows))


def written(rows: list[dict[str, Any]]) -> str:
    parts = [table([{"task": "allocator", **row} for row in of]) for of in by_kind(rows)]
    names = ("torch", "triton", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    command, *explained = (__doc__ or "").split("\n\n", 2)[1:]
    text = ["# The model of the caching allocator", command, versions, *explained, *parts]
    return "\n\n".join(part.strip("\n") for part in text) + "\n"


def by_kind(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Random requests, steps, schedules: each has columns of its own."""
    return [[*of] for _, of in itertools.groupby(rows, key=lambda row: tuple(row))]


if __name__ == "__main__":
    main()
