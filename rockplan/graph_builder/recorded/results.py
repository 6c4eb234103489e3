"""Results of calls on fake tensors, each distinct call computed once.

takes: an operator and its arguments, fake tensors. returns: fake tensors, with the strides and
dtypes of the real call (`operators.layouts`). guarantees: the same as `FakeTensorMode` returns,
including whether a result is a new tensor, a view of an argument, or an argument itself.
A network calls the same operators on the same shapes many times; the shape rules take 20 times as
long as making the tensors that they describe. A result is cached only if it depends on nothing but
shapes, strides, dtypes, devices and literals.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rockplan.errors import CaptureError
from rockplan.graph_builder.operators import facts, layouts
from rockplan.graph_builder.operators.symbols import are_known
from rockplan.graph_builder.recorded.specs import spanned

# Functions of the base classes, as in `tensor_spec`: while recording, an attribute of a fake tensor
# is intercepted in Python.
_OF = torch._C.TensorBase
_ATTRIBUTE = object.__getattribute__


ANY_S, CALL_S = 10.0, 0.05
"""CPU seconds that the rules of shapes may take with symbols, at all and for each call: they take
up to 0.02 for one in most models, 0.5 where sizes divide one another."""


# `fake_device` is a property from torch 2.13 on, which reads `_fake_device`.
_DEVICE = (
    "_fake_device" if isinstance(vars(FakeTensor).get("fake_device"), property) else "fake_device"
)


def fake_device(tensor: FakeTensor) -> torch.device:
    device: torch.device = _ATTRIBUTE(tensor, _DEVICE)
    return device


@dataclass(frozen=True, slots=True)
class _MadeTensor:
    """One tensor of a result. source: position, among the argument tensors, of the one whose
    storage it shares; None: it has a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype
    device: torch.device
    source: int | None


@dataclass(frozen=True, slots=True)
class _Same:
    """A result that is an argument itself. place: position among the argument tensors."""

    place: int


_Leaf = _MadeTensor | _Same | None


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to make a result. container: list or tuple; None: the result is its only leaf."""

    leaves: tuple[_Leaf, ...]
    container: type | None


class Results:
    """Results of calls during one capture, cached."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.fake_mode = fake_mode
        self._layouts = layouts.Layouts()
        self._known: dict[Hashable, _Recipe | None] = {}
        self._left_s = ANY_S

    def of(self, operator: OpOverload, args: facts.Args, kwargs: facts.Kwargs) -> Any:
        """Return the result of a call on fake tensors: by the recipe of an equal call, a run of the
        real code on meta tensors, or the shape rules. Raises what the operator raises."""
        tensors = facts.tensors((args, kwargs))
        key = _key(operator, args, kwargs, tensors)
        recipe = None if key is None else self._known.get(key)
        if recipe is not None:
            return self._follow(recipe, tensors)
        is_static = self.fake_mode.shape_env is None or _is_static(args, tensors)
        can_run = is_static and key is not None and not kwargs
        recipe = _worked_out(operator, args, tensors) if can_run else None
        if recipe is None and not is_static:
            began = time.process_time()
            # Around the rules alone: around the forward it would change what autograd calls.
            with enable_python_dispatcher():
                result = layouts.fake_result(operator, args, kwargs)
            self._left_s += CALL_S - (time.process_time() - began)
            if self._left_s < 0:
                raise CaptureError("PyTorch's rules of shapes take too long with symbols")
        elif recipe is None:
            result = layouts.fake_result(operator, args, kwargs)
        else:
            result = self._follow(recipe, tensors)
        is_known = recipe is not None and not facts.is_pointwise(operator)
        if not (is_known or facts.is_product(operator)):  # products lay out as their rules say
            result = self._layouts.corrected(operator, args, kwargs, result)
        if key is not None and key not in self._known:
            self._known[key] = _recipe(result, tensors)
        return result

    def _follow(self, recipe: _Recipe, tensors: Sequence[torch.Tensor]) -> Any:
        made = [self._make(leaf, tensors) for leaf in recipe.leaves]
        return made[0] if recipe.container is None else recipe.container(made)

    def _make(self, leaf: _Leaf, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """None if the operator returns none there."""
        if leaf is None:
            return None
        if isinstance(leaf, _Same):
            return tensors[leaf.place]
        with torch._C._DisableTorchDispatch():
            if leaf.source is None:
                tensor = torch.empty_strided(
                    leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta"
                )
            else:  # what is symbolic is worked out at each call
                tensor = torch.empty(0, dtype=leaf.dtype, device="meta")
                storage = tensors[leaf.source].untyped_storage()
                tensor.set_(storage, leaf.offset, leaf.shape, leaf.stride)
        return FakeTensor(self.fake_mode, tensor, leaf.device)


def _worked_out(operator: OpOverload, args: facts.Args, tensors: Sequence[Any]) -> _Recipe | None:
    """Return the recipe of the call's result by running the real code on meta tensors; None unless
    the operator is a view, a matrix product or an elementwise one whose result shapes alone decide.
    Shape rules take ten times as long. tensors: those of `args`."""
    is_view, is_pointwise = facts.is_plain_view(operator), facts.is_pointwise(operator)
    if not (is_view or is_pointwise or facts.is_product(operator)):
        return None
    # A tensor of no dimensions may stand for a number, which promotes differently.
    if is_pointwise and not all(map(torch.Tensor.dim, tensors)):
        return None
    if facts.is_product(operator) and len({t.dtype for t in tensors}) > 1:
        return None
    device, *others = set(map(fake_device, tensors))
    if others:
        return None
    with torch._C._DisableTorchDispatch():
        stand_ins: dict[int, torch.Tensor] = {}
        for t in tensors:
            storage = torch.UntypedStorage(t.untyped_storage().nbytes(), device="meta")
            made = torch.empty(0, dtype=t.dtype, device="meta")
            stand_ins[id(t)] = made.set_(storage, t.storage_offset(), t.shape, t.stride())
        try:
            result = operator(*(_exchanged(a, stand_ins) for a in args))
        except facts.CALL_ERRORS:
            return None  # the shape rules of fake tensors will raise with their message
        container = type(result) if type(result) in (list, tuple) else None
        storages = [s.untyped_storage()._cdata for s in stand_ins.values()]
        recipes: list[_Leaf] = []
        for leaf in result if container else [result]:
            if not isinstance(leaf, torch.Tensor) or leaf.is_conj() or leaf.is_neg():
                return None
            if (leaf.untyped_storage()._cdata in storages) is not is_view:
                return None
            layout = tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset())
            source = 0 if is_view else None
            recipes.append(_MadeTensor(*layout, leaf.dtype, device, source))
    return _Recipe(tuple(recipes), container)


