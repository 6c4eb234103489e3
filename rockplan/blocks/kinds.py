"""Kinds: blocks with the same graph are measured and solved once, and run one program.

takes: a block and a call of it. returns: its problem; programs. guarantees: another block runs a
program only if its own captured graph is the same, call by call.

Each block is captured by itself: modules of one class may differ in anything that a forward reads.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rockplan.blocks.report import BlocksPlan
from rockplan.budget import MOST_BYTES
from rockplan.errors import CaptureError, InfeasibleBudget
from rockplan.graph_builder.digests import graph_digest
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.graph_builder.recorded.specs import needed_bytes
from rockplan.options import Options
from rockplan.oracles.constraints import constrain
from rockplan.python_state import trees
from rockplan.runtime.differences import described_call
from rockplan.runtime.open_program import Limits
from rockplan.runtime.planned_state import PLANNING, original_forward
from rockplan.runtime.program import ModuleCall, PlannedProgram
from rockplan.search.boundary import (
    bounded_plan,
    eager_option,
    option_with,
    option_within,
    thriftiest,
)
from rockplan.search.paging import pageable
from rockplan.search.problem import Problem, measured
from rockplan.solving.agreement import refuse_apart
from rockplan.solving.captured_calls import CapturedCall, captured_call
from rockplan.solving.programs import (
    NEARLY,
    built_program,
    problems_like,
    program_in_training,
    rung_program,
    sized_problem,
    with_sizes_open,
)
from rockplan.values.block_sequence import BoundedOption
from rockplan.values.copies import with_inputs
from rockplan.values.graph import CALLER_LOSS, CDGraph, DataKind
from rockplan.values.interface import Interface
from rockplan.values.schedule import keep_all


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a block may need of a step.

    saved_bytes: between the phases; peak_bytes: at one time. eager_bytes: what it saves unplanned:
    a call that saves more unplanned may need more in proportion, and if nothing fits, the smallest
    plan is taken. 0: never more.
    """

    saved_bytes: int
    peak_bytes: int
    eager_bytes: int = 0

    def of(self, eager_bytes: int) -> Limits:
        """Return (peak bytes, saved bytes) allowed to a call that saves eager_bytes unplanned: more
        in proportion if that is more than its own `eager_bytes`."""
        if not 0 < self.eager_bytes < eager_bytes:
            return self.peak_bytes, self.saved_bytes
        ratio = eager_bytes / self.eager_bytes
        return int(self.peak_bytes * ratio), int(self.saved_bytes * ratio)


UNLIMITED = Allowance(MOST_BYTES, MOST_BYTES)


@dataclass(frozen=True, slots=True)
class CapturedBlock:
    """A block with a call of it. source: its captured call, in which returned results do not count
    as held in the backward phase (they are counted by the rest of the model)."""

    call: ModuleCall
    source: CapturedCall
    digest: str

    @property
    def kind(self) -> tuple[str, tuple[str, ...], frozenset[str]]:
        """A key that is equal for blocks that are planned as one."""
        return self.digest, self.source.lowered.graph.groups, self.source.hooked

    @property
    def common_digest(self) -> str:
        """A digest that is equal in all processes that plan the same block, each on its own
        device."""
        return graph_digest(self.source.lowered.graph, on_any_device=True)


def captured_block(call: ModuleCall, options: Options, path: str = "") -> CapturedBlock:
    """Capture a call of the block at `path`."""
    source = captured_call(call, _of_a_block(options))
    lowered = _of_a_step(options, path, call, source.lowered)
    source = replace(source, lowered=lowered)
    return CapturedBlock(call, source, graph_digest(lowered.graph))


def _of_a_block(options: Options) -> Options:
    """Without what says something of a whole step, or of paths in a model."""
    return replace(options, differentiated=None, released=(), keep=(), recompute=())


def _of_a_step(options: Options, path: str, call: ModuleCall, lowered: Lowered) -> Lowered:
    """Return the graph of the block at `path` under the constraints of the options. A step itself
    counts the bytes of the results, and of the loss that the caller computes."""
    graph = constrain(lowered.graph, options.keep, options.recompute, path)
    returned = frozenset(graph.outputs)
    data = (
        replace(d, size_bytes=0) if d.kind is DataKind.TANGENT and d.name == CALLER_LOSS else d
        for d in graph.data
    )
    held = tuple(d for d in graph.held if d not in returned)
    graph = replace(graph, data=tuple(data), held=held)
    if options.host is not None:
        graph = with_inputs(graph, _let_go(graph, lowered.interface, call))
    return replace(lowered, graph=graph)


