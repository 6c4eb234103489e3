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
    """How much one search may do.

    deadline: as of time.process_time; afterwards only stages that lead to a first schedule run.
    nearness: share of the iteration time; a schedule that is proven to be so near the fastest ends
    the search, as a peak does that is so near what every schedule needs. proof_s: seconds for
    integer programs that raise the proven bound. without: names of stages that do not run.
    combining_s: seconds beyond the deadline for the table of a chain, which is useless until it is
    complete. exchange, squeeze, eviction, blocks, ends: limits of each algorithm, in its own count
    of effort.

    For the search of the least peak: missing: the sum of the nodes of relaxations that may find no
    schedule; rungs: number of the smallest relaxed schedules from which exchanges begin; worth:
    other starts may need up to so many times the peak of the best one; again: how often exchanges
    begin again from a faster schedule within the best peak; ends: as `blocks`, for options of
    blocks; enough_bytes: a peak of at most so many ends the search.

    paging: nodes of all graphs that are planned with storages on the host, in sum; paging_again:
    how often for one amount, each time without storages that came late.
    """

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
    enough_bytes: int = 0

    @property
    def is_over(self) -> bool:
        return time.process_time() >= self.deadline
