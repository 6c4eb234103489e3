"""Checkpoints at even distances (Chen et al., 2016, arXiv:1604.06174).

The chain of blocks is cut into segments; forward keeps only the input of each, backward runs a
segment forward again, keeps everything in it, and runs it backward. The last segment runs once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.peers.orders import checked_schedule
from rockplan.dp.chain_solver import pinned_storages
from rockplan.values.block import Block
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule


def sqrt_segments(blocks: Sequence[Block]) -> int:
    """The number of segments that the title of the paper names."""
    return max(round(math.sqrt(len(blocks))), 1)


def segment_schedule(graph: CDGraph, blocks: Sequence[Block], segments: int) -> Schedule:
    """`segments` segments of as equal numbers of blocks as possible."""
    bounds = [len(blocks) * k // segments for k in range(segments + 1)]
    forward = [n for block in blocks for n in block.forward]
    backward: list[int] = []
    for start, stop in reversed(list(zip(bounds, bounds[1:], strict=False))):
        if stop < len(blocks):
            backward += [n for block in blocks[start:stop] for n in block.forward]
        backward += [n for block in reversed(blocks[start:stop]) for n in block.backward]
    return checked_schedule(graph, forward, backward, pinned_storages(graph, blocks))


def all_segment_schedules(graph: CDGraph, blocks: Sequence[Block]) -> tuple[Schedule, ...]:
    """One schedule for each possible number of segments (the paper searches over it)."""
    counts = range(1, len(blocks) + 1)
    return tuple(segment_schedule(graph, blocks, count) for count in counts)
