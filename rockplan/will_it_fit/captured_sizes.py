"""Captured sizes: one kind of call at many sizes, from a few captures and a check by others.

takes: a module, a sample, rates of a device. returns: priced graphs at any batch and length.
guarantees: sizes between captures are interpolated only if a capture of the largest batch and
length confirms, to the byte, that storages and work are affine in the batch and quadratic in the
length. Else each size is captured. Layouts in which real kernels differ from PyTorch's rules are
seen at a small size (`operators.layouts.SEEN`). On the device at hand a capture compiles its
kernels and runs each operation once, to see what memory it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from rockplan.captures.captured_calls import captured_call
from rockplan.captures.sizes import sized_calls
from rockplan.errors import InvalidInput, RockplanError
from rockplan.fitting.reserved import storage_sizes
from rockplan.graph_builder.costs.call_key import call_keys
from rockplan.graph_builder.costs.estimate import Work, roofline, work_of
from rockplan.graph_builder.costs.index_ranges import check_index_ranges
from rockplan.graph_builder.costs.price import price, with_measured_memory
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.graph_builder.operators.layouts import SEEN, SeenLayouts
from rockplan.options import Options
from rockplan.python_state import trees
from rockplan.runtime.planned_state import original_forward
from rockplan.runtime.program import ModuleCall
from rockplan.runtime.switches import outside_of_initialization
from rockplan.values.graph import CDGraph
from rockplan.values.interface import Interface
from rockplan.values.plan import format_bytes
from rockplan.values.profile import Profile

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Size = tuple[int, int | None]
"""(batch, length); length None if lengths do not vary."""

SMALL_LENGTH = 64

POINTS = 3
"""Lengths that determine a quadratic polynomial."""

APART = 8
"""How many times larger the next batch is at which a line may begin."""

_numbers = itertools.count()
"""Numbers of forms, distinct for all models of the process."""

CHECKED_BYTES = 1 << 27
"""Most bytes of inputs, and of tensors computed from their values, in the capture of a large batch:
these tensors have memory."""


@dataclass(frozen=True, slots=True)
class PricedCall:
    """One captured call. graph: in eager's order, with times by `rates`; works: of its nodes'
    calls; input_sizes: bytes of the storages of inputs; known_bytes: of inputs and tensors computed
    from their values; rates: bytes and operations a second; form: equal for calls at other sizes
    whose schedules carry over."""

    graph: CDGraph
    interface: Interface
    profile: Profile
    input_sizes: tuple[int, ...]
    known_bytes: int
    works: tuple[tuple[Work, ...], ...]
    rates: tuple[float, float]
    form: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """All numbers that depend on sizes, in a fixed order."""
        data = (d.size_bytes for d in self.graph.data)
        inside = (n.workspace_bytes for n in self.graph.nodes)
        works = (number for ws in self.works for w in ws for number in (w.moved_bytes, w.flops))
        return (*data, *inside, *works, *self.input_sizes, self.known_bytes)

    def with_numbers(self, numbers: Sequence[int]) -> PricedCall:
        """Return the call with other sizes: `numbers` has, in the order of `self.numbers`, bytes of
        storages, workspaces, bytes and operations of each call, bytes of inputs, known bytes."""
        left = iter(numbers)
        data = tuple(replace(d, size_bytes=next(left)) for d in self.graph.data)
        inside = [next(left) for _ in self.graph.nodes]
        works = tuple(
            tuple(Work(next(left), next(left), w.is_exchange) for w in ws) for ws in self.works
        )
        nodes = tuple(
            replace(
                node,
                workspace_bytes=inside[node.index],
                time_ns=sum(w.time_ns(*self.rates) for w in works[node.index]),
            )
            for node in self.graph.nodes
        )
        graph = replace(self.graph, data=data, nodes=nodes)
        *sizes, known_bytes = left
        return replace(
            self, graph=graph, input_sizes=tuple(sizes), known_bytes=known_bytes, works=works
        )


class TooLargeToTry(InvalidInput):
    """An operation of a call takes more memory than there is to try it in."""


def priced_call(
    module: nn.Module,
    arguments: Arguments,
    options: Options,
    rates: tuple[float, float],
    tried_bytes: int | None = None,
) -> PricedCall:
    """Capture a call and price it by the rates of a device (bytes and operations a second); with a
    tiled head if the options say so and there is one. Raises CaptureError. tried_bytes: operations
    run, to see what memory they take besides, where none of them reads and writes more than that;
    None: none runs. Raises TooLargeToTry where one does."""
    if tried_bytes is not None:
        # Before kernels are compiled, which run then.
        eager = _lowered(module, arguments, replace(options, compile=False)).graph
        _refuse_large_operations(eager, tried_bytes)
    lowered = _lowered(module, arguments, options)
    graph = lowered.graph
    check_index_ranges(graph, lowered.samples)
    keys = call_keys(graph)
    profile = roofline(graph, *rates, keys)
    if tried_bytes is not None:
        profile = with_measured_memory(graph, lowered.samples, profile, keys)
    input_sizes = storage_sizes(trees.tree_leaves(arguments))
    known_bytes = sum(input_sizes) + sum(storage_sizes(lowered.samples.values()))
    works = tuple(tuple(work_of(graph, call) for call in node.calls) for node in graph.nodes)
    priced = price(graph, profile, keys)
    return PricedCall(priced, lowered.interface, profile, input_sizes, known_bytes, works, rates)


def _lowered(module: nn.Module, arguments: Arguments, options: Options) -> Lowered:
    """Capture a call, in eager's order: the best order depends on sizes."""
    options = replace(options, without=(*options.without, "reorder"))
    with outside_of_initialization():
        source = captured_call(ModuleCall(module, *arguments), options, may_run=False)
    return (source.in_parts or source).lowered


