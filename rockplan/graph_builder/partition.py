"""Partition: cut the whole graph into a chain of blocks (Rockmate, section 3.3).

takes: a CDGraph, priced or not. returns: Blocks in order of their forward nodes.
guarantees: every node belongs to exactly one block; the forward nodes of a block are a slice of
the forward order, its backward nodes a slice of the backward order; the keep-all schedule of
every problem is legal.

A storage is a separator if it is the only one that later nodes read, unless it must be dropped: the
chain passes nothing else from block to block. Pinned storages (outputs of the module, results
that cannot be recomputed, masks and tables that depend on no parameter and serve several blocks)
are kept from their computation to their last use and take no part in the search for separators;
in a problem they are resident, and their bytes are the background of the blocks that run meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from rockplan.graph_builder.digests import problem_digest
from rockplan.oracles.graph_view import GraphView
from rockplan.values.block import Block
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import CDGraph, ComputeNode, DataKind, DataNode, Phase

# The halves of transformer layers have up to 36. T5 of 3 + 3 layers at 40 % of keep-all (roofline
# costs): +53 % time without pins, +22 % with limits of 60, 40 or 30 (2, 4 or 8 pins).
_LARGE_BLOCK_FORWARD_NODES = 40
# The UNet of Stable Diffusion has 12 skips; every pin costs its bytes for most of the iteration.
_MOST_PINS = 12

_FLOATING = ("torch.float", "torch.bfloat", "torch.complex")


@paused_collection()
def partition(
    graph: CDGraph,
    differentiable_inputs: frozenset[int] | None = None,
    pins: frozenset[int] | None = None,
) -> tuple[Block, ...]:
    """Cut `graph` into a chain of blocks, each a graph of its own: a cut is where later nodes read
    one storage besides pinned ones, which every block may read.

    differentiable_inputs: data of kind INPUT that carry activations, so that what is computed from
    them is worth recomputing; None means the inputs of floating dtype. pins: activations to pin
    besides those that must be; None leaves the choice to `choose_pins`.
    """
    side = side_storages(graph, differentiable_inputs).difference(graph.dropped)
    kept = _unavoidable_pins(graph) | side
    kept |= choose_pins(graph, kept) if pins is None else pins
    # A gradient that crosses several boundaries wherever they are should not influence their
    # places: the second search ignores the gradients that spanned blocks in the first.
    first_chain = _chain(graph, kept)
    chain = _chain(graph, kept | _spanning(first_chain))
    # Keeping side storages of one block only for longer gains nothing.
    others = side - _unavoidable_pins(graph)
    local = {d for d in others if chain.read_in(d) <= {chain.made_in(d)}}
    kept = kept - local | _spanning(chain)
    chain = replace(chain, kept=kept)
    background = _background_bytes(chain)
    return tuple(_block(chain, s, background[s]) for s in range(len(chain.forward)))


def side_storages(
    graph: CDGraph, differentiable_inputs: frozenset[int] | None = None
) -> frozenset[int]:
    """Return the activations made by nodes that are not random from constants and inputs without
    gradient alone: masks, position ids, rotary tables. One copy serves every block.
    differentiable_inputs: storages of inputs with gradient; None means those of floating dtype."""
    if differentiable_inputs is None:
        floating = {v.data for v in graph.values if v.spec.dtype.startswith(_FLOATING)}
        differentiable_inputs = frozenset(
            d for d in floating if graph.data[d].kind is DataKind.INPUT
        )
    known = {
        d.index
        for d in graph.data
        if d.kind is DataKind.CONSTANT
        or (d.kind is DataKind.INPUT and d.index not in differentiable_inputs)
    }
    side: set[int] = set()
    for node in graph.forward:
        if not node.random and known.issuperset(node.reads):
            known.update(node.writes)
            side.update(node.writes)
    return frozenset(side)


def _unavoidable_pins(graph: CDGraph) -> frozenset[int]:
    # Gradients are left out: they are computed once anyway, and need not be kept longer.
    once = (d for n in graph.forward if not n.recomputable for d in n.writes)
    return frozenset((*graph.outputs, *graph.held, *once))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Boundary between block s and block s + 1: the separator, and the indices of the first forward
    node of block s + 1 and of the first backward node of block s."""

    separator: int
    forward: int
    backward: int


