"""The integer programs of blocks, written to files for other solvers or for reading.

takes: a Plan, a folder. returns: the files, one for each kind of block that leaves a choice.
"""

from __future__ import annotations

from pathlib import Path

from rockplan.graph_builder.partition import partition
from rockplan.ilp.blocks.formulate import entries, formulate
from rockplan.ilp.blocks.pareto_search import MAX_ENTRIES
from rockplan.ilp.blocks.stages import find_stages
from rockplan.ilp.scaling import UNLIMITED, in_units
from rockplan.oracles.constraints import with_room_for_loss
from rockplan.values.plan import Plan


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
