"""Repeated calls: whether the next call would do the same as the recorded one, as a plan does.

takes: runs of the forward and the changes that they leave in Python. guarantees: a forward whose
next call would differ is refused, with the place of the cause.
"""

from __future__ import annotations

from typing import Any

import torch

from rockplan.graph_builder.recorded.run import RecordedCall
from rockplan.graph_builder.tracing import host_random
from rockplan.graph_builder.tracing.forward_call import ForwardRun
from rockplan.graph_builder.tracing.recorder import Recorder
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.python_state.holders import Identity, Place
from rockplan.python_state.snapshot import Changes, Snapshot
from rockplan.values.graph import Phase


def refuse_changes(snapshot: Snapshot, before: Changes, after: Changes) -> None:
    """Raise if every call leaves other data than the call before."""
    for change in _changed(before, after):
        place = snapshot.place_of(change)
        raise _noticed("count", place)


def refuse_another_call(snapshot: Snapshot, first: ForwardRun, second: ForwardRun) -> None:
    """Raise CaptureError if the second run differs from the first: the first left data that
    matters, or drew random numbers that do. Data that is only left, or set before it is read, does
    not matter."""
    if first.done == second.done:
        return
    for change in first.changes:
        place = snapshot.place_of(change)
        raise _noticed("another next call", place)
    for drawn in first.drawn:
        raise host_random.refusal(drawn)


def refuse_cached_changes(snapshot: Snapshot, changes: Changes) -> None:
    """Raise if a cached function may make the changes: it would run in the first call only."""
    name = snapshot.grown_cache()
    if name is not None:
        place = snapshot.place_of(next(iter(changes)))
        raise _noticed("cached change", place, function=name)


def refuse_fresh_constants(
    written: list[tuple[torch.Tensor, RecordedCall]], another: Recorder
) -> None:
    """Raise CaptureError if the second run does not meet the tensors that the first has written to:
    the forward makes them from other data at each call, and a plan would write to the same tensor
    each time. written: as `written_constants`; another: recorder of the second run."""
    kept = {id(tensor) for _, tensor in another.constants}
    for tensor, call in written:
        if id(tensor) not in kept:
            is_backward = call.phase is Phase.BACKWARD
            name = "write in backward" if is_backward else "fresh constant"
            raise NAMED[name].at(call.module, call.source)


def written_constants(recorder: Recorder) -> list[tuple[torch.Tensor, RecordedCall]]:
    """Return pairs (constant whose storage a recorded call writes to, the first such call)."""
    written: dict[int, RecordedCall] = {}
    for call in recorder.calls:
        for value in call.writes:
            written.setdefault(recorder.values[value].storage, call)
    storages = ((tensor, recorder.values[value].storage) for value, tensor in recorder.constants)
    return [(tensor, written[storage]) for tensor, storage in storages if storage in written]


def _changed(before: Changes, after: Changes) -> list[tuple[Identity, Any]]:
    return [c for c in {**before, **after} if before.get(c, _NO_CHANGE) != after.get(c, _NO_CHANGE)]


_NO_CHANGE = object()


def _noticed(name: str, place: Place, **facts: Any) -> Any:
    """Return the error of the refusal of this name."""
    of = "in the model" if place.module is None else f"in module '{place.module or '(root)'}'"
    return NAMED[name].error(module_path=place.module, of=of, place=place.text, **facts)
