"""Price: what every unique operator call costs, one operator at a time.

takes: a CDGraph. returns: a Profile (`measure`), or the graph with its prices filled in (`price`).
guarantees: memory for one operator is enough whatever the model needs (`execution`).

An operator that fails on made-up inputs (it checks values), or has a side effect (it exchanges data
with other processes) and is never called here, is estimated from its specs; its cost has `repeats`
0, and `Profile.source` says how many there are.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from rockplan.errors import InvalidInput, PlanFormatError
from rockplan.graph_builder.compiler_settings import FINGERPRINT
from rockplan.graph_builder.costs.call_costs import (
    SCRATCH_BYTES,
    cost_of,
    measure_memory,
    measure_times,
    run_first,
    scratch_for,
)
from rockplan.graph_builder.costs.call_key import Keys, call_keys, calls_by_key, device_of
from rockplan.graph_builder.costs.estimate import estimate, fallback_rates
from rockplan.graph_builder.costs.execution import as_executed, inputs_of
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.casting import inner_name
from rockplan.graph_builder.operators.rows import Effect
from rockplan.graph_builder.recorded.specs import distinct_bytes
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import Call, CDGraph, ComputeNode, refs
from rockplan.values.profile import OpCost, Profile

_LOGGER = logging.getLogger("rockplan")

# Bytes (a pebibyte) or nanoseconds (13 days) beyond those of any operator.
_MOST = 2**50


def measure(
    graph: CDGraph, values: Mapping[int, torch.Tensor], *, known: Profile | None = None
) -> Profile:
    """Return time and memory of each unique call of `graph`, executed with made-up inputs; calls
    that fail are estimated.

    values: real tensors for some indices of `graph.values` (integer inputs and what is computed
    from them), used as arguments as they are. known: costs that need not be measured again, if they
    hold for this device, this version of torch and this number of threads; impossible ones are
    named in a warning and measured again. Raises InvalidInput for a device that is neither CPU nor
    CUDA, CaptureError if eager would fail too.
    """
    if torch.device(device_of(graph)).type not in SCRATCH_BYTES:
        raise InvalidInput(
            f"operators on {device_of(graph)} cannot be measured; move the model to CPU or CUDA"
        )
    same_calls = calls_by_key(graph, call_keys(graph))
    calls = {key: same[0] for key, same in same_calls.items()}
    costs = _still_valid(known, device_of(graph))
    costs = _possible(graph, calls, costs)
    missing = {key: call for key, call in calls.items() if key not in costs}
    _say_unknown(missing.values())
    with as_executed(graph):
        inputs = inputs_of(graph, values)
        run_first(inputs, (call for key, call in calls.items() if key not in missing))
        memory = measure_memory(inputs, missing)
        times: dict[str, list[int]] = {}
        if memory:
            scratch = scratch_for(torch.device(device_of(graph)))
            times = measure_times(inputs, {key: same_calls[key] for key in memory}, scratch)
    for key, call in missing.items():
        if key in memory:
            costs[key] = cost_of(times[key], memory[key])
        else:
            costs[key] = estimate(graph, call, fallback_rates(graph))
    return profile_of("measured", device_of(graph), {key: costs[key] for key in calls})


def with_measured_memory(
    graph: CDGraph,
    values: Mapping[int, torch.Tensor],
    profile: Profile,
    keys: Keys,
    is_once: bool = False,
) -> Profile:
    """Return `profile` with workspaces and sizes of results as measured; calls that fail keep what
    they have. values: as in `measure`; keys: those of the calls of `graph`; is_once: as for
    `measure_memory`."""
    calls = {key: same[0] for key, same in calls_by_key(graph, keys).items()}
    with as_executed(graph):
        memory = measure_memory(inputs_of(graph, values), calls, is_once)
    costs = dict(profile.costs)
    for key, found in memory.items():
        costs[key] = replace(
            costs[key], workspace_bytes=found.workspace_bytes, result_bytes=found.result_bytes
        )
    return replace(profile, costs=tuple(costs.items()))


_said: set[str] = set()


def _say_unknown(calls: Iterable[Call]) -> None:
    unknown = (c.op for c in calls if any(r is not None for r in c.results))
    called = {inner_name(op) for op in unknown}
    names = {op for op in called if facts.facts_of(op).effect is Effect.UNKNOWN} - _said
    _said.update(names)
    if names:
        _LOGGER.warning(
            "nobody knows whether %s do anything beside their results, so they run as often as in "
            "eager execution, never again, and are not tried to see what they cost: memory that "
            "they take while they run comes on top of the predicted peak. If they do nothing else, "
            "say so before planning, and it is measured: rockplan.pure('library::name')",
            ", ".join(sorted(names)),
        )


def _still_valid(known: Profile | None, device: str) -> dict[str, OpCost]:
    """Return the measured costs of `known`, by key, if they are of this device, version of torch
    and number of threads; {} otherwise. Estimates are left out."""
    current = profile_of("measured", device, {})
    if known is None or not known.source.startswith("measured"):
        return {}
    before, now = ((p.device, p.torch_version, p.threads) for p in (known, current))
    if before != now:
        return {}
    # Estimated calls are tried again, so that a model that cannot run is refused every time.
    return {key: cost for key, cost in known.costs if cost.repeats}


def _possible(
    graph: CDGraph, calls: Mapping[str, Call], costs: Mapping[str, OpCost]
) -> dict[str, OpCost]:
    known = {key: costs[key] for key in calls if key in costs}
    possible = {key: c for key, c in known.items() if _can_cost(graph, calls[key], c)}
    broken = [calls[key].op for key in known if key not in possible]
    if broken:
        warnings.warn(
            f"{len(broken)} costs that were measured before cannot be right, such as that of "
            f"{broken[0]}: its results are larger than it says, or no operator takes as much; "
            "they are measured again",
            stacklevel=3,
        )
    return possible


def _can_cost(graph: CDGraph, call: Call, cost: OpCost) -> bool:
    # 0 bytes: the storage of an argument or of another result.
    numbers = (cost.time_ns, cost.spread_ns, cost.workspace_bytes, *cost.result_bytes)
    if not all(0 <= number <= _MOST for number in numbers):
        return False
    return len(cost.result_bytes) == len(call.results) and all(
        value is None or not size_bytes or size_bytes >= distinct_bytes(graph.values[value].spec)
        for value, size_bytes in zip(call.results, cost.result_bytes, strict=True)
    )


def profile_of(source: str, device: str, costs: Mapping[str, OpCost]) -> Profile:
    """Return these costs (by key) as a profile that names this machine, torch and thread count.
    source: how they were found; the number of estimates among them is added to it."""
    estimated = sum(cost.repeats == 0 for cost in costs.values())
    return Profile(
        source=f"{source} ({estimated} calls estimated)" if estimated else source,
        device=_device_name(device),
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        costs=tuple(sorted(costs.items())),
    )


def profile_key(graph: CDGraph) -> str:
    """Return the text under which measured costs are cached: what they depend on besides the call,
    that is device, torch, threads, and how kernels are compiled."""
    current = profile_of("measured", device_of(graph), {})
    key = f"{current.device}, torch {current.torch_version}, {current.threads} threads"
    if torch.device(device_of(graph)).type == "cuda":
        key += ", host or device"
    return f"{key}, kernels {FINGERPRINT}" if graph.kernels else key


@functools.cache
def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@paused_collection()
def price(graph: CDGraph, profile: Profile, keys: Keys | None = None) -> CDGraph:
    """Return `graph` with times and workspaces of its nodes and sizes of its storages from
    `profile`.

    A node of several calls takes the sum of their times; its workspace is found by replaying them,
    intermediate results freed at once, plus what takeovers need beyond it. Where an operator turned
    out to return (a view of) its argument, nothing takes over its result.
    keys: of `graph`, if they are known. Raises PlanFormatError if a cost is missing.
    """
    costs = dict(profile.costs)
    sizes: dict[int, int] = {}
    peaks: dict[int, int] = {}
    times: dict[int, int] = {}
    for node, own_keys in zip(graph.nodes, keys or call_keys(graph), strict=True):
        calls = zip(node.calls, own_keys, strict=True)
        steps = [_step(graph, call, costs.get(key)) for call, key in calls]
        times[node.index] = sum(s.cost.time_ns for s in steps)
        peaks[node.index] = _replay(node, steps)
        for step in steps:
            for made, size_bytes in step.made.items():
                sizes[made] = max(sizes.get(made, 0), size_bytes)
    distinct = sizes.keys()
    data = tuple(
        d
        if sizes.get(d.index, d.size_bytes) == d.size_bytes  # which keeps an expression
        else replace(d, size_bytes=sizes[d.index])
        for d in graph.data
    )
    nodes = []
    for node in graph.nodes:
        takes = tuple(t for t in node.takes if distinct >= {*t.operands})
        own_bytes = max(0, peaks[node.index] - sum(data[d].size_bytes for d in node.writes))
        more_bytes = max((t.more_bytes for t in takes), default=0)
        time_ns, workspace_bytes = times[node.index], own_bytes + more_bytes
        nodes.append(replace(node, takes=takes, time_ns=time_ns, workspace_bytes=workspace_bytes))
    return replace(graph, data=data, nodes=tuple(nodes))


@dataclass(frozen=True, slots=True)
class _CallReplay:
    """Memory of one call of a node. made: storage that it allocates -> bytes; unnamed_bytes:
    results that are not used; touched: storages that it reads or makes."""

    cost: OpCost
    made: dict[int, int]
    unnamed_bytes: int
    touched: frozenset[int]


def _step(graph: CDGraph, call: Call, cost: OpCost | None) -> _CallReplay:
    """Return what one call of a node allocates at `cost`, by storage. Raises PlanFormatError if
    `cost` is None or has another number of results."""
    if cost is None or len(cost.result_bytes) != len(call.results):
        raise PlanFormatError(
            f"the profile has no cost for {call.op} with these arguments: it belongs to another "
            "model or shape. Measure again"
        )
    made: dict[int, int] = {}
    unnamed_bytes = 0
    for value, size_bytes in zip(call.results, cost.result_bytes, strict=True):
        if value is None:
            unnamed_bytes += size_bytes
        elif size_bytes:
            # Results that share a storage by the shape rule may really have one each.
            data = graph.values[value].data
            made[data] = made.get(data, 0) + size_bytes
    named = (ref.index for ref in refs(call))
    touched = frozenset(graph.values[v].data for v in (*named, *call.made))
    return _CallReplay(cost, made, unnamed_bytes, touched)


def _replay(node: ComputeNode, steps: list[_CallReplay]) -> int:
    """Return the most bytes alive while the node's calls run one after the other, beyond its
    inputs. What the node writes lives to its end, other results to their last use."""
    last_touch = {d: i for i, step in enumerate(steps) for d in step.touched}
    alive: dict[int, int] = {}
    peak_bytes = 0
    for i, step in enumerate(steps):
        during_bytes = sum(step.made.values()) + step.unnamed_bytes + step.cost.workspace_bytes
        peak_bytes = max(peak_bytes, sum(alive.values()) + during_bytes)
        alive |= step.made
        for data in [d for d in alive if last_touch[d] == i and d not in node.writes]:
            del alive[data]
    return peak_bytes
