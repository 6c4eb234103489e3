"""Memory over time, as values: predicted by module.

takes: a Plan, or a priced CDGraph and a legal Schedule. returns: MemoryTimeline. guarantees: the
largest `live_bytes` of a timeline is the peak that `simulate` finds, and at every moment the bytes
of its groups add up to `live_bytes`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rockplan.oracles.clock import clock
from rockplan.oracles.lifetimes import Owner, lifetimes
from rockplan.oracles.simulate import timeline
from rockplan.values.graph import CDGraph, DataKind, Queue, as_eager
from rockplan.values.names import ROOT, operation_names
from rockplan.values.plan import Plan, format_bytes
from rockplan.values.schedule import Compute, Schedule, keep_all

CALLER = "(caller)"
OTHERS = "(others)"
MOST_GROUPS = 7
"""As many colours as everyone can tell apart (Okabe and Ito), beside one for the others."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One computation. again: it is a re-execution. group_bytes: live_bytes by module group."""

    start_ns: int
    stop_ns: int
    node: int
    phase: str
    again: bool
    live_bytes: int
    group_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stay:
    """A storage, or other bytes, alive during moments first..last; node: what made it or takes the
    bytes, None for tangents; group: index of the module group."""

    node: int | None
    kind: str
    group: int
    size_bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Predicted memory over one step; backward_ns: when the backward phase starts."""

    name: str
    groups: tuple[str, ...]
    moments: tuple[Moment, ...]
    stays: tuple[Stay, ...]
    backward_ns: int
    time_ns: int

    @property
    def peak_bytes(self) -> int:
        return max((m.live_bytes for m in self.moments), default=0)

    def title(self, budget_bytes: int | None) -> str:
        """Return the name, the predicted peak, and the budget where it is given."""
        budget = "" if budget_bytes is None else f", budget {format_bytes(budget_bytes)}"
        return f"{self.name}: predicted peak {format_bytes(self.peak_bytes)}{budget}"


def planned_timeline(plan: Plan) -> MemoryTimeline:
    """Predict memory over the planned step."""
    return timeline_of(plan.graph, plan.schedule, "planned")


def eager_timeline(plan: Plan) -> MemoryTimeline:
    """Predict memory over the step that keeps everything, as eager executes it."""
    graph = as_eager(plan.graph)
    return timeline_of(graph, keep_all(graph), "keeping everything")


def timeline_of(graph: CDGraph, schedule: Schedule, name: str) -> MemoryTimeline:
    """Return the predicted bytes alive during each computation of `schedule`, by groups of modules,
    and when each storage is alive. name: what the timeline is called."""
    groups = module_groups(graph)
    labels = (*dict.fromkeys(groups), CALLER)
    number = {label: i for i, label in enumerate(labels)}
    stays = _stays(graph, schedule, [number[g] for g in groups], number[CALLER])
    used = sorted({s.group for s in stays})
    renumbered = {old: new for new, old in enumerate(used)}
    stays = tuple(replace(s, group=renumbered[s.group]) for s in stays)
    moments = tuple(_moments(graph, schedule, _group_bytes(stays, len(used), schedule)))
    forward = sum(isinstance(e, Compute) for e in schedule.events[: schedule.forward_length])
    total_ns = moments[-1].stop_ns if moments else 0
    return MemoryTimeline(
        name=name,
        groups=tuple(labels[i] for i in used),
        moments=moments,
        stays=stays,
        backward_ns=moments[forward].start_ns if forward < len(moments) else total_ns,
        time_ns=total_ns,
    )


def _stays(
    graph: CDGraph, schedule: Schedule, group_of: Sequence[int], caller: int
) -> tuple[Stay, ...]:
    computes = [p for p, e in enumerate(schedule.events) if isinstance(e, Compute)]
    stays = []
    for lifetime in lifetimes(graph, schedule):
        maker = lifetime.maker(graph)
        node = None if maker is None else maker.index
        first = bisect_left(computes, lifetime.start)
        last = bisect_left(computes, lifetime.stop) - 1
        if first > last:
            continue
        group = caller if node is None else group_of[node]
        stays.append(Stay(node, lifetime.kind(graph), group, lifetime.size_bytes, first, last))
    return tuple(stays)


def _group_bytes(
    stays: Sequence[Stay], groups: int, schedule: Schedule
) -> Iterator[tuple[int, ...]]:
    count = len(schedule.computes)
    changes: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]
    for stay in stays:
        changes[stay.first].append((stay.group, stay.size_bytes))
        changes[stay.last + 1].append((stay.group, -stay.size_bytes))
    live = [0] * groups
    for change in changes[:count]:
        for group, size_bytes in change:
            live[group] += size_bytes
        yield tuple(live)


def _moments(
    graph: CDGraph, schedule: Schedule, group_bytes: Iterator[tuple[int, ...]]
) -> Iterator[Moment]:
    seen: set[int] = set()
    now_ns = 0
    for event, step in zip(schedule.events, timeline(graph, schedule), strict=True):
        if not isinstance(event, Compute):
            continue
        node = graph.nodes[event.node]
        yield Moment(
            start_ns=now_ns,
            stop_ns=now_ns + step.time_ns,
            node=node.index,
            phase=node.phase.value,
            again=node.index in seen and not node.optional,
            live_bytes=step.during_bytes,
            group_bytes=next(group_bytes),
        )
        seen.add(node.index)
        now_ns += step.time_ns


def module_groups(graph: CDGraph) -> tuple[str, ...]:
    """Return for each node the label of the group of modules that it is drawn with, such as
    'layers.*.attn': the deepest level of the module tree with at most MOST_GROUPS groups, in which
    the layers of a stack are one. Where that leaves one group, or too many, those of the
    outermost level, the smallest ones as OTHERS."""
    paths = [re.sub(r"\b\d+\b", "*", n.module, count=1).split(".") for n in graph.nodes]
    for depth in range(max(map(len, paths), default=0), 0, -1):
        labels = [".".join(path[:depth]) or ROOT for path in paths]
        if 1 < len(set(labels)) <= MOST_GROUPS:
            return tuple(labels)
    return _largest_groups(graph, [n.module.partition(".")[0] or ROOT for n in graph.nodes])


def _largest_groups(graph: CDGraph, labels: list[str]) -> tuple[str, ...]:
    made: dict[str, int] = defaultdict(int)
    for node, label in zip(graph.nodes, labels, strict=True):
        made[label] += sum(graph.data[d].size_bytes for d in node.writes)
    kept = set(sorted(made, key=lambda label: (-made[label], label))[: MOST_GROUPS - 1])
    return tuple(label if label in kept else OTHERS for label in labels)


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block over time, as Rockmate's figure 1 shows it.

    runs: (start_ns, stop_ns, 'forward' | 'again' | 'backward' | 'copy') of its operations,
    neighbours of one kind joined. alive: (from_ns, bytes) steps of the bytes it keeps: activations
    that its forward operations made, and generator states for repeated draws. saved_bytes: of
    these, between the phases.
    """

    name: str
    runs: tuple[tuple[int, int, str], ...]
    alive: tuple[tuple[int, int], ...]
    saved_bytes: int


