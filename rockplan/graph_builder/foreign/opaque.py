"""Opaque functions: an autograd.Function that runs for real, as two calls of a plan.

takes: an autograd.Function, or a function and its backward. returns: the same. guarantees: outside
of recordings it does what it did before. While a forward is recorded, its forward and its backward
are a call each of an operator of ours, which takes and makes tensors and names the rest by a key
(`opaque_calls`); what the context saves is a result of the first and an argument of the second, so
a plan may drop it and run the forward again.

A call with a key is known by its outcome: what it returns, saves, and sets on the context, as specs
and as places of tensors that are one or share memory. Each run has to have the outcome of the one
that was recorded, or raises.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, _is_setup_context_defined
from torch.utils import _pytree as pytree

from rockplan.errors import InvalidInput, StalePlan, UnsupportedModel
from rockplan.graph_builder.operators.rows import OPAQUE
from rockplan.graph_builder.recorded.run import tensor_spec
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.python_state.contents import described
from rockplan.python_state.reach import NOT_FOLLOWED
from rockplan.values.graph import TensorSpec

LIBRARY = torch.library.Library(OPAQUE, "DEF")
_DRAWS = (torch.Tag.nondeterministic_seeded,)
_FORWARD = "(Tensor[] given, Tensor(a!)[] changed, str call, bool draws) -> Tensor[]"
_BACKWARD = "(Tensor[] given, str call, bool draws) -> Tensor[]"
# Of autograd, which an operator's kernel runs without.
_KEYS = [k for k in torch._C.DispatchKey.__members__ if k.startswith(("Autograd", "ADInplace"))]


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """One function, as it was registered. declared: what `opaque` was given, as it is written;
    backward_name: 'vjp' if it has that; packet: its name among our operators."""

    kind: type[Function]
    declared: str
    called: str
    packet: str
    forward: Callable[..., Any]
    setup_context: Callable[..., Any] | None
    backward: Callable[..., Any]
    backward_name: str
    fake: Callable[..., Any] | None
    fake_backward: Callable[..., Any] | None
    mutates: tuple[str, ...]
    backward_mutates: tuple[str, ...]

    def line(self, mutates: Sequence[str], backward_mutates: Sequence[str]) -> str:
        """The line that declares these as well, beside what it was declared with."""
        written = {
            "mutates": (*self.mutates, *mutates),
            "backward_mutates": (*self.backward_mutates, *backward_mutates),
        }
        how = [f"{how}={names!r}" for how, names in written.items() if names]
        how += [f"{n}=..." for n in ("fake", "fake_backward") if getattr(self, n) is not None]
        return f"rockplan.opaque({', '.join([self.declared, *how])})"

    @property
    def forward_operator(self) -> Any:
        return getattr(getattr(torch.ops, OPAQUE), self.packet).forward

    @property
    def backward_operator(self) -> Any:
        return getattr(getattr(torch.ops, OPAQUE), self.packet).backward


REGISTERED: dict[type[Function], Opaque] = {}
_PACKETS: Counter[str] = Counter()


def opaque(
    function: Any = None,
    /,
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    fake: Callable[..., Any] | None = None,
    fake_backward: Callable[..., Any] | None = None,
    mutates: Sequence[str] = (),
    backward_mutates: Sequence[str] = (),
) -> Any:
    """Plan `function` as a whole: it runs for real, and plans know what it takes and makes.

    function: a subclass of torch.autograd.Function, which is returned as it is, or a function of
    positional arguments with its `backward(ctx, *gradients)` and, to save tensors for that,
    `setup_context(ctx, inputs, output)`. Usable as a decorator.
    fake, fake_backward: in place of forward and backward where neither can run on made-up numbers
    (in [0, 1), zeros where they are integers): the same on tensors without memory,
    `fake(ctx, *args)` also saves what forward saves. Without `fake_backward`, gradients are
    contiguous tensors of the shapes and dtypes of the arguments.
    mutates: names of arguments of the forward that it writes into; backward_mutates: names of
    gradients of the backward, 'saved_tensors[0]', and of attributes of the context.

    Raises InvalidInput.
    """
    how: dict[str, Any] = {
        "fake": fake,
        "fake_backward": fake_backward,
        "mutates": mutates,
        "backward_mutates": backward_mutates,
    }
    if function is None:
        return lambda f: opaque(f, backward=backward, setup_context=setup_context, **how)
    if isinstance(function, type) and issubclass(function, Function):
        if backward or setup_context:
            raise InvalidInput(f"{function.__qualname__} has a backward of its own; pass none")
        _register(function, _name(function).replace("<locals>.", ""), **how)
        return function
    if isinstance(function, type) or not callable(function):
        raise InvalidInput(
            f"rockplan.opaque takes a subclass of torch.autograd.Function, or a function; "
            f"got {function!r}"
        )
    if backward is None:
        raise InvalidInput(
            f"rockplan.opaque needs the backward of {_name(function)}: pass "
            "backward=function(ctx, *gradients)"
        )
    return _with_backward(function, backward, setup_context, how)


def _with_backward(
    function: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., Any] | None,
    how: Mapping[str, Any],
) -> Callable[..., Any]:
    """`function` as an autograd.Function, behind a function."""
    members = {
        "__module__": function.__module__,
        "__qualname__": _name(function),
        "forward": staticmethod(function),
        "setup_context": staticmethod(setup_context or _saves_nothing),
        "backward": staticmethod(backward),
    }
    kind: Any = type(_name(function), (Function,), members)
    saving = "" if setup_context is None else ", setup_context=..."
    _register(kind, f"{_name(function)}, backward=...{saving}", **how)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            raise InvalidInput(f"{_name(function)} has arguments that can be given by name alone")
        return kind.apply(*bound.args)

    NOT_FOLLOWED[id(apply)] = apply
    return apply


def _saves_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """For a backward that needs nothing of the forward."""


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _register(
    kind: type[Function],
    declared: str,
    fake: Callable[..., Any] | None,
    fake_backward: Callable[..., Any] | None,
    mutates: Sequence[str],
    backward_mutates: Sequence[str],
) -> None:
    called = f"{kind.__module__}.{_name(kind)}".replace("<locals>.", "")
    if getattr(kind, "boxed_grads_call", False):
        raise InvalidInput(f"{called} takes its gradients in one list, which is not supported")
    if isinstance(mutates, str) or isinstance(backward_mutates, str):
        raise InvalidInput(f"{called}: mutates and backward_mutates are tuples of names")
    if fake_backward is not None and fake is None:
        raise InvalidInput(f"{called}: fake_backward needs fake, which saves what it takes")
    has_setup = _is_setup_context_defined(kind.setup_context)
    parameters = list(inspect.signature(kind.forward).parameters.values())[not has_setup :]
    for name in mutates:
        named = [f"{p.name}[...]" if p.kind is p.VAR_POSITIONAL else p.name for p in parameters]
        if re.sub(r"\[\d+\]$", "[...]", name) not in named:
            raise InvalidInput(
                f"{called} has no argument '{name}' to write into: mutates takes of "
                f"{', '.join(named)}"
            )
    NOT_FOLLOWED[id(kind)] = kind
    before = REGISTERED.get(kind)
    backward_name = "vjp" if kind.vjp is not Function.vjp else "backward"
    REGISTERED[kind] = Opaque(
        kind=kind,
        declared=declared,
        called=called,
        packet=before.packet if before else _operators_of(kind),
        forward=kind.forward,
        setup_context=kind.setup_context if has_setup else None,
        backward=getattr(kind, backward_name),
        backward_name=backward_name,
        fake=fake,
        fake_backward=fake_backward,
        mutates=tuple(mutates),
        backward_mutates=tuple(backward_mutates),
    )


def new_packet(name: str) -> str:
    """A name for operators that stand for what is called `name`."""
    stem = re.sub(r"\W+", "_", name.replace("<locals>.", ""))
    _PACKETS[stem] += 1
    return stem if _PACKETS[stem] == 1 else f"{stem}__{_PACKETS[stem]}"


def _operators_of(kind: type[Function]) -> str:
    """Define the two operators of a function, under its name."""
    packet = new_packet(_name(kind))
    for name, schema, run in (
        (f"{packet}.forward", _FORWARD, _run_forward),
        (f"{packet}.backward", _BACKWARD, _run_backward),
    ):
        LIBRARY.define(name + schema, tags=_DRAWS)
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{OPAQUE}::{name}", _made_as_known, lib=LIBRARY)
    return packet


# Tensors that calls are given, and what they make of them


@dataclass(frozen=True, slots=True)
class Tensors:
    """Distinct tensors: for each its spec, the first one on its storage, and the bytes of that."""

    specs: tuple[TensorSpec, ...]
    storages: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Tensors:
        places = [t.untyped_storage()._cdata for t in tensors]
        return cls(
            tuple(map(tensor_spec, tensors)),
            tuple(map(places.index, places)),
            tuple(int(t.untyped_storage().nbytes()) for t in tensors),
        )


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor among the arguments of a call, by its place among the distinct ones."""

    place: int


