"""Which kernels may write over operands, at full width, and why others may not.

    python -m benchmarks.in_place_tried [--device cuda] [--models llama gpt2] [--out FILE]

Two layers of each model at the width of the tables for GPUs. For each kernel that was compiled in
place: how many nodes may call it, what it writes there, and what it needs beyond the kernel that
writes over nothing, or why it is refused. Then the largest workspace of the kernels of the model,
beside the largest result of the one that needs it. Nothing is planned, and no time is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.timing import mebibytes
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.fusion import in_place, inductor, kernels
from rockplan.graph_builder.fusion.indices import trial_inputs
from rockplan.graph_builder.pipeline import lower
from rockplan.graph_builder.recorded.specs import allocated_bytes
from rockplan.options import Options
from rockplan.side_by_side import machine
from rockplan.values.graph import Kernel
from testing import models
from testing.models import Case

CASES: dict[str, tuple[Callable[[], Case], torch.dtype]] = {
    "llama": (
        partial(
            models.llama, 2, 2048, 32, key_value_heads=4, vocabulary=32000, batch=4, length=2048
        ),
        torch.bfloat16,
    ),
    "gpt2": (
        partial(models.gpt2, 2, 1280, 20, vocabulary=50257, batch=4, length=1024),
        torch.bfloat16,
    ),
    "gpt2, attention written out": (
        partial(models.gpt2, 2, 768, 12, vocabulary=50257, batch=4, length=1024, attention="eager"),
        torch.float32,
    ),
    "bert": (
        partial(models.bert, 2, 768, 12, vocabulary=30522, batch=8, length=512),
        torch.float32,
    ),
    "vit": (partial(models.vit, 2, 768, 12, batch=64, size=224, patch=16), torch.bfloat16),
    "t5": (partial(models.t5, 2, 512, vocabulary=32128, batch=8, length=512), torch.float32),
    "resnet": (partial(models.resnet, width=64, batch=64, size=224), torch.float32),
}


def rows(name: str, device: str) -> Iterator[str]:
    torch.manual_seed(0)
    make, dtype = CASES[name]
    case = make()
    case.model.to(dtype)
    case = case.to(device)
    run = capture(case.model, case.args, case.kwargs)
    graph = lower(run, rng_state_bytes=0, options=Options(compile=True)).graph
    ways, found = in_place.tried(graph)
    accepted = sum(isinstance(made, Kernel) for made in found.values())
    yield f"| {name} | {accepted} of {len(found)} | | | |"
    for (op, over), made in found.items():
        nodes = ways[op, over]
        index, takeover = nodes[0]
        written_bytes = sum(graph.data[d].size_bytes for d in takeover.operands)
        said = made if isinstance(made, str) else f"yes, {kernels.more_bytes_of(made)} B more"
        kernel = op.split(".")[1].rpartition("_")[0]
        of = " + ".join(graph.data[d].name for d in takeover.operands)
        yield f"| | {kernel} over {of} | {len(nodes)} | {mebibytes(written_bytes)} | {said} |"
    spare = max((_spare(kernel) for kernel in graph.kernels if not kernel.over), default=(0, 0, ""))
    beyond, whole = mebibytes(spare[0]), mebibytes(spare[1])
    yield f"| | workspace, most beyond the largest result: {spare[2]} | | {beyond} of {whole} | |"


def _spare(kernel: Kernel) -> tuple[int, int, str]:
    """Bytes of workspace beyond the largest result, and of workspace."""
    device_type = torch.device(kernel.device).type
    function = kernels.functions_of([kernel])[kernel.op]
    with inductor.below_autograd():
        inputs = trial_inputs(kernel)
        results, peak_bytes = kernels.measured(kernel, function, inputs)
    sizes = [allocated_bytes(t.untyped_storage().nbytes(), device_type) for t in results]
    workspace_bytes = peak_bytes - sum(sizes)
    return workspace_bytes - max(sizes), workspace_bytes, kernel.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        f"`python -m benchmarks.in_place_tried --device {options.device}`: {machine()}",
        "",
        "| model | kernel over operands | nodes | MiB written | in place |",
        "|---|---|---|---|---|",
    ]
    for name in options.models:
        for line in rows(name, options.device):
            lines.append(line)
            print(line, flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
