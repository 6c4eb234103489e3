"""Fit: which batch of which length trains on a device, kept whole, checkpointed, or planned.

takes: a module, a sample, a device, an optimizer, ranges of sizes. returns: Fit. guarantees: no
step runs, and no memory of the size of a model on the meta device is touched (`fitting.twin`); each
row comes of one timeline of two steps, and its batch is one whose timeline the allocator's model
finds memory for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rockplan.budget import Budget
from rockplan.captured_calls import arguments
from rockplan.captured_sizes import (
    Arguments,
    Batches,
    PricedCall,
    form_of,
    priced_call,
    resized,
    size_of,
)
from rockplan.checkpointing.wrap import repeated_blocks
from rockplan.errors import InfeasibleBudget, InvalidInput, RockplanError
from rockplan.fitting.allocator import Request, Usage, replay
from rockplan.fitting.answer import Fit, FitRow
from rockplan.fitting.changes import Holding, peak_of
from rockplan.fitting.gpus import Gpu, gpu
from rockplan.fitting.optimizer import OptimizerLike, OptimizerSteps, optimizer_steps
from rockplan.fitting.scheduled import first_gradients, scheduled_changes
from rockplan.fitting.timeline import Passes, Timeline, timeline_of
from rockplan.fitting.twin import twin_of, with_values
from rockplan.fitting.ways import kept_whole, per_block
from rockplan.options import DEFAULT_OPTIONS, Options
from rockplan.oracles.simulate import simulate
from rockplan.runtime.planned_state import unplanned
from rockplan.search import planning
from rockplan.search.problem import problem_of_priced
from rockplan.values.graph import CDGraph
from rockplan.values.plan import format_bytes
from rockplan.values.schedule import Schedule

BATCH, LENGTH = 0, 1
"""Dimensions of the sample's tensors, in `sizes`."""

NOTES = (
    "exact: parameters, gradients, optimizer, activations; of checkpointing, within 2 %. by a "
    "table: context, cuBLAS's workspaces (those inside of other operators are not in the sum). by "
    "a model: reserved, of PyTorch's caching allocator without expandable_segments",
    "times are estimates by the device's peaks: overheads say more than tokens a second",
)
_USUAL_RATES = (1e12, 5e13)

Way = Callable[[PricedCall], tuple[CDGraph, Schedule]]


