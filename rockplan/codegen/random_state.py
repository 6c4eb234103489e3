"""Replay of random draws: a recomputation sees the generator state of the first execution.

The generator that the user sees is never moved by a replay: `begin` says how to undo it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

Undo = tuple[torch.Generator, torch.Tensor]
Starts = tuple[tuple[torch.Generator, torch.Generator], ...]


def _generator(device: str) -> torch.Generator:
    found = torch.device(device)
    if found.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if found.index is None else found.index
    return torch.cuda.default_generators[index]


def save(device: str) -> torch.Tensor:
    """The state of the default generator of `device`, a CPU byte tensor."""
    return _generator(device).get_state()


def begin(state: torch.Tensor, device: str) -> Undo:
    """Put the generator of `device` into `state`; returns what `end` needs to undo it."""
    generator = _generator(device)
    current = generator.get_state()
    generator.set_state(state)
    return generator, current


def end(undo: Undo) -> None:
    """Put the generator back to where it was before `begin`."""
    generator, current = undo
    generator.set_state(current)


def starts(devices: Iterable[str]) -> Starts:
    """Copies of the default generators of `devices`, which hold no memory of tensors."""
    return tuple((g, g.clone_state()) for g in map(_generator, devices))


@contextlib.contextmanager
def restarted(starts: Starts) -> Iterator[None]:
    """The generators as they were at `starts`, and afterwards as before."""
    before = [(generator, generator.get_state()) for generator, _ in starts]
    try:
        for generator, start in starts:
            generator.set_state(start.get_state())
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def state_bytes(device: torch.device) -> int:
    """Size of one saved state as the budget counts it: on the device that is measured.

    A CUDA generator's state lives in host memory, so it costs nothing there.
    """
    if device.type != "cpu":
        return 0
    return torch.default_generator.get_state().untyped_storage().nbytes()
