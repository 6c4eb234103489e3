"""Paging from a CUDA device: streams, events, pinned memory. Copies are late by sleeping before
each of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import rockplan
from benchmarks import stand_in
from rockplan.errors import HostMemoryError, StalePlan
from rockplan.paging import pages, pinned
from rockplan.paging.arenas import pool_of
from rockplan.paging.pages import Pages, measured_link
from rockplan.paging.pinned import PinnedArena
from rockplan.runtime.planned_state import latest_of
from testing.models import Case, gpt2, llama
from testing.training import QUICK, solve_case, train_side_by_side, twin
from tests.cuda import ON_CUDA, captured, deterministic  # noqa: F401
from tests.paging import POISON, page

pytestmark = ON_CUDA
ON_A_DEVICE = pytest.mark.skipif(stand_in.is_there(), reason="the stand-in computes nothing")

CYCLES = 3_000_000
"""Of a device's clock: some milliseconds, longer than a step of these models."""


@contextmanager
def late_and_poisoned() -> Iterator[None]:
    """Copies begin late; until they are done there is POISON where they end."""
    begin_out, begin_in = PinnedArena.begin_out, PinnedArena.begin_in
    new_storage = pages.new_storage

    def out(self: PinnedArena, offset_bytes: int, storage: torch.UntypedStorage) -> Any:
        torch.cuda.synchronize()  # who reads these pages has read them
        self._page(offset_bytes, storage).fill_(POISON)
        _sleep(self._streams[0])
        return begin_out(self, offset_bytes, storage)

    def into(self: PinnedArena, offset_bytes: int, storage: torch.UntypedStorage) -> Any:
        _sleep(self._streams[1])
        return begin_in(self, offset_bytes, storage)

    def poison(size_bytes: int, device: torch.device | str) -> torch.UntypedStorage:
        made = new_storage(size_bytes, device)
        pinned._bytes_of(made).fill_(POISON)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PinnedArena, "begin_out", out)
        patch.setattr(PinnedArena, "begin_in", into)
        patch.setattr(pages, "new_storage", poison)
        yield


def _sleep(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    return {"llama": llama, "gpt2": gpt2}[name](length=32).to("cuda")


def peak_of(case: Case, module: Any) -> int:
    peak_bytes, left_bytes = rockplan.peak_live_bytes(lambda: case.step(module), device="cuda")
    assert left_bytes == 0
    return peak_bytes


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_bits_are_eagers_with_late_copies(name: str, budget: str) -> None:
    case = case_of(name)
    eager = twin(case)
    planned: Any = solve_case(case, budget, options=QUICK)
    beside_bytes = planned.plan.peak_bytes - peak_of(case, planned)
    kept_bytes = planned.plan.peak_bytes
    page(planned)
    assert planned.plan.peak_bytes < kept_bytes
    train_side_by_side(case, planned, eager, 2)
    with late_and_poisoned():
        train_side_by_side(case, planned, eager, 2)
        difference_bytes = planned.plan.peak_bytes - peak_of(case, planned)
    assert min(0, beside_bytes) <= difference_bytes <= max(0, beside_bytes)


@ON_A_DEVICE
@pytest.mark.parametrize("wait", ["paged_out", "paged_in"])
def test_without_waits_bits_differ(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("llama")
    eager = twin(case)
    planned = page(solve_case(case, "80%", options=QUICK))
    with late_and_poisoned():
        monkeypatch.setattr(Pages, wait, lambda self, name: None)
        with pytest.raises(AssertionError, match="differs in"):
            train_side_by_side(case, planned, eager, 1)
    torch.cuda.synchronize()


def test_copies_have_streams_and_compute_waits_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of("llama")
    planned = page(solve_case(case, "100%", options=QUICK))
    case.step(planned)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    waited: list[int] = []
    wait = torch.cuda.Stream.wait_event

    def waits_for(self: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        waited.append(self.cuda_stream)
        wait(self, event)

    with monkeypatch.context() as patch, torch.cuda.stream(side):
        patch.setattr(torch.cuda.Stream, "wait_event", waits_for)
        case.step(planned)
    torch.cuda.current_stream().wait_stream(side)
    code = latest_of(planned).executable.code
    waits = code.source.count("frame.paged_out(") + code.source.count("frame.paged_in(")
    begins = code.source.count("frame.page_out(") + code.source.count("frame.page_in(")
    assert waited.count(side.cuda_stream) == waits == begins
    out, into = pinned._streams("cuda:0")
    assert {*waited} == {side.cuda_stream, out.cuda_stream, into.cuda_stream}


def test_pinned_memory_is_registered_once_and_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("gpt2")
    runtime = pinned._runtime()
    asked: list[int] = []

    class Runtime:
        cudaHostUnregister = staticmethod(runtime.cudaHostUnregister)

        @staticmethod
        def cudaHostRegister(address: int, size_bytes: int, flags: int) -> Any:
            asked.append(size_bytes)
            return runtime.cudaHostRegister(address, size_bytes, flags)

    monkeypatch.setattr(pinned, "_runtime", lambda: Runtime)
    gc.collect()
    planned = page(solve_case(case, "100%", options=QUICK))
    for _ in range(3):
        case.step(planned)
    layout = latest_of(planned).executable.layout
    assert layout is not None
    assert asked in ([layout.size_bytes], [])  # or what another test has left was enough
    lease = layout.pool.take(layout.size_bytes)
    assert isinstance(lease.arena, PinnedArena)
    assert lease.arena._bytes.is_pinned() or stand_in.is_there()


def test_what_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        @staticmethod
        def cudaHostRegister(*arguments: int) -> int:
            return 2

    with pytest.raises(HostMemoryError, match=r"(?s)bytes left.*Options\(host=\.\.\.\)"):
        pool_of("cuda:0").take(1 << 60)
    monkeypatch.setattr(pinned, "_runtime", lambda: Full)
    with pytest.raises(HostMemoryError, match=r"CUDA error 2.*ulimit -l"):
        PinnedArena(1 << 20, "cuda:0")


def test_graphs_of_cuda_are_refused() -> None:
    case = case_of("llama")
    planned = page(solve_case(case, "100%", options=QUICK))
    with pytest.raises(StalePlan, match="CUDA graph"):
        captured(case, planned)


def test_errors_in_the_midst_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("gpt2")
    eager = twin(case)
    planned = page(solve_case(case, "100%", options=QUICK))
    for method in ("page_out", "paged_out", "page_in", "paged_in"):
        original, calls = getattr(Pages, method), iter(range(6))

        def raises(self: Pages, *given: Any, calls: Any = calls, original: Any = original) -> Any:
            if next(calls, None) == 5:
                raise InterruptedError
            return original(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(Pages, method, raises)
            with pytest.raises(InterruptedError):
                case.step(planned)
        planned.zero_grad()
    with late_and_poisoned():
        train_side_by_side(case, planned, eager, 1)
    gc.collect()
    layout = latest_of(planned).executable.layout
    assert layout is not None and not layout.pool._used


def test_the_link_is_measured() -> None:
    assert measured_link("cuda:0", page_bytes=1 << 20) > 1e6
