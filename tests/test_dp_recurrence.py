"""The recurrence against brute force: every sequence of its class, replayed byte by byte.

The replay knows nothing of segments or of the conventions of memory: it walks a flat list of
operations and keeps a stored input alive exactly until its last use before it is made again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from benchmarks.chain_bound import lower_bound_ns, optimistic_table
from rockplan.dp.links import (
    ForwardCost,
    Link,
    Operation,
    OptionCost,
    OptionCosts,
    RunForward,
    RunOption,
)
from rockplan.dp.recurrence import (
    NEVER,
    Grid,
    Table,
    bucket_count,
    decode,
    fastest_need,
    grid,
    minimum_needs,
    solve,
)
from rockplan.dp.segments import Segments, intern_segments
from rockplan.values.graph import Phase

Chain = tuple[Link, ...]


# Random chains


def random_link(rng: random.Random, options: int, scale: int = 1, input_bytes: int = 0) -> Link:
    """input_bytes: as much may be gained by dropping the input; 0 for a link that comes first."""
    reading = rng.choice([0.0, 0.5, 1.0])

    def costs() -> OptionCosts:
        held, dropped = [], []
        for i in range(rng.randint(1, options)):
            saved = rng.randint(0, 8 * scale)
            cost = OptionCost(
                option=i,
                saved_bytes=saved,
                forward_peak_bytes=saved + rng.randint(0, 8 * scale),
                backward_peak_bytes=saved + rng.randint(0, 8 * scale),
                time_ns=rng.randint(1, 20),
                reads_output=rng.random() < reading,
            )
            held.append(cost)
            dropped.append(with_less(cost))
        return OptionCosts(tuple(held), tuple(dropped))

    def with_less(cost: OptionCost) -> OptionCost:
        gains = [rng.choice([0, input_bytes, rng.randint(0, input_bytes)]) for _ in range(3)]
        return replace(
            cost,
            saved_bytes=cost.saved_bytes - gains[0],
            forward_peak_bytes=cost.forward_peak_bytes - gains[1],
            backward_peak_bytes=cost.backward_peak_bytes - gains[2],
        )

    def forward() -> ForwardCost:
        peak = rng.randint(1, 12 * scale)
        return ForwardCost(peak, peak - rng.randint(0, input_bytes), rng.randint(0, 8))

    return Link(
        digest="",
        output_bytes=rng.randint(0, 6 * scale),
        incoming_gradient_bytes=rng.randint(0, 5 * scale),
        background_bytes=rng.randint(0, 3 * scale),
        first=costs(),
        again=costs(),
        closing=costs(),
        first_forward=forward(),
        again_forward=forward(),
    )


def random_chain(rng: random.Random, blocks: int, options: int, scale: int = 1) -> Chain:
    """Blocks of one to `blocks` classes; inputs are dropped for gain between some of them."""
    classes = [random_link(rng, options, scale)]
    for _ in range(rng.randint(0, blocks - 1)):
        least_bytes = min(link.output_bytes for link in classes)
        link = random_link(rng, options, scale, least_bytes)
        classes.append(replace(link, output_bytes=max(link.output_bytes, least_bytes)))
    return tuple(rng.choice(classes) for _ in range(blocks))


# Brute force


def sequences(chain: Chain) -> Iterator[tuple[Operation, ...]]:
    """Every sequence: a block runs around what follows it, or some blocks run forward, then what
    follows them runs, then they run again."""
    last = len(chain) - 1

    @cache
    def between(s: int, t: int) -> tuple[tuple[Operation, ...], ...]:
        if s > t:
            return ((),)
        found: list[tuple[Operation, ...]] = []
        costs = chain[s].first if t == last else chain[s].closing if s == t else chain[s].again
        for cost in costs.held:
            opening = RunOption(s, cost.option, Phase.FORWARD)
            closing = RunOption(s, cost.option, Phase.BACKWARD)
            found += [(opening, *inner, closing) for inner in between(s + 1, t)]
        for split in range(s + 1, t + 1):
            forward = tuple(RunForward(k) for k in range(s, split))
            for inner in between(split, t):
                found += [(*forward, *inner, *left) for left in between(s, split - 1)]
        return tuple(found)

    return iter(between(0, last))


def replay(chain: Chain, operations: Sequence[Operation]) -> tuple[int, int]:
    """(peak bytes, time) of a flat sequence."""
    gradient_bytes = peak_bytes = time_ns = 0
    stored: dict[int, int] = {}
    running: dict[int, int] = {}
    for position, op in enumerate(operations):
        link, k = chain[op.block], op.block
        cost, begin = run_cost(chain, operations, position)
        drops = is_dropped(chain, operations, begin)
        alive_bytes = sum(stored.values()) + sum(running.values()) + link.background_bytes
        if isinstance(cost, ForwardCost):
            needs_bytes = cost.dropped_peak_bytes if drops else cost.peak_bytes
            needs_bytes += alive_bytes + gradient_bytes
            time_ns += cost.time_ns
            stored[k + 1] = link.output_bytes
        elif begin == position:
            needs_bytes = alive_bytes + gradient_bytes + cost.forward_peak_bytes
            time_ns += cost.time_ns
            stored[k + 1] = link.output_bytes
            # A dropped input is a matter of the run, whose costs say what it gains.
            running[k] = cost.saved_bytes + (stored.pop(k) if drops else 0)
        else:
            # The option's own peak counts what it saved, its output and both gradients.
            needs_bytes = alive_bytes - cost.saved_bytes + cost.backward_peak_bytes
            needs_bytes -= stored.pop(k + 1, 0)
            del running[k]
            gradient_bytes = chain[k - 1].incoming_gradient_bytes if k else 0
        peak_bytes = max(peak_bytes, needs_bytes)
        stored = {x: n for x, n in stored.items() if is_used(chain, operations, position, x)}
    assert not stored and not running
    return peak_bytes, time_ns


def run_cost(
    chain: Chain, operations: Sequence[Operation], position: int
) -> tuple[OptionCost | ForwardCost, int]:
    """What the run costs to which operations[position] belongs, and where it began."""
    op = operations[position]
    begin = position
    if is_backward(op):
        begin = max(p for p in range(position) if operations[p].block == op.block)
    link = chain[op.block]
    ran = any(o.block == op.block for o in operations[:begin])
    if isinstance(op, RunForward):
        return (link.again_forward if ran else link.first_forward), begin
    costs = link.first
    if ran:
        costs = link.closing if operations[begin + 1].block == op.block else link.again
    chosen = costs.dropped if is_dropped(chain, operations, begin) else costs.held
    return next(c for c in chosen if c.option == op.option), begin


def is_backward(op: Operation) -> bool:
    return isinstance(op, RunOption) and op.phase is Phase.BACKWARD


def is_dropped(chain: Chain, operations: Sequence[Operation], begin: int) -> bool:
    """Has nobody but the run that begins here a use for its input?"""
    return operations[begin].block > 0 and not is_used(
        chain, operations, begin, operations[begin].block, by_others=begin
    )


def is_used(
    chain: Chain,
    operations: Sequence[Operation],
    position: int,
    stored: int,
    by_others: int | None = None,
) -> bool:
    """Is the input of block `stored` used after `position` before it is made again?

    by_others: uses by the run that began there do not count.
    """
    for p in range(position + 1, len(operations)):
        op = operations[p]
        if op.block == stored:
            if not is_backward(op):
                return True
            begin = max(q for q in range(p) if operations[q].block == stored)
            if begin != by_others and not is_dropped(chain, operations, begin):
                return True
        elif op.block == stored - 1:
            return is_backward(op) and reads_output(chain, operations, p)
    return False


def reads_output(chain: Chain, operations: Sequence[Operation], position: int) -> bool:
    """Does the backward half at `position` read its block's output?"""
    begin = max(p for p in range(position) if operations[p].block == operations[position].block)
    link = chain[operations[position].block]
    costs = link.first
    if any(o.block == operations[position].block for o in operations[:begin]):
        costs = link.again if begin + 1 < position else link.closing
    option = operations[begin]
    assert isinstance(option, RunOption)
    return next(c.reads_output for c in costs.held if c.option == option.option)


