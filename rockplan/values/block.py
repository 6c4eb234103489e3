"""Blocks of the chain, and the options that the ILP finds for them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rockplan.values.graph import CDGraph

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Block:
    """One link of the chain: a slice of the forward order and a slice of the backward order.

    forward, backward: indices of nodes of the whole graph, in order.
    input: the separator storage that the block reads (None for the first block); output: the
    separator that it passes on. Both are indices of data of the whole graph.
    problem: the block as a graph of its own. problem.nodes[i] stands for
    (forward + backward)[i]. The input, pinned storages, parameters and the like are resident in
    it; its output is in `problem.outputs` (free to drop in the backward phase); incoming
    gradients are tangents, outgoing gradients are `held`. Takeovers are left out, so the block
    needs no more bytes in the whole graph than in `problem`.
    digest: equal for blocks whose problems are equal in everything that a solver sees.
    incoming_gradient_bytes: all gradients that cross from the next block into this one.
    background_bytes: storages outside the problem that are alive while this block runs forward,
    backward, or forward again (pinned storages, gradients that cross several blocks).
    """

    index: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    input: int | None
    output: int
    problem: CDGraph
    digest: str
    incoming_gradient_bytes: int
    background_bytes: int
    name: str = ""

    def __str__(self) -> str:
        """Return the block's place in the whole graph (indices of that graph), then its problem."""
        return (
            f"{self.name or f'block {self.index}'}: forward {_ranges(self.forward)}, backward "
            f"{_ranges(self.backward)}; input {'none' if self.input is None else self.input}, "
            f"output {self.output}; incoming gradients {self.incoming_gradient_bytes} B, "
            f"background {self.background_bytes} B\n{self.problem}"
        )


def _ranges(indices: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{r[0]}..{r[-1]}" if r[1:] else str(r[0]) for r in runs) or "none"


class Option:
    """One way to run a block, with its costs. time_ns: forward and backward, recomputation
    included."""

    __slots__ = ()

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    time_ns: int

    @property
    def peak_bytes(self) -> int:
        """The larger of the two peaks."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    @property
    def needs(self) -> tuple[int, int, int, int]:
        """The costs by which options are compared: less is better in each."""
        peaks = (self.forward_peak_bytes, self.backward_peak_bytes)
        return (self.time_ns, self.saved_bytes, *peaks)


@dataclass(frozen=True, slots=True)
class BlockOption(Option):
    """One way to run a block, in node indices of its problem.

    forward: the first execution; backward: backward nodes with re-executions between them.
    saved_bytes: storages alive after the forward phase, without the output; output_bytes: the
    output.
    forward_peak_bytes, backward_peak_bytes: as `simulate` finds them on the problem.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    output_bytes: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    time_ns: int


def undominated(ranked: Iterable[_T], needs: Callable[[_T], Sequence[int]]) -> tuple[_T, ...]:
    """Return those of `ranked`, in its order, that no one before equals or beats in all of its
    `needs` (one -> numbers, of which less is better)."""
    kept: list[tuple[_T, Sequence[int]]] = []
    for one in ranked:
        own = needs(one)
        if not any(all(map(operator.le, other, own)) for _, other in kept):
            kept.append((one, own))
    return tuple(one for one, _ in kept)


@dataclass(frozen=True, slots=True)
class OptionFamily:
    """Pareto-optimal options of one block class.

    solves: how many integer programs were solved. is_complete: no time limit cut the search.
    """

    options: tuple[BlockOption, ...]
    solves: int
    is_complete: bool = True
