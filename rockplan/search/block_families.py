"""Options of blocks: solved once for equal blocks, and read from the cache if they are there; their
integer programs as files.

takes: Blocks, a Cache. returns: a family of options for each block. guarantees: an option from the
cache is a legal schedule of the block with the bytes and time that it states.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from rockplan.errors import IllegalSchedule
from rockplan.graph_builder.partition import partition
from rockplan.ilp.blocks.formulate import entries, formulate
from rockplan.ilp.blocks.pareto_search import MAX_ENTRIES, Settings, option_families
from rockplan.ilp.blocks.stages import find_stages
from rockplan.ilp.scaling import UNLIMITED, in_units
from rockplan.oracles.constraints import with_room_for_loss
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.store.cache import Cache
from rockplan.store.fingerprint import planner
from rockplan.values.block import Block, BlockOption, OptionFamily
from rockplan.values.graph import CDGraph
from rockplan.values.plan import Plan
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


def write_programs(plan: Plan, folder: Path, suffix: str = "") -> tuple[Path, ...]:
    """Write an integer program in CPLEX's LP format for each kind of block: its fastest schedule
    alone within the plan's budget, less what lives across the block. Returns the files:
    `block-N.lp`, where N is the number of the first block of the kind; suffix: follows it. A kind
    without a choice, or that is too large, has none."""
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}
    graph = with_room_for_loss(plan.graph, plan.eager_peak_bytes)
    for number, block in enumerate(partition(graph)):
        units = in_units(block.problem)
        stages = find_stages(units)
        if block.digest in written or not 0 < entries(stages) <= MAX_ENTRIES:
            continue
        path = folder / f"block-{number}{suffix}.lp"
        peak_bytes = plan.budget_bytes - units.reserve_bytes
        formulate(stages).limited(peak_bytes, UNLIMITED).writeLP(str(path))
        written[block.digest] = path
    return tuple(written.values())
