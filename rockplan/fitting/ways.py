"""Ways to run a step without a search, which users compare a plan with.

takes: a priced CDGraph. returns: a graph and a legal Schedule of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rockplan.oracles.verify import verify
from rockplan.values.graph import CDGraph, ComputeNode, as_eager, in_eager_order, producers
from rockplan.values.order import remade
from rockplan.values.schedule import Compute, Event, Free, Schedule, keep_all, with_frees


def kept_whole(graph: CDGraph) -> tuple[CDGraph, Schedule]:
    """Run every node once, in eager's order."""
    eager = as_eager(graph)
    return eager, _freed_as_eager_does(eager, keep_all(eager))


def compiled_whole(graph: CDGraph) -> tuple[CDGraph, Schedule]:
    """Run every node of a compiled graph once, as code does that frees at once, and writes in place
    where it may."""
    graph = in_eager_order(graph)
    return graph, keep_all(graph)


def per_block(graph: CDGraph, blocks: Sequence[str]) -> tuple[CDGraph, Schedule]:
    """Return (graph as eager runs it, schedule of a step with `torch.utils.checkpoint` on each of
    `blocks`, paths of modules): what the backward of a block reads of its forward is re-executed
    before that backward begins, and what that reads is held until it ends."""
    eager = as_eager(graph)
    makers = producers(eager)
    forward, backward = keep_all(eager).phases
    path_of = {n.index: block_of(n, blocks) for n in eager.nodes}
    read, inside = defaultdict[str, list[int]](list), defaultdict[str, set[int]](set)
    for index in backward:
        read[path_of[index]] += eager.nodes[index].reads
    for data, maker in makers.items():
        if maker < len(forward) and eager.nodes[maker].recomputable:
            inside[path_of[maker]].add(data)
    order: list[int] = []
    begun = {""}
    held = defaultdict[int, list[str]](list)
    for index in backward:
        block = path_of[index]
        if block not in begun:
            begun.add(block)
            again = remade(eager, makers, read[block], inside[block])
            for data in {d for node in again for d in eager.nodes[node].reads} - inside[block]:
                held[data].append(block)
            order += again
        order.append(index)
    schedule = _freed_as_eager_does(eager, with_frees(eager, forward, order))
    schedule = _held(schedule, held, path_of)
    verify(eager, schedule)
    return eager, schedule


def _held(
    schedule: Schedule, held: Mapping[int, Sequence[str]], path_of: Mapping[int, str]
) -> Schedule:
    """Return `schedule` with the data of `held` (data -> blocks that it was given to) freed in the
    backward phase only when these have run. path_of: node -> its block."""
    events, boundary = schedule.events, schedule.forward_length
    ends = {path_of[e.node]: p for p, e in enumerate(events) if isinstance(e, Compute)}
    made: list[Event] = []
    waiting = defaultdict[int, list[Event]](list)
    for position, event in enumerate(events):
        end = 0
        if position >= boundary and isinstance(event, Free):
            end = max((ends[block] for block in held.get(event.data, ())), default=0)
        (waiting[end] if position < end else made).append(event)
        made += waiting.pop(position, ())
    return Schedule(tuple(made), boundary)


def _freed_as_eager_does(graph: CDGraph, schedule: Schedule) -> Schedule:
    """Return `schedule` with the inputs of a backward function freed only when all of it has run,
    as autograd does. One function is taken to be consecutive nodes of one line of a module, none of
    which reads what another makes."""
    boundary = schedule.forward_length
    events: list[Event] = [*schedule.events[:boundary]]
    waiting: list[Event] = []
    made: set[int] = set()
    line = ("", "")
    for event in schedule.events[boundary:]:
        if isinstance(event, Free):
            (events if event.data in made else waiting).append(event)
            continue
        node = graph.nodes[event.node]
        if (node.module, node.source) != line or not made.isdisjoint(node.reads):
            events += waiting
            waiting, made, line = [], set(), (node.module, node.source)
        made.update(node.writes)
        events.append(event)
    return Schedule((*events, *waiting), boundary)


def block_of(node: ComputeNode, blocks: Iterable[str]) -> str:
    """Return the block that a node is in, '' if in none."""
    path = f"{node.module}."
    return next((block for block in blocks if path.startswith(f"{block}.")), "")
