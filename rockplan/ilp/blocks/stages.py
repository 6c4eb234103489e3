"""Stages of a problem: the sets and constants of the stage formulation, without its variables.

takes: Units. returns: Stages. The schedule class: forward nodes run once in order, then backward
nodes once in order; at a stage, directly before a backward node that reads forward storages,
forward nodes may be re-executed, in order.

A storage is *free* if the solver decides when it is alive: made by a forward node and neither held
nor tiny, or the state of a generator. A free storage is *transient* if it is only a step to another
one that is no larger: no backward node reads it, one node does, which reads no other free storage
and writes no more bytes than that; such a storage is never kept, its reader's result is (on
written-out attention a fifth of the solver's time, and no optimum changes:
benchmarks/ilp_blocks.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rockplan.ilp.scaling import Units
from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.recompute import closure
from rockplan.oracles.simulate import timeline
from rockplan.values.graph import CDGraph, ComputeNode, DataKind, without_takes
from rockplan.values.schedule import Compute, Schedule, with_frees


@dataclass(frozen=True, slots=True)
class TurnStage:
    """One stage: the re-executions directly before one backward node, and that node.

    node: the backward node. reads: free storages that it reads. wanted: free storages that this or
    a later stage may use: the closure of their reads under re-execution. movable: nodes that may be
    re-executed here. before_bytes: alive besides free storages when the stage starts. during_bytes:
    the same while the node runs, with its results and workspace. gap_bytes: the largest
    `during_bytes` of the backward nodes between the previous stage and this one, 0 without any. All
    indices ascend.
    """

    node: int
    reads: tuple[int, ...]
    wanted: tuple[int, ...]
    movable: tuple[int, ...]
    before_bytes: int
    during_bytes: int
    gap_bytes: int


@dataclass(frozen=True, slots=True)
class Stages:
    """All stages of a problem. stages: in the order of the backward phase. tail_bytes: the largest
    `during_bytes` after the last one.

    transient: free storages that are never kept. last_use: data of the forward phase -> the last
    forward node that makes or reads it; None if it lives to the end of that phase anyway.
    forward_during_bytes: alive during each forward node if nothing were kept for the backward
    phase. held_bytes: of held forward storages that are not outputs. start_bytes: alive besides
    free storages when the backward phase starts.
    """

    units: Units
    stages: tuple[TurnStage, ...]
    tail_bytes: int
    transient: frozenset[int]
    last_use: dict[int, int | None]
    forward_during_bytes: tuple[int, ...]
    held_bytes: int
    start_bytes: int


def find_stages(units: Units) -> Stages:
    """Return the stages of a block (points of the backward phase at which forward nodes may run
    again), with the bytes that are alive whatever is decided. Every result has its own storage."""
    graph = without_takes(units.graph)
    view, free = units.view, _free(units)
    order = range(len(graph.nodes))
    n_forward = len(graph.forward)
    once = with_frees(graph, order[:n_forward], order[n_forward:])
    weightless = (replace(d, size_bytes=0) if d.index in free else d for d in graph.data)
    during = _during(replace(graph, data=tuple(weightless)), once)
    stages = _stages(view, free, during)
    forward_only = _during(graph, with_frees(graph, range(n_forward), []))
    held = {d for d in view.held if graph.data[d].kind is DataKind.ACTIVATION}
    last = stages[-1].node + 1 if stages else n_forward
    return Stages(
        units=units,
        stages=stages,
        tail_bytes=max((during[i] for i in range(last, len(graph.nodes))), default=0),
        transient=_transient(view, free, stages),
        last_use=_last_forward_use(view),
        forward_during_bytes=tuple(forward_only[i] for i in range(n_forward)),
        held_bytes=view.bytes_of(held.difference(graph.outputs)),
        start_bytes=view.bytes_of(held | view.tangents),
    )


def _stages(
    view: GraphView, free: frozenset[int], during_bytes: dict[int, int]
) -> tuple[TurnStage, ...]:
    """free: storages whose life the solver decides; during_bytes: of each node, without these."""
    graph = view.graph
    before_bytes = {n.index: during_bytes[n.index] - view.own_bytes(n) for n in graph.backward}
    reads = {n.index: tuple(d for d in n.reads if d in free) for n in graph.backward}
    chosen = [i for i, read in reads.items() if read]
    starts = [len(graph.forward), *(node + 1 for node in chosen)]
    stages: list[TurnStage] = []
    wanted: set[int] = set()

    def free_reads(node: int) -> list[int]:
        return [r for r in view.reads_again[node] if r in free]

    for start, node in reversed(list(zip(starts, chosen, strict=False))):
        wanted = closure(free_reads, view.makers, wanted | set(reads[node]))
        stages.append(
            TurnStage(
                node=node,
                reads=reads[node],
                wanted=tuple(sorted(wanted)),
                movable=tuple(sorted({i for d in wanted for i in view.makers[d]})),
                before_bytes=before_bytes[node],
                during_bytes=during_bytes[node],
                gap_bytes=max((during_bytes[i] for i in range(start, node)), default=0),
            )
        )
    return tuple(stages[::-1])


def _free(units: Units) -> frozenset[int]:
    view = units.view
    states = (state for i, state in view.states.items() if view.state_bytes[i])
    activations = (d.index for d in units.graph.data if d.kind is DataKind.ACTIVATION)
    return frozenset((*activations, *states)) - units.tiny - view.held


def _during(graph: CDGraph, schedule: Schedule) -> dict[int, int]:
    """Return node -> bytes alive while it runs; every node runs at most once in `schedule`."""
    return {
        event.node: step.during_bytes
        for event, step in zip(schedule.events, timeline(graph, schedule), strict=True)
        if isinstance(event, Compute)
    }


def _transient(
    view: GraphView, free: frozenset[int], stages: tuple[TurnStage, ...]
) -> frozenset[int]:
    """No backward node reads them, and the one forward node that does may run again, reads no other
    free storage and writes no more bytes, so that keeping its result is no worse."""
    graph = view.graph
    wanted = {d for stage in stages for d in stage.wanted}
    read_in_backward = {d for stage in stages for d in stage.reads}
    users: dict[int, list[ComputeNode]] = {d: [] for d in wanted - read_in_backward}
    for i in sorted({i for stage in stages for i in stage.movable}):
        for d in graph.nodes[i].reads:
            if d in users:
                users[d].append(graph.nodes[i])

    def is_step(d: int, user: ComputeNode) -> bool:
        made_bytes = view.bytes_of(w for w in user.writes if w in wanted)
        return made_bytes <= view.sizes[d] and free & set(user.reads) == {d}

    # Outputs do not count: they are alive at the start of the backward phase, kept or not.
    steps = {d for d in users if view.maker(d) is not None} - set(graph.outputs)
    return frozenset(d for d in steps if len(users[d]) == 1 and is_step(d, users[d][0]))


def _last_forward_use(view: GraphView) -> dict[int, int | None]:
    """None for held storages and outputs, which live to the end of the phase. For the state of a
    generator it is the node before the one that draws."""
    stay = view.held.union(view.graph.outputs)
    n_forward = len(view.graph.forward)
    last_use: dict[int, int | None] = {
        d: None if d in stay else max(i for i in (made_by, *view.readers[d]) if i < n_forward)
        for d, made_by in view.producer.items()
        if made_by < n_forward
    }
    # A generator state is needed while its node runs only if that runs again.
    return last_use | {state: i - 1 for i, state in view.states.items()}
