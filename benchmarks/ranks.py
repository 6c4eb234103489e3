"""Several processes: do they have one plan, what does agreeing take, and is the peak of a sharded
model what was promised?

On two and four processes of gloo: digests of what each has planned, by itself and together
(`Options(group=...)`; the blocks of a sharded model always), and the seconds of the slowest, beside
those of one that plans alone while the others wait; and the CPU time of all, which other work on
the machine does not change. On eight, steps with pipeline, data and tensor parallel at once.
Then steps under `fully_shard` in each mode, sharded before they are planned; and the time that
plans for several calls in flight take, beside the best plan of one call within the same budget.
And blocks of a Llama of width 1024 within the peak of checkpointing, with and without a host.

    OMP_NUM_THREADS=1 python -m benchmarks.ranks [--counts 2 4 8] [--parts peak]

Writes benchmarks/results/ranks.jsonl and ranks.md; rows of other parts stay, all without any part.
NCCL is not seen: there is one device at most.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rockplan
from benchmarks.timing import machine
from rockplan.api import plan_each
from rockplan.runtime.checkpointing import per_block
from rockplan.search.in_flight import needed_bytes
from testing import models
from testing.blocks import Mixer, Stack, batch
from testing.sharding import MODES, everywhere, in_mode, peaks, sharded
from testing.tensor_parallel import Exchanges, Llama, sequence_parallel, tensor_parallel, words
from testing.trainer import trainer_step

RESULT = Path(__file__).parent / "results" / "ranks.md"
ROWS_FILE = RESULT.with_suffix(".jsonl")
BUDGETS = ("60%", "40%", "25%", "min")
OPTIONS = rockplan.Options(cache=False, time_limit_s=2)
STEPS = 3


WIDTH, ROWS = 64, 256


def stack() -> Any:
    return Stack(4, WIDTH).train()


def sample() -> torch.Tensor:
    return batch(ROWS) + dist.get_rank()


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


def planned(make: Callable[[], object]) -> tuple[int, float, float]:
    """How many digests there are, -1 where nothing fits on one; the seconds of the slowest, and
    those of CPU time of all."""
    dist.barrier()
    began, own_began = time.monotonic(), time.process_time()
    try:
        text = hashlib.sha256(repr(make()).encode()).hexdigest()
    except rockplan.InfeasibleBudget:
        text = ""
    seconds, own_seconds = time.monotonic() - began, time.process_time() - own_began
    digests, times, own = zip(*everywhere((text, seconds, own_seconds)), strict=True)
    return (-1 if "" in digests else len({*digests})), max(times), sum(own)


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
    for mode in MODES:
        for budget in ("60%", "min"):
            model = in_mode(stack(), mesh, mode)
            row: dict[str, Any] = {"mode": mode, "budget": budget}
            try:
                rockplan.solve_blocks(model, sample(), budget, options=OPTIONS)
            except rockplan.InfeasibleBudget:
                yield row
                continue
            plan = rockplan.blocks_of(model)
            found = peaks(model, sample(), mode, STEPS)
            of_all = everywhere((plan.peak_bytes, found[0], found[STEPS // 2], found[-1]))
            predicted, *measured = (max(values) for values in zip(*of_all, strict=True))
            yield {**row, "predicted": predicted, "measured": measured}


def tensor_rows() -> Iterator[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = words(rows=8, length=64)
    again = replace(OPTIONS, rerun_collectives=True)
    ways = (
        ("tensor parallel", tensor_parallel, OPTIONS),
        ("and sequence", sequence_parallel, OPTIONS),
        ("and sequence, gathers run again", sequence_parallel, again),
    )
    for mode, way, options in ways:
        for budget in ("60%", "min"):
            eager, model = (way(Llama(4, WIDTH).train(), mesh) for _ in range(2))
            row: dict[str, Any] = {"mode": mode, "budget": budget}
            try:
                rockplan.solve_blocks(model, ids, budget, blocks="layers.*", options=options)
            except rockplan.InfeasibleBudget:
                yield row
                continue
            plan = rockplan.blocks_of(model)
            made, calls = exchanging_step(model, ids)
            as_made, once = exchanging_step(eager, ids)
            same = len(made) == len(as_made) and all(map(torch.equal, made, as_made))
            row["equal"] = all(everywhere(same))
            row["plans"] = len({*map(repr, everywhere((plan.moments, plan.options, calls)))})
            row["collectives"] = (len(calls), len(once))
            step = lambda: model(ids).backward()  # noqa: B023, E731
            found = sorted(rockplan.peak_live_bytes(step, 1).peak_bytes for _ in range(STEPS))
            of_all = everywhere((plan.peak_bytes, found[0], found[STEPS // 2], found[-1]))
            predicted, *measured = (max(values) for values in zip(*of_all, strict=True))
            row |= {"predicted": predicted, "measured": measured, "overhead": plan.overhead}
            yield row


def exchanging_step(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[str]]:
    """Loss and gradients of a step, and its collectives in order."""
    torch.manual_seed(0)
    model.zero_grad()
    with Exchanges() as exchanges:
        loss = model(ids)
        loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return [getattr(t, "_local_tensor", t).clone() for t in (loss, *gradients)], exchanges.calls


def wide(is_sharded: bool, made: Callable[[nn.Module], nn.Module] = lambda model: model) -> Any:
    """A Llama of width 1024, its blocks by `made`, with its call."""
    torch.manual_seed(0)
    case = models.llama(layers=4, width=1024, heads=16, vocabulary=1024, batch=1, length=512)
    model: Any = made(case.model)
    if is_sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, case.kwargs


def paging_rows() -> Iterator[dict[str, Any]]:
    """All blocks of each process, or parts of them."""
    for is_sharded in (False, True):

        def measured(model: Any, call: dict[str, Any]) -> list[int]:
            def step() -> None:
                model(**call).loss.backward()

            step()
            found = sorted(rockplan.peak_live_bytes(step, 1).peak_bytes for _ in range(STEPS))
            return [max(sizes) for sizes in zip(*everywhere(found), strict=True)]

        budget_bytes = measured(*wide(is_sharded, per_block))[-1]
        eager, call = wide(is_sharded)
        eager(**call).loss.backward()
        for link in (None, "250MB/s"):
            paging: dict[str, Any] = {} if link is None else {"host": "4GiB", "link": link}
            model, _ = wide(is_sharded)
            options = replace(OPTIONS, group=None if is_sharded else dist.group.WORLD, **paging)
            row: dict[str, Any] = {"is_sharded": is_sharded, "link": link, "budget": budget_bytes}
            try:
                rockplan.solve_blocks(model, (), budget_bytes, sample_kwargs=call, options=options)
            except rockplan.InfeasibleBudget as error:
                yield {**row, "least": error.minimum_bytes}
                continue
            plan = rockplan.blocks_of(model)
            model(**call).loss.backward()
            pairs = [*zip(model.parameters(), eager.parameters(), strict=True)]
            parts = [[getattr(p.grad, "_local_tensor", p.grad) for p in pair] for pair in pairs]
            row["equal"] = all(everywhere(all(torch.equal(*pair) for pair in parts)))
            row |= {"predicted": plan.peak_bytes, "without": plan.least_peak_bytes}
            row |= {"measured": measured(model, call), "overhead": plan.overhead}
            yield {**row, "paged": plan.paged_bytes}


def trainer_rows() -> Iterator[dict[str, Any]]:
    """Two of each dimension; `trainer_step` asserts that there is one plan for each stage."""
    options = replace(OPTIONS, time_limit_s=0.5)
    began = time.monotonic()
    ours, eager = trainer_step(options, (2, 2, 2)), trainer_step(None, (2, 2, 2))
    seconds = time.monotonic() - began
    same = len(ours) == len(eager) and all(map(torch.equal, ours, eager))
    yield {"equal": all(everywhere(same)), "seconds": max(everywhere(seconds))}


def in_flight_rows() -> Iterator[dict[str, Any]]:
    """On one process."""
    torch.manual_seed(0)
    stage = nn.Sequential(*[Mixer(WIDTH) for _ in range(4)]).train()
    x = torch.randn(ROWS, WIDTH).requires_grad_()
    options = replace(OPTIONS, cache=True)
    shares = [f"{percent}%" for percent in (*range(100, 60, -20), *range(60, 14, -5))]
    each = [p for p in plan_each(stage, x, shares, options=options) if isinstance(p, rockplan.Plan)]
    for count in (2, 4):
        for share in ("25%", "20%"):
            row = {"count": count, "share": share}
            try:
                ours = rockplan.plan(stage, x, share, options=replace(options, in_flight=count))
            except rockplan.InfeasibleBudget:
                yield row
                continue
            within = [p for p in each if needed_bytes(p, count) <= ours.budget_bytes]
            best = min((p.overhead for p in within), default=None)
            yield {**row, "ours": ours.overhead, "best": best}


def collective_rows() -> Iterator[dict[str, Any]]:
    """Gloo by itself: collectives whose tensors are dropped at once."""
    size = 4 * WIDTH * WIDTH
    part = size // dist.get_world_size()
    calls: dict[str, Callable[[], object]] = {
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(part), torch.ones(size)),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(size), torch.ones(part)),
    }
    for name, call in calls.items():
        for count in (1, 4):

            def in_a_row(call: Callable[[], object] = call, count: int = count) -> None:
                for _ in range(count):
                    call()

            in_a_row()
            peaks_bytes = [rockplan.peak_live_bytes(in_a_row, 1).peak_bytes for _ in range(12)]
            shares = sorted(peak_bytes / (4 * size) for peak_bytes in peaks_bytes)
            yield {"name": name, "count": count, "shares": [shares[0], shares[6], shares[-1]]}


PARTS: dict[str, tuple[Callable[[], Iterator[dict[str, Any]]], tuple[int, ...]]] = {
    "agreement": (agreement_rows, (2, 4)),
    "peak": (peak_rows, (2,)),
    "tensor": (tensor_rows, (2, 4)),
    "paging": (paging_rows, (2,)),
    "trainer": (trainer_rows, (8,)),
    "gloo": (collective_rows, (2,)),
    "in flight": (in_flight_rows, (2,)),
}
"""What is measured, and on how many processes."""


def work(parts: list[str]) -> None:
    """Of each process; the first prints rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    for part in parts:
        rows, counts = PARTS[part]
        if dist.get_world_size() in counts and (part != "in flight" or is_first):
            for row in rows():
                if is_first:
                    print(json.dumps({"part": part, **row}), flush=True)
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # processes of gloo abort now and then while Python shuts down


