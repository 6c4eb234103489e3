"""Rockmate as published (Zhao et al., ICML 2023): options of blocks on a grid, Rotor over them.

Options: 20 x 20 budgets for each distinct block, M_peak evenly from the peak of the schedule that
drops everything at once to that of keep-all, M_save evenly from the output's size to M_peak
(section 3.3). Each corner is solved to the optimum, with rockplan's integer program in place of
the published one, which finds the same optimum on such blocks at a hundred times the cost; a
corner for which the solution of a looser one fits is answered by it.

Chain: algorithms 2 and 3 (appendix C), memory in 500 slots, sizes rounded up, inputs held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rockplan.dp.chain_solver import stitch
from rockplan.dp.links import Operation, RunForward, RunOption
from rockplan.ilp.blocks.decode import price, solve_stages
from rockplan.ilp.blocks.formulate import formulate
from rockplan.ilp.blocks.pareto_search import seed_orders
from rockplan.ilp.blocks.stages import find_stages
from rockplan.ilp.scaling import in_units
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.block import Block, BlockOption, OptionFamily
from rockplan.values.graph import CDGraph, Phase
from rockplan.values.order import Orders, keep_all_order
from rockplan.values.schedule import Schedule, with_frees

GRID = 20
SLOTS = 500

Times = npt.NDArray[np.float64]


def grid_families(
    blocks: Sequence[Block], *, time_limit_s: float, gap: float = 1e-3
) -> list[OptionFamily]:
    """The options of each block; equal blocks are solved once. time_limit_s: of each corner."""
    problems = {b.digest: b.problem for b in blocks}
    found = {d: grid_family(p, time_limit_s, gap) for d, p in problems.items()}
    return [found[b.digest] for b in blocks]


def grid_family(problem: CDGraph, time_limit_s: float, gap: float) -> OptionFamily:
    """Distinct answers of the corners of the grid, keep-all among them."""
    units = in_units(problem)
    stages = find_stages(units)
    orders = [Orders(*keep_all_order(problem))]
    solves = 0
    if stages.stages:
        model = formulate(stages)
        answers: list[_Answer] = []
        for corner in _corners(units.graph):
            if any(answer.settles(corner) for answer in answers):
                continue
            found = solve_stages(model, *corner, time_limit_s=time_limit_s, gap=gap)
            solves += 1
            option = None if found.orders is None else price(units.graph, found.orders)
            answers.append(_Answer(corner, option))
        orders += [Orders(a.option.forward, a.option.backward) for a in answers if a.option]
    options = tuple(dict.fromkeys(price(problem, o) for o in orders))
    return OptionFamily(options, solves)


Corner = tuple[int, int]
"""Limits of peak bytes and of saved bytes besides the output."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The best option within a corner; None if there is none."""

    corner: Corner
    option: BlockOption | None

    def settles(self, tighter: Corner) -> bool:
        """Does it answer `tighter` too?"""
        if tighter[0] > self.corner[0] or tighter[1] > self.corner[1]:
            return False
        option = self.option
        return option is None or (
            option.peak_bytes <= tighter[0] and option.saved_bytes <= tighter[1]
        )


def _corners(problem: CDGraph) -> Iterator[Corner]:
    """From the loosest to the tightest."""
    everything = price(problem, Orders(*keep_all_order(problem)))
    least = price(problem, seed_orders(problem)[-1]).peak_bytes
    most = max(everything.peak_bytes, least)
    output_bytes = everything.output_bytes
    for i in reversed(range(GRID)):
        peak = least + (most - least) * i // (GRID - 1)
        for j in reversed(range(GRID)):
            saved = output_bytes + (peak - output_bytes) * j // (GRID - 1)
            yield peak, saved - output_bytes


@dataclass(frozen=True, slots=True)
class _Costs:
    """One block, in slots. held: output and saved bytes of each option; peaks are beside the
    input. only_forward: of a run that leaves its output only."""

    held: tuple[int, ...]
    forward_peak: tuple[int, ...]
    backward_peak: tuple[int, ...]
    time_ns: tuple[int, ...]
    input: int
    gradient: int
    only_forward_peak: int
    only_forward_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """times[m]: the least time of blocks s..t in m slots beside the input of s. choice[m]: an
    option of s, or the number of options plus how many blocks after s + 1 run forward first."""

    times: Times
    choice: npt.NDArray[np.int64]


Table = dict[tuple[int, int], _Segment]


