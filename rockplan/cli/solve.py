"""`rockplan solve`: a plan for each budget, or the curve of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import rockplan
from rockplan.cli import arguments as shared
from rockplan.cli import display
from rockplan.cli.ending import end_with_errors, ending
from rockplan.cli.factory import make_subject
from rockplan.errors import InfeasibleBudget, InvalidInput
from rockplan.options import Options
from rockplan.reports.listing import passes_trace, search_trace
from rockplan.reports.progress_bars import waiting
from rockplan.values.plan import Plan

EXAMPLE = "Example: rockplan solve rockplan.examples:mlp -b 60% -b min"


@shared.planned_with(
    "time_limit",
    "no_cache",
    "compiled",
    "near",
    "size",
    "tile",
    "only_loss",
    "best",
    "solver",
    "host",
    "host_path",
    "link",
    "graph",
)
def solve(
    context: typer.Context,
    model: shared.Model,
    budget: shared.Budgets = None,
    save: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File for the plan, which rockplan.load reads; for several budgets a name "
            "with {budget} in it.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            help="Run two steps of both modules, compare bit for bit, refuse a difference; with "
            "--compile, a step of eager may differ by roundings."
        ),
    ] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="What each pass and each stage of the search left, proved and took."
        ),
    ] = False,
    write_lp: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the integer program of each kind of block, as .lp files.",
        ),
    ] = None,
    as_json: shared.Json = False,
    autocast: shared.Autocast = None,
    optimizer: shared.Optimizer = None,
    accumulate: Annotated[
        int, typer.Option(metavar="N", help="With --optimizer: passes before each step of it.")
    ] = 1,
) -> None:
    """Plan MODEL under each budget; without a budget, the whole curve of memory and time."""
    with ending(as_json), waiting():
        _check_save(save, budget or [])
        subject = make_subject(model)
        if write_lp is not None and not budget:
            raise InvalidInput("--write-lp needs a --budget, which the programs keep")
        options = shared.planning_options(context.params)
        with shared.under_autocast(subject, autocast):
            if options.sizes:
                from rockplan.solving.captured_calls import arguments, calls_of

                args, kwargs = arguments(**subject.call)
                largest = calls_of(subject.model, args, kwargs, options)[0]
                typer.echo(f"rockplan: planned for {largest}", err=True)
            curve = None if budget else rockplan.pareto(**subject.call, options=options)
            trained = {"optimizer": optimizer, "step": rockplan.TrainingStep(accumulate)}
            plans = _plans(budget, options, subject.call | trained) if budget else ()
        pairs = tuple(zip(budget or (), plans, strict=True))
        files = [_saved(save, asked, plan) for asked, plan in pairs]
        programs: list[Path] = []
        if write_lp is not None:
            from rockplan.search.block_families import write_programs

            for asked, plan in pairs:
                if isinstance(plan, Plan):
                    suffix = f"-{asked.replace('%', 'pct')}"
                    programs += write_programs(plan, Path(write_lp), suffix)
    if curve is not None:
        if as_json:
            display.print_json({"model": model, "curve": display.curve_row(curve)})
        else:
            print(display.printable(str(curve)))
        return
    _show_solved(model, [asked for asked, _ in pairs], plans, files, as_json)
    for path in programs:
        typer.echo(f"written: {path}", err=True)
    if trace and not as_json:
        for asked, plan in pairs:
            if isinstance(plan, Plan):
                print(f"\npasses\n{passes_trace(plan.passes)}")
                print(f"\nsearch for {asked}\n{search_trace(plan)}")
    end_with_errors(plans)


def _plans(
    budgets: list[str], options: Options, call: dict[str, Any]
) -> tuple[Plan | InfeasibleBudget, ...]:
    from rockplan.api import plan_each

    if options.check or options.numerics == "best":  # whose options are others for each budget
        return tuple(_plan_or_error(asked, options, call) for asked in budgets)
    return plan_each(budgets=budgets, options=options, **call)


def _plan_or_error(budget: str, options: Options, call: dict[str, Any]) -> Plan | InfeasibleBudget:
    try:
        if options.check:
            return rockplan.plan_of(rockplan.solve(budget=budget, options=options, **call))
        return rockplan.plan(budget=budget, options=options, **call)
    except InfeasibleBudget as error:
        return error


def _check_save(name: str | None, budgets: list[str]) -> None:
    if name is None:
        return
    if not budgets:
        raise InvalidInput("--save needs a --budget to make a plan for")
    if len(budgets) > 1 and "{budget}" not in name:
        raise InvalidInput(
            f"--save {name} would be written {len(budgets)} times; put {{budget}} into the name"
        )
    if not Path(name).name or Path(name).is_dir():
        raise InvalidInput(f"--save '{name}' names no file; name the file to write")
    if not Path(name).parent.is_dir():
        raise InvalidInput(f"there is no folder {Path(name).parent} for --save {name}")


def _saved(name: str | None, asked: str, plan: Plan | InfeasibleBudget) -> str | None:
    """None if no file is wanted or the budget is too small."""
    if name is None or isinstance(plan, InfeasibleBudget):
        return None
    path = name.replace("{budget}", asked.replace("%", "pct"))
    rockplan.save_plan(plan, path)
    return path


def _show_solved(
    model: str,
    budgets: list[str],
    plans: tuple[Plan | InfeasibleBudget, ...],
    files: list[str | None],
    as_json: bool,
) -> None:
    """files: of each plan, None for none."""
    if as_json:
        rows = [
            display.infeasible_row(asked, plan)
            if isinstance(plan, InfeasibleBudget)
            else {**display.plan_row(asked, plan), "file": file}
            for asked, plan, file in zip(budgets, plans, files, strict=True)
        ]
        display.print_json({"model": model, "plans": rows})
        return
    if len(plans) == 1 and isinstance(plans[0], Plan):
        print(display.printable(str(plans[0])))
    else:
        display.show_plans(budgets, plans)
    for file in files:
        if file is not None:
            typer.echo(f"written: {file}", err=True)
