"""Kernels that write in place, in Triton's interpreter: what they compute, and whether programs of
one get in each other's way. Of a file of `benchmarks.stand_in.kernels`:

    TRITON_INTERPRET=1 python -m benchmarks.stand_in.races FILE [--all]

Prints a row of JSON for each. --all: also those that do not write in place.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_record import Record, far, made_up, same_bits, twins
from benchmarks.stand_in.interpreter import Configuration, Watch, loaded, watching
from rockplan.graph_builder.fusion import kernels
from rockplan.values.graph import Kernel


def on_cpu(kernel: Kernel) -> Kernel:
    """The same, as operators of the CPU compute it."""

    def here(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(map(here, argument))
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    calls = [
        replace(c, args=here(c.args), kwargs=tuple((name, here(a)) for name, a in c.kwargs))
        for c in kernel.calls
    ]
    inputs = tuple(replace(spec, device="cpu") for spec in kernel.inputs)
    return replace(kernel, device="cpu", inputs=inputs, calls=tuple(calls))


def results(
    kernel: Kernel, code: str, configurations: Mapping[str, Configuration], given: list[Any]
) -> tuple[list[torch.Tensor], Watch]:
    """What Triton's code computes of `given`, with what it did to what it writes over."""
    over = dict(kernel.over)
    watch = Watch([given[operand] for operand in over.values()] or given)
    with watching(watch):
        new = iter(loaded(code, configurations)(list(given)))
    places = range(len(kernel.results))
    return [given[over[place]] if place in over else next(new) for place in places], watch


def row_of(op: str, record: Record, configurations: Mapping[str, Configuration]) -> dict[str, Any]:
    kernel = on_cpu(record.asked[op])
    plain = on_cpu(record.asked[kernel.plain]) if kernel.over else kernel
    inputs = made_up(kernel, seed=0)
    expected = kernels.computed(plain, twins(inputs))
    found, watch = results(kernel, record.code[op], configurations, twins(inputs))
    others = found
    if kernel.over:
        others, _ = results(plain, record.code[plain.op], configurations, twins(inputs))
    is_16_bits = any(t.dtype in (torch.bfloat16, torch.float16) for t in (*inputs, *found))
    return {
        "kernel": kernel.name,
        "over": len(kernel.over),
        "far": far(found, expected),
        "is_16_bits": is_16_bits,
        "same_bits": same_bits(found, others),
        "races": dict(watch.races),
        "read_again": watch.read_again,
        "other_lane": watch.other_lane,
    }


def main() -> None:
    file, *rest = sys.argv[1:]
    record, configurations = pickle.loads(Path(file).read_bytes())
    for op, kernel in record.made.items():
        if not (kernel.over or "--all" in rest):
            continue
        try:
            row = row_of(op, record, configurations)
        except Exception as error:
            row = {"kernel": kernel.name, "error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
