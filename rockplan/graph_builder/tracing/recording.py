"""Recording: a sample, one call of a module -> one recorded run, forward then backward.

guarantees: the recorded operators are those of eager execution, nothing of the module's activations
is allocated, and the module, the sample and every generator are left exactly as they were.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import ForwardRaises, RockplanError, UnsupportedModel
from rockplan.graph_builder.recorded.run import Capture
from rockplan.graph_builder.tracing import addresses, eager_paths, free_sizes, left_behind, modes
from rockplan.graph_builder.tracing import backward as backwards
from rockplan.graph_builder.tracing import outputs as results
from rockplan.graph_builder.tracing.argument_reads import ArgumentsWatched, ReadsNoted
from rockplan.graph_builder.tracing.patches import PatchSource, in_this_thread, patched
from rockplan.graph_builder.tracing.recorder import Recorder, why_not_planned
from rockplan.graph_builder.tracing.refusals import NAMED, When, refuse
from rockplan.graph_builder.tracing.stand_ins import (
    Arguments,
    StandIns,
    with_numbers,
    with_stand_ins,
)
from rockplan.graph_builder.tracing.tensor_questions import Questions, ask_places, without_places
from rockplan.graph_builder.tracing.unwatched import refuse_other_variants
from rockplan.graph_builder.tracing.value_reads import ValueReader
from rockplan.python_state import key_value_cache, trees
from rockplan.python_state.elements import replaced
from rockplan.python_state.given import GivenCall
from rockplan.python_state.leftovers import Leftovers
from rockplan.python_state.memory import is_trained_wrapper, parts_of
from rockplan.python_state.walk import Root, Walk, is_iterator, roots_of_arguments, walk_of
from rockplan.values.interface import Incoming, Precedent
from rockplan.values.sizes import STATIC, CallSizes

# Part of PyTorch's error when a kernel reads values of a fake tensor.
_NO_VALUES = "data is not allocated yet"
# Part of PyTorch's error for a change in place of a leaf, or of a view of one.
_WRITES_TO_A_LEAF = "leaf Variable that requires grad is being used in an in-place operation"


@dataclass(frozen=True, slots=True)
class Sample:
    """What is recorded: one call of `forward`, and the backward pass from `incoming`, as in
    `graph_builder.capture`. foreign_rows: patches besides those of `eager_paths`. earlier: of
    another call; sizes that differ become symbols (`free_sizes`). unread: positions
    of leaves of the arguments that are believed to be unread. imports: how many more recordings may
    end with None (`record`)."""

    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    incoming: Incoming | Precedent | None
    only_loss: bool
    foreign_rows: PatchSource
    earlier: CallSizes | None = None
    unread: frozenset[int] = frozenset()
    imports: int = 3


def record(sample: Sample) -> Capture | None:
    """Return the recorded run of a sample; None if files were imported, which may be all that has
    changed: then it is recorded anew. Raises CaptureError if it cannot be planned."""
    modes.refuse_compiling()
    refuse(When.MODULE, sample.module)
    leftovers = Leftovers()
    try:
        with leftovers.forgotten_by_errors():
            recorded = _recorded(sample, leftovers)
    except BaseException:
        leftovers.remove()
        raise
    place = leftovers.remove()
    if recorded is not None and place is not None:
        raise NAMED["leftover"].error(place=place)
    return recorded


def _recorded(call: Sample, leftovers: Leftovers) -> Capture | None:
    recording = _Recording.of(call, leftovers)
    recorder, stand_ins, found = recording.recorder, recording.stand_ins, recording.found
    with (
        modes.without_modes(),
        found.restored(),
        stand_ins.without_history(),
        recorder.without_history(),
        contextlib.nullcontext() if recording.free is None else free_sizes.known_to_python(),
    ):
        exchanged = _exchanged(recording)
        answers = exchanged.questions.answered(left_behind.namespaces(found, call.module))
        with _as_in_eager(recording, exchanged), recording.fake_mode, answers:
            with _disable_current_modes():
                real = recording.stand_ins.real.values()
                roots = [root for root in found.roots if not root.is_callers]
                roots += roots_of_arguments(call.forward, *exchanged.arguments)
                before = Walk([*roots, *(Root("a tensor", t, is_callers=True) for t in real)])
            outputs, spec = _run(recording, exchanged)
            made = left_behind.RunTensors(recorder, recording.reader, stand_ins.real)
            with _disable_current_modes():
                after = before.again()
                change = before.difference(after)
            refusal = None
            if change is not None:
                refusal = left_behind.refusal(change, before, after, made)
            outputs, backward = _with_backward(recording, exchanged, outputs, spec)
            if refusal is not None and call.imports and not sys.modules.keys() <= found.imported:
                return None
            if refusal is not None:
                raise refusal
            left_behind.refuse_cached(found, made)
            left_behind.refuse_fresh_constants(found, recorder)
            recording.reader.refuse_another_call(recorder)
            ask_places(recorder, exchanged.questions)
            values = without_places(recorder, exchanged.questions)
    refuse_other_variants(recorder.values, recorder.calls)
    read = {v for c in recorder.calls for v in c.reads}
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in outputs):
        raise free_sizes.StaticSizes("the forward returns a size")
    return Capture(
        values=values,
        calls=tuple(recorder.calls),
        parameters=exchanged.parameters,
        buffers=exchanged.buffers,
        inputs=exchanged.inputs,
        numbers=exchanged.numbers,
        constants=tuple(recorder.constants),
        outputs=results.output_leaves(recorder, outputs, backward.sources, backward.tangents),
        gradients=backward.gradient_values(recorder),
        arrivals=tuple(backward.arrivals),
        guards=tuple(recorder.guards),
        questions=tuple(exchanged.questions.asked.values()),
        backward_ignores_autocast=backward.ignores_autocast,
        output_spec=spec,
        samples=recording.reader.samples(recorder),
        distributed=backward.specs_of(recorder, recording.stand_ins.fakes),
        reads=exchanged.reading.found,
        sizes=STATIC if recording.free is None else recording.free.sizes(),
        unread=exchanged.watched.unread()
        - exchanged.questions.inputs_asked
        - {position for guard in recorder.guards for _, position in guard.inputs},
        idle=frozenset(i for i, v in exchanged.inputs if v not in read),
    )


@dataclass(frozen=True, slots=True)
class _Recording:
    """The objects of one recording of `call`. found: what its forward can reach."""

    call: Sample
    leftovers: Leftovers
    fake_mode: FakeTensorMode
    reader: ValueReader
    recorder: Recorder
    stand_ins: StandIns
    found: Walk
    free: free_sizes.FreeSizes | None

    @classmethod
    def of(cls, call: Sample, leftovers: Leftovers) -> _Recording:
        free = None
        if call.earlier is not None:
            free = free_sizes.FreeSizes(trees.tree_leaves((call.args, call.kwargs)), call.earlier)
        # A kernel that got the address of a fake tensor would end the process.
        with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            env = None if free is None else free.env
            fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
        # `recorded.results` caches results of distinct calls: a second cache would not be used.
        fake_mode.cache_enabled = False
        reader = ValueReader(free)
        recorder = Recorder(fake_mode, reader, leftovers)
        stand_ins = StandIns(fake_mode, recorder, free)
        found = walk_of(call.module, call.forward, call.args, call.kwargs)
        return cls(call, leftovers, fake_mode, reader, recorder, stand_ins, found, free)


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """A call with stand-ins for all tensors of the caller.

    results_of_others: positions of argument leaves that are not autograd leaves of the caller;
    parameters, buffers, inputs, numbers: as in Capture; autograd: what it kept of the stand-ins
    before the run; reading, watched: note which attributes, and which of some arguments, are read.
    """

    arguments: Arguments
    results_of_others: list[int]
    parameters: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    inputs: tuple[tuple[int, int], ...]
    numbers: tuple[tuple[int, int | float], ...]
    questions: Questions
    autograd: tuple[backwards.AutogradState, ...]
    reading: ReadsNoted
    watched: ArgumentsWatched


def _exchanged(recording: _Recording) -> _Exchanged:
    call, found = recording.call, recording.found
    recorder, stand_ins = recording.recorder, recording.stand_ins
    of_module = {id(t): (n, t) for n, t in parts_of(call.module.named_parameters())}
    buffers_of = parts_of(call.module.named_buffers())
    # Without sparse buffers, which are refused if they are read.
    dense = [(n, t) for n, t in buffers_of if t.is_nested or t.layout is torch.strided]
    names = [*of_module.values()], dense
    leaves = enumerate(trees.tree_leaves((call.args, call.kwargs)))
    real_leaves = {i: leaf for i, leaf in leaves if isinstance(leaf, torch.Tensor)}
    callers: dict[tuple[str, str | int], tuple[str, torch.Tensor]] = {}
    for role, named in zip(("parameter", "buffer"), names, strict=True):
        callers |= {(role, n): (f"the {role} '{n}'", t) for n, t in named}
    callers |= {("input", i): (f"leaf {i} of the arguments", t) for i, t in real_leaves.items()}
    for (role, key), (called, tensor) in callers.items():
        if role != "input" and is_trained_wrapper(tensor):
            continue
        if reason := why_not_planned(tensor, called):
            raise UnsupportedModel(reason, module_path=str(key).rpartition(".")[0])
    registered = {id(t): t for pairs in names for _, t in pairs}
    left_behind.refuse_iterators(found)
    left_behind.refuse_kept_arguments(found, (call.args, call.kwargs), registered)
    arguments = with_stand_ins(call.args, call.kwargs, stand_ins.of)
    arguments, numbers = with_numbers(arguments, recording.free)
    inputs = tuple((i, recorder.value(stand_ins.of(leaf))) for i, leaf in real_leaves.items())
    parameters = tuple((n, recorder.value(stand_ins.of(t))) for n, t in names[0])
    buffers = tuple((n, recorder.value(stand_ins.of(t))) for n, t in names[1])
    found.exchange(
        lambda part: (
            left_behind.NotAdvanced(recorder.refuse_here, type(part).__name__)
            if is_iterator(type(part))
            else replaced(part, lambda t: stand_ins.of(t) if id(t) in registered else None)
        )
    )
    questions = Questions(recording.fake_mode, stand_ins.real, recorder.refuse_here)
    for (role, key), (called, tensor) in callers.items():
        questions.name(stand_ins.of(tensor), called, role, key)
    autograd = tuple(backwards.kept(called, stand_ins.of(t)) for called, t in callers.values())
    recorder.begin_forward()
    given_inputs = {v: (i, real_leaves[i]) for i, v in inputs}
    recording.reader.start(given_inputs, parameters, buffers, [t for _, t in names[1]])
    return _Exchanged(
        arguments=arguments,
        results_of_others=[i for i, leaf in real_leaves.items() if not leaf.is_leaf],
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        numbers=numbers,
        questions=questions,
        autograd=autograd,
        reading=ReadsNoted(call.module),
        watched=ArgumentsWatched(call.unread, found.objects),
    )


@contextlib.contextmanager
def _as_in_eager(recording: _Recording, exchanged: _Exchanged) -> Iterator[None]:
    """While active, PyTorch and libraries take the paths of eager execution in this thread:
    gradient mode on, the caller's autocast with a weight cache of its own, patches in place."""
    torch.clear_autocast_cache()
    with (
        torch.enable_grad(),
        modes.without_compiling(),
        modes.without_hooks_on_all_modules(),
        modes.without_saved_tensor_hooks(),
        modes.without_logs_of_fake_tensors(),
        patched((*eager_paths.PATCHES, *recording.call.foreign_rows()), recording.recorder),
        exchanged.reading.noted(),
        exchanged.watched.active(),
    ):
        try:
            yield
        finally:
            torch.clear_autocast_cache()


