"""Option families without a solver, and chains of transformer blocks, for the tests of the chain.

A family holds every saved set with one rule of recomputation: what is not saved is computed again
when a backward node first wants it, and then kept.
"""

from __future__ import annotations

import random

from rockplan.oracles.verify import verify
from rockplan.values.block import BlockOption
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule, keep_all, with_frees
from testing.families import enumerated_family, gpt_problems, join
from testing.graphs import attention_block, mlp_block, random_block


def option_schedule(problem: CDGraph, option: BlockOption) -> Schedule:
    return with_frees(problem, option.forward, option.backward)


def test_options_are_legal_and_start_with_keep_all() -> None:
    for seed in range(50):
        problem = random_block(random.Random(seed), 4).problem
        family = enumerated_family(problem)
        for option in family.options:
            verify(problem, option_schedule(problem, option))
        assert family.options[0].time_ns == problem.time_ns


def test_transformer_blocks_have_rich_families() -> None:
    for problem in (mlp_block(), attention_block()):
        family = enumerated_family(problem, small_bytes=8192)
        assert len(family.options) >= 5
        assert family.options[0].time_ns == problem.time_ns
        assert min(o.saved_bytes for o in family.options) < family.options[0].saved_bytes / 5


def test_joined_problems_are_one_legal_graph() -> None:
    graph, blocks = join(gpt_problems(2))
    verify(graph, keep_all(graph))
    assert graph.time_ns == sum(b.problem.time_ns for b in blocks)
    for block in blocks:
        local = [n.name for n in block.problem.nodes]
        assert [graph.nodes[n].name for n in (*block.forward, *block.backward)] == local
    assert len({b.digest for b in blocks}) == 4
