"""Blocks: each repeated block of a model is planned by itself, and the rest left to Python.

takes: a model, a sample, a budget for a step. returns: the same model, whose blocks are planned in
place. guarantees: each block computes what it did, bit for bit; nothing else of the model changes.
The predicted peak relies on a measurement of one step beside the blocks.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rockplan.blocks.choose import BlockKind, BlockSequence, thrifty
from rockplan.blocks.find import Blocks, called_blocks, named_blocks
from rockplan.blocks.inputs import SampleRun, sample_run, without_history
from rockplan.blocks.kinds import (
    UNLIMITED,
    Allowance,
    BlockMaker,
    BlockPrograms,
    CapturedBlock,
    block_problem,
    built_block,
    captured_block,
    name_block_in,
)
from rockplan.blocks.outside import measured_step
from rockplan.blocks.report import BlocksPlan, PlacedBlock, in_words
from rockplan.budget import Budget
from rockplan.dp.block_sequence import Others
from rockplan.errors import (
    CaptureError,
    InfeasibleBudget,
    InvalidInput,
    NothingToDifferentiate,
    at_users_line,
)
from rockplan.fitting.optimizer import OptimizerLike
from rockplan.graph_builder.tracing.refusals import refuse_without_memory
from rockplan.options import DEFAULT_OPTIONS, Options, checked
from rockplan.oracles.constraints import refuse_unmatched
from rockplan.python_state import key_value_cache
from rockplan.python_state.autocast import under_autocast
from rockplan.python_state.distributed import has_others, is_distributed
from rockplan.python_state.sharding import gathered, is_sharded, reshard
from rockplan.runtime.call_checks import SHARDING
from rockplan.runtime.planned_module import add_program, plan_in_place, take_out
from rockplan.runtime.planned_state import PlanSettings, is_in_place, latest_of, make_program_of
from rockplan.runtime.program import ModuleCall
from rockplan.runtime.switches import outside_of_initialization
from rockplan.search.boundary import eager_option, first_options
from rockplan.solving.agreement import Agreement, agreement
from rockplan.solving.captured_calls import arguments, calls_of
from rockplan.solving.free_memory import agreed_budget
from rockplan.solving.loss import Loss
from rockplan.solving.programs import least_bytes
from rockplan.solving.remedies import TIME_LIMIT_S, Figure, best_options
from rockplan.solving.side_by_side import device_of, step_of
from rockplan.solving.sizes import SizedCall
from rockplan.values.block_sequence import BoundedOption
from rockplan.values.interface import Incoming, Precedent
from rockplan.values.plan import format_bytes
from rockplan.values.progress import report

_LOGGER = logging.getLogger("rockplan")


@at_users_line
def solve_blocks(
    model: nn.Module,
    sample_input: object,
    budget: int | float | str | Budget,
    *,
    blocks: Blocks = None,
    optimizer: OptimizerLike = None,
    sample_kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> nn.Module:
    """Plan the blocks of `model` in place, each by itself; return `model`.

    The rest of the model runs as it is: with hooks, control flow, layers that are left out by
    chance, wrappers that come later (`fully_shard`, `DistributedDataParallel`, trainers).

    sample_input, sample_kwargs: one batch, as for `solve`. budget: peak bytes of a whole step, as
    for `solve`; the memory beside the blocks is measured in a few steps of the sample, and
    `blocks_of` reports it. optimizer: for 'auto', as for `solve`; there is room for all gradients
    at once. blocks: a pattern ('model.layers.*'), paths or modules; None: the repeated blocks that
    `compare` finds. loss: computes the loss from the result of the model, for the measured steps;
    None: the model returns its loss, or the memory of the caller's loss is left out; backward
    starts from options.differentiated then. Patterns of options.keep and options.recompute are of
    paths in `model`.
    Calls of other shapes are planned when they come, within what their block has of the budget;
    with options.sizes the largest size of the sample is planned, and the sample and the smallest
    before training if options.on_mismatch is not 'replan'. What an earlier call planned of
    this model is undone first, even if this call fails.
    Raises InvalidInput for blocks that overlap, that the sample does not reach, or that it calls
    several times; CaptureError for one that cannot be planned (Options(on_refused="leave") leaves
    it as it is), InvalidBudget, InfeasibleBudget.
    """
    with agreement(checked(options).group, model) as agreed:
        call_arguments = arguments(model, sample_input, sample_kwargs, says_cache=False)
        refuse_without_memory(model)
        _refuse_starts(checked(options, "solve_blocks"), loss)
        reshard(model)
        step_budget = agreed_budget(budget, model, optimizer, agreed)
        options = replace(options, group=None)
        call, *others = calls_of(model, *without_history(*call_arguments), options)
        named = named_blocks(model, blocks)
        if _is_divided(model):
            _refuse_others(agreed, model, named)

        def planned(budget: Budget, own: Options) -> None:
            restore_blocks(model)
            _Job(model, named, call, loss, own, blocks is None, agreed).plan(budget)

        if options.takes_smallest(step_budget):
            options = replace(options, on_infeasible="smallest")
        if options.numerics == "best":
            options, step_budget = _best(model, step_budget, options, planned)
        planned(step_budget, options)
        for other in others if options.on_mismatch != "replan" else ():
            _plan_ahead(model, other, loss)
    return model


def _best(
    model: nn.Module,
    budget: Budget,
    options: Options,
    planned: Callable[[Budget, Options], None],
) -> tuple[Options, Budget]:
    """Return the options with those that options.numerics looks for, and the budget, of which a
    share is one of what the blocks need without any."""

    def figure_of(own: Options) -> Figure:
        nonlocal budget
        try:
            # Neither the smallest plan nor what the whole needs, where none fits.
            planned(budget, replace(own, on_infeasible="original"))
            if model in _NONE_PLANNED:
                return Figure(0, 1)
            plan = blocks_of(model)
            size_bytes = plan.peak_bytes if budget.is_minimum else 0
            found = Figure(size_bytes, sum(option.time_ns for option in plan.options))
            budget_bytes = plan.budget_bytes
        except InfeasibleBudget as error:
            found = Figure(error.minimum_bytes - error.budget_bytes, 0)
            budget_bytes = error.budget_bytes
        if budget.share is not None:
            budget = Budget(budget_bytes)
        return found

    is_on_cuda = device_of(model).type == "cuda"
    return best_options(options, figure_of, is_on_cuda, "solve_blocks"), budget


def _refuse_starts(options: Options, loss: Loss | None) -> None:
    if loss is not None and options.differentiated is not None:
        raise InvalidInput(
            "Options(differentiated=...) says what backward starts from, and so does loss=: leave "
            "one of them out"
        )
    if loss is None and options.released:
        raise InvalidInput(
            "Options(released=...) says what is let go beside loss=, and without it the measured "
            "step lets all results go: leave it out, or pass loss="
        )


def _plan_ahead(model: nn.Module, call: SizedCall, loss: Loss | None) -> None:
    blocks = {path: block for path, block in model.named_modules() if is_in_place(block)}
    with outside_of_initialization(), key_value_cache.switched_off(model), call.named_in_errors():
        for path, given in sample_run(model, blocks, call.args, call.kwargs, loss).calls.items():
            block, precedent = blocks[path], Precedent(latest_of(blocks[path]).incoming, False)
            with under_autocast(given.autocast), gathered(block), given.as_called():
                made = ModuleCall(block, given.args, given.kwargs, precedent)
                add_program(block, given.args, given.kwargs, make_program_of(block)(made))


def _is_divided(model: nn.Module) -> bool:
    return any(map(is_distributed, model.parameters()))


def _refuse_others(agreed: Agreement, model: nn.Module, named: dict[str, nn.Module]) -> None:
    parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    own = (parameters, [*named])
    others = agreed.gathered("model", own)
    says = (
        ("have other parameters", "shard and plan the same model"),
        ("name other blocks", "name the same ones"),
    )
    for i, (fact, remedy) in enumerate(says):
        different = [str(rank) for rank, theirs in others.items() if theirs[i] != own[i]]
        if different:
            raise InvalidInput(
                f"ranks {', '.join(different)} {fact} than this one, and all exchange what belongs "
                f"to them; {remedy} on each"
            )


def _as_a_whole(
    model: nn.Module, call: SizedCall, options: Options, error: InfeasibleBudget
) -> str:
    """'' if `solve` would need no fewer bytes, or fails."""
    limited = replace(options, time_limit_s=min(options.time_limit_s, TIME_LIMIT_S))
    needed_bytes = least_bytes(call.of(model), limited)
    if needed_bytes is None or needed_bytes >= error.minimum_bytes:
        return ""
    return (
        f" As a whole (rockplan.solve) the model needs {needed_bytes} bytes "
        f"({format_bytes(needed_bytes)})."
    )


Left = tuple[tuple[str, str], ...]
"""(path, why) of blocks that are not planned, and run as they are."""


def blocks_of(model: nn.Module) -> BlocksPlan:
    """Return the printable plan of `solve_blocks` for `model`. Raises InvalidInput for none."""
    for block in model.modules():
        maker = make_program_of(block) if is_in_place(block) else None
        if isinstance(maker, BlockMaker) and maker.programs.plan is not None:
            return maker.programs.plan
    whys = _NONE_PLANNED.get(model)
    if whys is not None:
        raise InvalidInput(f"no block of this model is planned, all are left as they are: {whys}")
    raise InvalidInput("no block of this model is planned; call rockplan.solve_blocks first")


_NONE_PLANNED: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""Model -> why none of its blocks is planned."""


