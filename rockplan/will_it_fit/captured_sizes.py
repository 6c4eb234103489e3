"""Captured sizes: one kind of call at many sizes, from one recording whose sizes are symbols.

takes: a module, a sample, rates of a device. returns: priced graphs at any batch and length.
guarantees: at the largest batch and length that a recording is for, what follows from its
expressions is that of a capture, to the byte. Sizes that none is for, such as a batch of one, are
captured each. Layouts in which real kernels differ from PyTorch's rules are seen at a small size
(`operators.layouts.SEEN`). On the device at hand each size is captured, kernels are compiled, and
each operation runs once, to see what memory it takes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from rockplan.codegen.load import Expressions
from rockplan.errors import InvalidInput, RockplanError
from rockplan.fitting.reserved import storage_sizes
from rockplan.graph_builder.costs.call_key import call_keys
from rockplan.graph_builder.costs.estimate import Rates, roofline
from rockplan.graph_builder.costs.layouts import check_index_ranges
from rockplan.graph_builder.costs.open_workspaces import OpenWorkspaces, with_workspaces_open
from rockplan.graph_builder.costs.price import price, with_measured_memory
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.graph_builder.operators.layouts import SEEN, SeenLayouts
from rockplan.graph_builder.operators.symbols import function_of
from rockplan.graph_builder.tracing.free_sizes import StaticSizes
from rockplan.options import Options
from rockplan.python_state import trees
from rockplan.runtime.planned_state import original_forward
from rockplan.runtime.program import ModuleCall
from rockplan.runtime.switches import outside_of_initialization
from rockplan.solving.captured_calls import captured_call
from rockplan.solving.sizes import sized_calls, tensors_of
from rockplan.values.graph import CDGraph, without_dead
from rockplan.values.interface import Interface
from rockplan.values.plan import format_bytes
from rockplan.values.profile import Profile
from rockplan.values.sizes import LEAST, CallSizes, at_sizes, text_of, texts_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Named = Mapping[int, Sequence[str]]
"""Dimension -> names of the tensors that vary in it, all that have it where there are none."""

Size = tuple[int, int | None]
"""(batch, length); length None if lengths do not vary."""

NOT_NAMED: Named = MappingProxyType({})

SMALL_LENGTH = 64

RECORDED_BATCH = 6

SEVERAL = 4
"""Captures that cost as much as a recording with symbols, and the capture that confirms it."""

_numbers = itertools.count()
"""Numbers of forms, distinct for all models of the process."""

CHECKED_BYTES = 1 << 27
"""Most bytes of inputs, and of tensors computed from their values, in the capture of a large batch:
these tensors have memory."""


@dataclass(frozen=True, eq=False)
class PricedCall:
    """One captured call. graph: in eager's order, with what nobody needs, and with times by the
    rates of a device; input_sizes: bytes of the storages of inputs; form: equal for calls at other
    sizes whose schedules carry over."""

    graph: CDGraph
    interface: Interface
    profile: Profile
    input_sizes: tuple[int, ...]
    form: int = 0

    @functools.cached_property
    def planned(self) -> CDGraph:
        """The graph that a plan is of."""
        return without_dead(self.graph)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All numbers that depend on sizes, in a fixed order."""
        data = (d.size_bytes for d in self.graph.data)
        nodes = (number for n in self.graph.nodes for number in (n.workspace_bytes, n.time_ns))
        return (*data, *nodes, *self.input_sizes)


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Calls of many sizes, recorded once. call: that of `size`, its bytes expressions; memory:
    bytes of storages that have memory while a call is captured; guards: symbols -> what has to be
    true of them; found: size -> expression -> its value, of the sizes asked for so far."""

    size: Size
    call: PricedCall
    memory: tuple[int, ...]
    rates: Rates
    workspaces: OpenWorkspaces
    expressions: Expressions
    guards: Callable[[tuple[int, ...]], tuple[bool, ...]]
    found: dict[Size, dict[str, int | float]] = field(default_factory=dict)

    def is_for(self, size: Size) -> bool:
        """Return whether a call of this size does what the recorded one does."""
        free = {s.dimension for s in self.call.interface.sizes.symbols}
        fixed = {d: n for d, n in enumerate(size) if d not in free}
        symbols = self._symbols(size)
        is_alike = all(self.size[d] == n for d, n in fixed.items())
        return is_alike and min(symbols) >= LEAST and all(self.guards(symbols))

    def _symbols(self, size: Size) -> tuple[int, ...]:
        return tuple(size[s.dimension] or 0 for s in self.call.interface.sizes.symbols)

    def memory_bytes(self, size: Size) -> int:
        numbers = self.expressions.at(self._symbols(size))
        return sum(at_sizes(n, numbers) for n in self.memory)

    def numbers(self, size: Size) -> dict[str, int | float]:
        """Return expression -> its value at a size."""
        if size not in self.found:
            numbers = self.expressions.at(self._symbols(size))
            some = self.workspaces.graph_at(numbers, self.workspaces.of)
            priced = {n.index: n for n in price(some, roofline(some, self.rates)).nodes}
            for name, index in self.workspaces.of.items():
                numbers[name] = priced[index].workspace_bytes
                numbers[_time_of(name)] = priced[index].time_ns
            self.found[size] = numbers
        return self.found[size]

    def at(self, size: Size) -> PricedCall:
        """Return the call of one size, priced."""
        numbers, call = self.numbers(size), self.call
        data = tuple(
            replace(d, size_bytes=at_sizes(d.size_bytes, numbers)) for d in call.graph.data
        )
        nodes = tuple(
            replace(
                n,
                workspace_bytes=at_sizes(n.workspace_bytes, numbers),
                time_ns=int(numbers[_time_of(text_of(n.workspace_bytes))]),
            )
            for n in call.graph.nodes
        )
        inputs = tuple(at_sizes(n, numbers) for n in call.input_sizes)
        return replace(call, graph=replace(call.graph, data=data, nodes=nodes), input_sizes=inputs)


def _time_of(workspace: str) -> str:
    return f"time of {workspace}"


class TooLargeToTry(InvalidInput):
    """An operation of a call takes more memory than there is to try it in."""


def priced_call(
    module: nn.Module,
    arguments: Arguments,
    options: Options,
    rates: Rates,
    tried_bytes: int | None = None,
) -> PricedCall:
    """Capture a call and price it by the rates of a device; with a
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
    profile = roofline(graph, rates, keys)
    if tried_bytes is not None:
        profile = with_measured_memory(graph, lowered.samples, profile, keys)
    input_sizes = storage_sizes(trees.tree_leaves(arguments))
    return PricedCall(price(graph, profile, keys), lowered.interface, profile, input_sizes)


