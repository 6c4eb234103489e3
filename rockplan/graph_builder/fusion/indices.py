"""Indices: where kernels index one tensor by the elements of another, and whether indices are in
range.

takes: Kernels, arguments. returns: what kernels compute, by the operators that they fuse; a check
of indices before a kernel runs; arguments for a trial run. guarantees: with these arguments a
kernel reads within its tensors: on CUDA an index out of range ends the process's use of the device,
on CPU, in one of several threads, the process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.symbols import function_of
from rockplan.graph_builder.recorded.evaluate import substitute
from rockplan.graph_builder.recorded.specs import dtype_of, is_floating, tensor_of
from rockplan.values.graph import Kernel, TensorSpec, ValueRef, refs
from rockplan.values.sizes import exchanged, texts_in


def at_sizes(kernel: Kernel, sizes: Sequence[int]) -> Kernel:
    """Return the kernel with constants in place of its symbols, still with its name."""
    parts = (kernel.inputs, kernel.calls, kernel.result_specs)
    texts = texts_in(parts)
    values = function_of((size.text for size in kernel.sizes), texts)(tuple(sizes))
    known = dict(zip(texts, values, strict=True))
    inputs, calls, specs = exchanged(parts, lambda one: int(known[one.text]))
    return replace(kernel, inputs=inputs, calls=calls, result_specs=specs, sizes=())


def computed(kernel: Kernel, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the kernel's results, computed by the operators that it fuses on the device of
    `arguments` (without any, the kernel's). Intermediate tensors are freed after their last use."""
    device = arguments[0].device if arguments else torch.device(kernel.device)
    values: dict[int, Any] = dict(enumerate(arguments))

    def moved(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    last = {v: i for i, c in enumerate(kernel.calls) for v in (r.index for r in refs(c))}
    last |= dict.fromkeys(kernel.results, len(kernel.calls))
    for position, call in enumerate(kernel.calls):
        args = pytree.tree_map(moved, [substitute(a, values.__getitem__) for a in call.args])
        kwargs = {k: moved(substitute(a, values.__getitem__)) for k, a in call.kwargs}
        result = facts.resolve(call.op)(*args, **kwargs)
        results = result if isinstance(result, list | tuple) else [result]
        values |= {r: t for r, t in zip(call.results, results, strict=True) if r is not None}
        values = {v: t for v, t in values.items() if last.get(v, -1) > position}
        del args, kwargs, result, results
    return [values[r] for r in kernel.results]


def looks_of(kernel: Kernel) -> dict[int, torch.Tensor]:
    """Return value -> meta tensor for all values of the kernel."""
    made = {r for call in kernel.calls for r in call.made}
    values = sorted({*range(len(kernel.inputs)), *made})
    shapes = [tensor_of(replace(s, device="meta")) for s in kernel.inputs]
    every = replace(kernel, results=tuple(values))
    return dict(zip(values, computed(every, shapes), strict=True))


LARGER = 4
"""How many times larger than the indices their operands may be, to be checked before each call."""


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Indexing in dimension `dim` of the value `table` by the elements of the value `index`."""

    table: int
    dim: int
    index: int
    is_from_end: bool
    """True if negative indices count from the end."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Valid range of the index that is result `place`: from `least` up to but not including `size`,
    the size of dimension `dim`."""

    place: int
    dim: int
    size: int
    least: int


@dataclass(frozen=True, slots=True)
class _Indices:
    """kernel: the part of a kernel that computes indices, its results; ranges: one for each use."""

    kernel: Kernel
    ranges: tuple[_Range, ...]

    def outside(self, arguments: Sequence[Any]) -> tuple[int, _Range] | None:
        """Return (an index out of range, the range that it violates) for these arguments of the
        kernel, or None if all indices are in range."""
        found = computed(self.kernel, arguments)
        for one in self.ranges:
            lowest, highest = (int(end) for end in torch.aminmax(found[one.place]))
            if lowest < one.least or highest >= one.size:
                return (lowest if lowest < one.least else highest), one
        return None


def _indices_of(kernel: Kernel) -> _Indices | None:
    """None if it indexes nothing."""
    lookups = tuple(_lookups(kernel))
    if not lookups:
        return None
    tensors = looks_of(kernel)
    indices = _only(kernel, tuple(dict.fromkeys(one.index for one in lookups)))
    ranges = []
    for one in lookups:
        size = tensors[one.table].shape[one.dim] if tensors[one.table].dim() else 1
        place = indices.results.index(one.index)
        ranges.append(_Range(place, one.dim, size, -size * one.is_from_end))
    return _Indices(indices, tuple(ranges))


def look_at_indices(kernel: Kernel) -> Callable[[Sequence[Any]], None] | str | None:
    """Return a function of the arguments that raises IndexError if the kernel would read out of
    range. Return None if no check is needed (no indexing, or a device other than the CPU); a text,
    the reason why the kernel must not be used, if the check would compute tensors more than
    `LARGER` times larger than the largest index."""
    indices = _indices_of(kernel) if kernel.device == "cpu" else None
    if indices is None:
        return None
    tensors = looks_of(kernel)
    largest = max(tensors[i].numel() for i in indices.kernel.results)
    argument_storages = {tensors[i].untyped_storage()._cdata for i in range(len(kernel.inputs))}
    for value in (r for call in indices.kernel.calls for r in call.made):
        is_view = tensors[value].untyped_storage()._cdata in argument_storages
        if not is_view and tensors[value].numel() > LARGER * largest:
            return "its indices are made of what is larger than they are"

    count = len(kernel.sizes)
    known: dict[Any, _Indices | None] = {tuple(kernel.sizes): indices}

    def look(arguments: Sequence[Any]) -> None:
        """Raise IndexError, as eager does, if these arguments give an index out of range."""
        sizes = tuple(arguments[:count])
        if sizes not in known:
            known[sizes] = _indices_of(at_sizes(kernel, sizes))
        own = known[sizes]
        found = own and own.outside(arguments[count:])
        if found:
            index, allowed = found
            raise IndexError(
                f"index {index} is out of bounds for dimension {allowed.dim} with size "
                f"{allowed.size}"
            )

    return look


def _lookups(kernel: Kernel) -> Iterator[_Lookup]:
    for call in kernel.calls:
        arguments: Any = call.args
        table, *others = arguments
        if call.op == "aten.gather.default":
            yield _Lookup(table.index, others[0], others[1].index, is_from_end=False)
        elif call.op == "aten.index.Tensor":
            for dim, index in enumerate(others[0]):
                if isinstance(index, ValueRef):
                    yield _Lookup(table.index, dim, index.index, is_from_end=True)


def _only(kernel: Kernel, results: tuple[int, ...]) -> Kernel:
    needed, calls = set(results), []
    for call in reversed(kernel.calls):
        if needed.intersection(call.results):
            needed.update(r.index for r in refs(call))
            calls.append(call)
    return replace(kernel, calls=tuple(reversed(calls)), results=results)


# -- trials ------------------------------------------------------------------------------------

_MOST_TRIES = 500


def trial_inputs(kernel: Kernel) -> list[torch.Tensor]:
    """Return arguments on which the kernel reads within its tensors. Raises RuntimeError if none
    are found in `_MOST_TRIES` tries."""
    fills = _fills(kernel)
    return [filled(spec, fills.get(i, 0)) for i, spec in enumerate(kernel.inputs)]


def is_within(kernel: Kernel, arguments: Sequence[torch.Tensor]) -> bool:
    """Return whether the kernel would read within its tensors."""
    indices = _indices_of(kernel)
    return indices is None or _is_within(indices, [a.cpu() for a in arguments])


def filled(spec: TensorSpec, fill: int = 0) -> torch.Tensor:
    return tensor_of(
        spec, lambda n, dtype, device: torch.full((n,), fill, dtype=dtype, device=device)
    )


def _is_within(indices: _Indices, arguments: Sequence[Any]) -> bool:
    try:
        return indices.outside(arguments) is None
    except facts.CALL_ERRORS:  # a tensor of indices is itself indexed out of range
        return False


def _fills(kernel: Kernel) -> dict[int, int]:
    """Return position of an input -> the integer to fill it with so that all indices are in range;
    other inputs are to be zeros. Raises RuntimeError if none are found in `_MOST_TRIES` tries."""
    indices = _indices_of(kernel)
    if indices is None:
        return {}
    read = {r.index for call in indices.kernel.calls for r in refs(call)}
    read.update(indices.kernel.results)
    specs = {i: replace(s, device="cpu") for i, s in enumerate(kernel.inputs) if i in read}
    ranges = {
        i: torch.iinfo(dtype_of(s))
        for i, s in specs.items()
        if not is_floating(s) and dtype_of(s) is not torch.bool
    }
    unread = torch.empty(0)
    zeros = [filled(specs[i]) if i in specs else unread for i in range(len(kernel.inputs))]
    for numbers in itertools.islice(_candidates(indices, len(ranges)), _MOST_TRIES):
        fills = dict(zip(ranges, numbers, strict=True))
        if all(ranges[i].min <= fill <= ranges[i].max for i, fill in fills.items()):
            others = (filled(specs[i], fills[i]) if i in fills else z for i, z in enumerate(zeros))
            if _is_within(indices, tuple(others)):
                return fills
    raise RuntimeError("no integers are found by which it reads within its tensors")


def _candidates(indices: _Indices, count: int) -> Iterator[tuple[int, ...]]:
    """Yield tuples of `count` integers to try as fills of the integer inputs: first one number for
    all, then all combinations. The numbers are 0, 1 and those near literals in the calls (terms on
    the way to an index) and near sizes."""
    literals = [n for call in indices.kernel.calls for n in _numbers((call.args, call.kwargs))]
    literals += [one.size for one in indices.ranges]
    around = (n for literal in literals for n in (literal, literal + 1, literal - 1, -literal))
    numbers = tuple(dict.fromkeys((0, 1, *around)))
    yield from ((number,) * count for number in numbers)
    yield from itertools.product(numbers, repeat=count)


def _numbers(arguments: Any) -> Iterator[int]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _numbers(argument)
        elif type(argument) is int:
            yield argument