def frontier(chain: Chain) -> list[tuple[int, int]]:
    """(peak, time) of the sequences that no other beats, by rising peak."""
    best: list[tuple[int, int]] = []
    for peak_bytes, time_ns in sorted(replay(chain, ops) for ops in sequences(chain)):
        if not best or time_ns < best[-1][1]:
            best.append((peak_bytes, time_ns))
    return best


def tables(segments: Segments, buckets: Grid) -> tuple[Table, Table]:
    needs = minimum_needs(segments)
    return solve(segments, buckets, needs), optimistic_table(segments, buckets, needs)


# Tests


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    blocks, options = rng.choice([(1, 4), (2, 4), (3, 3), (4, 2), (5, 1)])
    chain = random_chain(rng, blocks, options)
    best = frontier(chain)
    segments = intern_segments(chain)
    top_bytes = best[-1][0] + 3
    exact, optimistic = tables(segments, grid(top_bytes, top_bytes))
    assert exact.grid.unit_bytes == 1
    assert exact.minimum_bytes[segments.whole] == best[0][0]
    assert lower_bound_ns(optimistic, best[0][0] - 1) is None
    for (limit_bytes, time_ns), (next_bytes, _) in zip(
        best, [*best[1:], (top_bytes, 0)], strict=True
    ):
        for limit in {limit_bytes, next_bytes - 1}:
            peak_bytes, found_ns = replay(chain, decode(exact, limit))
            assert peak_bytes <= limit
            assert found_ns == time_ns
            assert lower_bound_ns(optimistic, limit) == time_ns