def _run(recording: _Recording, exchanged: _Exchanged) -> tuple[list[Any], trees.TreeSpec]:
    """Return leaves and structure of the forward's result. Raises CaptureError for what a plan
    could not repeat."""
    recorder, call = recording.recorder, recording.call
    args, kwargs = exchanged.arguments
    given = GivenCall.of(args, kwargs)
    with recorder, _module_paths(call.module, recorder):
        result = key_value_cache.without(_called(call, exchanged), kwargs)
    recorder.refuse_if_refused()
    left_behind.refuse_in_checkpoints(recorder.checkpoints)
    recording.reader.refuse_writes()
    leaves, spec = trees.tree_flatten(given.with_contents(result))
    # Not a comprehension: in an error, its frame would keep the recorder, and so every tensor.
    outputs = [*map(functools.partial(results.known_output, recorder), range(len(leaves)), leaves)]
    results.refuse_unwritten(recorder, outputs)
    return outputs, spec


def _called(call: Sample, exchanged: _Exchanged) -> Any:
    args, kwargs = exchanged.arguments
    try:
        args, kwargs = exchanged.watched.replaced(args, kwargs)
        return exchanged.watched.returned(call.forward(*args, **kwargs))
    except RockplanError:
        raise
    except Exception as error:
        by_address = addresses.refusal(error, call.module)
        if by_address is not None:
            raise by_address from error
        leaves = ", ".join(map(str, exchanged.results_of_others))
        if leaves and _WRITES_TO_A_LEAF in str(error):
            raise NAMED["argument in place"].error(leaves=leaves) from error
        if _NO_VALUES in str(error):
            raise NAMED["values of a function of PyTorch"].error() from error
        by_name = isinstance(error, TypeError) and kwargs and not args
        remedy = "; for a forward that takes one dictionary pass `(batch,)`" if by_name else ""
        said = addresses.named_error(error)
        raise ForwardRaises(
            f"the model's forward does not run on these arguments: {said}. Check their shapes, "
            f"dtypes and devices by calling the original module on them{remedy}"
        ) from error


