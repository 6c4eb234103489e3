"""Returned: what the caller does to the results of a call before their gradients come.

Gradients that flow between results of one plan stay inside the plan, so two things would go wrong
silently. If one result is computed from another, the gradient of the latter is the sum of what
comes from outside and of what comes through the plan, but a hook on it would see and change only
the former. If results share memory, an in-place change of one changes the others, and autograd does
not know, since each is a tensor of its own.
takes: the leaves of a result, the tensors of a call. returns: Returned. guarantees: no result is
kept alive, and modules whose results are unrelated pay nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef

from rockplan.errors import BackwardError
from rockplan.values.graph import CDGraph, TensorSpec
from rockplan.values.interface import Interface


@dataclass(frozen=True)
class Relations:
    """How the results of a module are related, each given by its position among the leaves.

    results: those that are tensors, in order; apart: for results that require a gradient, (result,
    results that it is directly computed from), the latter listed first; made_from: (result, all
    results that it is computed from); shared: pairs with gradient in one storage, with what
    describes them; overlapping: those of them that share elements.
    """

    results: tuple[int, ...]
    apart: tuple[tuple[int, tuple[int, ...]], ...]
    made_from: tuple[tuple[int, tuple[int, ...]], ...]
    shared: tuple[tuple[int, int, TensorSpec, TensorSpec], ...]

    @functools.cached_property
    def overlapping(self) -> tuple[tuple[int, int], ...]:
        return tuple((i, j) for i, j, a, b in self.shared if not _are_apart(a, b))


def relations(graph: CDGraph, interface: Interface) -> Relations:
    """Return which results are tensors, and, of those with gradient, which are computed from which
    others, and which pairs may overlap in memory."""
    values = {
        i: graph.values[leaf.value]
        for i, leaf in enumerate(interface.outputs)
        if leaf.value is not None and leaf.first == i and leaf.requires_grad
    }
    shared = tuple(
        (i, j, values[i].spec, values[j].spec)
        for i, j in itertools.combinations(values, 2)
        if values[i].data == values[j].data
    )
    made_from = {i: interface.outputs[i].made_from for i in values}
    in_order = sorted(values, key=lambda i: len(made_from[i]))
    apart: list[tuple[int, tuple[int, ...]]] = []
    for made in in_order if len(values) > 1 else ():
        beyond = {i for between in made_from[made] for i in made_from[between]}
        apart.append((made, tuple(i for i in made_from[made] if i not in beyond)))
    return Relations(interface.results, tuple(apart), tuple(made_from.items()), shared)


def _are_apart(a: TensorSpec, b: TensorSpec) -> bool:
    """Return whether two tensors in one storage are known to have no element in common.

    Two slices along a dimension lie in different ranges within each step of the dimensions before
    it; slices along the first dimension, in different ranges of the storage.
    """
    if 0 in (*a.shape, *b.shape):
        return True
    if a.dtype != b.dtype:  # other strides and offsets for the same bytes
        return False
    steps = {s for spec in (a, b) for s in spec.stride if s > 0}
    return any(_are_apart_within(a, b, step) for step in (None, *sorted(steps)))


def _are_apart_within(a: TensorSpec, b: TensorSpec, step: int | None) -> bool:
    """Return whether the elements of `a` and `b` lie in different ranges of each period of `step`
    elements of the storage. Strides of at least `step` must be multiples of it; None: the storage
    is one period."""
    one, other = _range_within(a, step), _range_within(b, step)
    return one is not None and other is not None and (one[1] < other[0] or other[1] < one[0])


def _range_within(spec: TensorSpec, step: int | None) -> tuple[int, int] | None:
    """Return the first and last offset (in elements) that the tensor reaches within a period of
    `step` elements, None for the whole storage; None if it does not stay in one range of each
    period."""
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
    """The results of one call, watched after they were returned."""

    def __init__(self, related: Relations, results: Mapping[int, torch.Tensor]) -> None:
        """Begin to watch. results: position -> tensor, for `related.results`."""
        self._related = related
        inner = {j for _, direct in related.apart for j in direct}
        self._hooks = {j: _hooks(results[j]) for j in inner}
        self._tensors = {j: TensorWeakRef(results[j]) for j in inner}
        positions = {i for pair in related.overlapping for i in pair}
        self._counters = {i: counter_of(results[i]) for i in sorted(positions)}
        self._versions = {i: counter._version for i, counter in self._counters.items()}

    def check_between(self, made: int, ends_here: bool) -> None:
        """Raise BackwardError if the gradient of leaf `made` should be seen on its way to a result
        that `made` is computed from, by a hook or by autograd.grad: this part stays inside the
        plan. ends_here: autograd goes on from `made` to such results only."""
        made_from = dict(self._related.made_from)[made]
        if ends_here:
            names = ", ".join(f"leaf {i}" for i in made_from)
            raise BackwardError(
                f"the gradient from leaf {made} of the module's result to one that it is computed "
                f"from ({names}) was asked for, by autograd.grad or backward(inputs=...): it stays "
                f"inside the plan. {_REMEDY}"
            )
        for inner in made_from:
            tensor, hooks = self._tensors[inner](), self._hooks[inner].values()
            if any(map(_sees_the_gradient, hooks)) or (tensor is not None and tensor.retains_grad):
                raise BackwardError(
                    f"there is a hook on leaf {inner} of the module's result (or it retains its "
                    f"gradient), and a part of its gradient comes from leaf {made}, which is "
                    "computed from it: that part stays inside the plan, where no hook sees or "
                    f"changes it. {_REMEDY}; to change the gradient, do it in the forward, by a "
                    "custom autograd.Function"
                )

    def check_memory(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Raise BackwardError if two results share memory, one of them was modified in place since
        the forward, and one has a gradient. gradients: of all results, in order, or None."""
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
    """Autograd calls these also after the tensor is deleted, or was changed in place and has new
    ones."""
    result.register_hook(_no_hook).remove()
    hooks: Mapping[int, object] | None = result._backward_hooks
    assert hooks is not None
    return hooks


def _sees_the_gradient(hook: object) -> bool:
    """Return False for hooks of `fully_shard`, which only learn that the backward pass begins."""
    return not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _no_hook(gradient: torch.Tensor) -> None:
    """Do nothing: registering and removing it creates the dictionary that hooks are kept in."""


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor whose version counter is that of `tensor`."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter
