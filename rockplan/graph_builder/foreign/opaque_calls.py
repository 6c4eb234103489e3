"""Opaque calls: how an opaque function is recorded.

A recording that meets an unknown call ends with `UnknownCall`; the call runs once
(`opaque_trials`), and the forward is recorded again.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import RockplanError
from rockplan.graph_builder.foreign.opaque import REGISTERED, result_of
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
    text_of,
)
from rockplan.graph_builder.foreign.opaque_trials import find_out, likely_backward
from rockplan.graph_builder.foreign.outcomes import Ref, rebuilt, taken
from rockplan.graph_builder.tracing.patches import Interrupted, Patch, RecordingAccess
from rockplan.graph_builder.tracing.refusals import NAMED

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
            what = {"function": self.call.called, "what": _differing(before.call, self.call)}
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
    for kind, function in REGISTERED.items():
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

    def result(self) -> Any:
        return result_of(self.known, self.tensors)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What autograd's context keeps of a call for its backward. attributes: place -> tensor in
    attributes of the context. Saved tensors are kept by autograd itself: kept here, results would
    never die."""

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
                return self._last[0].result()
            ctx, *args = given
            self._refuse_subclass(ctx, access)
            made = self._call(args, access)
            _set_on_context(ctx, made)
            return made.result()

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
        """Record a call of the forward operator; return it. Ends the recording if the call is
        unknown, or has an argument that no key describes."""
        for leaf in pytree.tree_leaves(tuple(args)):
            if not (isinstance(leaf, torch.Tensor) or is_plain(leaf)):
                what = {"function": f"{self._function.called}.forward", "kind": type(leaf).__name__}
                access.refuse(NAMED["argument of an opaque function"].text(**what))
        call, tensors = forward_call(self._function, args)
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
            call, tensors = backward_call(kept.known, kept.attributes | saved, gradients)
            known = _known(call, access)
            operator = self._function.backward_operator
            fresh = operator(tensors, key_of(call), known.draws)
            made = rebuilt(known.outcome, call.kept(tensors), fresh)
            return result_of(known, made)

        return backward


_MET: set[str] = set()
"""Keys of known calls that the recording has met."""


def _known(call: OpaqueForward | OpaqueBackward, access: RecordingAccess) -> Known:
    """Return what is known of a call; end the recording if that is nothing."""
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


def _differing(before: OpaqueForward | OpaqueBackward, call: OpaqueForward | OpaqueBackward) -> str:
    """Return in words the class of the first argument that differs between two calls (of backwards:
    between their forwards); 'tensors' if no plain argument does."""
    both = (c.leaves if isinstance(c, OpaqueForward) else c.forward.leaves for c in (before, call))
    differing = [type(b).__name__ for a, b in zip(*both, strict=False) if text_of(a) != text_of(b)]
    return f"a {differing[0]}" if differing else "tensors"
