"""Ways to run a step without a search, which users compare a plan with.

takes: a priced CDGraph. returns: a graph and a legal Schedule of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise, takewhile
from typing import NamedTuple

from rockplan.oracles.verify import verify
from rockplan.search.paging import SHARE, by_worth, chosen
from rockplan.values.copies import Host, HostLink, paged, with_copies
from rockplan.values.graph import CDGraph, ComputeNode, in_eager_order, producers, readers
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
            return replace(node, was_in_place=True)
        return replace(node, takes=()) if node.takes and not node.was_in_place else node

    return replace(graph, nodes=tuple(map(eager, graph.nodes)))


def kept_whole(graph: CDGraph) -> tuple[CDGraph, Schedule]:
    """Run every node once, in eager's order."""
    eager = as_autograd_runs(graph)
    return eager, _freed_as_eager_does(eager, keep_all(eager), defaultdict(str), {})


def compiled_whole(graph: CDGraph) -> tuple[CDGraph, Schedule]:
    """Run every node of a compiled graph once, as code does that frees at once, and writes in place
    where it may."""
    graph = in_eager_order(graph)
    return graph, keep_all(graph)


class BlockPages(NamedTuple):
    """What blocks page to the host, each within its own forward and backward. blocks: paths of all
    that may page; storages: ascending; link: that is planned for."""

    blocks: Sequence[str] = ()
    storages: tuple[int, ...] = ()
    link: HostLink = HostLink(1, 1)


NO_PAGES = BlockPages()


def pages_of(graph: CDGraph, blocks: Sequence[str], host: Host) -> BlockPages:
    """Return what takes longest to make for each byte, as far as the link carries it while its
    block runs, and as it fits in the block's equal part of the host. What other blocks read stays
    on the device."""
    eager, link = as_autograd_runs(graph), host.link.share(SHARE)
    parts = [block_of(node, blocks) for node in eager.nodes]
    makers, uses = producers(eager), readers(eager)
    own = {d: parts[maker] for d, maker in makers.items() if parts[maker]}
    inside = [d for d in by_worth(eager) if {parts[n] for n in uses[d]} == {own.get(d)}]
    own_bytes = host.size_bytes // max(len(blocks), 1)
    return BlockPages(blocks, chosen(eager, inside, link, 1.0, own_bytes, parts), link)


def per_block(
    graph: CDGraph, blocks: Sequence[str], pages: BlockPages = NO_PAGES
) -> tuple[CDGraph, Schedule]:
    """Return (graph as eager runs it, schedule of a step with `torch.utils.checkpoint` on each of
    `blocks`, paths of modules): what the backward of a block reads of its forward is re-executed
    before that backward begins, and what that reads is held until it ends. What is paged comes
    back, and is not made again."""
    eager = with_copies(as_autograd_runs(graph), pages.storages, pages.link)
    makers = producers(eager)
    forward, backward = keep_all(eager).phases
    path_of = {n.index: block_of(n, blocks) for n in eager.nodes}
    read, inside = defaultdict[str, list[int]](list), defaultdict[str, set[int]](set)
    for index in backward:
        read[path_of[index]] += eager.nodes[index].reads
    for data, maker in makers.items():
        if maker < len(forward) and eager.nodes[maker].recomputable:
            inside[path_of[maker]].add(data)
    for node in eager.forward:
        if node.is_dead:
            read[path_of[node.index]] += node.writes
    order: list[int] = []
    begun = {""}
    held = defaultdict[int, list[str]](list)
    for index in backward:
        block = path_of[index]
        if block not in begun:
            begun.add(block)
            again = remade(eager, makers, read[block], inside[block].difference(pages.storages))
            for data in {d for node in again for d in eager.nodes[node].reads} - inside[block]:
                held[data].append(block)
            order += again
        order.append(index)
    orders = _with_trips(eager, forward, order, pages.blocks)
    schedule = _freed_as_eager_does(eager, with_frees(eager, *orders), path_of, held)
    verify(eager, schedule)
    return eager, schedule


def _with_trips(
    graph: CDGraph, forward: Sequence[int], backward: Sequence[int], blocks: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Copies out stand at the end of their block's forward, copies in at the begin of its backward,
    those first that are read first."""
    parts = [block_of(node, blocks) for node in graph.nodes]
    ends = {parts[index]: position for position, index in enumerate(forward)}
    turns = [*enumerate(backward)][::-1]
    begins = {parts[index]: position for position, index in turns}
    reads = {data: position for position, index in turns for data in graph.nodes[index].reads}
    after, before = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for page in sorted(paged(graph), key=lambda page: reads[page.data]):
        after[ends[parts[page.store]]].append(page.store)
        before[begins[parts[page.fetch]]].append(page.fetch)
    return (
        [*chain(*((index, *after[position]) for position, index in enumerate(forward)))],
        [*chain(*((*before[position], index) for position, index in enumerate(backward)))],
    )


def _freed_as_eager_does(
    graph: CDGraph,
    schedule: Schedule,
    path_of: Mapping[int, str],
    held: Mapping[int, Sequence[str]],
) -> Schedule:
    """A storage is freed only when eager lets it go (`ComputeNode.ends`), as variables of Python
    and kernels in C++ hold it, and not before the blocks have run that it was given to in the
    backward phase. path_of: node -> its block, '' for none; held: data -> these blocks."""
    events, boundary = schedule.events, schedule.forward_length
    last = {d: node.index for node in graph.nodes for d in node.ends}
    maker, forward = producers(graph), len(graph.forward)
    runs, makes = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    block_end = dict[str, int]()
    for position, event in enumerate(events):
        if isinstance(event, Compute):
            runs[event.node].append(position)
            for data in graph.nodes[event.node].writes:
                makes[data].append(position)
            block_end[path_of[event.node]] = position

    def end(position: int, data: int) -> int:
        node = last.get(data, -1)
        ends = [position]
        if position >= boundary:
            ends += (block_end[block] for block in held.get(data, ()))
        if node < forward:
            # Also where it runs again, which ends where another node follows.
            phase_end = boundary if position < boundary else None
            following = enumerate(islice(events, position, phase_end), position)
            computed = ((p, e.node) for p, e in following if isinstance(e, Compute))
            # Copies are numbered behind all of their phase.
            runs_on = (pair for pair in computed if not graph.nodes[pair[1]].optional)
            ends += (p for p, _ in takewhile(lambda pair: pair[1] <= node, runs_on))
        elif position >= boundary or not path_of[maker.get(data, -1)]:
            ends += runs[node]
        again = next((p for p in makes[data] if p > position), len(events))
        return max(p for p in ends if p < again)

    frees = defaultdict[int, list[Event]](list)
    for position, event in enumerate(events):
        if isinstance(event, Free):
            frees[end(position, event.data)].append(event)
    made = [
        [*([event] if isinstance(event, Compute) else []), *frees[position]]
        for position, event in enumerate(events)
    ]
    return Schedule(tuple(chain(*made)), sum(map(len, made[:boundary])))


def block_of(node: ComputeNode, blocks: Iterable[str]) -> str:
    """Return the block that a node is in, '' if in none."""
    path = f"{node.module}."
    return next((block for block in blocks if path.startswith(f"{block}.")), "")
