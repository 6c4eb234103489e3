"""Capture: an nn.Module with a sample -> one recorded run, forward then backward.

takes: a module, positional and keyword arguments of one call. returns: Capture. guarantees: the
recorded operators are those of eager execution, nothing of the module's activations is
allocated, and the module, the sample and every generator are left exactly as they were.
What becomes of it: docs/model.md, Graph.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import Node
from torch.nn.modules import module as module_hooks
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack

from rockplan.errors import (
    CaptureError,
    DataDependentShape,
    ForwardRaises,
    InvalidInput,
    NothingToDifferentiate,
    RockplanError,
    UnsupportedModel,
    ValueDependentControlFlow,
)
from rockplan.graph_builder.tracing import (
    eager_paths,
    essence,
    foreign_kernels,
    host_random,
    own_gradients,
)
from rockplan.graph_builder.tracing.recorder import (
    RecordedCall,
    RecordedValue,
    Recorder,
    node_name,
    why_not_planned,
)
from rockplan.graph_builder.tracing.stand_ins import Arguments, with_stand_ins
from rockplan.graph_builder.tracing.stored_state import (
    Tables,
    assignments_of,
    perturbed,
    refuse_kept_arguments,
    tables_of,
)
from rockplan.graph_builder.tracing.tensor_questions import Questions
from rockplan.graph_builder.tracing.value_reads import ValueReader
from rockplan.python_state import trees
from rockplan.python_state.contents import data_in
from rockplan.python_state.leftovers import Leftovers, frames_forgotten
from rockplan.python_state.reach import Identity, Place, Reached, reached
from rockplan.python_state.snapshot import Changes, Snapshot
from rockplan.values.graph import ValueRef
from rockplan.values.interface import (
    Assignment,
    Guard,
    Incoming,
    OutputLeaf,
    Question,
    foreign_hooks,
    is_foreign,
)

# Fake tensors have no values that a kernel could look at.
_NO_VALUES = "data is not allocated yet"
# Of a leaf, or of a view of one.
_WRITES_TO_A_LEAF = "leaf Variable that requires grad is being used in an in-place operation"
# weight_norm and spectral_norm compute weights in hooks, prepare_qat quantizes results in hooks,
# transformers collects outputs in hooks.
_PURE_HOOKS = ("torch.nn.utils.", "torch.ao.quantization.", "transformers.")


# FullyShardedDataParallel keeps the parameters of a module in one.
WITHOUT_FLAT_PARAMETERS = (
    "call fully_shard (torch.distributed.fsdp) on the whole planned module instead, or wrap it in "
    "DistributedDataParallel"
)

# Nodes of autograd whose kernels look at values (prod_backward, cumprod_backward,
# masked_fill_backward in PyTorch) -> the operator, and what to do.
_BY_VALUES = {
    "ProdBackward0": "prod: use x.flatten().cumprod(0)[-1]",
    "ProdBackward1": "prod: use x.cumprod(dim).select(dim, -1)",
    "MaskedFillBackward1": "the value of masked_fill: use torch.where(mask, value, x)",
}
if torch.__version__ < "2.13":
    _BY_VALUES |= dict.fromkeys(
        ("ProdBackward0", "ProdBackward1", "CumprodBackward0"),
        "prod or cumprod: use torch 2.13 and cumprod, or, for positive values, the logarithm",
    )


@dataclass(frozen=True, slots=True)
class Capture:
    """One recorded run.

    parameters, buffers: (dotted name, value); inputs: (leaf position, value);
    constants: (value, tensor); gradients: (value of a parameter or input, value of its gradient
    or None if the result does not depend on it). The backward pass is recorded without autocast;
    backward_ignores_autocast: it would be the same under the autocast state of the forward.
    output_spec: tree structure of the result.
    samples: real tensors of integer inputs and of what is computed from them and constants.
    copies: (value of a buffer, value that holds two copies of it), see
    `lowering.buffer_copies`.
    """

    values: tuple[RecordedValue, ...]
    calls: tuple[RecordedCall, ...]
    parameters: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    inputs: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, torch.Tensor], ...]
    outputs: tuple[OutputLeaf, ...]
    gradients: tuple[tuple[int, int | None], ...]
    guards: tuple[Guard, ...]
    questions: tuple[Question, ...]
    assignments: tuple[Assignment, ...]
    backward_ignores_autocast: bool
    output_spec: trees.TreeSpec
    samples: dict[int, torch.Tensor]
    copies: tuple[tuple[int, int], ...] = ()


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    forward: Callable[..., Any] | None = None,
    incoming: Incoming | None = None,
) -> Capture:
    """Record one forward and backward of `module(*args, **kwargs)` over fake tensors.

    forward: what to call instead of `module.forward`.
    incoming: what the backward pass starts from; None: a loss (`_likely`) that reaches whatever
    the other outputs reach, otherwise every output that requires a gradient.
    Raises CaptureError (or a subclass) naming the place in the model and the remedy.
    """
    eager_paths.refuse_compiling()
    _refuse_function_modes()
    _refuse_scripted(module)
    _refuse_unmade(module)
    _refuse_hooks(module)
    call = _Sample(module, forward or module.forward, args, kwargs, incoming)
    leftovers = Leftovers()
    try:
        with frames_forgotten():
            found = _with_tables(call, leftovers)
    except BaseException:
        leftovers.remove()
        raise
    for place in leftovers.remove():
        raise UnsupportedModel(
            f"the forward leaves a tensor in {place}, which a planned run cannot reproduce (it "
            "is removed from there). Return it, or keep it outside of the module"
        )
    return found


_RUNS = 3
"""The first may make tables that the forward keeps, the second finds them; what it makes in the
third as well is made anew by each call."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """What is recorded."""

    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    incoming: Incoming | None


def _with_tables(call: _Sample, leftovers: Leftovers) -> Capture:
    """Record `call`; where the forward keeps tables of constants that it has made, make them for
    real, let it keep those, and record it again."""
    made: list[Tables] = []
    try:
        for _ in range(_RUNS):
            found = _recorded(call, leftovers, made[-1] if made else None)
            if isinstance(found, Capture):
                kept = (one for tables in made for one in tables.assignments)
                return replace(found, assignments=(*kept, *found.assignments))
            made.append(found)
            found.put_in_place()
        raise made[-1].unstable()
    finally:
        for tables in reversed(made):
            tables.take_back()


def _recorded(call: _Sample, leftovers: Leftovers, before: Tables | None) -> Capture | Tables:
    """One recording; or the tables that it made and that its forward keeps, if there are any.
    before: those that are there already, made by the recording before this one."""
    module, forward = call.module, call.forward
    # A kernel that got the address of a fake tensor would end the process.
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Distinct calls are worked out once (`results`): what a second cache keeps is not asked for.
    fake_mode.cache_enabled = False
    reader = ValueReader()
    recorder = Recorder(fake_mode, reader, leftovers)
    stand_ins = _StandIns(fake_mode, recorder)
    snapshot = Snapshot.of(module, forward, call.args, call.kwargs)
    histories = (stand_ins.without_history(), recorder.without_history())
    as_before = (eager_paths.without_modes(), snapshot.restored(), *histories)
    with contextlib.ExitStack() as stack:
        for context in as_before:
            stack.enter_context(context)
        attributes = {id(m): dict(m.__dict__) for m in module.modules()}
        names = _tensor_names(module)
        leaves = enumerate(trees.tree_leaves((call.args, call.kwargs)))
        real_leaves = {i: leaf for i, leaf in leaves if isinstance(leaf, torch.Tensor)}
        given = _given(real_leaves, *names)
        _refuse_kinds(given)
        registered = {id(t): t for pairs in names for _, t in pairs}
        refuse_kept_arguments(snapshot.reached, real_leaves.values(), registered)
        arguments = with_stand_ins(forward, call.args, call.kwargs, stand_ins.of)
        inputs = tuple((i, recorder.value(stand_ins.of(leaf))) for i, leaf in real_leaves.items())
        results_of_others = [i for i, leaf in real_leaves.items() if not leaf.is_leaf]
        snapshot.add(arguments.made)
        parameters = tuple((n, recorder.value(stand_ins.of(t))) for n, t in names[0])
        buffers = tuple((n, recorder.value(stand_ins.of(t))) for n, t in names[1])
        snapshot.exchange(stand_ins.of_registered(registered))
        refuse = functools.partial(_refuse_here, recorder)
        questions = Questions(fake_mode, stand_ins.real, refuse)
        for (role, key), (called, tensor) in given.items():
            questions.name(stand_ins.of(tensor), called, role, key)
        kept = own_gradients.kept({called: stand_ins.of(t) for called, t in given.values()})
        recorder.begin_forward()
        reader.start({v: (i, real_leaves[i]) for i, v in inputs}, parameters, buffers)
        run = _ForwardCall(
            module, forward, arguments, results_of_others, reader, snapshot, stand_ins
        )
        answers = questions.answered(snapshot.reached.namespaces)
        with _as_in_eager(recorder, reader), fake_mode, answers:
            snapshot.begin()
            first = run.run(recorder)
            outputs = first.outputs
            own_gradients.refuse_changes(kept)
            own_gradients.refuse_history(recorder.constants_with_history())
            starts = _starts(first, call.incoming)
            _refuse_gradients(recorder, [outputs[i] for i in starts])
            made_from = _made_from(outputs)
            targets = [t for t in stand_ins.fakes if t.requires_grad]
            tangents, found, any_autocast = _backward(module, recorder, outputs, starts, targets)
            own_gradients.refuse_changes(kept)
            own_gradients.refuse_switch(snapshot.switched_tensor())
            own_gradients.refuse_none(found)
            questions.refuse_set(outputs)
            _refuse_new_submodules(module, attributes)
            tables = tables_of(snapshot, run.reached(), recorder, reader, stand_ins.real)
            if tables or before:
                tables.essence = essence.of(recorder, outputs)
            if before and before.essence != tables.essence:
                raise before.another()
            if tables:
                return tables
            _refuse_callers_changes(snapshot)
            _refuse_changes(snapshot, first.changes, snapshot.changes())
            written = _written_constants(recorder)
            if first.changes:
                _refuse_cached_changes(snapshot, first.changes)
            if first.changes or written:
                # Only a second run tells whether the next call would do the same.
                another = Recorder(fake_mode, reader, leftovers)
                stand_ins.make_known(another)
                with _as_in_eager(another, reader):
                    second = run.run(another)
                _refuse_changes(snapshot, first.changes, second.changes)
                _refuse_another_call(snapshot, first, second)
                _refuse_fresh_constants(written, another)
            assignments = assignments_of(snapshot, first.changes)
            if assignments and _is_overwritten(run, second, Recorder(fake_mode, reader, leftovers)):
                assignments = tuple(replace(one, is_overwritten=True) for one in assignments)
    _refuse_other_variants(recorder)
    return Capture(
        values=tuple(recorder.values),
        calls=tuple(recorder.calls),
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        constants=tuple(recorder.constants),
        outputs=_output_leaves(recorder, outputs, made_from, tangents),
        gradients=tuple(
            (recorder.value(t), None if g is None else recorder.value(g))
            for t, g in zip(targets, found, strict=True)
        ),
        guards=tuple(recorder.guards),
        questions=tuple(questions.asked.values()),
        assignments=assignments,
        backward_ignores_autocast=any_autocast,
        output_spec=first.spec,
        samples=reader.samples(recorder),
    )


@dataclass(frozen=True, slots=True)
class _Forward:
    """One run of the forward. done: calls, constants and result, equal to those of another run
    that does the same; changes: of the plain data that Python holds."""

    outputs: list[Any]
    spec: trees.TreeSpec
    done: tuple[Any, ...]
    changes: Changes

    @classmethod
    def of(
        cls, recorder: Recorder, outputs: list[Any], spec: trees.TreeSpec, changes: Changes
    ) -> _Forward:
        result = [recorder.value(o) if isinstance(o, torch.Tensor) else data_in(o) for o in outputs]
        constants = [id(tensor) for _, tensor in recorder.constants]
        done = (list(recorder.calls), constants, result, spec)
        return cls(outputs, spec, done, changes)


@dataclass(frozen=True, slots=True)
class _ForwardCall:
    """A forward with fake arguments. results_of_others: positions of those that are no leaves of
    autograd's for the caller."""

    module: nn.Module
    forward: Callable[..., Any]
    arguments: Arguments
    results_of_others: Sequence[int]
    reader: ValueReader
    snapshot: Snapshot
    stand_ins: _StandIns

    def run(self, recorder: Recorder) -> _Forward:
        args, kwargs = self.arguments.args, self.arguments.kwargs
        refuse = functools.partial(_refuse_here, recorder)
        paths = _module_paths(self.module, recorder)
        with recorder, paths, host_random.refused(self.snapshot.reached, refuse):
            result = _call_module(self, args, kwargs)
        recorder.refuse_if_refused()
        self.reader.refuse_writes()
        leaves, spec = trees.tree_flatten(result)
        outputs = [_known_output(recorder, *found) for found in enumerate(leaves)]
        _refuse_unwritten(recorder, outputs)
        return _Forward.of(recorder, outputs, spec, self.snapshot.changes())

    def reached(self) -> Reached:
        """What can be reached now."""
        args, kwargs = self.arguments.args, self.arguments.kwargs
        return reached(self.module, self.forward, args, kwargs, self.stand_ins.real)


