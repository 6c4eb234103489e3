"""Seconds and memory of planning through `rockplan.solve`, by stage: cold, and with a warm cache.

    python -m benchmarks.planning_time [gpt2-12 gpt2-48 ...]

Each row is a process of its own. The first one of a model starts from an empty cache; the second
finds profile and options there and is asked for another budget. Imports and the model are made
before the clock starts. Stages are those that the pipeline reports (`rockplan.values.progress`).
CPU time beside wall time, because machines are shared; two threads solve blocks.

Writes benchmarks/results/planning_time.jsonl and planning_time.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import rockplan
from benchmarks.timing import where
from rockplan.values import progress
from testing import models, odd_models, priced
from testing.models import Case

RESULTS = Path(__file__).parent / "results"
COLD, WARM = "40%", "50%"


def _gpt2(layers: int) -> Callable[[], Case]:
    return lambda: models.gpt2(
        layers=layers, width=256, heads=4, vocabulary=1024, batch=4, length=256
    )


CASES: dict[str, Callable[[], Case]] = {
    **priced.CASES,
    "gpt2-12": _gpt2(12),
    "gpt2-48": _gpt2(48),
    "gpt2-200": _gpt2(200),
    "gpt2-36": _gpt2(36),
    "densenet-4x60": lambda: models.densenet(layers=60, groups=4, growth=8, batch=2, size=32),
    **odd_models.CASES,
}
"""GPT-2: attention written out, since its dropout has no fused kernel on CPU. The DenseNet has
no two layers alike. Beside them those of `testing.priced`, of two layers each, and those of
`testing.odd_models`, for "min"."""

AT_TEN_PERCENT = {
    "llama": "31%",
    "gpt2": "32%",
    "gpt2-sdpa": "33%",
    "bert": "36%",
    "resnet18": "62%",
    "unet": "62%",
    "t5": "21%",
    "densenet": "49%",
}
"""Of eager's peak: some 10 % of the way from the smallest budget to that of keeping everything.
Convolutions of the CPU take workspaces, for which "min" of ResNet-18 and U-Net is 58 %."""

BUDGETS = {
    "gpt2-36": ("12%", "20%"),
    **{name: (budget, "60%") for name, budget in AT_TEN_PERCENT.items()},
    **{name: (AT_TEN_PERCENT[name], "80%") for name in ("resnet18", "unet")},
    **dict.fromkeys(odd_models.CASES, ("min", "60%")),
}
"""Cold and warm, where they are not COLD and WARM."""


@dataclass
class Clock:
    """Wall and CPU seconds of each stage, in order of first appearance."""

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    stage: str = "start"
    since: tuple[float, float] = (0.0, 0.0)

    def enter(self, stage: str) -> None:
        now = time.perf_counter(), time.process_time()
        for seconds, end, start in zip((self.wall, self.cpu), now, self.since, strict=True):
            seconds[self.stage] = seconds.get(self.stage, 0.0) + end - start
        self.stage, self.since = stage, now


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of one call of `solve`; bytes of the process's largest resident set, and of the one
    before planning, when the model was there; peak_bytes: of the plan, 0 where it was not noted."""

    model: str
    cache: str
    budget: str
    operations: int
    blocks: int
    kinds: int
    wall_s: float
    cpu_s: float
    wall_by_stage_s: dict[str, float]
    cpu_by_stage_s: dict[str, float]
    before_bytes: int
    most_bytes: int
    overhead: float
    status: str
    gap: float
    where: str
    peak_bytes: int = 0


