"""Steps of the Llama that tables of a GPU are of, on the stand-in: peaks, and what a step asks for.

    python -m benchmarks.stand_in.steps

Prints a row of JSON for each way: bytes predicted, measured by the caching allocator, and reserved
by it; launches of eager's kernels and of Triton's, products, copies between host and device,
synchronisations; CPU milliseconds of the host. Prices of plans are times of the host here: which
plan it is says little.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import rockplan
from benchmarks import stand_in
from testing.gpu_cases import LossCase, case_of

BUDGETS: dict[str, tuple[str | int, bool]] = {
    "rockplan, smallest": ("min", False),
    "rockplan compiled, all kept": ("100%", True),
    "rockplan compiled, 2117 MiB": (2117 << 20, True),
    "rockplan compiled, smallest": ("min", True),
}
ROUNDS = 9


def host_ms(step: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    return 1e3 * statistics.median(times)


def row_of(case: LossCase, module: nn.Module) -> dict[str, Any]:
    device = torch.device("cuda")
    step = partial(case.step, module)
    peak = rockplan.peak_live_bytes(step, device=device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved_bytes = torch.cuda.memory_reserved()
    step()
    reserved_bytes = torch.cuda.max_memory_reserved() - reserved_bytes
    before = stand_in.counts()
    step()
    asked = stand_in.since(before)
    return {
        "measured_bytes": peak.peak_bytes,
        "left_bytes": peak.final_bytes,
        "reserved_bytes": reserved_bytes,
        **{what: asked[what] for what in ("launches", "triton", "products", "syncs")},
        "copies": asked["to_device"] + asked["to_host"],
        "host_ms": host_ms(step),
    }


def main() -> None:
    stand_in.install()
    case = case_of("llama", False, torch.device("cuda"))
    print(json.dumps({"way": "eager", **row_of(case, case.model)}), flush=True)
    for way, (budget, compiles) in BUDGETS.items():
        options = rockplan.Options(compile=compiles, released=case.released, cache=False)
        planned = rockplan.solve(
            case.model, case.args, budget, sample_kwargs=case.kwargs, options=options
        )
        predicted = {"predicted_bytes": rockplan.plan_of(planned).peak_bytes}
        print(json.dumps({"way": way, **predicted, **row_of(case, planned)}), flush=True)


if __name__ == "__main__":
    main()
