"""The memory of a step of training, as rockplan and others say it, beside what is measured on CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.estimates

Two steps of AdamW from the start, in eager PyTorch: the most bytes alive, with parameters, buffers
and inputs, by the allocator's events. Said by rockplan's timeline of the step kept whole; by
`MemTracker` of `torch.distributed._tools`, once over fake tensors and once while the steps run; and
by `accelerate estimate-memory`, which knows the size of a model alone (here by its functions, since
the command reads models from a hub). Writes benchmarks/results/estimates.{jsonl,md}.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import rockplan
from benchmarks.fit import with_loss
from benchmarks.timing import where
from rockplan.fitting.optimizer import optimizer_steps
from rockplan.fitting.timeline import passes_of, timeline_of
from rockplan.fitting.ways import kept_whole
from rockplan.graph_builder.costs.ruler import memory_events, profiled
from rockplan.runtime.program import ModuleCall
from rockplan.solving.captured_calls import arguments, captured_call, problems_of
from testing import models
from testing.models import Case

RESULTS = Path(__file__).parent / "results"
MODELS: dict[str, Callable[[], Case]] = {
    "GPT-2": partial(models.gpt2, 4, 256, batch=4, length=128, attention_dropout=0.0),
    "Llama": partial(models.llama, 4, 256, batch=4, length=128),
    "BERT": partial(models.bert, 4, 256, batch=4, length=128),
    "T5": partial(models.t5, 3, 128, batch=4, length=64),
    "ViT": partial(models.vit, 4, 256, batch=32),
    "ResNet-50": lambda: with_loss(models.resnet(width=16, batch=8)),
    "U-Net": lambda: with_loss(models.unet(width=8, batch=4)),
    "MLP": lambda: with_loss(models.mlp(width=512, batch=256)),
}
Row = dict[str, Any]


def resident_bytes(case: Case) -> int:
    sample = [t for t in (*case.args, *case.kwargs.values()) if torch.is_tensor(t)]
    tensors = [*case.model.parameters(), *case.model.buffers(), *sample]
    storages = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def train(
    case: Case, optimizer: torch.optim.Optimizer, after_step: Callable[[], None] = lambda: None
) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        case.step()
        optimizer.step()
        after_step()


def measured(case: Case) -> int:
    warm = copy.deepcopy(case.model)  # what operators keep from their first run is no part of it
    case.loss(warm(*case.args, **case.kwargs)).backward()
    del warm
    optimizer = torch.optim.AdamW(case.model.parameters())
    gc.collect()
    with profiled() as session:
        train(case, optimizer)
    changes = (change for _, change in memory_events(session))
    case.model.zero_grad()
    return resident_bytes(case) + max(itertools.accumulate(changes, initial=0))


def by_rockplan(case: Case) -> int:
    call = ModuleCall(case.model, *arguments(case.model, case.args, case.kwargs))
    source = captured_call(call, rockplan.Options())
    graph = problems_of(source, rockplan.Options())[0].graph
    interface = source.lowered.interface
    steps = optimizer_steps("adamw", dict(case.model.named_parameters()), metered=True)
    passes = passes_of(*kept_whole(graph), interface, steps)
    return resident_bytes(case) + timeline_of({}, passes, steps).peak.size_bytes


def by_tracker(case: Case) -> int:
    optimizer = torch.optim.AdamW(case.model.parameters())
    tracker = MemTracker()
    sample = [t for t in (*case.args, *case.kwargs.values()) if torch.is_tensor(t)]
    tracker.track_external(case.model, optimizer, *sample)
    with tracker:
        train(case, optimizer, tracker.reset_mod_stats)
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    case.model.zero_grad()
    return int(snapshot["Total"])


def by_fake_tracker(make: Callable[[], Case]) -> int:
    with FakeTensorMode():
        return by_tracker(make())


def by_accelerate(case: Case) -> int:
    """The most of what it says for training with Adam in float32."""
    total_bytes, _ = calculate_maximum_sizes(case.model)
    return int(max(estimate_training_usage(total_bytes, "float32").values()))


def row_of(name: str) -> Row:
    make = MODELS[name]
    torch.manual_seed(0)
    row: Row = {"model": name, "measured": measured(make())}
    for who, say in (
        ("rockplan", lambda: by_rockplan(make())),
        ("MemTracker, fake", lambda: by_fake_tracker(make)),
        ("MemTracker, running", lambda: by_tracker(make())),
        ("accelerate", lambda: by_accelerate(make())),
    ):
        try:
            row[who] = say()
        except Exception as error:  # of others: a cell says so
            row[who] = f"{type(error).__name__}"
    return row


def table(rows: list[Row]) -> str:
    ways = [key for key in rows[0] if key not in ("model", "measured")]
    lines = [
        f"{where()}, accelerate. MiB at the peak of two steps with AdamW; error of what is said.",
        "",
        f"| model | measured | {' | '.join(ways)} |",
        "|---" * (2 + len(ways)) + "|",
    ]
    for row in rows:
        cells = [row["model"], f"{row['measured'] / 2**20:.2f}"]
        for way in ways:
            said = row[way]
            is_known = isinstance(said, int)
            cells.append(f"{said / row['measured'] - 1:+.2%}" if is_known else str(said))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = []
    for name in MODELS:
        rows.append(row_of(name))
        print(rows[-1], flush=True)
    (RESULTS / "estimates.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (RESULTS / "estimates.md").write_text(table(rows))


if __name__ == "__main__":
    main()
