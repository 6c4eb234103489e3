"""The recurrence against brute force: every sequence of its class, replayed byte by byte.

The replay knows nothing of segments or of the conventions of memory: it walks a flat list of
operations and keeps a stored input alive exactly until its last use before it is made again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest

from rockplan.dp.chain import ForwardCost, Link, Operation, OptionCost, RunForward, RunOption
from rockplan.dp.discretise import Grid, bucket_count, grid
from rockplan.dp.recurrence import (
    NEVER,
    Table,
    decode,
    fastest_need,
    lower_bound_ns,
    minimum_needs,
    solve,
)
from rockplan.dp.segments import Segments, intern_segments
from rockplan.graph import Phase

Chain = tuple[Link, ...]


# Random chains


def random_link(rng: random.Random, options: int, scale: int = 1) -> Link:
    def costs() -> tuple[OptionCost, ...]:
        made = []
        for i in range(rng.randint(1, options)):
            kept = rng.randint(1, 10 * scale)
            made.append(
                OptionCost(
                    option=i,
                    kept_bytes=kept,
                    forward_peak_bytes=kept + rng.randint(0, 6 * scale),
                    backward_peak_bytes=kept + rng.randint(0, 8 * scale),
                    time_ns=rng.randint(1, 20),
                )
            )
        return tuple(made)

    def forward() -> ForwardCost:
        return ForwardCost(rng.randint(1, 12 * scale), rng.randint(0, 8))

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
    classes = [random_link(rng, options, scale) for _ in range(rng.randint(1, blocks))]
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
        for cost in costs:
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
    kept: dict[int, int] = {}
    seen: set[int] = set()
    for position, op in enumerate(operations):
        link, rest = chain[op.block], operations[position + 1 :]
        alive_bytes = sum(stored.values()) + sum(kept.values()) + link.background_bytes
        if isinstance(op, RunForward):
            cost = link.again_forward if op.block in seen else link.first_forward
            peak_bytes = max(peak_bytes, alive_bytes + gradient_bytes + cost.peak_bytes)
            stored[op.block + 1] = link.output_bytes
            time_ns += cost.time_ns
        elif op.phase is Phase.FORWARD:
            run = option_cost(chain, op, op.block in seen, rest[0])
            peak_bytes = max(peak_bytes, alive_bytes + gradient_bytes + run.forward_peak_bytes)
            kept[op.block] = run.kept_bytes
            time_ns += run.time_ns
        else:
            before = operations[position - 1]
            again = op.block != len(chain) - 1 and any(
                o.block == op.block for o in operations[: last_forward(operations, position)]
            )
            run = option_cost(chain, op, again, before)
            alive_bytes -= kept.pop(op.block)
            peak_bytes = max(peak_bytes, alive_bytes + run.backward_peak_bytes)
            gradient_bytes = chain[op.block - 1].incoming_gradient_bytes if op.block else 0
        seen.add(op.block)
        stored = {x: n for x, n in stored.items() if is_used_next(x, rest)}
    assert not stored and not kept
    return peak_bytes, time_ns


def last_forward(operations: Sequence[Operation], position: int) -> int:
    """Where the run that ends at `position` began."""
    block = operations[position].block
    return max(p for p in range(position) if operations[p].block == block)


def option_cost(chain: Chain, op: RunOption, again: bool, neighbour: Operation) -> OptionCost:
    """neighbour: the operation between the two halves of the run, nearest to op."""
    link = chain[op.block]
    costs = link.first
    if again:
        costs = link.closing if neighbour.block == op.block else link.again
    return next(c for c in costs if c.option == op.option)


def is_used_next(stored: int, operations: Sequence[Operation]) -> bool:
    """Is the input of block `stored` read before it is made again?"""
    for op in operations:
        if op.block == stored:
            return True
        if op.block == stored - 1 and not (
            isinstance(op, RunOption) and op.phase is Phase.BACKWARD
        ):
            return False
    return False


def frontier(chain: Chain) -> list[tuple[int, int]]:
    """(peak, time) of the sequences that no other beats, by rising peak."""
    best: list[tuple[int, int]] = []
    for peak_bytes, time_ns in sorted(replay(chain, ops) for ops in sequences(chain)):
        if not best or time_ns < best[-1][1]:
            best.append((peak_bytes, time_ns))
    return best


def tables(segments: Segments, buckets: Grid) -> tuple[Table, Table]:
    needs = minimum_needs(segments)
    return solve(segments, buckets, needs), solve(segments, buckets, needs, optimistic=True)


# Tests


@pytest.mark.parametrize("seed", range(600))
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


@pytest.mark.parametrize("seed", range(120))
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


@pytest.mark.parametrize("seed", range(40))
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


def test_equal_sub_chains_are_one_segment() -> None:
    rng = random.Random(0)
    first, a, b, last = (random_link(rng, 3) for _ in range(4))
    for layers in (1, 5, 25):
        chain = (first, *[a, b] * layers, last)
        length = len(chain)
        strings = {
            (chain[s : t + 1], t == length - 1) for s in range(length) for t in range(s, length)
        }
        segments = intern_segments(chain)
        assert len(segments.spans) == 1 + len(strings)
        assert len(segments.spans) < 4 * length
        for s in range(length):
            for t in range(s, length):
                i, j = segments.spans[segments.ids[s, t]]
                assert chain[i : j + 1] == chain[s : t + 1]


def test_chain_end_is_a_class_of_its_own() -> None:
    """Forward runs of a segment that ends the chain see no gradient; others do."""
    link = Link(
        digest="",
        output_bytes=1,
        incoming_gradient_bytes=100,
        background_bytes=0,
        first=(OptionCost(0, 2, 10, 10, 5),),
        again=(OptionCost(0, 2, 10, 10, 5),),
        closing=(OptionCost(0, 0, 10, 10, 5),),
        first_forward=ForwardCost(10, 1),
        again_forward=ForwardCost(10, 1),
    )
    assert minimum_needs(intern_segments((link,))).tolist() == [0, 10]
    segments = intern_segments((link, link))
    needs = minimum_needs(segments)
    assert needs[segments.ids[0, 0]] == 110
    assert needs[segments.ids[1, 1]] == 10
    assert needs[segments.whole] == 12


def test_four_hundred_blocks() -> None:
    """No recursion that Python limits, also where memory is so short that runs nest deeply."""
    rng = random.Random(1)
    first, a, b, last = (random_link(rng, 3, scale=997) for _ in range(4))
    chain = (first, *[a, b] * 200, last)
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
