"""Opaque calls: how an opaque function is recorded.

A recording that meets an unknown call ends with `UnknownCall`; the call runs once on made-up
numbers, to find out what it makes, and the forward is recorded again. guarantees: undeclared writes
into arguments, and draws that a plan could not repeat, are refused by name.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import RockplanError
from rockplan.graph_builder.foreign import opaque
from rockplan.graph_builder.foreign.opaque_functions import (
    KNOWN,
    Known,
    Opaque,
    OpaqueBackward,
    OpaqueForward,
    argument_names,
    backward_call,
    backward_names,
    forward_call,
    is_plain,
    key_of,
    text_of,
)
from rockplan.graph_builder.foreign.outcomes import OpaqueRun, Ref, Tensors, rebuilt, taken
from rockplan.graph_builder.recorded.run import tensor_spec
from rockplan.graph_builder.recorded.specs import tensor_in, tensor_of
from rockplan.graph_builder.tracing.patches import Interrupted, Patch, RecordingAccess
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.graph_builder.tracing.source_lines import Where
from rockplan.python_state.elements import EVERYBODYS, GENERATOR

_WHY = "it runs as a whole, on tensors that have memory, when the plan runs"


class UnknownCall(Interrupted):
    """Ends a recording at an opaque call about which nothing is known yet."""

    def __init__(self, call: OpaqueForward | OpaqueBackward, module: str, source: str) -> None:
        super().__init__(f"{call.called} is opaque", module_path=module, source=source)
        self.call = call

    def find_out(self, before: UnknownCall | None) -> None:
        """Run the call and remember its outcome in `KNOWN`. before: the unknown call that ended the
        recording before this one, None for the first. Raises CaptureError if the call fails, does
        what a plan cannot repeat, or has other arguments in each recording."""
        place = self.module_path or "", self.source or ""
        if before is not None and (key := key_of(before.call)) not in _MET:
            del KNOWN[key]
            calls = before.call, self.call
            both = (c.leaves if isinstance(c, OpaqueForward) else c.forward.leaves for c in calls)
            pairs = zip(*both, strict=False)
            other = next((type(b).__name__ for a, b in pairs if text_of(a) != text_of(b)), None)
            what = {"function": self.call.called, "what": f"a {other}" if other else "tensors"}
            raise NAMED["other call of an opaque function"].at(*place, **what)
        with torch.inference_mode(False), _disable_current_modes():
            run = find_out(self.call, place)
            is_real = self.call.function.fake is None
            if is_real and isinstance(self.call, OpaqueForward) and any(self.call.needs):
                # Most backward passes get these gradients, which saves every second recording.
                with contextlib.suppress(RockplanError):
                    likely = likely_backward(KNOWN[key_of(self.call)], run)
                    if key_of(likely) not in KNOWN:
                        find_out(likely, place)


def patches() -> Iterator[Patch]:
    """Yield a patch for each member (forward, backward, setup_context) of each opaque function."""
    for kind, function in opaque.REGISTERED.items():
        recorded = _Recorded(function)
        yield Patch(kind, "forward", recorded.forward, _WHY)
        yield Patch(kind, function.backward_name, recorded.backward, _WHY)
        if function.setup_context is not None:
            yield Patch(kind, "setup_context", recorded.setup_context, _WHY)


@dataclass(frozen=True, slots=True)
class _MadeByCall:
    """A call in a recording. tensors: its arguments, then its results."""

    known: Known
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What autograd's context keeps of a call for its backward. attributes: place -> tensor in
    attributes of the context. Saved tensors are kept by autograd itself."""

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
                # Bind defaults as autograd does, which cannot see the original's signature here.
                bound = inspect.signature(self._function.forward).bind(*given)
                bound.apply_defaults()
                self._last = [self._call(bound.args, access)]
                return opaque.result_of(self._last[0].known, self._last[0].tensors)
            ctx, *args = given
            self._refuse_subclass(ctx, access)
            made = self._call(args, access)
            _set_on_context(ctx, made)
            return opaque.result_of(made.known, made.tensors)

        return forward

    def setup_context(self, original: Callable[..., Any], access: RecordingAccess) -> Any:
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            if not access.is_active():
                original(ctx, inputs, output)
                return
            self._refuse_subclass(ctx, access)
            _set_on_context(ctx, self._last.pop())

        return setup_context

    def _refuse_subclass(self, ctx: Any, access: RecordingAccess) -> None:
        kind = type(ctx)._forward_cls
        if kind is not self._function.kind:
            what = {"function": kind.__qualname__, "base": self._function.called}
            access.refuse(NAMED["subclass of an opaque function"].text(**what))

    def _call(self, args: Sequence[Any], access: RecordingAccess) -> _MadeByCall:
        for leaf in pytree.tree_leaves(tuple(args)):
            if not (isinstance(leaf, torch.Tensor) or is_plain(leaf)):
                what = {"function": f"{self._function.called}.forward", "kind": type(leaf).__name__}
                access.refuse(NAMED["argument of an opaque function"].text(**what))
        call, tensors = forward_call(self._function, args)
        known = _known(call, access)
        read = [t for i, t in enumerate(tensors) if i not in call.changed]
        changed = [tensors[i] for i in call.changed]
        fresh = self._function.operators.forward(read, changed, key_of(call), known.draws)
        return _MadeByCall(known, rebuilt(known.outcome, tensors, fresh))

    def backward(self, original: Callable[..., Any], access: RecordingAccess) -> Any:
        def backward(ctx: Any, *gradients: Any) -> Any:
            if not access.is_active():
                return original(ctx, *gradients)
            self._refuse_subclass(ctx, access)
            kept: _Kept = ctx._rockplan_kept
            refs = zip(kept.known.outcome.saved, ctx.saved_tensors, strict=True)
            saved = {ref.place: tensor for ref, tensor in refs if isinstance(ref, Ref)}
            call, tensors = backward_call(kept.known, kept.attributes | saved, gradients)
            known = _known(call, access)
            fresh = self._function.operators.backward(tensors, key_of(call), known.draws)
            made = rebuilt(known.outcome, call.kept(tensors), fresh)
            return opaque.result_of(known, made)

        return backward


