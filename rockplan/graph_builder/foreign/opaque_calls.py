"""Opaque calls: what a recording does at an opaque function, and how what is not known of a call is
found out.

A recording that meets a call of which nothing is known ends with `UnknownCall`; the call runs once,
outside of the recording and of the module, on made-up numbers, and the forward is recorded again.
So an opaque function may do whatever it does to Python's state, which no plan takes part in.
guarantees: afterwards generators are what they were; what the run writes into and was not declared,
and draws that a plan could not repeat, are refused by name.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import inspect
import pickle
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import InvalidInput, RockplanError
from rockplan.graph_builder.foreign.opaque import (
    KNOWN,
    REGISTERED,
    AutocastThere,
    Known,
    Opaque,
    OpaqueBackward,
    OpaqueForward,
    OpaqueRun,
    Outcome,
    Ref,
    Tensors,
    device_of_draws,
    generator_states,
    moved,
    taken,
    with_refs,
)
from rockplan.graph_builder.recorded.run import tensor_spec
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.graph_builder.tracing.patches import Interrupted, Patch, RecordingAccess
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.values.graph import TensorSpec

_WHY = "it runs as a whole, on tensors that have memory, when the plan runs"
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, type),
)


class UnknownCall(Interrupted):
    """A recording has come to a call of which nothing is known yet."""

    def __init__(self, call: OpaqueForward | OpaqueBackward, module: str, source: str) -> None:
        super().__init__(f"{call.called} is opaque", module_path=module, source=source)
        self.call = call

    def find_out(self, before: UnknownCall | None) -> None:
        """Run it. before: what the recording before this one has asked for. Raises CaptureError if
        it fails, does what a plan could not do, or is another call at each recording."""
        place = self.module_path or "", self.source or ""
        if before is not None and (key := key_of(before.call)) not in _MET:
            del KNOWN[key]
            what = {"function": self.call.called, "what": _differing(before.call, self.call)}
            raise NAMED["other call of an opaque function"].at(*place, **what)
        with torch.inference_mode(False), _disable_current_modes():
            run = _found(self.call, place)
            is_real = self.call.function.fake is None
            if is_real and isinstance(self.call, OpaqueForward) and any(self.call.needs):
                # Most backward passes have these gradients: half as many recordings.
                with contextlib.suppress(RockplanError):
                    likely = _likely_backward(KNOWN[key_of(self.call)], run)
                    if key_of(likely) not in KNOWN:
                        _found(likely, place)


# While a forward is recorded


def patches() -> Iterator[Patch]:
    """In place of the members of opaque functions."""
    for kind, function in REGISTERED.items():
        recorded = _Recorded(function)
        yield Patch(kind, "forward", recorded.forward, _WHY)
        yield Patch(kind, function.backward_name, recorded.backward, _WHY)
        if function.setup_context is not None:
            yield Patch(kind, "setup_context", recorded.setup_context, _WHY)


@dataclass(frozen=True, slots=True)
class _MadeByCall:
    """What a call has made in a recording. tensors: those given and those made."""

    known: Known
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What autograd's context keeps of a call for its backward. attributes: place -> tensor of the
    attributes; what is saved is autograd's to keep, and results would keep themselves alive."""

    known: Known
    attributes: dict[int, torch.Tensor]


