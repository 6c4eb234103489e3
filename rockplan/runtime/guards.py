"""Signatures: everything that a captured run depended on, compared before each call.

A call is described by `call_key` (hashable: arguments and global switches), the module by
`module_signature` (identity of submodules, their attributes, hooks, parameters, and the contents of
lists, dictionaries and configuration objects among the attributes).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import nn

from rockplan.python_state import trees, writes
from rockplan.python_state.autocast import cast_is_kept, is_cast_once
from rockplan.python_state.contents import Contents, contents_of, described, is_same
from rockplan.python_state.distributed import PLAIN as PLAIN_TENSORS
from rockplan.python_state.distributed import is_distributed_kind, local_of, strides_of
from rockplan.python_state.hooks import computed_attributes
from rockplan.python_state.memory import inner_tensors, memory_of, parts_of
from rockplan.python_state.surroundings import Surroundings
from rockplan.python_state.writes import Item, Sources, UntilWritten, are_one
from rockplan.runtime.switches import switches_now
from rockplan.values.interface import EVERYTHING, AttributesRead

# Attributes of every nn.Module, which are compared each in its own way.
_REGISTRIES = frozenset(nn.Module().__dict__) | {"_rockplan"}

_TENSORS = ("_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class _ModuleEntry:
    """One submodule. kind: its class; names, values: its attributes that count; read: names of its
    own attributes that count, None for all; tensors: (registry, name, tensor, key of the
    tensor); inner: (frozen wrapper among these, the tensors in it)."""

    module: nn.Module
    kind: type
    attributes: dict[str, Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    read: frozenset[str] | None
    children: tuple[tuple[str, nn.Module | None], ...]
    tensors: tuple[tuple[str, str, torch.Tensor | None, tuple[Any, ...]], ...]
    inner: tuple[tuple[torch.Tensor, list[torch.Tensor]], ...]

    def hold(self) -> bool:
        """True if nothing has changed but what describes tensors."""
        if not _attributes_hold(self):
            return False
        attributes = self.module.__dict__
        if any(attributes[kind].get(name) is not t for kind, name, t, _ in self.tensors):
            return False
        now = (zip(parts_of([("", whole)]), parts, strict=True) for whole, parts in self.inner)
        if any(part is not before for parts in now for (_, part), before in parts):
            return False
        return len(attributes["_parameters"]) + len(attributes["_buffers"]) == len(self.tensors)

    def sources(self) -> Sources:
        attributes = self.module.__dict__
        if self.inner or not are_one([*map(attributes.get, self.names)], self.values):
            return writes.UNTOLD
        tables = [writes.items(attributes[name]) for name in (*_TENSORS, "_modules")]
        return *writes.attributes(self.module), *itertools.chain(*tables)


@dataclass(frozen=True, slots=True)
class _Hooks:
    """Registries of hooks of submodules, and how many hooks each held. (Those of the root run
    around its forward, and do not count.)"""

    registries: tuple[Any, ...]
    counts: list[int]

    def hold(self) -> bool:
        return [*map(len, self.registries)] == self.counts

    def sources(self) -> Sources:
        ways = (writes.FILLED if r else writes.EMPTY for r in self.registries)
        return tuple(itertools.chain(*zip(ways, self.registries, strict=True)))


_GUARDS: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


class _Descriptions:
    """What describes tensors. Those of plain classes are compared by a guard of Dynamo, all at
    once, with what they were when they were last compared one by one."""

    def __init__(self, entries: Iterable[_ModuleEntry]) -> None:
        keys = {id(t): (t, key) for entry in entries for *_, t, key in entry.tensors}
        self._keys = [(t, key) for t, key in keys.values() if t is not None]
        self._plain = [t for t, _ in self._keys if _is_plain(t)]
        self._others = [(t, key) for t, key in self._keys if not _is_plain(t)]
        self._guard: Any = None

    def hold(self) -> bool:
        if self._guard is not None and self._guard.check(*self._plain):
            return all(_parameter_key(t) == key for t, key in self._others)
        if any(_parameter_key(t) != key for t, key in self._keys):
            return False
        if _GUARDS is not None:
            self._guard = _GUARDS(*self._plain, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return True


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and type(tensor) in PLAIN_TENSORS


@dataclass(frozen=True, slots=True)
class ModuleSignature:
    """A module tree at the time of planning. contents: of containers and configurations among the
    attributes; surroundings: user state beside the module; layout: classes of parameters and
    buffers, and which are the same tensor or share memory; reads: the attributes that count."""

    entries: tuple[_ModuleEntry, ...]
    layout: tuple[Any, ...]
    hooks: _Hooks
    contents: tuple[Contents, ...]
    surroundings: Surroundings
    reads: AttributesRead
    _descriptions: _Descriptions = field(init=False)
    _until_written: UntilWritten = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_descriptions", _Descriptions(self.entries))
        object.__setattr__(self, "_until_written", UntilWritten((*self.entries, *self.others)))

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleSignature:
        own = (getattr(self, one.name) for one in fields(self) if one.init)
        return ModuleSignature(*copy.deepcopy([*own], memo))

    @property
    def others(self) -> tuple[Item, ...]:
        """What is compared beside the entries."""
        return self.hooks, *self.contents, *self.surroundings.held

    def holds(self) -> bool:
        """True if nothing that `module_signature` recorded has changed since."""
        return self._until_written.hold() and self._descriptions.hold()


def module_signature(
    module: nn.Module,
    forward: Callable[..., Any],
    constants: tuple[torch.Tensor, ...],
    reads: AttributesRead = EVERYTHING,
) -> ModuleSignature:
    """Record everything in and beside the module tree that decides which operations its forward
    executes. forward: the module's unplanned forward; constants: tensors that its plan reads and
    that are neither parameters nor buffers; reads: attributes that its forward reads."""
    entries = module_entries(module, reads.of_modules)
    own = ((n, v) for entry in entries for n, v in zip(entry.names, entry.values, strict=True))
    containers = {id(value): value for name, value in own if name not in _REGISTRIES}
    contents = (contents_of(v, constants, reads.of_configurations) for v in containers.values())
    registered = [e.module.__dict__.get(h) for e in entries[1:] for h in _HOOKS]
    hooks = tuple(h for h in registered if h is not None)
    return ModuleSignature(
        entries,
        _layout([tensor for entry in entries for _, _, tensor, _ in entry.tensors]),
        _Hooks(hooks, [*map(len, hooks)]),
        tuple(c for c in contents if c is not None),
        Surroundings.of(module, forward),
        reads,
    )


def _layout(tensors: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """Return for each tensor (class, first position of the same tensor, first position of the same
    storage, is_conj, is_neg, is_cast_once); for None and for tensors that are not strided the
    identity."""
    same: dict[int, int] = {}
    memory: dict[tuple[int, ...], int] = {}
    parts: list[Any] = []
    for position, tensor in enumerate(tensors):
        if tensor is None or tensor.layout is not torch.strided:
            parts.append(id(tensor))
            continue
        kind = torch.Tensor if type(tensor) is nn.Parameter else type(tensor)
        first = same.setdefault(id(tensor), position)
        shared = memory.setdefault(memory_of(tensor), position)
        lazy = tensor.is_conj(), tensor.is_neg()
        parts.append((kind, first, shared, *lazy, is_cast_once(tensor)))
    return tuple(parts)


def module_entries(
    module: nn.Module, read: frozenset[str] | None = None
) -> tuple[_ModuleEntry, ...]:
    """Record each submodule. read: names of the attributes that count, None for all."""
    return tuple(_module_entry(submodule, read) for submodule in module.modules())


def _module_entry(module: nn.Module, read: frozenset[str] | None) -> _ModuleEntry:
    attributes = _attributes(module)
    counting = _counting(attributes, read)
    return _ModuleEntry(
        module=module,
        kind=type(module),
        attributes=attributes,
        names=tuple(counting),
        values=tuple(counting.values()),
        read=read,
        children=tuple(module._modules.items()),
        tensors=tuple(
            (kind, name, t, _key_of(t))
            for kind in _TENSORS
            for name, t in module.__dict__[kind].items()
        ),
        inner=tuple(
            (t, [part for _, part in parts_of([("", t)])])
            for kind in _TENSORS
            for t in module.__dict__[kind].values()
            if inner_tensors(t)
        ),
    )


def holds_for_others(signature: ModuleSignature) -> bool:
    """True if nothing has changed but that parameters and buffers are other tensors of the same
    description, for which the plan is right, and nothing beside the module holds one."""
    if signature.surroundings.has_registered:
        return False
    tensors: list[torch.Tensor | None] = []
    for entry in signature.entries:
        if not _attributes_hold(entry):
            return False
        now = [(k, n, t) for k in _TENSORS for n, t in entry.module.__dict__[k].items()]
        if len(now) != len(entry.tensors):
            return False
        for (*place, tensor), (kind, name, _, key) in zip(now, entry.tensors, strict=True):
            if place != [kind, name] or _key_of(tensor) != key:
                return False
            tensors.append(tensor)
    return _layout(tensors) == signature.layout and all(one.hold() for one in signature.others)


@contextlib.contextmanager
def with_tensors_of(signature: ModuleSignature) -> Iterator[None]:
    """While active, the module tree has the parameters and buffers that `signature` recorded;
    afterwards its own again."""
    registries = [entry.module.__dict__[kind] for entry in signature.entries for kind in _TENSORS]
    before = [dict(registry) for registry in registries]
    for registry in registries:
        registry.clear()
    for entry in signature.entries:
        for kind, name, tensor, _ in entry.tensors:
            entry.module.__dict__[kind][name] = tensor
    try:
        yield
    finally:
        for registry, tensors in zip(registries, before, strict=True):
            registry.clear()
            registry.update(tensors)


def changed_attribute(signature: ModuleSignature) -> str | None:
    """Return the dotted name of the first attribute of the module tree that has changed since
    `signature`, or the place of user state beside it; None if nothing has."""
    root = signature.entries[0].module
    paths = {id(m): f"{path}." if path else "" for path, m in root.named_modules()}
    changed = {id(c.container) for c in signature.contents if not c.hold()}
    for entry in signature.entries:
        now = _counting(_attributes(entry.module), entry.read)
        for name in sorted({*entry.names, *now} - _REGISTRIES):
            before = entry.attributes.get(name)
            if id(before) in changed or not is_same(before, now.get(name)):
                return paths.get(id(entry.module), "") + name
    place = signature.surroundings.changed()
    return None if place is None else str(place)


def _attributes(module: nn.Module) -> dict[str, Any]:
    computed = computed_attributes(module) if module._forward_pre_hooks else ()
    return {k: v for k, v in module.__dict__.items() if k not in computed}


def _counting(attributes: dict[str, Any], read: frozenset[str] | None) -> dict[str, Any]:
    if read is None:
        return attributes
    return {k: v for k, v in attributes.items() if k in read or k in _REGISTRIES}


def _attributes_hold(entry: _ModuleEntry) -> bool:
    if has_other_class(entry):
        return False
    now = _counting(_attributes(entry.module), entry.read)
    before = dict(zip(entry.names, entry.values, strict=True))
    are_same = (is_same(now[name], before[name]) for name in before)
    if now.keys() != before.keys() or not all(are_same):
        return False
    return tuple(entry.module._modules.items()) == entry.children


def has_other_class(entry: _ModuleEntry) -> bool:
    """True if the class of a submodule was replaced. (The class of a planned root may be derived
    from ours: fully_shard does that.)"""
    return type(entry.module) is not entry.kind and "_rockplan" not in entry.attributes


def _key_of(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    return () if tensor is None else _parameter_key(tensor)


def _parameter_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what describes a tensor: (requires_grad, dtype, shape, device, strides or None for
    layouts that have none)."""
    return (
        tensor.requires_grad,
        tensor.dtype,
        tensor.shape,
        tensor.device,
        strides_of(tensor) if tensor.layout is torch.strided else None,
        *_inside(tensor),
    )