def resident_bytes() -> int:
    """The largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(name: str, cache: str, budget: str) -> Row:
    """Plan a model in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = CASES[name]()
    with suppress(rockplan.RockplanError):  # what imports itself at the first use
        rockplan.solve(torch.nn.Linear(2, 2), torch.randn(2, 2), "50%", options=_no_cache())
    before_bytes = resident_bytes()
    clock = Clock(since=(time.perf_counter(), time.process_time()))
    with progress.listening(lambda step: clock.enter(step.stage)):
        planned = rockplan.solve(case.model, case.args, budget, sample_kwargs=case.kwargs)
    clock.enter("end")
    plan = rockplan.plan_of(planned)
    return Row(
        model=name,
        cache=cache,
        budget=budget,
        operations=len(plan.graph.nodes),
        blocks=len(plan.blocks),
        kinds=len({b.digest for b in plan.blocks}),
        wall_s=round(sum(clock.wall.values()), 2),
        cpu_s=round(sum(clock.cpu.values()), 2),
        wall_by_stage_s={k: round(v, 2) for k, v in clock.wall.items()},
        cpu_by_stage_s={k: round(v, 2) for k, v in clock.cpu.items()},
        before_bytes=before_bytes,
        most_bytes=resident_bytes(),
        overhead=plan.overhead,
        status=plan.certificate.status.value,
        gap=plan.certificate.gap,
        where=where(),
        peak_bytes=plan.peak_bytes,
    )


def _no_cache() -> rockplan.Options:
    return rockplan.Options(cache=False)


def in_own_process(name: str, cache: str, budget: str, folder: str) -> Row:
    command = [sys.executable, "-m", "benchmarks.planning_time", "--here", name, cache, budget]
    environment = {**os.environ, "ROCKPLAN_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def report(rows: list[Row]) -> str:
    lines = [
        "# Planning time",
        "",
        "`python -m benchmarks.planning_time`: `rockplan.solve` in a process of its own, without "
        "imports and without making the model. Cold: from an empty cache. Warm: another budget, "
        "profile and options in the cache. Memory: the largest resident set, and what planning "
        "added to the one before it (torch, libraries, the model).",
        "",
        "| model | operations | blocks, kinds | cache | budget | wall s | CPU s | memory MB | "
        "added MB | peak MB | overhead | gap at most | status |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model} | {r.operations} | {r.blocks}, {r.kinds} | {r.cache} | {r.budget} | "
        f"{r.wall_s:.1f} | {r.cpu_s:.1f} | {r.most_bytes / 1e6:.0f} | "
        f"{(r.most_bytes - r.before_bytes) / 1e6:.0f} | {_peak(r)} | {r.overhead:+.1%} | "
        f"{r.gap:.1%} | "
        f"{r.status} |"
        for r in rows
    ]
    stages = list(dict.fromkeys(stage for r in rows for stage in r.wall_by_stage_s))
    lines += ["", "Seconds of each stage, wall (CPU):", ""]
    lines += [f"| model | cache | {' | '.join(stages)} |", "|---" * (2 + len(stages)) + "|"]
    lines += [f"| {r.model} | {r.cache} | {' | '.join(_cells(r, stages))} |" for r in rows]
    lines += ["", "Where and when:", "", *dict.fromkeys(f"- {r.where}" for r in rows)]
    return "\n".join(lines) + "\n"


def _peak(row: Row) -> str:
    return f"{row.peak_bytes / 1e6:.3f}" if row.peak_bytes else ""


def _cells(row: Row, stages: list[str]) -> list[str]:
    return [
        f"{row.wall_by_stage_s[s]:.1f} ({row.cpu_by_stage_s[s]:.1f})"
        if s in row.wall_by_stage_s
        else ""
        for s in stages
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES), metavar="MODEL")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(asdict(measured(*arguments.here))))
        return
    path = RESULTS / "planning_time.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = {(r.model, r.cache): r for r in (Row(**json.loads(line)) for line in lines)}
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = BUDGETS.get(name, (COLD, WARM))
            for cache, budget in (("cold", cold), ("warm", warm)):
                row = in_own_process(name, cache, budget, folder)
                print(json.dumps(asdict(row), indent=1), flush=True)
                found[name, cache] = row
        rows = [r for n in CASES for c in ("cold", "warm") if (r := found.get((n, c)))]
        path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
        (RESULTS / "planning_time.md").write_text(report(rows))


if __name__ == "__main__":
    main()