def _let_go(graph: CDGraph, interface: Interface, call: ModuleCall) -> dict[int, int]:
    """Return storage -> bytes of the inputs that the caller lets go of after the call: computed
    ones with a storage of their own, which the call leaves alone and the backward phase reads."""
    leaves = trees.tree_leaves((call.args, call.kwargs))
    asked = {q.key for q in interface.questions if q.role == "input"}
    residents = Counter(graph.values[v].data for v in interface.residents)
    others = {graph.values[v].data for v in interface.mutated}.union(graph.outputs, graph.held)
    read = {d for n in graph.backward for d in n.reads}.difference(others)
    trained = {value for value, gradients in interface.gradients if gradients}
    values = {i: graph.values[v] for i, v in interface.inputs if v in trained and i not in asked}
    return {
        value.data: needed_bytes(value.spec)
        for i, value in values.items()
        if value.data in read
        and graph.data[value.data].kind is DataKind.INPUT
        and residents[value.data] == 1
        and type(leaves[i]) is torch.Tensor
        and not leaves[i].is_leaf
        and not value.spec.offset
        and needed_bytes(value.spec) == graph.data[value.data].size_bytes
    }


def block_problem(block: CapturedBlock, options: Options, sharing: int = 1) -> Problem:
    """Return the problem of a block, its graph with measured times and bytes. sharing: blocks that
    share the memory of the host."""
    with PLANNING:
        problem = measured(block.source.lowered, _of_a_block(options), block.source.waits)
    return _alone(problem, sharing)


