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
from dataclasses import dataclass, replace
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
from rockplan.blocks.outside import MeasuredStep, measured_step
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
from rockplan.python_state.distributed import is_distributed
from rockplan.python_state.sharding import gathered, is_sharded, reshard
from rockplan.runtime.call_checks import SHARDING
from rockplan.runtime.planned_module import add_program, plan_in_place, take_out
from rockplan.runtime.planned_state import PlanSettings, is_in_place, latest_of, make_program_of
from rockplan.runtime.program import ModuleCall
from rockplan.runtime.switches import outside_of_initialization
from rockplan.search.boundary import eager_option, first_options
from rockplan.solving.agreement import Agreement, agreement, has_others
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
            _plan_blocks(model, named, call, budget, loss, own, agreed, blocks is None)

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


def _plan_blocks(
    model: nn.Module,
    named: dict[str, nn.Module],
    call: SizedCall,
    budget: Budget,
    loss: Loss | None,
    options: Options,
    agreed: Agreement,
    are_found: bool,
) -> None:
    programs = BlockPrograms(options)
    if is_sharded(model):
        programs.warned.add(SHARDING)
    with outside_of_initialization(), key_value_cache.switched_off(model), call.named_in_errors():
        report("looking for the inputs of blocks")
        named, run, left = _blocks_called(model, named, call, loss, are_found)
        job = _Job(model, call, loss, options, programs, run, are_found, agreed)
        try:
            job.plan({path: named[path] for path in run.calls}, budget, left)
        except InfeasibleBudget as error:
            if loss is None and not has_others() and options.on_infeasible != "original":
                error.args = (f"{error}{_as_a_whole(model, call, options, error)}",)
            raise
    if programs.plan is not None:
        programs.switched_off = key_value_cache.switch_off(model)


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


def _blocks_called(
    model: nn.Module,
    named: dict[str, nn.Module],
    call: SizedCall,
    loss: Loss | None,
    are_found: bool,
) -> tuple[dict[str, nn.Module], SampleRun, Left]:
    """are_found: the user has not named the blocks, so that they may be replaced by those that the
    forward calls. Raises InvalidInput for blocks that are not called, and for named ones that are
    called several times."""
    run = sample_run(model, named, call.args, call.kwargs, loss)
    left: Left = ()
    if are_found and run.missing:
        others = called_blocks(model, named, run.called)
        if others.keys() != named.keys():
            named, run = others, sample_run(model, others, call.args, call.kwargs, loss)
    if are_found and len(run.repeated) < len(run.calls):
        left = tuple((p, "it is called several times in one forward") for p in run.repeated)
        for path, why in left:
            del run.calls[path]
            _LOGGER.warning("block '%s' is left as it is: %s", path, why)
    elif run.repeated:
        raise InvalidInput(
            f"block '{next(iter(run.repeated))}' is called several times in one forward, and would "
            "be planned for one call; leave it out of `blocks`, or plan the module that calls it"
        )
    if run.missing:
        several = f" and {len(run.missing) - 1} more" if run.missing[1:] else ""
        raise InvalidInput(
            f"block '{run.missing[0]}'{several} is not called by this sample; pass a sample that "
            "reaches it, or leave it out of `blocks`. (LayerDrop leaves layers out by chance: set "
            "its probability to 0 while this plans)"
        )
    return named, run, left


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


