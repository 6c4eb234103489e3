"""Whole steps of training: bytes that are predicted and bytes that are measured.

    OMP_NUM_THREADS=1 python -m benchmarks.fit

Plans of twelve small models at three sizes under four optimizers, on CPU: two steps from the start,
`zero_grad`, forward and backward, and then `step`, each against the allocator's events, relative to
where it begins. Scalars that a plan
counts for the caller's loss are left out: these models compute theirs, or are put into a module
that does. And the peaks of forward and backward kept whole and with checkpointing, which
`rockplan.fit` takes of schedules, against those of eager PyTorch. Writes
benchmarks/results/fit.{jsonl,md} and fit_ways.jsonl.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import rockplan
from benchmarks.timing import where
from rockplan.fitting.changes import Holding, peak_of
from rockplan.fitting.optimizer import optimizer_steps
from rockplan.fitting.scheduled import first_gradients, scheduled_changes
from rockplan.fitting.timeline import Passes, timeline_of
from rockplan.fitting.ways import kept_whole, per_block
from rockplan.graph_builder.costs.ruler import memory_events, profiled
from rockplan.oracles.simulate import simulate
from rockplan.runtime import checkpointing
from rockplan.runtime.checkpointing import repeated_blocks
from rockplan.runtime.planned_state import programs_of
from rockplan.runtime.program import ModuleCall
from rockplan.solving.captured_calls import arguments, captured_call, problems_of
from testing import models
from testing.models import Case
from testing.training import QUICK, solve_case

RESULTS = Path(__file__).parent / "results"

MODELS: dict[str, Callable[[int], Case]] = {
    "gpt2": lambda n: models.gpt2(width=32 * n, batch=2 * n, length=32, attention_dropout=0.0),
    "gpt2, dropout": lambda n: models.gpt2(width=32 * n, batch=2 * n, length=32, attention="eager"),
    "llama": lambda n: models.llama(width=32 * n, batch=2 * n, length=32),
    "bert": lambda n: models.bert(width=32 * n, batch=2 * n, length=32),
    "vit": lambda n: models.vit(width=32 * n, batch=2 * n),
    "t5": lambda n: models.t5(2, width=32 * n, batch=2 * n, length=32),
    "encoder": lambda n: with_loss(models.encoder(width=32 * n, batch=2 * n)),
    "mlp": lambda n: with_loss(models.mlp(width=32 * n, batch=64 * n)),
    "resnet-18": lambda n: with_loss(models.resnet18(8 * n, 2 * n, 32)),
    "resnet-50": lambda n: with_loss(models.resnet(width=4 * n, batch=2 * n, size=32)),
    "densenet": lambda n: with_loss(models.densenet(growth=6 * n, batch=2 * n)),
    "unet": lambda n: with_loss(models.unet(3, width=4 * n, batch=n, size=32)),
}
SIZES = (1, 2, 3)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=False),
    "Adafactor": torch.optim.Adafactor,
}

Row = dict[str, Any]


def rows_of(name: str, size: int) -> Iterator[Row]:
    torch.manual_seed(0)
    case = MODELS[name](size)
    fast = solve_case(case, "80%", options=QUICK)
    case.step(fast)  # what operators keep from their first run is no part of a step
    plan, interface = rockplan.plan_of(fast), programs_of(fast)[0].interface
    gradients = first_gradients(plan.graph, interface)
    changes = scheduled_changes(plan.graph, plan.schedule, gradients)
    named = dict(case.model.named_parameters())
    for optimizer, make in OPTIMIZERS.items():
        trained = {n: named[n] for n in gradients}
        steps = optimizer_steps(make, trained, metered=True)
        said = timeline_of({}, Passes(changes, changes), steps)
        predicted = []
        for step, last in zip(said.steps, (steps.first, steps.later), strict=True):
            before = [c for c in step[: len(step) - len(last)] if c.owner is not Holding.CALLER]
            predicted += [peak_of(before).size_bytes, peak_of(last).size_bytes]
        yield {
            "model": name,
            "size": size,
            "optimizer": optimizer,
            "predicted_bytes": predicted,
            "peak_bytes": measured(case, fast, make),
        }


class WithLoss(torch.nn.Module):
    """The mean square of what a module returns."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return models.mean_square(self.module(*args, **kwargs))


