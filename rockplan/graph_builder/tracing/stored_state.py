"""Stored state: what the forward has stored somewhere in Python, tensors of its run and plain data.

takes: what can be reached after the run, and what it was before. returns: tables, which depend on
nothing but constants: those can be made for real, and found by the next call; and assignments, the
data that each call leaves. guarantees: anything else that the forward keeps is refused by name;
eager would have it after the call, a plan would not.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import RockplanError
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
    kinds_of,
    replaced,
    tensors_in,
)
from rockplan.python_state.hooks import computed_attributes
from rockplan.python_state.object_slots import ATTRIBUTES, LIST, Element
from rockplan.python_state.reach import Reached
from rockplan.python_state.snapshot import Changes, Found, Snapshot, holding, is_other_code
from rockplan.values.interface import ABSENT, Address, Assignment


@dataclass(slots=True)
class Tables:
    """Real tensors for what the forward has stored. contents: what each holder is to hold, and what
    it holds; assignments: what comes with the first call; essence: what the run did, by
    `essence.of`."""

    contents: list[tuple[Held, list[Element], list[Element]]] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    essence: object = None

    def __bool__(self) -> bool:
        return bool(self.contents)

    def put_in_place(self) -> None:
        for held, elements, _ in self.contents:
            held.write(elements)

    def take_back(self) -> None:
        for held, _, before in self.contents:
            held.write(before)

    @property
    def place(self) -> Place:
        """Where the first of them is."""
        held, elements, before = self.contents[0]
        known = dict(before)
        return held.element(next(k for k, v in elements if known.get(k) is not v))

    def unstable(self) -> RockplanError:
        return _refusal(self.place)

    def another(self) -> RockplanError:
        """Where calls that find the tables do something else than the first one."""
        where = self.place
        return NAMED["another table"].error(where.module, who=_who(where), place=where.text)


def refuse_kept_arguments(
    reached: Reached, arguments: Iterable[torch.Tensor], registered: Mapping[int, torch.Tensor]
) -> None:
    """Raise where a tensor of the caller is also kept where the forward can see it, and compare the
    two: it would be one tensor in this call, and two in the next."""
    if not reached.compares_objects:
        return
    for place in reached.shared:
        raise _compared(place)
    given = {id(t) for t in arguments} - registered.keys()
    for held in reached.holders:
        if held.place.is_callers:
            continue
        for key, value in held.elements:
            if isinstance(value, torch.Tensor) and id(value) in given:
                raise _compared(held.element(key))


def _compared(place: Place) -> RockplanError:
    return NAMED["kept argument"].error(place=place)


def tables_of(
    snapshot: Snapshot,
    reached: Reached,
    recorder: Recorder,
    reader: ValueReader,
    stand_ins: Mapping[int, torch.Tensor],
    another: Callable[[], Reached | None],
) -> Tables:
    """Tables that the run has stored. found: what can be reached after it; stand_ins: identity of
    a fake tensor -> what it stands for; another: what can be reached after one more run, None where
    that fails. Raises UnsupportedModel for other tensors."""
    before = {h.identity: (h, b, dict(s)) for h, b, s in _known(snapshot)}
    computed = _computed(reached)
    made = _RunTensors(recorder, reader, stand_ins)
    tables = Tables()
    stored: dict[Identity, list[Found]] = {}
    for one in holding(reached, made.is_ours):
        owner = one.held.identity
        if (owner, one.key) in computed or (owner, None) in computed:
            continue
        if owner not in before or before[owner][2].get(one.key) is not one.value:
            if made.is_no_table(one):
                raise _refusal(one.place, _is_kept(one, made, another))
            stored.setdefault(owner, []).append(one)
    _refuse_cached(reached, made)
    new = {owner for owner in stored if owner not in before}
    for owner in new:
        held = stored[owner][0].held
        held.write(_with(held.elements, made.of(stored[owner])))
    for owner, (held, elements, start) in before.items():
        real = made.of(stored.get(owner, ()))
        if new:
            real += _leading_to(new, start, held.elements)
        if not _are_there(elements, real):
            wanted = _with(elements, real)
            tables.contents.append((held, wanted, elements))
            keys, known = [key for key, _ in real], dict(elements)
            is_new = held.kind.step == "item" and all(key not in known for key in keys)
            tables.assignments += _assigned(held, keys, wanted, elements, is_new)
    return tables


def no_tables(
    snapshot: Snapshot,
    recorder: Recorder,
    reader: ValueReader,
    stand_ins: Mapping[int, torch.Tensor],
) -> Tables:
    """As `tables_of` a run after which every holder holds what it did: what can be reached is what
    could be."""
    _refuse_cached(snapshot.reached, _RunTensors(recorder, reader, stand_ins))
    return Tables()


def _refuse_cached(reached: Reached, made: _RunTensors) -> None:
    """Raise where a cache of a function has a tensor that is no table: eager would find it at the
    next call, a plan would make it anew."""
    for place, value in reached.objects:
        kept = cached_in(value) if is_function_cache(value) else ()
        for tensor in kept:
            is_ours = isinstance(tensor, torch.Tensor) and made.is_ours(tensor)
            if is_ours and made.real_or_none(tensor) is None:
                raise NAMED["kept in a cache"].error(place.module, place=place.text)


def assignments_of(snapshot: Snapshot, changes: Changes) -> tuple[Assignment, ...]:
    """What each call leaves outside of tensors. Raises UnsupportedModel where a planned call could
    not leave it there."""
    assignments: list[Assignment] = []
    owners = {owner for owner, _ in changes}
    for held, before, start in _known(snapshot):
        if held.identity not in owners:
            continue
        now = held.elements
        known, there = dict(before), dict(now)
        if held.kind.step == "all":
            values = [value for _, value in (*now, *before)]
            keys: list[Any] = [None]
        else:
            keys = [k for k in {**dict(start), **there} if (held.identity, k) in changes]
            pairs = [(there.get(k, ABSENT), known.get(k, ABSENT)) for k in keys]
            data = [held.is_registry or not _is_opaque(*pair) for pair in pairs]
            keys = [*itertools.compress(keys, data)]
            values = [of.get(k, ABSENT) for k in keys for of in (there, known)]
        place = held.place if held.kind.step == "all" else held.element(keys[0] if keys else "")
        is_ours = place.address is not None and not held.is_registry
        if keys and not (is_ours and all(map(_is_plain, values))):
            raise NAMED["kept change"].error(place.module, who=_who(place), place=place.text)
        assignments += _assigned(held, keys, now, before)
    return tuple(assignments)


def _known(snapshot: Snapshot) -> Iterable[tuple[Held, list[Element], list[Element]]]:
    return zip(snapshot.holders, snapshot.before, snapshot.start, strict=True)


def _assigned(
    held: Held,
    keys: Iterable[Any],
    now: list[Element],
    before: list[Element],
    is_overwritten: bool = False,
) -> Iterator[Assignment]:
    """Of elements of a holder, or of all where they are set together."""
    there, known = dict(now), dict(before)
    if held.kind.step == "all":
        if keys:
            nameless: Address = ("holder", held, ())
            kind, root, steps = held.place.address or nameless
            whole: Address = (kind, root, (*steps, ("all", None)))
            content, former = (tuple(copied(v) for _, v in e) for e in (now, before))
            yield Assignment(whole, content, former, is_overwritten)
        return
    for key in keys:
        address = held.element(key).address or ("holder", held, (("element", key),))
        value, former = there.get(key, ABSENT), known.get(key, ABSENT)
        yield Assignment(address, copied(value), copied(former), is_overwritten)


def _is_opaque(value: Any, former: Any) -> bool:
    """Is it an object that is compared by identity alone, in place of another one or of nothing, or
    a function in place of nothing or of the same one?"""
    if is_other_code(value, former):
        return False
    told = (ABSENT, None)
    opaque = [
        not (isinstance(v, torch.Tensor) or any(v is t for t in told)) and data_in(v) is None
        for v in (value, former)
    ]
    return opaque[0] and (opaque[1] or former is ABSENT or former is None)


def _is_plain(value: Any) -> bool:
    """Is it data, or a collection of data, of which a call can leave a copy, or a tensor that was
    there before?"""
    if type(value) in (dict, list, set, deque):
        inner = value.values() if isinstance(value, dict) else value
        return all(map(_is_plain, inner))
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return value is ABSENT or is_tensor or is_plain(value)


def _computed(reached: Reached) -> set[tuple[Identity, Any]]:
    """Where hooks of PyTorch leave weights that they compute before each call, for nobody."""
    places: set[tuple[Identity, Any]] = set()
    for _, value in reached.objects:
        if isinstance(value, nn.Module):
            names = computed_attributes(value)
            attributes = identity_of(value.__dict__, ATTRIBUTES)
            places |= {(attributes, name) for name in names}
            lists = (value.__dict__.get(name) for name in names)
            places |= {(identity_of(one, LIST), None) for one in lists if isinstance(one, list)}
    return places


def _leading_to(owners: set[Identity], start: dict[Any, Any], now: list[Element]) -> list[Element]:
    """New elements through which new holders are reached."""
    new = ((k, v) for k, v in now if start.get(k) is not v and not isinstance(v, nn.Module))
    return [(key, value) for key, value in new if owners & _holders_in(value)]


def _holders_in(value: Any) -> set[Identity]:
    holders: set[Identity] = set()
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, torch.Tensor | type | nn.Module):
            continue
        if isinstance(one, tuple | frozenset):
            pending += one
            continue
        for owner, kind in kinds_of(one):
            identity = identity_of(owner, kind)
            if identity not in holders:
                holders.add(identity)
                pending += [v for _, v in kind.elements(owner)]
    return holders


def _with(elements: list[Element], others: list[Element]) -> list[Element]:
    known = dict(others)
    kept = [(key, known.pop(key, value)) for key, value in elements]
    return [*kept, *known.items()]


def _are_there(elements: list[Element], real: list[Element]) -> bool:
    """Were tensors with the same content there before the run?"""
    there = dict(elements)
    return all(_is_equal(there.get(key), value) for key, value in real)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        kinds = [(t.dtype, t.shape, t.stride(), t.device, t.requires_grad) for t in (one, other)]
        if one is other or kinds[0] != kinds[1]:
            return one is other
        with _disable_current_modes(), torch.no_grad():
            return torch.equal(
                one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
            )
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_is_equal, one, other))
    return one is other or (type(one) is type(other) and data_in(one) == data_in(other) is not None)


@dataclass(frozen=True, slots=True)
class _RunTensors:
    """Tensors of the run, for real where nothing but constants decides them."""

    recorder: Recorder
    reader: ValueReader
    stand_ins: Mapping[int, torch.Tensor]
    known: dict[int, torch.Tensor] = field(default_factory=dict)

    def is_ours(self, value: Any) -> bool:
        """Is it a tensor of the run, or what autograd has made in it?"""
        if isinstance(value, FakeTensor):
            return value.fake_mode is self.recorder.fake_mode
        return not isinstance(value, torch.Tensor)

    def real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not self.is_ours(tensor):
            return None
        if id(tensor) not in self.known:
            real_tensor = self.real_or_none(tensor)
            assert real_tensor is not None
            self.known[id(tensor)] = real_tensor
        return self.known[id(tensor)]

    def real_or_none(self, tensor: Any) -> torch.Tensor | None:
        """None where it depends on more than constants."""
        if not isinstance(tensor, torch.Tensor):
            return None
        stands_for = self.stand_ins.get(id(tensor))
        if stands_for is not None:
            is_input = self.recorder.value(tensor) in self.reader.inputs
            return None if is_input else stands_for
        if tensor.requires_grad:
            return None
        return self.reader.table(self.recorder, tensor)

    def of(self, stored: Iterable[Found]) -> list[Element]:
        """Elements with real tensors."""
        real: Callable[[torch.Tensor], torch.Tensor | None] = self.real
        return [(one.key, replaced(one.value, real)) for one in stored]

    def is_no_table(self, entry: Found) -> bool:
        """Is it not made of constants alone, or what the caller has given, a parameter or a buffer,
        anywhere but in the module?"""
        ours = [t for t in tensors_in(entry.value) if self.is_ours(t)]
        is_none = any(self.real_or_none(tensor) is None for tensor in ours)
        is_weak = isinstance(entry.value, weakref.ref)
        is_given = any(id(tensor) in self.stand_ins for tensor in ours)
        is_elsewhere = is_given and entry.place.address is None
        is_of_others = entry.place.is_callers or entry.held.is_registry
        return is_of_others or is_weak or is_none or is_elsewhere


def _who(place: Place) -> str:
    if place.module is None:
        return "the forward"
    return f"in module '{place.module or '(root)'}': the forward"


def _is_kept(entry: Found, made: _RunTensors, another: Callable[[], Reached | None]) -> bool:
    """Does one more call find what this one has stored, and store nothing? (What has a gradient
    would take the first call's graph along.)"""
    if entry.place.is_callers or any(t.requires_grad for t in tensors_in(entry.value)):
        return False
    reached = another()
    if reached is None:
        return False
    there = {(one.held.identity, one.key): one.value for one in holding(reached, made.is_ours)}
    return there.get((entry.held.identity, entry.key)) is entry.value


def _refusal(place: Place, is_kept: bool = False) -> RockplanError:
    """is_kept: by later calls, of what the first has made."""
    refusal, facts = NAMED["kept tensor"], {"who": _who(place)}
    facts["place"] = place.text if place.module is not None else str(place)
    if is_kept:
        facts["remedy"] = f"Only the first call does: {RUN_ONCE}"
    elif place.is_callers:
        facts["remedy"] = PUT_INTO_A_DICTIONARY[0].upper() + PUT_INTO_A_DICTIONARY[1:]
    elif place.text.removeprefix("self.").isidentifier():
        facts["remedy"] = (
            f"Return it, or update a registered buffer in place ({place.text}.copy_(...))"
        )
    return refusal.error(place.module, **facts)
