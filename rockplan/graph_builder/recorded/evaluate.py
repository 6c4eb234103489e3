"""Values that Python reads during capture, computed from the calls recorded so far.

A value that depends on constants only becomes a constant of the graph. One that depends on integer
inputs does too, with a Guard, and so does a bool that depends on a few numbers, given or drawn. One
that depends on parameters, or on other floating inputs or draws, is refused, because the captured
graph would silently be wrong for other values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.recorded.run import RecordedCall, RecordedValue
from rockplan.values.graph import Call, ValueRef


@dataclass(frozen=True, slots=True)
class Prefix:
    """The calls that some values depend on, in order, with in-place calls on storages that these
    read. leaves: the values that they start from, which no call makes."""

    recorded: tuple[RecordedCall, ...]
    leaves: frozenset[int]

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(recorded.call for recorded in self.recorded)

    @property
    def is_repeatable(self) -> bool:
        return all(recorded.is_repeatable for recorded in self.recorded)


def prefix(
    calls: Sequence[RecordedCall], values: Sequence[RecordedValue], targets: Sequence[int]
) -> Prefix:
    """Return what the values `targets` depend on."""
    storages = {values[v].storage for v in targets}
    needed = set(targets)
    kept: list[RecordedCall] = []
    for recorded in reversed(calls):
        made = set(recorded.call.made)
        touched = {values[v].storage for v in recorded.writes}
        if not (made & needed or touched & storages):
            continue
        kept.append(recorded)
        needed.update(recorded.reads)
        storages |= {values[v].storage for v in recorded.reads}
    kept.reverse()
    leaves: set[int] = set()
    known: set[int] = set()
    for recorded in kept:  # an in-place call reads what it returns
        leaves |= set(recorded.reads) - known
        known.update(recorded.call.made)
    return Prefix(tuple(kept), frozenset(leaves | (set(targets) - known)))


def run(calls: Sequence[Call], known: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Execute `calls` for real; return value -> tensor for `known` and for all results."""
    environment = dict(known)
    for call in calls:
        result = execute(call, environment)
        for index, leaf in zip(call.results, pytree.tree_leaves(result), strict=True):
            if index is not None:
                environment[index] = leaf
    return environment


def execute(call: Call, environment: Mapping[int, torch.Tensor]) -> Any:
    """Execute one call for real, without gradients, and return its result. environment: value ->
    tensor, for the values that the call reads."""
    operator = facts.resolve(call.op)
    args = [substitute(a, environment.__getitem__) for a in call.args]
    kwargs = {name: substitute(a, environment.__getitem__) for name, a in call.kwargs}
    with _disable_current_modes(), torch.no_grad():
        return operator(*args, **kwargs)


def substitute(argument: object, tensor: Callable[[int], Any]) -> Any:
    """Return `argument` of a call with each ValueRef replaced by `tensor(index)`, and tuples turned
    into the lists that ATen takes."""
    if isinstance(argument, ValueRef):
        return tensor(argument.index)
    if isinstance(argument, tuple):
        return [substitute(item, tensor) for item in argument]
    return argument


def flat_results(result: object) -> list[object]:
    """Return the results of a call as a flat list, in the order of `Call.results`."""
    if not isinstance(result, tuple | list):
        return [result]
    return [leaf for item in result for leaf in flat_results(item)]
