"""A worker of `benchmarks.gpu`: the first steps of what torch.compile makes of a model, so that the
workers that time it find it on disk."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import nn

from benchmarks.gpu_compiled import COMPILED, Make, Ways, synchronize
from benchmarks.gpu_table import DETAIL
from benchmarks.gpu_worker import Row, worker
from testing.gpu_cases import case_of


def main() -> None:
    own, given = worker(__doc__, "name")
    device = torch.device("cpu" if own.on_cpu else "cuda")
    case = case_of(given.name, own.on_cpu, device)
    ways = Ways(case, ())

    def warmed(make: Make) -> Row:
        begin = time.perf_counter()
        module: nn.Module = make()
        case.step(module)
        synchronize(device)
        return {"compile_s": round(time.perf_counter() - begin, 1), DETAIL: True}

    for stage in ways.stages():
        for way, make in stage.items():
            if way.startswith(COMPILED):
                own.tries(way, partial(warmed, make), 90)
    own.leave()


if __name__ == "__main__":
    main()
