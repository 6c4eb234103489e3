"""Emit: a schedule -> straight-line Python with explicit `del`s.

takes: CDGraph with calls, Interface, Schedule. returns: Code. guarantees: the text executes the
schedule event by event; a result is written into an operand's storage where `lifetimes.taken_over`
says so; each line names the place in the user's model; views are derived where they are read and
cost no memory; there is one function for the forward phase, and one for each slice of the backward
phase. A slice ends where gradients are handed to autograd. See docs/model.md, Code generation.
"""

from __future__ import annotations

import functools
import keyword
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rockplan.errors import BackwardError, UnsupportedModel
from rockplan.graph_builder.operators.facts import facts_of, resolve
from rockplan.graph_builder.operators.rows import row_of
from rockplan.oracles.clock import leaving
from rockplan.oracles.lifetimes import taken_over
from rockplan.oracles.simulate import timeline
from rockplan.values import graph as graphs
from rockplan.values.copies import STORE, copy_of
from rockplan.values.interface import Guard, Interface
from rockplan.values.schedule import Compute, Free, Schedule
from rockplan.values.sizes import Real, Size, as_text

_INDENT = "    "


@dataclass(frozen=True, slots=True)
class Code:
    """Generated Python text, and what its caller has to know about it.

    source: one module of Python text with `forward(frame)` and `backward_<k>(frame)`.
    handed: for each backward slice, the values (parameters, inputs) whose gradients it returns.
    groups: slices, as runs of numbers, that may hand over their gradients together at the end of
    the run: with what waits for that, the backward phase needs no more memory than without.
    operators: identifier in the text -> operator name.
    Residents by position: checked: those that the backward phase reads, so that a change between
    forward and backward is noticed; read: those that each slice reads, so that a change by a hook
    between two slices is noticed; copied: those of which the forward leaves copies in
    `frame.copies`. When the forward runs again, it uses the copies; the backward phase uses the
    residents.
    acting: results of forward operators with side effects, in order, each as (operator, its name in
    `frame.saved` after the forward, or '' if it is not there); reused: positions among `acting` of
    the results that a forward which runs again takes from `frame.first`. pages: (name, bytes,
    device) of each storage that it pages to the host. redraws: how often the forward and the
    backward phase draw again what was drawn before. inputs: (position, name in `frame.saved` or of
    its page) of residents that the caller may let go of after the forward.
    """

    source: str
    handed: tuple[tuple[int, ...], ...]
    operators: tuple[tuple[str, str], ...]
    checked: tuple[int, ...]
    read: tuple[tuple[int, ...], ...]
    copied: tuple[int, ...]
    acting: tuple[tuple[str, str], ...]
    reused: tuple[int, ...]
    pages: tuple[tuple[str, int, str], ...]
    redraws: tuple[int, int]
    inputs: tuple[tuple[int, str], ...] = ()
    groups: tuple[range, ...] = ()


def emit(
    graph: graphs.CDGraph, interface: Interface, schedule: Schedule, again: bool = False
) -> Code:
    """Return Python text that executes `schedule`. again: for a forward phase that already ran:
    every operation runs as a re-execution, changes copies of buffers and not the buffers, and
    operators with side effects do not run. Raises BackwardError where an operation can run only
    once."""
    return _Emitter(graph, interface, schedule, again).emit()


