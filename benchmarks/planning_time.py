"""Seconds of each stage of planning GPT-2, by number of layers, without a cache.

Equal blocks are solved once, so the options do not depend on the number of layers.
Command: python -m benchmarks.planning_time 12 48
"""

from __future__ import annotations

import resource
import sys
import time

import torch

from benchmarks.models import gpt2
from benchmarks.timing import machine
from rockplan.codegen import random_state
from rockplan.codegen.executable import build
from rockplan.dp.search import ChainSolver
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.lower import lower
from rockplan.graph_builder.measure import measure, price
from rockplan.graph_builder.partition import partition
from rockplan.ilp.options import option_families
from rockplan.schedule import keep_all
from rockplan.simulate import simulate

SHARE = 0.4


def stages(layers: int) -> tuple[dict[str, float], str]:
    """Seconds of each stage, and one line about what was found."""
    torch.manual_seed(0)
    case = gpt2(layers=layers, width=256, heads=4, vocabulary=1024, batch=4, length=256)
    seconds: dict[str, float] = {}
    clock = [time.perf_counter()]

    def note(stage: str) -> None:
        clock.append(time.perf_counter())
        seconds[stage] = clock[-1] - clock[-2]

    captured = capture(case.model, case.args, case.kwargs)
    note("capture")
    lowered = lower(captured, random_state.state_bytes(torch.device("cpu")))
    note("lower")
    profile = measure(lowered.graph, lowered.samples)
    graph = price(lowered.graph, profile)
    note("measure")
    blocks = partition(graph)
    note("partition")
    families = option_families([b.problem for b in blocks])
    note("options")
    everything = simulate(graph, keep_all(graph))
    schedule = ChainSolver(graph, blocks, families).best_schedule(
        int(SHARE * everything.peak_bytes)
    )
    note("chain")
    assert schedule is not None
    build(graph, lowered.interface, schedule, "benchmark")
    note("code")
    overhead = simulate(graph, schedule).time_ns / everything.time_ns - 1
    solved = {b.digest: f for b, f in zip(blocks, families, strict=True)}
    text = (
        f"{len(graph.nodes)} operations, {len(blocks)} blocks of {len(solved)} kinds, "
        f"{sum(f.solves for f in solved.values())} solves, overhead {overhead:+.1%}"
    )
    return seconds, text


def main() -> None:
    torch.set_num_threads(1)
    gpt2()  # the first import of the library is not part of planning
    print(f"{machine()}; GPT-2, width 256, batch 4 x 256, {SHARE:.0%} of keep-all, no cache")
    for layers in [int(a) for a in sys.argv[1:]] or [12, 48]:
        seconds, text = stages(layers)
        total = sum(seconds.values())
        listing = "  ".join(f"{stage} {value:.2f}" for stage, value in seconds.items())
        print(f"{layers:3} layers: {listing}  total {total:.2f} s; {text}", flush=True)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"peak resident memory of the process {peak_mb:.0f} MB (with torch and the models)")


if __name__ == "__main__":
    main()