def restore_blocks(model: nn.Module) -> nn.Module:
    """Undo `solve_blocks`: blocks are unplanned, `use_cache` is what it was. Return `model`."""
    _NONE_PLANNED.pop(model, None)
    for block in [*model.modules()]:
        if is_in_place(block):
            maker = make_program_of(block)
            if isinstance(maker, BlockMaker):
                key_value_cache.switch_on(maker.programs.switched_off)
            take_out(block)
    return model


@dataclass(slots=True)
class _Job:
    """One call of `solve_blocks`. named: path -> block; are_found: the user has not named them, so
    that they may be replaced by those that the forward calls; agreed: processes that plan
    together; run: of the sample."""

    model: nn.Module
    named: dict[str, nn.Module]
    call: SizedCall
    loss: Loss | None
    options: Options
    are_found: bool
    agreed: Agreement
    run: SampleRun = field(init=False)
    programs: BlockPrograms = field(init=False)

    def plan(self, budget: Budget) -> None:
        """Plan the blocks within `budget`, in place. Raises as `solve_blocks`."""
        model, options, self.programs = self.model, self.options, BlockPrograms(self.options)
        if is_sharded(model):
            self.programs.warned.add(SHARDING)
        switched_off = key_value_cache.switched_off(model)
        with outside_of_initialization(), switched_off, self.call.named_in_errors():
            report("looking for the inputs of blocks")
            left = self._run_sample()
            try:
                self._plan_or_leave(budget, left)
            except InfeasibleBudget as error:
                if self.loss is None and not has_others() and options.on_infeasible != "original":
                    error.args = (f"{error}{_as_a_whole(model, self.call, options, error)}",)
                raise
        if self.programs.plan is not None:
            self.programs.switched_off = key_value_cache.switch_off(model)

    def _run_sample(self) -> Left:
        """Returns the blocks that are called several times, which are left unless they are named.
        Raises InvalidInput for these, and for blocks that are not called."""
        given = self.call.args, self.call.kwargs, self.loss
        run, left = sample_run(self.model, self.named, *given), Left()
        if self.are_found and run.missing:
            others = called_blocks(self.model, self.named, run.called)
            if others.keys() != self.named.keys():
                self.named, run = others, sample_run(self.model, others, *given)
        if self.are_found and len(run.repeated) < len(run.calls):
            left = tuple((p, "it is called several times in one forward") for p in run.repeated)
            for path, why in left:
                del run.calls[path]
                _say_left(path, why)
        elif run.repeated:
            raise InvalidInput(
                f"block '{next(iter(run.repeated))}' is called several times in one forward, and "
                "would be planned for one call; leave it out of `blocks`, or plan the module that "
                "calls it"
            )
        if run.missing:
            raise InvalidInput(
                f"block {_several(run.missing)} is not called by this sample; pass a sample that "
                "reaches it, or leave it out of `blocks`. (LayerDrop leaves layers out by chance: "
                "set its probability to 0 while this plans)"
            )
        self.run = run
        return left

    def _plan_or_leave(self, budget: Budget, left: Left) -> None:
        """Plan the blocks that the sample calls; again without those that turn out not to be
        plannable, unless the options say that these are an error, until the rest is planned. If
        none remains, that is noted for `blocks_of` and logged, or InvalidInput raised. left: blocks
        left out before."""
        named = {path: self.named[path] for path in self.run.calls}
        captured, left_here = self._captured(named)
        refused = self._left_by_any_process(left_here)
        captured = {p: b for p, b in captured.items() if p not in dict(refused)}
        left += refused
        while captured:
            try:
                self._plan(captured, budget, left)
            except _Unreached as error:
                if not self.are_found or len(error.paths) == len(captured):
                    raise
                refused = tuple((path, _UNREACHED) for path in error.paths)
            except CaptureError:
                refused = self._refused_in_a_step(captured)
                if self.options.on_refused == "error" or not refused:
                    raise
            else:
                return
            left = (*left, *refused)
            captured = {p: b for p, b in captured.items() if p not in dict(refused)}
        paths: dict[str, list[str]] = {}
        for path, why in left:
            paths.setdefault(why, []).append(path)
        whys = "; ".join(f"{_several(same)}: {why}" for why, same in paths.items())
        if self.options.on_refused == "error":
            raise InvalidInput(f"there is no block to plan: {whys}; name blocks that are trained")
        _NONE_PLANNED[self.model] = whys
        _LOGGER.warning(
            "no block is planned, and a step needs what it needs without rockplan: %s", whys
        )

    def _plan(self, captured: dict[str, CapturedBlock], budget: Budget, left: Left) -> None:
        """On any error the blocks are restored."""
        self.programs.sharing = len(captured)
        try:
            sequence = self._measured(captured)
            budget_bytes = sequence.budget_bytes(budget)
            chosen, sequence = self._confirmed(sequence, budget, budget_bytes)
            budget_bytes = sequence.needed_bytes(chosen) if budget.is_minimum else budget_bytes
            numbers = {kind: i for i, kind in enumerate(sequence.kinds)}
            placed = tuple(
                PlacedBlock(
                    *(path, numbers[block.kind], option, kind.eager),
                    *in_words(kind.problem.graph, option.schedule),
                )
                for path, block, kind, option in sequence.rows(chosen)
            )
            self._install(sequence, chosen, budget)
            self.programs.plan = BlocksPlan(
                budget_bytes, placed, sequence.moments, left, sequence.others, sequence.least_seen
            )
        except BaseException:
            restore_blocks(self.model)
            raise

    def _refused_in_a_step(self, captured: dict[str, CapturedBlock]) -> Left:
        whys = {captured[path].kind: why for path, why in self.programs.refused.items()}
        self.programs.refused.clear()
        refused = [(p, whys[block.kind]) for p, block in captured.items() if block.kind in whys]
        for path, why in refused:
            _say_left(path, why)
        return tuple(refused)

    def _captured(self, named: dict[str, nn.Module]) -> tuple[dict[str, CapturedBlock], Left]:
        captured: dict[str, CapturedBlock] = {}
        left: list[tuple[str, str]] = []
        failure: tuple[CaptureError, str] | None = None
        for number, (path, block) in enumerate(named.items()):
            report("capturing blocks", number, len(named))
            # Other processes wait until all gather each block.
            if failure is not None and captured:
                with gathered(block):
                    continue
            try:
                captured[path] = self._capture(path, block)
            except NothingToDifferentiate:
                left.append((path, "nothing in it is trained, and nothing before it"))
            except CaptureError as error:
                if self.options.on_refused == "error":
                    failure = failure or (error, path)
                    continue
                left.append((path, str(error)))
                _say_left(path, str(error))
        if failure is not None:
            name_block_in(*failure, are_others_planned=bool(captured))
            raise failure[0]
        if captured:
            graphs = {path: block.source.lowered.graph for path, block in captured.items()}
            refuse_unmatched(graphs, self.options.keep, self.options.recompute)
        return captured, tuple(left)

    def _left_by_any_process(self, left_here: Left) -> Left:
        """Those that any process leaves unplanned, if processes exchange what belongs to a
        block."""
        others = self.agreed.gathered("left", left_here) if _is_divided(self.model) else {}
        left = dict(left_here)
        for rank, theirs in others.items():
            for path, why in theirs:
                if path not in left:
                    left[path] = f"rank {rank}: {why}"
                    _say_left(path, left[path])
        return tuple(left.items())

    def _capture(
        self, path: str, block: nn.Module, incoming: Incoming | None = None
    ) -> CapturedBlock:
        call = self.run.calls[path]
        given = ModuleCall(block, call.args, call.kwargs, incoming)
        with under_autocast(call.autocast), gathered(block), call.as_called():
            return captured_block(given, self.options, path)

    def _measured(self, captured: dict[str, CapturedBlock]) -> BlockSequence:
        """If backward starts from other results of a block than assumed, that block is captured
        again, and the step measured once more."""
        for is_second in (False, True):
            blocks = tuple(captured.values())
            sequence = BlockSequence(tuple(captured), blocks, self._kinds(blocks))
            options = [*map(thrifty, sequence.families)]
            # Calls of another kind than assumed have no limit; they are measured a second time.
            sequence = self._in_a_step(sequence, options)
            latest = {path: latest_of(block.call.module) for path, block in captured.items()}
            restore_blocks(self.model)
            recaptured = {
                path: self._capture(path, captured[path].call.module, program.incoming)
                for path, program in latest.items()
                if not is_second and program.plan.graph_digest != captured[path].digest
            }
            if not recaptured:
                break
            captured = {**captured, **recaptured}
        return sequence

    def _confirmed(
        self, sequence: BlockSequence, budget: Budget, budget_bytes: int
    ) -> tuple[tuple[BoundedOption, ...], BlockSequence]:
        """Return the options of the blocks, and the sequence as it was measured with them.
        sequence: measured with other options, beside which the rest of the model may need more, or
        less. Where it needs more than the budget, options are chosen again, by what was measured.
        All processes measure as many steps, since they exchange data in them."""
        for choices_left in reversed(range(MOST_CHOICES)):
            chosen = self._chosen(sequence, budget_bytes)
            found = self._in_a_step(sequence, chosen, budget)
            restore_blocks(self.model)
            least_bytes = replace(found, moments=found.least_seen).needed_bytes(chosen)
            fits = budget.is_minimum or found.needed_bytes(chosen) <= budget_bytes
            # A smallest plan may need more than the budget: no other choice would help.
            is_above = not fits and sequence.needed_bytes(chosen) <= budget_bytes < least_bytes
            are_above = any(self.agreed.gathered("above", is_above).values())
            if not (is_above or are_above and choices_left):
                # Else collectives let go of memory late while it was measured.
                is_measured = fits or budget_bytes < least_bytes
                return chosen, found if is_measured else sequence
            sequence = found if is_above else sequence
        raise found.infeasible(budget_bytes)

    def _in_a_step(
        self,
        sequence: BlockSequence,
        options: Sequence[BoundedOption],
        budget: Budget | None = None,
    ) -> BlockSequence:
        """Return the sequence as measured in a step. budget: as for `_install`. Raises
        `_Unreached`."""
        self._install(sequence, options, budget)
        report("measuring a step")
        step = measured_step(
            self.model,
            [block.call.module for block in sequence.blocks],
            options,
            functools.partial(
                step_of,
                self.model,
                args=self.call.args,
                kwargs=self.call.kwargs,
                loss=self.loss,
                incoming={},
                differentiated=self.options.differentiated,
                released=self.options.released,
            ),
            (self.call.args, self.call.kwargs, self.loss),
            self.run.written,
            device_of(self.model),
        )
        reached = {m.running for m in step.moments if m.is_backward}
        missing = [path for number, path in enumerate(sequence.paths) if number not in reached]
        if missing:  # the prediction would miss what they need in the backward phase
            raise _Unreached(missing)
        # Processes that plan together count the most bytes of any.
        courses = [(m.keeping, m.running, m.is_backward) for m in step.moments]
        both = (*step.moments, *step.least)
        own = [step.returned_bytes, *(m.outside_bytes for m in both)]
        every = self.agreed.gathered(("moments", courses), own).values()
        returned, *outside = map(max, zip(*every, strict=True))
        moments = tuple(replace(m, outside_bytes=b) for m, b in zip(both, outside, strict=True))
        return replace(
            sequence,
            moments=moments[: len(courses)],
            least_seen=moments[len(courses) :],
            others=Others(self.options.in_flight - 1, returned),
        )

    def _kinds(self, captured: Iterable[CapturedBlock]) -> dict[Any, BlockKind]:
        """One process decides for all with the same blocks."""
        blocks = {block.kind: block for block in captured}

        def key() -> object:
            keys = [(block.common_digest, sorted(block.source.hooked)) for block in blocks.values()]
            return "kinds", keys, repr(self.options)

        graphs = [block.source.lowered.graph for block in blocks.values()]
        made = self.agreed.decided(key, lambda: [*map(self._kind, blocks.values())], graphs)
        rows = zip(blocks.items(), made, strict=True)
        return {key: kind.of(block.source.lowered.graph) for (key, block), kind in rows}

    def _kind(self, block: CapturedBlock) -> BlockKind:
        problem = block_problem(block, self.options, self.programs.sharing)
        family = first_options(problem, self.options)
        return BlockKind(problem, eager_option(problem.graph), family)

    def _chosen(self, sequence: BlockSequence, budget_bytes: int) -> tuple[BoundedOption, ...]:
        def key() -> object:
            kinds = [*sequence.kinds]
            blocks = [kinds.index(block.kind) for block in sequence.blocks]
            digests = [block.common_digest for block in sequence.blocks]
            return "options", blocks, digests, budget_bytes, repr(self.options)

        graphs = [block.source.lowered.graph for block in sequence.blocks]
        return self.agreed.decided(key, lambda: self._chosen_here(sequence, budget_bytes), graphs)

    def _chosen_here(self, sequence: BlockSequence, budget_bytes: int) -> tuple[BoundedOption, ...]:
        sequence = sequence.with_options_for(budget_bytes, self.options)
        chosen = sequence.fastest(budget_bytes)
        if chosen is not None:
            return chosen
        error = sequence.infeasible(budget_bytes)
        if self.options.on_infeasible != "smallest":
            raise error
        _LOGGER.warning("%s", error.taken(error.minimum_bytes))
        return sequence.least()

    def _install(
        self, sequence: BlockSequence, chosen: Sequence[BoundedOption], budget: Budget | None
    ) -> None:
        """budget: in bytes it is never exceeded, others may grow with the size of a call; None: no
        block has a limit."""
        report("writing the code")
        self.programs.known.clear()
        for path, block, kind, option in sequence.rows(chosen):
            allowance = UNLIMITED
            if budget is not None:
                grows = budget.is_minimum or budget.share is not None
                eager_bytes = grows * kind.eager.saved_bytes
                allowance = Allowance(option.saved_bytes, option.peak_bytes, eager_bytes)
            program = self.programs.find(block, allowance)
            if program is None:
                with self.run.calls[path].as_called():
                    program = built_block(block, kind.problem, option, self.options)
                self.programs.keep(block, allowance, program)
            with under_autocast(self.run.calls[path].autocast), gathered(block.call.module):
                plan_in_place(
                    block.call.module,
                    program,
                    self.run.calls[path].kind,
                    PlanSettings(
                        BlockMaker(path, self.programs, allowance),
                        self.options.on_mismatch,
                        self.options.on_infeasible,
                        allowance=allowance,
                    ),
                    self.programs.warned,
                )


def _say_left(path: str, why: str) -> None:
    _LOGGER.warning("block '%s' is left as it is: %s", path, why)


def _several(paths: Sequence[str]) -> str:
    return f"'{paths[0]}'{f' and {len(paths) - 1} more' if paths[1:] else ''}"


MOST_CHOICES = 3


class _Unreached(InvalidInput):
    """No gradient reaches some blocks. paths: of these."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(
            f"no gradient reaches block {_several(paths)} in the measured step, which starts from "
            "what the model returns; pass loss=, a function of that whose gradients do reach it, "
            "or leave it out of `blocks`"
        )
        self.paths = paths


_UNREACHED = "no gradient reaches it in the measured step"