def open_call(
    size: Size,
    module: nn.Module,
    arguments: Arguments,
    free: Sequence[int],
    options: Options,
    rates: Rates,
    named: Named = NOT_NAMED,
) -> OpenCall:
    """Record a call of one size with symbols for the sizes of the dimensions `free`, and price it.
    Raises StaticSizes, or whatever PyTorch raises of its symbols."""
    # By a number for each dimension, so that no two are taken for one size.
    own = {d: size_of(module, arguments, d, named) + 1 + i for i, d in enumerate(free)}
    others = resized(module, arguments, own, named)
    leaves = enumerate(trees.tree_leaves(others))
    layouts = {i: (t.shape, t.stride()) for i, t in leaves if isinstance(t, torch.Tensor)}
    lowered = _lowered(module, arguments, options, CallSizes(layouts, {}, ()))
    interface, sizes = lowered.interface, lowered.interface.sizes
    if any(symbol.axis != "shape" for symbol in sizes.symbols):
        raise StaticSizes("an argument of another size is a part of a larger tensor")
    graph = with_workspaces_open(lowered.graph)
    data = dict.fromkeys(graph.values[value].data for _, value in interface.inputs)
    inputs = tuple(graph.data[d].size_bytes for d in data)
    computed = dict.fromkeys(graph.values[value].data for value in lowered.samples)
    memory = tuple(graph.data[d].size_bytes for d in data | computed)
    call = PricedCall(graph, interface, roofline(graph, rates), inputs)
    inside = OpenWorkspaces.in_graph(graph, interface.sizes_in(graph), sizes.names)
    expressions = Expressions.of(sizes.names, texts_in((graph, inputs, memory)))
    guards = function_of(sizes.names, sizes.guards)
    return OpenCall(size, call, memory, rates, inside, expressions, guards)


