"""Fit: which batch of which length trains on a device, kept whole, checkpointed, or planned.

takes: a module, a sample, a device, an optimizer, ranges of sizes. returns: Fit. guarantees: no
step runs, and no memory of the size of a model on the meta device is touched (`twin`); each row is
of one timeline of two steps, and the allocator's model finds memory for the timeline of its batch.
With compiled kernels "kept whole" is the compiled program, and no row is of checkpointing: what
torch.compile keeps of a checkpointed block is its own choice.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rockplan.errors import InvalidInput, RockplanError
from rockplan.fitting.gpus import Gpu, gpu
from rockplan.fitting.optimizer import OptimizerLike
from rockplan.fitting.shards import FSDP2, Shards, unknown_to_fsdp2
from rockplan.fitting.timeline import Timeline
from rockplan.fitting.training_step import USUAL, TrainingStep
from rockplan.fitting.ways import (
    NO_PAGES,
    as_autograd_runs,
    compiled_whole,
    kept_whole,
    pages_of,
    per_block,
)
from rockplan.graph_builder.tiling.tile import MOST_PARTS
from rockplan.options import DEFAULT_OPTIONS, Options, Sizes, checked
from rockplan.oracles.clock import trips
from rockplan.oracles.simulate import simulate
from rockplan.runtime.checkpointing import repeated_blocks
from rockplan.runtime.planned_state import original_forward, unplanned
from rockplan.solving.captured_calls import arguments
from rockplan.solving.sizes import tensors_of
from rockplan.values.copies import Host, HostLink
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import CDGraph, in_eager_order
from rockplan.values.schedule import Schedule, keep_all
from rockplan.will_it_fit.answer import Fit, FitRow
from rockplan.will_it_fit.captured_sizes import (
    Arguments,
    PricedCall,
    SizedCalls,
    TooLargeToTry,
    size_of,
)
from rockplan.will_it_fit.inference import inference_rows
from rockplan.will_it_fit.limits import (
    not_for_several,
    note_of_others,
    notes_of,
    refuse_elsewhere,
)
from rockplan.will_it_fit.question import BATCH, LENGTH, FitQuestion, Scheduled, TooSmall
from rockplan.will_it_fit.twin import twin_of, with_values

KEPT, CHECKPOINTED = "kept whole", "checkpoint per block"

PLANNED = "rockplan"
"""How ways that are planned begin."""

REMEDIES: tuple[dict[str, Any], ...] = (
    {"only_loss": True},
    {"tile": True},
    {"only_loss": True, "tile": True},
    {"compile": True},
    {"host": "64GiB"},
)
"""Changes of the options that let more samples fit, those that change least first."""

PASSES = 8
"""Numbers of passes that are tried to accumulate a batch."""

Way = Callable[[PricedCall], Scheduled]

_ONE_AT_A_TIME = threading.RLock()
"""Contexts of two threads that end in another order would leave the function of one behind."""


@contextlib.contextmanager
def messages_once() -> Iterator[None]:
    """In the `with` block, or the decorated function, drop log records of this thread that repeat
    one (same logger, level and text). A forward that warns once by a function cache warns at each
    capture: caches are put back."""
    said: set[tuple[str, int, str]] = set()
    thread = threading.get_ident()
    with _ONE_AT_A_TIME:
        handle = logging.Logger.handle

        def once(logger: logging.Logger, record: logging.LogRecord) -> None:
            """Handle a record in place of `Logger.handle`."""
            message = record.name, record.levelno, record.getMessage()
            if threading.get_ident() != thread or message not in said:
                said.add(message)
                handle(logger, record)

        logging.Logger.handle = once  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            logging.Logger.handle = handle  # type: ignore[method-assign]


@messages_once()
def fit(
    model: nn.Module,
    sample_input: object,
    device: object,
    *,
    optimizer: OptimizerLike = "adamw",
    sizes: Sizes | None = None,
    sample_kwargs: Mapping[str, Any] | None = None,
    step: TrainingStep = USUAL,
    options: Options = DEFAULT_OPTIONS,
    gpus: int = 1,
    shard: str = FSDP2,
    remedies: bool = False,
    inference: bool = False,
) -> Fit:
    """Return what fits on `device`: the largest batch of each length, kept whole, with
    checkpointing of each block, and by a plan, and the cost of each; with compiled kernels
    (`Options(compile=True)`, on a device of this machine) without checkpointing.

    model, sample_input, sample_kwargs: as for `solve`; either may be on the meta device. device: a
    name ('h100-80'), bytes (80 * 2**30, '80GiB'), or a torch.device of this machine, the CPU among
    them, where operators and kernels run to see what memory they take; or a list, cheapest first:
    the first on which the largest batch fits at each length, else the last. optimizer: a
    name, a function from parameters to an optimizer, an optimizer, or None. sizes: ranges of
    dimension 0, the batch, and 1, the length; powers of two and the ends of a range are examined; a
    dimension without a range stays as in the sample; of some tensors alone by their names, as
    {0: (1, 64), "input_ids": {1: (512, 4096)}}. step: what else a training step does. options:
    of the plans. gpus: how many processes train together, each with such a device and batches of
    its own; shard: what each holds of the model, 'fsdp2' (`fully_shard` of each repeated block, and
    of the rest) or 'ddp' (`DistributedDataParallel`). Rows are of one process. remedies: where the
    largest batch does not fit, also a row for each of `REMEDIES` with which a plan holds more.
    inference: also the largest batches of evaluation and of generation, as `Fit.inference`.
    Raises InvalidInput for an unknown device or optimizer, and if the device does not hold the
    parameters; what `plan` raises for a model that cannot be captured, with what is known even so.
    """
    *cheaper, on = map(gpu, device if isinstance(device, list | tuple) else [device])
    asked: dict[str, Any] = {"sizes": sizes, "sample_kwargs": sample_kwargs, "step": step}
    asked |= {"optimizer": optimizer, "options": options, "gpus": gpus, "shard": shard}
    for one in cheaper:
        with contextlib.suppress(TooSmall):
            found = fit(model, sample_input, one, **asked)
            if {row.length for row in found.rows if row.is_most} >= {r.length for r in found.rows}:
                return found
    asked["inference"] = inference
    if remedies:
        return _with_remedies(functools.partial(fit, model, sample_input, on, **asked), options)
    given = unplanned(model) if isinstance(model, nn.Module) else model
    model = twin_of(given) if isinstance(given, nn.Module) else given
    args, kwargs = arguments(model, with_values(sample_input), with_values(sample_kwargs))
    refuse_elsewhere(model, on, options)
    checked(options, "fit")
    shards = Shards(gpus, shard)
    if inference and shards.count > 1:
        raise InvalidInput("inference is of one process: leave out inference, or gpus")
    blocks = repeated_blocks(model)
    for name, why in not_for_several(shards, step, options).items():
        raise InvalidInput(f"{name} {why}")
    if shards.are_parts and (why := unknown_to_fsdp2(model, blocks)):
        raise InvalidInput(f"{why}; shard='ddp' does")
    ranges, named = _ranges(model, (args, kwargs), sizes or ())
    host = _host(options, on)
    left_out = [*not_for_several(Shards(2), step, options)]
    options = replace(options, cache=False, host=None, link=None)
    question = FitQuestion(
        given, model, (args, kwargs), on, optimizer, step, options, shards=shards, blocks=blocks,
        named=named,
    )  # fmt: skip
    question.refuse_too_small(left_out)
    question = question if host is None else question.paging_to(host)
    record = None if question.is_tried else question.recorded
    sample = {d: size_of(model, (args, kwargs), d, named) for d in {BATCH, *ranges}}
    batches, lengths = ranges.get(BATCH, (sample[BATCH],) * 2), _lengths(ranges.get(LENGTH))
    calls = SizedCalls(question.whole, *batches, lengths, record, sample.get(LENGTH))
    answer = _answer(question, calls)
    answer = replace(answer, notes=(*answer.notes, *note_of_others(on)))
    if not inference:
        return answer
    own = question.unpaged or question
    rows = inference_rows(own, calls, lambda made: _largest(own, calls, _Timelines(made))[0])
    return replace(answer, inference=tuple(rows))


def _with_remedies(ask: Callable[..., Fit], options: Options) -> Fit:
    """Return the answer of `ask`, with the rows of plans under changed options that hold more
    samples than those under `options`."""
    found = ask()
    rows, most = list(found.rows), _largest_plans(found)
    for change in REMEDIES:
        news = {name for name in change if not getattr(options, name)}
        if news != change.keys() or all(row.is_most for row in most.values()):
            continue
        # What cannot be had for this model, device or number of processes is no remedy.
        with contextlib.suppress(RockplanError):
            changed = _largest_plans(ask(options=replace(options, **change)))
            rows += [
                replace(row, way=", ".join([PLANNED, *(f"{k}={v!r}" for k, v in change.items())]))
                for length, row in changed.items()
                if row.batch > most[length].batch
            ]
    return replace(found, rows=tuple(rows))


def _largest_plans(found: Fit) -> dict[int | None, FitRow]:
    """Return length -> row of the plan with the largest batch."""
    plans = sorted((r for r in found.rows if r.way.startswith(PLANNED)), key=lambda r: r.batch)
    return {row.length: row for row in plans}


def _host(options: Options, on: Gpu) -> Host | None:
    """None if the options name no host. Raises InvalidInput if its size or the rate is not
    known."""
    if options.host is None:
        return None
    if options.host_bytes is None or options.host_path is not None:
        raise InvalidInput(
            "fit is about a GPU, which pages to pinned memory, and need not be in this machine: "
            "write how much there is, such as host='64GiB', without host_path"
        )
    rate = options.link_bytes_per_s or int((on.link_gb_s or 0) * 1e9)
    if not rate:
        raise InvalidInput(
            f"what link {on} has to its host is not known: write it, such as link='25GB/s' beside "
            "host, or give a name that `rockplan fit --gpu list` has"
        )
    return Host(options.host_bytes, HostLink(rate, rate))


def _ranges(
    model: nn.Module, arguments: Arguments, sizes: Sizes
) -> tuple[dict[int, tuple[int, int]], dict[int, list[str]]]:
    """Dimension -> its range, and dimension -> names of the tensors that vary, where the caller
    names them. Raises InvalidInput."""
    given = Options(sizes=sizes).sizes
    assert isinstance(given, tuple)
    ranges = {one.dimension: (one.least, one.most) for one in given}
    if not ranges.keys() <= {BATCH, LENGTH} or len({one[1:] for one in given}) > len(ranges):
        raise InvalidInput(
            f"sizes has {sizes}: pass {{0: (least, most)}} for batches, {{1: (least, most)}} for "
            "lengths, or both, and one range for all tensors that you name"
        )
    named = {d: [r.argument for r in given if r.argument and r.dimension == d] for d in ranges}
    tensors = tensors_of(original_forward(model), *arguments)
    for dimension, (least, most) in ranges.items():
        found = {n: t.shape[dimension] for n, t in tensors.items() if t.dim() > dimension}
        if not named[dimension] and len({*found.values()} - {1}) > 1:
            shown = ", ".join(f"{size} in {name!r}" for name, size in found.items())
            option = ("--batch", "--length")[dimension]
            names = [name for name, size in found.items() if size == max(found.values())]
            advised = dict.fromkeys(names, {dimension: (least, most)})
            raise InvalidInput(
                f"dimension {dimension} is {shown}: name the tensors that vary, such as "
                f"sizes={advised} ({option} {','.join(names)}={least}:{most})"
            )
    return ranges, named


def _lengths(ends: tuple[int, int] | None) -> list[int | None]:
    """The ends and the powers of two between, [None] without a range."""
    if ends is None:
        return [None]
    least, most = ends
    powers = {2**n for n in range(most.bit_length()) if least < 2**n < most}
    return sorted({least, most} | powers)


@paused_collection()
def _answer(question: FitQuestion, calls: SizedCalls) -> Fit:
    # First of all: an unknown optimizer is refused.
    optimizer = question.steps(n for n, p in question.given.named_parameters() if p.requires_grad)
    ways: dict[str, Way] = {KEPT: _once_a_form(kept_whole)}
    if question.options.compile:
        ways = {KEPT: _once_a_form(compiled_whole, in_eager_order)}
    elif blocks := question.blocks:
        ways[CHECKPOINTED] = _once_a_form(lambda graph: per_block(graph, blocks))
    calls_of = _planned_calls(question, calls)
    known: dict[Hashable, tuple[Schedule, Timeline]] = {}

    def at(length: int | None, asked: FitQuestion) -> _Length:
        paging = asked if asked.unpaged else None
        return _Length(asked.unpaged or asked, paging, calls, ways, calls_of, length, known)

    if calls.own and not question.shards.are_parts and calls.opened((calls.first, calls.own)):
        # At a length that does not depend on which are asked for, so that no answer does.
        deque(at(calls.own, question.searched_longer()).found(), maxlen=0)
    rows = [row for n in calls.lengths for row in at(n, question.at_one_length()).rows()]
    on = question.on
    facts = on.name, on.memory_bytes, on.usable_bytes, optimizer.name
    return Fit(
        *facts, tuple(rows), notes_of(question, (calls.least, calls.most)), str(question.shards)
    )


class _Timelines(dict[int, Timeline]):
    """Batch -> its timeline, in the order in which they were looked at."""

    def __init__(self, of: Callable[[int], Timeline]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, batch: int) -> Timeline:
        self[batch] = made = self._of(batch)
        return made


def _planned_calls(question: FitQuestion, calls: SizedCalls) -> dict[str, SizedCalls]:
    """Without paging: the model as it is, and with options.tile with its head in parts, as many at
    all sizes. If there is no head to tile, the log says so."""
    if not question.options.tile:
        return {PLANNED: calls}
    parts = MOST_PARTS if question.options.tile is True else question.options.tile
    capture = functools.partial(question.call, options=replace(question.options, tile=parts))
    in_parts = SizedCalls(capture, calls.least, calls.most, calls.lengths)
    planned = {PLANNED: calls, f"{PLANNED}, head in {parts} parts": in_parts}
    return planned if in_parts.small.graph.tiles else {PLANNED: calls}


@dataclass(frozen=True, slots=True)
class _Length:
    """The rows of one length. paging: the question of plans that may page, if they are asked for,
    whose `unpaged` is `question`; calls: of the model; ways: name -> schedule without a search;
    calls_of: name -> calls that are planned; known: timelines of recorded calls, those of earlier
    lengths among them; seen: way and calls -> timelines of the batches that were looked at."""

    question: FitQuestion
    paging: FitQuestion | None
    calls: SizedCalls
    ways: Mapping[str, Way]
    calls_of: Mapping[str, SizedCalls]
    length: int | None
    known: dict[Hashable, tuple[Schedule, Timeline]]
    seen: dict[tuple[Way, int], _Timelines] = field(default_factory=dict)

    def rows(self) -> list[FitRow]:
        rows = [row() for row in self.found()]
        if self.question.shards.are_parts:
            most = max(row.batch for row in rows)
            for question in filter(None, (self.question, self.paging)):
                row = replace(self, question=question)._row_of_blocks(most)
                best = max(rows[-1], row, key=lambda r: (r.batch, -r.overhead))
                rows.append(replace(best, way=row.way) if question.unpaged else row)
        return rows

    def found(self) -> Iterator[Callable[[], FitRow]]:
        """Find the largest batch of each way of the whole model, and yield what makes its row."""
        largest: dict[str, int] = {}
        for name, way in self.ways.items():
            largest[name] = self._largest(way, self.calls)
            yield functools.partial(self._row, name, self.calls, largest[name], way, way)
        wanted = max(largest.values())
        if self.question.shards.are_parts:
            return
        other = next(self.ways[name] for name, batch in largest.items() if batch == wanted)
        asked = [(self, name, calls) for name, calls in self.calls_of.items()]
        if self.paging:  # last, with the calls of the row before
            _, name, calls = asked[-1]
            asked.append((replace(self, question=self.paging), f"{name}, paging", calls))
        batch = 0
        for one, name, calls in asked:
            least = wanted if one is self else max(wanted, batch)
            smallest = one._smallest(other, least)
            batch = one._largest_planned(calls, smallest, other, least)
            way = one.question.faster if batch else smallest
            yield functools.partial(one._row, name, calls, batch, way, smallest)

    def _row(self, name: str, calls: SizedCalls, batch: int, way: Way, least: Way) -> FitRow:
        """batch: 0 if none fits; then the figures are those of the least batch. least: the way by
        which the batch was found."""
        question, samples = self.question, batch or calls.least
        call = calls.at(samples, self.length)
        graph, schedule = way(call)
        timelines = self.seen.get((least, id(calls))) or self._timelines(least, calls)
        is_least = way == least
        found = timelines[samples] if is_least else question.timeline(call, graph, schedule)
        blocks = len(question.blocks) if way is self.ways.get(CHECKPOINTED) else 0
        times_ns = question.step_ns(call, graph, schedule, blocks)
        whole = self.calls.at(samples, self.length)
        kept_ns = question.step_ns(whole, whole.graph, keep_all(whole.graph))
        allocated_bytes, reserved_bytes = question.most_held(
            found, question.on.usable_bytes if batch else None
        )
        peak = found.peak
        tokens = question.step.accumulate * samples * (self.length or 1)
        rates = [1e9 * tokens / ns if question.on.tflops and ns else None for ns in times_ns]
        overheads = [ns / max(kept, 1) - 1 for ns, kept in zip(times_ns, kept_ns, strict=True)]
        return FitRow(
            length=self.length,
            way=name,
            batch=batch,
            allocated_bytes=allocated_bytes,
            reserved_bytes=reserved_bytes,
            owners=(
                *((owner.value, size) for owner, size in peak.owners.items() if size),
                ("allocator", reserved_bytes - peak.size_bytes),
            ),
            overhead=overheads[0],
            tokens_per_s=rates[0],
            slow_overhead=overheads[1],
            slow_tokens_per_s=rates[1],
            host_bytes=found.host_bytes,
            is_most=batch == calls.most,
            passes=self._passes(least, calls, batch),
            peaks=tuple(sorted((n, t.peak.size_bytes) for n, t in timelines.items())),
        )

    def _passes(self, way: Way, calls: SizedCalls, batch: int) -> tuple[int, int] | None:
        """(Passes, samples of each) of the largest batch asked for; None if there is no need, or no
        way."""
        step = self.question.step
        if not 0 < batch < calls.most or step.accumulate > 1 or step.in_backward:
            return None
        adding = replace(self.question, step=replace(step, accumulate=2))
        timelines = replace(self, question=adding)._timelines(way, calls)
        fewest = -(-calls.most // batch)
        for passes in range(fewest, fewest + PASSES):
            samples = -(-calls.most // passes)
            if samples < min(batch, calls.first):
                break
            # Gradients are there in the later passes.
            if adding.fits(timelines[samples]):
                return passes, samples
        return None

    def _row_of_blocks(self, batch: int) -> FitRow:
        """As few whole blocks run again as fit at this batch; with a host all page what the link
        carries, but for what would be waited for. By bisection, since less is alive with more of
        them; where that is not so and none is found, the row is of all of them and as many samples
        as fit then."""
        call = self.calls.at(batch or self.calls.least, self.length)
        blocks, host = self.question.blocks, self.question.host
        pages = pages_of(call.graph, blocks, host) if host else NO_PAGES

        def way(call: PricedCall, count: int) -> Scheduled:
            return per_block(call.graph, blocks[:count], pages)

        def fits(count: int) -> bool:
            return self.question.fits(self.question.timeline(call, *way(call, count)))

        every = functools.partial(way, count=len(blocks))
        late, least = {-1}, len(blocks)
        while late:
            if batch:
                least = bisect.bisect_left(range(len(blocks)), x=True, key=fits)
            late = {trip.data for trip in trips(*way(call, least)) if trip.waits_ns}
            pages = pages._replace(storages=tuple(d for d in pages.storages if d not in late))
        if batch and not fits(least):
            least, batch = len(blocks), self._largest(every, self.calls)
        found = functools.partial(way, count=least)
        name = f"{PLANNED}, blocks, paging" if host else f"{PLANNED}, blocks"
        return self._row(name, self.calls, batch, found, found)

    def _smallest(self, other: Way, wanted: int) -> Way:
        """The smallest plan, searched where none is known of calls like this, as of a single
        sample. other: the way that fits `wanted` samples without a plan."""

        def way(call: PricedCall) -> Scheduled:
            if not self.question.has_smallest(call):
                enough_bytes = simulate(*other(call)).peak_bytes if wanted else 0
                # That nothing fits is said after a longer search alone.
                question = self.question if wanted else self.question.searched_longer()
                question.find_smallest(call, enough_bytes)
            return self.question.replayed(call)

        return way

    def _largest_planned(self, calls: SizedCalls, smallest: Way, other: Way, wanted: int) -> int:
        """By the smallest plan of the sample's length, if that fits as many samples as `wanted`,
        else by one searched for that batch."""
        question, call = self.question, calls.at(max(wanted, calls.first), self.length)
        if question.has_smallest(call):
            batch = self._largest(smallest, calls)
            if batch >= wanted:
                return batch
        question.find_smallest(call, simulate(*other(call)).peak_bytes)
        batch = self._largest(smallest, calls)
        if batch < wanted and question.unpaged:
            # What it pages of more samples is more than the host has.
            question.page_nothing(call)
            batch = self._largest(smallest, calls)
        return batch

    def _largest(self, way: Way, calls: SizedCalls) -> int:
        timelines = self.seen[way, id(calls)] = self._timelines(way, calls)
        batch, untried = _largest(self.question, calls, timelines)
        if len(timelines) == 1:
            timelines[calls.first]  # so that there is a line to draw
        if untried:
            self.question.untried.add((untried, self.length))
        return batch

    def _timelines(self, way: Way, calls: SizedCalls) -> _Timelines:
        scheduled = functools.cache(lambda number: way(calls.recorded[number].call))
        is_eager = not self.question.options.compile and way in self.ways.values()

        def timeline(batch: int) -> Timeline:
            size = batch, self.length
            if (opened := calls.opened(size)) is None:
                call = calls.at(*size)
                return self.question.timeline(call, *way(call), is_eager=is_eager)
            graph, schedule = scheduled(number := calls.recorded.index(opened))
            key = number, id(schedule), id(calls), self.question.step
            if key not in self.known:
                made = self.question.timeline(opened.call, graph, schedule, is_eager=is_eager)
                self.known[key] = schedule, made
            return self.known[key][1].at_sizes(opened.numbers(size))

        return _Timelines(timeline)


def _largest(question: FitQuestion, calls: SizedCalls, timelines: _Timelines) -> tuple[int, int]:
    """Return the largest batch that fits, 0 if none does, and the next one if it cannot be tried
    here, else 0. By bisection: if a batch does not fit, larger ones do not. Where live bytes alone
    decide, next to where a line through those of the last two batches says. timelines: filled with
    the batches that are looked at."""
    usable_bytes, untried = question.on.usable_bytes, set[int]()

    def fits(batch: int) -> bool:
        try:
            return question.fits(timelines[batch])
        except TooLargeToTry:
            untried.add(batch)
            return False

    fitting, beyond = calls.least - 1, calls.most + 1
    tried = calls.most
    while fitting + 1 < beyond:
        if fits(tried):
            fitting = tried
        else:
            beyond = tried
        points = [(0, 0), (0, 0), *((n, t.peak.size_bytes) for n, t in timelines.items())]
        is_decided = (dict(points).get(tried, 0) <= usable_bytes) is (fitting == tried)
        (x, a), (y, b) = points[-2:]
        tried = (fitting + beyond) // 2
        if is_decided and a != b:
            on_line = x + (usable_bytes - a) * (y - x) // (b - a)
            tried = min(max(on_line, fitting + 1), beyond - 1)
    return fitting if fitting >= calls.least else 0, beyond if beyond in untried else 0


def _once_a_form(
    make: Callable[[CDGraph], Scheduled], seen: Callable[[CDGraph], CDGraph] = as_autograd_runs
) -> Way:
    """One schedule for all calls whose graphs differ in sizes only. seen: makes of a call's graph
    the one that the schedule is of."""
    known: dict[int, Schedule] = {}

    @functools.lru_cache(maxsize=2)
    def way(call: PricedCall) -> Scheduled:
        if call.form not in known:
            known[call.form] = make(call.graph)[1]
        return seen(call.graph), known[call.form]

    return way
