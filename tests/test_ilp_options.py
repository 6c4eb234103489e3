"""Families: what they hold, how good they are, and that they are the same every time."""

from __future__ import annotations

import operator
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.family_gap import gap_ns
from rockplan.ilp.blocks import pareto_search
from rockplan.ilp.blocks.decode import price
from rockplan.ilp.blocks.pareto_search import (
    Settings,
    option_families,
    option_family,
    search_corners,
    seed_orders,
)
from rockplan.ilp.scaling import in_units
from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.block import BlockOption
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.order import Orders, keep_all_order
from rockplan.values.schedule import with_frees
from testing.exhaustive import stage_schedules
from testing.graphs import (
    Roofline,
    attention_block,
    block_graphs,
    cd_graphs,
    mlp_block,
    random_block,
    random_graph,
)

EXACT = Settings(eps=0.0, delta=0.0, gap=0.0, effort=10**9)
"""Every corner, to the byte."""


def draw(seed: int, forward_nodes: int = 4) -> CDGraph:
    rng = random.Random(seed)
    size = rng.randint(2, forward_nodes)
    if seed % 2:
        return random_graph(rng, size)
    return random_block(rng, size).problem


def best_ns(options: tuple[BlockOption, ...], peak: int, saved: int) -> int | None:
    fitting = [o.time_ns for o in options if o.peak_bytes <= peak and o.saved_bytes <= saved]
    return min(fitting, default=None)


def listing(graph: CDGraph) -> list[tuple[int, int, int]]:
    output_bytes = GraphView(graph).bytes_of(graph.outputs)
    return [
        (s.peak_bytes, s.saved_bytes - output_bytes, s.time_ns) for _, s in stage_schedules(graph)
    ]


def small_graphs(count: int) -> list[CDGraph]:
    """Graphs with a choice to make whose schedules can be listed."""
    graphs = []
    seed = 0
    while len(graphs) < count:
        graph = draw(seed)
        seed += 1
        readers = sum(
            any(d in n.reads for f in graph.forward for d in f.writes) for n in graph.backward
        )
        if 2 <= readers * len(graph.forward) <= 9:
            graphs.append(graph)
    return graphs


def test_every_corner_has_the_optimum_of_the_listing() -> None:
    """With exact settings, at every corner of the grid of all peaks and all saved bytes: as fast
    as the best schedule of the class."""
    for graph in small_graphs(25):
        family = option_family(graph, settings=EXACT)
        assert gap_ns(search_corners(graph, EXACT)) == 0
        points = listing(graph)
        for peak in {p for p, _, _ in points}:
            for saved in {s for _, s, _ in points}:
                expected = min((t for p, s, t in points if p <= peak and s <= saved), default=None)
                found = best_ns(family.options, peak, saved)
                if expected is not None:
                    assert found is not None
                    assert found <= expected


def test_every_corner_is_within_what_is_proven() -> None:
    """Default settings: at most `gap_ns` slower than what needs less than delta less."""
    for graph in small_graphs(25):
        family = option_family(graph)
        points = listing(graph)
        saved_range = price(graph, Orders(*keep_all_order(graph))).saved_bytes
        slack = max(int(Settings().delta * saved_range), 1) - 1
        proven_ns = gap_ns(search_corners(graph, Settings()))
        assert proven_ns is not None
        for peak in {p for p, _, _ in points}:
            for saved in {s for _, s, _ in points}:
                best = [t for p, s, t in points if p <= peak - slack and s <= saved - slack]
                if best:
                    found = best_ns(family.options, peak, saved)
                    assert found is not None
                    assert found <= min(best) + proven_ns


def test_the_family_has_least_peak_and_saved_bytes() -> None:
    """In the class of the formulation; each alone, and followed by the other."""
    for graph in small_graphs(25):
        options, points = option_family(graph).options, listing(graph)
        found = [(o.peak_bytes, o.saved_bytes) for o in options]
        assert min(found) == min((p, s) for p, s, _ in points)
        assert min((s, p) for p, s in found) == min((s, p) for p, s, _ in points)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(cd_graphs(6), block_graphs(6)))
def test_options_are_legal_priced_and_undominated(graph: CDGraph) -> None:
    family = option_family(graph, settings=Settings(effort=6_000))
    output_bytes = GraphView(graph).bytes_of(graph.outputs)
    for option in family.options:
        schedule = with_frees(graph, option.forward, option.backward)
        verify(graph, schedule)
        found = simulate(graph, schedule)
        assert option == BlockOption(
            forward=option.forward,
            backward=option.backward,
            output_bytes=output_bytes,
            saved_bytes=found.saved_bytes - output_bytes,
            forward_peak_bytes=found.forward_peak_bytes,
            backward_peak_bytes=found.backward_peak_bytes,
            time_ns=found.time_ns,
        )
        others = [o.needs for o in family.options if o is not option]
        assert not any(all(map(operator.le, other, option.needs)) for other in others)
    fastest = family.options[0]
    assert fastest.time_ns == graph.time_ns
    assert fastest.saved_bytes <= price(graph, Orders(*keep_all_order(graph))).saved_bytes


