"""Copies: buffers as they were before the call, so that its forward can run again.

takes: Capture. returns: a Capture that makes the copies. guarantees: all else stays
as it is; copies take at most `SHARE` of what the forward pass makes, or `LEAST_BYTES`.

A second backward pass, or one from other outputs or strides than planned, runs the forward again
(`runtime.backward_pass`). Where that reads a buffer that it changes (spectral norm, moving averages
that are used), it would read what the first run left. So two copies are made in one tensor before
the first operation that touches the buffer: one stays what it was, and the forward runs again on
the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import networkx
import torch
from torch._prims_common import make_contiguous_strides_for

from rockplan.graph_builder.lowering.atomic_units import (
    AtomicUnits,
    Storages,
    divided,
    reads_mutated,
    touched_outside,
)
from rockplan.graph_builder.recorded.run import Capture, RecordedCall, RecordedValue
from rockplan.values.graph import Call, DataKind, Phase, TensorSpec, ValueRef

SHARE = 1 / 64
LEAST_BYTES = 1 << 16


def with_copies(capture: Capture) -> Capture:
    """`capture` with copies of the buffers that need them; itself where there are none, where they
    would take too much, or where the forward changes something else together with them."""
    owned = {capture.values[v].storage for _, v in capture.buffers}
    if owned.isdisjoint(capture.values[v].storage for c in capture.calls for v in c.writes):
        return capture
    parts = divided(capture)
    buffers = _copied(capture, parts)
    copied_bytes = 2 * sum(capture.values[b].storage_bytes for b in buffers)
    most_bytes = max(LEAST_BYTES, SHARE * _forward_bytes(capture, parts.storages))
    if not buffers or copied_bytes > most_bytes:
        return capture
    values = list(capture.values)
    waiting = {parts.storages.of[b]: b for b in buffers}
    copies: list[tuple[int, int]] = []
    calls: list[RecordedCall] = []
    storage = max(v.storage for v in values) + 1
    for recorded in capture.calls:
        touched = {parts.storages.of[v] for v in (*recorded.reads, *recorded.writes)}
        for buffer in [waiting.pop(s) for s in sorted(touched & waiting.keys())]:
            copies.append((buffer, len(values)))
            calls.append(_copying(buffer, len(values), recorded))
            values.append(_doubled(values[buffer], storage + len(copies)))
        calls.append(recorded)
    return replace(capture, values=tuple(values), calls=tuple(calls), copies=tuple(copies))


def _copying(buffer: int, copy: int, place: RecordedCall) -> RecordedCall:
    """Makes two copies of `buffer`, at the place of another call."""
    call = Call("aten.stack.default", ((ValueRef(buffer), ValueRef(buffer)),), (), (copy,))
    reads = (buffer, buffer)
    return RecordedCall(call, Phase.FORWARD, reads, (), False, place.module, place.source)


def _copied(capture: Capture, parts: AtomicUnits) -> list[int]:
    """Buffers that are changed and of which something is computed that is not only put back; with
    all that is changed together with them."""
    storages = parts.storages
    together = networkx.utils.UnionFind(storages.mutated_outside)
    wanted: set[int] = set()
    for unit in parts.units:
        recorded = [capture.calls[p] for p in unit]
        touched = sorted(set().union(*(touched_outside(r, storages) for r in recorded)))
        together.union(*touched)
        makes = any(
            v is not None and not storages.kind[storages.of[v]].resident
            for r in recorded
            for v in r.call.results
        )
        if makes and any(reads_mutated(r, storages) for r in recorded):
            wanted.update(touched)
    alone = _alone(capture, storages)
    groups = [group for group in together.to_sets() if wanted & group]
    return sorted(alone[s] for group in groups if group <= alone.keys() for s in group)


def _alone(capture: Capture, storages: Storages) -> dict[int, int]:
    """storage -> the buffer that is all of it, side by side, of those that the backward pass
    leaves as they are."""
    named = [v for _, v in (*capture.parameters, *capture.buffers, *capture.inputs)]
    named += [v for v, _ in capture.constants]
    members: dict[int, set[int]] = defaultdict(set)
    for value in named:
        members[storages.of[value]].add(value)
    changed_late = {
        storages.of[v] for r in capture.calls if r.phase is Phase.BACKWARD for v in r.writes
    }
    owners: dict[int, int] = {}
    for storage in storages.mutated_outside - changed_late:
        value = min(members[storage])
        alone = len(members[storage]) == 1 and _is_all(capture.values[value])
        if alone and storages.kind[storage] is DataKind.BUFFER:
            owners[storage] = value
    return owners


def _is_all(value: RecordedValue) -> bool:
    """Of its storage, its elements side by side."""
    spec = value.spec
    return (
        spec.offset == 0
        and spec.stride == make_contiguous_strides_for(spec.shape)
        and math.prod(spec.shape) * _item_bytes(spec) == value.storage_bytes
    )


def _doubled(value: RecordedValue, storage: int) -> RecordedValue:
    """What `torch.stack` makes of it twice."""
    shape = (2, *value.spec.shape)
    spec = replace(value.spec, shape=shape, stride=make_contiguous_strides_for(shape))
    return RecordedValue(spec, storage, 2 * value.storage_bytes)


def _item_bytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype.removeprefix("torch."))
    return dtype.itemsize


def _forward_bytes(capture: Capture, storages: Storages) -> int:
    """What the forward pass makes."""
    made = {
        storages.of[v]: capture.values[v].storage_bytes
        for r in capture.calls
        if r.phase is Phase.FORWARD
        for v in r.call.results
        if v is not None and not storages.kind[storages.of[v]].resident
    }
    return sum(made.values())
