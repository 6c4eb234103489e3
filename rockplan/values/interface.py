"""Interface: how the values of a captured graph meet the module and its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rockplan.values.graph import Call, TensorSpec

Incoming = Mapping[int, tuple[int, ...] | None]
"""Leaf of the result that backward starts from -> strides of its incoming gradient, None: those
of the leaf."""


@dataclass(frozen=True, slots=True)
class Precedent:
    """What the backward pass of an earlier call, in other sizes or with other values, started from:
    that of a new kind of call most likely starts from the same.

    is_repeated: so did the one that was planned before it.
    """

    incoming: Incoming
    is_repeated: bool


@dataclass(frozen=True, slots=True)
class Unmade:
    """A leaf of the result that no call makes, since the caller reads the loss alone. name: its
    path in the result, as Python writes it."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """One leaf of the module's result: a tensor (`value`) or a literal, which may be `Unmade` or a
    `GivenLeaf`.

    first: position of the first leaf that is the same tensor, which is one tensor outside, too; its
    own if none before it is. made_from: positions of the other leaves that it is computed from: a
    part of their gradients comes from its own. tangent: value of its incoming gradient, None if it
    is not differentiated, or not the first. requires_grad: as in eager execution.
    """

    value: int | None
    literal: object
    first: int
    made_from: tuple[int, ...]
    tangent: int | None
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class GivenLeaf:
    """Of a result, in place of a tensor: the very leaf of the arguments at this position, which the
    plan has nothing to do with."""

    position: int


class _Absent:
    """The answer where a tensor has no such attribute; one object, also after pickling."""

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Question:
    """What the forward has asked a tensor of the caller about itself: an attribute, which every
    later call must find again.

    role, key: 'parameter' or 'buffer' and its name, 'input' and its leaf position; answer: as
    `python_state.contents.described` has it, `ABSENT` where it has no such attribute.
    """

    role: str
    key: str | int
    attribute: str
    answer: object


Address = tuple[str, Any, tuple[tuple[str, Any], ...]]
"""How to come to an element of a holder of Python's: ('module', path of a submodule), ('file',
name of an imported one) or ('class', the class), then attributes and items: ('attribute', name) or
('item', key or position); ('all', None) for all elements of a list, a queue or a set."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What each call leaves at an address, outside of tensors; `ABSENT` where nothing is left."""

    address: Address
    value: Any


@dataclass(frozen=True, slots=True)
class Guard:
    """A value that Python read during capture: `calls` compute the arguments of `read` from
    integer inputs and buffers and from constants, and every later call of the planned module must
    find `expected` again.

    Value references are in the numbering of the recorded run; inputs: (value, leaf position),
    constants, buffers: (value, position among these). draws: `calls` are all the draws before the
    read, too, from where the generator is when the module is called.
    """

    calls: tuple[Call, ...]
    read: Call
    expected: object
    inputs: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, int], ...]
    module: str
    source: str
    buffers: tuple[tuple[int, int], ...] = ()
    draws: bool = False


@dataclass(frozen=True, slots=True)
class Interface:
    """Values of the graph by their role.

    parameters, buffers: (dotted name, value); inputs: (leaf position of (args, kwargs), value);
    constants: values, in the order of the tensors kept beside; outputs: leaves of the result;
    gradients: (value of a parameter or input, contributions to its gradient). Autograd sums the
    contributions, in order, as it does for a tensor that is used several times; none: the result
    does not depend on it. copies: (value of a buffer, value that holds two copies of what it was),
    see `graph_builder.lowering.buffer_copies`. mutated: residents whose memory the run changes.
    backward_ignores_autocast: the backward pass is the same under autocast as without.
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
    assignments: tuple[Assignment, ...]
    backward_ignores_autocast: bool

    @property
    def results(self) -> tuple[int, ...]:
        """Positions of the leaves that are tensors, one for each tensor."""
        leaves = enumerate(self.outputs)
        return tuple(i for i, leaf in leaves if leaf.value is not None and leaf.first == i)

    @property
    def residents(self) -> tuple[int, ...]:
        """Values handed to the generated code, in this order."""
        named = [v for _, v in (*self.parameters, *self.buffers)]
        return (*named, *(v for _, v in self.inputs), *self.constants)