def _is_overwritten(run: _ForwardCall, expected: _Forward, recorder: Recorder) -> bool:
    """Does a call leave the same, and do the same, when other data was there before?"""
    run.stand_ins.make_known(recorder)
    try:
        if not perturbed(run.snapshot, expected.changes):
            return False
        with _as_in_eager(recorder, run.reader):
            found = run.run(recorder)
    except Exception:  # what a forward does with such data is its own
        return False
    return found.done == expected.done and found.changes == expected.changes


def _refuse_other_variants(recorder: Recorder) -> None:
    """Raise where eager execution calls other operators than it does while they are recorded.

    Composite operators have a second variant for tensor subclasses and dispatch modes
    (TensorSubclassLikeUtils.h in PyTorch); nearly all only write out of place. One whose bits
    differ is cross entropy with class weights, label smoothing and the mean: eager sums the
    weights of the targets that count (masked_select), the variant those of all targets, others
    set to zero. (The two others known are recorded as eager computes them:
    `record._as_unwatched`, `swap.max_pool1d_as_unwatched`.)
    """
    values = recorder.values
    filled: dict[int, ValueRef] = {}
    gathered: dict[int, ValueRef] = {}
    for recorded in recorder.calls:
        call = recorded.call
        refs = [a for a in call.args if isinstance(a, ValueRef)]
        if call.op == "aten.masked_fill.Scalar" and call.results[0] is not None:
            filled[call.results[0]] = refs[1]
        elif call.op == "aten.gather.default" and refs[1].index in filled:
            if call.results[0] is not None and len(values[refs[0].index].spec.shape) == 1:
                gathered[call.results[0]] = filled[refs[1].index]
        elif call.op == "aten.masked_fill_.Scalar" and gathered.get(refs[0].index) == refs[1]:
            raise DataDependentShape.at(
                recorded.module,
                recorded.source,
                "cross entropy with class weights, label smoothing and the mean selects the "
                "targets that are not ignored, a shape that depends on values; a plan needs "
                "static shapes. Compute this loss outside of the module, or leave out the "
                "weights or the smoothing",
            )


