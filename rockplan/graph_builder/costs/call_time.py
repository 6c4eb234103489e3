"""Time of calls, with cold caches.

takes: Inputs, and calls by key that ran before. returns: nanoseconds of each repeat, and OpCost
with the known memory of a call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from rockplan.graph_builder.costs.call_memory import CallMemory
from rockplan.graph_builder.costs.execution import Execution, Inputs
from rockplan.values.graph import Call
from rockplan.values.profile import OpCost
from rockplan.values.progress import report

# Limits of profiling time: the 80 unique calls of GPT-2 take about a second.
_LEAST_REPEATS = 3
_MOST_REPEATS = 30
_TIME_BOX_NS = 30_000_000

# Equal calls that together take less than this share of the iteration get the least repeats.
# The other calls decide what is planned.
_HEAVY_SHARE = 0.005

# Limit for all calls together: a DenseNet of 240 layers has 1500 unique ones.
_ALL_BOXES_NS = 6_000_000_000

# Memory overwritten before each repeat, to evict the last-level cache: an iteration touches far
# more memory than the cache holds. With warm caches elementwise operators of GPT-2 come out at
# half of their time in an iteration, ResNet as a whole at 70 %; with cold ones both at 100 to
# 112 %.
SCRATCH_BYTES = {"cpu": 32 * 2**20, "cuda": 128 * 2**20}


def measure_times(
    inputs: Inputs, calls: Mapping[str, Sequence[Call]], scratch: torch.Tensor
) -> dict[str, list[int]]:
    """Return for each key the times in ns of single executions with cold caches, freeing of results
    included: a few for each, and more for the calls that take most of the iteration. calls: key ->
    calls of the graph that cost the same, the first of which is executed; `measure_memory` has run
    it, so operators are warm. scratch: a tensor whose change evicts caches."""
    times = {}
    for done, (key, equal) in enumerate(calls.items()):
        report("measuring times", done, len(calls))
        times[key] = _repeated(inputs, equal[0], scratch, _LEAST_REPEATS)
    shares = {key: min(times[key]) * len(equal) for key, equal in calls.items()}
    heavy = [key for key in calls if shares[key] >= _HEAVY_SHARE * sum(shares.values())]
    box_ns = min(_TIME_BOX_NS, _ALL_BOXES_NS // max(len(heavy), 1))
    for key in heavy:
        # Each repeat also evicted caches, which took at least as long.
        left_ns = box_ns - 2 * sum(times[key])
        more = _MOST_REPEATS - _LEAST_REPEATS
        times[key] += _repeated(inputs, calls[key][0], scratch, more, within_ns=left_ns)
    report("measuring times", len(calls), len(calls))
    return times


def _repeated(
    inputs: Inputs,
    call: Call,
    scratch: torch.Tensor,
    repeats: int,
    *,
    within_ns: float = math.inf,
) -> list[int]:
    """Execute `call` up to `repeats` times, as long as less than within_ns has passed, and return
    the ns of each. Before each, `scratch` is changed, which evicts caches."""
    execution = inputs.execution(call)
    once = _cuda_time_ns if scratch.is_cuda else _cpu_time_ns
    begin = time.perf_counter_ns()
    times: list[int] = []
    while len(times) < repeats and time.perf_counter_ns() - begin < within_ns:
        scratch.add_(1)
        times.append(once(execution))
    return times


def cost_of(times: Sequence[int], memory: CallMemory) -> OpCost:
    """Return the cost of one call from its measured `times` in ns: the least one, because other
    work on a busy machine only adds to it; their spread is the distance of the quartiles."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return OpCost(
        time_ns=min(times),
        spread_ns=int(high - low),
        workspace_bytes=memory.workspace_bytes,
        result_bytes=memory.result_bytes,
        repeats=len(times),
    )


def scratch_for(device: torch.device) -> torch.Tensor:
    return torch.zeros(SCRATCH_BYTES[device.type], dtype=torch.uint8, device=device)


def _cpu_time_ns(execution: Execution) -> int:
    begin = time.perf_counter_ns()
    execution.run()
    return time.perf_counter_ns() - begin


def _cuda_time_ns(execution: Execution) -> int:
    """Execute a call once and return its ns on the device or, if longer, on the host: a step of
    many small calls is bound by the host, whose time would be hidden here behind the eviction of
    caches."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    begin_ns = time.perf_counter_ns()
    execution.run()
    host_ns = time.perf_counter_ns() - begin_ns
    end.record()
    end.synchronize()
    return max(host_ns, int(begin.elapsed_time(end) * 1e6))