_MET: set[str] = set()
"""Keys of known calls that the recording has met."""


def _known(call: OpaqueForward | OpaqueBackward, access: RecordingAccess) -> Known:
    key = key_of(call)
    _MET.add(key) if key in KNOWN else _MET.discard(key)
    return KNOWN.get(key) or access.stop(UnknownCall(call, *access.place()))


def _set_on_context(ctx: Any, made: _MadeByCall) -> None:
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


# Trials: runs on made-up numbers, outside of a recording and of the module, so the function may
# have any effect on Python's state, which plans do not track; generators are put back


def find_out(call: OpaqueForward | OpaqueBackward, place: Where) -> OpaqueRun:
    """Run `call` on made-up tensors (fake ones if the function has a `fake`); remember its outcome
    in `KNOWN` and return the run. place: (module path, source line), for errors. Raises
    CaptureError for what a plan cannot do: undeclared writes, unknown draws, views of another
    kind."""
    is_fake = call.function.fake is not None
    undeclared: list[str] = []
    if is_fake:
        with FakeTensorMode():
            run = _run(call, _tensors_for(call, place), True, place)
            draws = bool(run.fresh())  # unknown for a function with `fake`, so assumed
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
    # Plans do not check those of Python and numpy, from which other threads draw as well.
    others = {name: GENERATOR.read(one) for name, one in EVERYBODYS.items()}
    return {**opaque.generator_states(tensors), **others}


@contextlib.contextmanager
def _generators_restored(call: OpaqueForward | OpaqueBackward) -> Iterator[None]:
    devices = {s.device for s in call.tensors.specs if s.device.startswith("cuda")}
    states = [(one, GENERATOR.read(one)) for one in EVERYBODYS.values()]
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            for one, state in states:
                GENERATOR.write(one, state)


