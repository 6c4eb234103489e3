"""`rockplan blocks`: the repeated blocks of a model planned one by one, for each budget."""

from __future__ import annotations

import functools
from typing import Annotated

import typer

import rockplan
from rockplan.blocks.report import BlocksPlan
from rockplan.cli import arguments as shared
from rockplan.cli import display
from rockplan.cli.ending import end_with_errors, ending
from rockplan.cli.factory import make_subject
from rockplan.errors import InfeasibleBudget, InvalidInput
from rockplan.reports.progress_bars import waiting

EXAMPLE = "Example: rockplan blocks rockplan.examples:transformer 'layers.*' -b 40%"

Patterns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATTERN]...",
        help="Which submodules are the blocks, such as 'model.layers.*'; those that repeat, if "
        "none is named.",
    ),
]


@shared.planned_with(
    "time_limit", "no_cache", "compiled", "near", "best", "size", "host", "host_path", "link"
)
def blocks(
    context: typer.Context,
    model: shared.Model,
    pattern: Patterns = None,
    budget: shared.Budgets = None,
    as_json: shared.Json = False,
    autocast: shared.Autocast = None,
    optimizer: shared.Optimizer = None,
) -> None:
    """Plan the repeated blocks of MODEL one by one, and measure what the rest of a step needs."""
    with ending(as_json), waiting():
        if not budget:
            raise InvalidInput("blocks are planned for a --budget of a whole step; name one")
        subject = make_subject(model)
        options = shared.planning_options(context.params)
        with shared.under_autocast(subject, autocast):
            solve = functools.partial(
                rockplan.solve_blocks,
                **subject.call,
                blocks=pattern or None,
                optimizer=optimizer,
                options=options,
            )
            solved: list[BlocksPlan | InfeasibleBudget] = []
            for asked in budget:
                try:
                    solved.append(rockplan.blocks_of(solve(budget=asked)))
                except InfeasibleBudget as error:
                    solved.append(error)
                finally:
                    rockplan.restore_blocks(subject.model)
    if as_json:
        rows = [
            _row(asked, one) if isinstance(one, BlocksPlan) else display.infeasible_row(asked, one)
            for asked, one in zip(budget, solved, strict=True)
        ]
        display.print_json({"model": model, "plans": rows})
    else:
        found = zip(budget, solved, strict=True)
        plans = [f"asked           {a}\n{one}" for a, one in found if isinstance(one, BlocksPlan)]
        print(display.printable("\n\n\n".join(plans)))
    end_with_errors(solved)


def _row(asked: str, plan: BlocksPlan) -> display.Row:
    """Bytes, ns, shares as fractions."""
    sizes = "saved_bytes forward_peak_bytes backward_peak_bytes time_ns"
    return {
        "budget": asked,
        "feasible": True,
        **display.members(plan, "budget_bytes peak_bytes eager_peak_bytes saved_bytes overhead"),
        "before_first_block_bytes": plan.first_bytes,
        "between_blocks_bytes": plan.beside.outside_bytes,
        "blocks": [
            display.members(block, "path kind paged_bytes")
            | display.members(block.option, sizes)
            | {"eager_time_ns": block.eager.time_ns}
            for block in plan.blocks
        ],
        "left": [{"path": path, "why": why} for path, why in plan.left],
    }
