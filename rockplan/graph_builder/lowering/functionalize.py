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
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rockplan.graph_builder.lowering.reinplace import is_dense, out_of_place
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.recorded.evaluate import substitute
from rockplan.graph_builder.recorded.results import Results
from rockplan.graph_builder.recorded.run import Capture, RecordedCall, RecordedValue, tensor_spec
from rockplan.values.graph import Call, Phase, TensorSpec, ValueRef


def with_versions(capture: Capture, everywhere: bool = False) -> Capture:
    """`capture`, in which changes that cannot run with what they change make new storages.
    everywhere: in which all changes do that can."""
    if not any(recorded.writes for recorded in capture.calls):
        return capture
    rewriting = _Rewriting(capture, everywhere)
    for recorded in capture.calls:
        rewriting.add(recorded)
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
        self._capture = capture
        self._everywhere = everywhere
        self._recorded = capture.values
        self._owned = _owned(capture)
        self._unchangeable = _unchangeable(capture)
        self._results = Results(FakeTensorMode())
        self._storages = 1 + max(v.storage for v in capture.values)
        self._values = list(capture.values)
        self._calls: list[RecordedCall] = []
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

    def add(self, recorded: RecordedCall) -> None:
        """Of the arguments as they are now; a new version, where it cannot run with the old."""
        read = self._storages_of(recorded.reads)
        call = self._renamed(recorded.call)
        reads, writes = (tuple(map(self._now, vs)) for vs in (recorded.reads, recorded.writes))
        changing = self._changing(recorded, call, read)
        if changing is not None:
            whole = self._renew(recorded.writes[0], recorded.phase)
            call, writes = replace(changing, results=(whole,)), ()
        else:
            call = replace(call, results=self._results_of(recorded))
        self._note(recorded, read)
        self._calls.append(replace(recorded, call=call, reads=reads, writes=writes))

    def _note(self, recorded: RecordedCall, read: set[int]) -> None:
        """Which versions the next call makes, changes and reads; views read nothing."""
        results = recorded.call.made
        made = self._storages_of((*results, *recorded.writes))
        if not recorded.writes and made and made <= read:
            return
        for storage in made & self._versions.keys():
            self._versions[storage].inputs |= read & self._versions.keys() - {storage}
            self._written[storage] = len(self._calls)
        for storage in (read - made) & self._versions.keys():
            self._versions[storage].is_read = True

    def _changing(self, recorded: RecordedCall, call: Call, read: set[int]) -> Call | None:
        """The operator that makes a new version of what `recorded` changes; None where it may as
        well run with the old version, or where no operator makes the same bits."""
        op = out_of_place(call.op)
        if op is None or len(recorded.writes) != 1 or recorded.call.results != recorded.writes:
            return None
        (changed,) = recorded.writes
        value = self._recorded[changed]
        version = self._versions.get(value.storage)
        if version is None or version.phase is not recorded.phase:
            return None
        if value.storage in self._unchangeable or not _is_whole(value):
            return None
        is_late = version.inputs and self._is_late(version, read - {value.storage})
        if not (self._everywhere or version.is_read or is_late):
            return None
        made = replace(call, op=op)
        return made if self._made_by(made) == value.spec else None

    def _is_late(self, version: _Version, storages: Iterable[int]) -> bool:
        """True if one of `storages` is made after the version."""
        return any(self._written.get(s, -1) > version.begun for s in storages)

    def _made_by(self, call: Call) -> TensorSpec:
        """What the operator makes of arguments such as these."""
        fakes = self._results.fake_mode

        def fake(index: int) -> torch.Tensor:
            spec = self._values[index].spec
            dtype: torch.dtype = getattr(torch, spec.dtype.removeprefix("torch."))
            with fakes:
                return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=spec.device)

        args = tuple(substitute(a, fake) for a in call.args)
        kwargs = {name: substitute(a, fake) for name, a in call.kwargs}
        return tensor_spec(self._results.of(facts.resolve(call.op), args, kwargs))

    # -- values ----------------------------------------------------------------------------

    def _storages_of(self, values: Iterable[int]) -> set[int]:
        return {self._recorded[v].storage for v in values}

    def _renew(self, changed: int, phase: Phase) -> int:
        """Begin a version of which the value that is all of it is returned."""
        value = replace(self._recorded[changed], storage=self._storages)
        self._storages += 1
        whole = self._new(value)
        version = _Version(phase, len(self._calls), value.storage, whole)
        self._versions[self._recorded[changed].storage] = version
        return whole

    def _new(self, value: RecordedValue) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _results_of(self, recorded: RecordedCall) -> tuple[int | None, ...]:
        """Of a call that makes no version of what it changes: arguments, and tensors that are met
        for the first time, in a storage of their own or in the last version of another."""
        results = recorded.call.made
        for value in results:
            storage = self._recorded[value].storage
            if value in recorded.reads or storage in self._owned:
                continue
            version = self._versions.setdefault(
                storage, _Version(recorded.phase, len(self._calls), storage)
            )
            if version.whole is not None:
                self._values[value] = replace(self._recorded[value], storage=version.storage)
                version.members[value] = value
        return tuple(None if r is None else self._now(r) for r in recorded.call.results)

    def _now(self, value: int) -> int:
        """What `value` is in the last version of its storage."""
        version = self._versions.get(self._recorded[value].storage)
        if version is None or version.whole is None:
            return value
        if value not in version.members:
            spec = self._recorded[value].spec
            is_whole = spec == self._values[version.whole].spec
            version.members[value] = version.whole if is_whole else self._view(version, spec)
        return version.members[value]

    def _view(self, version: _Version, spec: TensorSpec) -> int:
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

    def _renamed(self, call: Call) -> Call:
        def now(argument: Any) -> Any:
            if isinstance(argument, ValueRef):
                return ValueRef(self._now(argument.index))
            if isinstance(argument, tuple):
                return tuple(map(now, argument))
            return argument

        kwargs = tuple((name, now(a)) for name, a in call.kwargs)
        return replace(call, args=now(call.args), kwargs=kwargs)


def _owned(capture: Capture) -> set[int]:
    """Storages of the caller's."""
    named = [v for _, v in (*capture.parameters, *capture.buffers, *capture.inputs)]
    named += [v for v, _ in capture.constants]
    named += [o.tangent for o in capture.outputs if o.tangent is not None]
    return {capture.values[v].storage for v in named}


def _unchangeable(capture: Capture) -> set[int]:
    """Storages that hold numbers of several kinds, of which views cannot be told by strides; and
    gradients that are handed over: which of them autograd sums is told by the calls."""
    unchangeable = {capture.values[g].storage for _, g in capture.gradients if g is not None}
    kinds: dict[int, str] = {}
    for value in capture.values:
        spec = value.spec
        plain = kinds.setdefault(value.storage, spec.dtype) == spec.dtype
        if not plain or spec.is_conj or spec.is_neg:
            unchangeable.add(value.storage)
    return unchangeable


def _is_whole(value: RecordedValue) -> bool:
    """True for a tensor that is all of its storage."""
    dtype: torch.dtype = getattr(torch, value.spec.dtype.removeprefix("torch."))
    is_all = math.prod(value.spec.shape) * dtype.itemsize == value.storage_bytes
    return is_all and is_dense(value.spec)
