"""On a CUDA machine: does what people train with hold there? In five minutes.

    python -m benchmarks.gpu_stack [--minutes 5] [--cpu]

A Llama with Liger's kernels declared by `rockplan.opaque`, one with flex_attention whose MLPs are
planned as blocks, blocks under FSDP2 on one device, and ten lengths of batches. Each as it is and
planned: peak, time, and whether loss and gradients of a step are equal. One that fails has a row
that says why. With --cpu: small models without a GPU, to test the script itself; there are no
kernels of Liger then, and flex_attention has no backward.
"""

from __future__ import annotations

import copy
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
from benchmarks.gpu import LLAMA, TimeLimit, arguments, tried, where
from benchmarks.lengths import LENGTHS, lengths_of
from benchmarks.models import Case
from benchmarks.timing import interleaved_seconds, mebibytes

MINUTES = 5.0
ROUNDS = 7
BUDGET = "60%"
TEN = 10
RELEASED = rockplan.Options(released=(1,))
"""Steps let go of the logits."""


@dataclass(frozen=True, slots=True)
class StackRow:
    """What one way needs. equal: to the way before any plan; '' of that itself."""

    what: str
    way: str
    peak_bytes: int = 0
    milliseconds: float = 0.0
    equal: str = ""
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"| {self.what} | {self.way} | {self.error} | | |"
        peak, time_ms = mebibytes(self.peak_bytes), f"{self.milliseconds:.1f}"
        return f"| {self.what} | {self.way} | {peak} | {time_ms} | {self.equal} |"


def llama(on_cpu: bool) -> Case:
    if on_cpu:
        return models.llama(batch=4)
    made = LLAMA()
    made.model.bfloat16()
    return made


def loss_of(case: Case, module: nn.Module) -> torch.Tensor:
    return case.loss(module(*case.args, **case.kwargs))


def stepped(case: Case, module: nn.Module) -> list[torch.Tensor]:
    """Loss and gradients of a step from a fixed seed."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(11)
    loss = loss_of(case, module)
    loss.backward()
    found = [p.grad for p in module.parameters() if p.grad is not None]
    return [loss.detach(), *(_local(g).clone() for g in found)]


def _local(gradient: Any) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def side_by_side(
    what: str, case: Case, plain: nn.Module, planned: nn.Module, device: torch.device
) -> list[StackRow]:
    """The rows of a module as it is and planned; each has parameters of its own."""
    ways = {"plain": plain, "planned": planned}
    found = {way: stepped(case, module) for way, module in ways.items()}
    again = stepped(case, plain)
    steps = {way: lambda m=module: loss_of(case, m).backward() for way, module in ways.items()}
    peaks = {
        way: rockplan.peak_live_bytes(step, device=device).peak_bytes for way, step in steps.items()
    }
    times = interleaved_seconds(steps, ROUNDS)
    equal = {"plain": same(again, found["plain"]), "planned": same(*found.values())}
    return [
        StackRow(what, way, peaks[way], 1e3 * statistics.median(times[way]), equal[way])
        for way in ways
    ]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    pairs = [*zip(found, expected, strict=True)]
    if all(torch.equal(a, b) for a, b in pairs):
        return "equal"
    return f"{max(float((a - b).abs().max()) for a, b in pairs):.1e}"


def liger(on_cpu: bool, device: torch.device, rotates: bool = False) -> list[StackRow]:
    """Norms and SwiGLU by Liger's kernels, planned as a whole. rotates: the rotary embedding, too,
    which writes into its arguments and returns them."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    rockplan.opaque(LigerRMSNormFunction, backward_mutates=("dY",))
    saved = ("saved_tensors[0]", "saved_tensors[1]")
    rockplan.opaque(LigerSiLUMulFunction, backward_mutates=saved)
    if rotates:
        rockplan.opaque(LigerRopeFunction, mutates=("q", "k"), backward_mutates=("dq", "dk"))
    case = llama(on_cpu).to(device)
    apply_liger_kernel_to_llama(
        rope=rotates, cross_entropy=False, fused_linear_cross_entropy=False, model=case.model
    )
    return _whole(f"liger{' with rope' if rotates else ''}", case, device)


