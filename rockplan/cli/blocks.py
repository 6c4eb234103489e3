"""`rockplan blocks`: the repeated blocks of a model planned one by one, for each budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

import rockplan
from rockplan.blocks.report import BlocksPlan, PlacedBlock
from rockplan.cli import arguments as shared
from rockplan.cli import display
from rockplan.cli.ending import end_with_errors, ending
from rockplan.cli.factory import make_subject
from rockplan.errors import InfeasibleBudget, InvalidInput
from rockplan.reports.progress_bars import waiting
from rockplan.values.plan import keeps_and_recomputes

EXAMPLE = "Example: rockplan blocks rockplan.examples:transformer 'layers.*' -b 40%"

Patterns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATTERN]...",
        help="Which submodules are the blocks, such as 'model.layers.*'; those that repeat, if "
        "none is named.",
    ),
]


@shared.planned_with("time_limit", "no_cache", "compiled", "near", "size")
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
            chosen = {"blocks": pattern or None, "optimizer": optimizer, "options": options}
            solved: list[SolvedBlocks | InfeasibleBudget] = []
            for asked in budget:
                try:
                    solved.append(_solved(asked, subject.call | chosen))
                except InfeasibleBudget as error:
                    solved.append(error)
                finally:
                    rockplan.restore_blocks(subject.model)
    if as_json:
        rows = [
            one.row if isinstance(one, SolvedBlocks) else display.infeasible_row(asked, one)
            for asked, one in zip(budget, solved, strict=True)
        ]
        display.print_json({"model": model, "plans": rows})
    else:
        plans = [one for one in solved if isinstance(one, SolvedBlocks)]
        print(display.printable("\n\n\n".join(map(str, plans))))
    end_with_errors(solved)


@dataclass(frozen=True, slots=True)
class SolvedBlocks:
    """The plan for one budget. kinds: of blocks with the same graph and option: (number, the first
    of them, what each keeps or returns, what it recomputes)."""

    asked: str
    plan: BlocksPlan
    kinds: tuple[tuple[int, PlacedBlock, str, str], ...]

    def __str__(self) -> str:
        lines = [f"asked           {self.asked}", str(self.plan)]
        for count, first, keeps, recomputes in self.kinds:
            lines += ["", f"kind {first.kind}, such as {first.path}  x{count}"]
            lines += [f"    keeps or returns  {keeps}", f"    recomputes        {recomputes}"]
        return "\n".join(lines)

    @property
    def row(self) -> display.Row:
        """The plan as a row of the command's JSON: bytes and ns, shares as fractions, and a row for
        each block."""
        plan = self.plan
        return {
            "budget": self.asked,
            "feasible": True,
            **display.members(
                plan, "budget_bytes peak_bytes eager_peak_bytes saved_bytes overhead"
            ),
            "before_first_block_bytes": plan.first_bytes,
            "between_blocks_bytes": plan.beside.outside_bytes,
            "blocks": [_placed_row(block) for block in plan.blocks],
            "left": [{"path": path, "why": why} for path, why in plan.left],
        }


def _placed_row(block: PlacedBlock) -> display.Row:
    return {
        **display.members(block, "path kind"),
        **display.members(
            block.option, "saved_bytes forward_peak_bytes backward_peak_bytes time_ns"
        ),
        "eager_time_ns": block.eager.time_ns,
    }


def _solved(asked: str, call: dict[str, Any]) -> SolvedBlocks:
    """Leaves planned blocks in the model."""
    model = rockplan.solve_blocks(budget=asked, **call)
    plan = rockplan.blocks_of(model)
    alike: dict[object, list[PlacedBlock]] = {}
    for block in plan.blocks:
        alike.setdefault((block.kind, block.option), []).append(block)
    kinds = []
    for first, *others in alike.values():
        of_first = rockplan.plan_of(model.get_submodule(first.path))
        kinds.append((1 + len(others), first, *keeps_and_recomputes(of_first)))
    return SolvedBlocks(asked, plan, tuple(kinds))
