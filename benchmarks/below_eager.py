"""By how much does keeping everything need less memory than eager?

    python -m benchmarks.below_eager [gpt2 resnet18 ...]

Nothing is computed again: the budget is 100 %. For each model of benchmarks/priced.py the peak of
eager, of the plan whose results have storages of their own, and of the plan whose results take over
the storages of operands that die. Peaks are measured, beside what was predicted.

Writes benchmarks/results/below_eager.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import rockplan
from benchmarks.models import Case
from benchmarks.priced import CASES
from benchmarks.timing import machine, mebibytes
from rockplan.codegen import module as planned_modules
from rockplan.codegen.module import Program
from rockplan.graph import without_takes
from rockplan.schedule import taken_over
from rockplan.simulate import simulate

RESULT = Path(__file__).parent / "results" / "below_eager.md"


@dataclass(frozen=True, slots=True)
class Row:
    """Peaks of one model; own: every result in a storage of its own; taken: how many are not."""

    model: str
    eager_bytes: int
    own_predicted_bytes: int
    own_bytes: int
    predicted_bytes: int
    bytes: int
    taken: int
    operations: int


def measure(name: str) -> Row:
    torch.manual_seed(0)
    case = CASES[name]()
    options = rockplan.Options(cache=False)
    planned = rockplan.solve(
        case.model, case.args, "100%", sample_kwargs=case.kwargs, options=options
    )
    program: Program = planned._rockplan.latest
    plan = program.plan
    plain = planned_modules.build_program(
        replace(plan, graph=without_takes(plan.graph)),
        program.interface,
        program.constants,
        program.output_spec,
    )
    return Row(
        model=name,
        eager_bytes=peak_bytes(case, case.model),
        own_predicted_bytes=simulate(without_takes(plan.graph), plan.schedule).peak_bytes,
        own_bytes=peak_bytes(case, planned_modules.bound_forward(case.model, plain)),
        predicted_bytes=plan.peak_bytes,
        bytes=peak_bytes(case, planned),
        taken=len(taken_over(plan.graph, plan.schedule)),
        operations=len(plan.schedule.computes),
    )


def peak_bytes(case: Case, forward: Callable[..., Any]) -> int:
    def step() -> None:
        result = forward(*case.args, **case.kwargs)  # held through backward, as plans assume
        case.loss(result).backward()

    return rockplan.peak_live_bytes(step)[0]


def report(rows: list[Row], models: list[str]) -> str:
    lines = [
        "# Keeping everything, below eager",
        "",
        f"`{' '.join(['python -m benchmarks.below_eager', *models])}` on {machine()}, "
        f"{time.strftime('%Y-%m-%d')}.",
        "",
        "Peaks in MiB beyond parameters, buffers, inputs and `.grad`, measured; in brackets what",
        "was predicted. *Own storages*: as plans were before results took over those of operands.",
        "",
        "| model | eager | own storages | taking over | below eager | results that take over |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model} | {mebibytes(r.eager_bytes)} "
        f"| {mebibytes(r.own_bytes)} ({mebibytes(r.own_predicted_bytes)}) "
        f"| {mebibytes(r.bytes)} ({mebibytes(r.predicted_bytes)}) "
        f"| {1 - r.own_bytes / r.eager_bytes:.1%} -> {1 - r.bytes / r.eager_bytes:.1%} "
        f"| {r.taken} of {r.operations} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[[], *CASES], default=[])
    models = parser.parse_args().models
    torch.set_num_threads(1)
    rows = [measure(name) for name in models or CASES]
    RESULT.write_text(report(rows, models))
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
