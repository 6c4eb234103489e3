"""Opaque functions and their calls.

A call holds everything that decides what it does but values of tensors, and runs on real or fake
ones.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.utils import _pytree as pytree

from rockplan.errors import InvalidInput
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
    mutates: tuple[str, ...]
    backward_mutates: tuple[str, ...]

    def line(self, mutates: Sequence[str], backward_mutates: Sequence[str]) -> str:
        """Return the line of source that declares the function, with these further writes."""
        written = {
            "mutates": (*self.mutates, *mutates),
            "backward_mutates": (*self.backward_mutates, *backward_mutates),
        }
        how = [f"{how}={names!r}" for how, names in written.items() if names]
        name = self.kind.__qualname__.replace("<locals>.", "")
        return f"rockplan.opaque({', '.join([name, *how])})"

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
    specs; needs: which arguments require a gradient; changed: places of tensors that it writes
    into."""

    function: Opaque
    leaves: tuple[Any, ...]
    structure: Any
    tensors: outcomes.Tensors
    needs: tuple[bool, ...]
    changed: tuple[int, ...]
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
        with _as_in_eager(self.autocast):
            if function.setup_context is None:
                result = function.forward(ctx, *args)
            else:
                result = function.forward(*args)
                function.setup_context(ctx, args, result)
        return outcomes.run_of(result, arguments, ctx)


@dataclass(frozen=True, slots=True)
class OpaqueBackward:
    """A call of a backward. saved, attributes, gradients: its arguments, tensors as Refs; need:
    places of saved tensors that require a gradient; copied: places of tensors that it writes into:
    it gets copies of them."""

    forward: OpaqueForward
    saved: tuple[Any, ...]
    attributes: outcomes.Attributes
    gradients: tuple[Any, ...]
    tensors: outcomes.Tensors
    need: tuple[int, ...]
    copied: tuple[int, ...]
    autocast: Autocast

    @property
    def function(self) -> Opaque:
        return self.forward.function

    @property
    def called(self) -> str:
        return f"{self.function.called}.{self.function.backward_name}"

    def run(self, tensors: Sequence[torch.Tensor]) -> outcomes.OpaqueRun:
        """Run the backward on `tensors` (by place); return the run, whose outcome refers to tensors
        that are not copied."""
        own = [t.clone() if i in self.copied else t.detach() for i, t in enumerate(tensors)]
        for place in self.need:
            own[place].requires_grad_()
        function, needs = self.function, self.forward.needs
        ctx = outcomes.Context(needs)
        ctx.saved_tensors = tuple(outcomes.taken(ref, own) for ref in self.saved)
        for name, leaves, structure in self.attributes:
            real = [outcomes.taken(leaf, own) for leaf in leaves]
            setattr(ctx, name, pytree.tree_unflatten(real, structure))
        gradients = [outcomes.taken(ref, own) for ref in self.gradients]
        kept = self.kept(own)
        with _as_in_eager(self.autocast):
            result = function.backward(ctx, *gradients)
        results = result if isinstance(result, tuple) else (result,)
        needed = (r if i >= len(needs) or needs[i] else None for i, r in enumerate(results))
        return outcomes.run_of(tuple(needed), kept, None)

    def kept(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that the backward gets without a copy; the outcome refers to them."""
        return [t for i, t in enumerate(given) if i not in self.copied]


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What a trial run found out about a call. results, structure, attributes: as in
    `OpaqueRun`."""

    call: OpaqueForward | OpaqueBackward
    outcome: outcomes.Outcome
    results: tuple[Any, ...]
    structure: Any
    attributes: outcomes.Attributes


KNOWN: dict[str, Known] = {}
"""Key of a call -> what is known of it."""


def forward_call(function: Opaque, args: Sequence[Any]) -> tuple[OpaqueForward, list[torch.Tensor]]:
    """Return (the forward call of `function(*args)`, Refs for tensors; its tensors by place)."""
    leaves, structure = pytree.tree_flatten(tuple(args))
    refs, tensors = outcomes.with_refs(leaves)
    needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    names = argument_names(function, len(args))
    written = [
        leaf
        for name, argument in zip(names, args, strict=True)
        for leaf in pytree.tree_leaves(argument)
        if name in function.mutates and isinstance(leaf, torch.Tensor)
    ]
    changed = tuple(i for i, t in enumerate(tensors) if any(t is w for w in written))
    call = OpaqueForward(
        function, refs, structure, outcomes.Tensors.of(tensors), needs, changed, autocast_state()
    )
    return call, tensors


def argument_names(function: Opaque, count: int) -> list[str]:
    """Return the names of the first `count` arguments of the forward, without the context."""
    has_context = function.setup_context is None
    return _positional(function.forward, count + has_context)[has_context:]


def _positional(function: Callable[..., Any], count: int) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "arguments")
    return [*names, *(f"{rest}[{i}]" for i in range(count))][:count]


def backward_call(
    forward: Known, tensors: Mapping[int, torch.Tensor], gradients: Sequence[Any]
) -> tuple[OpaqueBackward, list[torch.Tensor]]:
    """Return (the backward call after the forward `forward`, its distinct tensors by place).
    tensors: place -> tensor, for what the forward saved; gradients: incoming ones, None where there
    is none. Raises InvalidInput for a wrong name in backward_mutates."""
    call = forward.call
    assert isinstance(call, OpaqueForward)
    outcome, function = forward.outcome, call.function
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
    named = backward_names(function, saved_refs, attributes, gradient_refs)
    unknown = [n for n in function.backward_mutates if n not in named]
    if unknown:
        raise InvalidInput(
            f"{function.called}.{function.backward_name} has no tensor '{unknown[0]}' to write "
            f"into: backward_mutates takes of {', '.join(named)}"
        )
    copied = {p for name in function.backward_mutates for p in named[name]}
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
        copied=tuple(sorted(copied)),
        autocast=autocast_state(),
    )
    return backward, distinct


def backward_names(
    function: Opaque,
    saved: Sequence[Any],
    attributes: Sequence[tuple[str, tuple[Any, ...], Any]],
    gradients: Sequence[Any],
) -> dict[str, tuple[int, ...]]:
    """Name as in `backward_mutates` ('saved_tensors[0]', attribute, parameter) -> its places."""
    named = [(f"saved_tensors[{i}]", (ref,)) for i, ref in enumerate(saved)]
    named += [(name, leaves) for name, leaves, _ in attributes]
    names = _positional(function.backward, 1 + len(gradients))[1:]
    named += [(name, (ref,)) for name, ref in zip(names, gradients, strict=True)]
    return {n: tuple(r.place for r in refs if isinstance(r, outcomes.Ref)) for n, refs in named}


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
        parts += [*map(text_of, call.leaves), str(call.structure), call.needs, call.changed]
        parts += [function.backward_mutates]
    else:
        parts = ["backward", key_of(call.forward)]
        parts += [call.saved, call.gradients, call.need, call.copied]
        parts += [(n, *map(text_of, leaves), str(tree)) for n, leaves, tree in call.attributes]
    parts += [call.tensors, call.autocast]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