@dataclass(frozen=True, slots=True)
class _Chain:
    """Nodes and storages by block: separators[s] lies between block s and block s + 1. kept: pinned
    storages; forward, backward: node indices of each block; block_of: block of each node."""

    graph: CDGraph
    kept: frozenset[int]
    separators: tuple[int, ...]
    forward: tuple[range, ...]
    backward: tuple[range, ...]
    block_of: tuple[int, ...]
    view: GraphView

    def made_in(self, data: int) -> int | None:
        """Return the block whose node writes `data`, None if no node does."""
        node = self.view.producer.get(data)
        return None if node is None else self.block_of[node]

    def read_in(self, data: int) -> set[int]:
        return {self.block_of[n] for n in self.view.readers[data]}


def _chain(graph: CDGraph, kept: frozenset[int]) -> _Chain:
    cuts = _cuts(graph, kept)
    forward_length, length = len(graph.forward), len(graph.nodes)
    forward = [range(*ends) for ends in pairwise([0, *(c.forward for c in cuts), forward_length])]
    ends = [length, *(c.backward for c in cuts), forward_length]
    backward = [range(below, above) for above, below in pairwise(ends)]
    block_of = [0] * length
    for s, slices in enumerate(zip(forward, backward, strict=True)):
        for node in (*slices[0], *slices[1]):
            block_of[node] = s
    return _Chain(
        graph=graph,
        kept=kept,
        separators=tuple(c.separator for c in cuts),
        forward=tuple(forward),
        backward=tuple(backward),
        block_of=tuple(block_of),
        view=GraphView(graph),
    )


# Cuts


def _cuts(graph: CDGraph, kept: frozenset[int]) -> tuple[_Cut, ...]:
    """Return every legal cut, in forward order: the separator, the first forward node after it, and
    the first backward node of the block before it. kept: pinned storages.

    Within its window the backward order is cut where the fewest bytes of gradients cross, at the
    earliest place that gives the block above a backward node. A block without backward nodes inside
    the chain would leave its gradient alive across two boundaries: such a boundary, and one with an
    empty window, is dropped, and its two blocks are joined.
    """
    separators = _separators(graph, kept)
    windows = _windows(graph, kept, separators)
    crossing = _crossing_bytes(graph, kept)
    begin, end = len(graph.forward), len(graph.nodes)
    cuts: list[_Cut] = []
    above = begin
    for (separator, forward), (low, high) in zip(separators[::-1], windows[::-1], strict=True):
        first = max(low, above + 1 if begin < above < end else above)
        if first <= high:
            previous = above
            above = min(range(first, high + 1), key=lambda n: (crossing[n], n == previous))
            cuts.append(_Cut(separator, forward, above))
    return tuple(cuts[::-1])


def _separators(graph: CDGraph, kept: frozenset[int]) -> list[tuple[int, int]]:
    """(Storage, first forward node after the cut), in order, each at the earliest place."""
    separators: dict[int, int] = {}
    for position, alive in enumerate(_alive_between(graph, kept)):
        if len(alive) == 1 and alive.isdisjoint(graph.dropped):
            (separator,) = alive
            separators.setdefault(separator, position + 1)
    return list(separators.items())


def _alive_between(graph: CDGraph, kept: frozenset[int]) -> list[frozenset[int]]:
    """For each forward node, the storages made so far that later forward nodes read, but `kept`."""
    last_read = {d: n.index for n in graph.forward for d in n.reads}
    alive: frozenset[int] = frozenset()
    sets: list[frozenset[int]] = []
    for node in graph.forward:
        made = {d for d in node.writes if d in last_read and d not in kept}
        alive = (alive | made) - {d for d in node.reads if last_read[d] == node.index}
        sets.append(alive)
    return sets