_KEPT_KINDS = (DataKind.ACTIVATION.value, Owner.GENERATOR.value)


def block_rows(plan: Plan) -> tuple[BlockRow, ...]:
    """Return for each block of `plan`, in order, when it runs, how many bytes of its activations
    are alive over time, and what it keeps; then, if it pages, rows of the copies."""
    predicted = planned_timeline(plan)
    block_of = {n: i for i, b in enumerate(plan.blocks) for n in (*b.forward, *b.backward)}
    own: list[list[Stay]] = [[] for _ in plan.blocks]
    for stay in predicted.stays:
        if stay.kind in _KEPT_KINDS and stay.node in block_of:
            own[block_of[stay.node]].append(stay)
    boundary = bisect_left(predicted.moments, predicted.backward_ns, key=lambda m: m.start_ns)
    names = operation_names(plan.graph)
    titles = (b.name or names[(*b.forward, *b.backward)[0]] for b in plan.blocks)
    rows = (
        BlockRow(
            name=title,
            runs=tuple(_runs(predicted, block_of, index)),
            alive=tuple(_alive_steps(own[index], predicted)),
            saved_bytes=sum(s.size_bytes for s in own[index] if s.first < boundary <= s.last),
        )
        for index, title in enumerate(titles)
    )
    copies = clock(plan.graph, plan.schedule).copies
    ways = {"to the host": Queue.OUT, "from the host": Queue.IN} if copies else {}
    runs = {
        name: tuple((c.begins_ns, c.ends_ns, "copy") for c in copies if c.queue is queue)
        for name, queue in ways.items()
    }
    return (*rows, *(BlockRow(name, own_runs, (), 0) for name, own_runs in runs.items()))


def _alive_steps(stays: Sequence[Stay], predicted: MemoryTimeline) -> Iterator[tuple[int, int]]:
    """(ns, bytes alive from then on), ascending."""
    changes: dict[int, int] = defaultdict(int)
    for stay in stays:
        changes[predicted.moments[stay.first].start_ns] += stay.size_bytes
        changes[predicted.moments[stay.last].stop_ns] -= stay.size_bytes
    live = 0
    for time_ns in sorted(changes):
        live += changes[time_ns]
        yield time_ns, live


def _runs(
    predicted: MemoryTimeline, block_of: Mapping[int, int], block: int
) -> Iterator[tuple[int, int, str]]:
    """(ns, ns, kind) of each stretch of one kind: "forward", "backward" or "again". block_of: node
    -> block."""
    open_run: tuple[int, int, str] | None = None
    for moment in predicted.moments:
        kind = "again" if moment.again else moment.phase
        mine = block_of.get(moment.node) == block
        if open_run and mine and open_run[2] == kind and open_run[1] == moment.start_ns:
            open_run = (open_run[0], moment.stop_ns, kind)
            continue
        if open_run:
            yield open_run
        open_run = (moment.start_ns, moment.stop_ns, kind) if mine else None
    if open_run:
        yield open_run