class _StandIns:
    """Fake tensors for real ones, one for each object, sharing storage where the real ones do.

    real: identity of a fake tensor -> what it stands for."""

    def __init__(self, fake_mode: FakeTensorMode, recorder: Recorder) -> None:
        self._fake_mode = fake_mode
        self._recorder = recorder
        self._of: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []
        self.real: dict[int, torch.Tensor] = {}
        self.fakes: list[torch.Tensor] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._of.get(id(tensor))
        if found is None:
            source = tensor if tensor.is_leaf else tensor.detach().requires_grad_()
            found = self._fake_mode.from_tensor(source, static_shapes=True)
            self._of[id(tensor)] = found
            self._of[id(found)] = found
            self._alive += [tensor, source]
            self.real[id(found)] = tensor
            self.fakes.append(found)
            self._recorder.value(found)
        return found

    def of_registered(
        self, registered: dict[int, torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor | None]:
        """The stand-in of a parameter or a buffer, None for other tensors."""
        return lambda tensor: self._of[id(tensor)] if id(tensor) in registered else None

    @contextlib.contextmanager
    def without_history(self) -> Iterator[None]:
        """What was written into them is no part of autograd's graph on exit, which may hold them in
        turn, where Python would not see it."""
        try:
            yield
        finally:
            for fake in self.fakes:
                if fake.grad_fn is not None:
                    with torch.no_grad(), contextlib.suppress(RuntimeError):  # of a view
                        fake.detach_()

    def make_known(self, recorder: Recorder) -> None:
        """To another recorder, as the values that they are to the first."""
        for fake in self.fakes:
            recorder.value(fake)
        recorder.begin_forward()


def _tensor_names(
    module: nn.Module,
) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
    return list(module.named_parameters()), list(module.named_buffers())


def _refuse_scripted(module: nn.Module) -> None:
    for path, m in module.named_modules():
        if isinstance(m, torch.jit.ScriptModule):
            part = f"submodule '{path}'" if path else "model"
            raise UnsupportedModel(
                f"{part} is a {type(m).__name__}: what TorchScript runs cannot be followed. Plan "
                "the model with the module that was scripted or traced in its place",
                module_path=path,
            )


def _refuse_unmade(module: nn.Module) -> None:
    for names in _tensor_names(module):
        for name, tensor in names:
            if is_lazy(tensor):
                raise InvalidInput(f"{name} is lazy: run the module once on a sample, then plan it")
            if tensor.device.type == "meta":
                raise InvalidInput(
                    f"{name} is on the meta device: materialize the module, then plan it"
                )


_Given = dict[tuple[str, str | int], tuple[str, torch.Tensor]]
"""(role, name or position) of a tensor of the caller -> what a message calls it, and the tensor."""


def _given(
    leaves: dict[int, torch.Tensor],
    parameters: list[tuple[str, torch.Tensor]],
    buffers: list[tuple[str, torch.Tensor]],
) -> _Given:
    given: _Given = {}
    for name, tensor in parameters:
        given["parameter", name] = f"the parameter '{name}'", tensor
    for name, tensor in buffers:
        given["buffer", name] = f"the buffer '{name}'", tensor
    for i, leaf in leaves.items():
        given["input", i] = f"leaf {i} of the arguments", leaf
    return given


def _refuse_kinds(given: _Given) -> None:
    for name, tensor in given.values():
        reason = why_not_planned(tensor)
        if reason is not None:
            raise UnsupportedModel(f"{name} {reason}")


def _refuse_function_modes() -> None:
    """What such a mode does to a function depends on more than can be looked at: its state, and the
    functions themselves, of which a plan has the operators that they call."""
    if not torch._C._is_torch_function_mode_enabled():
        return
    for mode in _get_current_function_mode_stack():
        if is_foreign(mode):
            raise UnsupportedModel(
                f"{type(mode).__qualname__} is a TorchFunctionMode, and what it does to functions "
                "of PyTorch would not be done in a planned step, which calls operators. Plan and "
                "call the module outside of it; or use the original module there, which calls of "
                "a planned one do with Options(on_mismatch='original')"
            )


def _refuse_hooks(module: nn.Module) -> None:
    """Hooks of submodules, or of all modules, would run during capture only. Those of the root run
    around the planned forward as always; those of libraries that compute weights are part of the
    graph."""
    of_all = foreign_hooks(*(getattr(module_hooks, f"_global{name}") for name in eager_paths.HOOKS))
    if of_all and any(True for _ in module.children()):
        raise UnsupportedModel(
            f"the hook {getattr(of_all[0], '__qualname__', of_all[0])} on all modules "
            "(register_module_forward_hook and the like) would not run in the submodules of a "
            "planned step; remove it, or use the original module while it is there"
        )
    for path, m in module.named_modules():
        hooks = [h for name in eager_paths.HOOKS for h in (m.__dict__.get(name) or {}).values()]
        foreign = [h for h in hooks if not str(h.__module__).startswith(_PURE_HOOKS)]
        if path and foreign:
            raise UnsupportedModel(
                f"in module '{path}': the hook {getattr(foreign[0], '__qualname__', foreign[0])} "
                "on a submodule would not run in a planned step; remove it before planning, or "
                "put it on the root module or on the parameters",
                module_path=path,
            )


def _call_module(call: _ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the forward; what it raises becomes an error of ours."""
    results_of_others = call.results_of_others
    try:
        return call.forward(*args, **kwargs)
    except RockplanError:
        raise
    except Exception as error:
        by_address = foreign_kernels.refusal(error, call.module)
        if by_address is not None:
            raise by_address from error
        if results_of_others and _WRITES_TO_A_LEAF in str(error):
            raise UnsupportedModel(
                "the forward changes a tensor that requires a gradient in place, which is an "
                f"argument (leaf {', '.join(map(str, results_of_others))} of the arguments is the "
                "result of other operations, else eager would fail, too); autograd would not be "
                "told of the change by a planned step. Change a clone of it (x = x.clone()), or "
                "use the operator without the underscore"
            ) from error
        if _NO_VALUES in str(error):
            raise ValueDependentControlFlow(
                "a function of PyTorch reads values of a tensor while the forward runs, of which "
                "a plan knows shapes alone (those of a PackedSequence, for instance). Pass padded "
                "tensors, or leave that function outside of the module"
            ) from error
        by_name = isinstance(error, TypeError) and kwargs and not args
        remedy = "; for a forward that takes one dictionary pass `(batch,)`" if by_name else ""
        raise ForwardRaises(
            f"the model's forward does not run on these arguments: {_named(error)}. Check their "
            f"shapes, dtypes and devices by calling the original module on them{remedy}"
        ) from error


def _named(error: Exception) -> str:
    """Its type and message, without the full stop."""
    return f"{type(error).__name__}: {error}".rstrip(".: ")


def _starts(forward: _Forward, incoming: Incoming | None) -> dict[int, tuple[int, ...]]:
    """Position of each output that the backward pass starts from -> strides of its gradient."""
    outputs = forward.outputs
    candidates = [
        i for i, o in enumerate(outputs) if isinstance(o, torch.Tensor) and o.requires_grad
    ]
    if not candidates:
        raise NothingToDifferentiate(
            "no output of the module depends on a parameter or an input that requires a "
            "gradient, so there is no backward pass to plan. Unfreeze a parameter, or set "
            "requires_grad on the sample input"
        )
    wanted = dict.fromkeys(_likely(forward, candidates)) if incoming is None else incoming
    if not wanted or not set(wanted) <= set(candidates):
        raise InvalidInput(
            f"differentiated is {tuple(wanted)}, but the leaves of the result that require a "
            f"gradient are {tuple(candidates)}"
        )
    firsts = _firsts(outputs)
    return {firsts[i]: wanted[i] or outputs[i].stride() for i in sorted(wanted)}


def _likely(forward: _Forward, candidates: Sequence[int]) -> Sequence[int]:
    """Of the outputs that require a gradient, those that a step most likely starts from.

    The fewest of these that reach all that any output reaches (what they miss may be a part of a
    loss that the caller makes of other outputs too): the one that is named `loss`, as trainers take
    it; the scalars that are no part of another one (of a loss, the losses that it is the sum of);
    all scalars; everything.
    """
    outputs = forward.outputs
    scalars = [i for i in candidates if outputs[i].ndim == 0]
    made_from = _made_from(outputs)
    parts = {part for i in scalars for part in made_from[i]}
    named = _position_of_loss(forward)
    whole = _leaves(outputs[i] for i in candidates)
    chosen = [i for i in scalars if i == named], [i for i in scalars if i not in parts], scalars
    for found in chosen:
        if found and whole <= _leaves(outputs[i] for i in found):
            return found
    return candidates


def _position_of_loss(forward: _Forward) -> int | None:
    """Of the leaf that the result of the module calls `loss`, if one is called so."""
    result = trees.tree_unflatten(forward.outputs, forward.spec)
    named = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    return next((i for i, o in enumerate(forward.outputs) if o is named), None)


def _firsts(outputs: Sequence[Any]) -> tuple[int, ...]:
    """For each leaf of the result, the first that is the same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(output), i) for i, output in enumerate(outputs))


