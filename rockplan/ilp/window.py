"""Windows: where some forward nodes run again, decided anew; the rest of a schedule as it is.

takes: Units of a graph, an order of computations, the forward nodes to decide. returns: Window,
its Stages for `formulate`, and back from a solution to an order. guarantees: an order that is
read from a solution executes everything else as before; it is worth its price only once it is
simulated, since generator states and tiny storages are left out here.

A large neighbourhood of a schedule (Shaw 1998): the events that stay are a fixed sequence, those
of them that read or make a storage of the window are the stages, and the memory that is left
beside everything fixed differs from stage to stage. A window of all forward nodes is the stage
formulation of the whole graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rockplan.graph import CDGraph, DataKind, producers
from rockplan.ilp.decode import Orders
from rockplan.ilp.formulate import StageModel
from rockplan.ilp.stages import Stage, Stages, last_forward_use, transient, without
from rockplan.ilp.units import Units
from rockplan.schedule import Compute, with_frees, without_idle
from rockplan.simulate import timeline


@dataclass(frozen=True, slots=True)
class Window:
    """fixed: the backward phase without re-executions of the window's nodes; positions: of each
    stage's node in it."""

    stages: Stages
    nodes: frozenset[int]
    fixed: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Bytes beside the window's storages. forward: during each node of the forward phase;
    before, during: each event of the fixed backward phase; start: when that phase starts, without
    outputs that are not held."""

    forward: tuple[int, ...]
    before: tuple[int, ...]
    during: tuple[int, ...]
    start: int


def make_window(
    problem: CDGraph, units: Units, orders: Orders, nodes: Collection[int]
) -> Window | None:
    """The window of forward `nodes` (those that may run again) in `orders` of `problem`, whose
    forward phase executes every node once, in order; None if there is nothing to decide.

    units: of the problem. Tiny storages weigh what they weigh, save those that the nodes touch.
    """
    graph = units.graph
    outline = _outline(units, orders, nodes)
    own, free, fixed, positions = outline.own, outline.free, outline.fixed, outline.positions
    beside = _beside(problem, free | (outline.touched & units.tiny), orders.forward, fixed)
    stages = _stages(graph, outline, beside)
    if not any(stage.movable for stage in stages):
        return None
    last = positions[-1] + 1
    made = frozenset(d for i in own for d in graph.nodes[i].writes) & free
    last_use = last_forward_use(graph)
    # A schedule in hand may keep steps: a checkpoint between blocks often is one.
    staged = list(_staged(own, positions, orders))
    kept = frozenset().union(*_kept(graph, staged, len(positions)))
    return Window(
        stages=Stages(
            units=units,
            stages=stages,
            tail=max(beside.during[last:], default=0),
            producer=producers(graph),
            transient=transient(graph, free, made, stages) - kept,
            dropped=frozenset(graph.dropped),
            last_use=last_use,
            forward_during=_forward_during(graph, free, last_use, beside.forward),
            held=0,
            start_bytes=beside.start,
        ),
        nodes=own,
        fixed=fixed,
        positions=positions,
    )


def has_more_columns(
    units: Units, orders: Orders, nodes: Collection[int], most_columns: int
) -> bool:
    """Whether the program of the window of `nodes` needs more than `most_columns`, found without
    making the window."""
    columns = 0
    for need in _needs(units.graph, _outline(units, orders, nodes)):
        columns += len(need.wanted) + len(need.movable)
        if columns > most_columns:
            return True
    return False


@dataclass(frozen=True, slots=True)
class _Outline:
    """own: nodes that may run again; touched: what they read and make; free: what of it is decided
    about; fixed, positions: as in Window."""

    own: frozenset[int]
    touched: frozenset[int]
    free: frozenset[int]
    fixed: tuple[int, ...]
    positions: tuple[int, ...]


def _outline(units: Units, orders: Orders, nodes: Collection[int]) -> _Outline:
    graph = units.graph
    own = frozenset(i for i in nodes if graph.nodes[i].recomputable)
    touched = frozenset(d for i in own for d in (*graph.nodes[i].reads, *graph.nodes[i].writes))
    free = _free(units, touched)
    fixed = tuple(i for i in orders.backward if i not in own)
    positions = tuple(
        t
        for t, i in enumerate(fixed)
        if not free.isdisjoint(graph.nodes[i].reads) or not free.isdisjoint(graph.nodes[i].writes)
    )
    return _Outline(own, touched, free, fixed, positions)


def _free(units: Units, touched: Collection[int]) -> frozenset[int]:
    """Storages whose lives are decided with the window's nodes, which read or make them."""
    outside = units.tiny | set(units.graph.held)
    kinds = {d: units.graph.data[d].kind for d in touched}
    return frozenset(
        d for d, kind in kinds.items() if d not in outside and kind is DataKind.ACTIVATION
    )


def _beside(
    graph: CDGraph, weightless_data: frozenset[int], forward: Sequence[int], fixed: Sequence[int]
) -> _Fixed:
    weightless = without(graph, weightless_data)
    schedule = with_frees(weightless, forward, fixed)
    before: list[int] = []
    during: list[int] = []
    after_bytes = saved_bytes = 0
    for position, (event, step) in enumerate(
        zip(schedule.events, timeline(weightless, schedule), strict=True)
    ):
        if position == schedule.forward_length:
            saved_bytes = after_bytes
        if isinstance(event, Compute):
            before.append(after_bytes)
            during.append(step.during_bytes)
        after_bytes = step.after_bytes
    tangents = {d.index for d in graph.data if d.kind is DataKind.TANGENT}
    dropped = set(graph.outputs) - set(graph.held)
    start_bytes = saved_bytes + sum(graph.data[d].size_bytes for d in tangents)
    start_bytes -= sum(weightless.data[d].size_bytes for d in dropped)
    count = len(forward)
    return _Fixed(tuple(during[:count]), tuple(before[count:]), tuple(during[count:]), start_bytes)


