"""Check: two steps of the original and of the planned module on the sample, compared bit for bit.
Compiled kernels are compared with a plan of the same kernels without re-executions, and the
distance of that plan from eager is measured.

takes: both modules and a call. returns: what `Plan.checked` records. guarantees: parameters,
gradients, buffers, other attributes of the modules, the sample and generators are afterwards what
they were, and no hook of the caller's on a parameter or an input sees the gradients of the check.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from rockplan.codegen.rng_replay import cuda_devices
from rockplan.codegen.unmade import UnmadeResult
from rockplan.errors import CheckFailed
from rockplan.graph_builder.fusion.kernels import bound_of, squares
from rockplan.graph_builder.tracing import eager_paths, modes, patches
from rockplan.graph_builder.tracing.stand_ins import with_stand_ins
from rockplan.python_state import trees
from rockplan.python_state.autocast import OFF, leaf_like, under_autocast
from rockplan.python_state.distributed import distributed, local_of, local_shape
from rockplan.python_state.given import GivenCall
from rockplan.python_state.hooks import hooks_aside
from rockplan.python_state.memory import Content, content_of, is_copyable, is_same_content, put_back
from rockplan.python_state.walk import Walk, shown, walk_of
from rockplan.runtime.program import ModuleCall
from rockplan.values.interface import ABSENT, PlacedStrides, Strides

_REPEATS = 2
"""Further runs of the planned step: nondeterministic kernels may repeat themselves by chance."""

_STEPS = 2
"""Steps in a row: Python state that a forward leaves for the next one shows in the second."""

NOTHING_RUNS_AGAIN = "the same kernels where nothing runs again"

_STANDS_STILL = (
    "what the forward makes anew in Python at every call (draws of a generator of its own, numbers "
    "that it counts) stands still in a plan. Have it draw with torch, or pass such numbers in as "
    "tensors"
)


@dataclass(frozen=True, slots=True)
class _StepResult:
    """The results of one step. tensors: (name, value) of outputs, gradients, tensors of the caller,
    generator states; data: (place, data now) of the first thing in Python that the step changed."""

    tensors: tuple[tuple[str, torch.Tensor | None], ...]
    data: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Given:
    """What a step starts from. tensors: (name, content) of each parameter, buffer, input and other
    tensor that the forward can reach."""

    call: ModuleCall
    forward: Callable[..., Any]
    walk: Walk
    tensors: tuple[tuple[str, Content], ...]

    @classmethod
    def of(cls, call: ModuleCall, forward: Callable[..., Any]) -> _Given:
        module, arguments = call.module, (call.args, call.kwargs)
        walk = walk_of(module, forward, *arguments)
        named = itertools.chain(
            ((f"parameter {n}", p) for n, p in module.named_parameters()),
            ((f"buffer {n}", b) for n, b in module.named_buffers()),
            ((f"input {i}", leaf) for i, leaf in enumerate(trees.tree_leaves(arguments))),
            ((str(place), value) for place, value in walk.tensors()),
        )
        named_tensors: dict[int, tuple[str, torch.Tensor]] = {}
        for name, value in named:
            if is_copyable(value):
                named_tensors.setdefault(id(value), (name, value))
        contents = tuple((n, content_of(t)) for n, t in named_tensors.values())
        return cls(call, forward, walk, contents)

    def now(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, content in self.tensors:
            same = is_same_content(content.tensor, content.copy)
            yield name, content.copy if same else content.tensor.detach().clone()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """And version counters, so that autograd takes no tensor for modified: the check may run in
        the middle of a backward pass."""
        tensors = [content.tensor for _, content in self.tensors]
        versioned = tuple(t for t in tensors if not t.is_inference())
        with (
            torch.random.fork_rng(cuda_devices(tensors)),
            _unsafe_preserve_version_counter(versioned),
            self.walk.restored(),
        ):
            try:
                yield
            finally:
                put_back(content for _, content in self.tensors)


def check(
    call: ModuleCall,
    original: Callable[..., Any],
    planned: Callable[..., Any],
    starts: Mapping[int, Strides],
    called: str = "eager",
) -> str:
    """Run two steps of `original` and of `planned` (two forwards over the tensors of the module),
    and compare them bit for bit. Returns what was found.

    starts: leaf of the result that gets a gradient -> strides of that gradient; called: name of the
    original in messages. Raises CheckFailed if the planned step differs although eager repeats
    itself exactly, and if eager does not repeat itself but the planned step does: it repeats what
    eager makes anew. If neither repeats itself, nothing can be compared, and a warning says so.
    """
    given = _Given.of(call, original)

    def steps(forward: Callable[..., Any]) -> tuple[_StepResult, ...]:
        with given.restored(), _alone(call):
            return tuple(_run(given, forward, starts) for _ in range(_STEPS))

    expected = steps(original)
    planned_steps = steps(planned)
    difference = _first_difference(planned_steps, expected)
    if difference is None:
        return f"equal to {called} bit for bit on the sample"
    noise = _first_difference(steps(original), expected)
    if noise is None:
        in_first = _first_difference(planned_steps[:1], expected[:1]) is not None
        cause = (
            "This is a bug of rockplan; use the original module, and please report the model"
            if in_first
            else f"Steps before it were equal: {_STANDS_STILL}"
        )
        raise CheckFailed(f"the planned step differs from {called}: {difference}. {cause}")
    if all(_first_difference(steps(planned), planned_steps) is None for _ in range(_REPEATS)):
        raise CheckFailed(
            f"{called} does not repeat itself ({noise}), but the planned step does: {_STANDS_STILL}"
        )
    result = (
        f"{called} does not repeat itself ({noise}); the planned step differs alike ({difference})"
    )
    warnings.warn(
        f"{result}, so the two cannot be compared; the cause may be an operator that is not "
        "deterministic (torch.use_deterministic_algorithms(True) tells)",
        stacklevel=2,
    )
    return result


@contextlib.contextmanager
def _alone(call: ModuleCall) -> Iterator[None]:
    aside = hooks_aside(call.module.parameters())
    with aside, modes.without_compiling(), modes.without_saved_tensor_hooks():
        yield


def distance(
    call: ModuleCall,
    original: Callable[..., Any],
    planned: Callable[..., Any],
    starts: Mapping[int, Strides],
    dtypes: Collection[torch.dtype],
) -> float:
    """Return the norm of the difference between the gradients of `planned` and of `original`, as a
    share of the norm of the latter: one step of each, with the arguments of `check`. dtypes: those
    that the step computes in.

    Raises CheckFailed if results, gradients or buffers are `too_far`, or generators end in other
    states, unless a second step of `original` is as far from the first. Warns if shares exceed
    `bound_of(dtypes)` for lack of digits alone.
    """
    given = _Given.of(call, original)
    bound = bound_of(dtypes)

    def step(forward: Callable[..., Any], is_rounded: bool = False) -> NamedTensors:
        with given.restored(), _alone(call):
            if is_rounded:
                round_otherwise([content.tensor for _, content in given.tensors], dtypes)
            return dict(_run(given, forward, starts, _drawn_numbers).tensors)

    expected = step(original)
    shares = shares_of(step(planned), expected)
    if _furthest(shares) <= bound:
        return shares["gradients"]
    says = ", ".join(f"{what} differ by {s:.1e}" for what, s in shares.items() if not s <= bound)
    says += f" of their norm, where {bound:g} is allowed"
    if _furthest(shares_of(step(original), expected)) > bound:
        warnings.warn(f"eager is as far from itself as the plan is from it: {says}", stacklevel=2)
    elif too_far(shares, bound, lambda: shares_of(step(original, is_rounded=True), expected)):
        raise CheckFailed(
            f"the planned step is too far from eager: {says}. Where that is not for "
            "want of digits (try Options(compile='near'), or a larger dtype), it is a bug of "
            "rockplan or of the compiler; plan without `compile` and `tile`, and please report the "
            "model"
        )
    else:
        warnings.warn(
            f"the plan is far from eager: {says}; but so is eager from itself where parameters and "
            "inputs are changed by a rounding",
            stacklevel=2,
        )
    return shares["gradients"]


_ROUNDINGS = 10
"""Kernels that round at other places may be so many times as far from eager as eager is from itself
when its parameters and inputs are rounded otherwise."""


def too_far(
    shares: Mapping[str, float], bound: float, of_rounded: Callable[[], Mapping[str, float]]
) -> dict[str, float]:
    """Return those of `shares` (kind of tensor -> distance from eager, of their norm) that exceed
    `bound`, but for those that lack of digits explains. of_rounded: returns the shares of eager
    itself after `round_otherwise`. They are large for gradients that are zero up to rounding, and
    where a rounding decides which of two elements is the largest."""
    far = {what: share for what, share in shares.items() if not share <= bound}
    if not far:
        return far
    least = of_rounded()
    return {what: share for what, share in far.items() if not share <= _ROUNDINGS * least[what]}


def round_otherwise(tensors: Iterable[torch.Tensor], dtypes: Collection[torch.dtype]) -> None:
    """Change each number of the floating-point `tensors` in place by one rounding, up or down at
    random from a fixed seed, of the coarsest of `dtypes` (under autocast a number is rounded to 16
    bits when it is read)."""
    coarsest = max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in tensors:
            repeats = any(
                n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
            )
            if tensor.is_floating_point() and not repeats and not tensor.is_inference():
                up = torch.rand(tensor.shape, generator=generator).to(tensor.device) < 0.5
                rounding = max(torch.finfo(tensor.dtype).eps, coarsest)
                change = rounding * (2 * up.double() - 1)
                tensor.copy_(tensor.double() * (1 + change))


_GROUPS = {"results": "output ", "gradients": "gradient of ", "buffers": "buffer "}
"""Group of tensors -> how their names begin."""

NamedTensors = Mapping[str, torch.Tensor | None]


def shares_of(actual: NamedTensors, expected: NamedTensors) -> dict[str, float]:
    """Return, for 'results', 'gradients' and 'buffers', the norm of the difference as a share of
    the norm of `expected`; for 'generator states' infinity if they differ, else 0."""
    shares = {what: _share(actual, expected, start) for what, start in _GROUPS.items()}
    states = [(actual[n], expected[n]) for n in expected if n.startswith("generator state")]
    is_same = all(a is not None and b is not None and torch.equal(a, b) for a, b in states)
    return shares | {"generator states": 0.0 if is_same else math.inf}


def _share(actual: NamedTensors, expected: NamedTensors, start: str) -> float:
    """Infinity if a tensor is in one of them only."""
    error = norm = 0.0
    for name in (n for n in {**expected, **actual} if n.startswith(start)):
        one, other = actual.get(name), expected.get(name)
        if one is None or other is None:
            if one is not other:
                return math.inf
        elif not isinstance(one, UnmadeResult) and (one.is_floating_point() or one.is_complex()):
            more, of_other = squares(one, other)
            error, norm = error + more, norm + of_other
    return math.sqrt(error / (norm or 1.0))


def _furthest(shares: Mapping[str, float]) -> float:
    """NaN counts as infinity."""
    return max(math.inf if math.isnan(share) else share for share in shares.values())


def runs(call: ModuleCall, forward: Callable[..., Any]) -> bool:
    """True if `forward` returns for this call rather than raises, and if memory does not suffice to
    tell. Everything is left as it was."""
    try:
        given = _Given.of(call, forward)
        with given.restored():
            own = with_stand_ins(call.args, call.kwargs, _detached())
            forward(*own.args, **own.kwargs)
    except torch.OutOfMemoryError:
        return True
    except Exception:
        return False
    return True


def _detached() -> Callable[[torch.Tensor], torch.Tensor]:
    """Over the same memory, the same tensor each time, of the same class, and a leaf if that is
    one. Autograd history, later in-place results and hooks stay with the caller's tensor."""
    own: dict[int, torch.Tensor] = {}

    def of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in own:
            made = leaf_like(tensor, tensor)
            if not tensor.is_leaf:
                with torch.enable_grad():
                    made = torch.ops.aten.alias(made)
            made.__dict__.update(tensor.__dict__)
            made.__class__ = type(tensor)
            own[id(tensor)] = made
        return own[id(tensor)]

    return of


