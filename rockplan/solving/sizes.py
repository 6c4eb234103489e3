"""Sizes: a sample and the ranges of its dimensions -> the calls that are planned before training.

takes: the arguments of a call, `Options.sizes`. returns: the same call with the largest and with
the smallest sizes. guarantees: each tensor holds values of the sample only, so that integers stay
valid indices, in the same layout; a tensor that is passed twice stays one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rockplan.errors import CaptureError, InfeasibleBudget, InvalidInput
from rockplan.graph_builder.operators.layouts import dense_strides, outermost_first
from rockplan.options import Options, SizeRange
from rockplan.python_state import trees
from rockplan.python_state.autocast import leaf_like
from rockplan.python_state.walk import named_arguments
from rockplan.runtime.program import ModuleCall

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SizedCall:
    """A call with certain sizes. name: "largest size", "sample" or "smallest size", '' of a sample
    without ranges; shapes: (name, shape) of the tensors that vary."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str = ""
    shapes: tuple[tuple[str, Shape], ...] = ()

    def of(self, module: nn.Module) -> ModuleCall:
        """Return the call as one of `module`."""
        return ModuleCall(module, self.args, self.kwargs)

    def __str__(self) -> str:
        shown = ", ".join(f"{name}: {'x'.join(map(str, shape))}" for name, shape in self.shapes)
        return f"the {self.name} ({shown})"

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Begin the message of errors of planning in the `with` block with the sizes of this call,
        if it has a name."""
        try:
            yield
        except (CaptureError, InfeasibleBudget) as error:
            if self.name:
                error.args = (f"{self} cannot be planned: {error}",)
            raise


def sized_calls(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> tuple[SizedCall, ...]:
    """Return the calls to plan before training: with all varying dimensions at their largest size,
    the sample, and all at the smallest, as far as they differ; the sample alone without
    `Options.sizes`. Raises InvalidInput for ranges that do not fit the sample."""
    ranges = options.sizes
    assert isinstance(ranges, tuple)
    if not ranges:
        return (SizedCall(args, kwargs),)
    named, (_, spec) = _named_leaves(forward, args, kwargs), trees.tree_flatten((args, kwargs))
    varying = _varying(ranges, tensors := tensors_of(forward, args, kwargs))
    calls: dict[tuple[tuple[str, Shape], ...], SizedCall] = {}
    for which in ("largest size", "sample", "smallest size"):
        shapes = {name: _shape(which, tensors[name], of) for name, of in varying.items()}
        made: dict[tuple[int, Shape], torch.Tensor] = {}
        others = [
            _resized_once(made, leaf, shapes[name]) if name in shapes else leaf
            for name, leaf in named
        ]
        own_args, own_kwargs = trees.tree_unflatten(others, spec)
        rows = tuple(shapes.items())
        calls.setdefault(rows, SizedCall(own_args, own_kwargs, which, rows))
    return tuple(calls.values())


def _named_leaves(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    given = named_arguments(forward, args, kwargs)
    return [(f"{name}{path}", leaf) for name, a in given for path, leaf in trees.named_leaves(a)]


def tensors_of(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return name -> tensor, of the tensors of a call whose sizes may vary."""
    return {
        name: t
        for name, t in _named_leaves(forward, args, kwargs)
        if isinstance(t, torch.Tensor) and t.layout is torch.strided and not t.is_nested
    }


def _varying(
    ranges: Sequence[SizeRange], tensors: dict[str, torch.Tensor]
) -> dict[str, dict[int, SizeRange]]:
    """Return name of a tensor -> dimension -> range, for the dimensions that vary. tensors: of the
    sample. A range that names one takes precedence over one for all. Raises InvalidInput."""
    varying: dict[str, dict[int, SizeRange]] = {}
    for one in sorted(ranges, key=lambda r: not r.argument):
        if one.argument:
            names = [_named(one, tensors)]
        else:
            names = [
                name
                for name, tensor in tensors.items()
                if tensor.dim() > one.dimension and one.dimension not in varying.get(name, {})
            ]
            names = _of_one_size(one, names, tensors)
        for name in names:
            varying.setdefault(name, {})[one.dimension] = one
    return varying


