"""Measure: what every unique operator call costs, one operator at a time.

takes: a CDGraph. returns: a Profile (`measure`, `roofline`), or the graph with its prices filled
in (`price`). guarantees: inputs are made up from the specs, so memory for one operator is enough
whatever the model needs; generators, thread counts and global flags stay as they were.

Workspace is the peak of bytes alive inside the operator beyond its inputs and its results. On
CPU it comes from the profiler's memory events, on CUDA from the allocator's peak; so do the
sizes of the results, which can differ from what fake tensors say (workspaces of mkldnn, padding).
An operator that does not run on made-up inputs (it checks values) is estimated from its specs;
its cost has `repeats` 0, and `Profile.source` says how many there are. One of the forward
phase that refuses dtypes which its inputs really have is refused: fake tensors do not check them.
"""

from __future__ import annotations

import contextlib
import math
import platform
import re
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd.profiler import profile, record_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from rockplan.errors import CaptureError, InvalidInput, PlanFormatError, UnsupportedModel
from rockplan.graph_builder.costs.ruler import memory_events, peak_of, profiled, profiler_events
from rockplan.graph_builder.digests import canonical_literal, digest
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.rows import ViewKind, row_of
from rockplan.graph_builder.tracing.evaluate import substitute
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import (
    Call,
    CDGraph,
    ComputeNode,
    Phase,
    TensorSpec,
    ValueRef,
    value_refs,
    with_takes,
)
from rockplan.values.profile import OpCost, Profile
from rockplan.values.progress import report

# A bound on what profiling costs: 80 unique calls of GPT-2 take about a second.
_LEAST_REPEATS = 3
_MOST_REPEATS = 30
_TIME_BOX_NS = 30_000_000

# Of the iteration: calls that take less of it together are not measured more often than at least.
# Plans go by the others.
_HEAVY_SHARE = 0.005

# Of all calls together: a DenseNet of 240 layers has 1500 unique ones.
_ALL_BOXES_NS = 6_000_000_000

# Calls profiled at once: events of the profiler take memory, 0.3 MB for each call.
_SESSION_CALLS = 200

# Written over before each repeat, to evict the last-level cache: an iteration touches far more
# memory than fits there. With warm caches elementwise operators of GPT-2 come out at half of
# their time in an iteration, ResNet as a whole at 70 %; with cold ones both at 100 to 112 %.
_SCRATCH_BYTES = {"cpu": 32 * 2**20, "cuda": 128 * 2**20}

# The caching allocator of CUDA hands out multiples of this.
_CUDA_GRANULE_BYTES = 512

# A pebibyte, or 13 days in nanoseconds: more than any operator takes.
_MOST = 2**50

# Rates for an operator that cannot be run: one core, or one accelerator, of ordinary speed.
_CPU_RATES = (10e9, 50e9)
_CUDA_RATES = (1e12, 50e12)

# Elements drawn for a made-up tensor; it repeats them, since drawing takes longer than operators.
_DRAWN = 1 << 16

_RANGE = "rockplan::call::"

# What kernels of the CPU say of an index.
_OUT_OF_RANGE = re.compile("out of (bounds|range)", re.IGNORECASE)


def call_key(graph: CDGraph, call: Call) -> str:
    """Digest of operator, argument specs (shape, strides, dtype, device), literals and dtypes of
    results, which may be the default one (of results whose shapes depend on values, their specs);
    of a call that copies storages, their sizes: equal for calls that cost the same."""
    copies_storages = _copies_storages(graph, call)

    def described(argument: object) -> object:
        if isinstance(argument, ValueRef):
            value = graph.values[argument.index]
            spec = canonical_literal(replace(value.spec, offset=0))
            return [spec, graph.data[value.data].size_bytes] if copies_storages else spec
        if isinstance(argument, tuple | list):
            return ["sequence", [described(item) for item in argument]]
        return canonical_literal(argument)

    arguments = [[name, described(value)] for name, value in call.kwargs]
    results: list[object] = [
        None if v is None else graph.values[v].spec.dtype for v in call.results
    ]
    if facts.facts_of(call.op).shape_by_values:
        results = [None if v is None else described(ValueRef(v)) for v in call.results]
    return digest([call.op, described(call.args), arguments, results])


