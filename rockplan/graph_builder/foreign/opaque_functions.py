"""Opaque functions and their calls.

A call holds everything that decides what it does but values of tensors, and runs on real or fake
ones.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.utils import _pytree as pytree

from rockplan.graph_builder.foreign import outcomes
from rockplan.graph_builder.operators.rows import OPAQUE
from rockplan.python_state.autocast import Autocast, autocast_state, under_autocast

# Dispatch keys of autograd, which are excluded while the kernel of an operator runs.
_KEYS = [k for k in torch._C.DispatchKey.__members__ if k.startswith(("Autograd", "ADInplace"))]


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """One registered function. backward_name: 'backward', or 'vjp' if it has that; packet: name of
    its operators; others: as in `opaque`."""

    kind: type[Function]
    called: str
    packet: str
    forward: Callable[..., Any]
    setup_context: Callable[..., Any] | None
    backward: Callable[..., Any]
    backward_name: str

    @property
    def operators(self) -> Any:
        return getattr(getattr(torch.ops, OPAQUE), self.packet)


@contextlib.contextmanager
def _as_in_eager(autocast: Autocast) -> Iterator[None]:
    # Eager records no gradients in an autograd.Function, but autograd's kernels are available if it
    # turns them on.
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in _KEYS:
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    guard = torch._C._ForceDispatchKeyGuard(include, exclude)
    with guard, torch.no_grad(), under_autocast(autocast):
        yield


@dataclass(frozen=True, slots=True)
class OpaqueForward:
    """A call of a forward. leaves, structure: of its arguments, tensors as Refs; tensors: their
    specs; needs: which arguments require a gradient."""

    function: Opaque
    leaves: tuple[Any, ...]
    structure: Any
    tensors: outcomes.Tensors
    needs: tuple[bool, ...]
    autocast: Autocast

    @property
    def called(self) -> str:
        return f"{self.function.called}.forward"

    @property
    def args(self) -> tuple[Any, ...]:
        """Return the arguments, with Refs for tensors."""
        args: tuple[Any, ...] = pytree.tree_unflatten(list(self.leaves), self.structure)
        return args

    @property
    def needing(self) -> frozenset[int]:
        """Return the places of the tensors that require a gradient."""
        return frozenset(a.place for a, n in zip(self.args, self.needs, strict=True) if n)

    def run(self, tensors: Sequence[torch.Tensor]) -> outcomes.OpaqueRun:
        """Run the forward on `tensors` (by place); return the run."""
        arguments = [t.detach() for t in tensors]
        for place in self.needing:
            arguments[place].requires_grad_()
        args = pytree.tree_unflatten(
            [outcomes.taken(x, arguments) for x in self.leaves], self.structure
        )
        ctx, function = outcomes.Context(self.needs), self.function
        before = _versions(arguments)
        with _as_in_eager(self.autocast):
            if function.setup_context is None:
                result = function.forward(ctx, *args)
            else:
                result = function.forward(*args)
                function.setup_context(ctx, args, result)
        run = outcomes.run_of(result, arguments, ctx)
        return replace(run, written=_written(arguments, before))


@dataclass(frozen=True, slots=True)
class OpaqueBackward:
    """A call of a backward. saved, attributes, gradients: its arguments, tensors as Refs; need:
    places of saved tensors that require a gradient."""

    forward: OpaqueForward
    saved: tuple[Any, ...]
    attributes: outcomes.Attributes
    gradients: tuple[Any, ...]
    tensors: outcomes.Tensors
    need: tuple[int, ...]
    autocast: Autocast

    @property
    def function(self) -> Opaque:
        return self.forward.function

    @property
    def called(self) -> str:
        return f"{self.function.called}.{self.function.backward_name}"

    def run(
        self, tensors: Sequence[torch.Tensor], copied: Collection[int] = ()
    ) -> outcomes.OpaqueRun:
        """Run the backward on `tensors` (by place); return the run, whose outcome refers to tensors
        that are not copied. copied: places of tensors of which it gets copies."""
        own = [t.clone() if i in copied else t.detach() for i, t in enumerate(tensors)]
        for place in self.need:
            own[place].requires_grad_()
        function, needs = self.function, self.forward.needs
        ctx = outcomes.Context(needs)
        ctx.saved_tensors = tuple(outcomes.taken(ref, own) for ref in self.saved)
        for name, leaves, structure in self.attributes:
            real = [outcomes.taken(leaf, own) for leaf in leaves]
            setattr(ctx, name, pytree.tree_unflatten(real, structure))
        gradients = [outcomes.taken(ref, own) for ref in self.gradients]
        kept = [t for i, t in enumerate(own) if i not in copied]
        before = _versions(own)
        with _as_in_eager(self.autocast):
            result = function.backward(ctx, *gradients)
        results = result if isinstance(result, tuple) else (result,)
        needed = (r if i >= len(needs) or needs[i] else None for i, r in enumerate(results))
        run = outcomes.run_of(tuple(needed), kept, None)
        return replace(run, written=_written(own, before) - {*copied})


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    # Tensors of inference count none.
    return [0 if t.is_inference() else t._version for t in tensors]


def _written(tensors: Sequence[torch.Tensor], before: Sequence[int]) -> frozenset[int]:
    pairs = enumerate(zip(before, _versions(tensors), strict=True))
    return frozenset(place for place, (was, version) in pairs if was != version)


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What a trial run found out about a call. results, structure, attributes: as in `OpaqueRun`;
    changed: places of tensors that it writes into; a backward gets copies of these."""

    call: OpaqueForward | OpaqueBackward
    outcome: outcomes.Outcome
    results: tuple[Any, ...]
    structure: Any
    attributes: outcomes.Attributes
    changed: tuple[int, ...]

    def run(self, tensors: Sequence[torch.Tensor]) -> outcomes.OpaqueRun:
        """Run the call on `tensors`, by place."""
        if isinstance(self.call, OpaqueBackward):
            return self.call.run(tensors, self.changed)
        return self.call.run(tensors)

    def kept(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that a backward gets without a copy; the outcome refers to them."""
        return [t for i, t in enumerate(given) if i not in self.changed]


KNOWN: dict[str, Known] = {}
"""Key of a call -> what is known of it."""


def forward_call(function: Opaque, args: Sequence[Any]) -> tuple[OpaqueForward, list[torch.Tensor]]:
    """Return (the forward call of `function(*args)`, Refs for tensors; its tensors by place)."""
    leaves, structure = pytree.tree_flatten(tuple(args))
    refs, tensors = outcomes.with_refs(leaves)
    needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    described = outcomes.Tensors.of(tensors)
    call = OpaqueForward(function, refs, structure, described, needs, autocast_state())
    return call, tensors


def backward_call(
    forward: Known, tensors: Mapping[int, torch.Tensor], gradients: Sequence[Any]
) -> tuple[OpaqueBackward, list[torch.Tensor]]:
    """Return (the backward call after the forward `forward`, its distinct tensors by place).
    tensors: place -> tensor, for what the forward saved; gradients: incoming ones, None where there
    is none."""
    call = forward.call
    assert isinstance(call, OpaqueForward)
    outcome = forward.outcome
    kept = [outcomes.taken(ref, tensors) for ref in outcome.saved]
    flat = [outcomes.taken(leaf, tensors) for _, leaves, _ in forward.attributes for leaf in leaves]
    refs, distinct = outcomes.with_refs([*kept, *flat, *gradients])
    waiting = iter(refs)
    saved_refs = tuple(next(waiting) for _ in kept)
    attributes = tuple(
        (name, tuple(next(waiting) for _ in leaves), tree)
        for name, leaves, tree in forward.attributes
    )
    gradient_refs = tuple(waiting)
    refs_saved = zip(saved_refs, outcome.saved, strict=True)
    need = {
        to.place for to, r in refs_saved if isinstance(r, outcomes.Ref) and r.place in call.needing
    }
    backward = OpaqueBackward(
        forward=call,
        saved=saved_refs,
        attributes=attributes,
        gradients=gradient_refs,
        tensors=outcomes.Tensors.of(distinct),
        need=tuple(sorted(need)),
        autocast=autocast_state(),
    )
    return backward, distinct


_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, type),
)


def is_plain(leaf: Any) -> bool:
    """Return whether the key of a call can describe `leaf`, one of its arguments."""
    # Modules and their methods cannot: what they read differs for a copy of the module.
    owner = getattr(leaf, "__self__", leaf)
    is_function = callable(leaf) and not isinstance(owner, nn.Module)
    return isinstance(leaf, _PLAIN) or is_function


_NUMBERED: dict[str, list[Callable[[], Any]]] = {}
"""Name -> references (weak if possible) to the objects of that name."""


def numbered(name: str, thing: Any) -> str:
    """Return a text that tells `thing` from other objects of that name by identity, such as
    'name#1'. Objects are numbered in the order in which they are met in this process."""
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
    """Return a text that identifies an argument that is no tensor, equal in every process as far as
    possible. A function that refers to nothing but globals is identified by its code, and a method
    by function and owner, since both may be new objects in each run of a forward."""
    kind = type(leaf)
    if isinstance(leaf, (*_PLAIN, outcomes.Ref)) and not isinstance(leaf, enum.Enum | type):
        return f"{text_of(kind)} {leaf!r}"
    if isinstance(leaf, types.MethodType):
        return f"{text_of(leaf.__func__)} of {text_of(leaf.__self__)}"
    is_named = isinstance(leaf, types.FunctionType | type)
    name = f"{(leaf if is_named else kind).__module__}.{(leaf if is_named else kind).__qualname__}"
    return numbered(name, leaf.__code__ if _is_code_alone(leaf) else leaf)


def _is_code_alone(leaf: Any) -> bool:
    if not isinstance(leaf, types.FunctionType):
        return False
    of_its_own = leaf.__closure__, leaf.__defaults__, leaf.__kwdefaults__, leaf.__dict__
    file = sys.modules.get(leaf.__module__)
    return not any(of_its_own) and leaf.__globals__ is getattr(file, "__dict__", None)


def key_of(call: OpaqueForward | OpaqueBackward) -> str:
    """Return a key of 16 digits that is equal for calls that do the same."""
    function = call.function
    if isinstance(call, OpaqueForward):
        parts: list[Any] = ["forward", function.packet]
        parts += [*map(text_of, call.leaves), str(call.structure), call.needs]
    else:
        parts = ["backward", key_of(call.forward)]
        parts += [call.saved, call.gradients, call.need]
        parts += [(n, *map(text_of, leaves), str(tree)) for n, leaves, tree in call.attributes]
    parts += [call.tensors, call.autocast]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