@pytest.mark.parametrize("seed", range(12))
def test_coarse_buckets_never_exceed_the_limit(seed: int) -> None:
    """Sizes that no bucket divides: legal and bounded from both sides, whatever the limit."""
    rng = random.Random(seed)
    chain = random_chain(rng, *rng.choice([(3, 3), (4, 2)]), scale=1_000_003)
    best = frontier(chain)
    segments = intern_segments(chain)
    exact, optimistic = tables(segments, grid(best[-1][0], 64))
    assert exact.minimum_bytes[segments.whole] == best[0][0]
    limits = [rng.randint(best[0][0], best[-1][0]) for _ in range(8)]
    for limit in [best[0][0], *limits, best[-1][0]]:
        peak_bytes, found_ns = replay(chain, decode(exact, limit))
        least_ns = min(time_ns for need, time_ns in best if need <= limit)
        bound_ns = lower_bound_ns(optimistic, limit)
        assert peak_bytes <= limit
        assert bound_ns is not None and bound_ns <= least_ns <= found_ns


@pytest.mark.parametrize("seed", range(25))
def test_long_chains_keep_their_limits_and_bounds(seed: int) -> None:
    """Too long for brute force: replayed need within the limit, time above the bound, and times
    that fall as limits grow, in the tables and in what is decoded near them."""
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(6, 14), 4, scale=10_007)
    segments = intern_segments(chain)
    top_bytes = fastest_need(segments)
    exact, optimistic = tables(segments, grid(top_bytes, 128))
    least_bytes = int(exact.minimum_bytes[segments.whole])
    assert (exact.times_ns[1:, 1:] <= exact.times_ns[1:, :-1]).all()
    assert (optimistic.times_ns[1:, 1:] <= optimistic.times_ns[1:, :-1]).all()
    limits = (np.arange(exact.grid.count + 2) - 1) * exact.grid.unit_bytes
    fits = limits >= exact.minimum_bytes[:, np.newaxis]
    assert (optimistic.times_ns[fits] <= exact.times_ns[fits]).all()
    assert (exact.times_ns[fits] < NEVER).all()
    for _ in range(10):
        limit = rng.randint(least_bytes, max(top_bytes, least_bytes))
        peak_bytes, found_ns = replay(chain, decode(exact, limit))
        bound_ns = lower_bound_ns(optimistic, limit)
        bucket = limit // exact.grid.unit_bytes
        assert peak_bytes <= limit
        assert bound_ns is not None and bound_ns <= found_ns
        assert found_ns <= exact.times_ns[segments.whole, bucket + 1]
    assert replay(chain, decode(exact, least_bytes))[0] == least_bytes
    with pytest.raises(ValueError, match="below the minimum"):
        decode(exact, least_bytes - 1)


