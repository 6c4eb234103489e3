"""Rotor: keep everything of a block or nothing (Beaumont et al., 2019, arXiv:1911.13214).

The chain's dynamic program with one option for each block. Sizes are not rounded to slots here,
and an input that nobody reads again is dropped, so it is never worse than as published.
"""

from __future__ import annotations

from collections.abc import Sequence

from rockplan.dp.chain_solver import ChainSolver
from rockplan.ilp.blocks.decode import price
from rockplan.values.block import Block, OptionFamily
from rockplan.values.graph import CDGraph
from rockplan.values.order import Orders, keep_all_order


def rotor(graph: CDGraph, blocks: Sequence[Block]) -> ChainSolver:
    """A solver of the chain that asks no integer program."""
    families = [
        OptionFamily((price(b.problem, Orders(*keep_all_order(b.problem))),), 0) for b in blocks
    ]
    return ChainSolver(graph, blocks, families)
