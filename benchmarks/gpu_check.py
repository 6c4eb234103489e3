"""On a CUDA machine: does what the tests check on CPU hold there?

For GPT-2 and Llama under autocast (bfloat16) and a ResNet-50: equality with eager (and whether
eager repeats itself), measured peak against budget and prediction, time against eager and against
`torch.utils.checkpoint` on every layer, seconds of planning. Budgets are the smallest, a tenth
and two fifths of the way from there to keep-all, and keep-all. Prints one table.
Command: python -m benchmarks.gpu_check
With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False blocks of more than 1 MiB may be larger than
what is asked for, by up to another one, and so may the measured peak.
With --cpu it runs the same steps on small models without a GPU, to test the script itself.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import rockplan
from benchmarks.timing import interleaved_seconds, machine, mebibytes, median_ratio
from testing.models import Case, ResNet, gpt2, llama, resnet
from testing.sweep import FOR_CUDA

WAY = (0.1, 0.4)
REPEATS = 7


def cases(on_cpu: bool) -> list[Case]:
    if on_cpu:
        return [gpt2(), llama(), resnet()]
    return [
        gpt2(layers=12, width=768, heads=12, vocabulary=50257, batch=8, length=1024),
        llama(
            layers=8,
            width=1024,
            heads=16,
            key_value_heads=4,
            vocabulary=32000,
            batch=8,
            length=1024,
        ),
        resnet(width=64, batch=64, size=224),
    ]


class CheckpointedResNet(ResNet):
    """Every bottleneck checkpointed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        blocks = [b for stage in self.stages for b in stage]
        x = checkpoint_sequential(blocks, len(blocks), x, use_reentrant=False)
        return self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


def checkpointed(model: nn.Module) -> nn.Module:
    """A copy of `model` with torch.utils.checkpoint on every layer."""
    other = copy.deepcopy(model)
    if isinstance(other, ResNet):
        other.__class__ = CheckpointedResNet
    else:
        other.gradient_checkpointing_enable({"use_reentrant": False})
    return other


def loss_of(case: Case, module: nn.Module) -> torch.Tensor:
    """Of a forward pass, which for transformers is under autocast."""
    parameter = next(module.parameters())
    with torch.autocast(parameter.device.type, torch.bfloat16, "resnet" not in case.name):
        return case.loss(module(*case.args, **case.kwargs))


def results(case: Case, module: nn.Module) -> list[torch.Tensor]:
    """Loss, gradients, buffers of one step from a fixed seed; the module is left as it was."""
    before = {n: b.detach().clone() for n, b in module.named_buffers()}
    module.zero_grad(set_to_none=True)
    torch.manual_seed(11)
    loss = loss_of(case, module)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]
    found += [b.detach().clone() for b in module.buffers()]
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
    module.zero_grad(set_to_none=False)
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> str:
    if all(torch.equal(x, y) for x, y in zip(a, b, strict=True)):
        return "equal"
    largest = max((x.double() - y.double()).abs().max().item() for x, y in zip(a, b, strict=True))
    return f"{largest:.1e}"


def report(case: Case, device: torch.device) -> None:
    eager = copy.deepcopy(case.model)
    variants: dict[str, nn.Module] = {"eager": eager, "checkpoint": checkpointed(eager)}
    seconds: dict[str, float] = {}

    def add(name: str, budget: str | int) -> rockplan.Plan:
        start = time.perf_counter()
        is_language = "resnet" not in case.name
        # The step lets the logits go.
        options = rockplan.Options(released=(1,) if is_language else ())
        with torch.autocast(device.type, torch.bfloat16, is_language):
            planned = rockplan.solve(
                case.model, case.args, budget, sample_kwargs=case.kwargs, options=options
            )
        seconds[name], variants[name] = time.perf_counter() - start, planned
        plan: rockplan.Plan = planned.plan
        return plan

    smallest = add("rockplan min", "min")
    for share in WAY:
        more = int(share * (smallest.eager_peak_bytes - smallest.peak_bytes))
        add(f"rockplan {share:.0%}", smallest.peak_bytes + more)
    add("rockplan all", "100%")

    def step(module: nn.Module) -> Callable[[], None]:
        return lambda: loss_of(case, module).backward()

    expected = results(case, eager)
    equality = {name: same(results(case, module), expected) for name, module in variants.items()}
    peaks = {
        name: rockplan.peak_live_bytes(step(module), device=device).peak_bytes
        for name, module in variants.items()
    }
    times = interleaved_seconds({n: step(m) for n, m in variants.items()}, REPEATS)
    for name, module in variants.items():
        plan = module.plan if name.startswith("rockplan") else None
        budget = mebibytes(plan.budget_bytes) if plan else "-"
        planning = f"{seconds[name]:.0f} s" if plan else "-"
        predicted = mebibytes(plan.peak_bytes) if plan else "-"
        verdict = "-" if plan is None or peaks[name] <= plan.budget_bytes else "OVER BUDGET"
        overhead = median_ratio(times[name], times["eager"]) - 1
        expected_overhead = f"{plan.overhead:+.1%}" if plan else "-"
        print(
            f"{case.name:10} {name:14} {budget:>10} {predicted:>10} {mebibytes(peaks[name]):>10} "
            f"{overhead:>+8.1%} {expected_overhead:>9} {equality[name]:>9} {planning:>8} {verdict}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="small models without a GPU")
    on_cpu = parser.parse_args().cpu
    for name, value in FOR_CUDA.items():
        os.environ.setdefault(name, value)
    if not on_cpu and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --cpu runs the same steps on small models")
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device("cpu" if on_cpu else "cuda")
    print(f"allocator: {os.environ['PYTORCH_CUDA_ALLOC_CONF']}")
    print(f"{machine()}; MiB beyond parameters, buffers, inputs, gradients; {REPEATS} rounds")
    print(
        f"{'model':10} {'variant':14} {'budget':>10} {'predicted':>10} {'measured':>10} "
        f"{'time':>8} {'predicted':>9} {'equality':>9} {'planning':>8}"
    )
    torch.manual_seed(0)
    for case in cases(on_cpu):
        report(case.to(device), device)


if __name__ == "__main__":
    main()