def measure(
    graph: CDGraph,
    values: Mapping[int, torch.Tensor],
    *,
    known: Profile | None = None,
) -> Profile:
    """Execute each unique call of `graph` with made-up inputs.

    values: real tensors for some indices of `graph.values` (integer inputs and what is computed
    from them), used as arguments as they are. known: costs that need not be measured
    again, if they hold for this device, this version of torch and this number of threads; those
    that no measurement can have given are named in a warning and measured again.
    Raises InvalidInput for a device that is neither CPU nor CUDA.
    """
    if torch.device(_device(graph)).type not in _SCRATCH_BYTES:
        raise InvalidInput(
            f"operators on {_device(graph)} cannot be measured; move the model to CPU or CUDA"
        )
    equal = _calls_by_key(graph)
    calls = {key: same[0] for key, same in equal.items()}
    found = _still_valid(known, _device(graph))
    found = _possible(graph, calls, found)
    missing = {key: call for key, call in calls.items() if key not in found}
    with _as_executed(graph):
        inputs = _inputs(graph, values)
        memory = _measure_memory(inputs, missing)
        scratch = _scratch(torch.device(_device(graph)))
        times = _measure_times(inputs, {key: equal[key] for key in memory}, scratch)
    for key, call in missing.items():
        if key in memory:
            found[key] = _cost(times[key], memory[key])
        else:
            found[key] = _estimate(graph, call, *_fallback_rates(graph))
    return _profile("measured", _device(graph), {key: found[key] for key in calls})


def check_layouts(graph: CDGraph, values: Mapping[int, torch.Tensor]) -> None:
    """Execute each unique call whose results are viewed in a way that depends on strides, and
    raise UnsupportedModel where the real strides are not those of the capture: PyTorch's shape
    rules are wrong for a few operators, and such a view would fail or read other elements.
    """
    viewed = _viewed_by_layout(graph)
    seen: set[str] = set()
    with _as_executed(graph):
        inputs = _inputs(graph, values)
        for node in graph.nodes:
            for call in node.calls:
                key = call_key(graph, call) if viewed & set(call.results) else ""
                if key and key not in seen:
                    seen.add(key)
                    _check_layout(graph, inputs, node, call)


def _viewed_by_layout(graph: CDGraph) -> set[int | None]:
    found: set[int | None] = set()
    for value in graph.values:
        view, by_layout = value.view, False
        while view is not None:
            by_layout |= row_of(view.op).view is ViewKind.BY_STRIDES
            base = next(value_refs(view.args)).index
            if by_layout:
                found.add(base)
            view = graph.values[base].view
    return found


def _check_layout(graph: CDGraph, inputs: _Inputs, node: ComputeNode, call: Call) -> None:
    try:
        results = _results(inputs.execution(call).run())
    except (RuntimeError, IndexError, ValueError):
        return
    for index, real in zip(call.results, results, strict=True):
        if index is None or not isinstance(real, torch.Tensor) or real.numel() < 2:
            continue
        spec = graph.values[index].spec
        strides = [
            (s, t) for n, s, t in zip(spec.shape, spec.stride, real.stride(), strict=True) if n > 1
        ]
        if any(s != t for s, t in strides):
            raise UnsupportedModel.at(
                node.module,
                node.source,
                f"{call.op} returns strides {tuple(real.stride())} where PyTorch's shape rule "
                f"says {spec.stride}, so views of its result cannot be planned; put .contiguous() "
                "before the operation",
            )


def roofline(graph: CDGraph, bytes_per_s: float, flops_per_s: float) -> Profile:
    """Costs without execution, for a machine with these rates; sizes from specs, no workspace.

    Time is the larger of bytes read and written over `bytes_per_s` and floating-point
    operations (of matrix products, convolutions and attention) over `flops_per_s`.
    """
    costs: dict[str, OpCost] = {}
    for node in graph.nodes:
        for call in node.calls:
            key = call_key(graph, call)
            cost = _estimate(graph, call, bytes_per_s, flops_per_s)
            costs[key] = _larger(costs.get(key, cost), cost)
    rates = f"{bytes_per_s:g} B/s, {flops_per_s:g} flop/s"
    return replace(_profile("roofline", _device(graph), costs), source="roofline", device=rates)