def _lowered(
    module: nn.Module, arguments: Arguments, options: Options, earlier: CallSizes | None = None
) -> Lowered:
    """In eager's order: the best order depends on sizes. earlier: as for `captured_call`."""
    options = replace(options, without=(*options.without, "reorder"))
    with outside_of_initialization():
        call = ModuleCall(module, *arguments)
        is_eager = not options.compile
        source = captured_call(call, options, may_run=False, earlier=earlier, with_dead=is_eager)
    return (source.in_parts or source).lowered


def _refuse_large_operations(graph: CDGraph, most_bytes: int) -> None:
    for node in graph.nodes:
        size_bytes = sum(graph.data[d].size_bytes for d in {*node.reads, *node.writes})
        if size_bytes > most_bytes:
            raise TooLargeToTry(
                f"in module '{node.module or '(root)'}' at {node.source or 'an unknown line'} "
                f"{node.name} reads and writes {format_bytes(size_bytes)}, and to see what memory "
                f"it takes besides there are {format_bytes(most_bytes)}: ask for smaller sizes"
            )


def resized(
    module: nn.Module, arguments: Arguments, sizes: dict[int, int], named: Named = NOT_NAMED
) -> Arguments:
    """Return the arguments with other sizes (dimension -> size), in the tensors that
    `Options.sizes` would vary: repeated or cut."""
    args, kwargs = arguments
    for dimension, size in sizes.items():
        own = size_of(module, (args, kwargs), dimension, named)
        ranges: Any = {dimension: (min(own, size), max(own, size))}
        ranges = dict.fromkeys(named.get(dimension, ()), ranges) or ranges
        calls = sized_calls(original_forward(module), args, kwargs, Options(sizes=ranges))
        made = calls[0] if size >= own else calls[-1]
        args, kwargs = made.args, made.kwargs
    return args, kwargs


def size_of(
    module: nn.Module, arguments: Arguments, dimension: int, named: Named = NOT_NAMED
) -> int:
    """Return the size of a dimension of the first tensor that varies in it. Raises InvalidInput."""
    tensors = tensors_of(original_forward(module), *arguments)
    for name in named.get(dimension) or tensors:
        if name in tensors and tensors[name].dim() > dimension:
            return tensors[name].shape[dimension]
    raise InvalidInput(
        f"no tensor of the sample that is to vary has a dimension {dimension}; it has "
        f"{', '.join(tensors) or 'none'}"
    )


