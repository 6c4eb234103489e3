"""The other algorithms of the comparison: legal, within budget, and right where we know better."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, combinations

import pytest

from benchmarks.peers.chen import all_segment_schedules, segment_schedule, sqrt_segments
from benchmarks.peers.dtr import SCORES, dtr
from benchmarks.peers.exact import exact, whole_graph_model
from benchmarks.peers.orders import fastest_within
from benchmarks.peers.per_tensor import (
    per_tensor_schedules,
    recompute_unsaved,
    saved_storages,
    wanted_storages,
)
from benchmarks.peers.rockmate import grid_families, rockmate
from benchmarks.peers.rotor import rotor
from rockplan.ilp.highs import SolverStatus
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.block import Block
from rockplan.values.graph import CDGraph, DataKind, Phase, producers
from rockplan.values.schedule import Schedule, keep_all
from testing.exhaustive import Exhaustive, stage_schedules
from testing.graphs import Draft, Ranges, cut_chain, random_chain

Planner = Callable[[CDGraph, tuple[Block, ...], int], Schedule | None]


def by_chen(graph: CDGraph, blocks: tuple[Block, ...], budget_bytes: int) -> Schedule | None:
    return fastest_within(graph, all_segment_schedules(graph, blocks), budget_bytes)


def by_rotor(graph: CDGraph, blocks: tuple[Block, ...], budget_bytes: int) -> Schedule | None:
    return rotor(graph, blocks).best_schedule(budget_bytes)


def by_tensor(graph: CDGraph, blocks: tuple[Block, ...], budget_bytes: int) -> Schedule | None:
    return fastest_within(graph, per_tensor_schedules(graph), budget_bytes)


def by_rockmate(graph: CDGraph, blocks: tuple[Block, ...], budget_bytes: int) -> Schedule | None:
    families = grid_families(blocks, time_limit_s=5.0)
    return rockmate(graph, blocks, families, budget_bytes)


PLANNERS: dict[str, Planner] = {
    "chen": by_chen,
    "rotor": by_rotor,
    "per tensor": by_tensor,
    "rockmate": by_rockmate,
    **{
        f"dtr {name}": lambda graph, blocks, budget_bytes, score=score: dtr(
            graph, budget_bytes, score
        )
        for name, score in SCORES.items()
    },
}


def chain_of(count: int) -> tuple[CDGraph, tuple[Block, ...]]:
    """`count` blocks of two forward nodes, every size and time 1; backward reads both inputs."""
    draft = Draft()
    last = draft.add_data(DataKind.INPUT, 1)
    separators, pairs = [last], []
    for _ in range(count):
        inner, after = (draft.add_data(DataKind.ACTIVATION, 1) for _ in range(2))
        draft.add_node(Phase.FORWARD, [last], [inner], time_ns=1)
        draft.add_node(Phase.FORWARD, [inner], [after], time_ns=1)
        pairs.append((last, inner))
        separators.append(last := after)
    gradient = draft.add_data(DataKind.TANGENT, 1)
    for before, inner in reversed(pairs):
        for read in (inner, before):
            made = draft.add_data(DataKind.GRADIENT, 1)
            draft.add_node(Phase.BACKWARD, [gradient, read], [made], time_ns=1)
            gradient = made
    draft.handed.append(gradient)
    graph = draft.finish((last,))
    return graph, cut_chain(graph, (2,) * count, (2,) * count, tuple(separators))


@pytest.mark.parametrize("seed", range(10))
def test_exact_is_the_fastest_of_its_class(seed: int) -> None:
    graph, _ = random_chain(random.Random(seed), (1, 2), Ranges(max_rng_state_bytes=0))
    listed = [found for _, found in stage_schedules(graph)]
    budget_bytes = sorted(found.peak_bytes for found in listed)[len(listed) // 4]
    found = exact(graph, whole_graph_model(graph), budget_bytes, time_limit_s=10.0, gap=0.0)
    assert found.schedule is not None and found.status is SolverStatus.OPTIMAL
    simulated = simulate(graph, found.schedule)
    assert simulated.peak_bytes <= budget_bytes
    assert simulated.time_ns == found.bound_ns
    assert simulated.time_ns == min(f.time_ns for f in listed if f.peak_bytes <= budget_bytes)


@functools.cache
def fastest_ns(seed: int, budget_bytes: int) -> int | None:
    """Of any legal schedule of the graph of that seed."""
    graph, _ = random_chain(random.Random(seed), (2, 2))
    return Exhaustive(graph, budget_bytes, None, is_free=True).fastest_ns()


@pytest.mark.parametrize("name", PLANNERS)
def test_schedules_are_legal_and_possible(name: str) -> None:
    found = 0
    for seed in range(6):
        graph, blocks = random_chain(random.Random(seed), (2, 2))
        peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
        for budget_bytes in (peak_bytes * 3 // 4, peak_bytes * 9 // 10):
            schedule = PLANNERS[name](graph, blocks, budget_bytes)
            if schedule is None:
                continue
            verify(graph, schedule)
            assert simulate(graph, schedule).peak_bytes <= budget_bytes
            fastest = fastest_ns(seed, budget_bytes)
            assert fastest is not None and simulate(graph, schedule).time_ns >= fastest
            found += 1
    assert found > 0


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_recomputed_where_everything_fits(name: str, seed: int) -> None:
    graph, blocks = random_chain(random.Random(seed))
    # The slots of Rockmate's chain round up, and its inputs are held to the end.
    peak_bytes = 3 * simulate(graph, keep_all(graph)).peak_bytes
    schedule = PLANNERS[name](graph, blocks, peak_bytes)
    assert schedule is not None and simulate(graph, schedule).time_ns == graph.time_ns


def test_chen_runs_all_but_the_last_segment_again() -> None:
    graph, blocks = chain_of(9)
    assert sqrt_segments(blocks) == 3
    schedule = segment_schedule(graph, blocks, 3)
    again = Counter(schedule.computes) - Counter(keep_all(graph).computes)
    # The last node of a segment makes the checkpoint after it, which is there.
    assert sorted(again) == [*range(5), *range(6, 11)]
    assert set(again.values()) == {1}
    found = simulate(graph, schedule)
    # Two checkpoints (the first input is the caller's) and one segment with its gradient.
    assert found.peak_bytes <= 2 + 6 + 2 < simulate(graph, keep_all(graph)).peak_bytes


def test_rotor_keeps_blocks_as_a_whole() -> None:
    graph, blocks = chain_of(6)
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    schedule = rotor(graph, blocks).best_schedule(peak_bytes - 1)
    assert schedule is not None
    again = Counter(schedule.computes) - Counter(keep_all(graph).computes)
    # One block runs again, without the node that makes what the next one holds.
    assert sum(again.values()) == 1


def subsets(items: list[int]) -> Iterator[frozenset[int]]:
    picks = chain.from_iterable(combinations(items, k) for k in range(len(items) + 1))
    return (frozenset(pick) for pick in picks)


@pytest.mark.parametrize("seed", range(20))
def test_saved_tensors_are_the_best_subset(seed: int) -> None:
    graph, _ = random_chain(random.Random(seed), (3, 3))
    wanted = sorted(wanted_storages(graph))
    producer = producers(graph)
    forced = frozenset(d for d in wanted if not graph.nodes[producer[d]].recomputable)
    sizes = {d: graph.data[d].size_bytes for d in wanted}
    limit_bytes = sum(sizes.values()) // 2
    times = [
        simulate(graph, recompute_unsaved(graph, forced | chosen)).time_ns
        for chosen in subsets([d for d in wanted if d not in forced])
        if sum(sizes[d] for d in chosen) <= limit_bytes
    ]
    saved = saved_storages(graph, limit_bytes, 5.0)
    assert saved is not None
    assert sum(sizes[d] for d in saved - forced) <= limit_bytes
    assert simulate(graph, recompute_unsaved(graph, saved)).time_ns == min(times)


def test_dtr_drops_the_largest_or_the_stalest() -> None:
    """Three activations that backward reads, one too many: the heuristics differ in which."""
    draft = Draft()
    source = draft.add_data(DataKind.INPUT, 1)
    sizes = (2, 5, 3)
    acts = [draft.add_data(DataKind.ACTIVATION, size) for size in sizes]
    for act in acts:
        draft.add_node(Phase.FORWARD, [source], [act], time_ns=10)
    last = draft.add_data(DataKind.ACTIVATION, 1)
    draft.add_node(Phase.FORWARD, [source], [last], time_ns=10)
    tangent = draft.add_data(DataKind.TANGENT, 0)
    made = draft.add_data(DataKind.GRADIENT, 0)
    draft.add_node(Phase.BACKWARD, [tangent, acts[2]], [made], time_ns=1)
    for act in (acts[1], acts[0]):
        after = draft.add_data(DataKind.GRADIENT, 0)
        draft.add_node(Phase.BACKWARD, [made, act], [after], time_ns=1)
        made = after
    draft.handed.append(made)
    graph = draft.finish((last,))
    budget_bytes = sum(sizes)
    again = {}
    for name, score in SCORES.items():
        schedule = dtr(graph, budget_bytes, score)
        assert schedule is not None
        again[name] = Counter(schedule.computes) - Counter(keep_all(graph).computes)
    assert again["largest"] == Counter({1: 1})
    assert again["LRU"] == Counter({0: 1})
    assert again["local"] == Counter({1: 1})


def test_dtr_counts_what_is_evicted_around_a_storage() -> None:
    """On a chain the exact neighbourhood recomputes less than the storage's own cost alone."""
    graph, _ = chain_of(16)
    budget_bytes = 14
    times = {}
    for name in ("e*", "eqclass", "local"):
        schedule = dtr(graph, budget_bytes, SCORES[name])
        assert schedule is not None
        times[name] = simulate(graph, schedule).time_ns
    assert times["e*"] < times["local"] and times["eqclass"] < times["local"]