@contextlib.contextmanager
def _module_paths(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    paths = {id(m): path for path, m in module.named_modules()}
    stack = recorder.module_stack

    def enter(m: nn.Module, args: Any) -> None:
        stack.append(paths.get(id(m), stack[-1]))

    def leave(m: nn.Module, args: Any, result: Any) -> None:
        stack.pop()

    elsewhere = modes.nothing
    handles = [
        module_hooks.register_module_forward_pre_hook(in_this_thread(enter, elsewhere)),
        module_hooks.register_module_forward_hook(
            in_this_thread(leave, elsewhere), always_call=True
        ),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with_backward(
    recording: _Recording, exchanged: _Exchanged, outputs: list[Any], spec: trees.TreeSpec
) -> tuple[list[Any], backwards.RecordedBackward]:
    """Return (the leaves of the result, in which stand-ins and `Unmade` mark those that the plan
    does not make; the backward). Raises CaptureError for what a plan would not do."""
    recorder, call = recording.recorder, recording.call
    backwards.refuse_changes(exchanged.autograd)
    for written in recorder.constants_with_history():
        which = f"a tensor of shape {tuple(written.shape)}, not of the module and no argument"
        raise NAMED["write of what has a gradient"].error(tensor=which)
    outputs = results.given_apart(recorder, outputs, exchanged.inputs)
    starts = results.backward_starts(outputs, spec, call.incoming, call.only_loss)
    if call.only_loss:
        outputs = results.without_unread(recorder, outputs, spec, starts)
    backwards.refuse_gradients(recorder, [outputs[i] for i in starts])
    targets = [t for t in recording.stand_ins.fakes if t.requires_grad]
    backward = backwards.recorded_backward(call.module, recorder, outputs, starts, targets)
    backwards.refuse_changes(exchanged.autograd)
    if all(gradient is None for gradient in backward.gradients):
        raise NAMED["detached"].error()
    exchanged.questions.refuse_set(outputs)
    return outputs, backward