def _made_from(outputs: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """For each leaf of the result, the others that its backward pass goes through."""
    tensors = {
        i: outputs[i]
        for i in dict.fromkeys(_firsts(outputs))
        if isinstance(outputs[i], torch.Tensor) and outputs[i].grad_fn is not None
    }
    at = {(t.grad_fn, t.output_nr): frozenset({i}) for i, t in tensors.items()}
    beyond: dict[Node, frozenset[int]] = {}
    waiting = [t.grad_fn for t in tensors.values()]
    while waiting:
        node = waiting[-1]
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        new = [n for n, _ in edges if n not in beyond]
        if not new:
            waiting.pop()
            found = (beyond[n] | at.get((n, number), frozenset()) for n, number in edges)
            beyond[node] = frozenset().union(*found)
        waiting += new
    nodes = [o.grad_fn if isinstance(o, torch.Tensor) else None for o in outputs]
    return tuple(() if n is None else tuple(sorted(beyond[n])) for n in nodes)


def _refuse_unwritten(recorder: Recorder, outputs: Sequence[Any]) -> None:
    for position, output in enumerate(outputs):
        if isinstance(output, torch.Tensor):
            reader = f"leaf {position} of the module's result is"
            recorder.refuse_unwritten([recorder.value(output)], reader)


def _known_output(recorder: Recorder, position: int, leaf: Any) -> Any:
    """A leaf of the result; a real tensor that no call has read (a cached table) is a constant."""
    if not isinstance(leaf, torch.Tensor):
        _refuse_opaque(leaf, position)
        return leaf
    if leaf.requires_grad and not isinstance(leaf, FakeTensor):
        raise _foreign_gradient(leaf)
    return recorder.known_tensor(leaf)


def _refuse_gradients(recorder: Recorder, roots: Sequence[torch.Tensor]) -> None:
    """Raise where kernels of the backward pass look at values, to choose a way; and where it
    reaches a tensor that requires a gradient and is neither a parameter of the module nor an
    argument: eager would accumulate into it, a plan would not."""
    for node in _nodes(roots):
        name = node_name(node)
        fills_a_constant = name == "MaskedFillBackward1" and not node.next_functions[-1][0]
        if name in _BY_VALUES and not fills_a_constant:
            raise UnsupportedModel.at(
                *recorder.place_of(node),
                "eager execution computes a gradient in a way that depends on values, which a plan "
                f"cannot see. It is that of {_BY_VALUES[name]}",
            )
    for leaf in _leaves(roots):
        if not isinstance(leaf, FakeTensor):
            raise _foreign_gradient(leaf)


def _leaves(outputs: Iterable[torch.Tensor]) -> set[torch.Tensor]:
    """What the backward pass from there reaches."""
    roots = list(outputs)
    accumulating = (n for n in _nodes(roots) if node_name(n) == "torch::autograd::AccumulateGrad")
    leaves = {n.variable for n in accumulating}  # type: ignore[attr-defined]
    return leaves | {t for t in roots if t.grad_fn is None}


def _nodes(roots: Sequence[torch.Tensor]) -> Iterator[Node]:
    """Of the backward pass from there."""
    waiting = list(dict.fromkeys(t.grad_fn for t in roots if t.grad_fn is not None))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        followers = dict.fromkeys(n for n, _ in node.next_functions if n is not None)
        waiting += [n for n in followers if n not in seen]
        seen |= set(followers)


def _foreign_gradient(tensor: torch.Tensor) -> UnsupportedModel:
    if getattr(tensor, "_is_flat_param", False):
        return UnsupportedModel(
            "the module's parameters are parts of one of FullyShardedDataParallel, where a planned "
            f"module cannot be; {WITHOUT_FLAT_PARAMETERS}"
        )
    return UnsupportedModel(
        f"the result depends on a tensor of shape {tuple(tensor.shape)} that requires a gradient "
        "and is neither a parameter of the module nor an argument, so a planned step would not "
        "compute its gradient; register it as a parameter (nn.Parameter, nn.ParameterList), pass "
        "it as an argument, or detach it"
    )


def _backward(
    module: nn.Module,
    recorder: Recorder,
    outputs: list[Any],
    starts: dict[int, tuple[int, ...]],
    targets: list[torch.Tensor],
) -> tuple[dict[int, int], tuple[torch.Tensor | None, ...], bool]:
    """Record the backward pass. returns: output position -> value of its tangent; gradients;
    whether it is the same under the caller's autocast state."""
    roots = [outputs[i] for i in starts]
    tangents = [
        torch.empty_strided(o.shape, strides, dtype=o.dtype, device=o.device)
        for o, strides in zip(roots, starts.values(), strict=True)
    ]
    recorder.begin_backward(o for o in outputs if isinstance(o, torch.Tensor))
    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    forward_calls = len(recorder.calls)

    def run(retain: bool) -> tuple[torch.Tensor | None, ...]:
        with recorder, torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(
                roots, targets, tangents, allow_unused=True, retain_graph=retain
            )

    with contextlib.ExitStack() as without_autocast:
        try:
            under_autocast: list[str] | None = None
            if kinds:
                run(retain=True)
                under_autocast = [c.call.op for c in recorder.calls[forward_calls:]]
                del recorder.calls[forward_calls:]
            for kind in kinds:
                without_autocast.enter_context(torch.autocast(kind, enabled=False))
            found = run(retain=False)
        except RockplanError:
            raise
        except Exception as error:
            by_address = foreign_kernels.refusal(error, module)
            if by_address is not None:
                raise by_address from error
            raise CaptureError(
                f"the backward pass of the module does not run: {_named(error)}. "
                "Check that the original module's backward works on the sample"
            ) from error
    recorder.refuse_if_refused()
    gradients = [recorder.value(g) for g in found if g is not None]
    recorder.refuse_unwritten(gradients, "a gradient is")
    ignores = under_autocast == [c.call.op for c in recorder.calls[forward_calls:]]
    made = {i: recorder.value(t) for i, t in zip(starts, tangents, strict=True)}
    return made, found, ignores


def _output_leaves(
    recorder: Recorder,
    outputs: list[Any],
    made_from: Sequence[tuple[int, ...]],
    tangents: dict[int, int],
) -> tuple[OutputLeaf, ...]:
    found: list[OutputLeaf] = []
    for position, (output, first) in enumerate(zip(outputs, _firsts(outputs), strict=True)):
        if isinstance(output, torch.Tensor):
            _refuse_alias(recorder, output, position)
            own_gradients.refuse_of_result(output, position)
            value, tangent = recorder.value(output), tangents.get(position)
            leaf = (value, None, first, made_from[position], tangent, output.requires_grad)
            found.append(OutputLeaf(*leaf))
            continue
        found.append(OutputLeaf(None, output, first, (), None, False))
    return tuple(found)


def _refuse_alias(recorder: Recorder, output: torch.Tensor, position: int) -> None:
    """An output that shares storage with a tensor of the caller could be changed through it."""
    storage = recorder.values[recorder.value(output)].storage
    if output.requires_grad and storage in recorder.leaf_storages:
        raise UnsupportedModel(
            f"leaf {position} of the module's result is, or is a view of, an input or a parameter "
            "that requires a gradient; return a clone of it"
        )


def _refuse_opaque(output: object, position: int) -> None:
    plain: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes)
    plain += (torch.dtype, torch.device, torch.Size)
    if isinstance(output, plain):
        return
    remedy = (
        "pass use_cache=False (config.use_cache = False)"
        if "Cache" in type(output).__name__
        else "return tensors in tuples, lists, dictionaries or a registered pytree"
    )
    raise UnsupportedModel(
        f"leaf {position} of the module's result is a {type(output).__qualname__}, an opaque "
        f"container whose tensors cannot be followed; {remedy}"
    )


