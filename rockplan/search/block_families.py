"""Options of blocks: solved once for equal blocks, and read from the cache if they are there.

takes: Blocks, a Cache. returns: a family of options for each block. guarantees: an option from the
cache is a legal schedule of the block with the bytes and time that it states.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from rockplan.errors import IllegalSchedule
from rockplan.ilp.blocks.families import option_families
from rockplan.ilp.blocks.pareto_search import Settings
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.store.cache import Cache
from rockplan.store.fingerprint import planner
from rockplan.values.block import Block, BlockOption, OptionFamily
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import with_frees


def families(
    blocks: tuple[Block, ...], cache: Cache | None, settings: Settings, limit_s: float
) -> list[OptionFamily]:
    """Return the family of options of each block, from the cache or solved now and put there;
    blocks with one digest are solved once. limit_s: seconds for what has to be solved, if less than
    the time limit of `settings`; with 0 or less a result that is cut short is not cached."""
    problems = {b.digest: b.problem for b in blocks}
    known: dict[str, OptionFamily] = {}
    for digest, problem in problems.items():
        is_its_own = functools.partial(is_legal, problem)
        stored = cache.family(family_key(digest, settings), is_its_own) if cache else None
        if stored is not None:
            known[digest] = stored
    missing = {d: p for d, p in problems.items() if d not in known}
    limited = replace(settings, time_limit_s=min(settings.time_limit_s, max(limit_s, 0.0)))
    solved = option_families(list(missing.values()), settings=limited)
    for digest, family in zip(missing, solved, strict=True):
        known[digest] = family
        # A family found with no time at all is poor: it is not cached.
        if cache and (family.is_complete or limit_s > 0):
            cache.put_family(family_key(digest, settings), family)
    return [known[b.digest] for b in blocks]


def family_key(digest: str, settings: Settings | str) -> dict[str, str]:
    return {"block": digest, "settings": str(settings), "planner": planner()}


def is_legal(problem: CDGraph, option: BlockOption) -> bool:
    """True if the option is a legal schedule of `problem`, and has the peaks and the time by
    `simulate` that it states."""
    if any(i >= len(problem.nodes) for i in (*option.forward, *option.backward)):
        return False
    schedule = with_frees(problem, option.forward, option.backward)
    try:
        verify(problem, schedule)
    except IllegalSchedule:
        return False
    simulation = simulate(problem, schedule)
    return (simulation.forward_peak_bytes, simulation.backward_peak_bytes, simulation.time_ns) == (
        option.forward_peak_bytes,
        option.backward_peak_bytes,
        option.time_ns,
    )