@paused_collection()
def price(graph: CDGraph, profile: Profile) -> CDGraph:
    """`graph` with times and workspaces of its nodes and sizes of its storages from `profile`.

    A node of several calls takes the sum of their times; its workspace is found by replaying
    them, intermediate results freed at once. Where an operator turned out to return (a view of)
    what it was given, nothing takes over its result. Raises PlanFormatError if a cost is missing.
    """
    costs = dict(profile.costs)
    sizes: dict[int, int] = {}
    peaks: dict[int, int] = {}
    times: dict[int, int] = {}
    for node in graph.nodes:
        steps = [_step(graph, call, costs) for call in node.calls]
        times[node.index] = sum(s.cost.time_ns for s in steps)
        peaks[node.index] = _replay(node, steps)
        for step in steps:
            for made, size_bytes in step.made.items():
                sizes[made] = max(sizes.get(made, 0), size_bytes)
    distinct = sizes.keys()
    data = tuple(replace(d, size_bytes=sizes.get(d.index, d.size_bytes)) for d in graph.data)
    nodes = tuple(
        replace(
            with_takes(node, distinct),
            time_ns=times[node.index],
            workspace_bytes=max(
                0, peaks[node.index] - sum(data[d].size_bytes for d in node.writes)
            ),
        )
        for node in graph.nodes
    )
    return replace(graph, data=data, nodes=nodes)


# Replay of one node


@dataclass(frozen=True, slots=True)
class _CallReplay:
    """One call of a node: its cost, the storages it allocates, the bytes of results that nobody
    names, and the storages that it touches."""

    cost: OpCost
    made: dict[int, int]
    unnamed_bytes: int
    touched: frozenset[int]


def _step(graph: CDGraph, call: Call, costs: Mapping[str, OpCost]) -> _CallReplay:
    cost = costs.get(call_key(graph, call))
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
            # Results that share a storage by the shape rule may have one each.
            data = graph.values[value].data
            made[data] = made.get(data, 0) + size_bytes
    named = (ref.index for ref in value_refs((call.args, [a for _, a in call.kwargs])))
    results = (v for v in call.results if v is not None)
    touched = frozenset(graph.values[v].data for v in (*named, *results))
    return _CallReplay(cost, made, unnamed_bytes, touched)


def _replay(node: ComputeNode, steps: list[_CallReplay]) -> int:
    """Peak of bytes alive inside the node beyond its inputs; its `writes` live to the end."""
    last_touch = {d: i for i, step in enumerate(steps) for d in step.touched}
    alive: dict[int, int] = {}
    peak = 0
    for i, step in enumerate(steps):
        during = sum(step.made.values()) + step.unnamed_bytes + step.cost.workspace_bytes
        peak = max(peak, sum(alive.values()) + during)
        alive |= step.made
        for data in [d for d in alive if last_touch[d] == i and d not in node.writes]:
            del alive[data]
    return peak


# Execution


@paused_collection()
def _calls_by_key(graph: CDGraph) -> dict[str, list[Call]]:
    """The calls that cost the same, in order of their first."""
    calls: dict[str, list[Call]] = {}
    for node in graph.nodes:
        for call in node.calls:
            calls.setdefault(call_key(graph, call), []).append(call)
    return calls


def _still_valid(known: Profile | None, device: str) -> dict[str, OpCost]:
    here = _profile("measured", device, {})
    if known is None or not known.source.startswith("measured"):
        return {}
    if (known.device, known.torch_version, known.threads) != (
        here.device,
        here.torch_version,
        here.threads,
    ):
        return {}
    # What was estimated is tried again, so that what cannot run is refused every time.
    return {key: cost for key, cost in known.costs if cost.repeats}