def _refuse_new_submodules(module: nn.Module, attributes: dict[int, dict[str, Any]]) -> None:
    for path, m in module.named_modules():
        if id(m) not in attributes:
            raise UnsupportedModel(
                f"the forward adds the submodule '{path}', which a planned run would not do; run "
                "the module once on the sample, then plan it",
                module_path=path,
            )


def _refuse_callers_changes(snapshot: Snapshot) -> None:
    for place in snapshot.callers_changes():
        raise UnsupportedModel(
            f"the forward changes {place.text}, which the caller has given, and a planned run "
            "would not; return what it adds there, or pass a copy in and leave it alone"
        )


def _refuse_changes(snapshot: Snapshot, before: Changes, after: Changes) -> None:
    """Raise where every call leaves other data than the one before."""
    for change in _changed(before, after):
        place = snapshot.place_of(change)
        raise UnsupportedModel(
            f"{_of(place)}: each call changes {place.text}, which would stand still in a planned "
            "run; keep a count outside of the module, or in a registered buffer",
            module_path=place.module,
        )


def _refuse_cached_changes(snapshot: Snapshot, changes: Changes) -> None:
    """Raise where data may be changed by a function that runs in the first call alone."""
    name = snapshot.grown_cache()
    if name is not None:
        place = snapshot.place_of(next(iter(changes)))
        raise UnsupportedModel(
            f"{_of(place)}: the forward changes {place.text}, and calls {name}, whose results are "
            "cached (functools): a planned run could not tell whether the next call changes it as "
            "well. Run the module once on the sample, then plan it",
            module_path=place.module,
        )


