"""What a process of several that train a model needs: said, and measured.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node=2 -m benchmarks.shards

Two processes of gloo on CPU: a second step, forward, backward and optimizer, of models under
DistributedDataParallel and `fully_shard` (each repeated block, then the model), kept whole and with
checkpointing; the least of some steps, and of some tries where that is more than is said, since
threads of gloo give memory back late, or where the profiler does not see it. Then the same of the
first of eight processes, of which there are no others (collectives that do nothing and ask for no
memory, as NCCL asks for none of the allocator); as `python -m benchmarks.shards`, of that alone.
Names of models after the command: of these. Writes benchmarks/results/shards.{jsonl,md}, in which
rows that did not run stay, with the commit that they ran at.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.fit import with_loss
from benchmarks.timing import where
from rockplan.fitting.shards import DDP, FSDP2
from testing import models
from testing.models import Case
from testing.ranks import Rank, fake_group
from testing.sharding import everywhere

RESULT = Path(__file__).parent / "results" / "shards.md"
ROWS_FILE = RESULT.with_suffix(".jsonl")
STEPS, TRIES, CLOSE = 12, 5, 1.0005


class LowRank(nn.Module):
    """A frozen linear layer, and trained parameters of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found


def decoder() -> Case:
    return models.llama(4, width=56, batch=4, length=64)


def with_adapters(case: Case) -> Case:
    """Of queries and values; all else is frozen."""
    case.model.requires_grad_(requires_grad=False)
    for name, module in [*case.model.named_modules()]:
        path, _, own = name.rpartition(".")
        if own in ("q_proj", "v_proj"):
            setattr(case.model.get_submodule(path), own, LowRank(module))
    return case


def with_frozen(case: Case, *paths: str) -> Case:
    """Parts of the decoder are frozen."""
    for path in paths:
        case.model.get_submodule(f"model.{path}").requires_grad_(requires_grad=False)
    return case


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2 (tied)": lambda: models.gpt2(
        4, width=64, vocabulary=1000, batch=4, length=32, attention_dropout=0.0
    ),
    "llama": lambda: decoder(),
    "vit": lambda: models.vit(4, width=100, heads=4, batch=4),
    "resnet-18": lambda: with_loss(models.resnet18(12, 4, 32)),
    "llama, adapters": lambda: with_adapters(decoder()),
    "llama, frozen prefix": lambda: with_frozen(decoder(), "embed_tokens", "layers.0", "layers.1"),
    "llama, frozen in the middle": lambda: with_frozen(decoder(), "layers.1", "layers.2"),
}
OPTIMIZERS: dict[str, Any] = {
    "SGD, momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}
WAYS = ("kept whole", "checkpoint per block")

Row = dict[str, Any]


def without_dropout(make: Callable[[], Case]) -> Case:
    """The state of a generator on CPU is no memory of a GPU."""
    case = make()
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return case


def measured_bytes(rank: Rank, said_bytes: int) -> int:
    """The least of some tries, until it is not more than is said on any process."""
    if dist.get_backend() == "fake":
        return rank.measured_bytes(1)
    found = rank.measured_bytes(STEPS)
    for _ in range(TRIES - 1):
        if not any(everywhere(found > CLOSE * said_bytes)):
            break
        found = min(found, rank.measured_bytes(STEPS))
    return found


def rows(hows: tuple[str, ...]) -> Iterator[Row]:
    chosen = {name: make for name, make in MODELS.items() if name in (sys.argv[1:] or MODELS)}
    cases = itertools.product(chosen.items(), hows, OPTIMIZERS.items(), WAYS)
    for (name, make), how, (optimizer, factory), way in cases:
        torch.manual_seed(0)
        case = functools.partial(without_dropout, make)
        rank = Rank(case, how, factory, checkpointed=way != WAYS[0])
        said_bytes = rank.said_bytes()
        yield {
            "processes": dist.get_world_size(),
            "model": name,
            "shard": how,
            "optimizer": optimizer,
            "way": way,
            "predicted_bytes": said_bytes,
            "peak_bytes": measured_bytes(rank, said_bytes),
            "where": where(),
        }


def table(found: list[Row]) -> str:
    errors = [row["predicted_bytes"] / row["peak_bytes"] - 1 for row in found]
    places = dict.fromkeys(row["where"] for row in found)
    lines = [
        "`OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node=2 -m "
        "benchmarks.shards`: bytes of the first process in a step, by `rockplan.fit`'s timeline "
        f"and by the allocator's events. From {min(errors):+.2%} to {max(errors):+.2%}. At "
        f"{'; at '.join(places)}.",
        "",
        "| processes | model | shard | optimizer | way | predicted | measured | error | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, error in zip(found, errors, strict=True):
        *cells, place = map(str, row.values())
        lines.append(f"| {' | '.join(cells)} | {error:+.2%} | {place.split(',')[0]} |")
    return "\n".join(lines) + "\n"


def of_two_processes() -> list[Row]:
    dist.init_process_group("gloo")
    found = []
    for row in rows((DDP, FSDP2)):
        found.append(row)
        if not dist.get_rank():
            print(row, flush=True)
    is_first = not dist.get_rank()
    dist.destroy_process_group()
    if not is_first:
        sys.exit()
    return found


def main() -> None:
    found = of_two_processes() if dist.is_torchelastic_launched() else []
    with fake_group(8):
        for row in rows((FSDP2,)):
            found.append(row)
            print(row, flush=True)
    others = map(json.loads, ROWS_FILE.read_text().splitlines())
    known = {tuple([*row.values()][:5]): row for row in (*others, *found)}
    names = [*MODELS]
    ordered = sorted(known.values(), key=lambda row: (row["processes"], names.index(row["model"])))
    ROWS_FILE.write_text("".join(f"{json.dumps(row)}\n" for row in ordered))
    RESULT.write_text(table(ordered))


if __name__ == "__main__":
    main()