@pytest.mark.parametrize("problem", [mlp_block(), attention_block()], ids=["mlp", "attention"])
def test_transformer_blocks(problem: CDGraph) -> None:
    """Keep-all, nothing saved at all, and peaks below keep-all's; faster options save more."""
    family = option_family(problem, settings=Settings(effort=12_000))
    everything = price(problem, Orders(*keep_all_order(problem)))
    assert family.options[0] == everything
    assert min(o.saved_bytes for o in family.options) <= in_units(problem).reserve_bytes
    assert min(o.peak_bytes for o in family.options) < 0.75 * everything.peak_bytes
    assert family.solves >= 10


def test_answers_keep_the_order_of_the_problems() -> None:
    problems = [draw(seed) for seed in (4, 3, 5)]
    for problem, family in zip(problems, option_families(problems), strict=True):
        assert family == option_family(problem)
    assert option_families([]) == ()


def test_seeds_after_the_deadline() -> None:
    """Keep-all and what keeps least, with which every other one is in between."""
    problem = attention_block()
    few, many = seed_orders(problem, time.process_time()), seed_orders(problem)
    assert len(few) == 3 and set(few) < set(many)
    saved = [{price(problem, o).saved_bytes for o in orders} for orders in (few, many)]
    assert (min(saved[0]), max(saved[0])) == (min(saved[1]), max(saved[1]))


def test_no_time_still_gives_options() -> None:
    """Keep-all and what needs no solver; nothing is proven."""
    problem = attention_block()
    family = option_family(problem, settings=Settings(time_limit_s=0.0))
    assert family.solves == 0
    assert gap_ns(search_corners(problem, Settings(time_limit_s=0.0))) is None
    assert not family.is_complete
    everything = price(problem, Orders(*keep_all_order(problem)))
    assert everything in family.options
    assert min(o.saved_bytes for o in family.options) < 0.05 * everything.saved_bytes
    assert option_families([problem], settings=Settings(time_limit_s=0.0)) == (family,)


def test_problems_too_large_to_solve_have_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pareto_search, "MAX_ENTRIES", 10)
    problem = attention_block()
    family = option_family(problem)
    assert family.solves == 0
    assert gap_ns(search_corners(problem, Settings())) is None
    assert len(family.options) >= 8


def test_a_block_without_backward_has_one_option() -> None:
    graph = draw(1)
    n_forward = len(graph.forward)
    alone = replace(graph, nodes=graph.nodes[:n_forward], held=())
    family = option_family(alone)
    assert family.options == (price(alone, Orders(*keep_all_order(alone))),)
    assert gap_ns(search_corners(alone, Settings())) == 0


SCRIPT = """
import random
from rockplan.graph_builder.digests import graph_digest
from rockplan.graph_builder.partition import partition
from rockplan.ilp.blocks.pareto_search import Settings, option_families
from testing.graphs import attention_block, mlp_block, random_chain
chain, _ = random_chain(random.Random(3), (3, 4, 3))
print(graph_digest(chain), *(block.digest for block in partition(chain)))
print(option_families([mlp_block(), attention_block()], settings=Settings(effort=3_000)))
"""


def test_no_digest_or_family_depends_on_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """Of hashes: this process has one of its own."""
    exec(SCRIPT, {})
    other = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONHASHSEED": "2718", "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout == capsys.readouterr().out != ""


def loop(steps: int) -> CDGraph:
    """Each step reads what the one before has made; so does its backward node."""
    r = Roofline()
    made = [r.source(DataKind.INPUT, 8, "x")]
    for k in range(steps):
        made += r.forward(f"step {k}", [made[-1]], {f"h{k}": 8})
    gradient = r.source(DataKind.TANGENT, 8, "g")
    for k in reversed(range(steps)):
        gradient = r.backward(f"back {k}", [gradient, made[k + 1]], {f"g{k}": 8})
    return r.draft.finish((made[-1],), (gradient,), rng_state_bytes=0)


@pytest.mark.parametrize(("steps", "makes_all_for_each_reader"), [(30, True), (400, False)])
def test_seeds_of_loops(steps: int, makes_all_for_each_reader: bool) -> None:
    """Of a long one none takes the square of its steps."""
    lengths = [len(orders.backward) for orders in seed_orders(loop(steps))]
    squared = steps + steps * (steps - 1) // 2
    assert (max(lengths) >= squared) == makes_all_for_each_reader
    assert sorted(lengths)[-2] <= 2 * steps