def _inside(tensor: Any) -> tuple[Any, ...]:
    """Describe what a frozen wrapper has: what its class says of it, and each tensor; () for
    others."""
    inner = inner_tensors(tensor)
    parts = ((name, *_parameter_key(part)) for name, part in inner.items())
    return (described(tensor.__tensor_flatten__()[1]), *parts) if inner else ()


PLAIN = (int, float, bool, str)
"""Classes of plain values that a forward may leave unread."""


def call_key(
    call: Any, leaves: Sequence[Any], unread: frozenset[int] = frozenset()
) -> tuple[Any, ...]:
    """Return the hashable key of the programs for a call: what describes its arguments, and
    PyTorch's global switches. call: (args, kwargs); leaves: theirs.

    Tensors count by description, other leaves by content, or by identity if they cannot be looked
    into; it also counts which tensors, containers and objects occur twice. Of leaves at `unread`
    positions the class alone counts.
    """
    first: dict[int, int] = {}
    parts: list[Any] = []
    for position, leaf in enumerate(leaves):
        is_tensor = isinstance(leaf, torch.Tensor)
        if position in unread and (is_tensor or type(leaf) in PLAIN):
            same = first.setdefault(id(leaf), position) if is_tensor else None
            parts.append((type(leaf), same))
        elif is_tensor:
            parts.append((first.setdefault(id(leaf), position), *_input_key(leaf)))
        else:
            parts.append(described(leaf))
    return (*parts, trees.shared(call), *switches_now())


