"""What does the host do in a step of a planned module whose kernels are tiny?

    python -m benchmarks.host [gpt2-30 ...] [--note TEXT]

Checks: milliseconds before a step, in which it is found which plan a call runs (the call's key, and
the guards of modules, tensors, configurations and the user's state). Step: forward and backward
over eager's, with everything kept and at 30 % of eager's peak. User CPU time, one thread,
interleaved; medians. Rows are added to those that are there, so that each change stands beside what
was before it; --note says what it is. Explained: an eager step in `rockplan.explained(model)` over
one without, and the time of what that does: its hook is set, called and removed.

Writes benchmarks/results/host.jsonl and host.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rockplan
from benchmarks.timing import interleaved_seconds, median_ratio, where
from rockplan.runtime import planned_module as planned_modules
from testing import models
from testing.models import Case

RESULTS = Path(__file__).parent / "results"
REPEATS = 61
KEPT, LEAST = "100%", "30%"


def _lora(layers: int) -> Case:
    import peft

    case = models.llama(layers, 32, 2, 2, 64, 1, 16)
    given: Any = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return replace(case, name=f"lora-{layers}", model=peft.get_peft_model(case.model, given))


CASES: dict[str, Callable[[], Case]] = {
    "gpt2-36": partial(models.gpt2, 36, 32, 2, 64, 1, 16),
    "lora-32": partial(_lora, 32),
    "gpt2-30": partial(models.gpt2, 30, 32, 2, 64, 1, 16),
    "llama-30": partial(models.llama, 30, 32, 2, 2, 64, 1, 16),
    "resnet-50": partial(models.resnet, width=8, batch=2, size=32),
    "mlp-30": partial(models.mlp, depth=30, width=32, batch=8),
}
"""36 layers have the modules of GPT-2 large. Steps of 2 to 60 ms."""


@dataclass(frozen=True, slots=True)
class Row:
    """kept, least: time of a step over eager's, with everything kept and at LEAST; explained: of
    eager's in `rockplan.explained(model)`, None if it was not asked then; explained_us: what that
    does alone."""

    model: str
    modules: int
    eager_ms: float
    checks_ms: float
    kept: float
    least: float
    note: str
    where: str
    explained: float | None = None
    explained_us: float = 0.0


def measured(name: str, note: str) -> Row:
    torch.manual_seed(0)
    case = CASES[name]()
    steps: dict[str, Callable[[], object]] = {"eager": partial(case.step, case.model)}
    for budget in (KEPT, LEAST):
        options = rockplan.Options(time_limit_s=20)
        planned = rockplan.solve(
            copy.deepcopy(case.model), case.args, budget, sample_kwargs=case.kwargs, options=options
        )
        steps[budget] = partial(case.step, planned)
        if budget == KEPT:
            steps["checks"] = partial(_checks, planned, case)
    steps["explained"] = partial(_explained, case.model, partial(case.step, case.model))
    noted = partial(_noted, case)
    steps["noted"] = partial(_explained, case.model, noted)
    seconds = interleaved_seconds(steps, REPEATS, warmup=3)
    ratios = {n: median_ratio(of, seconds["eager"]) for n, of in seconds.items()}
    return Row(
        model=name,
        modules=len([*case.model.modules()]),
        eager_ms=round(1e3 * statistics.median(seconds["eager"]), 2),
        checks_ms=round(1e3 * statistics.median(seconds["checks"]), 3),
        kept=round(ratios[KEPT], 3),
        least=round(ratios[LEAST], 3),
        note=note,
        where=where(),
        explained=round(ratios["explained"], 4),
        explained_us=round(1e6 * statistics.median(seconds["noted"]), 1),
    )


def _explained(model: torch.nn.Module, step: Callable[[], object]) -> None:
    with rockplan.explained(model):
        step()


def _noted(case: Case) -> None:
    """Call the hooks of the model alone."""
    for hook in case.model._forward_pre_hooks.values():
        hook(case.model, case.args, case.kwargs)  # type: ignore[call-arg]


def _checks(planned: Any, case: Case) -> None:
    call = planned_modules._called(planned._rockplan, case.args, case.kwargs)
    assert planned_modules._bound(planned, call) is not None


def report(rows: list[Row]) -> str:
    lines = [
        "# The host of a step",
        "",
        "`python -m benchmarks.host`: user CPU time of one thread, interleaved with eager's in one "
        f"process, medians of {REPEATS} rounds; layers of tiny kernels, in which Python decides. "
        "*Checks*: what a planned module compares before a step, with everything kept. *Kept*, "
        f"*{LEAST}* (or the smallest plan): forward and backward over eager's. *Explained*: eager "
        "in `rockplan.explained(model)` over eager, and what that does alone, over eager's time. "
        "Machines are shared: compare within a row.",
        "",
        f"| model | modules | eager ms | checks ms | checks of eager | kept | {LEAST} | explained "
        "| what |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model} | {r.modules} | {r.eager_ms:.1f} | {r.checks_ms:.2f} | "
        f"{r.checks_ms / r.eager_ms:.1%} | {r.kept:.2f} | {r.least:.2f} | "
        f"{_of_explained(r)} | {r.note} |"
        for r in sorted(rows, key=lambda r: [*CASES].index(r.model))
    ]
    lines += ["", "Where and when:", "", *dict.fromkeys(f"- {r.where}" for r in rows)]
    return "\n".join(lines) + "\n"


def _of_explained(row: Row) -> str:
    if row.explained is None:
        return ""
    return f"{row.explained:.4f}, {row.explained_us / 1e3 / row.eager_ms:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES), metavar="MODEL")
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "host.jsonl"
    for name in arguments.models:
        row = measured(name, arguments.note)
        print(json.dumps(asdict(row), indent=1), flush=True)
        with path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    (RESULTS / "host.md").write_text(report(rows))


if __name__ == "__main__":
    main()