class _Recorded:
    """The members of an opaque function while a forward is recorded."""

    def __init__(self, function: Opaque) -> None:
        self._function = function
        self._last: list[_MadeByCall] = []

    def forward(self, original: Callable[..., Any], access: RecordingAccess) -> Any:
        def forward(*given: Any) -> Any:
            if not access.is_active():
                return original(*given)
            if self._function.setup_context is not None:
                # What autograd does, which sees the signature of this function here.
                bound = inspect.signature(self._function.forward).bind(*given)
                bound.apply_defaults()
                self._last = [self._call(bound.args, access)]
                return _result(self._last[0])
            ctx, *args = given
            self._refuse_subclass(ctx, access)
            made = self._call(args, access)
            _tell(ctx, made)
            return _result(made)

        return forward

    def setup_context(self, original: Callable[..., Any], access: RecordingAccess) -> Any:
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            if not access.is_active():
                original(ctx, inputs, output)
                return
            self._refuse_subclass(ctx, access)
            _tell(ctx, self._last.pop())

        return setup_context

    def _refuse_subclass(self, ctx: Any, access: RecordingAccess) -> None:
        """One that is derived from the function, and has its members."""
        kind = type(ctx)._forward_cls
        if kind is not self._function.kind:
            what = {"function": kind.__qualname__, "base": self._function.called}
            access.refuse(NAMED["subclass of an opaque function"].text(**what))

    def _call(self, args: Sequence[Any], access: RecordingAccess) -> _MadeByCall:
        for leaf in pytree.tree_leaves(tuple(args)):
            if not (isinstance(leaf, torch.Tensor) or is_plain(leaf)):
                what = {"function": f"{self._function.called}.forward", "kind": type(leaf).__name__}
                access.refuse(NAMED["argument of an opaque function"].text(**what))
        call, tensors = _forward_call(self._function, args)
        known = _known(call, access)
        read = [t for i, t in enumerate(tensors) if i not in call.changed]
        changed = [tensors[i] for i in call.changed]
        operator = self._function.forward_operator
        fresh = operator(read, changed, key_of(call), known.draws)
        return _MadeByCall(known, rebuilt(known.outcome, tensors, fresh))

    def backward(self, original: Callable[..., Any], access: RecordingAccess) -> Any:
        def backward(ctx: Any, *gradients: Any) -> Any:
            if not access.is_active():
                return original(ctx, *gradients)
            self._refuse_subclass(ctx, access)
            kept: _Kept = ctx._rockplan_kept
            refs = zip(kept.known.outcome.saved, ctx.saved_tensors, strict=True)
            saved = {ref.place: tensor for ref, tensor in refs if isinstance(ref, Ref)}
            call, given = _backward_call(kept.known, kept.attributes | saved, gradients)
            known = _known(call, access)
            operator = self._function.backward_operator
            fresh = operator(given, key_of(call), known.draws)
            return _result(_MadeByCall(known, rebuilt(known.outcome, call.kept(given), fresh)))

        return backward


_MET: set[str] = set()
"""Keys of known calls that a recording has come to."""


def _known(call: OpaqueForward | OpaqueBackward, access: RecordingAccess) -> Known:
    key = key_of(call)
    _MET.add(key) if key in KNOWN else _MET.discard(key)
    return KNOWN.get(key) or access.stop(UnknownCall(call, *access.place()))


def _result(made: _MadeByCall) -> Any:
    leaves = [taken(ref, made.tensors) for ref in made.known.results]
    return pytree.tree_unflatten(leaves, made.known.structure)


def _tell(ctx: Any, made: _MadeByCall) -> None:
    """Tell autograd's context what the function has told its own."""
    outcome = made.known.outcome
    places = {
        ref.place for _, leaves, _ in outcome.attributes for ref in leaves if isinstance(ref, Ref)
    }
    ctx._rockplan_kept = _Kept(made.known, {p: made.tensors[p].detach() for p in sorted(places)})
    if outcome.saved:
        ctx.save_for_backward(*(taken(ref, made.tensors) for ref in outcome.saved))
    if outcome.dirty:
        ctx.mark_dirty(*(made.tensors[place] for place in sorted(outcome.dirty)))
    if outcome.constant:
        ctx.mark_non_differentiable(*(made.tensors[place] for place in sorted(outcome.constant)))
    ctx.set_materialize_grads(outcome.materializes)


