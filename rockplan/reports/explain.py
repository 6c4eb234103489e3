"""Explain: who owns the peak, why, and what each recomputation saves.

takes: a Plan. returns: Explanation, a value that prints for people and becomes JSON with `as_json`.
guarantees: the bytes of its tenants add up to the simulated peak.
"""

from __future__ import annotations

import textwrap
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePath

from rockplan.oracles.clock import clock
from rockplan.oracles.lifetimes import Lifetime, Owner, alive_at, lifetimes
from rockplan.oracles.peak_owner import marked
from rockplan.oracles.simulate import simulate
from rockplan.values.graph import CDGraph, DataKind, Phase, Queue, as_eager
from rockplan.values.names import activation_names, operation_names, operator_of, pattern_of
from rockplan.values.plan import format_bytes, plan_in
from rockplan.values.schedule import Compute, Schedule, keep_all, with_frees


@dataclass(frozen=True, slots=True)
class Tenant:
    """A storage, or other bytes, alive at the peak.

    name: of the storage, or of the operation that a workspace or generator state belongs to
    (`rockplan.values.names`). source: file and line of the model that makes it. kind: 'activation',
    'gradient', 'tangent', 'workspace', 'copy' or 'generator state'. reason: why it is alive at the
    peak.
    """

    name: str
    module: str
    source: str
    operator: str
    kind: str
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Share:
    """All tenants of the same kind of module and operator: 'layers.*.attn/softmax'.

    tenants: how many; largest: the name of the largest of them.
    """

    pattern: str
    tenants: int
    size_bytes: int
    largest: str


