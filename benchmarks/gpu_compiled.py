"""On a CUDA machine: plans of compiled kernels beside torch.compile, in six minutes.

    python -m benchmarks.gpu_compiled [--minutes 6] [--cpu]

Llama with 8 layers of width 2048 and GPT-2 large in bfloat16, ResNet-50 with 64 images. For each:
eager, `torch.utils.checkpoint` of each block, torch.compile, both, torch.compile with an
activation_memory_budget, rockplan, and rockplan with compiled kernels. Steps are timed in turns. A
way that fails has a row that says why; what does not fit into the time is left out. Prints each row
when it is there, and one table. With --cpu: small models without a GPU, to test the script itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import rockplan
from benchmarks import models
from benchmarks.compiled import Row, compiled, distance, gradients, line, table
from benchmarks.gpu import LLAMA, TimeLimit, arguments, tried, where
from benchmarks.models import Case
from benchmarks.timing import interleaved_seconds
from rockplan.checkpointing.wrap import per_block, sharing_copy

MINUTES = 6.0
MOST_ROUNDS = 7
FOR_TIMING = 0.25
"""Of the time of a model, for steps in turns."""

MOST_OF_A_WAY = 0.5
"""Of what is left, so that others come as well."""

Make = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True, slots=True)
class LossCase(Case):
    """A step that lets go of everything but the loss. released: leaves that it lets go."""

    released: tuple[int, ...] = ()

    def step(self, module: nn.Module | None = None) -> None:
        made = self.model if module is None else module
        self.loss(made(*self.args, **self.kwargs)).backward()


def cases(on_cpu: bool) -> dict[str, Callable[[], LossCase]]:
    if on_cpu:
        return {
            "llama": partial(language, models.llama),
            "gpt2-large": partial(language, models.gpt2),
            "resnet-50": partial(images, batch=4, size=32),
        }
    return {
        "llama": partial(language, LLAMA),
        "gpt2-large": partial(
            language,
            models.gpt2,
            layers=36,
            width=1280,
            heads=20,
            vocabulary=50257,
            batch=4,
            length=1024,
        ),
        "resnet-50": partial(images, width=64, batch=64, size=224),
    }


def language(make: Callable[..., Case], **sizes: Any) -> LossCase:
    case = make(**sizes)
    model = case.model.bfloat16()
    return LossCase(case.name, model, case.args, case.kwargs, case.loss, released=(1,))


def images(**sizes: Any) -> LossCase:
    case = models.resnet(**sizes)
    return LossCase(case.name, case.model, case.args, case.kwargs, case.loss)


COMPILED, BOTH = "torch.compile", "torch.compile + checkpoint"


def ways(case: LossCase, peaks: dict[str, int]) -> dict[str, Make]:
    """How a module is made of the model. peaks: of the ways before, which some budgets are."""

    def peak_of(way: str) -> int:
        if way not in peaks:
            raise LookupError(f"no peak of {way} to plan for")
        return peaks[way]

    def planned(
        model: nn.Module, budget: Callable[[], int | str], is_compiled: bool = True
    ) -> nn.Module:
        options = rockplan.Options(compile=is_compiled, released=case.released)
        return rockplan.solve(
            model, case.args, budget(), sample_kwargs=case.kwargs, options=options
        )

    return {
        "eager": sharing_copy,
        "checkpoint": per_block,
        COMPILED: lambda model: compiled(sharing_copy(model)),
        BOTH: lambda model: compiled(per_block(model)),
        f"rockplan, peak of {BOTH}": partial(
            planned, budget=lambda: peak_of(BOTH), is_compiled=False
        ),
        "rockplan compiled, all kept": partial(planned, budget=lambda: "100%"),
        f"rockplan compiled, peak of {BOTH}": partial(planned, budget=lambda: peak_of(BOTH)),
        f"rockplan compiled, half of {COMPILED}'s peak": partial(
            planned, budget=lambda: peak_of(COMPILED) // 2
        ),
        "rockplan compiled, smallest": partial(planned, budget=lambda: "min"),
        f"{COMPILED}, budget 0.5": lambda model: compiled(sharing_copy(model), 0.5),
        f"{COMPILED}, budget 0.2": lambda model: compiled(sharing_copy(model), 0.2),
    }


def rows_of(
    name: str, case: LossCase, device: torch.device, limit: TimeLimit, say: Callable[[Row], None]
) -> list[Row]:
    """The ways of one model, as far as they fit into the time."""
    before_timing = limit.part(1 - FOR_TIMING)
    peaks: dict[str, int] = {}
    made: dict[str, nn.Module] = {}
    rows: dict[str, Row] = {}
    exact: list[torch.Tensor] = []

    def measured(way: str, make: Make) -> Row:
        begin = time.perf_counter()
        module = make(case.model)
        case.step(module)
        seconds = time.perf_counter() - begin
        peaks[way] = rockplan.peak_live_bytes(partial(case.step, module), device=device).peak_bytes
        found = gradients(case, module)
        exact.extend(() if exact else found)
        made[way] = module
        is_planned = way.startswith("rockplan")
        return {
            "peak_bytes": peaks[way],
            "predicted_bytes": rockplan.plan_of(module).peak_bytes if is_planned else None,
            "compile_s": round(seconds, 1),
            "difference": distance(found, exact),
            "milliseconds": None,
        }

    for way, make in ways(case, peaks).items():
        found = tried(partial(measured, way, make), before_timing.part(MOST_OF_A_WAY))
        row: Row = {"model": name, "way": way}
        row |= {"error": found} if isinstance(found, str) else found
        rows[way] = row
        say(row)
    times = tried(lambda: _timed(case, made, limit), limit)
    if isinstance(times, dict):
        for way, seconds in times.items():
            rows[way]["milliseconds"] = round(1e3 * statistics.median(seconds), 1)
    return list(rows.values())


def _timed(case: LossCase, made: dict[str, nn.Module], limit: TimeLimit) -> dict[str, list[float]]:
    """Seconds of steps in turns, as many rounds as there is time for."""
    steps = {way: partial(case.step, module) for way, module in made.items()}
    begin = time.perf_counter()
    interleaved_seconds(steps, 1, warmup=0)
    round_s = max(time.perf_counter() - begin, 1e-3)
    rounds = max(1, min(MOST_ROUNDS, int(0.8 * limit.left_s / round_s) - 1))
    return interleaved_seconds(steps, rounds, warmup=1)


def main() -> None:
    given = arguments(__doc__, MINUTES)
    limit = TimeLimit(60 * given.minutes)
    device = torch.device("cpu" if given.cpu else "cuda")
    print(where(), flush=True)
    rows: list[Row] = []
    makers = cases(given.cpu)
    for number, (name, make) in enumerate(makers.items()):
        torch.manual_seed(0)
        part = limit.part(1 / (len(makers) - number))
        case = tried(lambda make=make: make().to(device), part)
        if isinstance(case, str):
            rows.append({"model": name, "way": "", "error": case})
            continue
        rows += rows_of(name, case, device, part, lambda row: print(line(row), flush=True))
        del case
    remark = (
        "seconds to compile are those to plan, compile and run a first step; differences with "
        "dropout are those of other draws"
    )
    print("\n" + table(rows, [where(), "", remark]))


if __name__ == "__main__":
    main()
