"""Versions: changes in place that cannot run with what they change make new storages.

takes: Capture. returns: a Capture in which some calls are the operators without the underscore.
guarantees: not one bit of a result differs; what the caller owns is still changed itself.

The changes of a storage run together with its allocation (`atomic_units`). So all that one of them
reads would have to be made before the first, and be alive with what the others read: all terms of a
sum (`acc += f(x)`), or all that lies between a residual and its sum. Such a change makes a new
version of the storage instead, and what reads the storage from there on reads that. Eager's way
comes back where the old version dies, as it does in eager's order: the new one takes over
(`reinplace`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rockplan.graph_builder.lowering.reinplace import is_dense, out_of_place
from rockplan.graph_builder.recorded.new_calls import NewCalls
from rockplan.graph_builder.recorded.run import Capture, RecordedCall, RecordedValue, tensor_spec
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.graph_builder.recorded.view import RunView
from rockplan.values.graph import Call, Phase, TensorSpec, ValueRef, renamed


def with_versions(capture: Capture, everywhere: bool = False) -> Capture:
    """`capture`, in which changes that cannot run with what they change make new storages.
    everywhere: in which all changes do that can."""
    if not any(recorded.writes for recorded in capture.calls):
        return capture
    rewriting = _Rewriting(capture, everywhere)
    for position in range(len(capture.calls)):
        rewriting.add(position)
    return rewriting.capture()


@dataclass(slots=True)
class _Version:
    """What a storage holds from the call at `begun` on.

    storage: where; whole: the value that is all of it, None for the first version; members: value
    as recorded -> what it is here; inputs: storages that the calls of this version read; is_read:
    other calls read it.
    """

    phase: Phase
    begun: int
    storage: int
    whole: int | None = None
    members: dict[int, int] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    is_read: bool = False


class _Rewriting:
    """One walk over the calls. Storages are named as recorded; `_versions` has the last of each
    that the run makes, `_written` the position of the last call that makes or changes it."""

    def __init__(self, capture: Capture, everywhere: bool) -> None:
        self._capture, self._view = capture, capture.view
        self._everywhere = everywhere
        self._owned = self._view.storages(self._view.given)
        self._unchangeable = _unchangeable(self._view)
        self._writing = NewCalls(self._view)
        self._values, self._calls = self._writing.values, self._writing.calls
        self._storages = self._view.next_storage
        self._versions: dict[int, _Version] = {}
        self._written: dict[int, int] = {}

    def capture(self) -> Capture:
        """What the calls so far make."""
        outputs = tuple(
            o if o.value is None else replace(o, value=self._now(o.value))
            for o in self._capture.outputs
        )
        values, calls = tuple(self._values), tuple(self._calls)
        return replace(self._capture, values=values, calls=calls, outputs=outputs)

    def add(self, position: int) -> None:
        """Of the arguments as they are now; a new version, where it cannot run with the old."""
        recorded = self._view.calls[position]
        read = self._view.storages(recorded.reads)
        call = renamed(recorded.call, self._now, int)
        reads, writes = (tuple(map(self._now, vs)) for vs in (recorded.reads, recorded.writes))
        changing = self._changing(recorded, call, read)
        if changing is not None:
            whole = self._renew(recorded.writes[0], recorded.phase)
            call, writes = replace(changing, results=(whole,)), ()
        else:
            call = replace(call, results=self._results_of(recorded))
        if not self._view.is_view(position):
            self._note(recorded, read)
        self._calls.append(replace(recorded, call=call, reads=reads, writes=writes))

    def _note(self, recorded: RecordedCall, read: frozenset[int]) -> None:
        """Which versions the next call makes, changes and reads."""
        made = self._view.storages((*recorded.call.made, *recorded.writes))
        for storage in made & self._versions.keys():
            self._versions[storage].inputs |= read & self._versions.keys() - {storage}
            self._written[storage] = len(self._calls)
        for storage in (read - made) & self._versions.keys():
            self._versions[storage].is_read = True

    def _changing(self, recorded: RecordedCall, call: Call, read: frozenset[int]) -> Call | None:
        """The operator that makes a new version of what `recorded` changes; None where it may as
        well run with the old version, or where no operator makes the same bits."""
        op = out_of_place(call.op)
        if op is None or len(recorded.writes) != 1 or recorded.call.results != recorded.writes:
            return None
        (changed,) = recorded.writes
        value = self._view.values[changed]
        version = self._versions.get(value.storage)
        if version is None or version.phase is not recorded.phase:
            return None
        if value.storage in self._unchangeable or not _is_whole(value):
            return None
        is_late = version.inputs and self._is_late(version, read - {value.storage})
        if not (self._everywhere or version.is_read or is_late):
            return None
        made = replace(call, op=op)
        return made if tensor_spec(self._writing.made(made)) == value.spec else None

    def _is_late(self, version: _Version, storages: Iterable[int]) -> bool:
        """True if one of `storages` is made after the version."""
        return any(self._written.get(s, -1) > version.begun for s in storages)

    # -- values ----------------------------------------------------------------------------

    def _renew(self, changed: int, phase: Phase) -> int:
        """Begin a version of which the value that is all of it is returned."""
        value = replace(self._view.values[changed], storage=self._storages)
        self._storages += 1
        whole = self._new(value)
        version = _Version(phase, len(self._calls), value.storage, whole)
        self._versions[self._view.values[changed].storage] = version
        return whole

    def _new(self, value: RecordedValue) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _results_of(self, recorded: RecordedCall) -> tuple[int | None, ...]:
        """Of a call that makes no version of what it changes: arguments, and tensors that are met
        for the first time, in a storage of their own or in the last version of another."""
        for value in recorded.call.made:
            storage = self._view.storage(value)
            if value in recorded.reads or storage in self._owned:
                continue
            version = self._versions.setdefault(
                storage, _Version(recorded.phase, len(self._calls), storage)
            )
            if version.whole is not None:
                self._values[value] = replace(self._view.values[value], storage=version.storage)
                version.members[value] = value
        return tuple(None if r is None else self._now(r) for r in recorded.call.results)

    def _now(self, value: int) -> int:
        """What `value` is in the last version of its storage."""
        version = self._versions.get(self._view.storage(value))
        if version is None or version.whole is None:
            return value
        if value not in version.members:
            spec = self._view.spec(value)
            is_whole = spec == self._values[version.whole].spec
            version.members[value] = version.whole if is_whole else self._derived(version, spec)
        return version.members[value]

    def _derived(self, version: _Version, spec: TensorSpec) -> int:
        """A tensor like `spec` in the storage of the version."""
        assert version.whole is not None
        last = self._calls[-1]
        whole = self._values[version.whole]
        view = self._new(replace(whole, spec=spec))
        args = (ValueRef(version.whole), spec.shape, spec.stride, spec.offset)
        call = Call("aten.as_strided.default", args, (), (view,))
        self._calls.append(
            replace(last, call=call, reads=(version.whole,), writes=(), random=False)
        )
        return view


def _unchangeable(view: RunView) -> set[int]:
    """Storages that hold numbers of several kinds, of which views cannot be told by strides; and
    gradients that are handed over: which of them autograd sums is told by the calls."""
    unchangeable = {view.storage(g) for _, g in view.gradients if g is not None}
    kinds: dict[int, str] = {}
    for value in view.values:
        spec = value.spec
        plain = kinds.setdefault(value.storage, spec.dtype) == spec.dtype
        if not plain or spec.is_conj or spec.is_neg:
            unchangeable.add(value.storage)
    return unchangeable


def _is_whole(value: RecordedValue) -> bool:
    """True for a tensor that is all of its storage."""
    is_all = math.prod(value.spec.shape) * dtype_of(value.spec).itemsize == value.storage_bytes
    return is_all and is_dense(value.spec)
