"""Question: what a training step needs of a device, for calls of any size and schedules of them.

takes: a model, arguments, a device, an optimizer, options of plans. returns: captures with prices
of the device, timelines of schedules, the smallest plan, a plan for the remaining memory.
guarantees: a timeline fits only if the allocator's model finds memory for all of it, and the host
has room for what is paged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from rockplan.budget import MOST_BYTES, Budget
from rockplan.errors import InfeasibleBudget, InvalidInput, RockplanError
from rockplan.fitting.as_on_cuda import as_on_cuda
from rockplan.fitting.changes import Holding
from rockplan.fitting.gpus import Gpu
from rockplan.fitting.optimizer import OptimizerLike, OptimizerSteps, optimizer_steps
from rockplan.fitting.rates import CALLS_A_BLOCK, rates_of, step_ns
from rockplan.fitting.reserved import storage_sizes
from rockplan.fitting.scheduled import first_gradients
from rockplan.fitting.shards import ALONE, GatheredGroup, Shards, gathered_bytes, unknown_to_fsdp2
from rockplan.fitting.timeline import Timeline, passes_of, timeline_of
from rockplan.fitting.training_step import TrainingStep
from rockplan.graph_builder.lowering.backward_order import in_eager_order_of, reordered
from rockplan.machine import available_bytes
from rockplan.options import Options
from rockplan.oracles.clock import clock
from rockplan.oracles.simulate import simulate
from rockplan.search import planning
from rockplan.search.paging import SHARE
from rockplan.search.problem import Problem, problem_of_priced
from rockplan.solving.captured_calls import waits_of
from rockplan.values.copies import Host, paged, with_copies
from rockplan.values.graph import CDGraph
from rockplan.values.plan import Plan, format_bytes
from rockplan.values.schedule import Schedule
from rockplan.will_it_fit.captured_sizes import (
    Arguments,
    Named,
    OpenCall,
    PricedCall,
    Size,
    open_call,
    priced_call,
    resized,
)

BATCH, LENGTH = 0, 1
"""Dimensions of the sample's tensors, in `sizes`."""

TRIES = 5
"""Plans that are tried for the remaining memory of a device."""

Scheduled = tuple[CDGraph, Schedule]
BESIDE_PAGING = ("relaxation", "eviction", "blocks", "exchange", "proof")
"""Stages that find nothing within less than the smallest plan without paging needs."""

PAGED_SHARES = (0.5, 0.7, 0.85)
"""Of what the smallest plan without paging needs: budgets of plans that page."""

LONGER = 3
"""Times the limit, for a plan that serves all lengths, or the only one that might fit."""

Smallest = tuple[tuple[int, ...], Schedule]
"""Storages that are paged, and a schedule of the graph with their copies."""


class TooSmall(InvalidInput):
    """A device does not hold the parameters."""