def _refuse_large_operations(graph: CDGraph, most_bytes: int) -> None:
    """Raise TooLargeToTry, which names module and line, if a node reads and writes more than
    `most_bytes` in sum."""
    for node in graph.nodes:
        size_bytes = sum(graph.data[d].size_bytes for d in {*node.reads, *node.writes})
        if size_bytes > most_bytes:
            raise TooLargeToTry(
                f"in module '{node.module or '(root)'}' at {node.source or 'an unknown line'} "
                f"{node.name} reads and writes {format_bytes(size_bytes)}, and to see what memory "
                f"it takes besides there are {format_bytes(most_bytes)}: ask for smaller sizes"
            )


def resized(module: nn.Module, arguments: Arguments, sizes: dict[int, int]) -> Arguments:
    """Return the arguments with other sizes (dimension -> size), in the tensors that
    `Options.sizes` would vary: repeated or cut."""
    args, kwargs = arguments
    for dimension, size in sizes.items():
        own = size_of((args, kwargs), dimension)
        ranges: Any = {dimension: (min(own, size), max(own, size))}
        calls = sized_calls(original_forward(module), args, kwargs, Options(sizes=ranges))
        made = calls[0] if size >= own else calls[-1]
        args, kwargs = made.args, made.kwargs
    return args, kwargs


def size_of(tree: Any, dimension: int) -> int:
    """Return the size of a dimension of the first tensor that has it. Raises InvalidInput."""
    for leaf in trees.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dimension:
            return leaf.shape[dimension]
    raise InvalidInput(f"no tensor of the sample has a dimension {dimension}")


@dataclass(frozen=True, slots=True)
class Line:
    """Calls of one length at any batch. numbers: at the batch `first`; more: what each further
    sample adds."""

    call: PricedCall
    first: int
    numbers: tuple[int, ...]
    more: tuple[int, ...]

    @property
    def known_bytes(self) -> int:
        """Bytes of the known values at the batch `first`."""
        return self.numbers[-1]

    def at(self, batch: int) -> PricedCall:
        """Return the call of a batch."""
        samples = batch - self.first
        pairs = zip(self.numbers, self.more, strict=True)
        return self.call.with_numbers([n + samples * m for n, m in pairs])


