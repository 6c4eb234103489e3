"""Plans of compiled kernels beside torch.compile: peak, time, seconds to compile, and how far the
gradients are from those of eager.

    OMP_NUM_THREADS=1 python -m benchmarks.compiled [--models llama gpt2] [--rounds 5]

For each model: eager, `torch.utils.checkpoint` of each block, torch.compile, torch.compile of
checkpointed blocks, torch.compile with two values of `activation_memory_budget`, rockplan as eager
calls operators, and rockplan with compiled kernels: with everything kept, within the peak of
torch.compile, within that of it of checkpointed blocks, within half of the first, and as small as
can be. Steps are timed in turns, on as many threads as PyTorch is given. Seconds to compile are
those of the first plan of a process, with empty caches of Inductor on disk, without planning.
Writes benchmarks/results/compiled.{jsonl,md}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rockplan
from benchmarks.timing import interleaved_seconds, mebibytes, where
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.pipeline import lower
from rockplan.options import Options
from rockplan.runtime.checkpointing import per_block, sharing_copy
from testing import models
from testing.models import Case

RESULTS = Path(__file__).parent / "results"
ROWS = RESULTS / "compiled.jsonl"
TABLE = RESULTS / "compiled.md"

CASES: dict[str, Callable[[], Case]] = {
    "llama": partial(
        models.llama, layers=6, width=192, heads=6, vocabulary=1024, batch=4, length=256
    ),
    "gpt2": partial(
        models.gpt2,
        layers=3,
        width=192,
        heads=6,
        vocabulary=1024,
        batch=4,
        length=192,
        attention="eager",
    ),
    "bert": partial(models.bert, layers=3, width=192, heads=6, batch=4, length=192),
    "vit": partial(models.vit, layers=3, width=192, heads=3, batch=10, size=96),
    "resnet-50": partial(models.resnet, width=16, batch=8, size=64),
    "unet": partial(models.unet, levels=3, width=16, batch=4, size=64),
    "t5": partial(models.t5, layers=3, width=128, vocabulary=1024, batch=4, length=128),
}


def channels_last(name: str) -> Case:
    """The model and its images as `torch.compile` lays them out for convolutions."""
    case, layout = CASES[name](), torch.channels_last
    images = tuple(a.contiguous(memory_format=layout) if a.dim() == 4 else a for a in case.args)
    return replace(case, model=case.model.to(memory_format=layout), args=images)


CASES |= {f"{name}, channels_last": partial(channels_last, name) for name in ("resnet-50", "unet")}

Row = dict[str, str | float | int | None]


def rows_of(name: str, rounds: int) -> list[Row]:
    """The ways of one model."""
    torch.manual_seed(0)
    case = CASES[name]()
    made: dict[str, tuple[nn.Module, float, int | None]] = {"eager": (case.model, 0.0, None)}
    made["checkpoint"] = (per_block(case.model), 0.0, None)
    of_compiler = {
        "torch.compile": compiled(sharing_copy(case.model)),
        "torch.compile + checkpoint": compiled(per_block(case.model)),
        "torch.compile, budget 0.5": compiled(sharing_copy(case.model), 0.5),
        "torch.compile, budget 0.2": compiled(sharing_copy(case.model), 0.2),
    }
    for way, module in of_compiler.items():
        with empty_cache():
            begin = time.perf_counter()
            case.step(module)
            made[way] = (module, time.perf_counter() - begin, None)
    peaks = {way: _peak(case, module) for way, (module, _, _) in made.items()}
    budgets = {
        "all kept": "100%",
        "peak of torch.compile": peaks["torch.compile"],
        "peak of torch.compile + checkpoint": peaks["torch.compile + checkpoint"],
        "half of torch.compile's peak": peaks["torch.compile"] // 2,
        "smallest": "min",
    }
    with empty_cache():
        begin = time.perf_counter()
        lower(capture(case.model, case.args, case.kwargs), 0, Options(compile=True))
        seconds = time.perf_counter() - begin
    for is_compiled in (False, True):
        for asked, budget in budgets.items():
            way = f"rockplan{' compiled' if is_compiled else ''}, {asked}"
            options = Options(compile=is_compiled)
            with contextlib.suppress(rockplan.InfeasibleBudget):
                planned = rockplan.solve(
                    case.model, case.args, budget, sample_kwargs=case.kwargs, options=options
                )
                predicted = rockplan.plan_of(planned).peak_bytes
                made[way] = (planned, seconds if is_compiled else 0.0, predicted)
    exact = gradients(case, case.model)
    steps = {way: partial(case.step, module) for way, (module, _, _) in made.items()}
    times = interleaved_seconds(steps, rounds)
    return [
        {
            "model": name,
            "way": way,
            "peak_bytes": _peak(case, module),
            "predicted_bytes": predicted,
            "milliseconds": round(1e3 * statistics.median(times[way]), 1),
            "compile_s": round(compile_s, 1),
            "difference": distance(gradients(case, module), exact),
            "where": machine_now(),
        }
        for way, (module, compile_s, predicted) in made.items()
    ]


def compiled(module: nn.Module, activation_budget: float = 1.0) -> nn.Module:
    """By torch.compile, with what else is compiled untouched: Dynamo tells backends apart, and not
    the setting, which counts where the backend runs."""
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=activation_budget):
            return compile_fx(graph, inputs)

    return torch.compile(module, backend=backend)


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Inductor finds nothing on disk, and Dynamo nothing in memory."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _peak(case: Case, module: nn.Module) -> int:
    return rockplan.peak_live_bytes(partial(case.step, module)).peak_bytes


def gradients(case: Case, module: nn.Module) -> list[torch.Tensor]:
    """Of a step from the same generator state."""
    torch.manual_seed(1)
    module.zero_grad()
    case.step(module)
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """As a share of the norm of all; as it is where that is 0."""
    pairs = zip(found, exact, strict=True)
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return float((error / (sum(float(b.double().square().sum()) for b in exact) or 1.0)) ** 0.5)


def table(rows: list[Row], notes: list[str]) -> str:
    """notes: what is said above the rows. A row that has an error has nothing else."""
    lines = [
        *notes,
        "",
        "| model | way | peak MiB | predicted MiB | ms | compile s | difference to eager |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(line, rows)]) + "\n"


def line(row: Row) -> str:
    if "error" in row:
        return f"| {row['model']} | {row['way']} | {row['error']} | | | | |"
    predicted = row["predicted_bytes"]
    cells = (
        row["model"],
        row["way"],
        mebibytes(int(row["peak_bytes"] or 0)),
        "" if predicted is None else mebibytes(int(predicted)),
        row["milliseconds"] or "",
        row["compile_s"] or "",
        f"{row['difference']:.1e}" if row["difference"] else "none",
    )
    return f"| {' | '.join(map(str, cells))} |"


def notes(rows: list[Row]) -> list[str]:
    """Above the table: what may be compared, and where the rows of each model were made."""
    places = {row["model"]: row["where"] for row in rows}
    return [
        "# Compiled kernels",
        "",
        "`python -m benchmarks.compiled`. The rows of a model are of one run, steps in turns, "
        "on a machine that others were using: compare times of one model with each other alone. "
        "Seconds to compile are those of that machine. The difference is that of all gradients to "
        "eager's, as a share of their norm; `torch.compile` draws other dropout masks than eager.",
        "",
        *(f"- {model}: {place}" for model, place in places.items()),
    ]


def machine_now() -> str:
    return f"{where()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    known = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    for name in arguments.models:
        rows = [row for row in known if row["model"] != name]
        known = rows + rows_of(name, arguments.rounds)
        ROWS.write_text("".join(f"{json.dumps(row)}\n" for row in known))
        TABLE.write_text(table(known, notes(known)))
        print(table([row for row in known if row["model"] == name], []))


if __name__ == "__main__":
    main()
