"""Blocks planned one by one beside the plan of the whole, at the same measured peak.

A Llama and a GPT-2 with random weights, the ones of benchmarks.compare, and that Llama without its
head and loss, which run beside the blocks and own much of the peak where memory is short. For each
budget of `rockplan.solve_blocks`, `rockplan.solve` gets the measured peak of the step with planned
blocks as its budget; `torch.utils.checkpoint` per layer is a budget, too. All variants of a model
are timed in one run, one of each a round, as ratios to eager's time of the round.

    OMP_NUM_THREADS=1 python -m benchmarks.blocks [--models llama gpt2] [--rounds 9] [--note TEXT]

Writes benchmarks/results/blocks.md, where models that are not run stay as they are.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rockplan
from benchmarks.timing import interleaved_seconds, machine, mebibytes
from rockplan.runtime import checkpointing
from testing import models
from testing.models import Case

RESULT = Path(__file__).parent / "results" / "blocks.md"


def body(make: Callable[[], Case]) -> Case:
    """The decoder of a causal model, with a loss that needs little."""
    whole = make()
    kwargs = {"input_ids": whole.kwargs["input_ids"]}
    return Case("body", whole.model.model, (), kwargs, _mean_square)


def _mean_square(result: Any) -> torch.Tensor:
    return result.last_hidden_state.pow(2).mean()


LLAMA = partial(models.llama, layers=6, width=192, heads=6, vocabulary=1024, batch=4, length=256)
CASES: dict[str, Callable[[], Case]] = {
    "llama": LLAMA,
    "llama without head and loss": partial(body, LLAMA),
    "gpt2": partial(
        models.gpt2,
        layers=6,
        width=192,
        heads=6,
        vocabulary=1024,
        batch=4,
        length=192,
        attention="eager",
    ),
}
SHARES = ("min", "checkpoint", "35%", "50%")


@dataclass(frozen=True, slots=True)
class Variant:
    """A step, its measured peak, what was predicted of it, and how long it took to plan."""

    name: str
    step: Callable[[], object]
    peak_bytes: int
    predicted_bytes: int | None = None
    overhead: float | None = None
    seconds: float | None = None


def variants(case: Case) -> list[Variant]:
    """Eager first; for each budget the blocks, then the whole at their peak."""

    def measured(name: str, module: Any, **more: Any) -> Variant:
        step = partial(case.step, module)
        return Variant(name, step, rockplan.peak_live_bytes(step).peak_bytes, **more)

    eager = measured("eager", checkpointing.sharing_copy(case.model))
    checkpointed = measured("checkpoint per layer", checkpointing.per_block(case.model))
    whole_ns = rockplan.plan(case.model, case.args, "100%", sample_kwargs=case.kwargs).eager_time_ns
    found = [eager, checkpointed]
    for share in SHARES:
        budget: Any = checkpointed.peak_bytes if share == "checkpoint" else share
        since, module = time.process_time(), checkpointing.sharing_copy(case.model)
        rockplan.solve_blocks(module, case.args, budget, sample_kwargs=case.kwargs, loss=case.loss)
        seconds, plan = time.process_time() - since, rockplan.blocks_of(module)
        more_ns = sum(b.option.time_ns - b.eager.time_ns for b in plan.blocks)
        blocks = measured(
            f"blocks {share}",
            module,
            predicted_bytes=plan.peak_bytes,
            overhead=more_ns / whole_ns,
            seconds=seconds,
        )
        found.append(blocks)
        since = time.process_time()
        try:
            whole: Any = rockplan.solve(
                checkpointing.sharing_copy(case.model), case.args, blocks.peak_bytes,
                sample_kwargs=case.kwargs,
            )  # fmt: skip
        except rockplan.InfeasibleBudget as error:
            print(f"the whole at {share}: {error}")
            continue
        found.append(
            measured(
                f"whole at that peak ({share})",
                whole,
                predicted_bytes=whole.plan.peak_bytes,
                overhead=whole.plan.overhead,
                seconds=time.process_time() - since,
            )
        )
    return found


def table(found: list[Variant], rounds: int) -> list[str]:
    times = interleaved_seconds({v.name: v.step for v in found}, rounds)
    lines = [
        "| variant | peak MiB | predicted MiB | time over eager | predicted | planned in CPU s |",
        "|---|---|---|---|---|---|",
    ]
    for v in found:
        ratios = [a / b for a, b in zip(times[v.name], times["eager"], strict=True)]
        lines.append(
            f"| {v.name} | {mebibytes(v.peak_bytes)} "
            f"| {'' if v.predicted_bytes is None else mebibytes(v.predicted_bytes)} "
            f"| {statistics.median(ratios) - 1:+.1%} "
            f"| {'' if v.overhead is None else format(v.overhead, '+.1%')} "
            f"| {'' if v.seconds is None else format(v.seconds, '.1f')} |"
        )
    return lines


INTRODUCTION = """# Blocks beside the plan of the whole

`python -m benchmarks.blocks`: steps with planned blocks (`rockplan.solve_blocks`), and the whole \
planned (`rockplan.solve`) within the peak that these had. Peaks are measured with the result held \
through the backward pass, beyond parameters, gradients and inputs; time is the median of \
interleaved rounds, in user CPU time; planning finds in the cache what rows before it left there.

Where memory is short, blocks cost more than the whole within the same peak: the loss runs beside \
them, as in eager, each block keeps its input, and runs with the least peak of one block; the \
whole may run blocks again from an earlier one.
"""


def section(name: str, rows: list[str], rounds: int, note: str) -> str:
    """What the page says of one model."""
    today = datetime.datetime.now(datetime.UTC).date()
    counted = f"{rounds} round" if rounds == 1 else f"{rounds} rounds"
    said = ", ".join(filter(None, (counted, machine(), str(today), note)))
    return "\n".join([f"## {name}, 6 layers", "", f"{said}.", "", *rows, ""])


def sections(page: str) -> dict[str, str]:
    """What a page says, by model."""
    parts = (f"## {part.strip()}\n" for part in page.split("\n## ")[1:])
    return {part.removeprefix("## ").partition(", 6 layers")[0]: part for part in parts}


def page(found: dict[str, str]) -> str:
    return "\n".join([INTRODUCTION, *(found[name] for name in CASES if name in found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--note", default="", help="what else there is to say of this run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models:
        torch.manual_seed(0)
        case = CASES[name]()
        rows = table(variants(case), arguments.rounds)
        print("\n".join(rows), flush=True)
        known = sections(RESULT.read_text()) if RESULT.exists() else {}
        known[name] = section(name, rows, arguments.rounds, arguments.note)
        RESULT.write_text(page(known))


if __name__ == "__main__":
    main()