def rockmate(
    graph: CDGraph, blocks: Sequence[Block], families: Sequence[OptionFamily], budget_bytes: int
) -> Schedule | None:
    """The schedule of algorithm 2 for budget_bytes; None if it finds none, or if saved generator
    states, which the chain does not know, lift its peak over the budget."""
    unit_bytes = max(budget_bytes // SLOTS, 1)
    slots = budget_bytes // unit_bytes
    costs = [_costs(graph, b, f, unit_bytes) for b, f in zip(blocks, families, strict=True)]
    table = _solve(costs, slots)
    whole = table[0, len(blocks) - 1]
    if not np.isfinite(whole.times[slots]):
        return None
    operations = tuple(_build(costs, table, 0, len(blocks) - 1, slots))
    schedule = stitch(graph, blocks, families, operations)
    verify(graph, schedule)
    return schedule if simulate(graph, schedule).peak_bytes <= budget_bytes else None


def _costs(graph: CDGraph, block: Block, family: OptionFamily, unit_bytes: int) -> _Costs:
    problem = block.problem
    once = simulate(problem, with_frees(problem, [n.index for n in problem.forward], ()))
    background = block.background_bytes

    def up(amount_bytes: int) -> int:
        return -(-amount_bytes // unit_bytes)

    return _Costs(
        held=tuple(up(o.output_bytes + o.saved_bytes) for o in family.options),
        forward_peak=tuple(up(o.forward_peak_bytes + background) for o in family.options),
        backward_peak=tuple(up(o.backward_peak_bytes + background) for o in family.options),
        time_ns=tuple(o.time_ns for o in family.options),
        input=0 if block.input is None else up(graph.data[block.input].size_bytes),
        gradient=up(block.incoming_gradient_bytes),
        only_forward_peak=up(once.forward_peak_bytes + background),
        only_forward_ns=once.time_ns,
    )


def _solve(costs: Sequence[_Costs], slots: int) -> Table:
    """Algorithm 2: equation 3 for every segment, shorter ones first."""
    table: Table = {}
    last = len(costs) - 1
    for length in range(len(costs)):
        for s in range(len(costs) - length):
            t = s + length
            # The last gradient does not exist yet while the blocks run forward.
            gradient = 0 if t == last else costs[t].gradient
            ways = [*_once(costs, table, s, t, gradient, slots)]
            ways += _more_than_once(costs, table, s, t, gradient, slots)
            times = np.stack(ways)
            choice = np.argmin(times, axis=0)
            table[s, t] = _Segment(np.min(times, axis=0), choice)
    return table


def _once(
    costs: Sequence[_Costs], table: Table, s: int, t: int, gradient: int, slots: int
) -> Iterator[Times]:
    """Equation 1: block s runs once, with each of its options."""
    own = costs[s]
    rest = table[s + 1, t].times if s < t else np.zeros(slots + 1)
    for held, forward, backward, time_ns in zip(
        own.held, own.forward_peak, own.backward_peak, own.time_ns, strict=True
    ):
        found = time_ns + (_less(rest, held) if s < t else rest)
        yield _from(found, max(forward + gradient, backward))


def _more_than_once(
    costs: Sequence[_Costs], table: Table, s: int, t: int, gradient: int, slots: int
) -> Iterator[Times]:
    """Equation 2: blocks s..i-1 run forward, the input of i is stored."""
    peak, time_ns = 0, 0
    for i in range(s + 1, t + 1):
        ahead = costs[i - 1]
        peak = max(peak, ahead.only_forward_peak + (ahead.input if i - 1 > s else 0))
        time_ns += ahead.only_forward_ns
        found = time_ns + _less(table[i, t].times, costs[i].input) + table[s, i - 1].times
        yield _from(found, peak + gradient)


def _less(times: Times, slots: int) -> Times:
    """times[m - slots] for each m."""
    found = np.full_like(times, np.inf)
    found[slots:] = times[: max(len(times) - slots, 0)]
    return found


def _from(times: Times, slots: int) -> Times:
    """times where m >= slots."""
    found = times.copy()
    found[:slots] = np.inf
    return found


def _build(
    costs: Sequence[_Costs], table: Table, s: int, t: int, slots: int
) -> Iterator[Operation]:
    """Algorithm 3."""
    choice = int(table[s, t].choice[slots])
    own = costs[s]
    if choice < len(own.held):
        yield RunOption(s, choice, Phase.FORWARD)
        if s < t:
            yield from _build(costs, table, s + 1, t, slots - own.held[choice])
        yield RunOption(s, choice, Phase.BACKWARD)
        return
    i = s + 1 + choice - len(own.held)
    yield from (RunForward(k) for k in range(s, i))
    yield from _build(costs, table, i, t, slots - costs[i].input)
    yield from _build(costs, table, s, i - 1, slots)
