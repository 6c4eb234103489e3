"""Links: what the dynamic program knows of each block; operations: what it decides.

takes: the graph and its blocks in chain order with the options of each. returns: one Link per
block, equal for blocks that the program cannot tell apart. guarantees: every cost is simulated on
the problem of the block, as `rockplan.dp.stitch` will execute it.

Costs of a block exclude its input and its background; peaks include its output while that is
alive. Beyond Rockmate (appendix C) an option says whether its backward half reads the block's
input and output: what nobody reads is not held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rockplan.block import Block, BlockOption, OptionFamily
from rockplan.dp.liveness import Order, drop_dead
from rockplan.graph import CDGraph, Phase
from rockplan.schedule import with_frees
from rockplan.simulate import simulate


@dataclass(frozen=True, slots=True)
class OptionCost:
    """One run of a block, forward and backward, with `family.options[option]`.

    saved_bytes: alive between the two besides input and output; time_ns: of both.
    reads_input, reads_output: does the backward half read the block's input, and its output as
    the forward half left it?
    """

    option: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    time_ns: int
    reads_input: bool
    reads_output: bool


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """One run of a block forward that leaves only its output."""

    peak_bytes: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Link:
    """One block as the recurrence sees it; equal links are one class.

    first, first_forward: runs in which every forward node executes for the first time.
    again, again_forward: the block ran before: what only an earlier run needed is left out.
    closing: again, and nobody but the block itself reads its output.
    Options are without dominated ones, fastest first.
    """

    digest: str
    output_bytes: int
    incoming_gradient_bytes: int
    background_bytes: int
    first: tuple[OptionCost, ...]
    again: tuple[OptionCost, ...]
    closing: tuple[OptionCost, ...]
    first_forward: ForwardCost
    again_forward: ForwardCost

    @property
    def may_release_input(self) -> bool:
        """Has it an option that needs the input in its forward half only?"""
        return any(not c.reads_input for c in (*self.first, *self.again, *self.closing))


@dataclass(frozen=True, slots=True)
class RunForward:
    """Run `block` forward and keep its output only."""

    block: int


@dataclass(frozen=True, slots=True)
class RunOption:
    """The forward or the backward half of a run of `block` with one of its options."""

    block: int
    option: int
    phase: Phase


Operation = RunForward | RunOption


def links(
    graph: CDGraph, blocks: Sequence[Block], families: Sequence[OptionFamily]
) -> tuple[Link, ...]:
    """One Link per block; blocks with equal problems and options are simulated once."""
    made: dict[tuple[str, int, int, OptionFamily], Link] = {}
    chain: list[Link] = []
    for block, family in zip(blocks, families, strict=True):
        key = (block.digest, block.background_bytes, block.incoming_gradient_bytes, family)
        if key not in made:
            made[key] = _link(graph, block, family)
        chain.append(made[key])
    return tuple(chain)


class _Role(Enum):
    FIRST = "first"
    AGAIN = "again"
    CLOSING = "closing"


def _link(graph: CDGraph, block: Block, family: OptionFamily) -> Link:
    if not family.options:
        raise ValueError(f"block {block.index} ({block.name}) has no options")

    def costs(role: _Role) -> tuple[OptionCost, ...]:
        return _undominated(
            _option_cost(graph, block, i, option, role) for i, option in enumerate(family.options)
        )

    return Link(
        digest=block.digest,
        output_bytes=family.options[0].output_bytes,
        incoming_gradient_bytes=block.incoming_gradient_bytes,
        background_bytes=block.background_bytes,
        first=costs(_Role.FIRST),
        again=costs(_Role.AGAIN),
        closing=costs(_Role.CLOSING),
        first_forward=_forward_cost(block.problem, _Role.FIRST),
        again_forward=_forward_cost(block.problem, _Role.AGAIN),
    )


def _option_cost(
    graph: CDGraph, block: Block, index: int, option: BlockOption, role: _Role
) -> OptionCost:
    problem = block.problem
    if role is _Role.CLOSING:
        problem = replace(problem, outputs=())
    order = Order(option.forward, option.backward)
    if role is not _Role.FIRST:
        order = drop_dead(problem, order, executed=_repeatable(problem))
    simulation = simulate(problem, with_frees(problem, order.forward, order.backward))
    nodes = (*block.forward, *block.backward)
    return OptionCost(
        option=index,
        saved_bytes=simulation.saved_bytes - _size_bytes(problem, problem.outputs),
        forward_peak_bytes=simulation.forward_peak_bytes,
        backward_peak_bytes=simulation.backward_peak_bytes,
        time_ns=simulation.time_ns,
        reads_input=_reads(graph, [nodes[i] for i in order.backward], block.input),
        reads_output=_reads(graph, [nodes[i] for i in order.backward], block.output),
    )


def _reads(graph: CDGraph, nodes: Iterable[int], data: int | None) -> bool:
    """Do `nodes`, in this order, read `data` before one of them makes it?"""
    for index in nodes:
        if data in graph.nodes[index].reads:
            return True
        if data in graph.nodes[index].writes:
            return False
    return False


def _size_bytes(problem: CDGraph, data: Iterable[int]) -> int:
    return sum(problem.data[d].size_bytes for d in data)


def _forward_cost(problem: CDGraph, role: _Role) -> ForwardCost:
    order = Order(tuple(n.index for n in problem.forward), ())
    if role is not _Role.FIRST:
        order = drop_dead(problem, order, executed=_repeatable(problem))
    simulation = simulate(problem, with_frees(problem, order.forward, ()))
    return ForwardCost(simulation.forward_peak_bytes, simulation.time_ns)


def _repeatable(problem: CDGraph) -> frozenset[int]:
    """Forward nodes of which a later run of the block makes nothing that it could not drop.

    A node that may run only once keeps its results; they are counted where it runs, as if every
    run made them.
    """
    return frozenset(n.index for n in problem.forward if n.recomputable or not n.writes)


def _undominated(costs: Iterable[OptionCost]) -> tuple[OptionCost, ...]:
    """Options that no other one equals or beats in everything, fastest first."""
    ordered = sorted(costs, key=lambda c: (c.time_ns, *_demands(c), c.option))
    found: list[OptionCost] = []
    for cost in ordered:
        demands = _demands(cost)
        if not any(
            all(a <= b for a, b in zip(_demands(other), demands, strict=True)) for other in found
        ):
            found.append(cost)
    return tuple(found)


def _demands(cost: OptionCost) -> tuple[int, ...]:
    return (
        cost.saved_bytes,
        cost.backward_peak_bytes,
        cost.forward_peak_bytes,
        cost.reads_input,
        cost.reads_output,
    )