def opened_key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of a call (structure, `call_key`) without sizes and strides of its tensors,
    and without numbers."""
    structure, parts = key
    count = structure.num_leaves
    return structure, ("open", *map(_without_sizes, parts[:count]), *parts[count:])


def without_unread(key: tuple[Any, ...], unread: frozenset[int]) -> tuple[Any, ...]:
    """Return the key of a call (structure, `call_key`) as it is with leaves at `unread`
    positions."""
    structure, parts = key
    return structure, tuple(_class_of(p) if i in unread else p for i, p in enumerate(parts))


def _class_of(part: Any) -> Any:
    if type(part) is not tuple:
        return type(part), None
    if len(part) > 5:
        return part[6], part[0]
    return (part[1][0], None) if part[0] is tuple else part


def _without_sizes(part: Any) -> Any:
    # Of a tensor (`call_key`) 3 is the shape, 5 the strides.
    if type(part) is tuple and len(part) > 5 and type(part[3]) is torch.Size:
        return (*part[:3], len(part[3]), part[4], *part[6:])
    # By identity: a dtype of numpy is equal to its class.
    if type(part) is tuple and part[:1] == (tuple,) and any(p is float for p in part[1][:1]):
        return float if "x" in part[1][1] else part  # its text; others are no numbers
    return int if type(part) is int else part


def _input_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Describe an input. Its offset in memory is left out: a forward that reads it has its own
    guard (`python_state.memory`)."""
    kind = type(tensor), tensor.layout, tensor.is_conj(), tensor.is_neg()
    return (*_parameter_key(tensor), *kind, cast_is_kept(tensor))


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which tensors of a program are the same object, and which share memory with those that it
    changes. Both decide what a gradient belongs to, and in which order reads and writes go.

    inputs, mutated: positions of the inputs, and of the tensors that the program changes. same: for
    each input the first position of the same tensor; memory: for each tensor the first mutated one
    that shares its memory, None if there is none.
    """

    inputs: range
    mutated: tuple[int, ...]
    same: tuple[int, ...]
    memory: tuple[int | None, ...]

    @classmethod
    def of(
        cls,
        identities: Sequence[int],
        storages: Sequence[int],
        inputs: range,
        mutated: tuple[int, ...],
    ) -> Self:
        """Return the sharing among the tensors of a program. identities, storages: for each a
        number that is equal for the same tensor, the same storage; inputs, mutated: positions of
        tensors."""
        same = _first_positions(identities, inputs)
        return cls(inputs, mutated, same, _memory(storages, mutated))

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if among `tensors`, in the program's order, the same are one or share memory."""
        if _first_positions([*map(id, tensors)], self.inputs) != self.same:
            return False
        if not self.mutated:
            return True
        if any(map(is_distributed_kind, {*map(type, tensors)})):
            tensors = [*map(local_of, tensors)]
        storages = [t.untyped_storage()._cdata for t in tensors]
        return _memory(storages, self.mutated) == self.memory


def _first_positions(identities: Sequence[int], positions: Iterable[int]) -> tuple[int, ...]:
    return tuple(identities.index(identities[i]) for i in positions)


def _memory(storages: Sequence[int], mutated: Sequence[int]) -> tuple[int | None, ...]:
    """Return, for each storage, the first mutated position with the same one, else None."""
    first = {storages[i]: i for i in reversed(mutated)}
    return tuple(map(first.get, storages))
