"""Ways to run a step without a search, which users compare a plan with.

takes: a priced CDGraph. returns: a graph and a legal Schedule of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from rockplan.oracles.verify import verify
from rockplan.values.graph import CDGraph, ComputeNode, in_eager_order, producers
from rockplan.values.order import remade
from rockplan.values.schedule import Compute, Event, Free, Schedule, keep_all, with_frees


def as_autograd_runs(graph: CDGraph) -> CDGraph:
    """Return `graph` as autograd executes it: in its order, every result in a storage of its own
    but the sum of gradients of one tensor, which it makes in place, in no function: what comes last
    in one, of results that go nowhere else or are not all its own."""
    graph = in_eager_order(graph)
    function_of = {data: node.function for node in graph.nodes for data in node.writes}
    uses = Counter(data for node in graph.nodes for data in node.reads)
    ends = {one.index for one, other in pairwise(graph.nodes) if one.function != other.function}

    def eager(node: ComputeNode) -> ComputeNode:
        is_added = [c.op for c in node.calls] == ["aten.add.Tensor"] and len(node.reads) == 2
        is_gone = all(uses[data] == 1 for data in node.reads)
        of = {function_of.get(data) for data in node.reads}
        is_last = node.function > 0 and node.index in ends
        if is_added and is_last and (is_gone or of != {node.function}):
            return replace(node, function=0)
        return replace(node, takes=()) if node.takes else node

    return replace(graph, nodes=tuple(map(eager, graph.nodes)))


def kept_whole(graph: CDGraph) -> tuple[CDGraph, Schedule]:
    """Run every node once, in eager's order."""
    eager = as_autograd_runs(graph)
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
    eager = as_autograd_runs(graph)
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
    """Return `schedule` with what a backward function reads freed only when all of it has run, as
    autograd does. One in C++ keeps temporaries until it has the result of their expression: one
    that something else reads, while no temporary waits for another expression."""
    boundary = schedule.forward_length
    computed = [e.node for e in schedule.events[boundary:] if isinstance(e, Compute)]
    nodes = [graph.nodes[node] for node in computed]
    function_of = {data: node.function for node in nodes for data in node.writes}
    leaving = {d for n in nodes for d in n.reads if function_of.get(d) != n.function}
    leaving |= {*graph.handed, *graph.held}
    events: list[Event] = [*schedule.events[:boundary]]
    waiting: list[Event] = []
    temporary: list[Event] = []
    alive: set[int] = set()
    node = None
    for event in schedule.events[boundary:]:
        if isinstance(event, Free):
            is_own = node is not None and function_of.get(event.data) == node.function
            is_at_once = is_own and node is not None and node.function <= 0
            (events if is_at_once else temporary if is_own else waiting).append(event)
            alive.discard(event.data)
            continue
        before, node = node, graph.nodes[event.node]
        if before is None or not node.function or before.function != node.function:
            events += (*temporary, *waiting)
            waiting, temporary, alive = [], [], set()
        elif not alive and not leaving.isdisjoint(before.writes):
            events += temporary
            temporary = []
        alive |= {*node.writes} - leaving
        events.append(event)
    return Schedule((*events, *temporary, *waiting), boundary)


def block_of(node: ComputeNode, blocks: Iterable[str]) -> str:
    """Return the block that a node is in, '' if in none."""
    path = f"{node.module}."
    return next((block for block in blocks if path.startswith(f"{block}.")), "")