def test_one_table_answers_smaller_budgets() -> None:
    """With byte buckets a large table holds exactly what smaller tables hold."""
    rng = random.Random(5)
    chain = random_chain(rng, 6, 3)
    segments = intern_segments(chain)
    needs = minimum_needs(segments)
    large = solve(segments, Grid(1, 256), needs)
    small = solve(segments, Grid(1, 64), needs)
    assert (large.times_ns[:, :66] == small.times_ns).all()


def transformer_like(layers: int) -> Chain:
    """Layers of two halves between two other blocks; nobody gains by dropping an input."""
    rng = random.Random(0)
    made = [replace(random_link(rng, 3, scale=997), output_bytes=3000) for _ in range(4)]
    embedding, a, b, head = made
    return (embedding, *[a, b] * layers, head)


def test_equal_sub_chains_are_one_segment() -> None:
    for layers in (1, 5, 25):
        chain = transformer_like(layers)
        length = len(chain)
        strings = {
            (chain[s : t + 1], t == length - 1) for s in range(length) for t in range(s, length)
        }
        segments = intern_segments(chain)
        assert len(segments.spans) == 1 + len(strings)
        assert len(segments.spans) < 4 * length
        assert (segments.ids[0] == segments.ids[1]).all()
        for s in range(length):
            for t in range(s, length):
                i, j, _ = segments.spans[segments.ids[0, s, t]]
                assert chain[i : j + 1] == chain[s : t + 1]


def simple_link(gain_bytes: int) -> Link:
    """Output of 1 byte, incoming gradient of 100; any run needs 10, and saves 2 bytes; dropping
    the input between its halves gains gain_bytes."""
    held = OptionCost(0, 2, 10, 10, 5, False)
    costs = OptionCosts((held,), (replace(held, saved_bytes=2 - gain_bytes),))
    forward = ForwardCost(10, 10, 1)
    return Link("", 1, 100, 0, costs, costs, costs, forward, forward)


def test_needs_by_hand() -> None:
    assert minimum_needs(intern_segments((simple_link(0),)))[1:].tolist() == [10]
    for gain_bytes in (0, 1):
        segments = intern_segments((simple_link(gain_bytes),) * 3)
        needs = minimum_needs(segments)
        # Forward runs meet a gradient, unless the segment ends the chain.
        assert needs[segments.ids[0, 0, 0]] == 110
        assert needs[segments.ids[0, 1, 1]] == 111
        assert needs[segments.ids[0, 2, 2]] == 11
        # Two of three run: the first's input and what it saves, the input of the last.
        assert needs[segments.ids[0, 1, 2]] == 1 + 2 + 1 + 10
        assert needs[segments.ids[1, 1, 2]] == 1 + 2 - gain_bytes + 1 + 10
        assert needs[segments.whole] == 2 + 1 + 2 - gain_bytes + 1 + 10


def test_four_hundred_blocks() -> None:
    """No recursion that Python limits, also where memory is so short that runs nest deeply."""
    chain = transformer_like(200)
    segments = intern_segments(chain)
    exact, _ = tables(segments, grid(fastest_need(segments), 64))
    least_bytes = int(exact.minimum_bytes[segments.whole])
    for limit in (2 * least_bytes, exact.grid.limit_bytes):
        operations = decode(exact, limit)
        backward = [
            o.block for o in operations if isinstance(o, RunOption) and o.phase is Phase.BACKWARD
        ]
        assert backward == list(range(len(chain)))[::-1]


def test_grid_reaches_its_limit() -> None:
    for limit_bytes in (0, 1, 31, 500, 10**6 + 3, 7 * 10**10):
        for buckets in (1, 64, 500, 4020):
            made = grid(limit_bytes, buckets)
            assert made.limit_bytes >= limit_bytes
            assert made.count <= buckets + 31
    assert grid(100, 500).unit_bytes == 1
    assert bucket_count(26, 351) == 500
    assert bucket_count(402, 1600) == 4020
