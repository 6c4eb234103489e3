"""Interface: how the values of a captured graph meet the module and its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rockplan.values.graph import Call, CDGraph, TensorSpec
from rockplan.values.sizes import STATIC, CallSizes, Sizes


@dataclass(frozen=True, slots=True)
class PlacedStrides:
    """How a DTensor lies in memory. strides: of its local tensor; spec: how the local tensors of
    all processes make the whole."""

    strides: tuple[int, ...]
    spec: Any

    def __str__(self) -> str:
        return f"{self.strides} of {', '.join(map(str, self.spec.placements))}"


Strides = tuple[int, ...] | PlacedStrides

Incoming = Mapping[int, Strides | None]
"""Position of a leaf of the result that backward starts from -> strides of its incoming gradient,
None if they equal those of the leaf."""


@dataclass(frozen=True, slots=True)
class Precedent:
    """The leaves that backward started from in an earlier call of other sizes or values. A new kind
    of call most likely starts from the same ones.

    is_repeated: the kind of call planned before it started from them too; shapes: of these leaves,
    where strides of the same shape are to be the same, however they are.
    """

    incoming: Incoming
    is_repeated: bool
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unmade:
    """A leaf of the result that no call makes, since the caller reads only the loss. name: its path
    in the result, as Python writes it."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """One leaf of the module's result: a tensor (`value`) or a literal, which may be `Unmade` or a
    `GivenLeaf`.

    first: position of the first leaf that is the same tensor object; its own position if it is the
    first. made_from: positions of the other leaves that it is computed from: a part of their
    gradients comes through it. tangent: value of its incoming gradient, None if it is not
    differentiated, or not the first. requires_grad: as in eager execution. spec, tangent_spec: of
    those that are DTensors, whose values are their local tensors.
    """

    value: int | None
    literal: object
    first: int
    made_from: tuple[int, ...]
    tangent: int | None
    requires_grad: bool
    spec: Any = None
    tangent_spec: Any = None


@dataclass(frozen=True, slots=True)
class GivenLeaf:
    """A leaf of the result that is the caller's own argument leaf, at this position. The plan does
    not touch it."""

    position: int


class _Absent:
    """The answer for an attribute that a tensor does not have; one object, also after pickling."""

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Question:
    """An attribute that the forward read from a tensor of the caller. Every later call must find
    the same answer.

    role, key: 'parameter' or 'buffer' and its name, 'input' and its leaf position; answer: in the
    form of `python_state.contents.described`, `ABSENT` for a missing attribute.
    """

    role: str
    key: str | int
    attribute: str
    answer: object


@dataclass(frozen=True, slots=True)
class Guard:
    """A value that Python read during capture: `calls` compute the arguments of `read` from
    integer inputs and buffers and from constants, and every later call of the planned module must
    get `expected` again; or, where that is a Size, what it gets is the size (`Interface.sizes`).

    Value references are in the numbering of the recorded run; inputs: (value, leaf position),
    constants, buffers: (value, position among these).
    """

    calls: tuple[Call, ...]
    read: Call
    expected: object
    inputs: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, int], ...]
    module: str
    source: str
    buffers: tuple[tuple[int, int], ...] = ()

    @property
    def is_of_sizes(self) -> bool:
        """True if the value depends on sizes alone."""
        return not (self.inputs or self.buffers or self.constants)


@dataclass(frozen=True, slots=True)
class AttributesRead:
    """Names of attributes that Python reads of a planned module and its submodules, and of
    configurations of transformers, in a step; None: any may be read."""

    of_modules: frozenset[str] | None = None
    of_configurations: frozenset[str] | None = None

    def __or__(self, other: AttributesRead) -> AttributesRead:
        """Return what either of two reads."""
        pairs = (
            (self.of_modules, other.of_modules),
            (self.of_configurations, other.of_configurations),
        )
        return AttributesRead(*(None if a is None or b is None else a | b for a, b in pairs))


EVERYTHING = AttributesRead()


@dataclass(frozen=True, slots=True)
class Interface:
    """Values of the graph by role.

    parameters, buffers: (dotted name, value); inputs: (leaf position of (args, kwargs), value);
    constants: values, in the order of the tensors kept beside; outputs: leaves of the result;
    gradients: (value of a parameter or input, contributions to its gradient). Autograd sums the
    contributions, in order, as it does for a tensor that is used several times; no contributions:
    the result does not depend on it. copies: (value of a buffer, value that holds two copies of
    its old content), see `graph_builder.lowering.buffer_copies`. mutated: residents whose memory
    the run changes.
    backward_ignores_autocast: the backward pass is the same under autocast as without.
    reads: attributes that decide whether the run is still right. unread: positions of leaves of the
    arguments of which it was shown that nothing looks at them; idle: of tensors that no operator
    reads (Python may).
    distributed: values of DTensors (of each its local tensor) that the caller has, with the spec of
    their gradient, None without one. sizes: symbols of the sizes of calls that it is for. numbers:
    (position, number) of leaves of the arguments.
    """

    parameters: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    inputs: tuple[tuple[int, int], ...]
    constants: tuple[int, ...]
    outputs: tuple[OutputLeaf, ...]
    gradients: tuple[tuple[int, tuple[int, ...]], ...]
    copies: tuple[tuple[int, int], ...]
    mutated: tuple[int, ...]
    guards: tuple[Guard, ...]
    questions: tuple[Question, ...]
    backward_ignores_autocast: bool
    distributed: tuple[tuple[int, Any], ...] = ()
    reads: AttributesRead = field(default=EVERYTHING, compare=False)
    sizes: Sizes = STATIC

    def call_in(self, graph: CDGraph) -> CallSizes:
        """Return what has the sizes of the call of `graph`."""
        specs = ((position, graph.values[value].spec) for position, value in self.inputs)
        layouts = {position: (spec.shape, spec.stride) for position, spec in specs}
        read = (g.expected for g in self.guards if not g.is_of_sizes)
        return CallSizes(layouts, dict(self.numbers), tuple(read))

    def sizes_in(self, graph: CDGraph) -> tuple[int, ...]:
        """Return the values of the symbols in the call of `graph`."""
        call = self.call_in(graph)
        return tuple(symbol.of(call) for symbol in self.sizes.symbols)

    numbers: tuple[tuple[int, int | float], ...] = ()
    unread: frozenset[int] = field(default=frozenset(), compare=False)
    idle: frozenset[int] = field(default=frozenset(), compare=False)

    @property
    def results(self) -> tuple[int, ...]:
        """Positions of the leaves that are tensors, one for each tensor object."""
        leaves = enumerate(self.outputs)
        return tuple(i for i, leaf in leaves if leaf.value is not None and leaf.first == i)

    @property
    def residents(self) -> tuple[int, ...]:
        """Values handed to the generated code, in this order."""
        named = [v for _, v in (*self.parameters, *self.buffers)]
        return (*named, *(v for _, v in self.inputs), *self.constants)
