"""Opaque calls: how an opaque function is recorded.

A call about which nothing is known yet runs once on made-up numbers, to find out what it makes.
guarantees: what it writes into arguments is known; draws of random numbers are refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rockplan.errors import RockplanError
from rockplan.graph_builder.foreign import opaque
from rockplan.graph_builder.foreign.opaque_functions import (
    KNOWN,
    Known,
    Opaque,
    OpaqueBackward,
    OpaqueForward,
    backward_call,
    forward_call,
    is_plain,
    key_of,
)
from rockplan.graph_builder.foreign.outcomes import OpaqueRun, Ref, Tensors, rebuilt, taken
from rockplan.graph_builder.recorded.run import tensor_spec
from rockplan.graph_builder.recorded.specs import tensor_in, tensor_of
from rockplan.graph_builder.tracing.patches import Patch
from rockplan.graph_builder.tracing.recorder import Recorder
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.python_state.elements import EVERYBODYS, GENERATOR

_WHY = "it runs as a whole, on tensors that have memory, when the plan runs"


def patches() -> Iterator[Patch]:
    """Yield a patch for each member (forward, backward, setup_context) of each opaque function."""
    for kind, function in opaque.REGISTERED.items():
        recorded = _Recorded(function)
        yield Patch(kind, "forward", recorded.forward, _WHY)
        yield Patch(kind, function.backward_name, recorded.backward, _WHY)
        if function.setup_context is not None:
            yield Patch(kind, "setup_context", recorded.setup_context, _WHY)


_Made = tuple[Known, Sequence[torch.Tensor]]
"""A call in a recording: what is known of it, and its arguments, then its results."""


class _Recorded:
    """The members of an opaque function while a forward is recorded."""

    def __init__(self, function: Opaque) -> None:
        self._function = function
        self._last: list[_Made] = []

    def forward(self, original: Callable[..., Any], recorder: Recorder) -> Any:
        def forward(*given: Any) -> Any:
            if not recorder.is_active():
                return original(*given)
            if self._function.setup_context is not None:
                # Bind defaults as autograd does, which cannot see the original's signature here.
                bound = inspect.signature(self._function.forward).bind(*given)
                bound.apply_defaults()
                self._last = [self._call(bound.args, recorder)]
                return opaque.result_of(*self._last[0])
            ctx, *args = given
            self._refuse_subclass(ctx, recorder)
            made = self._call(args, recorder)
            _set_on_context(ctx, *made)
            return opaque.result_of(*made)

        return forward

    def setup_context(self, original: Callable[..., Any], recorder: Recorder) -> Any:
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            if not recorder.is_active():
                original(ctx, inputs, output)
                return
            self._refuse_subclass(ctx, recorder)
            _set_on_context(ctx, *self._last.pop())

        return setup_context

    def _refuse_subclass(self, ctx: Any, recorder: Recorder) -> None:
        kind = type(ctx)._forward_cls
        if kind is not self._function.kind:
            what = {"function": kind.__qualname__, "base": self._function.called}
            recorder.refuse_here(NAMED["subclass of an opaque function"].text(**what))

    def _call(self, args: Sequence[Any], recorder: Recorder) -> _Made:
        for leaf in pytree.tree_leaves(tuple(args)):
            if not (isinstance(leaf, torch.Tensor) or is_plain(leaf)):
                what = {"function": f"{self._function.called}.forward", "kind": type(leaf).__name__}
                recorder.refuse_here(NAMED["argument of an opaque function"].text(**what))
        call, tensors = forward_call(self._function, args)
        known = _known(call, recorder)
        changed = [tensors[i] for i in known.changed]
        fresh = self._function.operators.forward(known.kept(tensors), changed, key_of(call))
        return known, rebuilt(known.outcome, tensors, fresh)

    def backward(self, original: Callable[..., Any], recorder: Recorder) -> Any:
        def backward(ctx: Any, *gradients: Any) -> Any:
            if not recorder.is_active():
                return original(ctx, *gradients)
            self._refuse_subclass(ctx, recorder)
            forward, attributes = ctx._rockplan_kept
            refs = zip(forward.outcome.saved, ctx.saved_tensors, strict=True)
            saved = {ref.place: tensor for ref, tensor in refs if isinstance(ref, Ref)}
            call, tensors = backward_call(forward, attributes | saved, gradients)
            known = _known(call, recorder)
            fresh = self._function.operators.backward(tensors, key_of(call))
            made = rebuilt(known.outcome, known.kept(tensors), fresh)
            return opaque.result_of(known, made)

        return backward


def _known(call: OpaqueForward | OpaqueBackward, recorder: Recorder) -> Known:
    key = key_of(call)
    if key not in KNOWN:
        with torch.inference_mode(False), _disable_current_modes():
            KNOWN[key] = _found_out(call, recorder)
    return KNOWN[key]


def _set_on_context(ctx: Any, known: Known, tensors: Sequence[torch.Tensor]) -> None:
    # Saved tensors are kept by autograd itself.
    outcome = known.outcome
    places = {
        ref.place for _, leaves, _ in outcome.attributes for ref in leaves if isinstance(ref, Ref)
    }
    ctx._rockplan_kept = known, {p: tensors[p].detach() for p in sorted(places)}
    if outcome.saved:
        ctx.save_for_backward(*(taken(ref, tensors) for ref in outcome.saved))
    if outcome.dirty:
        ctx.mark_dirty(*(tensors[place] for place in sorted(outcome.dirty)))
    if outcome.constant:
        ctx.mark_non_differentiable(*(tensors[place] for place in sorted(outcome.constant)))
    ctx.set_materialize_grads(outcome.materializes)


# Trials: runs on made-up numbers; generators are put back


_CHECKING = (
    *("aten::_assert", "aten::bernoulli", "aten::binary_cross_entropy", "aten::embedding"),
    *("aten::_embedding", "aten::gather", "aten::index", "aten::_index", "aten::multinomial"),
    *("aten::nll_loss", "aten::put", "aten::scatter", "aten::take"),
)
"""Beginnings of names of operators that look at numbers: wrong ones end all use of a CUDA device by
this process."""


class _EndsBeforeChecks(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(_CHECKING):
            raise ValueError(f"{func} looks at made-up numbers")
        return func(*args, **(kwargs or {}))


class _Trial(NamedTuple):
    """A run on made-up tensors. written: places of those that it wrote into."""

    run: OpaqueRun
    written: set[int]
    has_drawn: bool


def _found_out(call: OpaqueForward | OpaqueBackward, recorder: Recorder) -> Known:
    """Run `call` on made-up tensors, a backward that writes into its arguments once more on copies
    of these. Refuses what a plan cannot do: draws, views of another kind."""
    below: set[int] = set()
    with _generators_restored(call):
        try:
            # Below 0, too, where a kernel may write that leaves the rest (and some cannot run).
            with contextlib.suppress(Exception), _EndsBeforeChecks():
                below = _tried(call, least=-1).written
            run, written, has_drawn = _tried(call, least=0)
            changed = tuple(sorted(written | below))
            if changed and isinstance(call, OpaqueBackward):
                run = call.run(_tensors_for(call, least=0), copied=changed)
        except RockplanError:
            raise
        except Exception as error:
            facts = {
                "function": call.called,
                "error": f"{type(error).__name__}: {error}".rstrip("."),
            }
            recorder.refuse_here(NAMED["run of an opaque function"].text(**facts))
    if has_drawn:
        recorder.refuse_here(NAMED["draws of an opaque function"].text(function=call.called))
    for made in run.outcome.made:
        base = None if made.base is None else tensor_spec(run.tensors[made.base])
        is_unmarked = not (made.spec.is_conj or made.spec.is_neg)
        if not is_unmarked or (base is not None and base.dtype != made.spec.dtype):
            recorder.refuse_here(NAMED["view by an opaque function"].text(function=call.called))
    return Known(call, run.outcome, run.results, run.structure, run.attributes, changed)


def _tried(call: OpaqueForward | OpaqueBackward, least: int) -> _Trial:
    tensors = _tensors_for(call, least)
    before = [_bytes(t).clone() for t in tensors]
    states = _all_generator_states(tensors)
    run = call.run(tensors)
    pairs = enumerate(zip(tensors, before, strict=True))
    written = {i for i, (t, content) in pairs if not torch.equal(_bytes(t), content)}
    has_drawn = _all_generator_states(tensors) != states
    return _Trial(run, written | run.written | run.outcome.dirty, has_drawn)


def _all_generator_states(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    # Plans do not check those of Python and numpy, from which other threads draw as well.
    others = {name: GENERATOR.read(one) for name, one in EVERYBODYS.items()}
    return {**opaque.generator_states(tensors), **others}


@contextlib.contextmanager
def _generators_restored(call: OpaqueForward | OpaqueBackward) -> Iterator[None]:
    devices = [torch.device(s.device) for s in call.tensors.specs]
    numbers = {d.index for d in devices if d.type == "cuda"}
    drawn = [torch.default_generator, *(torch.cuda.default_generators[i] for i in numbers)]
    states = [(one, one.get_state()) for one in drawn]
    others = [(one, GENERATOR.read(one)) for one in EVERYBODYS.values()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        for one, elements in others:
            GENERATOR.write(one, elements)


def _tensors_for(call: OpaqueForward | OpaqueBackward, least: int) -> list[torch.Tensor]:
    # For a backward those that a run of the forward saves, and made-up gradients.
    if isinstance(call, OpaqueForward):
        return _made_up(call.tensors, least)
    run = call.forward.run(_made_up(call.forward.tensors, least))
    tensors = _made_up(call.tensors, least)
    refs = [*call.saved, *(leaf for _, leaves, _ in call.attributes for leaf in leaves)]
    made = [*run.outcome.saved, *(leaf for _, leaves, _ in run.attributes for leaf in leaves)]
    for to, ref in zip(refs, made, strict=True):
        if isinstance(to, Ref) and isinstance(ref, Ref):
            tensors[to.place] = run.tensors[ref.place].detach()
    return tensors


def _made_up(tensors: Tensors, least: int) -> list[torch.Tensor]:
    """By place, sharing storages as they say: numbers in [least, 1), zeros for integers."""
    numbers = functools.partial(_numbers, least)
    storages: dict[int, torch.UntypedStorage] = {}
    made: list[torch.Tensor] = []
    of = zip(tensors.specs, tensors.storages, tensors.sizes, strict=True)
    for spec, storage, size_bytes in of:
        if storage not in storages:
            storages[storage] = tensor_of(spec, numbers, size_bytes).untyped_storage()
        made.append(tensor_in(storages[storage], spec))
    return made


def _numbers(least: int, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.empty(elements, device=device).uniform_(least, 1).to(dtype)
    return torch.zeros(elements, dtype=dtype, device=device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))
