"""Stored state: tensors and plain data that the forward has stored in Python objects.

takes: what can be reached after the run, and what it was before. returns: assignments, the data
that each call leaves. guarantees: anything else that the forward stores is refused by name; eager
would have it after the call, a plan would not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from rockplan.errors import RockplanError, StoredByTheFirstCall
from rockplan.graph_builder.tracing.recorder import Recorder
from rockplan.graph_builder.tracing.refusals import NAMED, PUT_INTO_A_DICTIONARY, RUN_ONCE
from rockplan.graph_builder.tracing.value_reads import ValueReader
from rockplan.python_state.contents import copied, data_in, is_plain
from rockplan.python_state.holders import (
    Held,
    Identity,
    Place,
    cached_in,
    identity_of,
    is_function_cache,
    tensors_in,
)
from rockplan.python_state.hooks import computed_attributes
from rockplan.python_state.object_slots import ATTRIBUTES, DEQUE, LIST, SET, Element
from rockplan.python_state.reach import Reached
from rockplan.python_state.snapshot import Changes, Found, Snapshot, holding, is_other_code
from rockplan.values.interface import ABSENT, Assignment


def refuse_kept_arguments(
    reached: Reached, arguments: Iterable[torch.Tensor], registered: Mapping[int, torch.Tensor]
) -> None:
    """Raise CaptureError if code that compares objects by identity can reach one of the tensors
    `arguments`, or a container of the arguments, elsewhere too (`reached`): these would be one
    object in this call, and two in the next. registered: id -> parameter or buffer: they may be
    arguments as well."""
    if not reached.compares_objects:
        return
    for place in reached.also_in_arguments:
        raise _compared(place)
    identities = {id(t) for t in arguments} - registered.keys()
    for held in reached.holders:
        if held.place.is_callers:
            continue
        for key, value in held.elements:
            if isinstance(value, torch.Tensor) and id(value) in identities:
                raise _compared(held.element(key))


def _compared(place: Place) -> RockplanError:
    return NAMED["kept argument"].error(place=place)


def refuse_stored(
    snapshot: Snapshot,
    reached: Reached,
    made: RunTensors,
    another: Callable[[], Reached | None],
) -> None:
    """Raise CaptureError if the run has stored a tensor that the caller would find after the call.
    reached: what the forward can reach after the run; made: recognizes tensors of the run; another:
    returns what can be reached after one more run, None if that fails. It is StoredByTheFirstCall
    if only the first call stores the tensor, which depends on constants only."""
    before = {held.identity: start for held, _, start in _known(snapshot)}
    computed = _computed(reached)
    for one in holding(reached, made.is_ours):
        owner = one.held.identity
        if (owner, one.key) in computed or (owner, None) in computed:
            continue
        if owner not in before or before[owner].get(one.key) is not one.value:
            is_kept = _is_kept(one, made, another)
            refusal = _refusal(one.place, is_kept)
            if is_kept and all(map(made.is_of_constants, tensors_in(one.value))):
                raise StoredByTheFirstCall(str(refusal), module_path=one.place.module)
            raise refusal


def refuse_cached(reached: Reached, made: RunTensors) -> None:
    """Raise CaptureError if a function cache holds a tensor of the run that depends on more than
    constants: eager finds it at the next call, a plan computes it anew."""
    for place, value in reached.objects:
        kept = cached_in(value) if is_function_cache(value) else ()
        for tensor in kept:
            is_ours = isinstance(tensor, torch.Tensor) and made.is_ours(tensor)
            if is_ours and not made.is_of_constants(tensor):
                raise NAMED["kept in a cache"].error(place.module, place=place.text)


def assignments_of(snapshot: Snapshot, changes: Changes) -> tuple[Assignment, ...]:
    """Return the plain data that each call stores in Python objects. changes: (holder, key) of all
    that the run changed. Raises UnsupportedModel if a planned call could not store it."""
    assignments: list[Assignment] = []
    owners = {owner for owner, _ in changes}
    for held, before, start in _known(snapshot):
        if held.identity not in owners:
            continue
        former, current = dict(before), dict(held.elements)
        keys = [k for k in {**start, **current} if (held.identity, k) in changes]
        pairs = ((current.get(k, ABSENT), former.get(k, ABSENT)) for k in keys)
        is_all = held.is_registry or held.kind in (LIST, DEQUE, SET)
        keys = [k for k, pair in zip(keys, pairs, strict=True) if is_all or not _is_opaque(*pair)]
        values = [of.get(k, ABSENT) for k in keys for of in (current, former)]
        can_be_left = not held.is_registry and all(map(_is_plain, values))
        # The last elements of a list go first: positions of others stay as they are.
        gone = [k for k in reversed(keys) if k not in current]
        for key in (*(k for k in keys if k in current), *gone):
            place = held.element(key)
            if place.address is None or not can_be_left:
                raise NAMED["kept change"].error(place.module, who=_who(place), place=place.text)
            assignments.append(Assignment(place.address, copied(current.get(key, ABSENT))))
    return tuple(assignments)


def _known(snapshot: Snapshot) -> Iterable[tuple[Held, list[Element], dict[Any, Any]]]:
    """Yield (holder, what it held before, what it held when the forward began)."""
    starts = map(dict, snapshot.start)
    return zip(snapshot.holders, snapshot.before, starts, strict=True)


def _is_opaque(value: Any, former: Any) -> bool:
    """Return whether `value` can only be compared by identity, and replaces nothing or another such
    object (a function: nothing, or one of the same code)."""
    if is_other_code(value, former):
        return False
    none = (ABSENT, None)
    opaque = [
        not (isinstance(v, torch.Tensor) or any(v is t for t in none)) and data_in(v) is None
        for v in (value, former)
    ]
    return opaque[0] and (opaque[1] or former is ABSENT or former is None)


def _is_plain(value: Any) -> bool:
    """Return whether a value is immutable data, a collection of such data (a call leaves a copy), a
    tensor that existed before the call, or ABSENT."""
    if type(value) in (dict, list, set, deque):
        inner = value.values() if isinstance(value, dict) else value
        return all(map(_is_plain, inner))
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return value is ABSENT or is_tensor or is_plain(value)


def _computed(reached: Reached) -> set[tuple[Identity, Any]]:
    """Return (holder, attribute) of what PyTorch's hooks compute before each call and only they
    read; (holder, None) for all elements of a list."""
    places: set[tuple[Identity, Any]] = set()
    for _, value in reached.objects:
        if isinstance(value, nn.Module):
            names = computed_attributes(value)
            attributes = identity_of(value.__dict__, ATTRIBUTES)
            places |= {(attributes, name) for name in names}
            lists = (value.__dict__.get(name) for name in names)
            places |= {(identity_of(one, LIST), None) for one in lists if isinstance(one, list)}
    return places


@dataclass(frozen=True, slots=True)
class RunTensors:
    """Recognizes tensors of the run. stand_ins: id of a fake tensor -> the real tensor."""

    recorder: Recorder
    reader: ValueReader
    stand_ins: Mapping[int, torch.Tensor]

    def is_ours(self, value: Any) -> bool:
        """Return whether a tensor, or a node of autograd, was made by the run."""
        if isinstance(value, FakeTensor):
            return value.fake_mode is self.recorder.fake_mode
        return not isinstance(value, torch.Tensor)

    def is_of_constants(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor depends on constants, parameters and buffers only."""
        if id(tensor) in self.stand_ins:
            return self.recorder.value(tensor) not in self.reader.inputs
        return not tensor.requires_grad and self.reader.is_of_constants(self.recorder, tensor)


