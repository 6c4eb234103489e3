"""Measured peak against measured time: rockplan at several budgets, eager, checkpointing.

GPT-2-like, 6 layers, width 256, 4 x 256 tokens, vocabulary 1024, attention written out, dropout
on. One thread, user CPU time, all variants interleaved in one run, medians of ratios per round.
Writes docs/curve.svg and prints the table.
Command: python -m benchmarks.curve        (needs matplotlib)
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import torch

import rockplan
from benchmarks.gpu_check import checkpointed
from benchmarks.timing import interleaved_seconds, machine, mebibytes, median_ratio
from testing.models import gpt2

BUDGETS = ("min", "15%", "20%", "30%", "40%", "50%", "60%", "80%", "100%")
REPEATS = 9
PICTURE = Path(__file__).parent.parent / "docs" / "curve.svg"


def draw(points: dict[str, tuple[float, float]]) -> None:
    from matplotlib import pyplot

    planned = sorted(p for name, p in points.items() if name.startswith("rockplan"))
    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    axes.plot(*zip(*planned, strict=True), "o-", label="rockplan")
    for name, marker in (("eager", "s"), ("checkpoint per layer", "^")):
        axes.plot(*points[name], marker, markersize=9, label=name)
    axes.set_xlabel("measured peak of activation memory, MiB")
    axes.set_ylabel("measured time over eager, %")
    axes.set_title("GPT-2, 6 layers, attention written out, CPU, one thread")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = gpt2(
        layers=6, width=256, heads=4, vocabulary=1024, batch=4, length=256, attention="eager"
    )
    eager = copy.deepcopy(case.model)
    variants = {"eager": eager, "checkpoint per layer": checkpointed(eager)}
    for budget in BUDGETS:
        variants[f"rockplan {budget}"] = rockplan.solve(case.model, case.kwargs, budget)
    steps = {name: functools.partial(case.step, module) for name, module in variants.items()}
    peaks = {name: rockplan.peak_live_bytes(step).peak_bytes for name, step in steps.items()}
    times = interleaved_seconds(steps, REPEATS)
    print(f"{machine()}; {REPEATS} interleaved rounds")
    print(f"{'variant':22} {'budget':>7} {'predicted':>9} {'measured':>8} {'time':>7} {'gap':>6}")
    points: dict[str, tuple[float, float]] = {}
    for name, module in variants.items():
        overhead = median_ratio(times[name], times["eager"]) - 1
        points[name] = (peaks[name] / 2**20, 100 * overhead)
        plan = module.plan if name.startswith("rockplan") else None
        columns = ("-", "-", "-")
        if plan is not None:
            gap = f"{plan.certificate.gap:.1%}"
            columns = (mebibytes(plan.budget_bytes), mebibytes(plan.peak_bytes), gap)
        print(
            f"{name:22} {columns[0]:>7} {columns[1]:>9} {mebibytes(peaks[name]):>8} "
            f"{overhead:>+7.1%} {columns[2]:>6}"
        )
    draw(points)


if __name__ == "__main__":
    main()
