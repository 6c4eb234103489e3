"""Outcomes: what a call of a foreign function makes from its tensors.

An outcome is a value: what a call returns, saves, and sets on the context, as specs and places.
Equal places are the same tensor; bases say which tensors share memory. Each run in a plan must have
the outcome that was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

from rockplan.graph_builder.recorded.run import tensor_spec
from rockplan.graph_builder.recorded.specs import tensor_of
from rockplan.python_state.contents import described
from rockplan.values.graph import TensorSpec


@dataclass(frozen=True, slots=True)
class Tensors:
    """Distinct tensors: for each its spec, the place of the first tensor on its storage, and its
    bytes."""

    specs: tuple[TensorSpec, ...]
    storages: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Tensors:
        places = [t.untyped_storage()._cdata for t in tensors]
        return cls(
            tuple(map(tensor_spec, tensors)),
            tuple(map(places.index, places)),
            tuple(int(t.untyped_storage().nbytes()) for t in tensors),
        )


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a call, by its place among the distinct ones."""

    place: int


def taken(leaf: Any, tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> Any:
    """Return the tensor that `leaf` refers to, or `leaf` itself if it is no Ref."""
    return tensors[leaf.place] if isinstance(leaf, Ref) else leaf


def with_refs(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Return (`leaves` with a Ref for each tensor, the distinct tensors as first met)."""
    numbers: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in numbers:
            numbers[id(leaf)] = len(tensors)
            tensors.append(leaf)
    refs = (Ref(numbers[id(x)]) if isinstance(x, torch.Tensor) else x for x in leaves)
    return tuple(refs), tensors


@dataclass(frozen=True, slots=True)
class MadeByRun:
    """A tensor that a call makes. base: place of an earlier tensor whose memory it shares; the
    offset of `spec` is then relative to that tensor. None: it has new memory, of `size_bytes`."""

    spec: TensorSpec
    base: int | None
    size_bytes: int


Attributes = tuple[tuple[str, tuple[Any, ...], Any], ...]
"""Attributes of a context: (name, leaves, structure) of each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call makes. made: new tensors; their places come after those of the arguments.
    results, saved, attributes: Refs for tensors, descriptions of everything else; structure: of the
    results; dirty, constant: places of tensors marked as such on the context."""

    made: tuple[MadeByRun, ...]
    results: tuple[Any, ...]
    structure: str
    saved: tuple[Any, ...] = ()
    attributes: Attributes = ()
    dirty: frozenset[int] = frozenset()
    constant: frozenset[int] = frozenset()
    materializes: bool = True


class Context(FunctionCtx):
    """The `ctx` of a function that runs for real."""

    saved_tensors: tuple[Any, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad


_OF_AUTOGRAD = {
    *("needs_input_grad", "saved_tensors", "to_save", "dirty_tensors", "non_differentiable"),
    *("materialize_grads", "saved_for_forward"),
}


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueRun:
    """One run. tensors: the arguments, then what it made; results, structure, attributes: as in the
    outcome, but with the objects in place of descriptions; written: places of arguments that
    operators of PyTorch wrote into."""

    outcome: Outcome
    tensors: tuple[torch.Tensor, ...]
    results: tuple[Any, ...]
    structure: Any
    attributes: Attributes = ()
    written: frozenset[int] = frozenset()

    def fresh(self) -> list[torch.Tensor]:
        """Return the tensors in new memory, which the operator returns."""
        first = len(self.tensors) - len(self.outcome.made)
        pairs = zip(self.tensors[first:], self.outcome.made, strict=True)
        return [t.detach() if t.requires_grad else t for t, made in pairs if made.base is None]


class _Finder:
    """Assigns a place to each tensor of an outcome."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.tensors = list(given)
        self.made: list[MadeByRun] = []

    def place(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return described(leaf)
        for place, tensor in enumerate(self.tensors):
            if tensor is leaf:
                return Ref(place)
        storage = leaf.untyped_storage()
        shared = [t.untyped_storage()._cdata == storage._cdata for t in self.tensors]
        base = shared.index(True) if any(shared) else None
        spec, size_bytes = tensor_spec(leaf), int(storage.nbytes())
        if base is not None:
            begin = int(self.tensors[base].storage_offset())
            spec, size_bytes = replace(spec, offset=spec.offset - begin), 0
        self.made.append(MadeByRun(spec, base, size_bytes))
        self.tensors.append(leaf)
        return Ref(len(self.tensors) - 1)

    def places(self, marked: Sequence[Any] | None) -> frozenset[int]:
        refs = (self.place(t) for t in marked or () if isinstance(t, torch.Tensor))
        return frozenset(ref.place for ref in refs)


def run_of(result: Any, given: Sequence[torch.Tensor], ctx: Context | None) -> OpaqueRun:
    """Return the run that returned `result`. given: its tensor arguments, by place; ctx: what a
    forward saved and set, None for a backward."""
    finder = _Finder(given)
    leaves, structure = pytree.tree_flatten(result)
    results = tuple(map(finder.place, leaves))
    context = {} if ctx is None else vars(ctx)
    saved = tuple(map(finder.place, context.get("to_save") or ()))
    flat = {n: pytree.tree_flatten(context[n]) for n in sorted(context.keys() - _OF_AUTOGRAD)}
    places = {name: tuple(map(finder.place, tensors)) for name, (tensors, _) in flat.items()}
    dirty, constant = (
        finder.places(context.get(n)) for n in ("dirty_tensors", "non_differentiable")
    )
    outcome = Outcome(
        made=tuple(finder.made),
        results=results,
        structure=str(structure),
        saved=saved,
        attributes=tuple((n, tensors, str(flat[n][1])) for n, tensors in places.items()),
        dirty=dirty,
        constant=constant,
        materializes=bool(context.get("materialize_grads", True)),
    )
    return OpaqueRun(
        outcome,
        tuple(finder.tensors),
        _themselves(results, leaves),
        structure,
        tuple((n, _themselves(places[n], tensors), tree) for n, (tensors, tree) in flat.items()),
    )


def _themselves(places: Sequence[Any], leaves: Sequence[Any]) -> tuple[Any, ...]:
    pairs = zip(places, leaves, strict=True)
    return tuple(p if isinstance(leaf, torch.Tensor) else leaf for p, leaf in pairs)


def rebuilt(
    outcome: Outcome, given: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the arguments of a call, then all tensors that it makes, by place. given: the
    arguments; fresh: results in new memory, of which the others are views."""
    tensors, waiting = list(given), iter(fresh)
    for made in outcome.made:
        if made.base is None:
            tensors.append(next(waiting))
        else:
            tensors.append(_sharing(tensors[made.base], made.spec))
    return tensors


def _sharing(base: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    # The offset of `spec` is relative to `base`.
    if replace(tensor_spec(base), offset=0) == spec:
        return base.detach()
    offset = base.storage_offset() + spec.offset if spec.offset else None
    return base.detach().as_strided(spec.shape, spec.stride, offset)


def new_tensor(made: MadeByRun) -> torch.Tensor:
    return tensor_of(made.spec, size_bytes=made.size_bytes)
