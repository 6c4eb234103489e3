"""Pareto families of block options.

takes: the problem of a block. returns: OptionFamily. guarantees: keep-all is in it; no option
dominates another; every option is legal (`verify`) and priced by `simulate`; `pareto_search` says
what is proven of the family.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rockplan.ilp.blocks.decode import pareto, price
from rockplan.ilp.blocks.pareto_search import Settings, clock_s, search_corners
from rockplan.values.block import OptionFamily
from rockplan.values.graph import CDGraph
from rockplan.values.progress import report

DEFAULT = Settings()

THREADS = 2
"""Problems solved at once: HiGHS runs without Python's lock, on one thread each."""


def option_family(problem: CDGraph, *, settings: Settings = DEFAULT) -> OptionFamily:
    """Return the Pareto options of one block, fastest first."""
    search = search_corners(problem, settings)
    options = pareto([price(problem, answer.orders) for answer in search.answers])
    return OptionFamily(options, search.solves, is_complete=not search.is_cut)


def option_families(
    problems: Sequence[CDGraph], *, settings: Settings = DEFAULT
) -> tuple[OptionFamily, ...]:
    """Return for each block (its graph) the family of its options, in the order of `problems`.
    Blocks are solved in THREADS threads, small ones first; `settings.time_limit_s` is for all of
    them, and each gets an equal share of what is left when it begins. Reports progress."""
    order = sorted(range(len(problems)), key=lambda k: len(problems[k].nodes))
    deadline = clock_s(settings.solver) + settings.time_limit_s

    def solve_one(position: int) -> OptionFamily:
        waiting = len(order) - position
        remaining_s = max(deadline - clock_s(settings.solver), 0.0)
        own = replace(settings, time_limit_s=remaining_s * min(1.0, THREADS / waiting))
        return option_family(problems[order[position]], settings=own)

    families: dict[int, OptionFamily] = {}
    report("solving blocks", 0, len(order))
    threads = ThreadPoolExecutor(max_workers=THREADS)
    try:
        for k, family in zip(order, threads.map(solve_one, range(len(order))), strict=True):
            families[k] = family
            report("solving blocks", len(families), len(order))
    finally:
        # An interrupt does not wait for the solver.
        threads.shutdown(wait=False, cancel_futures=True)
    return tuple(families[k] for k in range(len(problems)))
