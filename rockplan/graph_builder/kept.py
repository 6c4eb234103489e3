"""Kept: tensors of a recorded run that the forward has stored somewhere in Python.

takes: what can be reached after the run, and what it was before. returns: tables, which depend on
nothing but constants: those can be made for real, and found by the next call. guarantees: anything
else that the forward keeps is refused by name; eager would have it after the call, a plan would
not.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.contents import copied, data_in, is_plain
from rockplan.errors import UnsupportedModel
from rockplan.graph_builder.reads import ValueReader
from rockplan.graph_builder.record import Recorder
from rockplan.interface import ABSENT, Assignment, computed_attributes
from rockplan.python_state.holders import Element, kinds_of, replaced, tensors_in
from rockplan.python_state.reach import Held, Place, Reached
from rockplan.python_state.snapshot import Changes, Found, Snapshot, holding


@dataclass(slots=True)
class Tables:
    """Real tensors for what the forward has stored. contents: what each holder is to hold, and what
    it holds; assignments: what calls leave in the module, which gets it by its calls alone."""

    contents: list[tuple[Held, list[Element], list[Element]]] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.contents)

    def put_in_place(self) -> None:
        for held, elements, _ in self.contents:
            held.kind.write(held.owner, elements)

    def take_from_module(self) -> None:
        """What belongs to the module, and not to everybody, comes with its first call."""
        for held, _, before in self.contents:
            if held.place.module is not None:
                held.kind.write(held.owner, before)

    def unstable(self) -> UnsupportedModel:
        held, elements, _ = self.contents[0]
        return _refusal(held.element(elements[-1][0]))


def refuse_kept_arguments(
    found: Reached, arguments: Iterable[torch.Tensor], registered: Mapping[int, torch.Tensor]
) -> None:
    """Raise where a tensor of the caller is also kept where the forward can see it, and compare the
    two: it would be one tensor in this call, and two in the next."""
    if not found.compares_objects:
        return
    given = {id(t) for t in arguments} - registered.keys()
    for held in found.holders:
        if held.place.is_callers:
            continue
        for key, value in held.kind.elements(held.owner):
            if isinstance(value, torch.Tensor) and id(value) in given:
                raise UnsupportedModel(
                    f"an argument of the sample is also kept in {held.element(key)}, and "
                    "something compares objects by `is`, so the "
                    "forward could see that they are one tensor, which a plan would take for "
                    "granted; plan with a clone of it"
                )


def tables_of(
    snapshot: Snapshot,
    found: Reached,
    recorder: Recorder,
    reader: ValueReader,
    stand_ins: Mapping[int, torch.Tensor],
) -> Tables:
    """Tables that the run has stored. found: what can be reached after it; stand_ins: identity of
    a fake tensor -> what it stands for. Raises UnsupportedModel for other tensors."""
    before = {id(h.owner): (h, b, dict(s)) for h, b, s in _known(snapshot)}
    computed = _computed(found)
    made = _Made(recorder, reader, stand_ins)
    tables = Tables()
    stored: dict[int, list[Found]] = {}
    for one in holding(found, made.is_ours):
        owner = id(one.held.owner)
        if (owner, one.key) in computed or (owner, None) in computed:
            continue
        if owner not in before or before[owner][2].get(one.key) is not one.value:
            made.refuse(one)
            stored.setdefault(owner, []).append(one)
    new = {owner for owner in stored if owner not in before}
    for owner in new:
        held = stored[owner][0].held
        held.kind.write(held.owner, _with(held.kind.elements(held.owner), made.of(stored[owner])))
    for owner, (held, elements, start) in before.items():
        real = made.of(stored.get(owner, ()))
        if new:
            real += _leading_to(new, start, held.kind.elements(held.owner))
        if not _are_there(elements, real):
            tables.contents.append((held, _with(elements, real), elements))
            tables.assignments += _assigned(held, real, dict(elements))
    return tables


def assignments_of(snapshot: Snapshot, changes: Changes) -> Iterable[Assignment]:
    """What each call leaves outside of tensors. Raises UnsupportedModel where a planned call could
    not leave it there."""
    for held, before, start in _known(snapshot):
        now = dict(held.kind.elements(held.owner))
        for key in {**dict(start), **now}:
            if (id(held.owner), key) in changes:
                value, former = now.get(key, ABSENT), dict(before).get(key, ABSENT)
                place = held.element(key)
                if _is_opaque(value) and (former is ABSENT or former is None or _is_opaque(former)):
                    continue
                if place.address is None or not (_is_plain(value) and _is_plain(former)):
                    raise UnsupportedModel(
                        f"{_who(place)} changes {place.text}, which a planned run could not do as "
                        "it does; keep it outside of the module, or return it",
                        module_path=place.module,
                    )
                yield Assignment(place.address, copied(value), copied(former))


def _assigned(held: Held, new: list[Element], before: dict[Any, Any]) -> Iterable[Assignment]:
    for key, value in new:
        address = held.element(key).address
        if held.place.module is not None and address is not None:
            yield Assignment(address, value, before.get(key, ABSENT))


def _is_opaque(value: Any) -> bool:
    """Is it a function, or an object that is compared by identity alone?"""
    return value is not ABSENT and value is not None and data_in(value) is None


def _is_plain(value: Any) -> bool:
    """Is it data, or a collection of data, of which a call can leave a copy?"""
    if type(value) in (dict, list, set, deque):
        inner = value.values() if isinstance(value, dict) else value
        return all(map(_is_plain, inner))
    return value is ABSENT or is_plain(value)


def _known(snapshot: Snapshot) -> Iterable[tuple[Held, list[Element], list[Element]]]:
    return zip(snapshot.holders, snapshot.before, snapshot.start, strict=True)


def _computed(found: Reached) -> set[tuple[int, Any]]:
    """Where hooks of PyTorch leave weights that they compute before each call, for nobody."""
    places: set[tuple[int, Any]] = set()
    for _, value in found.objects:
        if isinstance(value, nn.Module):
            names = computed_attributes(value)
            places |= {(id(value.__dict__), name) for name in names}
            lists = (value.__dict__.get(name) for name in names)
            places |= {(id(one), None) for one in lists if isinstance(one, list)}
    return places


def _leading_to(owners: set[int], start: dict[Any, Any], now: list[Element]) -> list[Element]:
    """New elements through which new holders are reached."""
    new = ((k, v) for k, v in now if start.get(k) is not v and not isinstance(v, nn.Module))
    return [(key, value) for key, value in new if owners & _holders_in(value)]


def _holders_in(value: Any) -> set[int]:
    found: set[int] = set()
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, torch.Tensor | type | nn.Module):
            continue
        if isinstance(one, tuple | frozenset):
            pending += one
            continue
        for owner, kind in kinds_of(one):
            if id(owner) not in found:
                found.add(id(owner))
                pending += [v for _, v in kind.elements(owner)]
    return found


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
            return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_is_equal, one, other))
    return one is other or (type(one) is type(other) and bool(one == other))


@dataclass(frozen=True, slots=True)
class _Made:
    """Tensors of the run, for real where nothing but constants decides them."""

    recorder: Recorder
    reader: ValueReader
    stand_ins: Mapping[int, torch.Tensor]
    known: dict[int, torch.Tensor] = field(default_factory=dict)

    def is_ours(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.recorder.fake_mode

    def real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not self.is_ours(tensor):
            return None
        if id(tensor) not in self.known:
            found = self._made(tensor)
            assert found is not None
            self.known[id(tensor)] = found
        return self.known[id(tensor)]

    def _made(self, tensor: torch.Tensor) -> torch.Tensor | None:
        stands_for = self.stand_ins.get(id(tensor))
        if stands_for is not None:
            is_input = self.recorder.value(tensor) in self.reader.inputs
            return None if is_input else stands_for
        if tensor.requires_grad:
            return None
        return self.reader.table(self.recorder, tensor)

    def of(self, stored: Iterable[Found]) -> list[Element]:
        """Elements with real tensors."""
        return [(one.key, replaced(one.value, self.real)) for one in stored]

    def refuse(self, found: Found) -> None:
        """Raise where a tensor is not made of constants alone, or where it is no table: what the
        caller has given, a parameter or a buffer of a module."""
        made = [self._made(t) for t in tensors_in(found.value) if self.is_ours(t)]
        is_weak = isinstance(found.value, weakref.ref)
        is_none = any(tensor is None for tensor in made)
        if found.place.is_callers or found.held.is_registry or is_weak or is_none:
            raise _refusal(found.place)


def _who(place: Place) -> str:
    if place.module is None:
        return "the forward"
    return f"in module '{place.module or '(root)'}': the forward"


def _refusal(place: Place) -> UnsupportedModel:
    remedy = (
        f"Return it, or update a registered buffer in place ({place.text}.copy_(...))"
        if place.text.removeprefix("self.").isidentifier()
        else "Return it, or keep it outside of the module"
    )
    return UnsupportedModel(
        f"{_who(place)} assigns a tensor to {place.text if place.module is not None else place}, "
        f"which a planned run cannot reproduce. {remedy}",
        module_path=place.module,
    )
