"""Fit: which batch of which length trains on a device, kept whole, checkpointed, or planned.

takes: a module, a sample, a device, an optimizer, ranges of sizes. returns: Fit. guarantees: no
step runs, and no memory of the size of a model on the meta device is touched (`fitting.twin`); each
row comes of one timeline of two steps, and its batch is one whose timeline the allocator's model
finds memory for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rockplan.budget import Budget
from rockplan.captured_calls import arguments
from rockplan.captured_sizes import (
    Arguments,
    PricedCall,
    Size,
    SizedCalls,
    priced_call,
    resized,
    size_of,
)
from rockplan.checkpointing.wrap import repeated_blocks
from rockplan.errors import InfeasibleBudget, InvalidInput, RockplanError
from rockplan.fitting.allocator import Request, Usage, replay
from rockplan.fitting.answer import Fit, FitRow
from rockplan.fitting.changes import Holding
from rockplan.fitting.gpus import Gpu, gpu
from rockplan.fitting.known import answer_key
from rockplan.fitting.optimizer import OptimizerLike, OptimizerSteps, optimizer_steps
from rockplan.fitting.scheduled import first_gradients, waits_of
from rockplan.fitting.timeline import SizedTimeline, Timeline, passes_of, timeline_of
from rockplan.fitting.training_step import USUAL, TrainingStep
from rockplan.fitting.twin import twin_of, with_values
from rockplan.fitting.ways import kept_whole, per_block
from rockplan.graph_builder.lowering.backward_order import in_eager_order_of, reordered
from rockplan.graph_builder.tiling.tile import MOST_PARTS
from rockplan.options import DEFAULT_OPTIONS, Options
from rockplan.oracles.simulate import simulate
from rockplan.runtime.planned_state import unplanned
from rockplan.search import planning
from rockplan.search.problem import Problem, cache_of, problem_of_priced
from rockplan.values.graph import CDGraph, as_eager
from rockplan.values.plan import Plan, format_bytes
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
TRIES = 5
"""Of plans for what is left of a device."""

KEPT = "kept whole"

Scheduled = tuple[CDGraph, Schedule]
Way = Callable[[PricedCall], Scheduled]
BESIDE_THE_RELAXATION = ("eviction", "blocks", "exchange", "descent")
"""Stages that find the last percent of a smallest plan, and take most of the time."""


def fit(
    model: nn.Module,
    sample_input: object,
    device: object,
    *,
    optimizer: OptimizerLike = "adamw",
    sizes: Mapping[int, tuple[int, int]] | None = None,
    sample_kwargs: Mapping[str, Any] | None = None,
    step: TrainingStep = USUAL,
    options: Options = DEFAULT_OPTIONS,
) -> Fit:
    """What fits on `device`: the largest batch of each length, kept whole, with checkpointing of
    each block, and by a plan, and what each costs.

    model, sample_input, sample_kwargs: as for `solve`; either may be on the meta device. device: a
    name ('h100-80'), bytes (80 * 2**30, '80GiB'), or a torch.device of this machine. optimizer: a
    name, a function from parameters to an optimizer, an optimizer, or None. sizes: ranges of
    dimension 0, the batch, and 1, the length, of which the powers of two and the ends are looked
    at; without a range a dimension stays as in the sample. step: what else a step of training does.
    options: of the plans.
    Raises InvalidInput for a device or an optimizer that is not known, and where the device does
    not hold the parameters; what `plan` raises for a model that cannot be captured, with what is
    known without that.
    """
    on = gpu(device)
    given = unplanned(model) if isinstance(model, nn.Module) else model
    model = twin_of(given) if isinstance(given, nn.Module) else given
    args, kwargs = arguments(model, with_values(sample_input), with_values(sample_kwargs))
    if options.compile:
        raise InvalidInput(
            "which kernels the compiler makes is known on the device that they are made for: "
            "rockplan.plan(model, sample, budget, options=Options(compile=True)) says there what "
            "one batch needs; fit has no rows with compiled kernels"
        )
    if options.host is not None:
        raise InvalidInput("fit has no plans that page activations to the host; solve has")
    batches, lengths = _ranges((args, kwargs), sizes or {})
    # Of an optimizer of the caller's nothing says that it is the same the next time.
    cache = cache_of(options) if optimizer is None or isinstance(optimizer, str) else None
    options = replace(options, cache=False)
    question = _Fitting(given, model, (args, kwargs), on, optimizer, step, options)
    question.refuse_too_small()
    calls = SizedCalls(question.whole, *batches, lengths)
    key = question.key(calls) if cache else {}
    if cache and (known := cache.answer(key, Fit.from_json)):
        return known
    answer = question.answer(calls)
    if cache:
        cache.put_answer(key, answer.to_json())
    return answer


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
    step: TrainingStep
    options: Options
    _steps: dict[tuple[str, ...], OptimizerSteps] = field(default_factory=dict)
    _smallest: dict[int, Schedule] = field(default_factory=dict)

    @property
    def resident(self) -> dict[Holding, int]:
        parameters = _bytes_of(self.model.parameters())
        buffers = _bytes_of(self.model.buffers())
        return {
            Holding.PARAMETERS: parameters,
            Holding.BUFFERS: buffers,
            Holding.AVERAGES: parameters + buffers if self.step.average else 0,
            # Forward and backward multiply in threads of their own.
            Holding.WORKSPACES: 2 * self.on.cublas_bytes,
        }

    def refuse_too_small(self) -> None:
        room = self.on.usable_bytes - self.resident[Holding.WORKSPACES]
        held = sum(self.resident.values()) - self.resident[Holding.WORKSPACES]
        if held > room:
            known = self.known_without_capture()
            shards = f"no less than {-(-known // room)}" if room > 0 else "no number of"
            raise InvalidInput(
                f"{self.on} has {format_bytes(max(room, 0))} beside its context and workspaces of "
                f"cuBLAS, and parameters and buffers alone take {format_bytes(held)}; with "
                f"gradients and optimizer {format_bytes(known)}, which fit in {shards} shards"
            )

    def known_without_capture(self) -> int:
        trained = {n: p for n, p in self.given.named_parameters() if p.requires_grad}
        steps = self.steps(trained)
        held = sum(self.resident.values()) - self.resident[Holding.WORKSPACES]
        return held + _bytes_of(trained.values()) + steps.state_bytes

    def steps(self, trained: Iterable[str]) -> OptimizerSteps:
        """Of the optimizer, of these parameters."""
        names = tuple(trained)
        if names not in self._steps:
            named = dict(self.given.named_parameters(remove_duplicate=False))
            parameters = {name: named[name] for name in names}
            self._steps[names] = optimizer_steps(
                self.optimizer, parameters, step=self.step, as_on_cuda=True
            )
        return self._steps[names]

    def key(self, calls: SizedCalls) -> dict[str, str]:
        """What the answer depends on."""
        return answer_key(
            self.given,
            self.arguments,
            calls.small.graph,
            device=self.on,
            optimizer=self.optimizer,
            step=self.step,
            sizes=(calls.least, calls.most, calls.lengths),
            options=self.options,
        )

    def answer(self, calls: SizedCalls) -> Fit:
        # First of all, since it may be refused.
        optimizer = self.steps(n for n, p in self.given.named_parameters() if p.requires_grad)
        ways: dict[str, Way] = {KEPT: _once_a_form(kept_whole)}
        if blocks := repeated_blocks(self.model):
            ways["checkpoint per block"] = _once_a_form(lambda graph: per_block(graph, blocks))
        planned = self._planned_calls(calls)
        rows = [
            row
            for length in calls.lengths
            for row in _Length(self, calls, ways, planned, length).rows()
        ]
        on = self.on
        return Fit(on.name, on.memory_bytes, on.usable_bytes, optimizer.name, tuple(rows), NOTES)

    def _planned_calls(self, calls: SizedCalls) -> dict[str, SizedCalls]:
        """By names of rows. With the head in parts, where that is asked for, as many at all sizes;
        where there is no such head, a line on the logger says so."""
        if not self.options.tile:
            return {"rockplan": calls}
        parts = MOST_PARTS if self.options.tile is True else self.options.tile
        capture = functools.partial(self._call, options=replace(self.options, tile=parts))
        in_parts = SizedCalls(capture, calls.least, calls.most, calls.lengths)
        planned = {"rockplan": calls, f"rockplan, head in {parts} parts": in_parts}
        return planned if in_parts.small.graph.tiles else {"rockplan": calls}

    def whole(self, size: Size) -> PricedCall:
        return self._call(size, replace(self.options, tile=False))

    def _call(self, size: Size, options: Options) -> PricedCall:
        batch, length = size
        sizes = {BATCH: batch} if length is None else {BATCH: batch, LENGTH: length}
        call = resized(self.model, self.arguments, sizes)
        try:
            return priced_call(self.model, call, options, self._rates)
        except RockplanError as error:
            where = f"batch {batch}" + ("" if length is None else f" of length {length}")
            error.args = (
                f"{where}: {str(error).rstrip('.')}. Known without it: parameters, gradients and "
                f"optimizer take {format_bytes(self.known_without_capture())}",
            )
            raise

    @property
    def _rates(self) -> tuple[float, float]:
        if self.on.bandwidth_gb_s is None or self.on.tflops is None:
            return _USUAL_RATES
        name = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        flops = getattr(self.on.tflops, name, None) or self.on.tflops.float32
        return self.on.bandwidth_gb_s * 1e9, flops * 1e12

    def replayed(self, call: PricedCall) -> Scheduled:
        """The smallest plan that was found last; one of its own for a call that is not like the
        others, such as one of a single sample."""
        if not self.has_smallest(call):
            self.find_smallest(call)
        return call.graph, self._smallest[call.form]

    def has_smallest(self, call: PricedCall) -> bool:
        return call.form in self._smallest

    def find_smallest(self, call: PricedCall, enough_bytes: int = 0) -> None:
        """By the relaxation alone, where that leads to no more than enough."""
        problem = self._problem(call)
        plans: list[Plan] = []
        for without in (BESIDE_THE_RELAXATION, ()):
            options = replace(self.options, without=(*self.options.without, *without))
            found = planning.least_peak_of(problem, options).find(planning.limits_of(options))
            assert found.schedule is not None
            if plan := planning.plan_of(problem, found.schedule, found.peak_bytes):
                plans.append(plan)
                if plan.peak_bytes <= enough_bytes:
                    break
        least = min(plans, key=lambda plan: plan.peak_bytes)
        schedule = planning.waiting(least, problem.waits).schedule
        self._smallest[call.form] = in_eager_order_of(problem.graph, schedule)

    def _plan(self, call: PricedCall, budget: Budget) -> Schedule:
        problem = self._problem(call)
        made = planning.plan_within(problem, budget, self.options)
        return in_eager_order_of(problem.graph, made.schedule)

    def _problem(self, call: PricedCall) -> Problem:
        graph = call.graph if "reorder" in self.options.without else reordered(call.graph)
        problem = problem_of_priced(graph, call.profile, self.options)
        waits = waits_of(graph, call.interface) if self.step.in_backward else ()
        return replace(problem, waits=waits)

    def timeline(self, call: PricedCall, graph: CDGraph, schedule: Schedule) -> Timeline:
        gradients = first_gradients(graph, call.interface)
        steps = self.steps(gradients.values())
        passes = passes_of(graph, schedule, call.interface, steps)
        resident = {**self.resident, Holding.INPUTS: call.input_bytes}
        return timeline_of(
            resident,
            passes,
            steps,
            accumulate=self.step.accumulate,
            set_to_none=self.step.set_to_none,
        )

    def fits(self, timeline: Timeline) -> bool:
        usable_bytes = self.on.usable_bytes
        if timeline.peak.size_bytes > usable_bytes:
            return False
        return _usage(timeline, usable_bytes).failed_at is None

    def faster(self, call: PricedCall, schedule: Schedule) -> Schedule:
        """A plan for what is left of the device when the optimizer has its state, beside gradients
        that are not there yet; where that does not fit, for less, down to what `schedule` needs."""
        usable_bytes = self.on.usable_bytes
        gradients = first_gradients(call.graph, call.interface)
        alive = sum(self.resident.values()) + call.input_bytes
        left_bytes = usable_bytes - alive - self.steps(gradients.values()).state_bytes
        least_bytes = simulate(call.graph, schedule).peak_bytes
        for tries in range(TRIES, 0, -1):
            asked_bytes = left_bytes if tries > 1 else least_bytes
            try:
                faster = self._plan(call, Budget(size_bytes=max(asked_bytes, least_bytes)))
            except InfeasibleBudget:
                break
            timeline = self.timeline(call, call.graph, faster)
            if self.fits(timeline):
                return faster
            if asked_bytes <= least_bytes:
                break
            over_bytes = _usage(timeline, None).reserved_peak_bytes - usable_bytes
            left_bytes -= max(over_bytes, left_bytes // 50)
        return schedule


@dataclass(frozen=True, slots=True)
class _Length:
    """The rows of one length. calls: of the whole model; planned: those that are planned."""

    question: _Fitting
    calls: SizedCalls
    ways: Mapping[str, Way]
    planned: Mapping[str, SizedCalls]
    length: int | None

    def rows(self) -> list[FitRow]:
        largest = {name: self._largest(way, self.calls) for name, way in self.ways.items()}
        rows = [
            self._row(name, self.calls, batch, self.ways[name]) for name, batch in largest.items()
        ]
        most = max(largest, key=lambda name: largest[name])
        for name, calls in self.planned.items():
            batch = self._largest_planned(calls, self.ways[most], largest[most])
            rows.append(
                self._row(name, calls, batch, self._fastest if batch else self.question.replayed)
            )
        return rows

    def _row(self, name: str, calls: SizedCalls, batch: int, way: Way) -> FitRow:
        """batch: 0 where none fits, then figures are of the least."""
        question, samples = self.question, batch or calls.least
        call = calls.at(samples, self.length)
        graph, schedule = way(call)
        found = question.timeline(call, graph, schedule)
        time_ns = simulate(graph, schedule).time_ns
        kept_ns = simulate(*self.ways[KEPT](self.calls.at(samples, self.length))).time_ns
        usage = _usage(found, question.on.usable_bytes if batch else None)
        peak = found.peak
        tokens_per_ns = samples * (self.length or 1) / max(time_ns, 1)
        return FitRow(
            length=self.length,
            way=name,
            batch=batch,
            allocated_bytes=usage.allocated_peak_bytes,
            reserved_bytes=usage.reserved_peak_bytes,
            owners=(
                *((owner.value, size) for owner, size in peak.owners.items() if size),
                ("allocator", usage.reserved_peak_bytes - peak.size_bytes),
            ),
            overhead=time_ns / kept_ns - 1 if kept_ns else 0.0,
            tokens_per_s=tokens_per_ns * 1e9 if question.on.tflops and time_ns else None,
        )

    def _fastest(self, call: PricedCall) -> Scheduled:
        return call.graph, self.question.faster(call, self.question.replayed(call)[1])

    def _largest_planned(self, calls: SizedCalls, other: Way, wanted: int) -> int:
        """By the smallest plan of a length before, where that fits the batch that `other` does; or
        else by one of its own."""
        question = self.question
        if question.has_smallest(calls.at(calls.first, self.length)):
            batch = self._largest(question.replayed, calls)
            if batch >= wanted:
                return batch
        size = max(wanted, calls.first), self.length
        question.find_smallest(calls.at(*size), simulate(*other(self.calls.at(*size))).peak_bytes)
        return self._largest(question.replayed, calls)

    def _largest(self, way: Way, calls: SizedCalls) -> int:
        """The largest batch whose timeline finds memory, by bisection: what a smaller one does not
        find a larger one does not, either. 0 if there is none."""
        timeline, most = self._timelines(way, calls)
        fitting, beyond = calls.least - 1, most + 1
        tried = most
        while fitting + 1 < beyond:
            if self.question.fits(timeline(tried)):
                fitting = tried
            else:
                beyond = tried
            tried = (fitting + beyond) // 2
        return fitting if fitting >= calls.least else 0

    def _timelines(self, way: Way, calls: SizedCalls) -> tuple[Callable[[int], Timeline], int]:
        """By batch, and the largest batch whose bytes may fit."""

        def timeline(batch: int) -> Timeline:
            call = calls.at(batch, self.length)
            return self.question.timeline(call, *way(call))

        line = calls.line(self.length)
        if line is None or calls.first == calls.most:
            return timeline, calls.most
        sized = SizedTimeline(calls.first, timeline(calls.first), timeline(calls.first + 1))
        if not sized.is_of_one_kind:
            return timeline, calls.most
        usable_bytes = self.question.on.usable_bytes
        most = sized.most(usable_bytes, (calls.first, calls.most))
        return (lambda batch: sized.at(batch) if batch >= calls.first else timeline(batch)), most


def _once_a_form(make: Callable[[CDGraph], Scheduled]) -> Way:
    """A way whose schedules do not depend on sizes."""
    known: dict[int, Schedule] = {}

    def way(call: PricedCall) -> Scheduled:
        if call.form not in known:
            known[call.form] = make(call.graph)[1]
        return as_eager(call.graph), known[call.form]

    return way


def _usage(timeline: Timeline, capacity_bytes: int | None) -> Usage:
    resident = [Request(owner, size_bytes) for owner, size_bytes in timeline.resident.items()]
    changes = (change.request for change in timeline.changes)
    return replay([*resident, *changes], capacity_bytes=capacity_bytes)


def _bytes_of(tensors: Any) -> int:
    """Of their storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