def _possible(
    graph: CDGraph, calls: Mapping[str, Call], found: Mapping[str, OpCost]
) -> dict[str, OpCost]:
    """Costs of `found` for `calls`, without those that no measurement can have given."""
    known = {key: found[key] for key in calls if key in found}
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
    """Whether sizes and times are possible: a result whose storage is its own (0: it is that of
    an argument or of another result) holds at least the elements that it has."""
    numbers = (cost.time_ns, cost.spread_ns, cost.workspace_bytes, *cost.result_bytes)
    if not all(0 <= number <= _MOST for number in numbers):
        return False
    return len(cost.result_bytes) == len(call.results) and all(
        value is None or not size_bytes or size_bytes >= _distinct_bytes(graph.values[value].spec)
        for value, size_bytes in zip(call.results, cost.result_bytes, strict=True)
    )


def _profile(source: str, device: str, costs: Mapping[str, OpCost]) -> Profile:
    estimated = sum(cost.repeats == 0 for cost in costs.values())
    return Profile(
        source=f"{source} ({estimated} calls estimated)" if estimated else source,
        device=_device_name(device),
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        costs=tuple(sorted(costs.items())),
    )


def profile_key(graph: CDGraph) -> str:
    """Names what measured costs depend on besides the call: device, torch, threads."""
    here = _profile("measured", _device(graph), {})
    return f"{here.device}, torch {here.torch_version}, {here.threads} threads"


def _device(graph: CDGraph) -> str:
    """The accelerator that the graph's tensors live on, if any, else the CPU."""
    devices = sorted({v.spec.device for v in graph.values} - {"cpu"})
    return devices[0] if devices else "cpu"


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def _as_executed(graph: CDGraph) -> Iterator[None]:
    """The state in which generated code runs operators; generators are put back at the end."""
    devices = sorted({v.spec.device for v in graph.values} - {"cpu"})
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        for kind in sorted({"cpu", *(torch.device(d).type for d in devices)}):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if devices:
            stack.enter_context(torch.cuda.device(devices[0]))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        yield