@dataclass(slots=True)
class FitQuestion:
    """One question of `fit`. given: the caller's model, whose parameters the optimizer has; model:
    the one that is captured; on: the device; host: the memory that plans may page to; unpaged: the
    same question without it; shards: how processes share the model; blocks: paths of its repeated
    blocks; named: tensors that vary, where the caller says so; untried: the least sizes that count
    as too large since none can try them here."""

    given: nn.Module
    model: nn.Module
    arguments: Arguments
    on: Gpu
    optimizer: OptimizerLike
    step: TrainingStep
    options: Options
    host: Host | None = None
    unpaged: FitQuestion | None = None
    shards: Shards = ALONE
    blocks: tuple[str, ...] = ()
    named: Named = field(default_factory=dict)
    untried: set[Size] = field(default_factory=set)
    _steps: dict[Hashable, OptimizerSteps] = field(default_factory=dict)
    _smallest: dict[int, Smallest] = field(default_factory=dict)

    def paging_to(self, host: Host) -> FitQuestion:
        """Return the same question for plans that may page to `host`."""
        return replace(self, host=host, unpaged=self, _smallest={})

    def at_one_length(self) -> FitQuestion:
        """Return the same question, whose further plans this one will not know."""
        unpaged = self.unpaged and self.unpaged.at_one_length()
        return replace(self, unpaged=unpaged, _smallest={**self._smallest})

    def searched_longer(self) -> FitQuestion:
        """Return the same question, of which searches may take `LONGER` times the limit."""
        seconds = LONGER * self.options.time_limit_s
        return replace(self, options=replace(self.options, time_limit_s=seconds))

    @property
    def resident(self) -> dict[Holding, tuple[int, ...]]:
        """Owner -> bytes of each storage that exists on the device before a step: parameters,
        buffers, averages, buckets of DistributedDataParallel, workspaces of cuBLAS."""
        parameters = self.shards.parameter_sizes(self.model)
        buffers = storage_sizes(self.model.buffers())
        return {
            Holding.PARAMETERS: parameters,
            Holding.BUFFERS: buffers,
            Holding.AVERAGES: parameters + buffers if self.step.average else (),
            Holding.BUCKETS: self.shards.bucket_sizes(self.model),
            # Forward and backward multiply in threads of their own.
            Holding.WORKSPACES: (self.on.cublas_bytes,) * 2 if self.on.cublas_bytes else (),
        }

    @property
    def _model_bytes(self) -> int:
        own = self.resident.items()
        return sum(sum(sizes) for owner, sizes in own if owner is not Holding.WORKSPACES)

    @property
    def groups(self) -> tuple[GatheredGroup, ...]:
        """The groups of parameters that are gathered together."""
        return self.shards.groups(self.model, self.blocks)

    def refuse_too_small(self, without: Sequence[str] = ()) -> None:
        """Raise InvalidInput, with a remedy, if the device does not hold even parameters and
        buffers. without: options that must be left out for the remedy, more processes."""
        room_bytes = self.on.usable_bytes - sum(self.resident[Holding.WORKSPACES])
        if self._least_bytes <= room_bytes:
            return
        gathered_text = format_bytes(gathered_bytes(self.groups))
        whole = f", and {gathered_text} are gathered at a time" if self.groups else ""
        raise TooSmall(
            f"{self.on} has {format_bytes(max(room_bytes, 0))} beside its context and workspaces "
            f"of cuBLAS, and parameters and buffers{self.shards} alone take "
            f"{format_bytes(self._model_bytes)}{whole}; with gradients and optimizer "
            f"{format_bytes(self.known_without_capture())}{self._remedy(room_bytes, without)}"
        )

    @property
    def _least_bytes(self) -> int:
        return self._model_bytes + gathered_bytes(self.groups)

    def _remedy(self, room_bytes: int, without: Sequence[str]) -> str:
        """room_bytes: of the device beside its context and workspaces."""
        if room_bytes <= 0:
            return ", which fit in no number of shards"
        step = replace(self.step, in_backward=False, average=False)
        once = replace(self, shards=ALONE, step=step, _steps={})
        known_bytes = once.known_without_capture()
        own = self.shards.count if self.shards.are_parts else 1
        least = -(-known_bytes // room_bytes)
        parts = f", which fit in no less than {least} shards" if least > own else ""
        if why := unknown_to_fsdp2(self.model, self.blocks):
            return f"{parts}; {why}"
        gathered = gathered_bytes(Shards(2).groups(self.model, self.blocks))
        count = -(-known_bytes // max(room_bytes - gathered, 1))
        if count <= own or replace(once, shards=Shards(count))._least_bytes > room_bytes:
            return (
                f"{parts}; more parts of fully_shard do not help: they are of whole rows, and a "
                f"block is gathered whole, at least {format_bytes(gathered)} at a time"
            )
        left_out = f", without {', '.join(without)}" if without else ""
        return (
            f", which fit in no less than {count} shards (gpus={count}, shard='fsdp2'; --gpus "
            f"{count} --shard fsdp2{left_out})"
        )

    def known_without_capture(self) -> int:
        """Return the bytes of parameters, buffers, gradients and optimizer state."""
        trained = {n: p for n, p in self.given.named_parameters() if p.requires_grad}
        steps = self.steps(trained)
        gradients = storage_sizes(map(self.shards.part, trained.values()))
        return self._model_bytes + sum(gradients) + steps.state_bytes

    def steps(self, trained: Iterable[str]) -> OptimizerSteps:
        """Return the memory changes of the optimizer's steps over the parameters of these names."""
        names = tuple(trained)
        key = self.shards, names
        if key not in self._steps:
            named = dict(self.given.named_parameters(remove_duplicate=False))
            parameters = {name: named[name] for name in names}
            self._steps[key] = optimizer_steps(
                self.optimizer,
                parameters,
                step=self.step,
                metered=self.on.is_cpu,
                as_on_cuda=not self.on.is_cpu,
                shards=self.shards,
            )
        return self._steps[key]

    @property
    def is_tried(self) -> bool:
        """True if operations run here, to see what memory they take: those of the CPU, and with
        compiled kernels of any device at hand."""
        return self.on.is_cpu or bool(self.on.at_hand and self.options.compile)

    def whole(self, size: Size) -> PricedCall:
        return self.call(size, replace(self.options, tile=False))

    def call(self, size: Size, options: Options) -> PricedCall:
        """Capture and price the call of one (batch, length); length None for that of the sample. An
        error names the size, and what is known without a capture."""
        batch, length = size
        tried_bytes = None
        if self.is_tried:  # an operation's results are there twice for a moment
            left_bytes = (available_bytes() if self.on.is_cpu else None) or MOST_BYTES
            tried_bytes = min(self.on.usable_bytes, left_bytes) // 2
        try:
            with self.on_device():
                call = self.resized(size)
                return priced_call(self.model, call, options, rates_of(self.on), tried_bytes)
        except RockplanError as error:
            where = f"batch {batch}" + ("" if length is None else f" of length {length}")
            error.args = (
                f"{where}: {str(error).rstrip('.')}. Known without it: parameters, gradients and "
                f"optimizer take {format_bytes(self.known_without_capture())}",
            )
            raise

    def recorded(self, size: Size, free: Sequence[int]) -> OpenCall:
        """Record the calls of all sizes, as `open_call`."""
        options = replace(self.options, tile=False)
        with self.on_device():
            call, rates = self.resized(size), rates_of(self.on)
            return open_call(size, self.model, call, free, options, rates, self.named)

    def resized(self, size: Size) -> Arguments:
        """Return the arguments of the sample at this (batch, length)."""
        sizes = {d: n for d, n in zip((BATCH, LENGTH), size, strict=True) if n is not None}
        return resized(self.model, self.arguments, sizes, self.named)

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """While active, operators are those of the device."""
        return contextlib.nullcontext() if self.on.is_cpu else as_on_cuda()

    def step_ns(
        self, call: PricedCall, graph: CDGraph, schedule: Schedule, blocks: int = 0
    ) -> tuple[float, float]:
        """Return the time of a step whose passes run this schedule, with the quickest and with the
        slowest host. blocks: how many of them PyTorch's checkpointing runs again."""
        steps, passes = self.steps(first_gradients(graph, call.interface)), self.step.accumulate
        calls = sum(len(graph.nodes[i].calls) for i in schedule.computes)
        moved_ns = 1e9 * steps.moved_bytes / rates_of(self.on).bytes_per_s
        return step_ns(
            self.on,
            passes * clock(graph, schedule).time_ns + moved_ns,
            passes * (calls + CALLS_A_BLOCK * blocks) + steps.calls,
        )

    def replayed(self, call: PricedCall) -> Scheduled:
        """Return the smallest plan found for calls of this form, replayed; searched first if there
        is none."""
        if not self.has_smallest(call):
            self.find_smallest(call)
        storages, schedule = self._smallest[call.form]
        return self._with_copies(call.planned, storages), schedule

    def _with_copies(self, graph: CDGraph, storages: Iterable[int]) -> CDGraph:
        return with_copies(graph, storages, self.host.link.share(SHARE)) if self.host else graph

    def has_smallest(self, call: PricedCall) -> bool:
        return call.form in self._smallest

    def find_smallest(self, call: PricedCall, enough_bytes: int = 0) -> None:
        """Search the plan with the least peak for a call and keep it for calls of the same form. If
        the relaxation finds one that needs no more than `enough_bytes`, the other stages, which
        lower it by the last percent and take most of the time, are left out. With a host, search a
        smaller one that pages."""
        if self.unpaged:
            self._find_paged(self.unpaged, call, enough_bytes)
            return
        problem = self.problem(call)
        limits = replace(planning.limits_of(self.options), enough_bytes=enough_bytes)
        found = planning.least_peak_of(problem, self.options).find(limits)
        assert found.schedule is not None
        least = planning.plan_of(problem, found.schedule, found.peak_bytes)
        assert least is not None
        self.take(call, planning.waiting(least, problem.waits))

    def _find_paged(self, unpaged: FitQuestion, call: PricedCall, enough_bytes: int) -> None:
        """The first plan found that pages within one of PAGED_SHARES of the peak without paging,
        else the smallest without, for which the search ends at one of at most `enough_bytes`."""
        if not unpaged.has_smallest(call):
            unpaged.find_smallest(call, enough_bytes)
        self.page_nothing(call)
        usual_bytes = simulate(*unpaged.replayed(call)).peak_bytes
        problem = self.problem(call)
        for share in PAGED_SHARES:
            with contextlib.suppress(InfeasibleBudget):
                self.take(call, self.plan(problem, int(share * usual_bytes), BESIDE_PAGING))
                break

    def take(self, call: PricedCall, plan: Plan) -> None:
        """Store `plan` as the smallest one of calls like this."""
        self._smallest[call.form] = _in_eager_order(plan)

    def page_nothing(self, call: PricedCall) -> None:
        """Take the smallest plan of the unpaged question, which must be known."""
        assert self.unpaged is not None
        self._smallest[call.form] = self.unpaged._smallest[call.form]

    def plan(self, problem: Problem, budget_bytes: int, without: Iterable[str] = ()) -> Plan:
        options = replace(self.options, without=(*self.options.without, *without))
        return planning.plan_within(problem, Budget(size_bytes=budget_bytes), options)

    def problem(self, call: PricedCall) -> Problem:
        """Return the problem of a call."""
        graph = call.planned
        if "reorder" not in self.options.without:
            graph = reordered(graph)
        problem = problem_of_priced(graph, call.profile, self.options)
        # Where optimizers step inside backward, gradients wait for the last read of a parameter.
        stepping = call.interface.parameters if self.step.in_backward else ()
        waits = waits_of(graph, call.interface, frozenset(name for name, _ in stepping))
        return replace(problem, waits=waits, host=self.host)

    def timeline(
        self, call: PricedCall, graph: CDGraph, schedule: Schedule, *, is_eager: bool = False
    ) -> Timeline:
        """Return the memory over time of two training steps whose forward and backward run this
        schedule. is_eager: it stands for what PyTorch does."""
        steps = self.steps(first_gradients(graph, call.interface))
        adding = self.step.accumulate > 1 or not self.step.set_to_none
        passes = passes_of(
            graph, schedule, call.interface, steps, self.groups, adding=adding, is_eager=is_eager
        )
        return timeline_of(
            {**self.resident, Holding.INPUTS: call.input_sizes},
            passes,
            steps,
            accumulate=self.step.accumulate,
            set_to_none=self.step.set_to_none,
            paged=tuple(graph.data[page.host].size_bytes for page in paged(graph)),
        )

    def fits(self, timeline: Timeline) -> bool:
        """True if the device has memory for the timeline, as the allocator splits it."""
        usable_bytes = self.on.usable_bytes
        host_bytes = self.host.size_bytes if self.host else 0
        if timeline.peak.size_bytes > usable_bytes or timeline.host_bytes > host_bytes:
            return False
        return self.on.is_cpu or timeline.usage(usable_bytes).failed_at is None

    def most_held(self, timeline: Timeline, capacity_bytes: int | None = None) -> tuple[int, int]:
        """Return the most bytes that the allocator has given out, and has reserved. capacity_bytes:
        of the device, None if it has enough."""
        if self.on.is_cpu:
            return (timeline.peak.size_bytes,) * 2
        usage = timeline.usage(capacity_bytes)
        return usage.allocated_peak_bytes, usage.reserved_peak_bytes

    def faster(self, call: PricedCall) -> Scheduled:
        """Return (graph, schedule) of a plan for a call that is faster than the smallest and with
        which a step fits on the device; the smallest if none does. It is planned for the memory
        that remains when the optimizer has its state and gradients do not exist yet, then for
        less."""
        usable_bytes = self.on.usable_bytes
        smallest = self.replayed(call)
        gradients = first_gradients(call.graph, call.interface)
        alive_bytes = sum(map(sum, self.resident.values())) + sum(call.input_sizes)
        left_bytes = usable_bytes - alive_bytes - self.steps(gradients).state_bytes
        least_bytes = simulate(*smallest).peak_bytes
        usual_bytes = simulate(*self.unpaged.replayed(call)).peak_bytes if self.unpaged else 0
        problem = self.problem(call)
        for tries in range(TRIES, 0, -1):
            asked_bytes = max(left_bytes, least_bytes) if tries > 1 else least_bytes
            try:
                plan = self.plan(
                    problem, asked_bytes, BESIDE_PAGING if asked_bytes < usual_bytes else ()
                )
            except InfeasibleBudget:
                break
            storages, schedule = _in_eager_order(plan)
            graph = self._with_copies(call.planned, storages)
            timeline = self.timeline(call, graph, schedule)
            if self.fits(timeline):
                return graph, schedule
            if asked_bytes <= least_bytes:
                break
            over_bytes = self.most_held(timeline)[1] - usable_bytes
            left_bytes = min(left_bytes, plan.peak_bytes) - max(over_bytes, left_bytes // 50)
        return smallest


def _in_eager_order(plan: Plan) -> Smallest:
    storages = tuple(page.data for page in paged(plan.graph))
    return storages, in_eager_order_of(plan.graph, plan.schedule)