def _windows(
    graph: CDGraph, kept: frozenset[int], separators: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return for each separator the lowest and the highest index that the first backward node of
    the block before it may have; low > high if none is legal. kept: pinned storages.

    A backward node must stand in a block that has its operands: the block that makes the storage
    or, for a separator, also the next one. Operands available to every block (parameters, inputs,
    pinned storages) show in the same way where a node belongs, but do not force it.
    """
    starts = [forward for _, forward in separators]
    blocks: dict[int, tuple[int, int]] = {}
    for node in graph.forward:
        block = bisect_right(starts, node.index)
        for d in (*node.reads, *node.writes):
            blocks[d] = (blocks.get(d, (block, block))[0], block)
    made = {d for n in graph.forward for d in n.writes if d not in kept}
    forced = {d: ends for d, ends in blocks.items() if d in made}
    legal = _windows_for(graph, forced, len(separators))
    natural = _windows_for(graph, blocks, len(separators))
    return [n if n[0] <= n[1] else m for n, m in zip(natural, legal, strict=True)]


def _windows_for(
    graph: CDGraph, blocks: Mapping[int, tuple[int, int]], count: int
) -> list[tuple[int, int]]:
    # blocks: storage -> (first, last) block that has it.
    after_last = [len(graph.forward)] * (count + 1)
    first = [len(graph.nodes)] * (count + 1)
    for node in graph.backward:
        for d in node.reads:
            if d in blocks:
                low, high = blocks[d]
                after_last[low] = max(after_last[low], node.index + 1)
                first[high] = min(first[high], node.index)
    lows = list(accumulate(reversed(after_last), max))[::-1]
    highs = list(accumulate(first, min))
    return list(zip(lows[1:], highs[:-1], strict=True))


def _crossing_bytes(graph: CDGraph, kept: frozenset[int]) -> list[int]:
    """Return for each node, and for the end, the bytes of gradients and tangents that are alive
    when it starts and read later. kept: pinned storages, which do not count."""
    view = GraphView(graph)
    last_read = {d: n.index for n in graph.backward for d in n.reads}
    born = {d: n.index + 1 for n in graph.backward for d in n.writes}
    born |= dict.fromkeys(view.tangents, len(graph.forward))
    lifetimes = [
        (begin, last_read[d] + 1, view.sizes[d])
        for d, begin in born.items()
        if d in last_read and d not in kept
    ]
    return _sum_over_time(lifetimes, len(graph.nodes) + 1)


def _sum_over_time(lifetimes: Iterable[tuple[int, int, int]], length: int) -> list[int]:
    """Of each place in bytes. lifetimes: (first place, one after the last, bytes)."""
    change = [0] * (length + 1)
    for begin, end, size_bytes in lifetimes:
        change[begin] += size_bytes
        change[end] -= size_bytes
    return list(accumulate(change))[:length]


# Pins


def choose_pins(graph: CDGraph, kept: frozenset[int]) -> frozenset[int]:
    """Return activations whose pinning allows cuts that were impossible (skips of a UNet, the
    encoder's output of T5), few and small; empty if no block is too large. kept: what is pinned
    anyway.

    Greedy: sets of storages that are alive together between two forward nodes, each for longer than
    a block should be, are candidates; the one that takes the most work off too large blocks per
    byte is pinned, until nothing is gained.
    """
    view = GraphView(graph)
    last_read = {d: n.index for n in graph.forward for d in n.reads}
    alive = _alive_between(graph, kept)
    outlives = {
        d
        for a in alive
        for d in a.difference(graph.dropped)
        if last_read[d] - view.producer[d] > _LARGE_BLOCK_FORWARD_NODES
    }
    pins: frozenset[int] = frozenset()
    while len(pins) < _MOST_PINS:
        excess = _excess(alive)
        candidates = [
            c
            for c in dict.fromkeys(a & outlives for a in alive)
            if c and len(c) + len(pins) <= _MOST_PINS
        ]
        gains = [
            (excess - _excess([a - c for a in alive])) / (1 + view.bytes_of(c)) for c in candidates
        ]
        if max(gains, default=0) <= 0:
            break
        chosen = candidates[gains.index(max(gains))]
        pins |= chosen
        alive = [a - chosen for a in alive]
    return pins


def _excess(alive: Sequence[frozenset[int]]) -> int:
    """Return the sum of squared sizes, in forward nodes, of the blocks that are too large. alive:
    of each forward node, as from `_alive_between`; a set of one storage is a cut."""
    counted: set[int] = set()
    starts = [0]
    for position, storages in enumerate(alive):
        if len(storages) == 1 and not storages <= counted:
            counted |= storages
            starts.append(position + 1)
    sizes = [b - a for a, b in pairwise([*starts, len(alive)])]
    return sum(size * size for size in sizes if size > _LARGE_BLOCK_FORWARD_NODES)


# What stays outside the problems


def _spanning(chain: _Chain) -> set[int]:
    """Return the gradients that are read more than one block below the one that makes them, and the
    tangents that several blocks read."""
    spanning = set()
    for data in chain.graph.data:
        blocks = chain.read_in(data.index)
        made_in = chain.made_in(data.index)
        if data.kind is DataKind.GRADIENT and made_in is not None:
            if min(blocks, default=made_in) < made_in - 1:
                spanning.add(data.index)
        elif data.kind is DataKind.TANGENT and len(blocks) > 1:
            spanning.add(data.index)
    return spanning


def _background_bytes(chain: _Chain) -> list[int]:
    """Return for each block the most bytes of pinned storages and tangents that are alive outside
    its own problem while it runs. It runs forward, perhaps forward again while the blocks above it
    run backward, and backward."""
    lifetimes = list(_lifetimes(chain))
    outside = _sum_over_time(
        ((begin, end, chain.view.sizes[d]) for d, begin, end in lifetimes),
        len(chain.graph.nodes),
    )
    forward_length = len(chain.graph.forward)
    highest = [0, *accumulate(outside[forward_length:], max)]
    last = len(chain.forward) - 1

    # If no block above block s has backward nodes, it may still run forward again for them, once
    # the backward phase has begun.
    def above(s: int) -> int:
        started = chain.backward[s].start - forward_length
        return highest[min(max(started, s < last), len(highest) - 1)]

    own: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for lifetime in lifetimes:
        blocks = chain.read_in(lifetime[0]) if lifetime[0] not in chain.kept else ()
        if len(blocks) == 1:
            own[min(blocks)].append(lifetime)

    def own_bytes(s: int, node: int) -> int:
        return chain.view.bytes_of(d for d, begin, end in own[s] if begin <= node < end)

    return [
        max(
            max((outside[n] for n in first), default=0),
            above(s),
            max((outside[n] - own_bytes(s, n) for n in second), default=0),
        )
        for s, (first, second) in enumerate(zip(chain.forward, chain.backward, strict=True))
    ]


def _lifetimes(chain: _Chain) -> Iterator[tuple[int, int, int]]:
    """Yield (storage, first node, one after the last node) of pinned storages and tangents. A
    forward node that may run again needs its operands until its block has run backward."""
    graph = chain.graph
    for data in graph.data:
        is_tangent = data.kind is DataKind.TANGENT
        if data.kind.resident or not (is_tangent or data.index in chain.kept):
            continue
        begin = len(graph.forward) if is_tangent else chain.view.producer[data.index]
        ends = [_needed_until(chain, node) for node in chain.view.readers[data.index]]
        if data.index in graph.outputs:
            ends.append(len(graph.forward))
        if data.index in graph.held:
            ends.append(len(graph.nodes))
        yield data.index, begin, max(ends, default=begin if is_tangent else begin + 1)


def _needed_until(chain: _Chain, node: int) -> int:
    """Return one after the index of the last node during which the node `node` may still run:
    itself, or the end of its block's backward if it may be re-executed."""
    reader = chain.graph.nodes[node]
    if reader.phase is Phase.FORWARD and _may_rerun(reader, chain.kept):
        # A block without backward nodes may run again just after the backward phase has begun.
        begun = min(len(chain.graph.forward) + 1, len(chain.graph.nodes))
        return max(chain.backward[chain.block_of[node]].stop, begun)
    return node + 1


def _may_rerun(node: ComputeNode, kept: frozenset[int]) -> bool:
    return node.recomputable and not kept.issuperset(node.writes)


# Problems


def _block(chain: _Chain, s: int, background_bytes: int) -> Block:
    graph = chain.graph
    # The last block passes nothing on; its output is the first output of the module.
    outputs = (*chain.separators, *graph.outputs[:1])
    problem = _problem(chain, s)
    read = {d for n in (*chain.forward[s], *chain.backward[s]) for d in graph.nodes[n].reads}
    incoming = [
        d
        for d in read - chain.kept
        if graph.data[d].kind is DataKind.GRADIENT and chain.made_in(d) == s + 1
    ]
    return Block(
        index=s,
        forward=tuple(chain.forward[s]),
        backward=tuple(chain.backward[s]),
        input=chain.separators[s - 1] if s else None,
        output=outputs[s],
        problem=problem,
        digest=problem_digest(problem),
        incoming_gradient_bytes=chain.view.bytes_of(incoming),
        background_bytes=background_bytes,
        name=_common_module([graph.nodes[n].module for n in chain.forward[s]]),
    )


def _problem(chain: _Chain, s: int) -> CDGraph:
    """Return the nodes of block `s` as a graph of its own, without calls. Storages are numbered by
    first appearance; what other blocks or the caller provide has kinds that cost nothing."""
    graph = chain.graph
    nodes = [graph.nodes[n] for n in (*chain.forward[s], *chain.backward[s])]
    made = {d for n in nodes for d in n.writes} - chain.kept
    local: dict[int, int] = {}
    for node in nodes:
        for d in (*node.reads, *(d for d in node.writes if d in made)):
            local.setdefault(d, len(local))
    outgoing = {
        d for d in made if graph.data[d].kind is DataKind.GRADIENT and not chain.read_in(d) <= {s}
    }

    def indices(data: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(local[d] for d in data if d in local))

    def copies_bytes(node: ComputeNode) -> int:
        is_again = _may_rerun(node, chain.kept)
        return chain.view.bytes_of(chain.kept.intersection(node.writes)) if is_again else 0

    return CDGraph(
        data=tuple(
            DataNode(i, f"d{i}", _kind_in_problem(chain, d, made), graph.data[d].size_bytes)
            for d, i in local.items()
        ),
        nodes=tuple(
            replace(
                node,
                index=i,
                name=f"n{i}",
                reads=indices(node.reads),
                writes=indices(made.intersection(node.writes)),
                workspace_bytes=node.workspace_bytes + copies_bytes(node),
                calls=(),
                recalls=(),
                takes=(),
            )
            for i, node in enumerate(nodes)
        ),
        outputs=indices(chain.separators[s : s + 1]),
        held=indices(outgoing),
        handed=indices(made.intersection(graph.handed) - outgoing),
        rng_state_bytes=graph.rng_state_bytes,
        dropped=indices(graph.dropped),
    )


def _kind_in_problem(chain: _Chain, data: int, made: set[int]) -> DataKind:
    """Return the kind of storage `data` in the problem of a block: CONSTANT if pinned or given to
    the module, its own if the block makes it, INPUT for the separator that the block reads, TANGENT
    for a gradient from the block after it. made: storages that the block makes."""
    kind = chain.graph.data[data].kind
    if data in chain.kept or kind in (DataKind.INPUT, DataKind.CONSTANT):
        return DataKind.CONSTANT
    if data in made or kind.resident:
        return kind
    return DataKind.INPUT if kind is DataKind.ACTIVATION else DataKind.TANGENT


def _common_module(modules: Sequence[str]) -> str:
    """The deepest module path that contains at least two thirds of the paths, or ''."""
    counts: Counter[str] = Counter()
    for path in modules:
        parts = path.split(".") if path else []
        counts.update(".".join(parts[:depth]) for depth in range(len(parts) + 1))
    common = [path for path, count in counts.items() if 3 * count >= 2 * len(modules)]
    return max(common, key=lambda path: (path.count("."), len(path)), default="")