def _who(place: Place) -> str:
    if place.module is None:
        return "the forward"
    return f"in module '{place.module or '(root)'}': the forward"


def _is_kept(entry: Found, made: RunTensors, another: Callable[[], Reached | None]) -> bool:
    """Return whether one more call finds the stored tensor of `entry` and stores nothing else
    there. (A tensor with a gradient would keep the graph of the first call.)"""
    if entry.place.is_callers or any(t.requires_grad for t in tensors_in(entry.value)):
        return False
    reached = another()
    if reached is None:
        return False
    stored_again = {
        (one.held.identity, one.key): one.value for one in holding(reached, made.is_ours)
    }
    return stored_again.get((entry.held.identity, entry.key)) is entry.value


def _refusal(place: Place, is_kept: bool = False) -> RockplanError:
    """Return the error for a tensor stored at `place`, with a remedy. is_kept: later calls use the
    first call's tensor."""
    refusal, facts = NAMED["kept tensor"], {"who": _who(place)}
    facts["place"] = place.text if place.module is not None else str(place)
    if is_kept:
        facts["remedy"] = f"Only the first call does: {RUN_ONCE}. Make tables of all sizes before"
    elif place.is_callers:
        facts["remedy"] = PUT_INTO_A_DICTIONARY[0].upper() + PUT_INTO_A_DICTIONARY[1:]
    elif place.text.removeprefix("self.").isidentifier():
        facts["remedy"] = (
            f"Return it, or update a registered buffer in place ({place.text}.copy_(...))"
        )
    return refusal.error(place.module, **facts)
