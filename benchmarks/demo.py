"""The main job on a real model: GPT-2 planned under 40 % of its activation memory.

Prints the plan, then measured peaks, time and equality of gradients against eager execution.
Command: make demo
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import rockplan
from benchmarks.timing import interleaved_seconds, machine, mebibytes, median_ratio
from testing.models import gpt2

BUDGET = "40%"
REPEATS = 9


def gradients(case_step, module: nn.Module) -> list[torch.Tensor | None]:
    module.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    case_step(module)
    return [p.grad for p in module.parameters()]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = gpt2(layers=6, width=256, heads=4, vocabulary=1024, batch=4, length=256)
    eager = copy.deepcopy(case.model)
    planned = rockplan.solve(case.model, case.kwargs, budget=BUDGET)
    print(planned.plan)
    pairs = zip(gradients(case.step, planned), gradients(case.step, eager), strict=True)
    equal = all(torch.equal(a, b) for a, b in pairs)

    def step(module: nn.Module):
        def run() -> None:
            result = module(**case.kwargs)
            result.loss.backward()

        return run

    peaks = {
        name: rockplan.peak_live_bytes(step(module)).peak_bytes
        for name, module in (("eager", eager), ("planned", planned))
    }
    times = interleaved_seconds({"eager": step(eager), "planned": step(planned)}, REPEATS)
    overhead = median_ratio(times["planned"], times["eager"]) - 1
    predicted = planned.plan.peak_bytes
    print(f"\nGPT-2, 6 layers, width 256, batch 4 x 256 tokens, dropout 0.1, on {machine()}")
    print(f"eager peak      {mebibytes(peaks['eager'])} MiB measured")
    print(
        f"planned peak    {mebibytes(peaks['planned'])} MiB measured, "
        f"{mebibytes(predicted)} MiB predicted, budget {mebibytes(planned.plan.budget_bytes)} MiB"
    )
    print(f"overhead        {overhead:+.1%} measured, {planned.plan.overhead:+.1%} predicted")
    print(f"gradients       {'equal bit for bit' if equal else 'DIFFERENT'}")
    if not equal or peaks["planned"] > planned.plan.budget_bytes:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
