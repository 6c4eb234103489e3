"""Cancelled casts: a cast up and straight down again is the tensor that it began with.

takes: Capture. returns: a Capture without them. guarantees: not one bit of a result differs.
Under autocast, adapters (LoRA) cast their input to the dtype of their weights, and their products
cast it back: without this pass a copy of it is kept for the backward pass beside the tensor itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from rockplan.graph_builder.recorded.run import Capture, RunView
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.values.graph import renamed

_CAST = "aten._to_copy.default"


def without_cancelled_casts(capture: Capture) -> Capture:
    """Return `capture` in which what reads the end of two casts that cancel reads their start."""
    run = capture.view
    started = {
        recorded.call.made[0]: recorded.reads[0]
        for position, recorded in enumerate(capture.calls)
        if recorded.call.op == _CAST and run.is_plain(position)
    }
    starts = {
        end: start
        for end, between in started.items()
        if (start := started.get(between)) is not None and _cancel(run, start, between, end)
    }
    if not starts:
        return capture
    for end, start in starts.items():  # the start may be the end of two others
        starts[end] = starts.get(start, start)
    return read_in_place_of(capture, starts)


def read_in_place_of(capture: Capture, others: Mapping[int, int]) -> Capture:
    """Return `capture` without the calls that make keys of `others`; what read them reads their
    values, which have the same specs."""
    run = capture.view
    moved = {run.storage(value): run.storage(other) for value, other in others.items()}
    values = tuple(replace(v, storage=moved.get(v.storage, v.storage)) for v in capture.values)
    calls = tuple(
        replace(
            recorded,
            call=renamed(recorded.call, lambda value: others.get(value, value), int),
            reads=tuple(others.get(value, value) for value in recorded.reads),
        )
        for recorded in capture.calls
        if others.keys().isdisjoint(recorded.call.made)
    )
    return replace(capture, values=values, calls=calls)


def _cancel(run: RunView, start: int, between: int, end: int) -> bool:
    """True if every number of `start` is one of the dtype of `between`, and `end` is `start` in
    memory of its own, which nobody else gets."""
    first, middle, last = map(run.spec, (start, between, end))
    of_start, of_end = run.values[start], run.values[end]
    is_alike = first == last and of_start.storage_bytes == of_end.storage_bytes
    if not is_alike or of_end.storage in run.wanted:
        return False
    if not (dtype_of(middle).is_floating_point and dtype_of(first).is_floating_point):
        return False
    wide, narrow = torch.finfo(dtype_of(middle)), torch.finfo(dtype_of(first))
    least = [of.smallest_normal * of.eps for of in (wide, narrow)]
    return wide.max >= narrow.max and wide.eps <= narrow.eps and least[0] <= least[1]