def _whole(what: str, case: Case, device: torch.device) -> list[StackRow]:
    planned = rockplan.solve(
        copy.deepcopy(case.model), case.args, BUDGET, sample_kwargs=case.kwargs, options=RELEASED
    )
    return side_by_side(what, case, case.model, planned, device)


def flex(on_cpu: bool, device: torch.device) -> list[StackRow]:
    """Attention by flex_attention, which no plan looks into: the MLPs are the blocks."""
    case = llama(on_cpu).to(device)
    case.model.set_attn_implementation("flex_attention")
    planned = copy.deepcopy(case.model)
    rockplan.solve_blocks(
        planned, case.args, "min", blocks="model.layers.*.mlp", sample_kwargs=case.kwargs
    )
    return side_by_side("flex_attention, blocks", case, case.model, planned, device)


def sharded(on_cpu: bool, device: torch.device) -> list[StackRow]:
    """Blocks under `fully_shard`, on one device."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    backend = "gloo" if on_cpu else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,))
        case = llama(on_cpu).to(device)
        planned = copy.deepcopy(case.model)
        rockplan.solve_blocks(planned, case.args, BUDGET, sample_kwargs=case.kwargs)
        for model in (case.model, planned):
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return side_by_side("fully_shard, blocks", case, case.model, planned, device)
    finally:
        dist.destroy_process_group()


def lengths(on_cpu: bool, device: torch.device) -> list[StackRow]:
    """Ten lengths, of which two are planned before: ms are those of all ten steps, and of the same
    once more when all are known."""
    case = llama(on_cpu).to(device)
    longest = case.kwargs["input_ids"].shape[1]
    several = lengths_of(longest)[:LENGTHS:2][:TEN]
    sizes = {1: (min(several), longest)}
    options = rockplan.Options(released=(1,), sizes=sizes)
    planned = rockplan.solve(
        copy.deepcopy(case.model), case.args, BUDGET, sample_kwargs=case.kwargs, options=options
    )
    batches = [
        Case(case.name, case.model, (), {k: t[:, :n] for k, t in case.kwargs.items()}, case.loss)
        for n in several
    ]
    seen: dict[str, list[list[torch.Tensor]]] = {}
    rows: list[StackRow] = []
    for way, module in (("plain", case.model), ("planned", planned), ("planned, known", planned)):
        synchronize(device)
        begin = time.perf_counter()
        seen[way] = [stepped(batch, module) for batch in batches]
        synchronize(device)
        milliseconds = 1e3 * (time.perf_counter() - begin)
        largest = batches[several.index(max(several))]
        step = partial(lambda b, m: loss_of(b, m).backward(), largest, module)
        peak_bytes = rockplan.peak_live_bytes(step, device=device).peak_bytes
        pairs = zip(seen[way], seen["plain"], strict=True)
        different = [said for pair in pairs if (said := same(*pair)) != "equal"]
        rows.append(
            StackRow("ten lengths", way, peak_bytes, milliseconds, ", ".join(different) or "equal")
        )
    return rows


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


Part = Callable[[bool, torch.device], list[StackRow]]
PARTS: dict[str, Part] = {
    "ten lengths": lengths,
    "fully_shard, blocks": sharded,
    "liger": liger,
    "flex_attention, blocks": flex,
    # Last: what it replaces is a function of transformers, for all models.
    "liger with rope": partial(liger, rotates=True),
}
HEAD = "| what | way | peak MiB | ms | loss and gradients |\n|---|---|---|---|---|"


def main() -> None:
    given = arguments(__doc__, MINUTES)
    limit = TimeLimit(60 * given.minutes)
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device("cpu" if given.cpu else "cuda")
    print(f"{where()}\nplanned under {BUDGET}\n\n{HEAD}", flush=True)
    for number, (name, part) in enumerate(PARTS.items()):
        torch.manual_seed(0)
        own = limit.part(1 / (len(PARTS) - number))
        found = tried(partial(part, given.cpu, device), own)
        rows = [StackRow(name, "", error=found)] if isinstance(found, str) else found
        print("\n".join(map(str, rows)), flush=True)


if __name__ == "__main__":
    main()
