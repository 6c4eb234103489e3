"""Several processes: do they have one plan, what does agreeing take, and is the peak of a sharded
model what was promised?

On two and four processes of gloo: digests of what each has planned, by itself and together
(`Options(group=...)`; the blocks of a sharded model always), and the seconds of the slowest, beside
those of one that plans alone while the others wait. Then steps under `fully_shard` in each mode,
sharded before they are planned; and the time that plans for several calls in flight take, beside
the best plan of one call within the same budget.

    OMP_NUM_THREADS=1 python -m benchmarks.ranks [--counts 2 4]

Writes benchmarks/results/ranks.jsonl and ranks.md. NCCL is not seen: there is one device at most.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import rockplan
from benchmarks.timing import machine
from rockplan.api import plan_each
from rockplan.search.in_flight import needed_bytes
from testing.sharding import MODES, accumulating

RESULT = Path(__file__).parent / "results" / "ranks.md"
ROWS_FILE = RESULT.with_suffix(".jsonl")
BUDGETS = ("60%", "40%", "25%", "min")
OPTIONS = rockplan.Options(cache=False, time_limit_s=2)
STEPS = 3


WIDTH, ROWS = 64, 256


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(Mixer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return {"loss": self.head(h).pow(2).mean()}


def stack() -> Any:
    return Stack().train()


def sample() -> torch.Tensor:
    return torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(dist.get_rank()))


def sharded(model: Any, mesh: DeviceMesh, **how: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def whole(budget: str, options: rockplan.Options) -> object:
    plan = rockplan.plan(stack(), sample(), budget, options=options)
    return plan.graph_digest, plan.schedule, plan.peak_bytes


def blocks(budget: str, options: rockplan.Options, model: nn.Module | None = None) -> object:
    model = rockplan.solve_blocks(model or stack(), sample(), budget, options=options)
    plan = rockplan.blocks_of(model)
    return plan.moments, plan.options


def sharded_blocks(budget: str, options: rockplan.Options) -> object:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return blocks(budget, options, sharded(stack(), mesh))


KINDS: dict[str, Callable[[str, rockplan.Options], object]] = {
    "solve": whole,
    "blocks": blocks,
    "sharded blocks": sharded_blocks,
}


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def planned(make: Callable[[], object]) -> tuple[int, float]:
    """How many digests there are, and the seconds of the slowest; -1 where nothing fits on one."""
    dist.barrier()
    began = time.monotonic()
    try:
        text = hashlib.sha256(repr(make()).encode()).hexdigest()
    except rockplan.InfeasibleBudget:
        text = ""
    seconds = time.monotonic() - began
    digests, times = zip(*everywhere((text, seconds)), strict=True)
    return (-1 if "" in digests else len({*digests})), max(times)


def agreement_rows() -> Iterator[dict[str, Any]]:
    together = replace(OPTIONS, group=dist.group.WORLD)
    planned(lambda: whole("100%", OPTIONS))  # what is imported late
    for kind, make in KINDS.items():
        for budget in BUDGETS:
            row: dict[str, Any] = {"kind": kind, "budget": budget}
            row["together"] = planned(lambda: make(budget, together))  # noqa: B023
            if make is not sharded_blocks:
                one = dist.get_rank() == 0
                row["one"] = planned(lambda: make(budget, OPTIONS) if one else None)  # noqa: B023
                row["each"] = planned(lambda: make(budget, OPTIONS))  # noqa: B023
            yield row


def peak_rows() -> Iterator[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for mode, (how, then) in MODES.items():
        for budget in ("60%", "min"):
            model = sharded(stack(), mesh, **how)
            model = model if then is None else then(model)
            try:
                rockplan.solve_blocks(model, sample(), budget, options=OPTIONS)
            except rockplan.InfeasibleBudget:
                continue
            plan = rockplan.blocks_of(model)

            def step(model: Any = model, accumulates: bool = then is accumulating) -> None:
                for exchanges in (False, False, True) if accumulates else (True,):
                    model.set_requires_gradient_sync(exchanges)
                    model(sample())["loss"].backward()

            found = sorted(rockplan.peak_live_bytes(step, 1).peak_bytes for _ in range(STEPS))
            of_all = everywhere((plan.peak_bytes, found[0], found[STEPS // 2], found[-1]))
            predicted, *measured = (max(values) for values in zip(*of_all, strict=True))
            yield {"mode": mode, "budget": budget, "predicted": predicted, "measured": measured}


def in_flight_rows() -> Iterator[dict[str, Any]]:
    """On one process."""
    torch.manual_seed(0)
    stage = nn.Sequential(*[Mixer() for _ in range(4)]).train()
    x = torch.randn(ROWS, WIDTH).requires_grad_()
    options = replace(OPTIONS, cache=True)
    shares = [f"{percent}%" for percent in (*range(100, 60, -20), *range(60, 14, -5))]
    each = [p for p in plan_each(stage, x, shares, options=options) if isinstance(p, rockplan.Plan)]
    for count in (2, 4):
        for share in ("25%", "20%"):
            try:
                ours = rockplan.plan(stage, x, share, options=replace(options, in_flight=count))
            except rockplan.InfeasibleBudget:
                continue
            within = [p for p in each if needed_bytes(p, count) <= ours.budget_bytes]
            best = min((p.overhead for p in within), default=None)
            yield {"count": count, "share": share, "ours": ours.overhead, "best": best}


def work() -> None:
    """Of each process; the first prints rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parts = [agreement_rows]
    if dist.get_world_size() == 2:
        parts.append(peak_rows)
    for part in parts:
        for row in part():
            if dist.get_rank() == 0:
                print(json.dumps({"part": part.__name__, **row}), flush=True)
    if dist.get_world_size() == 2 and dist.get_rank() == 0:
        for row in in_flight_rows():
            print(json.dumps({"part": "in_flight_rows", **row}), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # processes of gloo abort now and then while Python shuts down


def run_on(count: int) -> None:
    """Rows are written as they come."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "benchmarks.ranks"]
    command += ["--is-worker"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("{"):
                row = {"processes": count, **json.loads(line)}
                with ROWS_FILE.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    if run.returncode:
        raise SystemExit(f"{count} processes failed")


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def agreement_cells(row: dict[str, Any]) -> tuple[str, ...]:
    def cells(name: str) -> tuple[str, str]:
        if name not in row:
            return "", ""
        digests, seconds = row[name]
        return "nothing fits" if digests < 0 else str(digests), f"{seconds:.1f}"

    together, each = cells("together"), cells("each")
    ratio = f"{row['together'][1] / row['one'][1]:.2f}" if "one" in row else ""
    named = (str(row["processes"]), row["kind"], row["budget"])
    return (*named, *together, cells("one")[1], ratio, *each)


def peak_cells(row: dict[str, Any]) -> tuple[str, ...]:
    least = row["measured"][0] / row["predicted"] - 1
    sizes = (f"{size:,}" for size in (row["predicted"], *row["measured"]))
    return (row["mode"], row["budget"], *sizes, f"{least:+.1%}")


def in_flight_cells(row: dict[str, Any]) -> tuple[str, ...]:
    best = "none fits" if row["best"] is None else f"{row['best']:+.1%}"
    return (str(row["count"]), row["share"], f"{row['ours']:+.1%}", best)


def report() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--is-worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.is_worker:
        work()
    ROWS_FILE.unlink(missing_ok=True)
    for count in arguments.counts:
        run_on(count)
    rows = [json.loads(line) for line in ROWS_FILE.read_text().splitlines()]

    def of(part: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["part"] == part]

    today, where = datetime.date.today(), machine(torch.device("cpu"))
    lines = [
        "# Several processes",
        "",
        f"`python -m benchmarks.ranks`, {today}: {where}. Processes of gloo, four blocks of width "
        "64, 256 rows. NCCL is unseen: there is no second device.",
        "",
        "Digests: how many plans there are. Together: one process measures and solves for all with "
        "the same graph (`Options(group=...)`; sharded blocks always). One: the first process "
        "alone, while the others wait. Each: every process for itself. Seconds: of the slowest.",
        "",
        *table(
            ("processes", "what", "budget", "digests together", "s", "s of one", "ratio")
            + ("digests of each", "s"),
            map(agreement_cells, of("agreement_rows")),
        ),
        "",
        "Sharded by `fully_shard` on two processes, then planned: bytes beyond parameters and "
        f"`.grad`, the largest of both, of {STEPS} steps. A collective of gloo lets go of its "
        "memory at another moment in each step; the least is what a step needs.",
        "",
        *table(
            ("mode", "budget", "predicted", "least", "median", "most", "least over predicted"),
            map(peak_cells, of("peak_rows")),
        ),
        "",
        "Calls in flight: extra time of the plan of `Options(in_flight=k)`, and of the best of the "
        "plans for 12 budgets of one call whose peak and k - 1 times what they keep are within the "
        "same bytes. Budgets are shares of what k calls need unplanned.",
        "",
        *table(
            ("k", "budget", "in_flight", "best of one call"),
            map(in_flight_cells, of("in_flight_rows")),
        ),
    ]
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    report()
