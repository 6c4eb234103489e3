"""Value shapes: operators whose results have shapes that depend on the values of arguments.

takes: a call on fake tensors, and the real tensors that decide the shape. returns: fake results of
the right shape, and the numbers that must be the same at each later call for the shape to be the
same: how many elements a mask selects, for instance, and not which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.layouts import dense_strides, outermost_first
from rockplan.graph_builder.operators.symbols import hints, is_unknown, known_number
from rockplan.graph_builder.tracing.free_sizes import StaticSizes
from rockplan.values.graph import Call, ValueRef

_MASKS = (torch.bool, torch.uint8)
_ITEM = "aten._local_scalar_dense.default"


@dataclass(frozen=True, slots=True)
class ShapeNumber:
    """One number that a shape depends on: `calls`, then `read`, which returns it."""

    calls: tuple[Call, ...]
    read: Call


@dataclass(frozen=True, slots=True)
class Rule:
    """How the shapes of one call are decided. deciding: the tensors whose values decide them."""

    operator: OpOverload
    args: facts.Args
    kwargs: facts.Kwargs
    deciding: tuple[torch.Tensor, ...]

    def sizes(self, deciding: Sequence[int], free: int) -> tuple[ShapeNumber, ...]:
        """Return the numbers on which the shapes of the results depend, each with the calls that
        compute it. deciding: values of the deciding tensors; free: the first unused value."""
        name = facts.operator_name(self.operator)
        count = facts.facts_of(self.operator).sizes_from
        refs = [ValueRef(v) for v in deciding]
        if count == name:
            return (self._by_result(name, refs[0], free),)
        item = Call(_ITEM, (ValueRef(free),), (), ())
        counts = (Call(count, (ref,), (), (free,)) for ref in refs)
        return tuple(ShapeNumber((call,), item) for call in counts)

    def _by_result(self, name: str, ref: ValueRef, free: int) -> ShapeNumber:
        """Return the length of the operator's own first result, without weights. name: of the
        operator; ref: its argument; free: the first unused value."""
        names = facts.argument_names(self.operator)
        arguments = dict(zip(names, self.args, strict=False)) | self.kwargs
        plain = {n: a for n, a in arguments.items() if n not in (names[0], "weights")}
        dim = plain.get("dim") or 0
        made = (free, *[None] * (len(self.operator._schema.returns) - 1))
        call = Call(name, (ref,), tuple(plain.items()), made)
        return ShapeNumber((call,), Call("aten.sym_size.int", (ValueRef(free), dim), (), ()))


def rule_of(operator: OpOverload, args: facts.Args, kwargs: facts.Kwargs) -> Rule | None:
    """None if the table of operators does not say what decides the shape."""
    name = facts.facts_of(operator).shape_decided_by
    if not name:
        return None
    deciding = facts.given(operator, name, args, kwargs)
    tensors = tuple(facts.tensors(deciding))
    if not isinstance(deciding, torch.Tensor):
        tensors = tuple(t for t in tensors if t.dtype in _MASKS)
    return Rule(operator, args, kwargs, tensors)


def result(
    operator: OpOverload, args: facts.Args, kwargs: facts.Kwargs, real: Mapping[int, torch.Tensor]
) -> Any:
    """Return the result of the call as tensors of its shape, fake under a FakeTensorMode. real: id
    of a deciding tensor -> real tensor; other tensors are zeros, since shapes and strides do not
    depend on them."""

    def known(tensor: torch.Tensor) -> torch.Tensor:
        value = real.get(id(tensor))
        return _like(tensor).zero_() if value is None else value

    with _disable_current_modes(), torch.no_grad():
        real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, known, (args, kwargs))
        real_args, real_kwargs = pytree.tree_map_only(
            torch.SymInt, lambda n: int(known_number(n)), (real_args, real_kwargs)
        )
        value = operator(*real_args, **real_kwargs)
    if isinstance(value, torch.Tensor):
        return _like(value)
    return tuple(map(_like, value))


def sized(unsized: Any, result: Any, counts: Sequence[Any]) -> Any:
    """Return `result` of a call with symbols as sizes. unsized: the same with unknown sizes where
    values decide; counts: what these are, as ints or symbols. Raises StaticSizes."""

    def of(fake: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        shape = [counts[0] if is_unknown(n) else n for n in _SHAPE(fake)]
        order = outermost_first(made.stride())
        is_dense = dense_strides(made.shape, order) == made.stride()
        is_one = all(bool(c == counts[0]) for c in counts)
        if not (is_dense and is_one and hints(shape) == tuple(made.shape)):
            raise StaticSizes("a size follows from values in a way that has no expression")
        strides = dense_strides(shape, order)
        return torch.empty_strided(shape, strides, dtype=made.dtype, device=made.device)

    is_one = isinstance(result, torch.Tensor)
    of_rule, made = ((unsized,), (result,)) if is_one else (unsized, result)
    if not any(is_unknown(n) for fake in of_rule for n in _SHAPE(fake)):
        [int(c) for c in counts]  # the rule has made constants of them
    found = tuple(map(of, of_rule, made))
    return found[0] if is_one else found


_SHAPE = torch._C.TensorBase.shape.__get__  # type: ignore[attr-defined]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    layout = hints(_SHAPE(tensor)), hints(torch._C.TensorBase.stride(tensor))
    return torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device)
