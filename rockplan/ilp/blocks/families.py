"""Pareto families of block options.

takes: the problem of a block. returns: OptionFamily. guarantees: keep-all is in it; no option
dominates another; every option is legal (`verify`) and priced by `simulate`; what is proven of
the family is said in `pareto_search`.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rockplan.ilp.blocks.decode import pareto, price
from rockplan.ilp.blocks.pareto_search import Settings, search_corners
from rockplan.values.block import OptionFamily
from rockplan.values.graph import CDGraph
from rockplan.values.progress import report

DEFAULT = Settings()

THREADS = 2
"""Problems solved at once: HiGHS runs without Python's lock, on one thread each."""


def option_family(problem: CDGraph, *, settings: Settings = DEFAULT) -> OptionFamily:
    """The Pareto options of one block, fastest first."""
    search = search_corners(problem, settings)
    options = pareto([price(problem, answer.orders) for answer in search.answers])
    return OptionFamily(options, search.solves, is_complete=not search.is_cut)


def option_families(
    problems: Sequence[CDGraph], *, settings: Settings = DEFAULT
) -> tuple[OptionFamily, ...]:
    """The family of each problem; problems that look alike to the solver are solved once.

    Two at a time, small ones first; what they leave of the time limit goes to the large ones.
    """
    views = [_view(p) for p in problems]
    distinct = dict(zip(views, problems, strict=True))
    order = sorted(distinct, key=lambda view: len(distinct[view].nodes))
    deadline = time.monotonic() + settings.time_limit_s

    def solve_one(position: int) -> OptionFamily:
        waiting = len(order) - position
        remaining_s = max(deadline - time.monotonic(), 0.0)
        share_s = remaining_s * min(1.0, THREADS / waiting)
        own = replace(settings, time_limit_s=share_s)
        return option_family(distinct[order[position]], settings=own)

    families: dict[Hashable, OptionFamily] = {}
    report("solving blocks", 0, len(order))
    threads = ThreadPoolExecutor(max_workers=THREADS)
    try:
        for view, family in zip(order, threads.map(solve_one, range(len(order))), strict=True):
            families[view] = family
            report("solving blocks", len(families), len(order))
    finally:
        # An interrupt does not wait for the solver.
        threads.shutdown(wait=False, cancel_futures=True)
    return tuple(families[view] for view in views)


def _view(problem: CDGraph) -> Hashable:
    """All of a problem that its options depend on: no names, no calls."""
    return (
        tuple((d.kind, d.size_bytes) for d in problem.data),
        tuple(
            (
                n.phase,
                n.reads,
                n.writes,
                n.time_ns,
                n.workspace_bytes,
                n.random,
                n.recomputable,
                n.takes,
            )
            for n in problem.nodes
        ),
        (problem.outputs, problem.held, problem.handed, problem.dropped),
        problem.rng_state_bytes,
    )