class _Names:
    """Unique Python identifiers for values and operators."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken: Counter[str] = Counter({"frame": 1, "torch": 1, "math": 1})
        self._taken.update(taken)
        self._of: dict[object, str] = {}
        self.operators: dict[str, str] = {}

    def of(self, key: object, wish: str) -> str:
        """Return the unique identifier of `key` (a value, an operator), made of `wish` at the first
        call: other characters become '_', and a number is added if it is taken."""
        if key not in self._of:
            stem = re.sub(r"\W", "_", wish)
            if not stem or stem[0].isdigit() or keyword.iskeyword(stem):
                stem = f"m_{stem}"
            count = self._taken[stem]
            self._taken[stem] += 1
            name = stem if not count else f"{stem}_v{count}"
            self._taken[name] += count > 0
            self._of[key] = name
        return self._of[key]

    def operator(self, op: str) -> str:
        namespace, packet, overload = op.split(".")
        wish = f"{namespace}_{packet}" + ("" if overload == "default" else f"_{overload}")
        name = self.of(("operator", op), wish)
        self.operators[name] = op
        return name


class _Emitter:
    """Walks through the events of one schedule and writes the text.

    `_live` maps each storage to the variables that hold it, `_saved` to those that wait in
    `frame.saved` until a slice needs them: a storage is in one of the two, or in neither if only
    the caller holds it. `_alive` has the storages that are alive in the schedule; `_arriving` maps
    storages whose copy from the host is under way to the names of their pages.
    """

    def __init__(
        self, graph: graphs.CDGraph, interface: Interface, schedule: Schedule, again: bool
    ) -> None:
        self._graph = graph
        self._again = again
        self._interface = interface
        self._schedule = schedule
        self._names = _Names(interface.sizes.names)
        self._lines: list[str] = []
        self._alive: set[int] = set()
        self._live: dict[int, list[int]] = defaultdict(list)
        self._saved: dict[int, list[int]] = {}
        self._shadowed: set[int] = set()
        self._resident = {v: i for i, v in enumerate(interface.residents)}
        self._copied_residents = tuple(self._resident[buffer] for buffer, _ in interface.copies)
        self._copied = {graph.values[buffer].data for buffer, _ in interface.copies}
        self._copies = {graph.values[copy].data for _, copy in interface.copies}
        self._targets: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for target, contributions in interface.gradients:
            for gradient in contributions:
                self._targets[graph.values[gradient].data].append((target, gradient))
        self._handed_data = frozenset(graph.handed)
        self._unhanded = [(t, g) for t, gradients in interface.gradients for g in gradients]
        self._executions = Counter(schedule.computes)
        self._taken = taken_over(graph, schedule)
        self._leaving = leaving(graph, schedule)
        self._arriving: dict[int, str] = {}
        self._pages: dict[str, tuple[str, int, str]] = {}
        self._done: Counter[int] = Counter()
        self._last_read = {
            graph.values[ref.index].data: position
            for position, event in enumerate(schedule.events)
            if isinstance(event, Compute)
            for call in (*graph.nodes[event.node].calls, *graph.nodes[event.node].recalls)
            for ref in graphs.refs(call)
        }
        acting = (_results(graph, node) for node in graph.forward if _acts(node))
        self._acting = dict(row for results in acting for row in results.items())
        self._names_after_forward: dict[int, str] = {}
        self._handed: list[tuple[int, ...]] = []
        self._checked: set[int] = set()
        self._read: list[set[int]] = []
        self._states: dict[int, str] = {}
        self._redraws: Counter[bool] = Counter()
        self._place = ""

    def emit(self) -> Code:
        events = self._schedule.events
        boundary = self._schedule.forward_length
        self._begin("forward")
        for position in range(boundary):
            self._event(position)
        self._end_forward()
        slices = self._merged_slices()
        for number, (first, last) in enumerate(slices):
            self._begin(f"backward_{number}")
            self._read.append(set())
            if number == 0:
                tangents = [o.tangent for o in self._interface.outputs if o.tangent is not None]
                self._line(f"{_tuple(map(self._name, tangents))} = frame.take_tangents()")
                self._note_made(tangents)
            for position in range(first, last):
                self._event(position)
            frees = [e for e in events[first:last] if isinstance(e, Free)]
            handed = [e.data for e in frees if self._is_handed(e)]
            self._end_slice(handed, last, is_last=number == len(slices) - 1)
        inputs = {i: self._name(v) for v, i in self._resident.items() if self._is_given(v)}
        return Code(
            source="\n".join(self._lines) + "\n",
            handed=tuple(self._handed),
            operators=tuple(self._names.operators.items()),
            checked=tuple(sorted(self._checked.union(inputs, *self._read))),
            read=tuple(tuple(sorted(read)) for read in self._read),
            copied=self._copied_residents,
            acting=tuple(
                (op, self._names_after_forward.get(v, "")) for v, op in self._acting.items()
            ),
            reused=self._reused() if self._again else (),
            pages=tuple(self._pages.values()),
            redraws=(self._redraws[False], self._redraws[True]),
            inputs=tuple(inputs.items()),
            groups=tuple(self._groups(slices)),
        )

    def _is_given(self, value: int) -> bool:
        return self._graph.data[self._graph.values[value].data].kind is graphs.DataKind.ACTIVATION

    def _reused(self) -> tuple[int, ...]:
        graph = self._graph
        read = {d for n in graph.nodes for d in n.reads}
        outputs = (graph.values[o.value] for o in self._interface.outputs if o.value is not None)
        read |= {value.data for value in outputs if value.view is not None}
        places = enumerate(self._acting)
        return tuple(place for place, value in places if graph.values[value].data in read)

    # -- slices and what travels between them ----------------------------------------------

    def _slices(self) -> Iterator[tuple[int, int]]:
        """At least one; each ends after a run of consecutive frees that hands over a gradient."""
        events = self._schedule.events
        start = self._schedule.forward_length
        hands = False
        for position in range(start, len(events)):
            hands = hands or self._is_handed(events[position])
            run_ends = position + 1 == len(events) or isinstance(events[position + 1], Compute)
            if hands and run_ends:
                yield start, position + 1
                start, hands = position + 1, False
        if start < len(events) or start == self._schedule.forward_length:
            yield start, len(events)

    def _merged_slices(self) -> list[tuple[int, int]]:
        """Gradients that stay alive to the end, such as those of inputs, go with the last slice."""
        slices = list(self._slices())
        first, last = slices[-1]
        hands = any(self._is_handed(e) for e in self._schedule.events[first:last])
        held = {self._graph.values[g].data for _, g in self._unhanded} - self._handed_data
        if not (hands or held) and len(slices) > 1:
            slices[-2:] = [(slices[-2][0], last)]
        return slices

    def _groups(self, slices: Sequence[tuple[int, int]]) -> Iterator[range]:
        during = [step.during_bytes for step in timeline(self._graph, self._schedule)]
        most_bytes, waiting_bytes, begin = max(during[slices[0][0] :], default=0), 0, 0
        for number, (first, last) in enumerate(slices):
            needed_bytes = waiting_bytes + max(during[first:last], default=0)
            # Of a program for many sizes the bytes of other calls are not known here.
            if number > begin and (needed_bytes > most_bytes or self._interface.sizes.symbols):
                yield range(begin, number)
                waiting_bytes, begin = 0, number
            frees = (e for e in self._schedule.events[first:last] if isinstance(e, Free))
            handed = (e.data for e in frees if self._is_handed(e))
            waiting_bytes += sum(self._graph.data[d].size_bytes for d in handed)
        yield range(begin, len(slices))

    def _is_handed(self, event: object) -> bool:
        return isinstance(event, Free) and event.data in self._handed_data

    def _begin(self, name: str) -> None:
        self._lines += ["", "", f"def {name}(frame):"] if self._lines else [f"def {name}(frame):"]
        self._place = ""
        if self._interface.sizes.symbols:
            self._line(f"{_unpacked(self._interface.sizes.names)} = frame.sizes")

    def _line(self, text: str) -> None:
        dels = f"{_INDENT}del "
        if text.startswith("del ") and self._lines[-1].startswith(dels):
            self._lines[-1] += f", {text.removeprefix('del ')}"
        else:
            self._lines.append(_INDENT + text)

    def _note_made(self, values: Iterable[int]) -> None:
        for value in values:
            self._live[self._graph.values[value].data].append(value)

    def _save(self, position: int) -> None:
        """Views, and what is the caller's, are not saved: a storage that the caller holds only if
        an event from `position` on reads it."""
        held = {*self._graph.held, *self._graph.outputs}
        held -= {self._graph.values[g].data for _, g in self._unhanded}
        names: list[str] = []
        for d, variables in sorted(self._live.items()):
            kept = [v for v in variables if self._graph.values[v].view is None]
            needed = d not in held or self._last_read.get(d, -1) >= position
            if kept and needed and not self._graph.data[d].kind.resident:
                self._saved[d] = kept
                names += map(self._name, kept)
        self._live.clear()
        if names:
            self._line(f"frame.saved.update({', '.join(f'{n}={n}' for n in names)})")

    def _end_forward(self) -> None:
        leaves = [self._interface.outputs[i] for i in self._interface.results]
        outputs = [leaf.value for leaf in leaves if leaf.value is not None]
        for value in outputs:
            self._need(value)
        self._save(self._schedule.forward_length)
        saved = (v for variables in self._saved.values() for v in variables)
        self._names_after_forward = {v: self._name(v) for v in saved if v in self._acting}
        copies = [self._name(copy) for _, copy in self._interface.copies]
        if self._again:
            self._checked.difference_update(self._copied_residents)
        else:
            self._checked.clear()
        if copies and not self._again:
            self._line(f"frame.copies = {_tuple(copies)}")
        self._line(f"return {_tuple(map(self._name, outputs))}")

    def _end_slice(self, handed: Sequence[int], position: int, is_last: bool) -> None:
        """Autograd must sum contributions in order: one is returned together with all earlier ones
        to the same target. position: the next event."""
        handed_pairs = {pair for d in handed for pair in self._targets[d]}
        last: dict[int, int] = {}
        for place, pair in enumerate(self._unhanded):
            if is_last or pair in handed_pairs:
                last[pair[0]] = place
        pairs = [p for place, p in enumerate(self._unhanded) if place <= last.get(p[0], -1)]
        self._unhanded = [pair for pair in self._unhanded if pair not in pairs]
        values = self._graph.values
        left = {values[g].data for _, g in self._unhanded}
        count = Counter(values[g].data for _, g in pairs)
        for _, gradient in pairs:
            # Autograd takes over a gradient that nothing else holds, and copies others.
            d = values[gradient].data
            self._need(gradient, is_own=count[d] > 1 or d in left or d not in handed)
        for d in {values[g].data for _, g in pairs}.union(handed) - left:
            if d in handed or self._last_read.get(d, -1) < position:
                self._live[d] = []
        if not is_last:
            self._save(position)
        self._handed.append(tuple(target for target, _ in pairs))
        self._line(f"return {_tuple(self._name(g) for _, g in pairs)}")

    # -- events ----------------------------------------------------------------------------

    def _event(self, position: int) -> None:
        """A free of a gradient that autograd gets writes nothing: its slice returns it."""
        event = self._schedule.events[position]
        if isinstance(event, Compute):
            node = self._graph.nodes[event.node]
            copy = copy_of(node)
            if copy is None:
                self._compute(node, self._taken.get(position))
            else:
                self._copy(copy)
            for _, store in self._leaving.get(position, ()):
                self._page_out(store)
            self._alive.update(node.writes)
            return
        self._alive.discard(event.data)
        if event.data not in self._handed_data:
            self._drop(event.data)

    def _page_out(self, store: graphs.ComputeNode) -> None:
        values = [ref.index for ref in graphs.refs(store.calls[0])]
        page, first = self._name(values[0]), self._graph.values[values[0]]
        self._pages[page] = (page, self._graph.data[first.data].size_bytes, first.spec.device)
        self._line(f'frame.page_out("{page}", {", ".join(map(self._name, values))})')

    def _copy(self, call: graphs.Call) -> None:
        if call.op == STORE:
            self._line(f'frame.paged_out("{self._name(graphs.refs(call)[0].index)}")')
            return
        data = self._graph.values[call.made[0]].data
        page = self._name(call.made[0])
        self._line(f'{_tuple(map(self._name, call.made))} = frame.page_in("{page}")')
        self._live[data] += call.made
        self._arriving[data] = page

    def _await(self, data: int) -> None:
        if data in self._arriving and data not in self._shadowed:
            self._line(f'frame.paged_in("{self._arriving.pop(data)}")')

    def _drop(self, data: int) -> None:
        self._await(data)
        for value in self._saved.pop(data, ()):
            self._line(f'del frame.saved["{self._name(value)}"]')
        if self._live[data]:
            self._line(f"del {', '.join(map(self._name, self._live[data]))}")
        self._live[data] = []

    def _compute(self, node: graphs.ComputeNode, taken: graphs.Takeover | None) -> None:
        """If the forward runs again, results that exist are taken, and effects left out."""
        again = self._done[node.index] > 0
        self._done[node.index] += 1
        if not node.calls:
            for value in filter(self._is_given, self._resident):
                if self._graph.values[value].data in node.writes:
                    self._need(value)
            return
        on_copies = not self._copied.isdisjoint(node.reads)
        repeats = self._again and node.phase is graphs.Phase.FORWARD
        if repeats and not self._copies.isdisjoint(node.writes):
            return  # `frame.copies` has its result
        if repeats and _acts(node):
            places = {value: place for place, value in enumerate(self._acting)}
            results = _results(self._graph, node)
            for value in results:
                self._line(f"{self._name(value)} = frame.first[{places[value]}]")
            self._note_made(results)
            return
        if repeats and not (node.recomputable or on_copies):
            self._skip(node)
            return
        place = f"{node.module or '(root)'}  {node.source.rsplit('/', 1)[-1]}"
        place += "  [recomputed]" if again else ""
        if place != self._place:
            self._line(f"# {place}")
            self._place = place
        replayed = node.random and self._executions[node.index] > 1
        if replayed:
            self._before_random(node, again)
        self._calls(node, node.called(again or (repeats and not on_copies), taken))
        if replayed and again:
            self._line("frame.end_replay()")
        if replayed and self._done[node.index] == self._executions[node.index]:
            self._line(f'del frame.saved["{self._states.pop(node.index)}"]')

    @staticmethod
    def _skip(node: graphs.ComputeNode) -> None:
        if node.writes:
            raise BackwardError(
                f"{node.name} in module '{node.module or '(root)'}' ({node.source}) depends on "
                "something that the forward pass changes, so the forward cannot run again, which "
                "a second backward, or one from other outputs or in other strides than planned, "
                "needs. Name the outputs that backward starts from: Options(differentiated=...); "
                "or plan for the gradients of the loss: rockplan.solve(..., loss=lambda y: y.sum())"
            )

    def _before_random(self, node: graphs.ComputeNode, again: bool) -> None:
        results = [r for c in node.calls for r in c.made]
        device = self._graph.values[results[0]].spec.device
        if again:
            self._redraws[bool(self._read)] += 1  # in the backward phase there are slices
            self._line(f'frame.begin_replay("{self._states[node.index]}", "{device}")')
            return
        name = self._names.of(("state", node.index), f"rng_{node.name}")
        self._states[node.index] = name
        self._line(f'frame.save_generator_state("{name}", "{device}")')

    def _calls(self, node: graphs.ComputeNode, calls: Sequence[graphs.Call]) -> None:
        """A copy of a storage that is alive already gets names of its own, and is dropped at the
        end."""
        alive = {d: self._live.pop(d, []) for d in node.writes if d in self._alive}
        self._shadowed = set(alive)
        waiting = {d: self._saved.pop(d) for d in alive if d in self._saved}
        for call in calls:
            for ref in graphs.refs(call):
                self._need(ref.index)
            self._assign(call)
        for data in alive:
            self._drop(data)
        self._shadowed = set()
        self._live.update(alive)
        self._saved.update(waiting)

    def _assign(self, call: graphs.Call) -> None:
        expression = _expression(call, self._name, self._names.operator)
        read = {ref.index for ref in graphs.refs(call)}
        fresh = [r for r in call.made if r not in read]
        if not fresh:
            self._line(expression)
            return
        targets = ["_" if r not in fresh else self._name(r) for r in call.results]
        self._line(f"{_pattern(call.op, targets)} = {expression}")
        if "_" in targets:
            self._line("del _")
        self._note_made(dict.fromkeys(fresh))  # an operator may return one tensor twice

    def _need(self, value: int, is_own: bool = False) -> None:
        """Taken from frame or residents (a position is noted as read), or derived again as a
        view. is_own: as an object of its own."""
        needed = self._graph.values[value]
        for saved in self._saved.pop(needed.data, ()):
            name = self._name(saved)
            self._line(f'{name} = frame.saved.pop("{name}")')
            self._live[needed.data].append(saved)
        self._await(needed.data)
        if value in self._live[needed.data]:
            return
        if value in self._resident:
            position = self._resident[value]
            self._line(f"{self._name(value)} = frame.residents[{position}]")
            self._live[needed.data].append(value)
            (self._read[-1] if self._read else self._checked).add(position)
        elif needed.view is not None:
            self._derive(value, needed.view, is_own)
        else:
            raise AssertionError(f"{needed.name} is not alive where it is read")

    def _derive(self, value: int, view: graphs.Call, is_own: bool) -> None:
        """A view that lies as a tensor which it comes from is that tensor, unless it is to be an
        object of its own. Of views that give new sizes to a tensor without gaps, the last is
        enough."""
        values, source, short, resizes = self._graph.values, value, view, True
        data, spec = values[value].data, values[value].spec
        while (step := values[source].view) is not None:
            resizes &= step.op in _RESIZING
            if len(graphs.refs(step)) != 1:
                break
            source = graphs.refs(step)[0].index
            if as_text(values[source].spec) == as_text(spec) and not is_own:
                self._need(source)
                self._line(f"{self._name(value)} = {self._name(source)}")
                self._live[data].append(value)
                return
            if resizes and _is_without_gaps(values[source].spec):
                short = replace(view, args=(graphs.ValueRef(source), *view.args[1:]))
        for ref in graphs.refs(short):
            self._need(ref.index)
        self._assign(short)

    def _name(self, value: int) -> str:
        named = self._graph.values[value]
        name = self._names.of(value, named.name)
        return f"{name}_again" if named.data in self._shadowed else name


_RESIZING = ("aten.view.default", "aten._unsafe_view.default")


def _is_without_gaps(spec: graphs.TensorSpec) -> bool:
    """False also for one of many sizes."""
    strides = [math.prod(spec.shape[i + 1 :]) for i, _ in enumerate(spec.shape)]
    return all(type(s) is int for s in spec.shape) and list(spec.stride) == strides


def _acts(node: graphs.ComputeNode) -> bool:
    is_once = not node.recomputable and copy_of(node) is None
    return is_once and any(facts_of(call.op).effect for call in node.calls)


def _results(graph: graphs.CDGraph, node: graphs.ComputeNode) -> dict[int, str]:
    made = ((r, c.op) for c in node.calls for r in c.made)
    return {
        r: op
        for r, op in made
        if graph.values[r].data in node.writes and graph.values[r].view is None
    }


def _unpacked(names: Iterable[str]) -> str:
    return "".join(f"{name}, " for name in names).rstrip()


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(f'{n}, ' for n in names).rstrip()})"


def emit_guard(
    guard: Guard, number: int, sizes: Sequence[str] = ()
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return (the text of `guard_<number>(leaves, constants, buffers, sizes)`, which computes the
    value that the guard checks; its identifiers with the operators they stand for). sizes: names of
    the sizes of a call."""
    names = _Names(sizes)

    def name(value: int) -> str:
        return names.of(value, f"v{value}")

    lines = [f"def guard_{number}(leaves, constants, buffers, sizes):"]
    lines += [f"{_INDENT}{_unpacked(sizes)} = sizes"] if sizes else []
    lines += [f"{_INDENT}{name(v)} = leaves[{i}]" for v, i in guard.inputs]
    lines += [f"{_INDENT}{name(v)} = constants[{i}]" for v, i in guard.constants]
    lines += [f"{_INDENT}{name(v)} = buffers[{i}]" for v, i in guard.buffers]
    for call in guard.calls:
        targets = ["_" if r is None else name(r) for r in call.results]
        expression = _expression(call, name, names.operator)
        lines.append(f"{_INDENT}{_pattern(call.op, targets)} = {expression}")
    lines.append(f"{_INDENT}return {_expression(guard.read, name, names.operator)}")
    return "\n".join(lines) + "\n", tuple(names.operators.items())


