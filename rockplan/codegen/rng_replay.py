"""Replay of random draws: a recomputation sees the generator state of the first execution.

A replay does not move the generator that the user sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from rockplan.errors import StalePlan

Starts = tuple[tuple[torch.Generator, torch.Generator], ...]


def generator_of(device: str) -> torch.Generator:
    """Return the default generator of `device`."""
    parsed = torch.device(device)
    if parsed.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if parsed.index is None else parsed.index
    return torch.cuda.default_generators[index]


def cuda_devices(tensors: Iterable[object]) -> list[int]:
    """Return the indices of the CUDA devices of those `tensors` that are on one."""
    return sorted({t.device.index for t in tensors if isinstance(t, torch.Tensor) and t.is_cuda})


def is_capturing() -> bool:
    """Return whether a CUDA graph is captured: generator states cannot be read or set."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def save(device: str) -> torch.Tensor:
    """Return the state of the default generator of `device`, a CPU byte tensor.

    Raises StalePlan while a CUDA graph is captured.
    """
    if is_capturing():
        raise StalePlan(
            "this plan runs random draws again, which cannot be captured in a CUDA graph: PyTorch "
            "lets nobody read the state of a generator meanwhile. Plan with a larger budget, or "
            "without dropout, or keep what it draws, e.g. Options(keep=('*dropout*',))"
        )
    return generator_of(device).get_state()


def starts(devices: Iterable[str]) -> Starts:
    """Return copies of the default generators of `devices`, which hold no memory of tensors; none
    while a CUDA graph is captured: its forward cannot run a second time from the same state."""
    if is_capturing():
        return ()
    return tuple((g, g.clone_state()) for g in map(generator_of, devices))


@contextlib.contextmanager
def restarted(starts: Starts) -> Iterator[None]:
    """While active, each generator of `starts`, (generator, a copy of it from an earlier time), is
    in the state of its copy; afterwards in its own again."""
    before = [(generator, generator.get_state()) for generator, _ in starts]
    try:
        for generator, start in starts:
            generator.set_state(start.get_state())
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def state_bytes(device: torch.device) -> int:
    """Return the bytes that one saved generator state takes on `device`: 0 unless that is the CPU,
    since the state of a CUDA generator is in host memory."""
    if device.type != "cpu":
        return 0
    return torch.default_generator.get_state().untyped_storage().nbytes()