def with_loss(case: Case) -> Case:
    return replace(case, model=WithLoss(case.model), loss=lambda result: result)


WAYS: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: models.gpt2(4, width=64, batch=8, attention_dropout=0.0),
    "llama": lambda: models.llama(4, width=64, batch=8),
    "bert": lambda: models.bert(4, width=64, batch=8),
    "vit": lambda: models.vit(4, width=64, batch=16),
    "resnet18": lambda: models.resnet18(16, 8, 32),
}


def ways_of(name: str) -> Iterator[Row]:
    """Of schedules, in prices that are measured, and of what they stand for."""
    case = WAYS[name]()
    args, kwargs = arguments(case.model, case.args, case.kwargs)
    options = rockplan.Options()
    source = captured_call(ModuleCall(case.model, args, kwargs), options)
    graph = problems_of(source, options)[0].graph
    blocks = repeated_blocks(case.model)
    # PyTorch saves the state of the CPU's generator for each block: on CPU the allocator sees it.
    states_bytes = len(blocks) * torch.get_rng_state().nbytes
    for way, schedule, module, more_bytes in (
        ("kept whole", kept_whole(graph), case.model, 0),
        (
            "checkpoint per block",
            per_block(graph, blocks),
            checkpointing.per_block(case.model),
            states_bytes,
        ),
    ):
        found = rockplan.peak_live_bytes(functools.partial(case.step, module)).peak_bytes
        predicted = simulate(*schedule).peak_bytes + more_bytes
        yield {"model": name, "way": way, "predicted_bytes": predicted, "peak_bytes": found}


def measured(
    case: Case, module: torch.nn.Module, make: Callable[[Any], torch.optim.Optimizer]
) -> list[int]:
    module.zero_grad()
    optimizer = make(module.parameters())

    def passes() -> None:
        optimizer.zero_grad()
        case.step(module)

    peaks = []
    for part in (passes, optimizer.step) * 2:
        gc.collect()
        with profiled() as session:
            part()
        changes = (change for _, change in memory_events(session))
        peaks.append(max(itertools.accumulate(changes, initial=0)))
    return peaks


def table(rows: list[Row], ways: list[Row]) -> str:
    pairs = [p for r in rows for p in zip(r["predicted_bytes"], r["peak_bytes"], strict=True)]
    exact = sum(predicted == found for predicted, found in pairs)
    lines = [
        f"{where()}. {exact} of {len(pairs)} peaks of forward and backward, and of an optimizer, "
        "are what is predicted, to the byte. (Others: predicted / measured.)",
        "",
        "| model | size | optimizer | passes 1 | `step()` 1 | passes 2 | `step()` 2 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peaks = zip(row["predicted_bytes"], row["peak_bytes"], strict=True)
        cells = [str(a) if a == b else f"{a} / {b}" for a, b in peaks]
        head = (row["model"], str(row["size"]), row["optimizer"])
        lines.append(f"| {' | '.join((*head, *cells))} |")
    lines += [
        "",
        "Forward and backward of schedules, and of eager PyTorch and its checkpointing:",
        "",
        "| model | way | predicted | measured | error |",
        "|---|---|---|---|---|",
    ]
    for row in ways:
        error = row["predicted_bytes"] / row["peak_bytes"] - 1
        lines.append(f"| {' | '.join(map(str, row.values()))} | {error:+.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = _said(
        row for name, size in itertools.product(MODELS, SIZES) for row in rows_of(name, size)
    )
    ways = _said(row for name in WAYS for row in ways_of(name))
    for file, written in (("fit.jsonl", rows), ("fit_ways.jsonl", ways)):
        (RESULTS / file).write_text("".join(f"{json.dumps(row)}\n" for row in written))
    (RESULTS / "fit.md").write_text(table(rows, ways))


def _said(rows: Iterable[Row]) -> list[Row]:
    said = []
    for row in rows:
        print(row, flush=True)
        said.append(row)
    return said


if __name__ == "__main__":
    main()
