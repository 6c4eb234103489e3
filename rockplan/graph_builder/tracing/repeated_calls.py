"""Repeated calls: would the next call do what this one has done? A plan does the same at each.

takes: runs of the forward and the changes that they leave in Python. guarantees: a forward of which
the next call would be another one is refused, with the place that makes it so.
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


def refuse_changes(snapshot: Snapshot, before: Changes, after: Changes) -> None:
    """Raise where every call leaves other data than the one before."""
    for change in _changed(before, after):
        place = snapshot.place_of(change)
        raise _noticed("count", place)


def refuse_another_call(snapshot: Snapshot, first: ForwardRun, second: ForwardRun) -> None:
    """Raise where the first call leaves data that makes the second another one, or has drawn what
    does. Data that is only left there, or set before it is read, makes no difference."""
    if first.done == second.done:
        return
    for change in first.changes:
        place = snapshot.place_of(change)
        raise _noticed("another next call", place)
    for drawn in first.drawn:
        raise host_random.refusal(drawn)


def refuse_cached_changes(snapshot: Snapshot, changes: Changes) -> None:
    """Raise where a cached function may be what changes data: it runs in the first call alone."""
    name = snapshot.grown_cache()
    if name is not None:
        place = snapshot.place_of(next(iter(changes)))
        raise _noticed("cached change", place, function=name)


def refuse_fresh_constants(
    written: list[tuple[torch.Tensor, RecordedCall]], another: Recorder
) -> None:
    """Raise where the second run does not meet the tensors that the first has written to: the
    forward makes them from other data, and a plan would write to the same one at every call."""
    kept = {id(tensor) for _, tensor in another.constants}
    for tensor, call in written:
        if id(tensor) not in kept:
            raise NAMED["fresh constant"].at(call.module, call.source)


def written_constants(recorder: Recorder) -> list[tuple[torch.Tensor, RecordedCall]]:
    """Find constants whose storage a recorded call writes to, each with the first such call."""
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
    """The refusal of this name, to be raised."""
    of = "in the model" if place.module is None else f"in module '{place.module or '(root)'}'"
    return NAMED[name].error(module_path=place.module, of=of, place=place.text, **facts)
