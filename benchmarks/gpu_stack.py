"""A worker of `benchmarks.gpu`: does what people train with hold there?

A Llama with Liger's kernels declared by `rockplan.opaque`, one with flex_attention whose MLPs are
planned as blocks, blocks under FSDP2 on one device, and ten lengths of batches. Each as it is and
planned: peak, time, and whether loss and gradients of a step are equal. On CPU there are no kernels
of Liger, and flex_attention has no backward.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import rockplan
from benchmarks.gpu_compiled import Say, step_seconds, synchronize
from benchmarks.gpu_table import DETAIL
from benchmarks.gpu_worker import Row, worker
from benchmarks.lengths import LENGTHS, lengths_of
from testing import models
from testing.gpu_cases import LLAMA, language, made_on
from testing.models import Case

ROUNDS = 7
BUDGET = "60%"
TEN = 10
RELEASED = rockplan.Options(released=(1,))
"""Steps let go of the logits."""


def llama(on_cpu: bool, device: torch.device) -> Case:
    small = partial(models.llama, batch=4)
    return made_on(small if on_cpu else partial(language, LLAMA), device)


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
    case: Case, plain: nn.Module, planned: nn.Module, device: torch.device, say: Say
) -> None:
    """The rows of a module as it is and planned; each has parameters of its own."""
    ways = {"plain": plain, "planned": planned}
    found: dict[str, list[torch.Tensor]] = {}
    steps = {way: lambda m=module: loss_of(case, m).backward() for way, module in ways.items()}
    for way, module in ways.items():
        found[way] = stepped(case, module)
        expected = stepped(case, plain) if way == "plain" else found["plain"]
        peak_bytes = rockplan.peak_live_bytes(steps[way], device=device).peak_bytes
        say(way, {"peak_bytes": peak_bytes, "equal": same(found[way], expected)})
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, step in steps.items():
            seconds[way].append(step_seconds(step, device)[0])
            say(way, {"ms": 1e3 * statistics.median(seconds[way])})


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    pairs = [*zip(found, expected, strict=True)]
    if all(torch.equal(a, b) for a, b in pairs):
        return "equal"
    return f"{max(float((a - b).abs().max()) for a, b in pairs):.1e}"


def liger(on_cpu: bool, device: torch.device, say: Say, rotates: bool = False) -> None:
    """Norms and SwiGLU by Liger's kernels, planned as a whole. rotates: the rotary embedding, too,
    which writes into its arguments and returns them."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    rotary = (LigerRopeFunction,) if rotates else ()
    for kind in (LigerRMSNormFunction, LigerSiLUMulFunction, *rotary):
        rockplan.opaque(kind)
    case = llama(on_cpu, device)
    apply_liger_kernel_to_llama(
        rope=rotates, cross_entropy=False, fused_linear_cross_entropy=False, model=case.model
    )
    planned = rockplan.solve(
        copy.deepcopy(case.model), case.args, BUDGET, sample_kwargs=case.kwargs, options=RELEASED
    )
    side_by_side(case, case.model, planned, device, say)


def flex(on_cpu: bool, device: torch.device, say: Say) -> None:
    """Attention by flex_attention, which no plan looks into: the MLPs are the blocks."""
    case = llama(on_cpu, device)
    case.model.set_attn_implementation("flex_attention")
    planned = copy.deepcopy(case.model)
    rockplan.solve_blocks(
        planned, case.args, "min", blocks="model.layers.*.mlp", sample_kwargs=case.kwargs
    )
    side_by_side(case, case.model, planned, device, say)


def sharded(on_cpu: bool, device: torch.device, say: Say) -> None:
    """Blocks under `fully_shard`, on one device."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    backend = "gloo" if on_cpu else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,))
        case = llama(on_cpu, device)
        planned = copy.deepcopy(case.model)
        rockplan.solve_blocks(planned, case.args, BUDGET, sample_kwargs=case.kwargs)
        for model in (case.model, planned):
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        side_by_side(case, case.model, planned, device, say)
    finally:
        dist.destroy_process_group()


def lengths(on_cpu: bool, device: torch.device, say: Say) -> None:
    """Ten lengths, of which two are planned before: ms are those of all ten steps, and of the same
    once more when all are known."""
    case = llama(on_cpu, device)
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
        equal = ", ".join(different) or "equal"
        say(way, {"peak_bytes": peak_bytes, "ms": milliseconds, "equal": equal})


Part = Callable[[bool, torch.device, Say], None]
PARTS: dict[str, Part] = {
    "lengths": lengths,
    "sharded": sharded,
    "liger": liger,
    "flex": flex,
    "liger-rope": partial(liger, rotates=True),
}


def main() -> None:
    own, given = worker(__doc__, "name")
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device("cpu" if own.on_cpu else "cuda")

    def part() -> Row:
        PARTS[given.name](own.on_cpu, device, own.add)
        return {DETAIL: True}

    own.tries(given.name, part, own.limit.left_s)
    own.leave()


if __name__ == "__main__":
    main()
