"""The generators of the tests themselves: everything they make is legal and consistent."""

from __future__ import annotations

import random

from hypothesis import given

from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.block import Block
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.schedule import keep_all
from testing.graphs import (
    attention_block,
    block_graphs,
    cd_graphs,
    chains,
    mlp_block,
    repeated_chain,
)


@given(cd_graphs())
def test_random_graphs_are_legal(graph: CDGraph) -> None:
    verify(graph, keep_all(graph))
    assert simulate(graph, keep_all(graph)).time_ns == graph.time_ns


@given(block_graphs())
def test_random_blocks_are_legal(problem: CDGraph) -> None:
    verify(problem, keep_all(problem))
    assert any(d.kind is DataKind.TANGENT for d in problem.data)


@given(chains())
def test_blocks_of_a_chain_cover_it(chain: tuple[CDGraph, tuple[Block, ...]]) -> None:
    graph, blocks = chain
    verify(graph, keep_all(graph))
    covered = [
        *(i for b in blocks for i in b.forward),
        *(i for b in reversed(blocks) for i in b.backward),
    ]
    assert covered == list(range(len(graph.nodes)))
    for block in blocks:
        verify(block.problem, keep_all(block.problem))
        for local, index in enumerate((*block.forward, *block.backward)):
            assert block.problem.nodes[local].time_ns == graph.nodes[index].time_ns


def test_inner_blocks_of_a_repeated_chain_are_alike() -> None:
    for seed in range(20):
        graph, blocks = repeated_chain(random.Random(seed), copies=5)
        verify(graph, keep_all(graph))
        assert len({block.digest for block in blocks[1:-1]}) == 1


def test_transformer_blocks_are_legal() -> None:
    for problem, n_forward, n_backward in ((mlp_block(), 6, 10), (attention_block(), 15, 19)):
        verify(problem, keep_all(problem))
        assert (len(problem.forward), len(problem.backward)) == (n_forward, n_backward)