@dataclass(frozen=True, slots=True)
class _Job:
    """One call of `solve_blocks`. run: of the sample; are_found: the user has not named the blocks;
    agreed: processes that plan together."""

    model: nn.Module
    call: SizedCall
    loss: Loss | None
    options: Options
    programs: BlockPrograms
    run: SampleRun
    are_found: bool
    agreed: Agreement

    def plan(self, named: dict[str, nn.Module], budget: Budget, left: Left) -> None:
        """Plan the blocks `named` (path -> block) within `budget`, in place. Blocks that cannot be
        planned are left out, unless the options say that they are an error, and the rest is planned
        anew. If none remains, that is noted for `blocks_of` and logged, or InvalidInput raised.
        left: (path, why) of blocks left out before."""
        captured, own = self._captured(named)
        refused = self._refused_by_any(own)
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
        several = ((why, same[0], len(same) - 1) for why, same in paths.items())
        whys = "; ".join(f"'{p}'{f' and {n} more' if n else ''}: {why}" for why, p, n in several)
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
            step, captured, kinds = self._measured(captured)
            budget_bytes = self._sequence(captured, kinds, step).budget_bytes(budget)
            chosen, step = self._confirmed(captured, kinds, step, budget, budget_bytes)
            sequence = self._sequence(captured, kinds, step)
            budget_bytes = sequence.needed_bytes(chosen) if budget.is_minimum else budget_bytes
            rows = [(p, b.kind, o) for (p, b), o in zip(captured.items(), chosen, strict=True)]
            numbers = {kind: i for i, kind in enumerate(kinds)}
            words = {
                (kind, option): in_words(kinds[kind].problem.graph, option.schedule)
                for kind, option in {(kind, option) for _, kind, option in rows}
            }
            placed = tuple(
                PlacedBlock(path, numbers[kind], option, kinds[kind].eager, *words[kind, option])
                for path, kind, option in rows
            )
            self._install(
                captured, kinds, chosen, self._allowances(captured, kinds, chosen, budget)
            )
            self.programs.plan = BlocksPlan(
                budget_bytes, placed, step.moments, left, sequence.others, step.least
            )
        except BaseException:
            restore_blocks(self.model)
            raise

    def _allowances(
        self,
        captured: dict[str, CapturedBlock],
        kinds: dict[Any, BlockKind],
        chosen: Sequence[BoundedOption],
        budget: Budget,
    ) -> list[Allowance]:
        """A budget in bytes is never exceeded; others may grow with the size of a call."""
        grows = budget.is_minimum or budget.share is not None
        return [
            Allowance(o.saved_bytes, o.peak_bytes, grows * kinds[block.kind].eager.saved_bytes)
            for block, o in zip(captured.values(), chosen, strict=True)
        ]

    def _refused_in_a_step(self, captured: dict[str, CapturedBlock]) -> Left:
        whys = {captured[path].kind: why for path, why in self.programs.refused.items()}
        self.programs.refused.clear()
        refused = [(p, whys[block.kind]) for p, block in captured.items() if block.kind in whys]
        for path, why in refused:
            _LOGGER.warning("block '%s' is left as it is: %s", path, why)
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
                _LOGGER.warning("block '%s' is left as it is: %s", path, error)
        if failure is not None:
            name_block_in(*failure, are_others_planned=bool(captured))
            raise failure[0]
        if captured:
            graphs = {path: block.source.lowered.graph for path, block in captured.items()}
            refuse_unmatched(graphs, self.options.keep, self.options.recompute)
        return captured, tuple(left)

    def _refused_by_any(self, own: Left) -> Left:
        """Those that any process leaves unplanned, if processes exchange what belongs to a
        block."""
        others = self.agreed.gathered("left", own) if _is_divided(self.model) else {}
        left = dict(own)
        for rank, theirs in others.items():
            for path, why in theirs:
                if path not in left:
                    left[path] = f"rank {rank}: {why}"
                    _LOGGER.warning("block '%s' is left as it is: %s", path, left[path])
        return tuple(left.items())

    def _capture(
        self, path: str, block: nn.Module, incoming: Incoming | None = None
    ) -> CapturedBlock:
        call = self.run.calls[path]
        given = ModuleCall(block, call.args, call.kwargs, incoming)
        with under_autocast(call.autocast), gathered(block), call.as_called():
            return captured_block(given, self.options, path)

    def _measured(
        self, captured: dict[str, CapturedBlock]
    ) -> tuple[MeasuredStep, dict[str, CapturedBlock], dict[Any, BlockKind]]:
        """If backward starts from other results of a block than assumed, that block is captured
        again, and the step measured once more."""
        for is_second in (False, True):
            kinds = self._kinds(captured.values())
            options = [thrifty(kinds[block.kind].family) for block in captured.values()]
            # Calls of another kind than assumed have no limit; they are measured a second time.
            step = self._step_of(captured, kinds, options, [UNLIMITED] * len(options))
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
        return step, captured, kinds

    def _sequence(
        self, captured: dict[str, CapturedBlock], kinds: dict[Any, BlockKind], step: MeasuredStep
    ) -> BlockSequence:
        others = Others(self.options.in_flight - 1, step.returned_bytes)
        return BlockSequence(tuple(captured), tuple(captured.values()), kinds, step.moments, others)

    def _confirmed(
        self,
        captured: dict[str, CapturedBlock],
        kinds: dict[Any, BlockKind],
        step: MeasuredStep,
        budget: Budget,
        budget_bytes: int,
    ) -> tuple[tuple[BoundedOption, ...], MeasuredStep]:
        """Return the options of the blocks, and the step as it was measured with them. step:
        measured with other options, beside which the rest of the model may need more, or less.
        Where it needs more than the budget, options are chosen again, by what was measured.
        All processes measure as many steps, since they exchange data in them."""
        for _ in range(MOST_CHOICES):
            estimated = self._sequence(captured, kinds, step)
            chosen = self._chosen(estimated, budget_bytes)
            allowances = self._allowances(captured, kinds, chosen, budget)
            found = self._step_of(captured, kinds, chosen, allowances)
            restore_blocks(self.model)
            most_bytes, least_bytes = (
                self._sequence(captured, kinds, found._replace(moments=m)).needed_bytes(chosen)
                for m in (found.moments, found.least)
            )
            fits = budget.is_minimum or most_bytes <= budget_bytes
            # A smallest plan may need more than the budget: no other choice would help.
            is_above = not fits and estimated.needed_bytes(chosen) <= budget_bytes < least_bytes
            if not any(self.agreed.gathered("above", is_above).values()):
                # Else collectives let go of memory late while it was measured.
                is_measured = fits or budget_bytes < least_bytes
                return chosen, found if is_measured else step
            step = found if is_above else step
        raise self._sequence(captured, kinds, found).infeasible(budget_bytes)

    def _step_of(
        self,
        captured: dict[str, CapturedBlock],
        kinds: dict[Any, BlockKind],
        options: Sequence[BoundedOption],
        allowances: Sequence[Allowance],
    ) -> MeasuredStep:
        """Raises `_Unreached`."""
        self._install(captured, kinds, options, allowances)
        report("measuring a step")
        step = measured_step(
            self.model,
            [block.call.module for block in captured.values()],
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
        missing = [path for number, path in enumerate(captured) if number not in reached]
        if missing:  # the prediction would miss what they need in the backward phase
            raise _Unreached(missing)
        # Processes that plan together count the most bytes of any.
        courses = [(m.keeping, m.running, m.is_backward) for m in step.moments]
        both = (*step.moments, *step.least)
        own = [step.returned_bytes, *(m.outside_bytes for m in both)]
        every = self.agreed.gathered(("moments", courses), own).values()
        returned, *outside = map(max, zip(*every, strict=True))
        rows = zip(both, outside, strict=True)
        moments = [replace(m, outside_bytes=b) for m, b in rows]
        count = len(courses)
        return MeasuredStep(tuple(moments[:count]), tuple(moments[count:]), returned)

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
        self,
        captured: dict[str, CapturedBlock],
        kinds: dict[Any, BlockKind],
        chosen: Sequence[BoundedOption],
        allowances: Sequence[Allowance],
    ) -> None:
        report("writing the code")
        self.programs.known.clear()
        rows = zip(captured.items(), chosen, allowances, strict=True)
        for (path, block), option, allowance in rows:
            kind = kinds[block.kind]
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


MOST_CHOICES = 3


class _Unreached(InvalidInput):
    """No gradient reaches some blocks. paths: of these."""

    def __init__(self, paths: Sequence[str]) -> None:
        several = f" and {len(paths) - 1} more" if paths[1:] else ""
        super().__init__(
            f"no gradient reaches block '{paths[0]}'{several} in the measured step, which starts "
            "from what the model returns; pass loss=, a function of that whose gradients do reach "
            "it, or leave it out of `blocks`"
        )
        self.paths = paths


_UNREACHED = "no gradient reaches it in the measured step"