def _refuse_another_call(snapshot: Snapshot, first: _Forward, second: _Forward) -> None:
    """Raise where the first call leaves data that makes the second another one. Data that is only
    left there, or set before it is read, makes no difference."""
    if first.done == second.done:
        return
    for change in first.changes:
        place = snapshot.place_of(change)
        raise UnsupportedModel(
            f"{_of(place)}: the forward changes {place.text}, and the next call does not do the "
            "same as this one, which a planned run would repeat for ever. If only the first call "
            "is another one (values set by the first batch), run the module once on the sample, "
            "then plan it",
            module_path=place.module,
        )


def _of(place: Place) -> str:
    return "in the model" if place.module is None else f"in module '{place.module or '(root)'}'"


def _written_constants(recorder: Recorder) -> list[tuple[torch.Tensor, RecordedCall]]:
    """Constants, or what they are views of, that the forward or the backward writes to, and the
    first call that does."""
    written: dict[int, RecordedCall] = {}
    for call in recorder.calls:
        for value in call.writes:
            written.setdefault(recorder.values[value].storage, call)
    found = ((tensor, recorder.values[value].storage) for value, tensor in recorder.constants)
    return [(tensor, written[storage]) for tensor, storage in found if storage in written]


def _refuse_fresh_constants(
    written: list[tuple[torch.Tensor, RecordedCall]], another: Recorder
) -> None:
    """Raise where the second run does not meet the tensors that the first has written to: the
    forward makes them from other data, and a plan would write to the same one at every call."""
    kept = {id(tensor) for _, tensor in another.constants}
    for tensor, call in written:
        if id(tensor) not in kept:
            raise UnsupportedModel.at(
                call.module,
                call.source,
                "the forward writes in place to a tensor that it has made of numpy's or Python's "
                "data (torch.from_numpy, torch.as_tensor), which would be the same tensor at every "
                "call of a planned module; write to a clone of it",
            )


