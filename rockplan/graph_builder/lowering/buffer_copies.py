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
from torch._prims_common import make_contiguous_strides_for

from rockplan.graph_builder.lowering.atomic_units import divided
from rockplan.graph_builder.recorded.run import Capture, RecordedCall, RecordedValue
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.graph_builder.recorded.view import RunView
from rockplan.values.graph import Call, DataKind, Phase, ValueRef

SHARE = 1 / 64
LEAST_BYTES = 1 << 16


def with_copies(capture: Capture) -> Capture:
    """`capture` with copies of the buffers that need them; itself where there are none, where they
    would take too much, or where the forward changes something else together with them."""
    view = capture.view
    if view.changed_outside.isdisjoint(view.storage(v) for _, v in capture.buffers):
        return capture
    buffers = _copied(view)
    copied_bytes = 2 * sum(capture.values[b].storage_bytes for b in buffers)
    most_bytes = max(LEAST_BYTES, SHARE * _forward_bytes(view))
    if not buffers or copied_bytes > most_bytes:
        return capture
    values = list(capture.values)
    waiting = {view.storage(b): b for b in buffers}
    copies: list[tuple[int, int]] = []
    calls: list[RecordedCall] = []
    for recorded in capture.calls:
        touched = view.touched_outside(recorded) & waiting.keys()
        for buffer in map(waiting.pop, sorted(touched)):
            copies.append((buffer, len(values)))
            calls.append(_copying(buffer, len(values), recorded))
            values.append(_doubled(values[buffer], view.next_storage + len(copies)))
        calls.append(recorded)
    return replace(capture, values=tuple(values), calls=tuple(calls), copies=tuple(copies))


def _copying(buffer: int, copy: int, place: RecordedCall) -> RecordedCall:
    """Makes two copies of `buffer`, at the place of another call."""
    call = Call("aten.stack.default", ((ValueRef(buffer), ValueRef(buffer)),), (), (copy,))
    reads = (buffer, buffer)
    return RecordedCall(call, Phase.FORWARD, reads, (), False, place.module, place.source)


def _copied(view: RunView) -> list[int]:
    """Buffers that are changed and of which something is computed that is not only put back; with
    all that is changed together with them."""
    together = networkx.utils.UnionFind(view.changed_outside)
    wanted: set[int] = set()
    for unit in divided(view):
        recorded = [view.calls[p] for p in unit]
        touched = sorted(frozenset[int]().union(*map(view.touched_outside, recorded)))
        together.union(*touched)
        makes = any(not view.kinds[view.storage(v)].resident for r in recorded for v in r.call.made)
        if makes and any(map(view.reads_changed, recorded)):
            wanted.update(touched)
    alone = _alone(view)
    groups = [group for group in together.to_sets() if wanted & group]
    return sorted(alone[s] for group in groups if group <= alone.keys() for s in group)


def _alone(view: RunView) -> dict[int, int]:
    """storage -> the buffer that is all of it, side by side, of those that the backward pass
    leaves as they are."""
    members: dict[int, list[int]] = defaultdict(list)
    for value in view.given:
        members[view.storage(value)].append(value)
    backward = (r for r in view.calls if r.phase is Phase.BACKWARD)
    changed_late = view.storages(v for r in backward for v in r.writes)
    owners: dict[int, int] = {}
    for storage in view.changed_outside - changed_late:
        value, *others = members[storage]
        is_alone = not others and _is_all(view.values[value])
        if is_alone and view.kinds[storage] is DataKind.BUFFER:
            owners[storage] = value
    return owners


def _is_all(value: RecordedValue) -> bool:
    """Of its storage, its elements side by side."""
    spec = value.spec
    return (
        spec.offset == 0
        and spec.stride == make_contiguous_strides_for(spec.shape)
        and math.prod(spec.shape) * dtype_of(spec).itemsize == value.storage_bytes
    )


def _doubled(value: RecordedValue, storage: int) -> RecordedValue:
    """What `torch.stack` makes of it twice."""
    shape = (2, *value.spec.shape)
    spec = replace(value.spec, shape=shape, stride=make_contiguous_strides_for(shape))
    return RecordedValue(spec, storage, 2 * value.storage_bytes)


def _forward_bytes(view: RunView) -> int:
    """What the forward pass makes."""
    sizes = {v.storage: v.storage_bytes for v in view.values}
    made = (s for s, kind in view.kinds.items() if kind is DataKind.ACTIVATION)
    return sum(map(sizes.__getitem__, made))
