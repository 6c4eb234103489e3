"""Signatures: everything that a captured run depended on, compared before each call.

A call is described by `call_key` (hashable: arguments and global switches), the module by
`module_signature` (identity of submodules, their attributes, hooks, parameters, and what is in
the lists, dictionaries and configuration objects among the attributes).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from rockplan.codegen import parametrizations
from rockplan.contents import Contents, contents_of
from rockplan.interface import computed_attributes

# What every nn.Module has; compared by itself.
_REGISTRIES = frozenset(nn.Module().__dict__) | {"_rockplan"}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class _ModuleEntry:
    module: nn.Module
    attributes: dict[str, Any]
    children: tuple[tuple[str, nn.Module | None], ...]
    tensors: tuple[tuple[str, str, torch.Tensor | None, tuple[Any, ...]], ...]


@dataclass(frozen=True, slots=True)
class ModuleSignature:
    """hooks: all registries of hooks, and how many each held; contents: of containers and
    configurations among the attributes."""

    entries: tuple[_ModuleEntry, ...]
    hooks: tuple[tuple[Any, ...], list[int]]
    contents: tuple[Contents, ...]


def module_signature(module: nn.Module, constants: tuple[torch.Tensor, ...]) -> ModuleSignature:
    """What of the module tree decides which operations its forward executes.

    constants: tensors that are neither parameters nor buffers, and that its plan reads.
    """
    entries = _module_entries(module)
    containers = {
        id(value): value
        for entry in entries
        for name, value in entry.attributes.items()
        if name not in _REGISTRIES
    }
    contents = (contents_of(value, constants) for value in containers.values())
    found = [e.module.__dict__.get(h) for e in entries for h in _HOOKS]
    hooks = tuple(h for h in found if h is not None)
    return ModuleSignature(
        entries, (hooks, [*map(len, hooks)]), tuple(c for c in contents if c is not None)
    )


def _module_entries(module: nn.Module) -> tuple[_ModuleEntry, ...]:
    return tuple(
        _ModuleEntry(
            module=m,
            attributes=_attributes(m),
            children=tuple(m._modules.items()),
            tensors=tuple(
                (kind, name, t, () if t is None else _parameter_key(t))
                for kind in ("_parameters", "_buffers")
                for name, t in m.__dict__[kind].items()
            ),
        )
        for m in module.modules()
    )


def signature_holds(signature: ModuleSignature) -> bool:
    """True if nothing that `module_signature` recorded has changed since."""
    registries, counts = signature.hooks
    return (
        [*map(len, registries)] == counts
        and all(map(_entry_holds, signature.entries))
        and all(contents.hold() for contents in signature.contents)
    )


def changed_attribute(signature: ModuleSignature) -> str | None:
    """The first attribute of the module tree that is not what it was, if one is not."""
    root = signature.entries[0].module
    paths = {id(m): f"{path}." if path else "" for path, m in root.named_modules()}
    changed = {id(c.container) for c in signature.contents if not c.hold()}
    for entry in signature.entries:
        now = _attributes(entry.module)
        for name in sorted({*entry.attributes, *now} - _REGISTRIES):
            before = entry.attributes.get(name)
            if id(before) in changed or not _is_equal(before, now.get(name)):
                return paths.get(id(entry.module), "") + name
    return None


def _attributes(module: nn.Module) -> dict[str, Any]:
    computed = computed_attributes(module) if module._forward_pre_hooks else ()
    return {k: v for k, v in module.__dict__.items() if k not in computed}


def _entry_holds(entry: _ModuleEntry) -> bool:
    attributes = entry.module.__dict__
    if not (
        _is_equal(attributes, entry.attributes)
        or _is_equal(_attributes(entry.module), entry.attributes)
    ):
        return False
    if tuple(attributes["_modules"].items()) != entry.children:
        return False
    count = len(attributes["_parameters"]) + len(attributes["_buffers"])
    return count == len(entry.tensors) and all(
        attributes[kind].get(name) is tensor and (tensor is None or _parameter_key(tensor) == key)
        for kind, name, tensor, key in entry.tensors
    )


def _is_equal(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):  # == on exchanged tensors or arrays
        return False


def _parameter_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.requires_grad,
        tensor.dtype,
        tensor.shape,
        tensor.device,
        tensor.stride() if tensor.layout is torch.strided else None,
    )


def call_key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What a program depends on outside the module: arguments and global switches.

    leaves: of (args, kwargs). Tensors count by description, and by which of them are the same
    object; other leaves by value, unhashable ones by identity.
    """
    first: dict[int, int] = {}
    described: list[Any] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            described.append((first.setdefault(id(leaf), position), *_input_key(leaf)))
        else:
            hashable = type(leaf).__hash__ is not None
            described.append((type(leaf), leaf if hashable else id(leaf)))
    return (*described, *_global_key())


def _input_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*_parameter_key(tensor), tensor.layout, tensor.storage_offset())


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which tensors that a program is given are one object, and which share the memory of those
    that it changes. Both decide what a gradient is of, and in which order reads and writes go.

    inputs, mutated: positions of the inputs and of what the program changes. same: for each input
    the first position of the same tensor; memory: for each tensor the first of the mutated ones
    that shares its memory, if any.
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
        """Of tensors with these identities and storages."""
        same = _first_positions(identities, inputs)
        return cls(inputs, mutated, same, _memory(storages, mutated))

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if it is the same among `tensors`."""
        if _first_positions([*map(id, tensors)], self.inputs) != self.same:
            return False
        if not self.mutated:
            return True
        storages = [t.untyped_storage()._cdata for t in tensors]
        return _memory(storages, self.mutated) == self.memory


def _first_positions(identities: Sequence[int], positions: Iterable[int]) -> tuple[int, ...]:
    return tuple(identities.index(identities[i]) for i in positions)


def _memory(storages: Sequence[int], mutated: Sequence[int]) -> tuple[int | None, ...]:
    first = {storages[i]: i for i in reversed(mutated)}
    return tuple(map(first.get, storages))


Autocast = tuple[torch.dtype | None, ...]
"""For each device type the dtype of autocast, None if it is off."""

_DEVICE_TYPES = ("cpu", "cuda")


def autocast_state() -> Autocast:
    """The autocast state of this thread."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in _DEVICE_TYPES
    )


@contextlib.contextmanager
def under_autocast(state: Autocast) -> Iterator[None]:
    """Run under the autocast state of another moment."""
    with contextlib.ExitStack() as stack:
        for kind, dtype in zip(_DEVICE_TYPES, state, strict=True):
            if dtype is not None or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
        yield


def _global_key() -> tuple[Any, ...]:
    """Switches of PyTorch that decide which operators a module calls."""
    return (
        *autocast_state(),
        torch.get_default_dtype(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        parametrizations.are_cached(),
    )
