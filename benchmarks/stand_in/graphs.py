"""Steps of models at full size by the code of their plans and as CUDA graphs, on the stand-in.

    python -m benchmarks.stand_in.run build/stand_in -m benchmarks.stand_in.graphs \\
        [--names llama ...] [--only graph] [--write FILE]

Each row is one way to run a step, forward and backward. Host: CPU milliseconds, which no kernel
delays here. Launched: kernels and copies that the host asks for one by one; in graphs: those that
it has the device replay. Predicted: the peak of the plan, or of the pool of its graphs
(`plan.pool_bytes`). Expandable, default: what PyTorch's allocator reserves beyond the model, with
segments that expand and without: of graphs what they hold between steps, otherwise the most.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import rockplan
from benchmarks import stand_in
from benchmarks.gpu_table import table
from benchmarks.stand_in.report import where
from benchmarks.stand_in.steps import host_ms
from testing import models
from testing.gpu_cases import LossCase, case_of, language, made_on

DEVICE = torch.device("cuda")
T5 = partial(language, models.t5, layers=6, width=512, vocabulary=32128, batch=8, length=512)
NAMES = ("gpt2-large", "llama", "resnet-50", "t5")
BUDGETS = ("100%", "50%", "min")
OTHERS: dict[str, str | None] = {"torch.compile": None, "reduce-overhead": "reduce-overhead"}
LAUNCHED = ("launches", "triton", "products", "to_device", "to_host", "within", "memsets")
SEGMENTS = {"expandable_bytes": True, "default_bytes": False}
WARM = 3
"""Steps: the first by the code, the second is recorded; CUDA graph trees record in the third."""

Row = dict[str, Any]


def model_of(name: str) -> LossCase:
    return made_on(T5, DEVICE) if name == "t5" else case_of(name, False, DEVICE)


class Steps:
    """A way to run the step of a case."""

    def __init__(self, case: LossCase, module: nn.Module) -> None:
        self.case, self.module = case, module

    def __call__(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        self.case.model.zero_grad()
        self.case.step(self.module)

    def row(self) -> Row:
        for _ in range(1 + WARM):
            self()
        return {"host_ms": host_ms(self), **self.launched()}

    def launched(self) -> Row:
        """How much a step launches itself, and by graphs."""
        before, graphs, replay = stand_in.counts(), [0], torch.cuda.CUDAGraph.replay

        def counted(graph: torch.cuda.CUDAGraph) -> None:
            begun = stand_in.counts()
            replay(graph)
            graphs[0] += launches(begun)

        with mock.patch.object(torch.cuda.CUDAGraph, "replay", counted):
            self()
        asked = stand_in.since(before)
        row = {"launched": launches(before) - graphs[0], "in graphs": graphs[0]}
        return row | {what: asked[what] for what in ("graphs", "syncs", "mallocs")}


def launches(before: dict[str, int]) -> int:
    asked = stand_in.since(before)
    return sum(asked[what] for what in LAUNCHED)


def row_of(way: str, make: Callable[[], Steps], is_held: bool = False) -> Row:
    """is_held: what is reserved is what stays between steps, otherwise the most of a step."""
    row: Row = {"way": way}
    for key, is_expandable in SEGMENTS.items():
        if key == "default_bytes" and way in OTHERS:
            continue  # of compilation the first one, of a minute
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{is_expandable}")
        clear()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        steps = make()
        if is_expandable:
            row |= steps.row()
        else:
            for _ in range(WARM):
                steps()
        steps.case.model.zero_grad()
        clear()
        after = torch.cuda.memory_reserved() if is_held else torch.cuda.max_memory_reserved()
        row[key] = after - before
        if way.startswith("rockplan"):
            plan = rockplan.plan_of(steps.module)
            row["predicted_bytes"] = plan.pool_bytes if is_held else plan.peak_bytes
        del steps
    return row


def clear() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def ways_of(case: LossCase) -> Iterator[tuple[str, Callable[[], Steps], bool]]:
    """Name each way with what makes its steps, and whether it holds a pool."""
    yield "eager", partial(Steps, case, case.model), False
    for compiles in (False, True):
        for budget in BUDGETS:
            for graph in (False, True):
                options = rockplan.Options(
                    compile=compiles, only_loss=bool(case.released), graph=graph, time_limit_s=20
                )
                kernels = "compiled" if compiles else "eager"
                way = f"rockplan, {kernels}, {budget}{', graph' if graph else ''}"
                yield way, partial(planned, case, budget, options), graph
    for way, mode in OTHERS.items():
        yield way, partial(compiled, case, mode), mode is not None


def planned(case: LossCase, budget: str, options: rockplan.Options) -> Steps:
    model = rockplan.solve(
        case.model, case.args, budget, sample_kwargs=case.kwargs, options=options
    )
    return Steps(case, model)


def compiled(case: LossCase, mode: str | None) -> Steps:
    torch.compiler.reset()
    return Steps(case, torch.compile(case.model, mode=mode))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--only", default="", help="ways whose names have this in them")
    parser.add_argument("--write", type=Path, help="a table into this file")
    parser.add_argument("--here", action="store_true", help="the first name, in this process")
    given = parser.parse_args()
    if given.here:
        stand_in.install()
        for way, make, is_held in ways_of(model_of(given.names[0])):
            if given.only in way:
                row = {"task": f"graphs {given.names[0]}", **row_of(way, make, is_held)}
                print(json.dumps(row), flush=True)
        return
    rows: list[Row] = []
    for name in given.names:
        command = [sys.executable, "-m", "benchmarks.stand_in.graphs", "--names", name, "--here"]
        command += ["--only", given.only]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        print(table(rows), flush=True)
        if given.write:
            head = (__doc__ or "").split("\n\n", 1)
            text = ["# Steps as CUDA graphs, on the stand-in", *head, where(), table(rows)]
            given.write.write_text("\n\n".join(text))


if __name__ == "__main__":
    main()