@dataclass(slots=True)
class SizedCalls:
    """Calls in batches from `least` to `most`, at each of `lengths` (ascending), and at `own`, that
    of the sample. capture: makes the call of one size; record: those of all sizes, from one and the
    dimensions that are free; None if each size is captured."""

    capture: Callable[[Size], PricedCall]
    least: int
    most: int
    lengths: Sequence[int | None] = (None,)
    record: Callable[[Size, Sequence[int]], OpenCall] | None = None
    own: int | None = None
    captured: dict[Size, PricedCall] = field(init=False, default_factory=dict)
    recorded: list[OpenCall] = field(init=False, default_factory=list)
    _free: list[int] = field(init=False)
    _lengths: list[int | None] = field(init=False)
    _tried: set[int | None] = field(init=False, default_factory=set)
    _last: dict[Size, PricedCall] = field(init=False, default_factory=dict)
    _forms: dict[object, int] = field(init=False, default_factory=dict)
    _seen: SeenLayouts = field(init=False, default_factory=SeenLayouts)

    def __post_init__(self) -> None:
        self._lengths = sorted({*self.lengths, self.own or self.lengths[0]}, key=lambda n: n or 0)
        free = [(0, self.most > self.first), (1, len(self._lengths) > 1)]
        self._free = [dimension for dimension, is_free in free if is_free]

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
        """Return the priced call of one batch and length (None for that of the sample)."""
        size = batch, length
        if (opened := self.opened(size)) is None:
            return self._captured(size)
        if size not in self._last:
            # Each is asked for by several ways, one length after another.
            kept = {other: call for other, call in self._last.items() if other[1] == length}
            self._last = kept | {size: opened.at(size)}
        return self._last[size]

    def opened(self, size: Size) -> OpenCall | None:
        """Return the recording that a size is one of; None if it is captured by itself."""
        batch, length = size
        while not (found := [one for one in self.recorded if one.is_for(size)]):
            lengths = self._lengths if 1 in self._free else [length]
            batches = range(self.first, self.most + 1 if 0 in self._free else self.first + 1)
            is_worth_it = len(lengths) * len(batches) >= SEVERAL
            if self.record is None or batch < LEAST or length in self._tried or not is_worth_it:
                return None
            self._tried.add(length)
            batch = batch if self.recorded else min(RECORDED_BATCH, self.most)
            try:
                opened = self._recorded((batch, length))
            except Exception as error:  # symbols are PyTorch's own: what is static is captured
                fixed = {place[2] for place in getattr(error, "fixed", ())}
                if fixed != {1}:
                    self.record = None
                else:  # each length by itself
                    self._free.remove(1)
                    self._tried.clear()
                continue
            opened = replace(opened, call=self._with_form(opened.call))
            if self._holds(opened, lengths):
                self.recorded.append(opened)
            else:
                self.record = None
        return found[0]

    def _holds(self, opened: OpenCall, lengths: Sequence[int | None]) -> bool:
        """By a capture of the most samples at the greatest length (of fewer, if their values take
        much memory)."""
        halves = (self.most >> n for n in range(self.most.bit_length()))
        batches = [n for n in halves if n >= LEAST] if 0 in self._free else [self.most]
        sizes = [(b, n) for n in reversed(lengths) for b in batches if opened.is_for((b, n))]
        light = [size for size in sizes if opened.memory_bytes(size) <= CHECKED_BYTES]
        for size in (light or sizes[-1:])[:1]:
            found, said = self._captured(size, is_seen=True), opened.at(size)
            return (found.form, found.numbers) == (said.form, said.numbers)
        return False

    def _recorded(self, size: Size) -> OpenCall:
        """Recorded at a small length if that is one of the same calls, so that layouts are seen
        there."""
        assert self.record is not None
        batch, length = size
        if 1 in self._free and length and length > SMALL_LENGTH:
            try:
                with self._layouts_seen():
                    opened = self.record((batch, SMALL_LENGTH), self._free)
                if opened.is_for(size):
                    return opened
            except StaticSizes:
                raise
            except RockplanError:
                pass  # the model refuses so small a length
        self._small(batch)
        with self._layouts_seen():
            return self.record(size, self._free)

    def _small(self, batch: int) -> PricedCall | None:
        """Of one or two samples at a small length: later captures reuse the layouts seen. None if
        it fails."""
        length = self.lengths[0]
        size = min(batch, 2), None if length is None else min(length, SMALL_LENGTH)
        try:
            return self._captured(size, is_seen=True)
        except RockplanError:
            return None

    def _captured(self, size: Size, is_seen: bool = False) -> PricedCall:
        if size not in self.captured:
            if not is_seen:
                self._small(size[0])
            with self._layouts_seen():
                made = self.capture(size)
            self.captured[size] = self._with_form(made)
        return self.captured[size]

    @contextlib.contextmanager
    def _layouts_seen(self) -> Iterator[None]:
        token = SEEN.set(self._seen)
        try:
            yield
        finally:
            SEEN.reset(token)

    def _with_form(self, call: PricedCall) -> PricedCall:
        return replace(call, form=self._forms.setdefault(form_of(call.graph), next(_numbers)))


def form_of(graph: CDGraph) -> object:
    """Return everything that a schedule depends on but sizes and times."""
    nodes = tuple(
        (n.name, n.reads, n.writes, n.random, n.recomputable, n.is_dead, frozenset(n.ends))
        for n in graph.nodes
    )
    takes = tuple((t.operands, t.results) for n in graph.nodes for t in n.takes)
    kinds = tuple((d.name, d.kind) for d in graph.data)
    return nodes, takes, kinds, graph.outputs, graph.held, graph.handed, graph.dropped