def _run(
    given: _Given,
    forward: Callable[..., Any],
    starts: Mapping[int, Strides],
    numbers: Callable[[int], torch.Tensor] = torch.ones,
) -> _StepResult:
    """starts: position of a result that gets a gradient -> strides of this gradient; numbers: makes
    that many numbers of it."""
    call = given.call
    arguments = with_stand_ins(call.args, call.kwargs, _detached())
    args, kwargs = arguments.args, arguments.kwargs
    leaves, held = trees.tree_leaves((args, kwargs)), GivenCall.of(args, kwargs)
    differentiated: dict[str, torch.Tensor] = {
        n: p for n, p in call.module.named_parameters() if p.requires_grad
    }
    differentiated |= {
        f"input {i}": leaf
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    with torch.enable_grad(), patches.patched(_NOT_OF_A_STEP):
        outputs = trees.tree_leaves(held.with_contents(forward(*args, **kwargs)))
    roots = [outputs[i] for i in starts]
    tangents = [_laid_out(numbers, o, s) for o, s in zip(roots, starts.values(), strict=True)]
    with under_autocast(OFF):  # the caller may call the module under autocast
        gradients = torch.autograd.grad(
            roots, list(differentiated.values()), tangents, allow_unused=True
        )
    tensors = [(f"output {i}", o) for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)]
    named = [
        *((n, t.detach()) for n, t in tensors),
        *((f"gradient of {n}", g) for n, g in zip(differentiated, gradients, strict=True)),
        *given.now(),
        ("generator state", torch.get_rng_state()),
        *(
            (f"generator state of cuda:{device}", torch.cuda.get_rng_state(device))
            for device in cuda_devices(content.tensor for _, content in given.tensors)
        ),
    ]
    found = given.walk.difference(given.walk.again())
    data = () if found is None else ((str(found.place), shown(found.now)),)
    return _StepResult(tuple(named), data)