@dataclass(slots=True)
class SizedCalls:
    """Calls in batches from `least` to `most`, at each of `lengths` (ascending). capture: makes the
    call of one size."""

    capture: Callable[[Size], PricedCall]
    least: int
    most: int
    lengths: Sequence[int | None] = (None,)
    captured: dict[Size, PricedCall] = field(init=False, default_factory=dict)
    _lines: dict[int | None, Line | None] = field(init=False, default_factory=dict)
    _forms: dict[object, int] = field(init=False, default_factory=dict)
    _seen: SeenLayouts = field(init=False, default_factory=SeenLayouts)
    _last: dict[Size, PricedCall] = field(init=False, default_factory=dict)

    @property
    def first(self) -> int:
        """The least batch that is like larger ones: a batch of one has its own strides and
        operators."""
        return min(max(self.least, 2), self.most)

    @property
    def small(self) -> PricedCall:
        """A small capture, if the model accepts one; else the least size. Layouts of real kernels
        are seen there."""
        return self._small(self.first) or self._captured((self.first, self.lengths[0]))

    def at(self, batch: int, length: int | None = None) -> PricedCall:
        """Return the priced call of one batch and length: interpolated between captures where that
        is exact, else captured. length: None for that of the sample."""
        line = self.line(length)
        if line is None or batch < line.first:
            return self._captured((batch, length))
        if (batch, length) not in self._last:
            # Each is asked for by several ways, one length after another.
            others = self._last.items()
            kept = {size: call for size, call in others if size[1] == length}
            self._last = kept | {(batch, length): line.at(batch)}
        return self._last[batch, length]

    def line(self, length: int | None = None) -> Line | None:
        """Return the calls of a length at any batch, interpolated between two captures of the
        smallest batches that are like larger ones; None if their bytes are not affine in the batch,
        or there are too few batches for it to pay."""
        if not self._lines and self.small:
            points = self._points
            self._lines = self._polynomials(points) if points else {}
        if length not in self._lines:
            lines = (self._line(length, first) for first in self._firsts)
            holding = (line for line in lines if line and self._holds(line, length))
            self._lines[length] = next(holding, None)
        return self._lines[length]

    def first_of(self, length: int | None) -> int:
        """Return the least batch of a length that is like larger ones."""
        line = self.line(length)
        return line.first if line else self.first

    @property
    def _firsts(self) -> Iterator[int]:
        """The batches at which a line may begin: which operators one kernel is made of changes at
        small sizes."""
        first = self.first
        while first + 2 < self.most:
            yield first
            first *= APART

    def _small(self, batch: int) -> PricedCall | None:
        """Capture a batch of one, or of two for larger batches, at a small length, so that later
        captures reuse the layouts seen; None if it fails."""
        length = self.lengths[0]
        size = min(batch, 2), None if length is None else min(length, SMALL_LENGTH)
        try:
            return self._captured(size, is_small=True)
        except RockplanError:
            return None

    def _captured(self, size: Size, is_small: bool = False) -> PricedCall:
        """Return the capture of one (batch, length), made once, with the number of its form: equal
        for graphs that differ in sizes only. is_small: capture no smaller one before."""
        if size not in self.captured:
            if not is_small:
                self._small(size[0])
            token = SEEN.set(self._seen)
            try:
                made = self.capture(size)
            finally:
                SEEN.reset(token)
            form = self._forms.setdefault(form_of(made.graph), next(_numbers))
            self.captured[size] = replace(made, form=form)
        return self.captured[size]

    def _line(self, length: int | None, first: int) -> Line | None:
        """Return the calls of a length at any batch, as the line through the captures of the batch
        `first` and of one more; None if these, or that of the largest batch, differ in form."""
        call = self._captured((first, length))
        if first == self.most:
            return Line(call, first, call.numbers, (0,) * len(call.numbers))
        known = self.captured.get((self.most, length), call)
        if (
            call.form != known.form
            or call.form != (next_call := self._captured((first + 1, length))).form
        ):
            return None
        per_sample = tuple(y - x for x, y in zip(call.numbers, next_call.numbers, strict=True))
        return Line(call, first, call.numbers, per_sample)

    def _holds(self, line: Line, length: int | None) -> bool:
        """True if a capture of the most samples confirms the line (of fewer, if their values would
        take much memory)."""
        known = line.known_bytes // line.first + 1
        batch = min(max(CHECKED_BYTES // known, line.first + 2), self.most)
        while (found := self._tried((batch, length))) is None:
            batch = (line.first + batch) // 2
            if batch < line.first + 2:
                return False
        return found.form == line.call.form and found.numbers == line.at(batch).numbers

    def _tried(self, size: Size) -> PricedCall | None:
        """Return the capture of one size, None if it is too large to try."""
        try:
            return self._captured(size)
        except TooLargeToTry:
            return None

    # -- lengths between captures ------------------------------------------------------------------

    @property
    def _points(self) -> list[int]:
        """The lengths that are multiples of the least power of two among them (kernels and models
        pad to such numbers); [] if there are too few."""
        lengths = [n for n in self.lengths if n is not None]
        powers = [n for n in lengths if n & (n - 1) == 0]
        alike = [n for n in lengths if powers and n % powers[0] == 0]
        return alike if len(alike) > POINTS else []

    def _polynomials(self, lengths: Sequence[int]) -> dict[int | None, Line | None]:
        """Return length -> calls at any batch, interpolated between those of the POINTS smallest
        lengths; {} unless captures of the largest batch, at the smallest and at the greatest
        length, confirm them."""
        points = lengths[:POINTS]
        lines = [line for length in points if (line := self._line(length, self.first))]
        forms = {line.call.form for line in lines}
        if len(lines) < POINTS or len(forms) > 1 or not self._holds(lines[0], points[0]):
            return {}
        made: dict[int | None, Line | None] = {}
        for length in lengths:
            numbers = interpolated(points, [line.numbers for line in lines], length)
            more = interpolated(points, [line.more for line in lines], length)
            if numbers is None or more is None:
                return {}
            made[length] = Line(lines[0].call, self.first, numbers, more)
        last = made[lengths[-1]]
        assert last is not None
        return made if self._holds(last, lengths[-1]) else {}


def interpolated(
    points: Sequence[int], rows: Sequence[Sequence[int]], at: int
) -> tuple[int, ...] | None:
    """Return, for each column of `rows`, the value at `at` of the polynomial that has the rows'
    values at `points`; None if one is no integer."""
    over = prod(q - p for p in points for q in points if p < q)
    weights = [
        over * prod(at - q for q in points if q != p) // prod(p - q for q in points if q != p)
        for p in points
    ]
    columns = zip(*rows, strict=True)
    sums = [sum(w * n for w, n in zip(weights, column, strict=True)) for column in columns]
    return None if any(s % over for s in sums) else tuple(s // over for s in sums)


def form_of(graph: CDGraph) -> object:
    """Return everything that a schedule depends on but sizes and times."""
    nodes = tuple((n.name, n.reads, n.writes, n.random, n.recomputable) for n in graph.nodes)
    takes = tuple((t.operands, t.results) for n in graph.nodes for t in n.takes)
    kinds = tuple((d.name, d.kind) for d in graph.data)
    return nodes, takes, kinds, graph.outputs, graph.held, graph.handed, graph.dropped
