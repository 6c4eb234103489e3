"""Ways to run a step: schedules without a search, which people compare a plan with.

takes: a priced CDGraph. returns: a graph and a legal Schedule of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rockplan.oracles.verify import verify
from rockplan.values.graph import CDGraph, ComputeNode, as_eager, producers
from rockplan.values.schedule import Schedule, keep_all, with_frees


def kept_whole(graph: CDGraph) -> tuple[CDGraph, Schedule]:
    """Every node once, in eager's order."""
    eager = as_eager(graph)
    return eager, keep_all(eager)


def per_block(graph: CDGraph, blocks: Sequence[str]) -> tuple[CDGraph, Schedule]:
    """As `torch.utils.checkpoint` on each of `blocks`, paths of modules: what the backward pass of
    one reads of its forward runs again before it begins."""
    eager = as_eager(graph)
    made_by = producers(eager)
    forward, backward = keep_all(eager).phases
    block_of = {n.index: _block(n, blocks) for n in eager.nodes}
    own: dict[str, list[int]] = {}
    for index in backward:
        own.setdefault(block_of[index], []).append(index)
    order: list[int] = []
    begun = {""}
    for index in backward:
        block = block_of[index]
        if block not in begun:
            begun.add(block)
            order += _again(eager, block, own[block], block_of, made_by)
        order.append(index)
    schedule = with_frees(eager, forward, order)
    verify(eager, schedule)
    return eager, schedule


def _block(node: ComputeNode, blocks: Sequence[str]) -> str:
    """'' outside of all."""
    path = f"{node.module}."
    return next((block for block in blocks if path.startswith(f"{block}.")), "")


def _again(
    graph: CDGraph,
    block: str,
    readers: Sequence[int],
    block_of: dict[int, str],
    made_by: dict[int, int],
) -> list[int]:
    """Forward nodes of a block that its backward nodes read from, directly or through others."""
    forward = len(graph.forward)
    found: set[int] = set()
    waiting = [*readers]
    while waiting:
        for data in graph.nodes[waiting.pop()].reads:
            maker = made_by.get(data)
            if maker is None or maker in found or maker >= forward:
                continue
            if block_of[maker] == block and graph.nodes[maker].recomputable:
                found.add(maker)
                waiting.append(maker)
    return sorted(found)