def _pattern(op: str, targets: Sequence[str]) -> str:
    is_one = not graphs.is_kernel(op) and _returns_one(op)
    return targets[0] if is_one else "".join(f"{t}, " for t in targets).rstrip()


@functools.cache
def _returns_one(op: str) -> bool:
    returns = resolve(op)._schema.returns
    if len(returns) > 1 and any("List" in str(r.type) for r in returns):
        raise UnsupportedModel(f"operator {op} returns nested lists, which cannot be planned")
    return len(returns) == 1 and str(returns[0].type) in ("Tensor", "Optional[Tensor]")


def _expression(
    call: graphs.Call, name: Callable[[int], str], operator: Callable[[str], str]
) -> str:
    if graphs.is_kernel(call.op):
        return f"{operator(call.op)}({_literal(call.args, name)})"
    args = [_literal(a, name) for a in call.args]
    kwargs = [f"{k}={_literal(a, name)}" for k, a in call.kwargs]
    method = row_of(call.op).method
    if method and not kwargs:
        return f"{args[0]}.{method}({', '.join(args[1:])})"
    return f"{operator(call.op)}({', '.join(args + kwargs)})"


def _literal(argument: object, name: Callable[[int], str]) -> str:
    if isinstance(argument, graphs.ValueRef):
        return name(argument.index)
    if isinstance(argument, tuple):
        return f"[{', '.join(_literal(a, name) for a in argument)}]"
    if isinstance(argument, Size | Real):
        return argument.text
    if isinstance(argument, float):
        return repr(argument) if math.isfinite(argument) else f'float("{argument}")'
    if isinstance(argument, torch.device):
        return f'torch.device("{argument}")'
    if argument is None or isinstance(argument, bool | int | complex | str):
        return repr(argument)
    if isinstance(argument, graphs.MeshGroup):
        return repr(argument.name)
    if isinstance(argument, torch.dtype | torch.layout | torch.memory_format):
        return str(argument)
    raise UnsupportedModel(
        f"an operator takes a {type(argument).__name__} as argument, which cannot be written "
        "into a plan; pass plain numbers and tensors (no torch.Generator objects)"
    )
