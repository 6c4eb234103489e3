"""Versions: changes in place that should not run in one node with what they change make new
storages.

takes: Capture. returns: a Capture in which some calls are the out-of-place operators. guarantees:
not one bit of a result differs; storages of the caller are still changed in place.
All changes of a storage run in one node with its allocation (`atomic_units`). So everything that
any of them reads would have to be alive when that node starts: all terms of a sum (`acc += f(x)`),
or everything between a residual and its sum. Such a change makes a new version of the storage
instead, and later calls read the new version. Where the old version dies, as it does in eager's
order, the new one takes over its storage (`reinplace`), which is eager's way again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from rockplan.graph_builder.lowering.reinplace import is_dense, out_of_place
from rockplan.graph_builder.recorded.new_calls import NewCalls
from rockplan.graph_builder.recorded.run import (
    Capture,
    RecordedCall,
    RecordedValue,
    RunView,
    tensor_spec,
)
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.values.graph import Call, Phase, TensorSpec, ValueRef, renamed


def with_versions(capture: Capture, everywhere: bool = False) -> Capture:
    """Return `capture` in which changes in place that should not run in one node with what they
    change are replaced by operators that make new storages. everywhere: all that can be."""
    if not any(recorded.writes for recorded in capture.calls):
        return capture
    rewriting = _Rewriting(capture, everywhere)
    for position in range(len(capture.calls)):
        rewriting.add(position)
    return rewriting.capture()


@dataclass(slots=True)
class _Version:
    """The content of a recorded storage from the call at position `begun` on.

    storage: where it is in the new run; base: the value that covers all of it, None for the first
    version, which no operator of ours made; members: value as recorded -> value in this version;
    inputs: storages that the calls which make this version read; is_read: other calls read it.
    """

    phase: Phase
    begun: int
    storage: int
    base: int | None = None
    members: dict[int, int] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    is_read: bool = False


class _Rewriting:
    """One walk over the calls. Storages are named as recorded. `_versions` has the latest version
    of each storage that the run makes, `_written` the position of its last maker or writer."""

    def __init__(self, capture: Capture, everywhere: bool) -> None:
        self._capture, self._run = capture, capture.view
        self._everywhere = everywhere
        self._callers = self._run.storages(self._run.given)
        self._unchangeable = _unchangeable(self._run)
        self._writing = NewCalls(self._run)
        self._values, self._calls = self._writing.values, self._writing.calls
        self._storages = self._run.next_storage
        self._versions: dict[int, _Version] = {}
        self._written: dict[int, int] = {}

    def capture(self) -> Capture:
        """As rewritten so far; results of the forward are the latest versions of theirs."""
        outputs = tuple(
            o if o.value is None else replace(o, value=self._latest(o.value))
            for o in self._capture.outputs
        )
        values, calls = tuple(self._values), tuple(self._calls)
        return replace(self._capture, values=values, calls=calls, outputs=outputs)

    def add(self, position: int) -> None:
        """Append the call at `position` of the recorded run, on the latest versions of its
        arguments."""
        recorded = self._run.calls[position]
        read = self._run.storages(recorded.reads)
        call = renamed(recorded.call, self._latest, int)
        reads, writes = (tuple(map(self._latest, vs)) for vs in (recorded.reads, recorded.writes))
        changing = self._changing(recorded, call, read)
        if changing is not None:
            base = self._renew(recorded.writes[0], recorded.phase)
            call, writes = replace(changing, results=(base,)), ()
        else:
            call = replace(call, results=self._results_of(recorded))
        if not self._run.is_view(position):
            self._note_versions(recorded, read)
        ends = (self._versions[s].storage if s in self._versions else s for s in recorded.ends)
        made = replace(recorded, call=call, reads=reads, writes=writes, ends=tuple(ends))
        self._calls.append(replace(made, was_in_place=changing is not None))

    def _note_versions(self, recorded: RecordedCall, read: frozenset[int]) -> None:
        # For a call that is appended next. read: the storages that it reads, as recorded.
        made = self._run.storages((*recorded.call.made, *recorded.writes))
        for storage in made & self._versions.keys():
            self._versions[storage].inputs |= read & self._versions.keys() - {storage}
            self._written[storage] = len(self._calls)
        for storage in (read - made) & self._versions.keys():
            self._versions[storage].is_read = True

    def _changing(self, recorded: RecordedCall, call: Call, read: frozenset[int]) -> Call | None:
        """Return the out-of-place call that makes what `recorded` changes in place, without its
        result. None if the change may as well run in one node with the old version, or if no
        operator makes the same bits. call: `recorded` on the latest versions; read: storages that
        it reads."""
        op = out_of_place(call.op)
        if op is None or len(recorded.writes) != 1 or recorded.call.results != recorded.writes:
            return None
        (changed,) = recorded.writes
        value = self._run.values[changed]
        version = self._versions.get(value.storage)
        if version is None or version.phase is not recorded.phase:
            return None
        if value.storage in self._unchangeable or not _is_whole(value):
            return None
        is_late = version.inputs and any(
            self._written.get(s, -1) > version.begun for s in read - {value.storage}
        )
        if not (self._everywhere or version.is_read or is_late):
            return None
        functional = replace(call, op=op)
        return functional if tensor_spec(self._writing.made(functional)) == value.spec else None

    # -- values ----------------------------------------------------------------------------

    def _renew(self, changed: int, phase: Phase) -> int:
        value = replace(self._run.values[changed], storage=self._storages)
        self._storages += 1
        base = self._new(value)
        version = _Version(phase, len(self._calls), value.storage, base)
        self._versions[self._run.values[changed].storage] = version
        return base

    def _new(self, value: RecordedValue) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _results_of(self, recorded: RecordedCall) -> tuple[int | None, ...]:
        """Return the results (values, None for unused ones) of a call that makes no new version by
        a change in place. Each is one of its arguments, or a new tensor, either in a new storage
        (whose first version begins here) or a view into the latest version of a storage."""
        for value in recorded.call.made:
            storage = self._run.storage(value)
            if value in recorded.reads or storage in self._callers:
                continue
            version = self._versions.setdefault(
                storage, _Version(recorded.phase, len(self._calls), storage)
            )
            if version.base is not None:
                self._values[value] = replace(self._run.values[value], storage=version.storage)
                version.members[value] = value
        return tuple(None if r is None else self._latest(r) for r in recorded.call.results)

    def _latest(self, value: int) -> int:
        """Return the value that has the present content of the recorded `value`: in the latest
        version of its storage, to which a call that derives the view is appended if there is none
        yet; `value` itself if its storage has no new version."""
        version = self._versions.get(self._run.storage(value))
        if version is None or version.base is None:
            return value
        if value not in version.members:
            spec = self._run.spec(value)
            is_whole = spec == self._values[version.base].spec
            version.members[value] = version.base if is_whole else self._derived(version, spec)
        return version.members[value]

    def _derived(self, version: _Version, spec: TensorSpec) -> int:
        assert version.base is not None
        last = self._calls[-1]
        base = self._values[version.base]
        view = self._new(replace(base, spec=spec))
        args = (ValueRef(version.base), spec.shape, spec.stride, spec.offset)
        call = Call("aten.as_strided.default", args, (), (view,))
        self._calls.append(replace(last, call=call, reads=(version.base,), writes=(), random=False))
        return view


def _unchangeable(view: RunView) -> set[int]:
    """Return the storages in which changes in place stay: those viewed in several dtypes or as
    conjugates, since strides do not describe such views; and gradients handed to autograd, since
    the recorded calls tell which of them autograd sums."""
    unchangeable = {view.storage(g) for _, g in view.gradients if g is not None}
    kinds: dict[int, str] = {}
    for value in view.values:
        spec = value.spec
        plain = kinds.setdefault(value.storage, spec.dtype) == spec.dtype
        if not plain or spec.is_conj or spec.is_neg:
            unchangeable.add(value.storage)
    return unchangeable


def _is_whole(value: RecordedValue) -> bool:
    is_all = math.prod(value.spec.shape) * dtype_of(value.spec).itemsize == value.storage_bytes
    return is_all and is_dense(value.spec)
