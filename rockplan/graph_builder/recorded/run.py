"""Run: the operators of one recorded step, forward then backward, as values.

A recording returns a run, and each run pass of `graph_builder.pipeline` takes and returns one;
`recorded.rules` says what is legal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.rows import Effect
from rockplan.graph_builder.operators.symbols import known_number
from rockplan.graph_builder.recorded.results import fake_device
from rockplan.graph_builder.recorded.text import run_text
from rockplan.graph_builder.recorded.view import RunView
from rockplan.python_state import trees
from rockplan.values.graph import Call, Kernel, Phase, TensorSpec
from rockplan.values.interface import EVERYTHING, AttributesRead, Guard, OutputLeaf, Question
from rockplan.values.sizes import STATIC, Sizes


@dataclass(frozen=True, slots=True)
class RecordedValue:
    """One tensor. storage: number of its memory; storage_bytes: size of that memory."""

    spec: TensorSpec
    storage: int
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One operator call. reads: values among its arguments, in order; writes: values that it
    changes in place; random: it draws random numbers; function: number of the autograd function
    that makes it in the backward pass, below 0 if that is Python's; 0 for none; ends: storages that
    eager lets go after it; was_in_place: eager changes an operand in place."""

    call: Call
    phase: Phase
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    random: bool
    module: str
    source: str
    function: int = field(default=0, compare=False, repr=False)
    ends: tuple[int, ...] = field(default=(), compare=False, repr=False)
    was_in_place: bool = field(default=False, compare=False, repr=False)

    @property
    def effect(self) -> Effect:
        """Side effect besides its results and random draws."""
        return facts.facts_of(self.call.op).effect

    @property
    def is_repeatable(self) -> bool:
        """True if it has no side effect and computes the same every time."""
        return not (self.random or self.effect)


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of `tensor`; sparse and nested layouts have no strides.

    It uses functions of the base class: while recording, an attribute of a fake tensor is
    intercepted in Python (`tensor_questions`).
    """
    of = torch._C.TensorBase
    return TensorSpec(
        shape=tuple(map(known_number, of.shape.__get__(tensor))),  # type: ignore[attr-defined]
        stride=tuple(map(known_number, of.stride(tensor))),
        offset=known_number(of.storage_offset(tensor)),
        dtype=str(of.dtype.__get__(tensor)),  # type: ignore[attr-defined]
        device=str(fake_device(tensor) if type(tensor) is FakeTensor else tensor.device),
        is_conj=of.is_conj(tensor),
        is_neg=of.is_neg(tensor),
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the head is tiled. parts: number of parts, 0 if it is not tiled; whole: values of which
    each part reads some rows; joined: values put together, or summed, from parts. Values of both
    kinds are not computed by parts."""

    parts: int = 0
    whole: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()


NO_TILES = Tiles()


@dataclass(frozen=True)
class Capture:
    """One recorded run.

    parameters, buffers: (dotted name, value); inputs: (leaf position, value);
    constants: (value, tensor); gradients: (value of a parameter or input, value of its gradient
    or None if the result does not depend on it); arrivals: how many gradients arrive at each of
    these, where other sums are of tensors inside. The backward pass is recorded without autocast;
    backward_ignores_autocast: it would be the same under the autocast state of the forward.
    output_spec: tree structure of the result.
    samples: value -> real tensor, for integer inputs and what is computed from them and constants.
    copies: (value of a buffer, value that holds two copies of it), see
    `lowering.buffer_copies`. kernels: those that calls name, see `fusion`. tiles: how the head is
    tiled, see `tiling`. distributed, reads, numbers, unread, idle: as in Interface. sizes: symbols
    of its sizes, if it is for calls of several.
    """

    values: tuple[RecordedValue, ...]
    calls: tuple[RecordedCall, ...]
    parameters: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    inputs: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, torch.Tensor], ...]
    outputs: tuple[OutputLeaf, ...]
    gradients: tuple[tuple[int, int | None], ...]
    guards: tuple[Guard, ...]
    questions: tuple[Question, ...]
    backward_ignores_autocast: bool
    output_spec: trees.TreeSpec
    samples: dict[int, torch.Tensor]
    copies: tuple[tuple[int, int], ...] = ()
    kernels: tuple[Kernel, ...] = ()
    tiles: Tiles = NO_TILES
    distributed: tuple[tuple[int, Any], ...] = ()
    reads: AttributesRead = EVERYTHING
    sizes: Sizes = STATIC
    numbers: tuple[tuple[int, int | float], ...] = ()
    unread: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    arrivals: tuple[int, ...] = ()

    @cached_property
    def view(self) -> RunView:
        """Facts of the run that passes need."""
        return RunView(self)

    def __str__(self) -> str:
        """Return a Python-like line for each call."""
        return run_text(self)
