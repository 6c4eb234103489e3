"""Limits: how much a search may do. Effort is counted; the clock is a last stop.

The same call leads to the same plan on a slow and on a busy machine, unless the deadline strikes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from rockplan.ilp.blocks.pareto_search import Settings
from rockplan.search.local.exchange import ExchangeLimits
from rockplan.search.local.greedy_eviction import EvictionLimits


@dataclass(frozen=True, slots=True)
class Limits:
    """deadline: as of time.monotonic, after which only what leads to a first schedule runs.
    nearness: share of the time of one iteration; a schedule that is proven to be so near the
    fastest one is taken. proof_s: seconds for integer programs that raise the proven bound.
    without: names of stages that do not run. combining_s: seconds beyond the deadline for the table
    of a chain, which is nothing before it is filled. The others are in the currency of their
    algorithm.

    Of the search for the least peak: missing: relaxations within less and less end with those that
    lead to nothing, and this is the sum of their nodes; rungs: from how many of the others
    exchanges begin; worth: how many times as much as the best start another one may need; again:
    how often exchanges begin at a faster schedule within the best peak; ends: of the options of
    blocks.

    paging: nodes of all graphs that are planned with storages on the host; paging_again: how often
    for one amount, without what is late."""

    deadline: float = math.inf
    nearness: float = 0.01
    proof_s: float = 0.0
    without: frozenset[str] = frozenset()
    exchange: ExchangeLimits = ExchangeLimits()
    squeeze: ExchangeLimits = ExchangeLimits(effort=800_000)
    eviction: EvictionLimits = EvictionLimits()
    blocks: Settings = Settings()
    ends: Settings = Settings(effort=3_000)
    combining_s: float = 5.0
    paging: int = 6_000
    paging_again: int = 4
    missing: int = 1_250
    rungs: int = 2
    worth: float = 1.5
    again: int = 1

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline
