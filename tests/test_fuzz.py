"""A few of the networks and uses that `benchmarks/fuzz.py` draws at random, with its checks."""

from __future__ import annotations

import collections

import pytest

from benchmarks import fuzz

SEEDS_OF_A_TEST = 4


@pytest.mark.parametrize("first", range(0, 8, SEEDS_OF_A_TEST))
def test_random_networks_are_as_eager_execution(first: int) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + SEEDS_OF_A_TEST):
        drawn = fuzz.draw(seed)
        outcome, said = fuzz.examine(drawn)
        assert outcome != "wrong", f"seed {seed}: {drawn}\n{said}"
        outcomes[outcome] += 1
    assert outcomes["equal"] >= 2, outcomes
