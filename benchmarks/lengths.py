"""Training with batches of many lengths: seconds of 30 steps with 20 lengths, planned and eager.

    python -m benchmarks.lengths [tiny second ...]

Every length that is new costs planning, which the training waits for. Each row is a process of its
own that trains a module planned for the longest batch under 60 % of what eager needs there, and
the eager one, on the same batches; losses and gradients are compared bit by bit. The first plan is
made before the clock starts: its seconds have a column of their own. CPU seconds, on one thread,
since machines are shared.

Rows of earlier commits stay: run the command there again to have a row of it. Writes
benchmarks/results/lengths.jsonl and lengths.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

import rockplan
from benchmarks.timing import where
from testing import models
from testing.models import Case

RESULTS = Path(__file__).parent / "results"
BUDGET = "60%"
STEPS, LENGTHS = 30, 20

CASES: dict[str, tuple[Callable[[int], Case], int]] = {
    "tiny": (lambda n: models.llama(layers=4, width=64, vocabulary=256, batch=4, length=n), 160),
    "tiny-gpt2": (lambda n: models.gpt2(layers=4, width=64, batch=4, length=n), 160),
    "second": (
        lambda n: models.llama(layers=12, width=256, vocabulary=1024, batch=4, length=n),
        512,
    ),
}
"""With the longest length; the shortest is two thirds of it."""


@dataclass(frozen=True, slots=True)
class Row:
    """CPU seconds of all steps; ms of one: `eager_ms` in the median, and the median of those with a
    length that is new. ratio: planned to eager."""

    model: str
    commit: str
    where: str
    eager_s: float
    planned_s: float
    first_plan_s: float
    eager_ms: float
    new_length_ms: float
    ratio: float


def lengths_of(longest: int) -> list[int]:
    """Of each step: the first 20 all differ."""
    drawn = random.Random(0)
    known = drawn.sample(range(2 * longest // 3, longest), LENGTHS)
    return known + drawn.choices(known, k=STEPS - LENGTHS)


def step_s(module: nn.Module, case: Case, length: int) -> tuple[float, torch.Tensor]:
    """CPU seconds of a step on the first tokens of the batch, and its loss."""
    kwargs = {name: t[:, :length].contiguous() for name, t in case.kwargs.items()}
    module.zero_grad()
    started = time.process_time()
    loss = case.loss(module(*case.args, **kwargs))
    loss.backward()
    return time.process_time() - started, loss.detach()


def measured(name: str) -> Row:
    """Train both modules of a case in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, longest = CASES[name]
    case = make(longest)
    eager = copy.deepcopy(case.model)
    started = time.process_time()
    options = rockplan.Options(cache=False)
    planned = rockplan.solve(
        case.model, case.args, BUDGET, sample_kwargs=case.kwargs, options=options
    )
    first_plan_s = time.process_time() - started
    for module in (eager, planned):
        step_s(module, case, longest)
    eager_s, planned_s = [], []
    for step, length in enumerate(lengths_of(longest)):
        losses = []
        for module, seconds in ((eager, eager_s), (planned, planned_s)):
            torch.manual_seed(step)
            taken_s, loss = step_s(module, case, length)
            seconds.append(taken_s)
            losses.append(loss)
        assert torch.equal(*losses)
        for a, b in zip(eager.parameters(), planned.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    return Row(
        model=name,
        commit=where().partition(",")[0],
        where=where().partition(", ")[2],
        eager_s=round(sum(eager_s), 2),
        planned_s=round(sum(planned_s), 2),
        first_plan_s=round(first_plan_s, 1),
        eager_ms=round(1e3 * median(eager_s), 1),
        new_length_ms=round(1e3 * median(planned_s[:LENGTHS]), 1),
        ratio=round(sum(planned_s) / sum(eager_s), 2),
    )


def report(rows: list[Row]) -> str:
    lines = [
        "# Lengths",
        "",
        f"`python -m benchmarks.lengths`: {STEPS} steps with {LENGTHS} lengths of batches, planned "
        f"for the longest under {BUDGET} of eager's peak, in CPU seconds on one thread; gradients "
        "equal to eager's bit by bit. A step with a new length plans for it.",
        "",
        "| model | commit | eager s | planned s | times eager | first plan s | eager step ms | "
        "step with a new length ms | in steps of eager |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model} | {r.commit} | {r.eager_s:.2f} | {r.planned_s:.2f} | {r.ratio:.2f} | "
        f"{r.first_plan_s:.1f} | {r.eager_ms:.1f} | {r.new_length_ms:.0f} | "
        f"{r.new_length_ms / r.eager_ms:.1f} |"
        for r in rows
    ]
    lines += ["", "Where and when:", "", *dict.fromkeys(f"- {r.where}" for r in rows)]
    return "\n".join(lines) + "\n"


def in_own_process(name: str) -> Row:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.lengths", "--here", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES), metavar="MODEL")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(asdict(measured(arguments.here))))
        return
    path = RESULTS / "lengths.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = {(r.model, r.commit): r for r in (Row(**json.loads(line)) for line in lines)}
    for name in arguments.models:
        row = in_own_process(name)
        print(json.dumps(asdict(row), indent=1), flush=True)
        found[row.model, row.commit] = row
        rows = [r for n in CASES for (model, _), r in found.items() if model == n]
        path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
        (RESULTS / "lengths.md").write_text(report(rows))


if __name__ == "__main__":
    main()