def _alone(problem: Problem, sharing: int) -> Problem:
    """A block has no loss of the caller's, and no blocks inside."""
    problem = replace(problem, constrained=problem.graph, blocks=())
    if problem.host is None:
        return problem
    host = replace(problem.host, size_bytes=problem.host.size_bytes // sharing)
    return pageable(replace(problem, host=host))


def built_block(
    block: CapturedBlock, problem: Problem, option: BoundedOption, options: Options
) -> PlannedProgram:
    """Return the program of a block that runs as `option` says."""
    return built_program(block.call, bounded_plan(problem, option), block.source, options)


@dataclass(eq=False)
class BlockPrograms:
    """The programs of the blocks of a model, by kind and allowance. plan: of the whole step;
    chosen: digest of a graph and allowance -> its option; refused: paths of blocks that could not
    be planned when they were called -> why; switched_off: configurations whose key-value cache was
    switched off; warned: keys of warnings given; sharing: blocks that share the host's memory."""

    options: Options
    plan: BlocksPlan | None = None
    switched_off: tuple[Any, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    known: dict[Any, PlannedProgram] = field(default_factory=dict)
    chosen: dict[tuple[str, Allowance], BoundedOption] = field(default_factory=dict)
    sharing: int = 1
    warned: set[str] = field(default_factory=set)

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockPrograms, (self.options, self.plan, self.switched_off, {}, {}, {}, self.sharing)

    def keep(self, block: CapturedBlock, allowance: Allowance, program: PlannedProgram) -> None:
        """Note the program of a kind under an allowance."""
        self.known[(*block.kind, allowance)] = program

    def find(self, block: CapturedBlock, allowance: Allowance) -> PlannedProgram | None:
        """Return the program of a block of the same kind under this allowance, made for this block;
        None if there is none, or if interfaces differ."""
        known, call = self.known.get((*block.kind, allowance)), block.call
        interface, run = block.source.lowered.interface, block.source.run
        if known is None or known.interface != interface:
            return None
        return replace(
            known,
            interface=interface,
            constants=tuple(t for _, t in run.constants),
            output_spec=run.output_spec,
            call=described_call(original_forward(call.module), call.args, call.kwargs),
        )


def name_block_in(error: CaptureError, path: str, *, are_others_planned: bool = True) -> None:
    """Put the path of the block, and what to do, into the message of `error`."""
    advice = (
        "Options(on_refused='leave') leaves it as it is; or name parts of it as the blocks, such "
        "as its attention"
        if are_others_planned
        else "no other block can be planned; name parts of them as the blocks, such as attention"
    )
    error.args = (f"block '{path}' cannot be planned: {error} ({advice})",)


@dataclass(frozen=True, eq=False)
class BlockMaker:
    """Plans further kinds of call of a block, within its allowance of a step."""

    path: str
    programs: BlockPrograms
    allowance: Allowance

    def __call__(self, call: ModuleCall) -> PlannedProgram:
        """Return a program for one more kind of call. Raises CaptureError, naming the block, if it
        cannot be planned; the reason is noted in `programs.refused`."""
        try:
            return program_in_training(call, make=self._make)
        except CaptureError as error:
            self.programs.refused[self.path] = str(error)
            name_block_in(error, self.path)
            raise

    def _make(self, call: ModuleCall) -> PlannedProgram:
        options = self.programs.options
        if (rung := self._another_rung(call, options)) is not None:
            return rung
        block = captured_block(call, options, self.path)
        if (program := self.programs.find(block, self.allowance)) is not None:
            return program
        adjusted = functools.partial(_of_a_step, options, self.path, call)
        opened = with_sizes_open(call, block.source, _of_a_block(options), adjusted)
        block = replace(block, source=opened)
        if self.allowance != UNLIMITED:  # of a measured step, which all processes run
            refuse_apart([block.source.lowered.graph])
        like = problems_like(call.module, opened, _of_a_block(options))
        sharing = self.programs.sharing
        problem = _alone(like[0], sharing) if like else block_problem(block, options, sharing)
        is_taken_over = bool(like) or (block.digest, self.allowance) in self.programs.chosen
        program = built_block(block, problem, self._option(problem, block.digest), options)
        program = replace(program, is_taken_over=is_taken_over)
        self.programs.keep(block, self.allowance, program)
        return program

    def _option(self, problem: Problem, digest: str, *shares: float) -> BoundedOption:
        """digest: of the graph; shares: as for `block_option`."""
        key, chosen = (digest, self.allowance), self.programs.chosen
        if key not in chosen:
            chosen[key] = block_option(problem, self.allowance, self.programs.options, *shares)
        return chosen[key]

    def _another_rung(self, call: ModuleCall, options: Options) -> PlannedProgram | None:
        """None if there is no program for calls of many sizes."""
        known = sized_problem(call, _of_a_block(options))
        if known is None:
            return None
        program, problem, interface = known
        problem = _alone(problem, self.programs.sharing)
        option = self._option(problem, problem.graph_digest, NEARLY)
        return rung_program(call, program, bounded_plan(problem, option), interface, options)


def _candidates(
    problem: Problem, peak_bytes: int, saved_bytes: int, options: Options
) -> Iterator[BoundedOption | None]:
    """The fastest first; the last one is the smallest."""
    yield option_with(problem, keep_all(problem.graph))
    yield option_within(problem, saved_bytes, peak_bytes, options)
    yield option_with(problem, thriftiest(problem.graph, options)[0])


def block_option(
    problem: Problem, allowance: Allowance, options: Options, *shares: float
) -> BoundedOption:
    """Return the fastest option found within the allowance; shares: of it that are tried before. If
    none fits, the smallest option found is returned with a warning where options or allowance say
    so; otherwise InfeasibleBudget is raised."""
    limits = allowance.of(eager_option(problem.graph).saved_bytes)
    for share in (*shares, 1):
        peak_bytes, saved_bytes = (int(share * limit) for limit in limits)
        for least in _candidates(problem, peak_bytes, saved_bytes, options):
            if least and least.saved_bytes <= saved_bytes and least.peak_bytes <= peak_bytes:
                return least
    everything = option_with(problem, keep_all(problem.graph))
    assert least is not None

    def excess_bytes(option: BoundedOption) -> int:
        return max(option.peak_bytes - peak_bytes, option.saved_bytes - saved_bytes)

    error = InfeasibleBudget(
        peak_bytes,
        peak_bytes + excess_bytes(least),
        "a block of a step, which has this much of its budget",
        unplanned_bytes=peak_bytes + excess_bytes(everything),
    )
    if options.on_infeasible == "smallest" or allowance.eager_bytes:
        warnings.warn(
            f"{error} It runs by the smallest plan that was found all the same, and a step may "
            f"need {excess_bytes(least)} bytes more",
            stacklevel=2,
        )
        return least
    raise error