def _exchanged(argument: Any, stand_ins: dict[int, torch.Tensor]) -> Any:
    if isinstance(argument, torch.Tensor):
        return stand_ins[id(argument)]
    if isinstance(argument, list | tuple):
        return [_exchanged(a, stand_ins) for a in argument]
    return argument


def _key(
    operator: OpOverload, args: facts.Args, kwargs: facts.Kwargs, tensors: Sequence[torch.Tensor]
) -> Hashable | None:
    """None if the result may depend on more than shapes, dtypes, devices and literals."""
    if not tensors or not facts.follows_shapes(operator) or not all(map(_is_plain, tensors)):
        return None
    key = (
        operator,
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        tuple(map(_described, args)),
        tuple((name, _described(value)) for name, value in kwargs.items()),
        _sharing(tensors),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        isinstance(tensor, FakeTensor)
        and _ATTRIBUTE(tensor, "constant") is None
        and _OF.layout.__get__(tensor) is torch.strided  # type: ignore[attr-defined]
        and not (_OF.is_conj(tensor) or _OF.is_neg(tensor))
    )


def _described(argument: Any) -> Hashable:
    if isinstance(argument, FakeTensor):
        return (
            tuple(map(_sized, _OF.shape.__get__(argument))),  # type: ignore[attr-defined]
            tuple(map(_sized, _OF.stride(argument))),
            _sized(_OF.storage_offset(argument)),
            _OF.dtype.__get__(argument),  # type: ignore[attr-defined]
            fake_device(argument),
        )
    if isinstance(argument, list | tuple):
        return (type(argument), *map(_described, argument))
    if isinstance(argument, torch.SymInt | torch.SymFloat):
        return _sized(argument)
    # Equal numbers of different types (1, 1.0, True) promote differently.
    literal: Hashable = (type(argument), argument)
    return literal


def _sized(number: Any) -> Hashable:
    """Return a number as part of a key; the hash of a SymInt would be a guard."""
    return number if type(number) is int else (type(number), number.node.expr)


def _is_static(args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
    sizes = (
        n
        for t in tensors
        for n in (
            *_OF.shape.__get__(t),  # type: ignore[attr-defined]
            *_OF.stride(t),
            _OF.storage_offset(t),
            _OF.untyped_storage(t).nbytes(),
        )
    )
    return are_known(sizes) and all(type(a) in _STATIC_ARGUMENTS for a in args)


_STATIC_ARGUMENTS = (int, float, bool, str, type(None), FakeTensor)


def _sharing(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int, Hashable], ...]:
    """Return for each tensor (position of the first that is the same object, position of the first
    in the same storage, bytes of the storage)."""
    storages = [_OF.untyped_storage(t) for t in tensors]
    objects = [id(t) for t in tensors]
    places = [s._cdata for s in storages]
    return tuple(
        (objects.index(o), places.index(p), _sized(s.nbytes()))
        for o, p, s in zip(objects, places, storages, strict=True)
    )


def _recipe(result: Any, tensors: Sequence[torch.Tensor]) -> _Recipe | None:
    """None if that is not known."""
    container = type(result) if type(result) in (list, tuple) else None
    leaves: list[_Leaf] = []
    seen: list[int] = []
    for leaf in result if container else [result]:
        if leaf is None:
            leaves.append(None)
            continue
        if not isinstance(leaf, FakeTensor) or not _is_plain(leaf) or leaf.requires_grad:
            return None
        made = _leaf(leaf, tensors)
        storage = leaf.untyped_storage()._cdata
        is_new = isinstance(made, _MadeTensor) and made.source is None
        if made is None or (is_new and storage in seen):
            return None
        leaves.append(made)
        seen.append(storage)
    return _Recipe(tuple(leaves), container)


def _leaf(leaf: FakeTensor, tensors: Sequence[torch.Tensor]) -> _Leaf:
    """None for a tensor in a new storage that is larger than it needs."""
    for place, tensor in enumerate(tensors):
        if tensor is leaf:
            return _Same(place)
    storage = leaf.untyped_storage()
    shared = [t.untyped_storage()._cdata == storage._cdata for t in tensors]
    source = shared.index(True) if any(shared) else None
    size_bytes = leaf.dtype.itemsize * spanned(leaf.shape, leaf.stride())
    if source is None and (leaf.storage_offset() or storage.nbytes() != size_bytes):
        return None
    layout = tuple(leaf.shape), leaf.stride(), leaf.storage_offset()
    return _MadeTensor(*layout, leaf.dtype, fake_device(leaf), source)
