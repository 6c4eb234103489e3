"""Outcomes: the tensors that a call of a foreign function is given, and what it makes of them.

An outcome is a value: what a call returns, saves, and sets on the context, as specs and as places
of tensors that are one or share memory. Each run of a plan has to have that of the recorded one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

from rockplan.graph_builder.recorded.run import tensor_spec
from rockplan.graph_builder.recorded.tensors import tensor_of
from rockplan.python_state.contents import described
from rockplan.values.graph import TensorSpec


@dataclass(frozen=True, slots=True)
class Tensors:
    """Distinct tensors: for each its spec, the first one on its storage, and the bytes of that."""

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
    """A tensor among the arguments of a call, by its place among the distinct ones."""

    place: int


def taken(leaf: Any, tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> Any:
    """The tensor that `leaf` refers to, or itself."""
    return tensors[leaf.place] if isinstance(leaf, Ref) else leaf


def with_refs(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """`leaves` with places of tensors, and the distinct tensors."""
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
    """A tensor of an outcome. base: that it shares memory with, among the given ones and those of
    the outcome before it, from whose beginning the offset of `spec` counts; None: it has new
    memory, of `size_bytes`."""

    spec: TensorSpec
    base: int | None
    size_bytes: int


Attributes = tuple[tuple[str, tuple[Any, ...], Any], ...]
"""Of a context: name, leaves and structure of each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call makes. made: tensors that it was not given; the rest refers to these, and to the
    given ones, which come first. results, saved, attributes: places of tensors, and what else
    there is, described; structure: of the results; dirty, constant: places of tensors that the
    context was told of."""

    made: tuple[MadeByRun, ...]
    results: tuple[Any, ...]
    structure: str
    saved: tuple[Any, ...] = ()
    attributes: Attributes = ()
    dirty: frozenset[int] = frozenset()
    constant: frozenset[int] = frozenset()
    materializes: bool = True

    def differs(self, other: Outcome) -> str:
        """Where two outcomes differ, in words."""
        if self.attributes != other.attributes:
            a, b = ({name: rest for name, *rest in o.attributes} for o in (self, other))
            names = sorted(n for n in a.keys() | b.keys() if a.get(n) != b.get(n))
            return f"sets {', '.join(f'ctx.{n}' for n in names)} to something else"
        if self.structure != other.structure:
            return "returns another number of results"
        if self.saved != other.saved:
            return "saves other tensors"
        return "makes tensors of other shapes, strides, dtypes or memory, or None elsewhere"


class Context(FunctionCtx):
    """What a function gets for its `ctx` where it runs for real."""

    saved_tensors: tuple[Any, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad


_OF_AUTOGRAD = {
    *("needs_input_grad", "saved_tensors", "to_save", "dirty_tensors", "non_differentiable"),
    *("materialize_grads", "saved_for_forward"),
}


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueRun:
    """What one run has made. tensors: those given and those made; results, structure, attributes:
    as in the outcome, with the things themselves in place of their descriptions."""

    outcome: Outcome
    tensors: tuple[torch.Tensor, ...]
    results: tuple[Any, ...]
    structure: Any
    attributes: Attributes = ()

    def fresh(self) -> list[torch.Tensor]:
        """The tensors in new memory: what the operator returns."""
        first = len(self.tensors) - len(self.outcome.made)
        pairs = zip(self.tensors[first:], self.outcome.made, strict=True)
        return [t.detach() if t.requires_grad else t for t, made in pairs if made.base is None]


class _Finder:
    """Gives each tensor of an outcome its place."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.tensors = list(given)
        self.made: list[MadeByRun] = []

    def place(self, leaf: Any) -> Any:
        """A Ref; or what else it is, described."""
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

    def places(self, told: Sequence[Any] | None) -> frozenset[int]:
        refs = (self.place(t) for t in told or () if isinstance(t, torch.Tensor))
        return frozenset(ref.place for ref in refs)


def run_of(result: Any, given: Sequence[torch.Tensor], ctx: Context | None) -> OpaqueRun:
    """What a call has made. ctx: that of a forward."""
    finder = _Finder(given)
    leaves, structure = pytree.tree_flatten(result)
    results = tuple(map(finder.place, leaves))
    told = {} if ctx is None else vars(ctx)
    saved = tuple(map(finder.place, told.get("to_save") or ()))
    flat = {n: pytree.tree_flatten(told[n]) for n in sorted(told.keys() - _OF_AUTOGRAD)}
    places = {name: tuple(map(finder.place, tensors)) for name, (tensors, _) in flat.items()}
    dirty, constant = (finder.places(told.get(n)) for n in ("dirty_tensors", "non_differentiable"))
    outcome = Outcome(
        made=tuple(finder.made),
        results=results,
        structure=str(structure),
        saved=saved,
        attributes=tuple((n, tensors, str(flat[n][1])) for n, tensors in places.items()),
        dirty=dirty,
        constant=constant,
        materializes=bool(told.get("materialize_grads", True)),
    )
    return OpaqueRun(
        outcome,
        tuple(finder.tensors),
        _themselves(results, leaves),
        structure,
        tuple((n, _themselves(places[n], tensors), tree) for n, (tensors, tree) in flat.items()),
    )


def _themselves(places: Sequence[Any], leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Places of tensors, and what else there is."""
    pairs = zip(places, leaves, strict=True)
    return tuple(p if isinstance(leaf, torch.Tensor) else leaf for p, leaf in pairs)


def rebuilt(
    outcome: Outcome, given: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The given tensors and those made, of the ones in new memory."""
    tensors, waiting = list(given), iter(fresh)
    for made in outcome.made:
        if made.base is None:
            tensors.append(next(waiting))
        else:
            tensors.append(_sharing(tensors[made.base], made.spec))
    return tensors


def _sharing(base: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """What lies at `spec` from where `base` begins."""
    if replace(tensor_spec(base), offset=0) == spec:
        return base.detach()
    offset = base.storage_offset() + spec.offset if spec.offset else None
    return base.detach().as_strided(spec.shape, spec.stride, offset)


def new_tensor(made: MadeByRun) -> torch.Tensor:
    return tensor_of(made.spec, size_bytes=made.size_bytes)