def taken(leaf: Any, tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> Any:
    """The tensor that `leaf` refers to, or itself."""
    return tensors[leaf.place] if isinstance(leaf, Ref) else leaf


def with_refs(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """`leaves` with places of tensors, and the distinct tensors."""
    numbers: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in numbers:
            numbers[id(leaf)] = len(tensors)
            tensors.append(leaf)
    refs = (Ref(numbers[id(x)]) if isinstance(x, torch.Tensor) else x for x in leaves)
    return tuple(refs), tensors


@dataclass(frozen=True, slots=True)
class MadeByRun:
    """A tensor of an outcome. base: that it shares memory with, among the given ones and those of
    the outcome before it, from whose beginning the offset of `spec` counts; None: it has new
    memory, of `size_bytes`."""

    spec: TensorSpec
    base: int | None
    size_bytes: int


Attributes = tuple[tuple[str, tuple[Any, ...], Any], ...]
"""Of a context: name, leaves and structure of each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call makes. made: tensors that it was not given; the rest refers to these, and to the
    given ones, which come first. results, saved, attributes: places of tensors, and what else
    there is, described; structure: of the results; dirty, constant: places of tensors that the
    context was told of."""

    made: tuple[MadeByRun, ...]
    results: tuple[Any, ...]
    structure: str
    saved: tuple[Any, ...] = ()
    attributes: Attributes = ()
    dirty: frozenset[int] = frozenset()
    constant: frozenset[int] = frozenset()
    materializes: bool = True

    def differs(self, other: Outcome) -> str:
        """Where two outcomes differ, in words."""
        if self.attributes != other.attributes:
            a, b = ({name: rest for name, *rest in o.attributes} for o in (self, other))
            names = sorted(n for n in a.keys() | b.keys() if a.get(n) != b.get(n))
            return f"sets {', '.join(f'ctx.{n}' for n in names)} to something else"
        if self.structure != other.structure:
            return "returns another number of results"
        if self.saved != other.saved:
            return "saves other tensors"
        return "makes tensors of other shapes, strides, dtypes or memory, or None elsewhere"


class Context(FunctionCtx):
    """What a function gets for its `ctx` where it runs for real."""

    saved_tensors: tuple[Any, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad


_OF_AUTOGRAD = {
    *("needs_input_grad", "saved_tensors", "to_save", "dirty_tensors", "non_differentiable"),
    *("materialize_grads", "saved_for_forward"),
}


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueRun:
    """What one run has made. tensors: those given and those made; results, structure, attributes:
    as in the outcome, with the things themselves in place of their descriptions."""

    outcome: Outcome
    tensors: tuple[torch.Tensor, ...]
    results: tuple[Any, ...]
    structure: Any
    attributes: Attributes = ()

    def fresh(self) -> list[torch.Tensor]:
        """The tensors in new memory: what the operator returns."""
        first = len(self.tensors) - len(self.outcome.made)
        pairs = zip(self.tensors[first:], self.outcome.made, strict=True)
        return [t.detach() if t.requires_grad else t for t, made in pairs if made.base is None]


class _Finder:
    """Gives each tensor of an outcome its place."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.tensors = list(given)
        self.made: list[MadeByRun] = []

    def place(self, leaf: Any) -> Any:
        """A Ref; or what else it is, described."""
        if not isinstance(leaf, torch.Tensor):
            return described(leaf)
        for place, tensor in enumerate(self.tensors):
            if tensor is leaf:
                return Ref(place)
        storage = leaf.untyped_storage()
        shared = [t.untyped_storage()._cdata == storage._cdata for t in self.tensors]
        base = shared.index(True) if any(shared) else None
        spec, size_bytes = tensor_spec(leaf), int(storage.nbytes())
        if base is not None:
            begin = int(self.tensors[base].storage_offset())
            spec, size_bytes = replace(spec, offset=spec.offset - begin), 0
        self.made.append(MadeByRun(spec, base, size_bytes))
        self.tensors.append(leaf)
        return Ref(len(self.tensors) - 1)

    def places(self, told: Sequence[Any] | None) -> frozenset[int]:
        refs = (self.place(t) for t in told or () if isinstance(t, torch.Tensor))
        return frozenset(ref.place for ref in refs)


def run_of(result: Any, given: Sequence[torch.Tensor], ctx: Context | None) -> OpaqueRun:
    """What a call has made. ctx: that of a forward."""
    finder = _Finder(given)
    leaves, structure = pytree.tree_flatten(result)
    results = tuple(map(finder.place, leaves))
    told = {} if ctx is None else vars(ctx)
    saved = tuple(map(finder.place, told.get("to_save") or ()))
    flat = {n: pytree.tree_flatten(told[n]) for n in sorted(told.keys() - _OF_AUTOGRAD)}
    places = {name: tuple(map(finder.place, tensors)) for name, (tensors, _) in flat.items()}
    dirty, constant = (finder.places(told.get(n)) for n in ("dirty_tensors", "non_differentiable"))
    outcome = Outcome(
        made=tuple(finder.made),
        results=results,
        structure=str(structure),
        saved=saved,
        attributes=tuple((n, tensors, str(flat[n][1])) for n, tensors in places.items()),
        dirty=dirty,
        constant=constant,
        materializes=bool(told.get("materialize_grads", True)),
    )
    return OpaqueRun(
        outcome,
        tuple(finder.tensors),
        _themselves(results, leaves),
        structure,
        tuple((n, _themselves(places[n], tensors), tree) for n, (tensors, tree) in flat.items()),
    )


def _themselves(places: Sequence[Any], leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Places of tensors, and what else there is."""
    pairs = zip(places, leaves, strict=True)
    return tuple(p if isinstance(leaf, torch.Tensor) else leaf for p, leaf in pairs)


# Calls


@dataclass(frozen=True, slots=True)
class AutocastThere:
    """Autocast as it is around a call: for each kind of device that has it, its dtype."""

    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def here(cls) -> AutocastThere:
        kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
        return cls(tuple((k, torch.get_autocast_dtype(k)) for k in kinds))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """As in an autograd.Function in eager execution: no gradients are recorded, and all kernels
        of autograd are there for who turns that on."""
        include = torch._C._dispatch_tls_local_include_set()
        exclude = torch._C._dispatch_tls_local_exclude_set()
        for key in _KEYS:
            exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
        kinds = dict(self.autocast)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._C._ForceDispatchKeyGuard(include, exclude))
            stack.enter_context(torch.no_grad())
            for kind in ("cpu", "cuda"):
                if kind in kinds or torch.is_autocast_enabled(kind):
                    on = kind in kinds
                    stack.enter_context(torch.autocast(kind, kinds.get(kind), enabled=on))
            yield


@dataclass(frozen=True, slots=True)
class OpaqueForward:
    """A call of a forward. leaves, structure: of its arguments; needs: which of them need a
    gradient; changed: places of tensors that it writes into."""

    function: Opaque
    leaves: tuple[Any, ...]
    structure: Any
    tensors: Tensors
    needs: tuple[bool, ...]
    changed: tuple[int, ...]
    surroundings: AutocastThere

    @property
    def called(self) -> str:
        return f"{self.function.called}.forward"

    @property
    def args(self) -> tuple[Any, ...]:
        """With places of tensors."""
        args: tuple[Any, ...] = pytree.tree_unflatten(list(self.leaves), self.structure)
        return args

    @property
    def needing(self) -> frozenset[int]:
        """Places of the tensors that need a gradient."""
        return frozenset(a.place for a, n in zip(self.args, self.needs, strict=True) if n)

    def run(self, tensors: Sequence[torch.Tensor], is_fake: bool = False) -> OpaqueRun:
        given = self._as_given(tensors)
        args = pytree.tree_unflatten([taken(x, given) for x in self.leaves], self.structure)
        ctx, function = Context(self.needs), self.function
        with self.surroundings.entered():
            if is_fake and function.fake is not None:
                result = function.fake(ctx, *args)
            elif function.setup_context is None:
                result = function.forward(ctx, *args)
            else:
                result = function.forward(*args)
                function.setup_context(ctx, args, result)
        return run_of(result, given, ctx)

    def _as_given(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As autograd gives them: they require a gradient if one is needed."""
        given = [t.detach() for t in tensors]
        for place in self.needing:
            given[place].requires_grad_()
        return given


@dataclass(frozen=True, slots=True)
class OpaqueBackward:
    """A call of a backward. saved, attributes, gradients: places of tensors among the given ones,
    and what else there is; need: places of saved ones that require a gradient; copied: places of
    those that it writes into, of which it gets copies."""

    forward: OpaqueForward
    saved: tuple[Any, ...]
    attributes: Attributes
    gradients: tuple[Any, ...]
    tensors: Tensors
    need: tuple[int, ...]
    copied: tuple[int, ...]
    surroundings: AutocastThere

    @property
    def function(self) -> Opaque:
        return self.forward.function

    @property
    def called(self) -> str:
        return f"{self.function.called}.{self.function.backward_name}"

    def run(self, tensors: Sequence[torch.Tensor], is_fake: bool = False) -> OpaqueRun:
        given = [t.clone() if i in self.copied else t.detach() for i, t in enumerate(tensors)]
        for place in self.need:
            given[place].requires_grad_()
        function, ctx = self.function, Context(self.forward.needs)
        ctx.saved_tensors = tuple(taken(ref, given) for ref in self.saved)
        for name, leaves, structure in self.attributes:
            real = [taken(leaf, given) for leaf in leaves]
            setattr(ctx, name, pytree.tree_unflatten(real, structure))
        gradients = [taken(ref, given) for ref in self.gradients]
        kept = self.kept(given)
        with self.surroundings.entered():
            if not is_fake or function.fake is None:
                result = function.backward(ctx, *gradients)
            elif function.fake_backward is not None:
                result = function.fake_backward(ctx, *gradients)
            else:
                result = self._like_arguments()
        return run_of(self._needed(result), kept, None)

    def _needed(self, result: Any) -> tuple[Any, ...]:
        """A tuple, also of one, without gradients that nobody asks for, of which autograd makes
        nothing."""
        needs = self.forward.needs
        results = result if isinstance(result, tuple) else (result,)
        return tuple(r if i >= len(needs) or needs[i] else None for i, r in enumerate(results))

    def kept(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the given ones that it has itself, which the outcome refers to."""
        return [t for i, t in enumerate(given) if i not in self.copied]

    def _like_arguments(self) -> tuple[Any, ...]:
        call = self.forward
        pairs = zip(call.args, call.needs, strict=True)
        return tuple(_empty(call.tensors.specs[a.place]) if needs else None for a, needs in pairs)


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=dtype_of(spec), device=spec.device)


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A call that was found out about. results, structure, attributes: as in `OpaqueRun`; draws:
    from the generator of the device of its first result, or may do so."""

    call: OpaqueForward | OpaqueBackward
    outcome: Outcome
    results: tuple[Any, ...]
    structure: Any
    attributes: Attributes
    draws: bool


KNOWN: dict[str, Known] = {}
"""Key of a call -> what is known of it."""


def _known(key: str) -> Known:
    if key not in KNOWN:
        raise StalePlan(
            "the plan calls a function that was given to rockplan.opaque in another process; plan "
            "the module in this one"
        )
    return KNOWN[key]


def _made_as_known(*args: Any) -> list[torch.Tensor]:
    """Fake results of both operators."""
    return [_new(made) for made in KNOWN[args[-2]].outcome.made if made.base is None]


def _new(made: MadeByRun) -> torch.Tensor:
    spec, dtype = made.spec, dtype_of(made.spec)
    elements = -(-made.size_bytes // dtype.itemsize)
    flat = torch.empty(elements, dtype=dtype, device=spec.device)
    return flat.as_strided(spec.shape, spec.stride, spec.offset)


def _run_forward(
    given: list[torch.Tensor], changed: list[torch.Tensor], call: str, draws: bool
) -> list[torch.Tensor]:
    known = _known(call)
    assert isinstance(known.call, OpaqueForward)
    read, written = iter(given), iter(changed)
    places = range(len(given) + len(changed))
    tensors = [next(written if i in known.call.changed else read) for i in places]
    return _checked(known, tensors)


def _run_backward(given: list[torch.Tensor], call: str, draws: bool) -> list[torch.Tensor]:
    return _checked(_known(call), given)


def _checked(known: Known, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a run makes in new memory. Raises where it is another than the one that was recorded."""
    before = generator_states(tensors)
    run = known.call.run(tensors)
    if isinstance(known.call, OpaqueBackward) and run.outcome != known.outcome:
        run = _with_copies(known, run)
    called = known.call.called
    if run.outcome != known.outcome:
        raise UnsupportedModel(
            f"{called}, an opaque function, {known.outcome.differs(run.outcome)} than when it was "
            "planned. A plan needs the same of each run: what follows from shapes and from "
            "arguments that are no tensors alone"
        )
    fresh = run.fresh()
    repeated = {device_of_draws(fresh)} if known.draws else set()
    if not moved(before, generator_states(tensors)) <= repeated:
        raise UnsupportedModel(
            f"{called}, an opaque function, has drawn random numbers, which it did not when it was "
            "planned, or from another generator than that of the device of its first result: a run "
            "of it in a plan could not repeat them"
        )
    return fresh


def _with_copies(known: Known, run: OpaqueRun) -> OpaqueRun:
    """A run of a backward that returns what it was given (what was saved, where the gradient that
    comes in is one) in place of what it mostly makes: with copies of these."""
    outcome, first = known.outcome, len(run.tensors) - len(run.outcome.made)
    if len(run.results) != len(outcome.results):
        return run
    copies: dict[int, torch.Tensor] = {}
    for expected, found in zip(outcome.results, run.results, strict=True):
        place = expected.place if isinstance(expected, Ref) else -1
        made = outcome.made[place - first] if place >= first else None
        if made is None or made.base is not None or not isinstance(found, Ref):
            continue
        tensor = run.tensors[found.place]
        like = replace(tensor_spec(tensor), offset=made.spec.offset)
        if place not in copies and like == made.spec:
            copies[place] = _new(made).copy_(tensor)
    if sorted(copies) != [first + i for i, made in enumerate(outcome.made)]:
        return run
    tensors = (*run.tensors[:first], *(copies[place] for place in sorted(copies)))
    return OpaqueRun(outcome, tensors, known.results, known.structure)


def device_of_draws(fresh: Sequence[torch.Tensor]) -> str:
    """The one whose generator a plan can put back: that of the first result in new memory."""
    return str(fresh[0].device) if fresh else ""


def moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Generators that were drawn from between two looks at their states."""
    return {name for name, state in before.items() if state != after[name]}


def generator_states(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Of the generators of devices that may be drawn from, as bytes."""
    devices = {t.device.index for t in tensors if t.device.type == "cuda"}
    states = {f"cuda:{i}": torch.cuda.default_generators[i].get_state() for i in devices}
    states["cpu"] = torch.get_rng_state()
    return {device: state.numpy().tobytes() for device, state in states.items()}
