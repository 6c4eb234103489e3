"""A lower bound on the peak of every schedule: the game of pebbles on a few storages at a time.

takes: a priced CDGraph. returns: bytes. guarantees: no schedule that `verify` accepts has a smaller
peak as `simulate` finds it, in whatever order it executes what, and however often.

Look at a few storages and forget the others, save where a node reads or makes them. When the
backward phase starts some of the few are alive; a node may run if those that it reads are; any may
be dropped at any time. Which sets of them can be alive within a budget is found exactly, all sets
at once, as bits (a game of pebbles, Sethi 1975, with sizes). If one that backward nodes make never
is, no schedule fits. The few are what a backward node reads and makes, and what that was made of,
nearest and largest first.

Smallest budgets of `planning` above the larger of this and the relaxation's bound
(`ilp.refine.peak_lower_bound_bytes`), instead of above the latter alone: 2 layers of GPT-2 14
instead of 51 %, with fused attention 26 instead of 43 %, BERT 14 instead of 46 %, Llama 8 instead
of 17 %; in half a second each. With 16 storages instead of 12 it stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rockplan.graph import CDGraph, ComputeNode, producers

STORAGES = 12
"""Looked at together: their sets are 4096."""

SMALLEST = 0.02
"""Of the most that a node reads and makes: smaller storages are forgotten."""

STEP = 0.002
"""Of the bound: how finely it is searched."""

Integers = NDArray[np.int64]
Sets = NDArray[np.bool_]


def pebbled_peak_bytes(graph: CDGraph, most_bytes: int) -> int:
    """No schedule has a smaller peak; most_bytes: of a schedule, where the search ends."""
    view = _View(graph)
    best = 0
    seen: set[tuple[int, ...]] = set()
    for node in graph.backward:
        chosen = view.around(node)
        if chosen in seen or not any(d not in view.made_forward for d in chosen):
            continue
        seen.add(chosen)
        game = _Game.of(view, chosen)
        # Most choices do not raise the bound, which one look at it shows.
        low, high = best, most_bytes
        if low >= high or game.is_won(max(low, int(high * STEP))):
            continue
        while high - low > max(high * STEP, 1):
            middle = (low + high) // 2
            low, high = (low, middle) if game.is_won(middle) else (middle, high)
        best = low + 1
    return best


class _View:
    """What all games on a graph have in common."""

    def __init__(self, graph: CDGraph) -> None:
        self.graph = graph
        self.sizes = [0 if d.kind.resident else d.size_bytes for d in graph.data]
        self.producer = producers(graph)
        self.made_forward = {d for n in graph.forward for d in n.writes}
        # Held from the forward phase on: alive during all of the backward phase.
        self.held = self.made_forward.intersection(graph.held)
        self.held_bytes = sum(self.sizes[d] for d in self.held)
        needs = (sum(self.sizes[d] for d in (*n.reads, *n.writes)) for n in graph.nodes)
        self.least_bytes = SMALLEST * max(needs, default=0)

    def around(self, node: ComputeNode) -> tuple[int, ...]:
        """Storages that a game on the node is about, ascending."""
        chosen: list[int] = []
        seen: set[int] = set()
        front = [*node.reads, *node.writes]
        while front and len(chosen) < STORAGES:
            following: list[int] = []
            for d in sorted(front, key=lambda d: -self.sizes[d]):
                if d in seen or d not in self.producer:
                    continue
                seen.add(d)
                if self.sizes[d] > self.least_bytes and d not in self.graph.held:
                    chosen.append(d)
                following += self.graph.nodes[self.producer[d]].reads
            front = following
        return tuple(sorted(chosen[:STORAGES]))


@dataclass(frozen=True, slots=True)
class _Move:
    """From each of the sets `before` to `after` while `bytes` are alive."""

    before: Integers
    after: Integers
    bytes: Integers


@dataclass(frozen=True, slots=True)
class _Game:
    """storages: how many; start_bytes: alive when the backward phase starts, by set, none where the
    set cannot be; wanted: bits that have to be alive at some time."""

    storages: int
    start_bytes: Integers
    can_start: Sets
    moves: tuple[_Move, ...]
    wanted: tuple[int, ...]

    @staticmethod
    def of(view: _View, chosen: Sequence[int]) -> _Game:
        bits = {d: 1 << i for i, d in enumerate(chosen)}
        sets = np.arange(1 << len(chosen), dtype=np.int64)
        set_bytes = np.zeros_like(sets)
        for d, bit in bits.items():
            set_bytes[(sets & bit) != 0] += view.sizes[d]
        start_bytes = set_bytes + view.held_bytes
        late = sum(bit for d, bit in bits.items() if d not in view.made_forward)
        makers = sorted({view.producer[d] for d in chosen})
        return _Game(
            storages=len(chosen),
            start_bytes=start_bytes,
            can_start=(sets & late) == 0,
            moves=tuple(
                move
                for i in makers
                for move in _moves(view, view.graph.nodes[i], bits, sets, start_bytes)
            ),
            wanted=tuple(bit for d, bit in bits.items() if d not in view.made_forward),
        )

    def is_won(self, budget_bytes: int) -> bool:
        """Can all that is wanted be alive, each at some time, within the budget?"""
        sets = np.arange(1 << self.storages, dtype=np.int64)
        reached: Sets = self.can_start & (self.start_bytes <= budget_bytes)
        moves = [
            (move.before[fits], move.after[fits])
            for move in self.moves
            if (fits := move.bytes <= budget_bytes).any()
        ]
        while True:
            if all((reached & ((sets & bit) != 0)).any() for bit in self.wanted):
                return True
            is_new = False
            for before, after in moves:
                found = after[reached[before]]
                if not reached[found].all():
                    reached[found] = True
                    _drop_any(reached, self.storages)
                    is_new = True
            if not is_new:
                return False


def _drop_any(reached: Sets, storages: int) -> None:
    """Adds every subset of what is reached."""
    for i in range(storages):
        halves = reached.reshape(-1, 2, 1 << i)
        halves[:, 0, :] |= halves[:, 1, :]


def _moves(
    view: _View, node: ComputeNode, bits: dict[int, int], sets: Integers, alive_bytes: Integers
) -> list[_Move]:
    """The node runs: with a storage for its result, or in that of an operand that dies."""
    sizes = view.sizes
    reads = sum(bits.get(d, 0) for d in node.reads)
    writes = sum(bits.get(d, 0) for d in node.writes)
    before = sets[(sets & reads) == reads]
    after = before | writes
    outside = {d for d in (*node.reads, *node.writes) if d not in bits and d not in view.held}
    during = alive_bytes[after] + node.workspace_bytes + sum(sizes[d] for d in outside)
    forgotten = max((sizes[d] for d in node.takes if d not in bits), default=0)
    taken = [d for d in node.takes if d in bits]
    return [
        _Move(before, after, during - forgotten),
        *(_Move(before, after & ~bits[d], during - sizes[d]) for d in taken),
    ]
