"""Stitch: operations of blocks -> a schedule of the whole graph.

takes: the graph, its blocks (every node in exactly one) with their options, and operations that run
every block forward, and its backward after that of the next block. returns: a Schedule. guarantees:
the schedule is legal; its forward phase ends where the last block's backward begins; no
re-execution is idle (`rockplan.values.order`). source: Rockmate, section 3.5; frees follow from the
order (`rockplan.values.schedule`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rockplan.dp.links import Operation, RunForward, RunOption
from rockplan.values.block import Block, OptionFamily
from rockplan.values.graph import CDGraph, Phase
from rockplan.values.order import without_idle
from rockplan.values.schedule import Schedule, with_frees


def stitch(
    graph: CDGraph,
    blocks: Sequence[Block],
    families: Sequence[OptionFamily],
    operations: Iterable[Operation],
) -> Schedule:
    """Convert operations on blocks to a schedule of the whole graph that frees every storage as
    early as possible. The backward phase begins with the first backward of the last block;
    executions whose results nothing reads are left out. families: the options of each block, to
    which operations refer."""
    forward: list[int] = []
    backward: list[int] = []
    phase = forward
    for operation in operations:
        if operation.block == len(blocks) - 1 and _is_backward(operation):
            phase = backward
        phase += _nodes(blocks[operation.block], families[operation.block], operation)
    kept = pinned_storages(graph, blocks)
    return with_frees(graph, *without_idle(graph, forward, backward, kept=kept))


def pinned_storages(graph: CDGraph, blocks: Sequence[Block]) -> frozenset[int]:
    """Return the storages made in the forward that some block reads although another one made them
    and they are not its input (the separator before it). A schedule of blocks keeps them from their
    first computation to their last use."""
    block_of = {n: b.index for b in blocks for n in (*b.forward, *b.backward)}
    made_in = {d: block_of[n.index] for n in graph.forward for d in n.writes}
    return frozenset(
        d
        for node in graph.nodes
        for d in node.reads
        if d in made_in
        and block_of[node.index] != made_in[d]
        and d != blocks[block_of[node.index]].input
    )


def _is_backward(operation: Operation) -> bool:
    return isinstance(operation, RunOption) and operation.phase is Phase.BACKWARD


def _nodes(block: Block, family: OptionFamily, operation: Operation) -> Sequence[int]:
    if isinstance(operation, RunForward):
        return block.forward
    option = family.options[operation.option]
    local = option.backward if _is_backward(operation) else option.forward
    nodes = (*block.forward, *block.backward)
    return [nodes[i] for i in local]