def _real_run(
    call: OpaqueForward | OpaqueBackward, tensors: list[torch.Tensor], place: Where
) -> tuple[OpaqueRun, bool, list[str]]:
    """Return (the run, whether it drew random numbers, names of tensors that it wrote into without
    a declaration). Raises CaptureError for draws that a plan could not repeat."""
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
    drawn = opaque.moved(states, _all_generator_states(tensors))
    if not drawn <= {opaque.device_of_draws(run.fresh())}:
        raise NAMED["draws of an opaque function"].at(*place, function=call.called)
    return run, bool(drawn), _names_of_places(call, written)


def _run(
    call: OpaqueForward | OpaqueBackward, tensors: list[torch.Tensor], is_fake: bool, place: Where
) -> OpaqueRun:
    try:
        return call.run(tensors, is_fake)
    except RockplanError:
        raise
    except Exception as error:
        raise NAMED["run of an opaque function"].at(
            *place, function=call.called, error=f"{type(error).__name__}: {error}".rstrip(".")
        ) from error


def _names_of_places(call: OpaqueForward | OpaqueBackward, places: Iterable[int]) -> list[str]:
    """Return the names by which a user declares writes into tensors at `places`, one a storage."""
    if isinstance(call, OpaqueForward):
        names = argument_names(call.function, len(call.args))
        named = {
            name: tuple(r.place for r in pytree.tree_leaves(argument) if isinstance(r, Ref))
            for name, argument in zip(names, call.args, strict=True)
        }
    else:
        named = backward_names(call.function, call.saved, call.attributes, call.gradients)
    storages: dict[int, str] = {}
    for place in sorted(places):
        name = next(n for n, own in named.items() if place in own)
        storages.setdefault(call.tensors.storages[place], name)
    return list(dict.fromkeys(storages.values()))


def _refuse_writes(
    known: Known, run: OpaqueRun, undeclared: Sequence[str], place: Where
) -> NoReturn:
    """Raise CaptureError with the line that declares the writes, the backward's included if it can
    be tried. undeclared: names of tensors that the call writes into."""
    call = known.call
    if isinstance(call, OpaqueForward):
        of_backward: list[str] = []
        with contextlib.suppress(RockplanError), _generators_restored(call):
            likely = likely_backward(known, run)
            of_backward = _real_run(likely, _tensors_for(likely, place), place)[2]
        line = call.function.line(undeclared, of_backward)
    else:
        line = call.function.line((), undeclared)
    raise NAMED["write of an opaque function"].at(
        *place, function=call.called, argument=undeclared[0], line=line
    )


def _tensors_for(call: OpaqueForward | OpaqueBackward, place: Where) -> list[torch.Tensor]:
    # For a backward those that a run of the forward saves, and made-up gradients.
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


def likely_backward(known: Known, run: OpaqueRun) -> OpaqueBackward:
    """With a contiguous gradient in new memory for each result. run: of the forward."""
    made = opaque.result_of(known, run.tensors)
    results = made if isinstance(made, tuple) else (made,)
    gradients = [r.new_zeros(r.shape) if isinstance(r, torch.Tensor) else None for r in results]
    return backward_call(known, dict(enumerate(run.tensors)), gradients)[0]


def _made_up(tensors: Tensors) -> list[torch.Tensor]:
    """By place, sharing storages as they say: numbers in [0, 1), zeros for integers."""
    storages: dict[int, torch.UntypedStorage] = {}
    made: list[torch.Tensor] = []
    of = zip(tensors.specs, tensors.storages, tensors.sizes, strict=True)
    for spec, storage, size_bytes in of:
        if storage not in storages:
            storages[storage] = tensor_of(spec, _numbers, size_bytes).untyped_storage()
        made.append(tensor_in(storages[storage], spec))
    return made


def _numbers(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(elements, device=device).to(dtype)
    return torch.zeros(elements, dtype=dtype, device=device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))
