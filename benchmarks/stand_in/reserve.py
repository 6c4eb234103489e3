"""Does one allocation before training, given back at once, save what fragmentation costs?

    python -m benchmarks.stand_in.run build/stand_in -m benchmarks.stand_in.reserve [--write FILE]

Plans of models of `testing.gpu_cases` at full size, the smallest and one of 60 %, train three steps
with AdamW and SGD on PyTorch's own allocator, which runs on the stand-in: what it reserves over
what is allocated, as it is, with segments that expand, and after a block of the bytes that a step
needs beyond what there is was allocated and freed, so that it is one segment from which others are
split; `best` is a block of 100 to 130 % of that, the one after which the model of the allocator
reserves least. `said`: by that model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import rockplan
from benchmarks import gpu_fit, stand_in
from benchmarks.gpu_table import table
from rockplan.fitting.changes import Changes, Holding, MemoryChange
from testing.gpu_cases import case_of

NAMES = ("llama", "gpt2-large", "resnet-50")
BUDGETS = ("min", "60%")
SHARES = range(100, 132, 2)
"""Percent of the predicted bytes, for the block that the model likes best."""

Row = dict[str, Any]


def rows_of(name: str, is_expandable: bool) -> Iterator[Row]:
    device = torch.device("cuda")
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{is_expandable}")
    case = gpu_fit.compacted(case_of(name, False, device), device)
    for budget in BUDGETS:
        fast = rockplan.solve(
            case.model,
            case.args,
            budget,
            sample_kwargs=case.kwargs,
            options=gpu_fit.options_of(case),
        )
        steps = gpu_fit.Steps(case, device, is_expandable, fast)
        for optimizer in gpu_fit.OPTIMIZERS:
            row = {"model": name, "budget": budget, "optimizer": optimizer}
            if is_expandable:
                yield row | {"expandable": reserved_bytes(steps, optimizer, 0)}
                continue
            held, asked = steps.held_bytes(), steps.changes("rockplan", optimizer)
            exact = Changes(asked).usage(held, expandable=True)
            needed_bytes = exact.allocated_peak_bytes - sum(held)
            blocks = [needed_bytes * share // 100 for share in SHARES]
            said = [after_block(held, asked, block) for block in blocks]
            best_bytes = min(zip(said, blocks, strict=True))[1]
            yield row | {
                "allocated_bytes": exact.allocated_peak_bytes,
                "default": reserved_bytes(steps, optimizer, 0),
                "default said": Changes(asked).usage(held).reserved_peak_bytes,
                "block": reserved_bytes(steps, optimizer, blocks[0]),
                "block said": said[0],
                "best": reserved_bytes(steps, optimizer, best_bytes),
                "best said": min(said),
            }


def after_block(held: list[int], asked: tuple[MemoryChange, ...], block_bytes: int) -> int:
    block = MemoryChange("block", block_bytes, Holding.CALLER)
    return Changes((block, block.freed, *asked)).usage(held).reserved_peak_bytes


def reserved_bytes(steps: gpu_fit.Steps, optimizer: str, block_bytes: int) -> int:
    """By PyTorch, over three steps after a block of so many bytes."""
    gpu_fit.forget(steps.case)
    made = gpu_fit.OPTIMIZERS[optimizer](steps.planned.parameters(), lr=1e-4)
    torch.empty(block_bytes, dtype=torch.uint8, device="cuda")
    gpu_fit.train(steps.case, steps.planned, made)
    return torch.cuda.max_memory_reserved()


def as_shares(row: Row) -> Row:
    """Reserved bytes over those allocated."""
    kept = {key: row[key] for key in ("model", "budget", "optimizer", "allocated_bytes")}
    others = [key for key in row if key not in kept]
    shares = {key: f"{row[key] / row['allocated_bytes']:.3f}" for key in others}
    return {"task": "reserve", "way": "plan"} | kept | shares


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--write", type=Path, help="a table into this file")
    parser.add_argument("--expandable", choices=("True", "False"), help="here, the first name")
    given = parser.parse_args()
    if given.expandable:
        stand_in.install()
        for row in rows_of(given.names[0], given.expandable == "True"):
            print(json.dumps(row), flush=True)
        return
    rows: list[Row] = []
    for name in given.names:
        both = zip(_own(name, False), _own(name, True), strict=True)
        rows += [as_shares(as_it_is | expandable) for as_it_is, expandable in both]
        print(table(rows[-4:]), flush=True)
        if given.write:
            head = (__doc__ or "").split("\n\n", 1)
            text = ["# One block before training", *head, f"torch {torch.__version__}"]
            given.write.write_text("\n\n".join([*text, table(rows)]))


def _own(name: str, is_expandable: bool) -> list[Row]:
    """In a process of its own."""
    command = ["--names", name, "--expandable", str(is_expandable)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.stand_in.reserve", *command],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    main()