@dataclass(frozen=True, slots=True)
class _Execution:
    """An operator with real arguments, ready to be called again and again."""

    operator: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]

    def run(self) -> object:
        return self.operator(*self.args, **self.kwargs)

    def refuse_bad_indices(self) -> None:
        """Raise IndexError where the kernel of the CPU says that an index is out of range."""
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, torch.Tensor.cpu, (self.args, self.kwargs)
        )
        try:
            self.operator(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            if _OUT_OF_RANGE.search(str(error)):
                raise IndexError(str(error)) from error


def _copies_storages(graph: CDGraph, call: Call) -> bool:
    """True if a result lives in more memory than its elements need, as in a copy of the storage
    that an argument is a part of (`slice_scatter` of rows)."""
    refs = value_refs((call.args, [a for _, a in call.kwargs]))
    given = {graph.values[ref.index].data for ref in refs}
    made = [graph.values[v] for v in call.results if v is not None]
    return any(
        v.data not in given and graph.data[v.data].size_bytes > _needed_bytes(v.spec) for v in made
    )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Where arguments come from: given real tensors, made-up ones, and for what is neither given
    nor of floating dtype (masks, indices, opaque workspaces) the node that makes it, run on
    made-up inputs: a kernel may read beyond a workspace that holds anything else.

    is_on_cuda: an index out of range is an assertion on the device there, after which the process
    can use it no more, or a write beyond a tensor; so calls with computed ones run on the CPU
    first. out_of_range: values that were; no call gets them.
    """

    graph: CDGraph
    given: Mapping[int, torch.Tensor]
    made_by: Mapping[int, ComputeNode]
    is_on_cuda: bool
    out_of_range: set[int] = field(default_factory=set)

    def execution(self, call: Call) -> _Execution:
        return self._execution(call, {})

    def _execution(self, call: Call, environment: dict[int, torch.Tensor]) -> _Execution:
        operator = facts.resolve(call.op)
        arguments = (call.args, [a for _, a in call.kwargs])
        copies_storages = _copies_storages(self.graph, call)

        def tensor(index: int) -> torch.Tensor:
            if index not in environment:
                self._supply(index, environment, copies_storages)
            found = environment[index]
            mutates_given = operator._schema.is_mutable and found is self.given.get(index)
            return found.clone() if mutates_given else found

        execution = _Execution(
            operator,
            [substitute(a, tensor) for a in call.args],
            {name: substitute(a, tensor) for name, a in call.kwargs},
        )
        if self.is_on_cuda:
            self._look_at_indices(execution, {ref.index for ref in value_refs(arguments)})
        return execution

    def _look_at_indices(self, execution: _Execution, given: set[int]) -> None:
        """Raise IndexError where one is out of range, now or before: not every kernel says so."""
        computed = set(filter(self._is_computed_index, given))
        if computed & self.out_of_range:
            raise IndexError("an index was out of range before")
        if computed:
            try:
                execution.refuse_bad_indices()
            except IndexError:
                self.out_of_range.update(computed)
                raise

    def _is_computed_index(self, index: int) -> bool:
        """Whether a value may be an index that is computed from made-up values."""
        value = self.graph.values[index]
        is_index = not _is_floating(value.spec) and _dtype(value.spec) != torch.bool
        is_computed = value.view is not None or index in self.made_by
        return is_index and is_computed and index not in self.given

    def _supply(self, index: int, environment: dict[int, torch.Tensor], with_storage: bool) -> None:
        """with_storage: what is made up is in a storage as large as in the model."""
        value = self.graph.values[index]
        if index in self.given:
            environment[index] = self.given[index]
        elif _is_floating(value.spec) or not (value.view or index in self.made_by):
            size_bytes = self.graph.data[value.data].size_bytes if with_storage else 0
            environment[index] = _made_up(value.spec, size_bytes)
        elif value.view is not None:
            self.run(value.view, environment)
        else:
            inner: dict[int, torch.Tensor] = {}
            for call in self.made_by[index].calls:
                self.run(call, inner)
            environment |= inner

    def run(self, call: Call, environment: dict[int, torch.Tensor]) -> None:
        results = _results(self._execution(call, environment).run())
        for index, leaf in zip(call.results, results, strict=True):
            if index is not None and isinstance(leaf, torch.Tensor):
                environment[index] = leaf


def _inputs(graph: CDGraph, given: Mapping[int, torch.Tensor]) -> _Inputs:
    made_by = {
        v: node
        for node in graph.nodes
        for call in node.calls
        for v in call.results
        if v is not None and graph.values[v].data in node.writes
    }
    return _Inputs(graph, given, made_by, torch.device(_device(graph)).type == "cuda")


def _is_floating(spec: TensorSpec) -> bool:
    dtype = _dtype(spec)
    return dtype.is_floating_point or dtype.is_complex


def _dtype(spec: TensorSpec) -> torch.dtype:
    found: torch.dtype = getattr(torch, spec.dtype.removeprefix("torch."))
    return found


def _made_up(spec: TensorSpec, size_bytes: int) -> torch.Tensor:
    """A tensor with the spec's strides, in a storage of `size_bytes` or of what it needs: uniform
    in [0, 1), a row of _DRAWN elements over and over; zeros if not of floating dtype."""
    dtype = _dtype(spec)
    elements = max(_span(spec), size_bytes // dtype.itemsize)
    if _is_floating(spec):
        generator = torch.Generator(spec.device).manual_seed(0)
        drawn = torch.rand(min(elements, _DRAWN), generator=generator, device=spec.device)
        flat = drawn.to(dtype).repeat(-(-elements // _DRAWN))[:elements]
    else:
        flat = torch.zeros(elements, dtype=dtype, device=spec.device)
    tensor = flat.as_strided(spec.shape, spec.stride)
    if spec.is_conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if spec.is_neg else tensor


def _span(spec: TensorSpec) -> int:
    """Elements of the smallest storage that holds the tensor at offset 0."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(spec.shape, spec.stride, strict=True))


def _needed_bytes(spec: TensorSpec) -> int:
    """Of the smallest storage that holds the tensor where it is."""
    size_bytes = _item_bytes(spec) * (spec.offset + _span(spec))
    return _allocated(size_bytes, torch.device(spec.device).type)


def _results(result: object) -> list[object]:
    """Flat results, in the order of `Call.results`."""
    if not isinstance(result, tuple | list):
        return [result]
    return [leaf for item in result for leaf in _results(item)]


# Memory


@dataclass(frozen=True, slots=True)
class _CallMemory:
    workspace_bytes: int
    result_bytes: tuple[int, ...]


def _measure_memory(inputs: _Inputs, calls: Mapping[str, Call]) -> dict[str, _CallMemory]:
    """Workspace and result sizes of every call that runs.

    Each runs once before it is measured: what an operator allocates once and keeps (primitive
    caches, handles) is no part of its workspace.
    """
    if inputs.is_on_cuda:
        return _measure_memory_cuda(inputs, calls)
    waiting = list(calls.items())
    found: dict[str, _CallMemory] = {}
    for first in range(0, len(waiting), _SESSION_CALLS):
        report("measuring sizes", first, len(waiting))
        found |= _measure_session(inputs, waiting[first : first + _SESSION_CALLS])
    return found


def _measure_session(inputs: _Inputs, calls: Sequence[tuple[str, Call]]) -> dict[str, _CallMemory]:
    """As `_measure_memory`, of as many calls as one session of the profiler may hold."""
    sizes: dict[str, tuple[int, ...]] = {}
    with profiled() as session:
        for key, call in calls:
            with _else_estimated(inputs, call):
                execution = inputs.execution(call)
                execution.run()
                with record_function(_RANGE + key):
                    result = execution.run()
                sizes[key] = _result_bytes(execution, result)
                del result, execution
    seen = _seen_in_ranges(session)
    return {key: _memory(*seen[key], found) for key, found in sizes.items()}


def _memory(peak_bytes: int, left_bytes: int, result_bytes: tuple[int, ...]) -> _CallMemory:
    """What is not left at the end was workspace. Results may have been allocated outside of
    PyTorch (numpy, a library), all of them or some: these no event shows, and they count as they
    would have there."""
    seen_bytes = min(max(left_bytes, 0), sum(result_bytes))
    return _CallMemory(peak_bytes - seen_bytes, result_bytes)


# An operator that says so fails whatever the values.
_OF_DTYPES = re.compile("dtype|scalar type|datatype|not implemented for", re.IGNORECASE)


@contextlib.contextmanager
def _else_estimated(inputs: _Inputs, call: Call) -> Iterator[None]:
    """What raises inside is left out. Raises CaptureError where eager would fail as well."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if _OF_DTYPES.search(str(error)) and _has_real_dtypes(inputs, call):
            _refuse_as_eager(inputs.graph, call, error)


def _has_real_dtypes(inputs: _Inputs, call: Call) -> bool:
    """Whether the dtypes of the arguments are what operators give, not only what PyTorch's shape
    rules say: under autocast these are wrong for the statistics of a normalization."""
    graph = inputs.graph
    for ref in value_refs((call.args, [a for _, a in call.kwargs])):
        index = ref.index
        while (view := graph.values[index].view) is not None:
            index = next(value_refs(view.args)).index
        made: dict[int, torch.Tensor] = {}
        try:
            for earlier in inputs.made_by[index].calls if index in inputs.made_by else ():
                inputs.run(earlier, made)
        except (RuntimeError, IndexError, ValueError):
            return False
        if index in made and str(made[index].dtype) != graph.values[index].spec.dtype:
            return False
    return True


def _refuse_as_eager(graph: CDGraph, call: Call, error: Exception) -> None:
    """Raise CaptureError for a call of the forward phase; what backward refuses, if forward runs,
    is no matter of the sample."""
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
    """For each of our ranges the peak of bytes allocated since its begin, and those left at its
    end."""
    ranges = sorted(
        (e.start_ns(), e.end_ns(), e.name().removeprefix(_RANGE))
        for e in profiler_events(session)
        if e.name().startswith(_RANGE)
    )
    events = list(memory_events(session))
    seen: dict[str, tuple[int, int]] = {}
    position = 0
    for begin, end, key in ranges:
        while position < len(events) and events[position][0] < begin:
            position += 1
        first = position
        while position < len(events) and events[position][0] <= end:
            position += 1
        seen[key] = peak_of(change for _, change in events[first:position])
    return seen


def _measure_memory_cuda(inputs: _Inputs, calls: Mapping[str, Call]) -> dict[str, _CallMemory]:
    device = _device(inputs.graph)
    found: dict[str, _CallMemory] = {}
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
            peak_bytes = _peak_between(before, after)
            found[key] = _CallMemory(max(0, peak_bytes - sum(sizes)), sizes)
            del result, execution
    return found


def _peak_between(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Bytes that the caching allocator gave out at most, by its statistics, beyond those before.

    A block of more than a mebibyte may be left unsplit, with up to another one that nobody asked
    for: then by what was asked for, in whole granules."""

    def rise(statistic: str) -> int:
        return int(after[statistic]["all"]["peak"] - before[statistic]["all"]["current"])

    given_bytes = rise("allocated_bytes")
    if not after["requested_bytes"]["all"]["allocated"]:
        return given_bytes  # cudaMallocAsync does not count what is asked for
    return min(given_bytes, rise("requested_bytes") + rise("allocation") * _CUDA_GRANULE_BYTES)


def _result_bytes(
    execution: _Execution, result: object, device_type: str = "cpu"
) -> tuple[int, ...]:
    """Bytes of the storage of each result; 0 if it is an argument's or an earlier result's.

    device_type: of the graph. Seeds of attention are on the CPU where fake tensors say CUDA."""
    given = facts.tensors((execution.args, execution.kwargs))
    seen = {t.untyped_storage()._cdata for t in given}
    found: list[int] = []
    for leaf in _results(result):
        size_bytes = 0
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in seen:
            seen.add(leaf.untyped_storage()._cdata)
            size_bytes = _allocated(leaf.untyped_storage().nbytes(), device_type)
        found.append(size_bytes)
    return tuple(found)


def _allocated(size_bytes: int, device_type: str) -> int:
    granule = _CUDA_GRANULE_BYTES if device_type == "cuda" else 1
    return -(-size_bytes // granule) * granule


# Time


def _measure_times(
    inputs: _Inputs, calls: Mapping[str, Sequence[Call]], scratch: torch.Tensor
) -> dict[str, list[int]]:
    """Times of one of each `calls` that cost the same, with cold caches, the freeing of results
    included: a few of each, and then more of those that the iteration mostly consists of.

    The operators themselves are warm: `_measure_memory` has run them.
    """
    times = {}
    for done, (key, equal) in enumerate(calls.items()):
        report("measuring times", done, len(calls))
        times[key] = _repeated(inputs, equal[0], scratch, _LEAST_REPEATS)
    shares = {key: statistics.median(times[key]) * len(equal) for key, equal in calls.items()}
    heavy = [key for key in calls if shares[key] >= _HEAVY_SHARE * sum(shares.values())]
    box_ns = min(_TIME_BOX_NS, _ALL_BOXES_NS // max(len(heavy), 1))
    for key in heavy:
        # What was measured took as long again to evict caches, or longer.
        left_ns = box_ns - 2 * sum(times[key])
        more = _MOST_REPEATS - _LEAST_REPEATS
        times[key] += _repeated(inputs, calls[key][0], scratch, more, within_ns=left_ns)
    report("measuring times", len(calls), len(calls))
    return times


def _repeated(
    inputs: _Inputs,
    call: Call,
    scratch: torch.Tensor,
    repeats: int,
    *,
    within_ns: float = math.inf,
) -> list[int]:
    execution = inputs.execution(call)
    once = _cuda_time_ns if scratch.is_cuda else _cpu_time_ns
    begin = time.perf_counter_ns()
    times: list[int] = []
    while len(times) < repeats and time.perf_counter_ns() - begin < within_ns:
        scratch.add_(1)
        times.append(once(execution))
    return times


def _cost(times: Sequence[int], memory: _CallMemory) -> OpCost:
    """times: of one call, in ns."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return OpCost(
        time_ns=int(statistics.median(times)),
        spread_ns=int(high - low),
        workspace_bytes=memory.workspace_bytes,
        result_bytes=memory.result_bytes,
        repeats=len(times),
    )


def _scratch(device: torch.device) -> torch.Tensor:
    return torch.zeros(_SCRATCH_BYTES[device.type], dtype=torch.uint8, device=device)


def _cpu_time_ns(execution: _Execution) -> int:
    begin = time.perf_counter_ns()
    execution.run()
    return time.perf_counter_ns() - begin


def _cuda_time_ns(execution: _Execution) -> int:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    execution.run()
    end.record()
    end.synchronize()
    return int(begin.elapsed_time(end) * 1e6)


# Estimates


def _fallback_rates(graph: CDGraph) -> tuple[float, float]:
    return _CUDA_RATES if torch.device(_device(graph)).type == "cuda" else _CPU_RATES


def _estimate(graph: CDGraph, call: Call, bytes_per_s: float, flops_per_s: float) -> OpCost:
    """Cost of a call from the specs of its arguments and named results."""
    given = [ref.index for ref in value_refs((call.args, [a for _, a in call.kwargs]))]
    named = [v for v in call.results if v is not None]
    moved = sum(_distinct_bytes(graph.values[v].spec) for v in dict.fromkeys((*given, *named)))
    seconds = max(moved / bytes_per_s, _flops(graph, call) / flops_per_s)
    seen = {graph.values[v].data for v in given}
    sizes: list[int] = []
    for value in call.results:
        if value is None or graph.values[value].data in seen:
            sizes.append(0)
            continue
        seen.add(graph.values[value].data)
        spec = graph.values[value].spec
        sizes.append(_needed_bytes(spec))
    return OpCost(round(seconds * 1e9), 0, 0, tuple(sizes), 0)


def _larger(a: OpCost, b: OpCost) -> OpCost:
    """Calls of one key can differ in which results they name: the sizes of those named once."""
    sizes = tuple(map(max, a.result_bytes, b.result_bytes))
    return replace(a, time_ns=max(a.time_ns, b.time_ns), result_bytes=sizes)


def _flops(graph: CDGraph, call: Call) -> int:
    """Floating-point operations by PyTorch's own formulas; 0 where it has none."""
    known = facts.facts_of(call.op)
    like = facts.resolve(f"{known.flops_like}.default") if known.flops_like else None
    formula = flop_registry.get((like or facts.resolve(call.op)).overloadpacket)
    if formula is None:
        return 0

    def shape(index: int) -> Any:
        return torch.Size(graph.values[index].spec.shape)

    results = [None if v is None else shape(v) for v in call.results]
    arguments = [substitute(a, shape) for a in call.args]
    return int(
        formula(
            *(_with_equal_heads(arguments) if known.repeats_heads else arguments),
            **{name: substitute(a, shape) for name, a in call.kwargs},
            out_val=results[0] if len(results) == 1 else results,
        )
    )


def _with_equal_heads(arguments: Sequence[Any]) -> list[Any]:
    """Shapes of attention with as many heads of keys and values as of queries, for which the
    kernels repeat them: formulas of torch 2.11 know no others."""

    def is_tensor(argument: object) -> bool:
        return isinstance(argument, torch.Size) and len(argument) == 4

    heads = max((a[1] for a in arguments if is_tensor(a)), default=0)
    return [torch.Size((a[0], heads, *a[2:])) if is_tensor(a) else a for a in arguments]


def _distinct_bytes(spec: TensorSpec) -> int:
    """Bytes of the elements that the tensor holds, those repeated by expansion once."""
    pairs: Iterable[tuple[int, int]] = zip(spec.shape, spec.stride, strict=True)
    return _item_bytes(spec) * prod(n for n, stride in pairs if stride or not n)


def _item_bytes(spec: TensorSpec) -> int:
    return _dtype(spec).itemsize
