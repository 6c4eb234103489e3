"""Essence: what a recorded forward does, whoever has made its constants.

takes: a recorder after a forward, and the outputs. returns: a value that equals that of another
forward that does the same: it has the calls that depend on what the caller gives, and contents in
place of tensors that constants alone decide. A forward that makes a table, and one that finds it,
have the same essence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.graph_builder.recorded import evaluate
from rockplan.graph_builder.recorded.run import RecordedCall
from rockplan.graph_builder.tracing.recorder import Recorder
from rockplan.python_state.contents import data_in
from rockplan.values.graph import Phase, ValueRef, with_each_ref

Essence = tuple[Any, ...]


def of(recorder: Recorder, outputs: Sequence[Any]) -> Essence:
    """outputs: leaves of the result."""
    reading = _Essence(recorder)
    calls = [essential for call in recorder.calls if (essential := reading.call(call)) is not None]
    results = [
        reading.value(recorder.value(o)) if isinstance(o, torch.Tensor) else data_in(o)
        for o in outputs
    ]
    return (*calls, results)


class _Essence:
    """known: real tensors of what constants alone decide; numbers: of other values."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known = {
            v: t
            for v, t in recorder.constants
            if recorder.values[v].storage not in _written(recorder)
        }
        self._numbers = {v: v for v in range(recorder.given_values)}

    def call(self, recorded: RecordedCall) -> Any:
        """None of one that constants alone decide."""
        if recorded.phase is not Phase.FORWARD:
            return None
        call = recorded.call
        reads = {*recorded.reads, *recorded.writes}
        if recorded.is_repeatable and reads <= self._known.keys():
            self._known.update(evaluate.run([call], self._known))
            return None
        written = {self._recorder.values[v].storage for v in recorded.writes}
        for value in [v for v in self._known if self._recorder.values[v].storage in written]:
            del self._known[value]
        arguments = with_each_ref((*call.args, *(v for _, v in call.kwargs)), self.value)
        for result in call.made:
            self._numbers.setdefault(result, len(self._numbers))
        return call.op, arguments, [name for name, _ in call.kwargs], recorded.random

    def value(self, value: int) -> Any:
        if value in self._known:
            return _content(self._known[value])
        return ValueRef(self._numbers.setdefault(value, len(self._numbers)))


def _written(recorder: Recorder) -> set[int]:
    return {recorder.values[v].storage for call in recorder.calls for v in call.writes}


def _content(tensor: torch.Tensor) -> Any:
    with _disable_current_modes(), torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        content = plain.view(torch.uint8).cpu().numpy().tobytes()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return digest, str(tensor.dtype), tuple(tensor.shape), tensor.stride(), str(tensor.device)
