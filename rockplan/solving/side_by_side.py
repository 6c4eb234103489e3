"""Side-by-side measurements: interleaved in one run, medians, one thread."""

from __future__ import annotations

import functools
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rockplan.errors import InvalidInput
from rockplan.graph_builder.tracing.outputs import backward_starts, likely_starts
from rockplan.python_state import trees
from rockplan.python_state.autocast import OFF, under_autocast
from rockplan.solving.loss import Loss


def machine(device: torch.device | str | None = None) -> str:
    """Return a line of text that names processor or GPU, torch and threads: where a figure was
    measured. device: None for CUDA if there is one."""
    if torch.cuda.is_available() and torch.device(device or "cuda").type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return (
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s), "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def interleaved_seconds(
    steps: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 2,
    *,
    device: torch.device | str | None = None,
) -> dict[str, list[float]]:
    """Run each of `steps` `repeats` times, in turns, so that a busy spell hits all alike. Returns
    name -> seconds of each run: user CPU time, or CUDA time by events. Each runs `warmup` times
    before. device: on which the steps compute; None: CUDA if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    clock = functools.partial(_cuda_seconds, device) if device.type == "cuda" else _cpu_seconds
    for _ in range(warmup):
        for step in steps.values():
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            seconds[name].append(clock(step))
    return seconds


def _cpu_seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def _cuda_seconds(device: torch.device, step: Callable[[], object]) -> float:
    """Run `step` once and return the seconds between two CUDA events around it."""
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
    step()
    with torch.cuda.device(device):
        end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def median_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median over rounds of time / reference time of the same round."""
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def step_of(
    module: Callable[..., Any],
    *,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None,
    incoming: dict[int, torch.Tensor],
    differentiated: Sequence[int] | None = None,
    released: Sequence[int] = (),
) -> None:
    """Run a forward and a backward of `module`, with `loss` of the result; gradients are added to
    `.grad`. Autocast, if the caller is under it, ends with the forward, and so do its casts of
    weights. loss: None for backward from the leaves `differentiated`, or those that a plan assumes.
    incoming: their gradients by position; the first step fills it with random ones, so that making
    them is not part of later peaks. released: leaves that are let go before the backward; without
    a loss all are. Raises InvalidInput for leaves that there are not."""
    result = module(*args, **kwargs)
    leaves, spec = trees.tree_flatten(result)
    if not {*released} <= {*range(len(leaves))}:
        raise InvalidInput(f"released is {released}, but the result has {len(leaves)} leaves")
    if loss is not None:
        roots, gradients = [loss(result)], None
        leaves = [leaf for i, leaf in enumerate(leaves) if i not in released]
    else:
        starts: Iterable[int] = incoming or likely_starts(leaves, spec)
        if differentiated is not None:
            starts = backward_starts(leaves, spec, dict.fromkeys(differentiated))
        for position in () if incoming else starts:
            incoming[position] = torch.rand_like(leaves[position]).to(leaves[position].dtype)
        roots, gradients = [leaves[position] for position in incoming], [*incoming.values()]
        del leaves
    del result
    torch.clear_autocast_cache()
    with under_autocast(OFF):
        torch.autograd.backward(roots, gradients)
    # Gradients of scalars are made anew by each backward pass; others are the caller's, and stay.
    if all(gradient.dim() == 0 for gradient in incoming.values()):
        incoming.clear()


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters or buffers, the CPU if it has none."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((t.device for t in tensors), torch.device("cpu"))
