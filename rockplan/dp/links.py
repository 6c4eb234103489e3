"""Links: what the dynamic program knows of each block; operations: what it decides.

takes: blocks in chain order with the options of each. returns: one Link per block, equal for blocks
that the program cannot tell apart. guarantees: every cost is simulated on the problem of the block,
as `rockplan.dp.chain_solver` will execute it.

Costs of a block leave out its input and its background; peaks include its output while that is
alive. Rockmate (appendix C) holds every input until its block has run backward; here there are also
costs for an input that is dropped after its last use. They too are counted beside an input that is
held to the end, so they are lower, and may be negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import simulate
from rockplan.values.block import Block, OptionFamily, undominated
from rockplan.values.graph import CDGraph, DataKind, Phase
from rockplan.values.order import Orders, without_idle
from rockplan.values.schedule import with_frees


@dataclass(frozen=True, slots=True)
class OptionCost:
    """The cost of one run of a block, forward and backward, with `family.options[option]`.

    saved_bytes: alive between the two besides input and output; time_ns: of both. reads_output:
    True if the backward half reads the output that the forward half made.
    """

    option: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    time_ns: int
    reads_output: bool


@dataclass(frozen=True, slots=True)
class OptionCosts:
    """Options without dominated ones, fastest first: if the block's input is held to the end, or
    dropped after its last use."""

    held: tuple[OptionCost, ...]
    dropped: tuple[OptionCost, ...]


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """The cost of one run of a block forward that leaves only its output.

    peak_bytes: with the input held; dropped_peak_bytes: with the input dropped after its last use.
    """

    peak_bytes: int
    dropped_peak_bytes: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Link:
    """One block as the recurrence sees it; equal links are one class.

    first, first_forward: runs in which every forward node executes for the first time. again,
    again_forward: later runs, without the nodes that need not run again. closing: as `again`, if
    only the block itself reads its output.
    """

    digest: str
    output_bytes: int
    incoming_gradient_bytes: int
    background_bytes: int
    first: OptionCosts
    again: OptionCosts
    closing: OptionCosts
    first_forward: ForwardCost
    again_forward: ForwardCost

    @property
    def may_drop_input(self) -> bool:
        """True if dropping the input changes the cost of any option."""
        return any(c.held != c.dropped for c in (self.first, self.again, self.closing))


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


def links(blocks: Sequence[Block], families: Sequence[OptionFamily]) -> tuple[Link, ...]:
    """Return one Link per block, with the simulated bytes and times of the block's options as the
    dynamic program uses them. Blocks with equal problems and options are simulated once."""
    made: dict[tuple[object, ...], Link] = {}
    chain: list[Link] = []
    for block, family in zip(blocks, families, strict=True):
        around = (block.input is None, block.background_bytes, block.incoming_gradient_bytes)
        key = (block.digest, *around, family)
        if key not in made:
            made[key] = _link(block, family)
        chain.append(made[key])
    return tuple(chain)


class _Role(Enum):
    """The role of a run of a block (see `Link`)."""

    FIRST = "first"
    AGAIN = "again"
    CLOSING = "closing"


def _link(block: Block, family: OptionFamily) -> Link:
    if not family.options:
        raise ValueError(f"block {block.index} ({block.name}) has no options")
    return Link(
        digest=block.digest,
        output_bytes=family.options[0].output_bytes,
        incoming_gradient_bytes=block.incoming_gradient_bytes,
        background_bytes=block.background_bytes,
        first=_option_costs(block, family, _Role.FIRST),
        again=_option_costs(block, family, _Role.AGAIN),
        closing=_option_costs(block, family, _Role.CLOSING),
        first_forward=_forward_cost(block, _Role.FIRST),
        again_forward=_forward_cost(block, _Role.AGAIN),
    )


def _option_costs(block: Block, family: OptionFamily, role: _Role) -> OptionCosts:
    """Simulate the options of a block in one role: once with the block's input held to the end,
    once with it dropped after its last use. Of each, options that another one dominates are left
    out.

    Roles: the first run of the block, a later one (what need not run again is left out), and a
    later one whose output only the block itself reads, so that it may be freed before the end of
    the forward.
    """
    problem = block.problem
    if role is _Role.CLOSING:
        problem = replace(problem, outputs=())
    orders = [_order(problem, o.forward, o.backward, role) for o in family.options]
    droppable = _with_droppable_input(block, problem)
    return OptionCosts(
        held=_undominated(_option_cost(problem, i, o, block) for i, o in enumerate(orders)),
        dropped=_undominated(_option_cost(droppable, i, o, block) for i, o in enumerate(orders)),
    )


def _option_cost(problem: CDGraph, option: int, order: Orders, block: Block) -> OptionCost:
    simulation = simulate(problem, with_frees(problem, order.forward, order.backward))
    output_bytes = GraphView(problem).bytes_of(problem.outputs)
    return OptionCost(
        option=option,
        saved_bytes=simulation.saved_bytes - output_bytes,
        forward_peak_bytes=simulation.forward_peak_bytes,
        backward_peak_bytes=simulation.backward_peak_bytes,
        time_ns=simulation.time_ns,
        reads_output=any(_reads(problem, order.backward, d) for d in block.problem.outputs),
    )


def _forward_cost(block: Block, role: _Role) -> ForwardCost:
    problem = block.problem
    order = _order(problem, [n.index for n in problem.forward], (), role)
    schedules = [
        (p, with_frees(p, order.forward, ()))
        for p in (problem, _with_droppable_input(block, problem))
    ]
    held, dropped = (simulate(p, schedule) for p, schedule in schedules)
    return ForwardCost(held.forward_peak_bytes, dropped.forward_peak_bytes, held.time_ns)


def _order(
    problem: CDGraph, forward: Sequence[int], backward: Sequence[int], role: _Role
) -> Orders:
    if role is _Role.FIRST:
        return Orders(tuple(forward), tuple(backward))
    # A further run leaves out what may run again and is not needed, and what makes nothing. Results
    # of a node that may run only once are kept, and counted where it runs, as if every run made
    # them.
    repeatable = frozenset(n.index for n in problem.forward if n.recomputable or not n.writes)
    return Orders(*without_idle(problem, forward, backward, executed=repeatable))


def _with_droppable_input(block: Block, problem: CDGraph) -> CDGraph:
    """No node makes the input, so bytes are counted relative to a held one, and may be negative."""
    if block.input is None:
        return problem
    data = tuple(
        replace(d, kind=DataKind.ACTIVATION) if d.kind is DataKind.INPUT else d
        for d in problem.data
    )
    return replace(problem, data=data)


def _reads(problem: CDGraph, nodes: Iterable[int], data: int) -> bool:
    for index in nodes:
        if data in problem.nodes[index].reads:
            return True
        if data in problem.nodes[index].writes:
            return False
    return False


def _undominated(costs: Iterable[OptionCost]) -> tuple[OptionCost, ...]:
    return undominated(sorted(costs, key=lambda c: (c.time_ns, *_demands(c), c.option)), _demands)


def _demands(cost: OptionCost) -> tuple[int, ...]:
    return (cost.saved_bytes, cost.backward_peak_bytes, cost.forward_peak_bytes, cost.reads_output)
