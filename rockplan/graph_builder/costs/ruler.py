"""The ruler: how many bytes are alive while a step runs (docs/usage.md, The budget).

takes: a function that runs one step. returns: its peak of live bytes, beyond what is alive when it
starts. guarantees: on CPU every allocation of PyTorch counts with the bytes requested, as the
profiler records it; on CUDA with the bytes that the caching allocator handed out.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile, record_function

from rockplan.errors import InvalidInput
from rockplan.graph_builder.recorded.specs import CUDA_GRANULE_BYTES

# Set before the first profiler session: otherwise each one writes two lines to stderr.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class LiveBytes(NamedTuple):
    """Bytes alive in a step, relative to its start. final_bytes: at its end, below 0 if older
    memory was freed."""

    peak_bytes: int
    final_bytes: int


def peak_live_bytes(
    step: Callable[[], object], warmup: int = 2, *, device: torch.device | str = "cpu"
) -> LiveBytes:
    """Return the bytes alive during `step()` on `device`: at their peak, and at its end.

    `step` runs `warmup` times before, so that the parameters' `.grad` and the caches of operators
    exist already; it should leave nothing behind (drop its results, keep `.grad` storages), then
    `final_bytes` is 0.
    """
    for _ in range(warmup):
        step()
    gc.collect()
    device = torch.device(device)
    return _cuda_peak(step, device) if device.type == "cuda" else _cpu_peak(step)


def profiled() -> profile:
    """A session of PyTorch's profiler that records CPU memory. Raises InvalidInput if a session is
    active already, which a second one would end. (`torch.profiler.profile`, which wraps one, warns
    in torch 2.11 and 2.12.)"""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        raise InvalidInput(
            "memory is measured by the profiler of PyTorch, which records already, and would end "
            "that session; measure outside of it, and call a planned module once on such "
            "arguments, forward and backward, before the session begins"
        )
    return profile(use_kineto=True, profile_memory=True)


def memory_events(session: profile) -> Iterator[tuple[int, int]]:
    """Yield (time in ns, bytes) of every allocation (> 0) and free (< 0) on CPU, in order."""
    events = (e for e in profiler_events(session) if e.name() == "[memory]")
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.device_type() == torch._C._autograd.DeviceType.CPU:
            yield event.start_ns(), event.nbytes()


def profiler_events(session: profile) -> list[Any]:
    """Return the raw events of a profiler session that has ended."""
    assert session.kineto_results is not None
    return list(session.kineto_results.events())


def peak_of(changes: Iterator[int]) -> tuple[int, int]:
    """Return (largest, last) of the running sum of `changes`, which starts at 0."""
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak, live


def _cpu_peak(step: Callable[[], object]) -> LiveBytes:
    with profiled() as session:
        step()
    return LiveBytes(*peak_of(change for _, change in memory_events(session)))


def rise_of(step: Callable[[], object], device: torch.device) -> int:
    """Return how many bytes the peak during `step()`, which ran before, lies above what is
    allocated at its begin. The caching allocator of CUDA may leave a block of more than a MiB
    unsplit, with up to another MiB that was not requested; so bytes requested, in whole granules,
    count there if they are less."""
    if device.type != "cuda":
        return _cpu_peak(step).peak_bytes
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats_as_nested_dict(device)
    step()
    return peak_between(before, torch.cuda.memory_stats_as_nested_dict(device))


def peak_between(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Peak in bytes, above what was allocated at `before`, between two results of
    `torch.cuda.memory_stats_as_nested_dict`; peaks were reset at `before`. Counts as `rise_of`
    does."""

    def rise(statistic: str) -> int:
        return int(after[statistic]["all"]["peak"] - before[statistic]["all"]["current"])

    allocated_bytes = rise("allocated_bytes")
    if not after["requested_bytes"]["all"]["allocated"]:
        return allocated_bytes  # cudaMallocAsync does not count requested bytes
    return min(allocated_bytes, rise("requested_bytes") + rise("allocation") * CUDA_GRANULE_BYTES)


def _cuda_peak(step: Callable[[], object], device: torch.device) -> LiveBytes:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_allocated(device)
    return LiveBytes(torch.cuda.max_memory_allocated(device) - before, after - before)


Mark = Callable[[Any], None]
"""A function that a step calls where a new stretch of it begins, with a label of that stretch."""


class Stretch(NamedTuple):
    """A part of a step, from one mark to the next. mark: label of its beginning, None for the start
    of the step; start_bytes, peak_bytes: alive then and at most, relative to the step's start."""

    mark: Any
    start_bytes: int
    peak_bytes: int


def stretches(step: Callable[[Mark], object], device: torch.device) -> tuple[Stretch, ...]:
    """Return live bytes of one `step`, which marks where its stretches begin. It should have run
    before, and leave nothing behind."""
    gc.collect()
    return _cuda_stretches(step, device) if device.type == "cuda" else _cpu_stretches(step)


def _cpu_stretches(step: Callable[[Mark], object]) -> tuple[Stretch, ...]:
    """In one profiler session; the first stretch has None as its mark."""
    marks: list[Any] = [None]

    def mark(what: Any) -> None:
        with record_function(f"{_MARK}{len(marks)}"):
            marks.append(what)

    with profiled() as session:
        step(mark)
    marked = (e for e in profiler_events(session) if e.name().startswith(_MARK))
    begins = [(e.start_ns(), int(e.name().removeprefix(_MARK))) for e in marked]
    # At equal times a mark sorts before a memory event, since it allocates nothing.
    events = [(t, False, n) for t, n in begins]
    events += [(t, True, size) for t, size in memory_events(session)]
    events.sort(key=lambda event: event[:2])
    live = start = peak = number = 0
    result: list[Stretch] = []
    for _, is_memory, value in events:
        if is_memory:
            live += value
            peak = max(peak, live)
        else:
            result.append(Stretch(marks[number], start, peak))
            start, peak, number = live, live, value
    return (*result, Stretch(marks[number], start, peak))


_MARK = "rockplan mark "


def _cuda_stretches(step: Callable[[Mark], object], device: torch.device) -> tuple[Stretch, ...]:
    # The allocator counts memory when the host requests it: no synchronization is needed.
    before = torch.cuda.memory_allocated(device)
    result: list[Stretch] = []
    begun: tuple[Any, int] = (None, 0)

    def mark(what: Any) -> None:
        nonlocal begun
        peak_bytes = torch.cuda.max_memory_allocated(device) - before
        result.append(Stretch(*begun, peak_bytes))
        torch.cuda.reset_peak_memory_stats(device)
        begun = (what, torch.cuda.memory_allocated(device) - before)

    torch.cuda.reset_peak_memory_stats(device)
    step(mark)
    mark(None)
    return tuple(result)