# Reentrant checkpoints refuse torch.autograd.grad, which leaves `.grad` of parameters as it is.
_NOT_OF_A_STEP = (eager_paths.REENTRANT_CHECKPOINT,)


def _drawn_numbers(count: int) -> torch.Tensor:
    # For ones, gradients of softmax and normalizations are zero up to rounding.
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def _laid_out(
    make: Callable[[int], torch.Tensor], like: torch.Tensor, strides: Strides
) -> torch.Tensor:
    spec = strides.spec if isinstance(strides, PlacedStrides) else None
    own = strides.strides if isinstance(strides, PlacedStrides) else strides
    shape = like.shape if spec is None else local_shape(spec)
    reach = sum((n - 1) * s for n, s in zip(shape, own, strict=True) if n)
    made = make(reach + 1).to(like.device, like.dtype).as_strided(shape, own)
    return made if spec is None else distributed(made, spec)


def _first_difference(actual: Sequence[_StepResult], expected: Sequence[_StepResult]) -> str | None:
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        difference = _difference(one, other)
        if difference is not None:
            return difference if number == 0 else f"{difference} in step {number + 1}"
    return None


def _difference(actual: _StepResult, expected: _StepResult) -> str | None:
    for (name, a), (_, b) in zip(actual.tensors, expected.tensors, strict=True):
        if a is None or b is None:
            if a is not b:
                return f"{name} exists in one of them only"
        elif not (isinstance(a, UnmadeResult) or is_same_content(a, b)):
            one_part, other_part = local_of(a).double(), local_of(b).double()
            furthest = (one_part - other_part).abs().max().item() if a.is_floating_point() else ""
            return f"{name} by up to {furthest}"
    one, other = dict(actual.data), dict(expected.data)
    for name in {**other, **one}:
        if one.get(name, ABSENT) != other.get(name, ABSENT):
            return f"{name} is {one.get(name, 'unchanged')}, not {other.get(name, 'unchanged')}"
    return None