def fit(
    model: nn.Module,
    sample_input: object,
    device: object,
    *,
    optimizer: OptimizerLike = "adamw",
    sizes: Mapping[int, tuple[int, int]] | None = None,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Fit:
    """What fits on `device`: the largest batch of each length, kept whole, with checkpointing of
    each block, and by a plan, and what each costs.

    model, sample_input, sample_kwargs: as for `solve`; either may be on the meta device. device: a
    name ('h100-80'), bytes (80 * 2**30, '80GiB'), or a torch.device of this machine. optimizer: a
    name, a function from parameters to an optimizer, an optimizer, or None. sizes: ranges of
    dimension 0, the batch, and 1, the length, of which the powers of two and the ends are looked
    at; without a range a dimension stays as in the sample. options: of the plans.
    Raises InvalidInput for a device or an optimizer that is not known, and where the device does
    not hold the parameters; what `plan` raises for a model that cannot be captured, with what is
    known without that.
    """
    on = gpu(device)
    given = unplanned(model) if isinstance(model, nn.Module) else model
    model = twin_of(given) if isinstance(given, nn.Module) else given
    args, kwargs = arguments(model, with_values(sample_input), with_values(sample_kwargs))
    if options.tile or options.compile:
        raise InvalidInput("fit has no plans with heads in parts or compiled kernels; solve has")
    batches, lengths = _ranges((args, kwargs), sizes or {})
    question = _Fitting(given, model, (args, kwargs), on, optimizer, replace(options, cache=False))
    question.refuse_too_small()
    rows = [row for length in lengths for row in question.rows(length, batches)]
    return Fit(
        on.name, on.memory_bytes, on.usable_bytes, question.optimizer_name, tuple(rows), NOTES
    )


def _ranges(
    tree: Arguments, sizes: Mapping[int, tuple[int, int]]
) -> tuple[tuple[int, int], list[int | None]]:
    for dimension, ends in sizes.items():
        least, most = ends if isinstance(ends, tuple) and len(ends) == 2 else (0, 0)
        if dimension not in (BATCH, LENGTH) or not 0 < least <= most:
            raise InvalidInput(
                f"sizes has {dimension!r}: {ends!r}; pass {{0: (least, most)}} for batches, "
                "{1: (least, most)} for lengths, or both"
            )
    own = size_of(tree, BATCH)
    batches = sizes.get(BATCH, (own, own))
    if LENGTH not in sizes:
        return batches, [None]
    least, most = sizes[LENGTH]
    powers = {2**n for n in range(most.bit_length()) if least < 2**n < most}
    return batches, sorted({least, most} | powers)


@dataclass(slots=True)
class _Fitting:
    """given: the caller's model, of whose parameters the optimizer is; model: what is captured."""

    given: nn.Module
    model: nn.Module
    arguments: Arguments
    on: Gpu
    optimizer: OptimizerLike
    options: Options
    _steps: OptimizerSteps | None = None

    @property
    def optimizer_name(self) -> str:
        return self._steps.name if self._steps else ""

    @property
    def resident(self) -> dict[Holding, int]:
        return {
            Holding.PARAMETERS: _bytes_of(self.model.parameters()),
            Holding.BUFFERS: _bytes_of(self.model.buffers()),
            # Forward and backward multiply in threads of their own.
            Holding.WORKSPACES: 2 * self.on.cublas_bytes,
        }

    def refuse_too_small(self) -> None:
        held = sum(self.resident.values())
        if held > self.on.usable_bytes:
            known = self.known_without_capture()
            shards = -(-known // self.on.usable_bytes) if self.on.usable_bytes else 0
            raise InvalidInput(
                f"{self.on} has {format_bytes(self.on.usable_bytes)} beside its context, and "
                f"parameters and buffers alone take {format_bytes(held)}; with gradients and "
                f"optimizer {format_bytes(known)}, in no less than {shards} shards"
            )

    def known_without_capture(self) -> int:
        trained = {n: p for n, p in self.given.named_parameters() if p.requires_grad}
        steps = optimizer_steps(self.optimizer, trained, as_on_cuda=True)
        return sum(self.resident.values()) + _bytes_of(trained.values()) + steps.state_bytes

    def rows(self, length: int | None, batches: tuple[int, int]) -> list[FitRow]:
        least, most = batches
        calls = Batches(functools.partial(self._call, length), least, most)
        ways: dict[str, Way] = {"kept whole": lambda call: kept_whole(call.graph)}
        if blocks := repeated_blocks(self.model):
            ways["checkpoint per block"] = lambda call: per_block(call.graph, blocks)
        ways["rockplan"] = self._smallest(calls, min(max(least, 2), most))
        return [self._row(name, way, length, calls, batches) for name, way in ways.items()]

    def _call(self, length: int | None, batch: int) -> PricedCall:
        sizes = {BATCH: batch} if length is None else {BATCH: batch, LENGTH: length}
        call = resized(self.model, self.arguments, sizes)
        try:
            return priced_call(self.model, call, self.options, self._rates)
        except RockplanError as error:
            where = f"batch {batch}" + ("" if length is None else f" of length {length}")
            error.args = (
                f"{where}: {error} Known without it: parameters, gradients and optimizer take "
                f"{format_bytes(self.known_without_capture())}.",
            )
            raise

    @property
    def _rates(self) -> tuple[float, float]:
        if self.on.bandwidth_gb_s is None or self.on.tflops is None:
            return _USUAL_RATES
        name = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        flops = getattr(self.on.tflops, name, None) or self.on.tflops.float32
        return self.on.bandwidth_gb_s * 1e9, flops * 1e12

    def _smallest(self, calls: Batches, batch: int) -> Way:
        """The smallest plan of one batch, replayed on others that are like it; one of its own for a
        batch that is not, such as one of a single sample."""
        least = Budget(is_minimum=True)
        smallest = functools.cache(lambda: self._plan(calls.at(batch), least))

        def made(call: PricedCall) -> tuple[CDGraph, Schedule]:
            is_like = calls.is_affine and form_of(call.graph) == form_of(calls.at(batch).graph)
            return call.graph, smallest() if is_like else self._plan(call, least)

        return made

    def _plan(self, call: PricedCall, budget: Budget) -> Schedule:
        problem = problem_of_priced(call.graph, call.profile, self.options)
        return planning.plan_within(problem, budget, self.options).schedule

    def _timeline(self, call: PricedCall, graph: CDGraph, schedule: Schedule) -> Timeline:
        gradients = first_gradients(graph, call.interface)
        if self._steps is None:
            named = dict(self.given.named_parameters(remove_duplicate=False))
            trained = {name: named[name] for name in gradients.values()}
            self._steps = optimizer_steps(self.optimizer, trained, as_on_cuda=True)
        first = scheduled_changes(graph, schedule, gradients)
        resident = {**self.resident, Holding.INPUTS: call.input_bytes}
        return timeline_of(resident, Passes(first, first), self._steps)

    def _row(
        self, name: str, way: Way, length: int | None, calls: Batches, batches: tuple[int, int]
    ) -> FitRow:
        def timeline(batch: int) -> Timeline:
            call = calls.at(batch)
            return self._timeline(call, *way(call))

        batch = self._largest(timeline, batches)
        call = calls.at(batch or batches[0])
        graph, schedule = way(call)
        found = self._timeline(call, graph, schedule)
        if name == "rockplan" and batch:
            graph, schedule, found = self._faster(call, graph, schedule, found)
        kept_ns = simulate(*kept_whole(call.graph)).time_ns
        time_ns = simulate(graph, schedule).time_ns
        tokens = (batch or batches[0]) * (length or 1)
        usage = _usage(found, self.on.usable_bytes if batch else None)
        peak = found.peak
        allocator_bytes = usage.reserved_peak_bytes - peak.size_bytes
        return FitRow(
            length=length,
            way=name,
            batch=batch,
            allocated_bytes=usage.allocated_peak_bytes,
            reserved_bytes=usage.reserved_peak_bytes,
            owners=(
                *((owner.value, size) for owner, size in peak.owners.items() if size),
                ("allocator", allocator_bytes),
            ),
            overhead=time_ns / kept_ns - 1 if kept_ns else 0.0,
            tokens_per_s=tokens / time_ns * 1e9 if self.on.tflops and time_ns else None,
        )

    def _largest(self, timeline: Callable[[int], Timeline], batches: tuple[int, int]) -> int:
        """The largest batch whose timeline finds memory, by bisection: what a smaller one does not
        find a larger one does not, either. 0 if there is none."""
        least, most = batches
        fitting, beyond = least - 1, most + 1
        tried = most
        while fitting + 1 < beyond:
            if self._fits(timeline(tried)):
                fitting = tried
            else:
                beyond = tried
            tried = (fitting + beyond) // 2
        return fitting if fitting >= least else 0

    def _fits(self, timeline: Timeline) -> bool:
        usable_bytes = self.on.usable_bytes
        if timeline.peak.size_bytes > usable_bytes:
            return False
        return _usage(timeline, usable_bytes).failed_at is None

    def _faster(
        self, call: PricedCall, graph: CDGraph, schedule: Schedule, found: Timeline
    ) -> tuple[CDGraph, Schedule, Timeline]:
        """A plan for what is left of the device, where that fits."""
        alive = peak_of((), found.resident).size_bytes
        gradients = first_gradients(graph, call.interface)
        alive += sum(graph.data[d].size_bytes for d in gradients)
        alive += self._steps.state_bytes if self._steps else 0
        try:
            faster = self._plan(call, Budget(size_bytes=max(self.on.usable_bytes - alive, 1)))
        except InfeasibleBudget:
            return graph, schedule, found
        timeline = self._timeline(call, graph, faster)
        return (graph, faster, timeline) if self._fits(timeline) else (graph, schedule, found)


def _usage(timeline: Timeline, capacity_bytes: int | None) -> Usage:
    resident = [Request(owner, size_bytes) for owner, size_bytes in timeline.resident.items()]
    changes = (change.request for change in timeline.changes)
    return replay([*resident, *changes], capacity_bytes=capacity_bytes)


def _bytes_of(tensors: Any) -> int:
    """Of their storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
