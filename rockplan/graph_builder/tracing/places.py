"""Places: where in memory the tensors of the caller begin, which most forwards do not ask.

takes: a recording. returns: its values, with offsets in storages of the caller relative to the
first tensor in each: graphs that differ only in that are one graph. guarantees: if the forward, or
an operator, used a place, it stays as it is and becomes a question of the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.rows import ShapeRule
from rockplan.graph_builder.recorded.run import RecordedCall, RecordedValue
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.graph_builder.tracing.recorder import Recorder
from rockplan.graph_builder.tracing.tensor_questions import Questions
from rockplan.python_state.memory import PLACE


def ask_places(recorder: Recorder, questions: Questions) -> None:
    """Make questions of the plan of the places in memory (offset, size of the storage) of the
    caller's tensors that recorded operators depend on."""
    asked: dict[int, set[str]] = defaultdict(set)
    for recorded in recorder.calls:
        for attribute in _asked_by(recorded):
            asked[recorder.values[recorded.reads[0]].storage].add(attribute)
    for stand_in in questions.stand_ins.values():
        questions.ask_place(stand_in, sorted(asked.get(_storage(recorder, stand_in), ())))


def _storage(recorder: Recorder, tensor: torch.Tensor) -> int:
    return recorder.values[recorder.value(tensor)].storage


def _asked_by(recorded: RecordedCall) -> Iterator[str]:
    """Yield what a recorded call depends on of its first argument's place: 'storage_offset' and
    'untyped_storage' for an explicit storage offset, the latter for a storage that is copied."""
    operator = facts.resolve(recorded.call.op)
    arguments = dict(zip(facts.argument_names(operator), recorded.call.args, strict=False))
    if {**arguments, **dict(recorded.call.kwargs)}.get("storage_offset") is not None:
        yield from PLACE
    elif facts.facts_of(operator).shape_rule is ShapeRule.STORAGE_AS_LARGE:
        yield "untyped_storage"


def without_places(recorder: Recorder, questions: Questions) -> tuple[RecordedValue, ...]:
    """Return the recorded values with offsets relative to the first tensor in each storage of the
    caller, except in storages whose place the forward has asked for."""
    values, begins = recorder.values, dict[int, int]()
    for value in (*values[: recorder.given_values], *(values[v] for v, _ in recorder.constants)):
        begin_bytes = value.spec.offset * dtype_of(value.spec).itemsize
        begins[value.storage] = min(begins.get(value.storage, begin_bytes), begin_bytes)
    for stand_in in questions.asked_for_places():
        begins.pop(_storage(recorder, stand_in), None)
    moved = [*values]
    for i, value in enumerate(values):
        if begin_bytes := begins.get(value.storage, 0):
            offset = value.spec.offset - begin_bytes // dtype_of(value.spec).itemsize
            moved[i] = replace(value, spec=replace(value.spec, offset=offset))
    return tuple(moved)