def rebuilt(
    outcome: Outcome, given: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The given tensors and those made, of the ones in new memory."""
    tensors, waiting = list(given), iter(fresh)
    for made in outcome.made:
        if made.base is None:
            tensors.append(next(waiting))
        else:
            tensors.append(_sharing(tensors[made.base], made.spec))
    return tensors


def _sharing(base: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """What lies at `spec` from where `base` begins."""
    if replace(tensor_spec(base), offset=0) == spec:
        return base.detach()
    offset = base.storage_offset() + spec.offset if spec.offset else None
    return base.detach().as_strided(spec.shape, spec.stride, offset)


# Calls


def _forward_call(
    function: Opaque, args: Sequence[Any]
) -> tuple[OpaqueForward, list[torch.Tensor]]:
    """The call, and its tensors."""
    leaves, structure = pytree.tree_flatten(tuple(args))
    refs, tensors = with_refs(leaves)
    needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    names = _argument_names(function, len(args))
    written = [
        leaf
        for name, argument in zip(names, args, strict=True)
        for leaf in pytree.tree_leaves(argument)
        if name in function.mutates and isinstance(leaf, torch.Tensor)
    ]
    changed = tuple(i for i, t in enumerate(tensors) if any(t is w for w in written))
    call = OpaqueForward(
        function, refs, structure, Tensors.of(tensors), needs, changed, AutocastThere.here()
    )
    return call, tensors


def _argument_names(function: Opaque, count: int) -> list[str]:
    has_context = function.setup_context is None
    return _positional(function.forward, count + has_context)[has_context:]


def _positional(function: Callable[..., Any], count: int) -> list[str]:
    """What its first arguments are called; 'args[0]' where it takes any number of them."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "arguments")
    return [*names, *(f"{rest}[{i}]" for i in range(count))][:count]


def is_plain(leaf: Any) -> bool:
    """Can a call name it?"""
    # What a module or its method reads is another for a copy of the module.
    owner = getattr(leaf, "__self__", leaf)
    is_function = callable(leaf) and not isinstance(owner, nn.Module)
    return isinstance(leaf, _PLAIN) or is_function


def _backward_call(
    forward: Known,
    tensors: Mapping[int, torch.Tensor],
    gradients: Sequence[Any],
) -> tuple[OpaqueBackward, list[torch.Tensor]]:
    """The call, and its tensors. tensors: those of the forward that it saves, by place."""
    call = forward.call
    assert isinstance(call, OpaqueForward)
    outcome, function = forward.outcome, call.function
    kept = [taken(ref, tensors) for ref in outcome.saved]
    flat = [taken(leaf, tensors) for _, leaves, _ in forward.attributes for leaf in leaves]
    refs, given = with_refs([*kept, *flat, *gradients])
    waiting = iter(refs)
    saved_refs = tuple(next(waiting) for _ in kept)
    attributes = tuple(
        (name, tuple(next(waiting) for _ in leaves), tree)
        for name, leaves, tree in forward.attributes
    )
    gradient_refs = tuple(waiting)
    named = _backward_names(function, saved_refs, attributes, gradient_refs)
    unknown = [n for n in function.backward_mutates if n not in named]
    if unknown:
        raise InvalidInput(
            f"{function.called}.{function.backward_name} has no tensor '{unknown[0]}' to write "
            f"into: backward_mutates takes of {', '.join(named)}"
        )
    copied = {p for name in function.backward_mutates for p in named[name]}
    refs_saved = zip(saved_refs, outcome.saved, strict=True)
    need = {to.place for to, r in refs_saved if isinstance(r, Ref) and r.place in call.needing}
    backward = OpaqueBackward(
        forward=call,
        saved=saved_refs,
        attributes=attributes,
        gradients=gradient_refs,
        tensors=Tensors.of(given),
        need=tuple(sorted(need)),
        copied=tuple(sorted(copied)),
        surroundings=AutocastThere.here(),
    )
    return backward, given


def _backward_names(
    function: Opaque,
    saved: Sequence[Any],
    attributes: Sequence[tuple[str, tuple[Any, ...], Any]],
    gradients: Sequence[Any],
) -> dict[str, tuple[int, ...]]:
    """What can be named in `backward_mutates` -> places of its tensors."""
    named = [(f"saved_tensors[{i}]", (ref,)) for i, ref in enumerate(saved)]
    named += [(name, leaves) for name, leaves, _ in attributes]
    names = _positional(function.backward, 1 + len(gradients))[1:]
    named += [(name, (ref,)) for name, ref in zip(names, gradients, strict=True)]
    return {n: tuple(r.place for r in refs if isinstance(r, Ref)) for n, refs in named}


_NUMBERED: dict[str, list[Callable[[], Any]]] = {}
"""Name -> references to what has it, weak ones where that can be."""


def numbered(name: str, thing: Any) -> str:
    """Tells `thing` from others of that name, by identity."""
    known = _NUMBERED.setdefault(name, [])
    for number, reference in enumerate(known):
        if reference() is thing:
            return f"{name}#{number}"
    try:
        known.append(weakref.ref(thing))
    except TypeError:
        known.append(lambda: thing)
    return f"{name}#{len(known) - 1}"


def text_of(leaf: Any) -> str:
    """What tells it from others, the same in every process as far as that can be. A function that
    refers to nothing of its own, and a method, are made anew each time that a forward runs."""
    kind = type(leaf)
    if isinstance(leaf, (*_PLAIN, Ref)) and not isinstance(leaf, enum.Enum | type):
        return f"{text_of(kind)} {leaf!r}"
    if isinstance(leaf, types.MethodType):
        return f"{text_of(leaf.__func__)} of {text_of(leaf.__self__)}"
    is_named = isinstance(leaf, types.FunctionType | type)
    name = f"{(leaf if is_named else kind).__module__}.{(leaf if is_named else kind).__qualname__}"
    return numbered(name, leaf.__code__ if _is_code_alone(leaf) else leaf)


def _is_code_alone(leaf: Any) -> bool:
    """Is it a function that does what its code and the global variables of its file say?"""
    if not isinstance(leaf, types.FunctionType):
        return False
    of_its_own = leaf.__closure__, leaf.__defaults__, leaf.__kwdefaults__, leaf.__dict__
    file = sys.modules.get(leaf.__module__)
    return not any(of_its_own) and leaf.__globals__ is getattr(file, "__dict__", None)


def _differing(before: OpaqueForward | OpaqueBackward, call: OpaqueForward | OpaqueBackward) -> str:
    """What two calls of a forward are given that is not the same, by its class."""
    both = (c.leaves if isinstance(c, OpaqueForward) else c.forward.leaves for c in (before, call))
    differing = [type(b).__name__ for a, b in zip(*both, strict=False) if text_of(a) != text_of(b)]
    return f"a {differing[0]}" if differing else "tensors"


def key_of(call: OpaqueForward | OpaqueBackward) -> str:
    """Names a call: equal for those that do the same."""
    function = call.function
    if isinstance(call, OpaqueForward):
        said: list[Any] = ["forward", function.packet, text_of(function.fake)]
        said += [*map(text_of, call.leaves), str(call.structure), call.needs, call.changed]
        said += [function.backward_mutates]
    else:
        said = ["backward", key_of(call.forward), text_of(function.fake_backward)]
        said += [call.saved, call.gradients, call.need, call.copied]
        said += [(n, *map(text_of, leaves), str(tree)) for n, leaves, tree in call.attributes]
    said += [call.tensors, call.surroundings]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


# Made-up runs


def _found(call: OpaqueForward | OpaqueBackward, place: tuple[str, str]) -> OpaqueRun:
    """Run `call`, and remember its outcome."""
    is_fake = call.function.fake is not None
    undeclared: list[str] = []
    if is_fake:
        with FakeTensorMode():
            run = _run(call, _tensors_for(call, place), True, place)
            draws = bool(run.fresh())  # of what is declared nobody knows
    else:
        with _generators_restored(call):
            run, draws, undeclared = _real_run(call, _tensors_for(call, place), place)
    for made in run.outcome.made:
        base = None if made.base is None else tensor_spec(run.tensors[made.base])
        is_plain = not (made.spec.is_conj or made.spec.is_neg)
        if not is_plain or (base is not None and base.dtype != made.spec.dtype):
            raise NAMED["view by an opaque function"].at(*place, function=call.called)
    known = Known(call, run.outcome, run.results, run.structure, run.attributes, draws)
    if undeclared:
        _refuse_writes(known, run, undeclared, place)
    KNOWN[key_of(call)] = known
    return run


def _all_generator_states(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Also those of Python and of numpy, which other threads draw from as well: no plan looks."""
    of_numpy = pickle.dumps(numpy.random.get_state(legacy=False))
    return {**generator_states(tensors), "Python": random.getstate(), "numpy": of_numpy}


@contextlib.contextmanager
def _generators_restored(call: OpaqueForward | OpaqueBackward) -> Iterator[None]:
    """Afterwards generators are what they were: of devices, of Python, of numpy."""
    devices = {s.device for s in call.tensors.specs if s.device.startswith("cuda")}
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


def _real_run(
    call: OpaqueForward | OpaqueBackward, tensors: list[torch.Tensor], place: tuple[str, str]
) -> tuple[OpaqueRun, bool, list[str]]:
    """What it makes; does it draw? Names of what it writes into and was not declared."""
    declared = call.changed if isinstance(call, OpaqueForward) else ()
    before = [_bytes(t).clone() for t in tensors]
    states = _all_generator_states(tensors)
    run = _run(call, tensors, False, place)
    storages = {call.tensors.storages[i] for i in declared}
    written = {
        i
        for i, (tensor, content) in enumerate(zip(tensors, before, strict=True))
        if call.tensors.storages[i] not in storages and not torch.equal(_bytes(tensor), content)
    }
    drawn = moved(states, _all_generator_states(tensors))
    if not drawn <= {device_of_draws(run.fresh())}:
        raise NAMED["draws of an opaque function"].at(*place, function=call.called)
    return run, bool(drawn), _called(call, written)


def _run(
    call: OpaqueForward | OpaqueBackward,
    tensors: list[torch.Tensor],
    is_fake: bool,
    place: tuple[str, str],
) -> OpaqueRun:
    try:
        return call.run(tensors, is_fake)
    except RockplanError:
        raise
    except Exception as error:
        raise NAMED["run of an opaque function"].at(
            *place, function=call.called, error=f"{type(error).__name__}: {error}".rstrip(".")
        ) from error


def _called(call: OpaqueForward | OpaqueBackward, places: Iterable[int]) -> list[str]:
    """What tensors are called where writes into them are declared, each storage once."""
    if isinstance(call, OpaqueForward):
        names = _argument_names(call.function, len(call.args))
        named = {
            name: tuple(r.place for r in pytree.tree_leaves(argument) if isinstance(r, Ref))
            for name, argument in zip(names, call.args, strict=True)
        }
    else:
        named = _backward_names(call.function, call.saved, call.attributes, call.gradients)
    storages: dict[int, str] = {}
    for place in sorted(places):
        name = next(n for n, own in named.items() if place in own)
        storages.setdefault(call.tensors.storages[place], name)
    return list(dict.fromkeys(storages.values()))


def _refuse_writes(
    known: Known, run: OpaqueRun, undeclared: Sequence[str], place: tuple[str, str]
) -> NoReturn:
    """Raise, with a line that declares them; of a forward also what its backward writes into."""
    call = known.call
    if isinstance(call, OpaqueForward):
        of_backward: list[str] = []
        with contextlib.suppress(RockplanError), _generators_restored(call):
            likely = _likely_backward(known, run)
            of_backward = _real_run(likely, _tensors_for(likely, place), place)[2]
        line = call.function.line(undeclared, of_backward)
    else:
        line = call.function.line((), undeclared)
    raise NAMED["write of an opaque function"].at(
        *place, function=call.called, argument=undeclared[0], line=line
    )


def _tensors_for(
    call: OpaqueForward | OpaqueBackward, place: tuple[str, str]
) -> list[torch.Tensor]:
    """Made-up ones; of a backward those that a run of the forward saves, and gradients."""
    if isinstance(call, OpaqueForward):
        return _made_up(call.tensors)
    is_fake = call.function.fake is not None
    forward = call.forward
    run = _run(forward, _made_up(forward.tensors), is_fake, place)
    tensors: list[Any] = [None] * len(call.tensors.specs)
    refs = [*call.saved, *(leaf for _, leaves, _ in call.attributes for leaf in leaves)]
    made = [*run.outcome.saved, *(leaf for _, leaves, _ in run.attributes for leaf in leaves)]
    for to, ref in zip(refs, made, strict=True):
        if isinstance(to, Ref) and isinstance(ref, Ref):
            tensors[to.place] = run.tensors[ref.place].detach()
    waiting = [i for i, tensor in enumerate(tensors) if tensor is None]
    specs = tuple(call.tensors.specs[i] for i in waiting)
    sizes = tuple(call.tensors.sizes[i] for i in waiting)
    alone = Tensors(specs, tuple(range(len(specs))), sizes)
    for i, tensor in zip(waiting, _made_up(alone), strict=True):
        tensors[i] = tensor
    return tensors


def _likely_backward(known: Known, run: OpaqueRun) -> OpaqueBackward:
    """That all results get a gradient in new memory."""
    made = _result(_MadeByCall(known, run.tensors))
    results = made if isinstance(made, tuple) else (made,)
    gradients = [
        torch.zeros(r.shape, dtype=r.dtype, device=r.device)
        if isinstance(r, torch.Tensor)
        else None
        for r in results
    ]
    return _backward_call(known, dict(enumerate(run.tensors)), gradients)[0]


def _made_up(tensors: Tensors) -> list[torch.Tensor]:
    """Tensors of these specs, that share memory as they do: numbers in [0, 1), zeros where they are
    integers."""
    storages: dict[int, torch.UntypedStorage] = {}
    made: list[torch.Tensor] = []
    for spec, storage, size_bytes in zip(
        tensors.specs, tensors.storages, tensors.sizes, strict=True
    ):
        dtype, device = dtype_of(spec), torch.device(spec.device)
        if storage not in storages:
            elements = -(-size_bytes // dtype.itemsize)
            if dtype.is_floating_point or dtype.is_complex:
                flat = torch.rand(elements, device=device).to(dtype)
            else:
                flat = torch.zeros(elements, dtype=dtype, device=device)
            storages[storage] = flat.untyped_storage()
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(storages[storage], spec.offset, spec.shape, spec.stride)
        if spec.is_conj:
            tensor = tensor.conj()
        made.append(torch._neg_view(tensor) if spec.is_neg else tensor)
    return made


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of its storage."""
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))
