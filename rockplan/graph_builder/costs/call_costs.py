"""Costs of calls: workspace and sizes of results, and time with cold caches.

takes: Inputs, calls by key. returns: CallMemory of each call that runs, nanoseconds of each repeat,
and OpCost. Workspace is the peak of
bytes alive inside the operator beyond its inputs and its results. On CPU it comes from the
profiler's memory events, on CUDA from the allocator's peak; so do the sizes of the results, which
can differ from what fake tensors say (workspaces of mkldnn, padding). Fake tensors do not check
dtypes: a forward call whose kernel rejects the dtypes that its inputs really have is refused here.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.profiler import profile, record_function

from rockplan.errors import CaptureError
from rockplan.graph_builder.costs import ruler
from rockplan.graph_builder.costs.call_key import call_key, device_of
from rockplan.graph_builder.costs.execution import Execution, Inputs
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.rows import OPAQUE
from rockplan.graph_builder.recorded.evaluate import flat_results
from rockplan.graph_builder.recorded.specs import allocated_bytes
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import Call, CDGraph, Phase, refs
from rockplan.values.profile import OpCost
from rockplan.values.progress import report

# Calls in one profiler session: its events take 0.3 MB for each call.
_SESSION_CALLS = 200

_RANGE = "rockplan::call::"


@dataclass(frozen=True, slots=True)
class CallMemory:
    """Memory of one call. result_bytes: storage of each result, 0 if it is not a new one."""

    workspace_bytes: int
    result_bytes: tuple[int, ...]


@paused_collection()  # which would free, inside of a call, what others left in cycles
def measure_memory(
    inputs: Inputs, calls: Mapping[str, Call], is_once: bool = False
) -> dict[str, CallMemory]:
    """Return by key the workspace and the bytes of results of each call, on made-up inputs. Calls
    that fail, and operators with side effects, which never run, have no entry. Each runs once
    before it is measured, unless `is_once`: what an operator allocates once and keeps (primitive
    caches, handles) is no part of its workspace."""
    calls = {key: call for key, call in calls.items() if not facts.facts_of(call.op).effect}
    if inputs.is_on_cuda:
        return _measure_memory_cuda(inputs, calls)
    waiting = list(calls.items())
    memory: dict[str, CallMemory] = {}
    for first in range(0, len(waiting), _SESSION_CALLS):
        report("measuring sizes", first, len(waiting))
        memory |= _measure_session(inputs, waiting[first : first + _SESSION_CALLS], is_once)
    return memory


def _measure_session(
    inputs: Inputs, calls: Sequence[tuple[str, Call]], is_once: bool
) -> dict[str, CallMemory]:
    sizes: dict[str, tuple[int, ...]] = {}
    with ruler.profiled() as session:
        for key, call in calls:
            with _else_estimated(inputs, call):
                execution = inputs.execution(call)
                if not is_once:
                    execution.run()
                with record_function(_RANGE + key):
                    result = execution.run()
                sizes[key] = _result_bytes(execution, result)
                del result, execution
    seen = _seen_in_ranges(session)
    memory: dict[str, CallMemory] = {}
    for key, result_bytes in sizes.items():
        peak_bytes, left_bytes = seen[key]
        # Results that a library allocated outside PyTorch (numpy) cause no events.
        seen_bytes = min(max(left_bytes, 0), sum(result_bytes))
        memory[key] = CallMemory(peak_bytes - seen_bytes, result_bytes)
    return memory


def run_first(inputs: Inputs, calls: Iterable[Call]) -> None:
    """Run once what is compiled, or tuned, at its first run, and has costs from another process."""
    for call in calls:
        if call.op.startswith(f"{OPAQUE}."):
            with _else_estimated(inputs, call):
                inputs.execution(call).run()


# Errors with these words do not depend on the made-up values.
_OF_DTYPES = re.compile("dtype|scalar type|datatype|not implemented for", re.IGNORECASE)


@contextlib.contextmanager
def _else_estimated(inputs: Inputs, call: Call) -> Iterator[None]:
    """Run the `with` block, which measures `call`, and end quietly if that fails: it is estimated
    later. Raises CaptureError if eager would fail too, and what is no failure of a kernel."""
    try:
        yield
    except Exception as error:
        # A kernel raises one of CALL_ERRORS; a function of the user may raise anything.
        by_kernel = isinstance(error, facts.CALL_ERRORS)
        if not by_kernel and not call.op.startswith(f"{OPAQUE}."):
            raise
        if _OF_DTYPES.search(str(error)) and _has_real_dtypes(inputs, call):
            _refuse_as_eager(inputs.graph, call, error)


def _has_real_dtypes(inputs: Inputs, call: Call) -> bool:
    """True if real operators give the call's arguments the dtypes that shape rules predict. Under
    autocast the rules are wrong for the statistics of a normalization."""
    graph = inputs.graph
    for ref in refs(call):
        index = ref.index
        while (view := graph.values[index].view) is not None:
            index = refs(view)[0].index
        tensor_of: dict[int, torch.Tensor] = {}
        try:
            for earlier in inputs.made_by[index].calls if index in inputs.made_by else ():
                inputs.run(earlier, tensor_of)
        except facts.CALL_ERRORS:
            return False
        if index in tensor_of and str(tensor_of[index].dtype) != graph.values[index].spec.dtype:
            return False
    return True


def _refuse_as_eager(graph: CDGraph, call: Call, error: Exception) -> None:
    """Raise CaptureError, which names module and line, for a call of the forward phase that fails
    with `error` in eager too. Of the backward the sample is not to blame."""
    key = call_key(graph, call)
    node = next(n for n in graph.nodes if any(call_key(graph, c) == key for c in n.calls))
    if node.phase is Phase.BACKWARD:
        return
    words = str(error).rstrip(".")
    raise CaptureError(
        f"in module '{node.module or '(root)'}' at {node.source or 'an unknown line'}: eager fails "
        f"with this sample: {call.op} raises {type(error).__name__}: {words}. Check the dtypes of "
        "sample_input (and sample_kwargs) against those of the parameters by calling the module "
        "on them",
        module_path=node.module,
        source=node.source,
    ) from error


def _seen_in_ranges(session: profile) -> dict[str, tuple[int, int]]:
    """Return key of a measured call -> (peak of bytes allocated since it began, bytes left at its
    end)."""
    ranges = sorted(
        (e.start_ns(), e.end_ns(), e.name().removeprefix(_RANGE))
        for e in ruler.profiler_events(session)
        if e.name().startswith(_RANGE)
    )
    events = list(ruler.memory_events(session))
    seen: dict[str, tuple[int, int]] = {}
    position = 0
    for begin, end, key in ranges:
        while position < len(events) and events[position][0] < begin:
            position += 1
        first = position
        while position < len(events) and events[position][0] <= end:
            position += 1
        seen[key] = ruler.peak_of(change for _, change in events[first:position])
    return seen


def _measure_memory_cuda(inputs: Inputs, calls: Mapping[str, Call]) -> dict[str, CallMemory]:
    device = device_of(inputs.graph)
    memory: dict[str, CallMemory] = {}
    for done, (key, call) in enumerate(calls.items()):
        report("measuring sizes", done, len(calls))
        with _else_estimated(inputs, call):
            execution = inputs.execution(call)
            execution.run()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_stats_as_nested_dict(device)
            result = execution.run()
            after = torch.cuda.memory_stats_as_nested_dict(device)
            sizes = _result_bytes(execution, result, "cuda")
            peak_bytes = ruler.peak_between(before, after)
            memory[key] = CallMemory(max(0, peak_bytes - sum(sizes)), sizes)
            del result, execution
    return memory


def _result_bytes(
    execution: Execution, result: object, device_type: str = "cpu"
) -> tuple[int, ...]:
    """Return for each result of a call, tensors or not, the bytes of its storage; 0 if the storage
    is an argument's or an earlier result's, or the result is no tensor. device_type: of the graph.
    The seed of attention is on the CPU where fake tensors say CUDA."""
    given = facts.tensors((execution.args, execution.kwargs))
    seen = {t.untyped_storage()._cdata for t in given}
    sizes: list[int] = []
    for leaf in flat_results(result):
        size_bytes = 0
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in seen:
            seen.add(leaf.untyped_storage()._cdata)
            size_bytes = allocated_bytes(leaf.untyped_storage().nbytes(), device_type)
        sizes.append(size_bytes)
    return tuple(sizes)


# Time, with cold caches

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
    inputs: Inputs, call: Call, scratch: torch.Tensor, repeats: int, within_ns: float = math.inf
) -> list[int]:
    """Execute `call` up to `repeats` times, as long as less than within_ns has passed, and return
    the ns of each. Before each, `scratch` is changed, which evicts caches."""
    execution = inputs.execution(call)
    begin = time.perf_counter_ns()
    times: list[int] = []
    while len(times) < repeats and time.perf_counter_ns() - begin < within_ns:
        scratch.add_(1)
        if scratch.is_cuda:
            times.append(_cuda_time_ns(execution))
        else:
            begin_ns = time.perf_counter_ns()
            execution.run()
            times.append(time.perf_counter_ns() - begin_ns)
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


def _cuda_time_ns(execution: Execution) -> int:
    """Execute a call once and return its ns on the device or, if longer, on the host, by which a
    step of many small calls is bound."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    begin_ns = time.perf_counter_ns()
    execution.run()
    host_ns = time.perf_counter_ns() - begin_ns
    end.record()
    end.synchronize()
    return max(host_ns, int(begin.elapsed_time(end) * 1e6))