def _changed(before: Changes, after: Changes) -> list[tuple[Identity, Any]]:
    return [c for c in {**before, **after} if before.get(c, _NO_CHANGE) != after.get(c, _NO_CHANGE)]


_NO_CHANGE = object()


@contextlib.contextmanager
def _module_paths(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which submodule is running, in this thread: the hooks see all threads."""
    paths = {id(m): path for path, m in module.named_modules()}
    stack = recorder.module_stack
    captured_in = threading.get_ident()

    def enter(m: nn.Module, args: Any) -> None:
        if threading.get_ident() == captured_in:
            stack.append(paths.get(id(m), stack[-1]))

    def leave(m: nn.Module, args: Any, result: Any) -> None:
        if threading.get_ident() == captured_in:
            stack.pop()

    handles = [
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_here(recorder: Recorder, message: str) -> NoReturn:
    recorder.refuse(UnsupportedModel.at(*recorder.place(), message))


@contextlib.contextmanager
def _as_in_eager(recorder: Recorder, reader: ValueReader) -> Iterator[None]:
    """Gradient mode on, autocast as the caller has it but with a weight cache of its own, and
    libraries led to take the path that they take in eager execution."""

    def read_all(tensor: torch.Tensor) -> torch.Tensor | None:
        return reader.read_all(recorder, tensor) if recorder.is_active() else None

    refuse = functools.partial(_refuse_here, recorder)
    torch.clear_autocast_cache()
    with (
        torch.enable_grad(),
        eager_paths.transformers_sees_real_tensors(),
        eager_paths.max_pool1d_as_unwatched(),
        eager_paths.ctc_loss_of_tensors(),
        eager_paths.without_checkpointing(),
        eager_paths.without_compiling(),
        eager_paths.without_hooks_on_all_modules(),
        eager_paths.empty_cache_of_parametrizations(),
        eager_paths.without_saved_tensor_hooks(),
        eager_paths.without_logs_of_fake_tensors(),
        eager_paths.values_told(read_all),
        eager_paths.without_tensor_hooks(refuse),
        eager_paths.without_addresses(recorder.is_active, refuse),
        eager_paths.without_other_memory(refuse),
        eager_paths.without_nested_tensors(refuse),
        eager_paths.without_autocast_inside(refuse),
        eager_paths.without_seeding(refuse),
    ):
        try:
            yield
        finally:
            torch.clear_autocast_cache()