def run_on(count: int, parts: list[str], run: dict[str, str]) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "benchmarks.ranks"]
    command += ["--is-worker", "--parts", *parts]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as processes:
        assert processes.stdout is not None
        for line in processes.stdout:
            if line.startswith("{"):
                print(line, end="", file=sys.stderr)
                yield {"processes": count, **run, **json.loads(line)}
    if processes.returncode:
        raise SystemExit(f"{count} processes failed")


def this_run() -> dict[str, str]:
    """Where rows are from: the day, the commit and how busy the machine was before."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    load = f"load {os.getloadavg()[0]:.0f}"
    return {"date": str(datetime.date.today()), "commit": found.stdout.strip(), "load": load}


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def agreement_cells(row: dict[str, Any]) -> tuple[str, ...]:
    def cells(name: str) -> tuple[str, str]:
        if name not in row:
            return "", ""
        digests, seconds, _ = row[name]
        return "nothing fits" if digests < 0 else str(digests), f"{seconds:.1f}"

    together, each = cells("together"), cells("each")
    ratios = ("", "")
    if "one" in row:
        ratio, own_ratio = (row["together"][i] / row["one"][i] for i in (1, 2))
        ratios = (f"{ratio:.2f}", f"{own_ratio / row['processes']:.2f}")
    named = (str(row["processes"]), row["kind"], row["budget"])
    return (*named, *together, cells("one")[1], *ratios, *each)


def peak_cells(row: dict[str, Any]) -> tuple[str, ...]:
    named = (row["mode"], row["budget"])
    if "predicted" not in row:
        return (*named, "nothing fits", "", "", "", "", "")
    least, _, most = (f"{size / row['predicted'] - 1:+.1%}" for size in row["measured"])
    sizes = (f"{size:,}" for size in (row["predicted"], *row["measured"]))
    return (*named, *sizes, least, most)


def tensor_cells(row: dict[str, Any]) -> tuple[str, ...]:
    cells = (str(row["processes"]), *peak_cells(row))
    if "predicted" not in row:
        return (*cells, "", "", "", "")
    ours, once = row["collectives"]
    equal = "yes" if row["equal"] else "no"
    return (*cells, f"{row['overhead']:+.1%}", f"{ours} / {once}", str(row["plans"]), equal)


def paging_cells(row: dict[str, Any]) -> tuple[str, ...]:
    named = "parts" if row["is_sharded"] else "all", row["link"] or "no host", f"{row['budget']:,}"
    if "least" in row:
        return (*named, f"nothing fits below {row['least']:,}", "", "", "", "", "", "", "")
    return (
        *named,
        *(f"{size:,}" for size in (row["predicted"], row["without"], *row["measured"])),
        f"{row['overhead']:+.1%}",
        f"{row['paged'] / 2**20:.0f}",
        "yes" if row["equal"] else "no",
    )


def trainer_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (str(row["processes"]), "yes" if row["equal"] else "no", f"{row['seconds']:.0f}")


def in_flight_cells(row: dict[str, Any]) -> tuple[str, ...]:
    named = (str(row["count"]), row["share"])
    if "ours" not in row:
        return (*named, "nothing fits", "")
    best = "none fits" if row["best"] is None else f"{row['best']:+.1%}"
    return (*named, f"{row['ours']:+.1%}", best)


def collective_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["name"], str(row["count"]), *(f"{share:.1f}" for share in row["shares"]))


def report() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--parts", nargs="*", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--is-worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.is_worker:
        work(arguments.parts)
    known = [json.loads(line) for line in ROWS_FILE.read_text().splitlines()]
    rows = [row for row in known if row["part"] not in arguments.parts]
    run = this_run()
    for count in arguments.counts if arguments.parts else ():
        rows += run_on(count, arguments.parts, run)
    ROWS_FILE.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def of(part: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["part"] == part]

    def when(part: str) -> str:
        runs = dict.fromkeys(
            ", ".join(row[k] for k in ("date", "commit", "load") if k in row) for row in of(part)
        )
        return f"({'; '.join(runs)}.)"

    where = machine(torch.device("cpu"))
    lines = [
        "# Several processes",
        "",
        f"`python -m benchmarks.ranks`: {where}. Processes of gloo, four blocks of width "
        "64, 256 rows. NCCL is unseen: there is no second device.",
        "",
        "Digests: how many plans there are. Together: one process measures and solves for all with "
        "the same graph (`Options(group=...)`; sharded blocks always). One: the first process "
        "alone, while the others wait. Each: every process for itself. Seconds: of the slowest. Of "
        "CPU time: what a process takes on average together, over what the one takes. "
        f"{when('agreement')}",
        "",
        *table(
            ("processes", "what", "budget", "digests together", "s", "s of one", "ratio")
            + ("of CPU time, each", "digests of each", "s"),
            map(agreement_cells, of("agreement")),
        ),
        "",
        "Sharded by `fully_shard` on two processes, then planned: bytes beyond parameters and "
        f"`.grad`, the largest of both, of {STEPS} steps. A collective of gloo lets go of its "
        "memory late in some steps: the least is what a step needs without that, the most with it. "
        f"{when('peak')}",
        "",
        *table(
            ("mode", "budget", "predicted", "least", "median", "most")
            + ("least over predicted", "most over predicted"),
            map(peak_cells, of("peak")),
        ),
        "",
        "Gloo by itself: peaks of collectives whose tensors are dropped at once, of 12 runs, in "
        "sizes of the whole tensor: what more than one call needs is what gloo lets go of late. "
        f"{when('gloo')}",
        "",
        *table(
            ("collective", "in a row", "least", "median", "most"),
            map(collective_cells, of("gloo")),
        ),
        "",
        "Blocks of `parallelize_module` (four layers of a Llama of width 64, 8 rows of 64 words): "
        "bytes as above; the extra time of the plan, in which times of collectives are estimated; "
        "collectives of a step and of eager's; how many plans the processes have; are loss and "
        f"gradients equal to eager's bit for bit? {when('tensor')}",
        "",
        *table(
            ("processes", "mode", "budget", "predicted", "least", "median", "most")
            + ("least over predicted", "most over predicted", "time", "collectives", "plans")
            + ("equal",),
            map(tensor_cells, of("tensor")),
        ),
        "",
        "Blocks of a Llama of width 1024 (four layers, 512 tokens, float32) within the peak of "
        "`torch.utils.checkpoint` of each layer, on two processes that have all of them, or parts "
        "(`fully_shard`), with and without a host: bytes as above, predicted also without what "
        "collectives let go of late; predicted extra time of the blocks; MiB paged; are gradients "
        f"equal to eager's bit for bit? {when('paging')}",
        "",
        *table(
            ("each has", "link", "checkpointing", "predicted", "without", "least", "median")
            + ("most", "time", "MiB paged", "equal"),
            map(paging_cells, of("paging")),
        ),
        "",
        "Pipeline, data (FSDP2) and tensor parallel at once, two processes of each (1F1B, four "
        "microbatches, smallest budget, one plan for each stage): are losses and gradients of two "
        "steps equal to eager's bit for bit; seconds of planning and of steps of both. "
        f"{when('trainer')}",
        "",
        *table(("processes", "equal", "s"), map(trainer_cells, of("trainer"))),
        "",
        "Calls in flight: extra time of the plan of `Options(in_flight=k)`, and of the best of the "
        "plans for 12 budgets of one call whose peak and k - 1 times what they keep are within the "
        "same bytes. Budgets are shares of what k calls need unplanned. "
        f"{when('in flight')}",
        "",
        *table(
            ("k", "budget", "in_flight", "best of one call"),
            map(in_flight_cells, of("in flight")),
        ),
    ]
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    report()
