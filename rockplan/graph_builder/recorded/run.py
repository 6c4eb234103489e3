"""Run: the operators of one recorded step, forward then backward, as values.

A recording returns a run, and each run pass of `graph_builder.pipeline` takes and returns one;
`recorded.rules` says what is legal. `RunView` is the one place that computes what passes need to
know of a run, each fact once: which values share a storage, which calls make, change and read it,
which calls are needed, and what belongs to the caller.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.rows import Effect
from rockplan.graph_builder.operators.symbols import known_number
from rockplan.graph_builder.recorded.results import fake_device
from rockplan.python_state import trees
from rockplan.values import graph as graphs
from rockplan.values.interface import EVERYTHING, AttributesRead, Guard, OutputLeaf, Question
from rockplan.values.sizes import STATIC, Real, Size, Sizes, texts_in


@dataclass(frozen=True, slots=True)
class RecordedValue:
    """One tensor. storage: number of its memory; storage_bytes: size of that memory."""

    spec: graphs.TensorSpec
    storage: int
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One operator call. reads: values among its arguments, in order; writes: values that it
    changes in place; random: it draws random numbers; function: number of the autograd function
    that makes it in the backward pass, below 0 if that is Python's; 0 for none; ends: storages that
    eager lets go after it; was_in_place: eager changes an operand in place."""

    call: graphs.Call
    phase: graphs.Phase
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