def _forward_during(
    graph: CDGraph,
    free: frozenset[int],
    last_use: dict[int, int | None],
    beside: Sequence[int],
) -> tuple[int, ...]:
    """Bytes during each forward node if nothing of the window were kept for the backward phase."""
    made_by = producers(graph)
    during = list(beside)
    for d in free:
        last = last_use[d]
        for i in range(made_by[d], len(during) if last is None else last + 1):
            during[i] += graph.data[d].size_bytes
    return tuple(during)


@dataclass(frozen=True, slots=True)
class _Need:
    """Of one `Stage`: storages and nodes; position: of its node in `fixed`."""

    position: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    wanted: frozenset[int]
    movable: frozenset[int]


def _needs(graph: CDGraph, outline: _Outline) -> Iterator[_Need]:
    """Of each stage, last one first."""
    producer = producers(graph)
    made = {d for i in outline.own for d in graph.nodes[i].writes}
    wanted: set[int] = set()
    for t in reversed(outline.positions):
        node = graph.nodes[outline.fixed[t]]
        reads = tuple(d for d in node.reads if d in outline.free)
        makes = tuple(d for d in node.writes if d in outline.free)
        seeds: Iterable[int] = reads
        if makes:
            seeds, wanted = wanted.difference(makes).union(reads), set()
        _close(graph, outline, producer, wanted, seeds)
        movable = {producer[d] for d in wanted} & outline.own if made & set(reads) else ()
        yield _Need(t, reads, makes, frozenset(wanted), frozenset(movable))


def _close(
    graph: CDGraph,
    outline: _Outline,
    producer: dict[int, int],
    closed: set[int],
    seeds: Iterable[int],
) -> None:
    """Adds to `closed` the `seeds` and every free storage that the window's nodes may read to
    make them."""
    pending = list(seeds)
    while pending:
        d = pending.pop()
        if d not in closed:
            closed.add(d)
            if producer[d] in outline.own:
                pending += [r for r in graph.nodes[producer[d]].reads if r in outline.free]


def _stages(graph: CDGraph, outline: _Outline, beside: _Fixed) -> tuple[Stage, ...]:
    starts = [0, *(t + 1 for t in outline.positions)]
    needs = list(_needs(graph, outline))[::-1]
    return tuple(
        Stage(
            node=outline.fixed[need.position],
            reads=need.reads,
            makes=need.makes,
            wanted=tuple(sorted(need.wanted)),
            movable=tuple(sorted(need.movable)),
            before=beside.before[need.position],
            during=beside.during[need.position],
            gap=max(beside.during[start : need.position], default=0),
        )
        for start, need in zip(starts, needs, strict=False)
    )


def start_values(window: Window, model: StageModel, orders: Orders) -> dict[int, float]:
    """Columns of `model` as `orders` has them: where to start the search from."""
    values = dict.fromkeys([*model.keep.values(), *model.rerun.values()], 0.0)
    graph = window.stages.units.graph
    staged = list(_staged(window.nodes, window.positions, orders))
    for s, kept in enumerate(_kept(graph, staged, len(window.positions))):
        values |= {model.keep[s, d]: 1.0 for d in kept if (s, d) in model.keep}
    values |= {
        model.rerun[s, i]: 1.0 for i, s in staged if i in window.nodes and (s, i) in model.rerun
    }
    return values


def _staged(
    own: frozenset[int], positions: Sequence[int], orders: Orders
) -> Iterator[tuple[int, int]]:
    """Each computation of the backward phase with the stage in which it runs."""
    stage_of = {t: s for s, t in enumerate(positions)}
    t = s = 0
    for i in orders.backward:
        yield i, s
        if i not in own:
            s = stage_of[t] + 1 if t in stage_of else s
            t += 1


def _kept(graph: CDGraph, staged: Sequence[tuple[int, int]], count: int) -> list[frozenset[int]]:
    """For each of `count` stages: data that are read after its start before they are made."""
    kept: list[frozenset[int]] = [frozenset()] * count
    read_next: set[int] = set()
    for i, s in reversed(staged):
        read_next.difference_update(graph.nodes[i].writes)
        read_next.update(graph.nodes[i].reads)
        if s < count:
            kept[s] = frozenset(read_next)
    return kept


def staged(window: Window, orders: Orders) -> tuple[tuple[int, int], ...]:
    """Each computation of the backward phase with the stage in which it runs."""
    return tuple(_staged(window.nodes, window.positions, orders))


def read_window(
    window: Window, rerun: Collection[tuple[int, int]], forward: Sequence[int]
) -> Orders:
    """The order with these re-executions: (stage, node)."""
    again: dict[int, list[int]] = {t: [] for t in window.positions}
    for s, i in sorted(rerun):
        again[window.positions[s]].append(i)
    backward: list[int] = []
    for t, i in enumerate(window.fixed):
        backward += [*again.get(t, ()), i]
    return Orders(*without_idle(window.stages.units.graph, forward, backward))
