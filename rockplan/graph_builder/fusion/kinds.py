"""Kinds: the kernel of a group, with values numbered from 0.

takes: a Dataflow, a group. returns: what a call of its kernel reads and makes, and the Kernel.
guarantees: groups that compute the same from tensors of equal specs have equal kernels, name
included: equal layers are compiled once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod

from rockplan.graph_builder.digests import call_fields, digest, spec_fields
from rockplan.graph_builder.fusion.dataflow import Dataflow
from rockplan.graph_builder.fusion.groups import Group
from rockplan.graph_builder.fusion.indices import at_sizes
from rockplan.graph_builder.fusion.parts import PartKind, words
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.graph_builder.tracing.free_sizes import StaticSizes
from rockplan.values.graph import NAMESPACE, Kernel, TensorSpec, renamed
from rockplan.values.sizes import Real, Size, text_of, texts_in

_ALIGNED_BYTES = 16
"""Triton compiles other code if the address of the first element is no multiple of this."""

_NAMED = 4
"""Most operators in the name of a kernel."""

_UNNAMED = words(
    "alias arange clone convert_element_type full full_like iota scalar_tensor zeros ones"
)


@dataclass(frozen=True, slots=True)
class Fused:
    """A group as a call. inputs: values that it reads; results: values that it makes, one for each
    of the group's targets; owners: positions of the recorded calls that it computes (parts of)."""

    group: Group
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    owners: tuple[int, ...]
    kernel: Kernel


def fused_group(
    flow: Dataflow,
    stored: Collection[int],
    group: Group,
    recorded_values: int,
    keeps_roundings: bool,
    sizes: Sequence[Size | Real],
) -> Fused:
    """Return the kernel of a group and its call. stored: storages in memory between kernels;
    recorded_values: number of values of the capture: values with higher numbers are internal to a
    decomposition; keeps_roundings: the kernel rounds where eager's operators do; sizes: symbols of
    the capture, with their numbers."""
    building = _Building(flow, stored, group, recorded_values)
    inputs, positions = building.inputs_and_parts()
    results = tuple(flow.made[t].value for t in group.targets)
    local = {v: i for i, v in enumerate(inputs)}
    parts = [flow.parts.parts[p] for p in positions]
    for part in parts:
        for made in part.makes:
            local.setdefault(made, len(local))
    calls = []
    for part in parts:
        call = renamed(part.call, local.__getitem__, local.__getitem__)
        own = tuple(None if r is not None and r < len(inputs) else r for r in call.results)
        calls.append(replace(call, results=own))
    values = flow.parts.values
    specs = tuple(_as_input(values[v].spec, flow.is_given(flow.storage(v))) for v in inputs)
    kernel = Kernel(
        "",
        specs,
        tuple(calls),
        tuple(local[r] for r in results),
        tuple(values[r].spec for r in results),
        values[results[0]].spec.device,
        keeps_roundings,
        tuple(n for v, n in local.items() if v < recorded_values) if keeps_roundings else (),
    )
    texts = texts_in((kernel.calls, specs, kernel.result_specs))
    named = {*re.findall(r"\w+", " ".join(texts))}
    numbers = [size for size in sizes if size.text in named]
    symbols = tuple(number for number in numbers if isinstance(number, Size))
    if len(symbols) < len(numbers) or any(isinstance(one, Real) for one in texts.values()):
        raise StaticSizes("a kernel reads a floating-point number of the call")
    kernel = replace(kernel, sizes=symbols)
    work = [part for part in parts if part.kind is not PartKind.VIEW]
    owners = tuple(sorted({part.owner for part in work}))
    packets = dict.fromkeys(part.call.op.split(".")[1] for part in work)
    stems = [p.strip("_") for p in packets if p not in _UNNAMED]
    stem = "_".join(stems[:_NAMED] + ["etc"] * (len(stems) > _NAMED)) or "fill"
    return Fused(group, inputs, results, owners, _named(kernel, stem))


class _Building:
    """Finds the inputs and parts of one kernel."""

    def __init__(
        self, flow: Dataflow, stored: Collection[int], group: Group, recorded_values: int
    ) -> None:
        self._flow = flow
        inner = frozenset(stored) - frozenset(group.targets)
        self._interior = flow.interior(group.targets, inner)
        self._recorded_values = recorded_values
        self._inputs: dict[int, None] = {}
        self._parts: set[int] = set()

    def inputs_and_parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (numbers of the values that the kernel reads, in order of first use; positions of
        the parts that it computes, views included, ascending)."""
        flow, parts = self._flow, self._flow.parts.parts
        inside = set(self._interior)
        makers = {flow.made[storage].maker: None for storage in self._interior}
        positions = set(makers)
        reads = dict.fromkeys(v for maker in makers for v in parts[maker].reads)
        chains: dict[int, list[list[int]]] = {}
        for value in reads:
            chain = self._chain(value)
            if flow.storage(value) in inside:
                positions.update(flow.views[v] for v in chain[1:])
            else:
                chains.setdefault(chain[0], []).append(chain)
        inputs = []
        for alike in chains.values():
            start = self._start(alike)
            inputs.append(alike[0][start])
            positions.update(flow.views[v] for chain in alike for v in chain[start + 1 :])
        return tuple(inputs), tuple(sorted(positions))

    def _chain(self, value: int) -> list[int]:
        chain = [value]
        while (position := self._flow.views.get(chain[-1])) is not None:
            chain.append(self._flow.parts.parts[position].reads[0])
        return chain[::-1]

    def _start(self, chains: list[list[int]]) -> int:
        """Return at which place along chains of views of one storage the kernel takes its input: 0
        is the whole storage. A later place is that of a smaller tensor, common to all chains, that
        a recorded call makes: otherwise each slice of one tensor would need another kernel."""
        values = self._flow.parts.values
        elements = prod(values[chains[0][0]].spec.shape)
        for place in range(1, min(map(len, chains))):
            value = chains[0][place]
            if any(chain[place] != value for chain in chains):
                break
            if prod(values[value].spec.shape) < elements and value < self._recorded_values:
                return place
        return 0


def _as_input(spec: TensorSpec, is_given: bool) -> TensorSpec:
    """Return the spec of an input, whose offset is reduced to what the alignment of its address
    depends on (on the CPU 0). is_given: the caller provides the tensor, at any address in the next
    call, so the kernel assumes no alignment."""
    elements = _ALIGNED_BYTES // dtype_of(spec).itemsize if spec.device != "cpu" else 1
    is_any = is_given or isinstance(spec.offset, Size)
    return replace(spec, offset=1 % elements if is_any else spec.offset % elements)


def static_kernel(kernel: Kernel) -> Kernel:
    """Return the kernel for the sizes that it is compiled for alone, as it is without symbols."""
    return _named(at_sizes(kernel, kernel.sizes), kernel.name.rpartition("_")[0])


def _named(kernel: Kernel, stem: str) -> Kernel:
    content = [
        [spec_fields(s) for s in kernel.inputs],
        [call_fields(c) for c in kernel.calls],
        list(kernel.results),
        [spec_fields(s) for s in kernel.result_specs],
        kernel.device,
        [kernel.keeps_roundings, list(kernel.rounded)],
    ]
    if kernel.sizes:
        content += [_texts(content)]
    op = f"{NAMESPACE}.{stem}_{digest(content)[:16]}.default"
    return replace(kernel, op=op)


def _texts(content: object) -> object:
    if isinstance(content, list | tuple):
        return [*map(_texts, content)]
    return text_of(content) if isinstance(content, int) else None