def _named(one: SizeRange, tensors: dict[str, torch.Tensor]) -> str:
    tensor = tensors.get(one.argument)
    if tensor is None:
        raise InvalidInput(
            f"sizes names {one.argument!r}, which is no tensor of the sample; its tensors are "
            f"{_listed(tensors)}"
        )
    if tensor.dim() <= one.dimension:
        raise InvalidInput(
            f"sizes names dimension {one.dimension} of {one.argument!r}, which has "
            f"{tensor.dim()} in the sample; they count from 0"
        )
    _refuse_outside(one, one.argument, tensor.shape[one.dimension])
    return one.argument


def _of_one_size(
    one: SizeRange, names: Sequence[str], tensors: dict[str, torch.Tensor]
) -> list[str]:
    """Return those of the tensors `names` whose dimension varies with the range `one`; where others
    are larger, those of size 1 do not (broadcasting). Raises InvalidInput if several sizes remain,
    no tensor has the dimension, or the sample's size is outside of the range."""
    if not names:
        raise InvalidInput(
            f"sizes names dimension {one.dimension}, which no tensor of the sample has that is not "
            f"named itself; its tensors are {_listed(tensors)}"
        )
    sizes = {name: tensors[name].shape[one.dimension] for name in names}
    several = {*sizes.values()} - {1} or {1}
    if len(several) > 1:
        shown = ", ".join(f"{size} in {name!r}" for name, size in sizes.items())
        raise InvalidInput(
            f"sizes names dimension {one.dimension}, which is {shown}; say which tensors vary: "
            f"{{{names[0]!r}: {{{one.dimension}: ({one.least}, {one.most})}}, ...}}"
        )
    (size,) = several
    varying = [name for name in names if sizes[name] == size]
    _refuse_outside(one, varying[0], size)
    return varying


def _refuse_outside(one: SizeRange, name: str, size: int) -> None:
    if not one.least <= size <= one.most:
        raise InvalidInput(
            f"sizes has ({one.least}, {one.most}) for dimension {one.dimension}, and {name!r} of "
            f"the sample has {size}; pass a range with the sample in it"
        )


def _listed(tensors: dict[str, torch.Tensor]) -> str:
    shapes = (f"{name!r} ({'x'.join(map(str, t.shape))})" for name, t in tensors.items())
    return ", ".join(shapes) or "none"


def _shape(which: str, tensor: torch.Tensor, ranges: dict[int, SizeRange]) -> Shape:
    sizes = [*tensor.shape]
    if which != "sample":
        for dimension, one in ranges.items():
            sizes[dimension] = one.most if which == "largest size" else one.least
    return tuple(sizes)


def _resized_once(
    resized: dict[tuple[int, Shape], torch.Tensor], tensor: torch.Tensor, shape: Shape
) -> torch.Tensor:
    key = (id(tensor), shape)
    if tensor.shape != shape and key not in resized:
        resized[key] = _of_shape(tensor, shape)
    return resized.get(key, tensor)


def _of_shape(tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return a tensor of this shape that repeats or cuts the content of `tensor`, with dimensions
    in the same order in memory; expanded dimensions stay expanded."""
    source = tensor.detach()
    for dimension, (now, size) in enumerate(zip(tensor.shape, shape, strict=True)):
        if tensor.stride(dimension) == 0:
            source = source.narrow(dimension, 0, 1)
        elif now != size:
            index = torch.arange(size, device=tensor.device) % now
            source = source.index_select(dimension, index)
    strides = dense_strides(source.shape, outermost_first(tensor.stride()))
    made = source.new_empty_strided(source.shape, strides).copy_(source)
    return leaf_like(made.expand(shape), tensor)
