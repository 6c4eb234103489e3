"""Copies: buffers as they were before the call, so that its forward can run again.

takes: Capture. returns: a Capture that makes the copies. guarantees: everything else stays as it
is; copies take at most `SHARE` of the bytes that the forward pass makes, or `LEAST_BYTES`.
A second backward pass, or one from other outputs or strides than planned, runs the forward again
(`runtime.backward_pass`). If the forward reads a buffer that it changes (spectral norm, moving
averages that are used), it would then read the changed content. So two copies are made in one
tensor before the first operation that touches the buffer: one is never changed, and the repeated
forward works on the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import networkx
from torch._prims_common import make_contiguous_strides_for

from rockplan.graph_builder.lowering.atomic_units import divided, needed_calls
from rockplan.graph_builder.recorded.run import Capture, RecordedCall, RecordedValue, RunView
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.values.graph import Call, DataKind, Phase, ValueRef

SHARE = 1 / 64
LEAST_BYTES = 1 << 16


def with_copies(capture: Capture) -> Capture:
    """Return `capture` in which each buffer that the forward reads and changes is copied twice
    before the first change (one copy to keep, one to run on), so that the forward can run again.
    Unchanged if no buffer needs one, if copies would take more than SHARE of what the forward
    makes, or if other storages are changed together with them."""
    view = capture.view
    if view.changed_outside.isdisjoint(view.storage(v) for _, v in capture.buffers):
        return capture
    buffers = _buffers_to_copy(view)
    copied_bytes = 2 * sum(capture.values[b].storage_bytes for b in buffers)
    sizes = {v.storage: v.storage_bytes for v in view.values}
    made = (s for s, kind in view.kinds.items() if kind is DataKind.ACTIVATION)
    most_bytes = max(LEAST_BYTES, SHARE * sum(sizes[s] for s in made))
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
            both = (ValueRef(buffer), ValueRef(buffer))
            call = Call("aten.stack.default", (both,), (), (len(values),))
            place = recorded.module, recorded.source
            calls.append(RecordedCall(call, Phase.FORWARD, (buffer, buffer), (), False, *place))
            values.append(_doubled(values[buffer], view.next_storage + len(copies)))
        calls.append(recorded)
    return replace(capture, values=tuple(values), calls=tuple(calls), copies=tuple(copies))


def _buffers_to_copy(view: RunView) -> list[int]:
    """Those that the forward changes and from which it computes results, with all that are changed
    in the same unit of calls. A group in which one cannot be copied is left out."""
    together = networkx.utils.UnionFind(view.changed_outside)
    wanted: set[int] = set()
    for unit in divided(view, needed_calls(view)):
        recorded = [view.calls[p] for p in unit]
        touched = sorted(frozenset[int]().union(*map(view.touched_outside, recorded)))
        together.union(*touched)
        makes = any(not view.kinds[view.storage(v)].resident for r in recorded for v in r.call.made)
        if makes and any(map(view.reads_changed, recorded)):
            wanted.update(touched)
    alone = _copyable_storages(view)
    groups = [group for group in together.to_sets() if wanted & group]
    return sorted(alone[s] for group in groups if group <= alone.keys() for s in group)


def _copyable_storages(view: RunView) -> dict[int, int]:
    """Return storage -> buffer (value), for the changed storages that can be copied: one contiguous
    buffer fills it, nothing else of the caller's is in it, and the backward does not change it."""
    members: dict[int, list[int]] = defaultdict(list)
    for value in view.given:
        members[view.storage(value)].append(value)
    backward = (r for r in view.calls if r.phase is Phase.BACKWARD)
    changed_late = view.storages(v for r in backward for v in r.writes)
    owners: dict[int, int] = {}
    for storage in view.changed_outside - changed_late:
        value, *others = members[storage]
        of, spec = view.values[value], view.spec(value)
        is_whole = math.prod(spec.shape) * dtype_of(spec).itemsize == of.storage_bytes
        is_whole = is_whole and not spec.offset and not others
        is_dense = spec.stride == make_contiguous_strides_for(spec.shape)
        if is_whole and is_dense and view.kinds[storage] is DataKind.BUFFER:
            owners[storage] = value
    return owners


def _doubled(value: RecordedValue, storage: int) -> RecordedValue:
    shape = (2, *value.spec.shape)
    spec = replace(value.spec, shape=shape, stride=make_contiguous_strides_for(shape))
    return RecordedValue(spec, storage, 2 * value.storage_bytes)
