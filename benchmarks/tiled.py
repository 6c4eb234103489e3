"""Heads in parts of their rows: peak, time and distance to eager where the vocabulary is large.

    OMP_NUM_THREADS=1 python -m benchmarks.tiled [--rounds 3] [--vocabulary 32000]

Llama with 4 layers of width 256, 2 x 512 tokens, a quarter of which have no label; the module
returns the loss alone. Eager, `torch.utils.checkpoint` of each block, and rockplan with the head
whole and in parts, under the budgets that the head needs whole at least, a half and a third of
that, and as small as can be. Steps are timed in turns. Writes
benchmarks/results/tiled.{jsonl,md}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rockplan
from benchmarks.timing import interleaved_seconds, mebibytes, where
from rockplan.options import Options
from rockplan.runtime.checkpointing import per_block
from testing.models import Case, llama

RESULTS = Path(__file__).parent / "results"

Row = dict[str, str | float | int | None]


class Loss(nn.Module):
    """Of a model of transformers, the loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(**given).loss
        return loss


def case_of(vocabulary: int) -> Case:
    torch.manual_seed(0)
    made = llama(layers=4, width=256, vocabulary=vocabulary, batch=2, length=512)
    labels = made.kwargs["labels"].clone()
    labels[:, :128] = -100
    kwargs = {**made.kwargs, "labels": labels}
    return replace(made, model=Loss(made.model), kwargs=kwargs, loss=lambda loss: loss)


def planned(case: Case) -> Iterator[tuple[str, nn.Module]]:
    whole = _solved(case, "min", tile=False)
    yield "head whole, smallest", whole
    needed_bytes = rockplan.plan_of(whole).peak_bytes
    budgets = {"as much": needed_bytes, "a half": needed_bytes // 2, "a third": needed_bytes // 3}
    for name, budget in {**budgets, "smallest": "min"}.items():
        with contextlib.suppress(rockplan.InfeasibleBudget):
            module = _solved(case, budget, tile=True)
            parts = rockplan.plan_of(module).graph.tiles
            yield f"head {f'in {parts} parts' if parts else 'whole'}, {name}", module


def _solved(case: Case, budget: str | int, tile: bool) -> nn.Module:
    options = Options(tile=tile)
    return rockplan.solve(case.model, case.args, budget, sample_kwargs=case.kwargs, options=options)


def rows_of(rounds: int, vocabulary: int) -> list[Row]:
    case = case_of(vocabulary)
    ways: dict[str, nn.Module] = {"eager": case.model, "checkpoint": per_block(case.model)}
    ways |= dict(planned(case))
    exact = _gradients(case, case.model)
    steps = {way: partial(case.step, module) for way, module in ways.items()}
    times = interleaved_seconds(steps, rounds)
    return [
        {
            "way": way,
            "peak_bytes": rockplan.peak_live_bytes(steps[way]).peak_bytes,
            "predicted_bytes": _predicted(module),
            "milliseconds": round(1e3 * statistics.median(times[way]), 1),
            "difference": _distance(_gradients(case, module), exact),
        }
        for way, module in ways.items()
    ]


def _predicted(module: nn.Module) -> int | None:
    with contextlib.suppress(rockplan.InvalidInput):
        return rockplan.plan_of(module).peak_bytes
    return None


def _gradients(case: Case, module: nn.Module) -> list[torch.Tensor]:
    module.zero_grad()
    case.step(module)
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def _distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """As a share of the norm of all."""
    error = sum(float((a - b).double().square().sum()) for a, b in zip(found, exact, strict=True))
    return float((error / sum(float(b.double().square().sum()) for b in exact)) ** 0.5)


def table(rows: list[Row]) -> str:
    lines = [
        f"{where()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "",
        "| way | peak MiB | predicted MiB | ms | difference to eager |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        predicted = row["predicted_bytes"]
        cells = (
            row["way"],
            mebibytes(int(row["peak_bytes"] or 0)),
            "" if predicted is None else mebibytes(int(predicted)),
            row["milliseconds"],
            f"{row['difference']:.1e}" if row["difference"] else "none",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=32000)
    arguments = parser.parse_args()
    rows = rows_of(arguments.rounds, arguments.vocabulary)
    (RESULTS / "tiled.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (RESULTS / "tiled.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
