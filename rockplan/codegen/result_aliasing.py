"""Returned: what the caller does to the results of a call before their gradients come.

A plan keeps to itself what flows between its results, so some of it would go wrong without a
word. Where a result is computed from another, the gradient of that is the sum of what comes from
outside, which is all that a hook on it would see and change, and of what comes by the plan. Where
results share memory, a change of one in place is one of the others, which autograd does not know,
since each is a tensor of its own to it.

takes: the leaves of a result, the tensors of a call. returns: Returned. guarantees: no result is
kept alive, and modules whose results have nothing to do with one another pay nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef

from rockplan.errors import BackwardError
from rockplan.values.graph import CDGraph, TensorSpec
from rockplan.values.interface import Interface


@dataclass(frozen=True, slots=True)
class Relations:
    """How the results of a module are related, each by its position among the leaves.

    results: those that are tensors, in order; apart: of several that require a gradient, (one,
    those that it is computed from without another between them), the latter before the former;
    made_from: (one, all that it is computed from); overlapping: pairs that require a gradient and
    share elements.
    """

    results: tuple[int, ...]
    apart: tuple[tuple[int, tuple[int, ...]], ...]
    made_from: tuple[tuple[int, tuple[int, ...]], ...]
    overlapping: tuple[tuple[int, int], ...]


def relations(graph: CDGraph, interface: Interface) -> Relations:
    """Of the results of `interface`."""
    values = {
        i: graph.values[leaf.value]
        for i, leaf in enumerate(interface.outputs)
        if leaf.value is not None and leaf.first == i and leaf.requires_grad
    }
    overlapping = tuple(
        (i, j)
        for i, j in itertools.combinations(values, 2)
        if values[i].data == values[j].data and not _are_apart(values[i].spec, values[j].spec)
    )
    made_from = {i: interface.outputs[i].made_from for i in values}
    in_order = sorted(values, key=lambda i: len(made_from[i]))
    apart = tuple((i, _direct(made_from, i)) for i in in_order) if len(values) > 1 else ()
    return Relations(interface.results, apart, tuple(made_from.items()), overlapping)


def _direct(made_from: Mapping[int, tuple[int, ...]], made: int) -> tuple[int, ...]:
    beyond = {i for between in made_from[made] for i in made_from[between]}
    return tuple(i for i in made_from[made] if i not in beyond)


def _are_apart(a: TensorSpec, b: TensorSpec) -> bool:
    """True if two tensors in one storage are known to have no element in common.

    Of two parts along a dimension, elements lie in different ranges within each step of the
    dimensions before it; of parts along the first one, in different ranges of the storage.
    """
    if 0 in (*a.shape, *b.shape):
        return True
    if a.dtype != b.dtype:  # other strides and offsets for the same bytes
        return False
    steps = {s for spec in (a, b) for s in spec.stride if s > 0}
    return any(_are_apart_within(a, b, step) for step in (None, *sorted(steps)))


def _are_apart_within(a: TensorSpec, b: TensorSpec, step: int | None) -> bool:
    """Where all that moves by `step` or more moves by multiples of it (None: nothing does), do
    the elements of `a` and `b` lie in different ranges of each step?"""
    one, other = _range_within(a, step), _range_within(b, step)
    return one is not None and other is not None and (one[1] < other[0] or other[1] < one[0])


def _range_within(spec: TensorSpec, step: int | None) -> tuple[int, int] | None:
    """First and last place of an element in a step; None where they are no range of it."""
    first = last = spec.offset if step is None else spec.offset % step
    for size, stride in zip(spec.shape, spec.stride, strict=True):
        if step is None or stride < step:
            last += (size - 1) * stride
        elif size > 1 and stride % step:
            return None
    return None if step is not None and last >= step else (first, last)


_REMEDY = (
    "Plan what computes the one and what computes the other as two modules, or use the original "
    "module for such steps"
)


class Returned:
    """The results of one call, after they were returned."""

    def __init__(self, related: Relations, results: Mapping[int, torch.Tensor]) -> None:
        """results: by position, as `related.results`."""
        self._related = related
        inner = {j for _, direct in related.apart for j in direct}
        self._hooks = {j: _hooks(results[j]) for j in inner}
        self._tensors = {j: TensorWeakRef(results[j]) for j in inner}
        positions = {i for pair in related.overlapping for i in pair}
        self._counters = {i: _counter(results[i]) for i in sorted(positions)}
        self._versions = {i: counter._version for i, counter in self._counters.items()}

    def check_between(self, made: int, ends_here: bool) -> None:
        """`made` has a gradient: raise BackwardError where somebody waits for what comes from it to
        a result that it is computed from.

        ends_here: autograd goes from there to such results, and no further.
        """
        made_from = dict(self._related.made_from)[made]
        if ends_here:
            names = ", ".join(f"leaf {i}" for i in made_from)
            raise BackwardError(
                f"the gradient from leaf {made} of the module's result to one that it is computed "
                f"from ({names}) was asked for, by autograd.grad or backward(inputs=...): it stays "
                f"inside the plan. {_REMEDY}"
            )
        for inner in made_from:
            if self._is_watched(inner):
                raise BackwardError(
                    f"there is a hook on leaf {inner} of the module's result (or it retains its "
                    f"gradient), and a part of its gradient comes from leaf {made}, which is "
                    "computed from it: that part stays inside the plan, where no hook sees or "
                    f"changes it. {_REMEDY}; to change the gradient, do it in the forward, by a "
                    "custom autograd.Function"
                )

    def _is_watched(self, inner: int) -> bool:
        """Is there a hook on it, or is it there and retains its gradient?"""
        tensor = self._tensors[inner]()
        hooks = filter(_sees_the_gradient, self._hooks[inner].values())
        return any(True for _ in hooks) or (tensor is not None and tensor.retains_grad)

    def check_memory(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Raise BackwardError where a result with a gradient may have been changed by another."""
        if not self._related.overlapping:
            return
        arrived = zip(self._related.results, gradients, strict=True)
        reached = {i for i, gradient in arrived if gradient is not None}
        for pair in self._related.overlapping:
            changed = [i for i in pair if self._counters[i]._version != self._versions[i]]
            if changed and not reached.isdisjoint(pair):
                raise BackwardError(
                    f"leaf {pair[0]} and leaf {pair[1]} of the module's result share memory, and "
                    "one of them was modified in place after the forward pass; gradients would be "
                    "wrong. Modify a clone of it (y = y.clone()), or return a clone"
                )


def _hooks(result: torch.Tensor) -> Mapping[int, object]:
    """The hooks on the gradient of `result`, those to come as well: autograd calls them also where
    the tensor is gone, or was changed in place and has others."""
    result.register_hook(_no_hook).remove()
    hooks: Mapping[int, object] | None = result._backward_hooks
    assert hooks is not None
    return hooks


def _sees_the_gradient(hook: object) -> bool:
    """Not so those of `fully_shard`: they only tell it, by the first of all results that has a
    gradient, that the backward pass begins."""
    return not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _no_hook(gradient: torch.Tensor) -> None:
    """It is removed at once, and leaves the dictionary that hooks are kept in."""


def _counter(result: torch.Tensor) -> torch.Tensor:
    """An empty tensor that has the version counter of `result`, and none of its memory."""
    counter = result.detach()
    counter.data = torch.empty(0, dtype=result.dtype, device=result.device)
    return counter