def tensor_spec(tensor: torch.Tensor) -> graphs.TensorSpec:
    """Return the spec of `tensor`; sparse and nested layouts have no strides.

    It uses functions of the base class: while recording, an attribute of a fake tensor is
    intercepted in Python (`tensor_questions`).
    """
    of = torch._C.TensorBase
    return graphs.TensorSpec(
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
    kernels: tuple[graphs.Kernel, ...] = ()
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

    def without(self, positions: frozenset[int]) -> Capture:
        """Return the run without the leaves at `positions` of the arguments: nothing reads them."""
        inputs = tuple((i, value) for i, value in self.inputs if i not in positions)
        numbers = tuple((i, n) for i, n in self.numbers if i not in positions)
        return replace(self, inputs=inputs, numbers=numbers)

    @property
    def numbers_of_symbols(self) -> tuple[Size | Real, ...]:
        """Its symbols, with their numbers."""
        known = texts_in((self.values, self.numbers, self.guards, self.calls))
        return tuple(known[name] for name in self.sizes.names)


Gradients = tuple[tuple[int, tuple[int, ...]], ...]
"""(Target, its contributions) of each target, all values."""


class RunView:
    """Facts of one run, each computed at its first use. Positions are indices of calls.

    given: values that the caller provides, before the run or, for tangents, between its phases ->
    their kind; outputs: values that the caller gets, without gradients; copies: values that hold
    copies of buffers. It has no reference to the run, which would be a cycle.
    """

    def __init__(self, run: Capture) -> None:
        self.values, self.calls, self.gradients = run.values, run.calls, run.gradients
        self.arrivals = run.arrivals or (len(run.calls),) * len(run.gradients)
        self.given: dict[int, graphs.DataKind] = {}
        for kind, values in (
            (graphs.DataKind.PARAMETER, (v for _, v in run.parameters)),
            (graphs.DataKind.BUFFER, (v for _, v in run.buffers)),
            (graphs.DataKind.INPUT, (v for _, v in run.inputs)),
            (graphs.DataKind.CONSTANT, (v for v, _ in run.constants)),
            (graphs.DataKind.TANGENT, (o.tangent for o in run.outputs if o.tangent is not None)),
        ):
            for value in values:
                self.given.setdefault(value, kind)
        self.outputs = tuple(o.value for o in run.outputs if o.value is not None)
        self.copies = tuple(copy for _, copy in run.copies)

    # -- values and storages ---------------------------------------------------------------

    def spec(self, value: int) -> graphs.TensorSpec:
        return self.values[value].spec

    def storage(self, value: int) -> int:
        return self.values[value].storage

    def storages(self, values: Iterable[int]) -> frozenset[int]:
        return frozenset([self.values[v].storage for v in values])

    @cached_property
    def kinds(self) -> dict[int, graphs.DataKind]:
        """Storage -> its kind: which of the caller's it is, or in which phase it is made."""
        kinds: dict[int, graphs.DataKind] = {}
        for value, kind in self.given.items():
            kinds.setdefault(self.storage(value), kind)
        for recorded in self.calls:
            own = own_kind(recorded)
            for value in recorded.call.made:
                kinds.setdefault(self.storage(value), own)
        return kinds

    @cached_property
    def next_storage(self) -> int:
        """The first unused storage number."""
        return 1 + max((v.storage for v in self.values), default=-1)

    # -- who makes, changes and derives ----------------------------------------------------

    @cached_property
    def writers(self) -> dict[int, tuple[int, ...]]:
        """Storage -> positions of the calls that make it or change it, in order."""
        existing = set(self.storages(self.given))
        writers: dict[int, list[int]] = defaultdict(list)
        for position, recorded in enumerate(self.calls):
            new = self.storages(recorded.call.made) - existing
            existing |= new
            for storage in self.storages(recorded.writes) | new:
                writers[storage].append(position)
        return {storage: tuple(positions) for storage, positions in writers.items()}

    @cached_property
    def last_change(self) -> dict[int, int]:
        """Storage -> position of the last call that changes it in place."""
        calls = enumerate(self.calls)
        return {self.storage(v): position for position, c in calls for v in c.writes}

    @cached_property
    def changed_outside(self) -> frozenset[int]:
        """Storages of the model and of the caller that the run changes."""
        return frozenset(s for s in self.last_change if self.kinds[s].resident)

    @cached_property
    def views(self) -> dict[int, int]:
        """Value -> position of the call that makes it, a new tensor in the storage of another."""
        views: dict[int, int] = {}
        for position, recorded in enumerate(self.calls):
            read = self.storages(recorded.reads)
            for value in recorded.call.made:
                if self.storage(value) in read and value not in recorded.reads:
                    views.setdefault(value, position)
        return views

    def is_view(self, position: int) -> bool:
        """Return whether the call only derives views: no memory, no effect, no work."""
        recorded = self.calls[position]
        made = recorded.call.made
        return (
            bool(made) and not recorded.writes and all(self.views.get(v) == position for v in made)
        )

    def viewed_by(self, position: int) -> int | None:
        """Return the value that a view call views; None for other calls."""
        args = self.calls[position].call.args
        base = args[0] if args else None
        return base.index if isinstance(base, graphs.ValueRef) and self.is_view(position) else None

    def maker(self, value: int) -> int | None:
        """Return the position of the call that makes the storage of `value`; None if none does."""
        storage = self.storage(value)
        is_made = self.kinds[storage] in (graphs.DataKind.ACTIVATION, graphs.DataKind.GRADIENT)
        return self.writers[storage][0] if is_made else None

    def made(self, position: int) -> tuple[int, ...]:
        """Return the named results of the call."""
        return self.calls[position].call.made

    def is_plain(self, position: int) -> bool:
        """Return whether the call may run at any time: it is repeatable, writes nothing in place,
        and touches no storage that changes."""
        recorded = self.calls[position]
        touched = self.storages((*recorded.reads, *recorded.call.made))
        is_changed = not touched.isdisjoint(self.last_change)
        return recorded.is_repeatable and not recorded.writes and not is_changed

    # -- what is needed, and who reads ------------------------------------------------------

    @cached_property
    def wanted(self) -> frozenset[int]:
        """Storages of what the caller and autograd get."""
        gradients = (g for _, g in self.gradients if g is not None)
        return self.storages((*self.outputs, *gradients, *self.copies))

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Positions of the calls that are needed for `wanted`, for effects and for generators,
        without views, which are derived where they are read."""
        return self.needed_for(self.wanted)

    def needed_for(self, storages: Iterable[int]) -> tuple[int, ...]:
        """Return the positions of the calls that are needed for `storages`, for side effects and
        for generators, in order and without views."""

        def acts(position: int) -> bool:
            recorded = self.calls[position]
            return not recorded.is_repeatable or self.changes_outside(recorded)

        steps = [
            (p, self.storages((*c.call.made, *c.writes)), self.storages(c.reads))
            for p, c in enumerate(self.calls)
            if not self.is_view(p)
        ]
        return needed(steps, storages, acts)[0]

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Storage -> positions of the calls of `live` that read it."""
        readers: dict[int, list[int]] = defaultdict(list)
        for position in self.live:
            for storage in self.storages(self.calls[position].reads):
                readers[storage].append(position)
        return {storage: tuple(positions) for storage, positions in readers.items()}

    @property
    def contributions(self) -> Gradients:
        """For each target, the gradients that the engine of autograd sums up for it."""
        return self._split[0]

    @property
    def sums(self) -> frozenset[int]:
        """Positions of the calls that add these contributions."""
        return self._split[1]

    @cached_property
    def _split(self) -> tuple[Gradients, frozenset[int]]:
        return _split(self)

    # -- one call ---------------------------------------------------------------------------

    def touched_outside(self, recorded: RecordedCall) -> frozenset[int]:
        """Return storages of the caller's that the run changes and that this call touches."""
        return self.changed_outside & self.storages((*recorded.reads, *recorded.writes))

    def changes_outside(self, recorded: RecordedCall) -> bool:
        return not self.changed_outside.isdisjoint(self.storages(recorded.writes))

    def reads_changed(self, recorded: RecordedCall) -> bool:
        """Return whether the call reads a storage of the caller's that the run changes; arguments
        that its operator ignores do not count."""
        call = recorded.call
        ignored = facts.unread_arguments(call.op, call.args)
        args = [a for i, a in enumerate(call.args) if i not in ignored]
        used = graphs.value_refs((*args, *(a for _, a in call.kwargs)))
        return not self.changed_outside.isdisjoint(self.storages(r.index for r in used))


def own_kind(recorded: RecordedCall) -> graphs.DataKind:
    """Return the kind of storages that a call makes."""
    return (
        graphs.DataKind.ACTIVATION
        if recorded.phase is graphs.Phase.FORWARD
        else graphs.DataKind.GRADIENT
    )


Step = tuple[int, frozenset[int], frozenset[int]]
"""Position of a call, storages that it makes or changes, storages that it reads."""


def needed(
    steps: Iterable[Step], targets: Iterable[int], must_run: Callable[[int], bool]
) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return (positions of `steps` that must run or are needed for the storages `targets`, in
    order; these storages and all that such steps read). must_run: of a position."""
    storages, running = set(targets), list[int]()
    for position, touched, read in reversed(list(steps)):
        if must_run(position) or not touched.isdisjoint(storages):
            running.append(position)
            storages |= read
    return tuple(reversed(running)), frozenset(storages)


def _split(view: RunView) -> tuple[Gradients, frozenset[int]]:
    """Return (for each target the gradients that the engine of autograd sums up for it, in its
    order; the positions of the calls that add these). A target without a gradient has none.

    Where a tensor is used several times, the engine adds each arriving gradient to the sum so far.
    A plan leaves these sums to the engine: with several forwards in flight it associates them in
    another way than for a single one, and the bits depend on that.
    """
    producer: dict[int, int] = {}
    uses: Counter[int] = Counter()
    for position, recorded in enumerate(view.calls):
        uses.update(recorded.reads)
        if recorded.phase is graphs.Phase.BACKWARD:
            producer |= dict.fromkeys(recorded.call.made, position)
    added: set[int] = set()

    # An `add` of a term that is also read elsewhere may be part of the formula of one gradient (the
    # backward of a custom function: g + g * k): it does not count as a sum of the engine.
    def is_engine_sum(gradient: int) -> bool:
        call = view.calls[producer[gradient]].call if gradient in producer else None
        if call is None or call.op != "aten.add.Tensor" or call.kwargs or uses[gradient]:
            return False
        added_values = [a.index for a in call.args if isinstance(a, graphs.ValueRef)]
        spec = view.spec(gradient)
        return len(added_values) == 2 and all(
            view.spec(t).shape == spec.shape and uses[t] == 1 for t in added_values
        )

    def terms(gradient: int, most: int) -> tuple[int, ...]:
        """Return the contributions that add up to `gradient`, `most` of them, in the engine's
        order; the gradient itself if the engine did not add it up. (What the target was added to
        may have the same gradient, and be read several times: that sum is made inside.) Notes the
        positions of additions in `added`."""
        if most <= 1 or not is_engine_sum(gradient):
            return (gradient,)
        position = producer[gradient]
        added.add(position)
        arrived, last = (r.index for r in graphs.refs(view.calls[position].call))
        uses[arrived] -= 1
        return (*terms(arrived, most - 1), last)

    pairs = zip(view.gradients, view.arrivals, strict=True)
    gradients = tuple((t, () if g is None else terms(g, most)) for (t, g), most in pairs)
    return gradients, frozenset(added)
