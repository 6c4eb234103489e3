"""A worker of `benchmarks.gpu`: what the kernels of a model compute, and which may write in place.

Each kernel of two layers at full width, on three draws of its inputs: how far it is from what
eager's operators compute, whether one that writes over operands computes the bits of the other,
bytes beyond its results, registers that spill. A row a kernel, and one of the model. After this,
what is compiled is on disk for the other workers.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch

from benchmarks.gpu_table import DETAIL
from benchmarks.gpu_worker import Row, worker
from benchmarks.kernel_record import (
    Record,
    far,
    graph_of,
    made_up,
    recorded,
    same_bits,
    twins,
)
from rockplan.graph_builder.costs.ruler import rise_of
from rockplan.graph_builder.fusion import kernels
from rockplan.graph_builder.recorded.specs import allocated_bytes
from rockplan.values.graph import Kernel
from testing.gpu_cases import KERNELS, made_on

DRAWS = 3
KERNEL_S = 15.0


def measured(kernel: Kernel, stands_for: Kernel, device: torch.device) -> Row:
    """Of one kernel. stands_for: it itself, or that which does not write in place."""
    functions = kernels.functions_of((stands_for, kernel))
    run, plain = functions[kernel.op], functions[stands_for.op]
    distances, is_same = [], True
    for seed in range(DRAWS):
        inputs = made_up(kernel, seed)
        with torch.no_grad():
            expected = kernels.computed(kernel, twins(inputs))
            found = run(twins(inputs))
            distances.append(far(found, expected))
            is_same &= same_bits(found, plain(twins(inputs)))
    given = twins(inputs)
    peak_bytes = rise_of(lambda: run(list(given)), device)
    over = dict(kernel.over)
    own = [t for place, t in enumerate(found) if place not in over]
    result_bytes = sum(allocated_bytes(t.untyped_storage().nbytes(), device.type) for t in own)
    return {
        "far": max(distances),
        "bits": "same" if is_same else "other",
        "over": len(over),
        "workspace_bytes": peak_bytes - result_bytes,
    }


def spills() -> Row:
    """Of the Triton kernels of this process: how many there are, and keep registers in memory."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    found = [one for one in gc.get_objects() if type(one) is CachingAutotuner]
    spilled = [launcher.n_spills for one in found for launcher in one.launchers]
    return {"triton": len(found), "spilled": sum(map(bool, spilled))}


def summary(record: Record, rows: Sequence[Row], seconds: float) -> Row:
    return {
        **record.facts(),
        "far": max((row["far"] for row in rows), default=0.0),
        "other_bits": sum(row["bits"] != "same" for row in rows),
        "compile_s": round(seconds, 1),
    }


def main() -> None:
    own, given = worker(__doc__, "name")
    device = torch.device("cpu" if own.on_cpu else "cuda")
    record = Record()
    seconds = 0.0

    def compiled() -> Row:
        nonlocal record, seconds
        case = made_on(KERNELS[given.name][own.on_cpu], device)
        begin = time.perf_counter()
        with recorded() as record:
            graph_of(case)
        seconds = time.perf_counter() - begin
        return summary(record, (), seconds)

    own.tries(given.name, compiled, own.limit.left_s, again=True)
    rows: list[Row] = []
    for kernel in record.made.values():

        def one(kernel: Kernel = kernel) -> Row:
            stands_for = record.asked[kernel.plain] if kernel.over else kernel
            rows.append({**measured(kernel, stands_for, device), DETAIL: True})
            return rows[-1]

        own.tries(f"{given.name}: {kernel.name}", one, KERNEL_S)
        own.add(given.name, summary(record, rows, seconds))
    if device.type == "cuda":
        own.tries(given.name, spills, again=True)
    own.leave()


if __name__ == "__main__":
    main()