@dataclass(frozen=True, slots=True)
class Recomputation:
    """An operation that is re-executed.

    times: number of re-executions. at_ns: when, from the start of the step; readers: for each, the
    operation that first reads the results. time_ns: of all re-executions. results_bytes: of one
    execution. peak_without_bytes: the peak if its results were kept instead; buys_bytes: how much
    lower the peak is. Operations that are recomputed together share what they buy.
    """

    name: str
    module: str
    operator: str
    times: int
    at_ns: tuple[int, ...]
    readers: tuple[str, ...]
    time_ns: int
    results_bytes: int
    peak_without_bytes: int
    buys_bytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The peak of a schedule and its recomputations.

    peak_operation, peak_phase, peak_source: what runs at the peak, and the line of the model.
    peak_at_ns of time_ns: when. tenants: by size; shares: the same bytes by kind. recomputations:
    in the order of the graph. weights: what parameters alone are computed into (dequantized, cast)
    and the backward phase reads: kept from the forward phase, made in the backward phase.
    needed_bytes_with: options with which the call needs less, as users
    write them -> bytes; empty if that was not examined.
    """

    peak_bytes: int
    peak_operation: str
    peak_phase: str
    peak_source: str
    peak_at_ns: int
    time_ns: int
    eager_time_ns: int
    shares: tuple[Share, ...]
    tenants: tuple[Tenant, ...]
    recomputations: tuple[Recomputation, ...]
    weights: tuple[Share, ...] = ()
    needed_bytes_with: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return explanation_text(self)

    def as_json(self) -> dict[str, object]:
        """Return nested dictionaries, lists, strings and integers (`_bytes`, `_ns`)."""
        return asdict(self)


def explain_plan(plan: object, *, unplanned: bool = False) -> Explanation:
    """Return who owns the peak of a plan (of `unplanned`: of every operation once as in eager)
    and what each recomputation buys. Raises InvalidInput for
    what has no plan."""
    explained = plan_in(plan)
    if unplanned:
        graph = as_eager(explained.graph)
        return explain_schedule(graph, keep_all(graph))
    return explain_schedule(explained.graph, explained.schedule)


def explain_schedule(graph: CDGraph, schedule: Schedule) -> Explanation:
    """Return who owns the peak of one legal schedule of a priced graph and what each
    recomputation buys."""
    scene = _Scene(graph, schedule)
    replay = scene.replay
    alive = map(scene.tenant, alive_at(scene.lifetimes, scene.peak_event))
    tenants = tuple(sorted(alive, key=lambda t: (-t.size_bytes, t.name, t.kind)))
    event = schedule.events[replay.peak_event]
    node = graph.nodes[event.node] if isinstance(event, Compute) else None
    return Explanation(
        peak_bytes=replay.peak_bytes,
        peak_operation=scene.operations[node.index] if node else "",
        peak_phase=(_phase(schedule, replay.peak_event)).value,
        peak_source=PurePath(node.source).name if node else "",
        peak_at_ns=scene.times_ns[replay.peak_event],
        time_ns=replay.time_ns,
        eager_time_ns=graph.time_ns,
        shares=_shares(tenants),
        tenants=tenants,
        recomputations=tuple(scene.recomputations()),
        weights=tuple(scene.weights()),
    )


class _Scene:
    """One schedule with indices for the parts of its explanation."""

    def __init__(self, graph: CDGraph, schedule: Schedule) -> None:
        self.graph = graph
        self.schedule = schedule
        self.operations = operation_names(graph)
        self.storages = activation_names(graph)
        self.times_ns = clock(graph, schedule).starts_ns
        self.replay = simulate(graph, schedule)
        self.peak_event = self.replay.peak_event
        self.lifetimes = lifetimes(graph, schedule)
        self.positions: dict[int, list[int]] = {}
        self.reads: dict[int, list[int]] = {}
        for position, event in enumerate(schedule.events):
            if isinstance(event, Compute):
                self.positions.setdefault(event.node, []).append(position)
                for data in graph.nodes[event.node].reads:
                    self.reads.setdefault(data, []).append(position)

    def node_at(self, position: int) -> int:
        event = self.schedule.events[position]
        assert isinstance(event, Compute)
        return event.node

    def _operation_at(self, position: int) -> str:
        return self.operations[self.node_at(position)]

    def queue_at(self, position: int) -> Queue | None:
        """Return the queue that the event runs on, None for a free."""
        event = self.schedule.events[position]
        return self.graph.nodes[event.node].queue if isinstance(event, Compute) else None

    def next_read(self, data: int, position: int, stop: int) -> int | None:
        """Return the first event in position..stop-1 that reads `data`."""
        reads = self.reads.get(data, [])
        at = bisect_left(reads, position)
        return reads[at] if at < len(reads) and reads[at] < stop else None

    def tenant(self, lifetime: Lifetime) -> Tenant:
        made_by = lifetime.maker(self.graph)
        reading = None
        if lifetime.owner is Owner.STORAGE:
            reading = self.next_read(lifetime.index, self.peak_event, lifetime.stop)
        return Tenant(
            name=(self.operations if lifetime.is_of_node else self.storages)[lifetime.index],
            module=made_by.module if made_by else "",
            source=PurePath(made_by.source).name if made_by else "",
            operator=operator_of(made_by) if made_by else "",
            kind=lifetime.kind(self.graph),
            size_bytes=lifetime.size_bytes,
            reason=self._reason(lifetime, reading),
        )

    def _reason(self, lifetime: Lifetime, reading: int | None) -> str:
        """reading: position in the schedule of their next read, None if there is none."""
        match lifetime.owner:
            case Owner.WORKSPACE:
                return "temporaries inside the operation at the peak"
            case Owner.COPY:
                return "the operation at the peak makes it again while the old one is alive"
            case Owner.GENERATOR:
                return "generator state, so that random draws can be repeated"
        if lifetime.start == self.peak_event:
            return "made by the operation at the peak"
        if reading == self.peak_event:
            return "read by the operation at the peak"
        if reading is not None and self.queue_at(reading) is Queue.OUT:
            return "on its way to the host, from where it comes back for the backward phase"
        if reading is not None:
            phase = _phase(self.schedule, reading).value
            how = ", which runs again" if self.positions[self.node_at(reading)][0] < reading else ""
            came = self.queue_at(lifetime.start) is Queue.IN
            back = "back from the host, " if came else ""
            return f"{back}read next by {self._operation_at(reading)}{how} in the {phase} phase"
        if self.graph.data[lifetime.index].kind is DataKind.TANGENT:
            return "incoming gradient that the caller holds"
        if lifetime.index in (*self.graph.held, *self.graph.outputs):
            return "output that the caller holds"
        if lifetime.index in self.graph.handed:
            return "gradient that waits to be handed to autograd"
        return "alive to the end of its phase"

    def weights(self) -> Iterator[Share]:
        """Yield what parameters alone are computed into and the backward phase reads."""
        graph, forward = self.graph, self.schedule.forward_length
        fixed = {d.index for d in graph.data if d.kind.resident and d.kind is not DataKind.INPUT}
        found = {d.index for d in graph.data if d.kind is DataKind.PARAMETER}
        users: set[int] = set()
        for node in graph.nodes:
            if node.reads and fixed.issuperset(node.reads):
                fixed.update(node.writes)
                found.update(node.writes if not found.isdisjoint(node.reads) else ())
            else:
                users.update(node.reads)
        made = [f for f in self.lifetimes if f.owner is Owner.STORAGE and f.index in found & users]
        read = [f for f in made if self.next_read(f.index, max(forward, f.start + 1), f.stop)]
        for text, is_kept in (("kept for", True), ("made in", False)):
            ones = [f for f in read if (f.start < forward) is is_kept]
            if ones:
                largest = self.storages[max(ones, key=lambda f: f.size_bytes).index]
                size_bytes = sum(f.size_bytes for f in ones)
                yield Share(f"{text} the backward phase", len(ones), size_bytes, largest)

    def recomputations(self) -> Iterator[Recomputation]:
        for index, positions in sorted(self.positions.items()):
            if len(positions) > 1 and not self.graph.nodes[index].optional:
                yield self.recomputation(index, positions[1:])

    def recomputation(self, index: int, again: list[int]) -> Recomputation:
        node = self.graph.nodes[index]
        orders: tuple[list[int], list[int]] = ([], [])
        for position, event in enumerate(self.schedule.events):
            if isinstance(event, Compute) and position not in again:
                orders[position >= self.schedule.forward_length].append(event.node)
        peak_without_bytes = simulate(self.graph, with_frees(self.graph, *orders)).peak_bytes
        stop = len(self.schedule.events)
        reads = ([self.next_read(d, p + 1, stop) for d in node.writes] for p in again)
        first_reads = [min(filter(None, read), default=None) for read in reads]
        return Recomputation(
            name=self.operations[index],
            module=node.module,
            operator=operator_of(node),
            times=len(again),
            at_ns=tuple(self.times_ns[p] for p in again),
            readers=tuple("" if r is None else self._operation_at(r) for r in first_reads),
            time_ns=node.time_ns * len(again),
            results_bytes=sum(self.graph.data[d].size_bytes for d in node.writes),
            peak_without_bytes=peak_without_bytes,
            buys_bytes=peak_without_bytes - self.replay.peak_bytes,
        )


def _phase(schedule: Schedule, position: int) -> Phase:
    return Phase.FORWARD if position < schedule.forward_length else Phase.BACKWARD


def _shares(tenants: tuple[Tenant, ...]) -> tuple[Share, ...]:
    groups: dict[str, list[Tenant]] = {}
    for tenant in tenants:
        groups.setdefault(marked(pattern_of(tenant.name), tenant.kind), []).append(tenant)
    shares = [
        Share(pattern, len(group), sum(t.size_bytes for t in group), group[0].name)
        for pattern, group in groups.items()
    ]
    return tuple(sorted(shares, key=lambda s: (-s.size_bytes, s.pattern)))


WIDTH = 80
"""Columns of a printed line."""

_NARROW, _WIDE = 10, 20
"""Indents of continued lines: in general, and of lines that begin with a share and bytes."""


def wrapped(text: str, indent: int = 0) -> list[str]:
    """Return `text` as lines of at most WIDTH characters, all but the first indented by `indent`; a
    name that fits into no line is broken after one of `/._`."""
    room = WIDTH - indent
    fitting = " ".join(part for word in text.split(" ") for part in _parts(word, room))
    return textwrap.wrap(
        fitting,
        WIDTH,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def _parts(word: str, room: int) -> Iterator[str]:
    while len(word) > room:
        at = max(word.rfind(mark, 0, room) for mark in "/._") + 1 or room
        yield word[:at]
        word = word[at:]
    yield word


def explanation_text(explanation: Explanation, rows: int = 8) -> str:
    """Return an explanation as text: the headline first, then at most `rows` rows of each table."""
    lines = [*_headline(explanation), "", *_share_lines(explanation, rows)]
    if explanation.weights:
        lines += ["", "weights that parameters are computed into (dequantized, cast)"]
    for share in explanation.weights:
        text = f"  {format_bytes(share.size_bytes):>10}  {share.tenants} {share.pattern}"
        lines += wrapped(f"{text}, such as {share.largest}", _WIDE)
    if explanation.recomputations:
        lines += ["", *_recomputation_lines(explanation, rows)]
    if explanation.needed_bytes_with:
        lines += ["", "with other options less is needed"]
        needed = explanation.needed_bytes_with.items()
        lines += [f"  {format_bytes(size):>10}  {text}" for text, size in needed]
    return "\n".join(lines)


def _percent(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.0%}"


def _headline(explanation: Explanation) -> list[str]:
    lines = []
    for first in explanation.shares[:1]:
        owners = f"{first.tenants} tensors" if first.tenants > 1 else "one tensor"
        share = _percent(first.size_bytes, explanation.peak_bytes)
        lines += wrapped(f"{share} of the peak: {owners} of {first.pattern}", _NARROW)
    where = f" ({explanation.peak_source})" if explanation.peak_source else ""
    peak = (
        f"peak {format_bytes(explanation.peak_bytes)} in the {explanation.peak_phase} phase, "
        f"{_percent(explanation.peak_at_ns, explanation.time_ns)} through the step, "
        f"at {explanation.peak_operation}{where}"
    )
    return [*lines, *wrapped(peak, _NARROW)]


def _share_lines(explanation: Explanation, rows: int) -> list[str]:
    ascending = reversed(explanation.tenants)
    by_name = {(marked(pattern_of(t.name), t.kind), t.name): t for t in ascending}
    lines = ["who owns the peak"]
    for share in explanation.shares[:rows]:
        largest = by_name[share.pattern, share.largest]
        count = f"  x{share.tenants}, such as" if share.tenants > 1 else ":"
        head = (
            f"  {_percent(share.size_bytes, explanation.peak_bytes):>4}  "
            f"{format_bytes(share.size_bytes):>10}  {share.pattern}{count}"
        )
        facts = [largest.source, format_bytes(largest.size_bytes), largest.kind]
        why = f"{largest.name} ({', '.join(filter(None, facts))}): {largest.reason}"
        lines += [*wrapped(head, _WIDE), *wrapped(" " * _WIDE + why, _WIDE + 2)]
    rest = explanation.shares[rows:]
    if rest:
        rest_bytes = sum(s.size_bytes for s in rest)
        tenants = sum(s.tenants for s in rest)
        lines.append(f"{'':8}{format_bytes(rest_bytes):>10}  in {tenants} smaller ones")
    return lines


def _recomputation_lines(explanation: Explanation, rows: int) -> list[str]:
    total_ns = sum(r.time_ns for r in explanation.recomputations)
    groups: dict[str, list[Recomputation]] = {}
    for again in explanation.recomputations:
        groups.setdefault(pattern_of(again.name), []).append(again)
    costly = sorted(groups.items(), key=lambda g: (-sum(r.time_ns for r in g[1]), g[0]))
    lines = [
        f"{len(explanation.recomputations)} operations run again, {total_ns / 1e6:.2f} ms in all "
        f"({total_ns / max(explanation.eager_time_ns, 1):+.1%})",
        f"  {'time':>9}  {'buys':>10}  operations",
    ]
    for pattern, group in costly[:rows]:
        lines += wrapped(_recomputation_line(pattern, group), _WIDE + 5)
    rest = [r for _, group in costly[rows:] for r in group]
    if rest:
        rest_ns = sum(r.time_ns for r in rest)
        lines.append(f"  {rest_ns / 1e6:6.2f} ms  {'':>10}  {len(rest)} others")
    return [*lines, "  buys: by how much keeping the results of one of them would raise the peak"]


def _recomputation_line(pattern: str, group: list[Recomputation]) -> str:
    time_ns = sum(r.time_ns for r in group)
    most = max(group, key=lambda r: r.buys_bytes)
    times = sum(r.times for r in group)
    return (
        f"  {time_ns / 1e6:6.2f} ms  {format_bytes(max(most.buys_bytes, 0)):>10}  "
        f"{pattern}{f' x{times}' if times > 1 else ''}, such as {most.name} "
        f"at {most.at_ns[0] / 1e6:.1f} ms for {most.readers[0] or 'the caller'}"
    )
