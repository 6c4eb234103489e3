"""Check: one step of the original and of the planned module on the sample, compared bit for bit.

takes: both modules and a call. returns: what `Plan.checked` records. guarantees: parameters,
gradients, buffers and generators are afterwards what they were before, and no hook of the caller's
on a parameter or an input sees the gradients of the check.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

from rockplan.errors import CheckFailed

_REPEATS = 2
"""Further planned steps: kernels that are not deterministic may repeat themselves by chance."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Named results of one step: outputs, gradients, buffers, generator states."""

    tensors: tuple[tuple[str, torch.Tensor | None], ...]


def check(
    module: nn.Module,
    original: Callable[..., Any],
    planned: Callable[..., Any],
    starts: Mapping[int, tuple[int, ...]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str:
    """Run `original` and `planned` (two forwards over the tensors of `module`) and compare.

    starts: leaf of the result that gets a gradient -> strides of that gradient. Raises CheckFailed
    where the planned step differs although eager repeats itself exactly, and where eager does not
    but the planned step does: it holds still what eager makes anew. Where neither does, nothing can
    be compared, which is warned of.
    """

    args, kwargs = _detached((args, kwargs))

    def step(forward: Callable[..., Any]) -> _Step:
        with _restored(module), _without_hooks(module):
            return _run(module, forward, starts, args, kwargs)

    expected = step(original)
    found = step(planned)
    difference = _first_difference(found, expected)
    if difference is None:
        return "equal to eager bit for bit on the sample"
    noise = _first_difference(step(original), expected)
    if noise is None:
        raise CheckFailed(
            f"the planned step differs from eager: {difference}. This is a bug of rockplan; "
            "use the original module, and please report the model"
        )
    if all(_first_difference(step(planned), found) is None for _ in range(_REPEATS)):
        raise CheckFailed(
            f"eager does not repeat itself ({noise}), but the planned step does: what the forward "
            "makes anew in Python at every call (draws of a generator of its own, numbers that it "
            "counts) stands still in a plan. Have it draw with torch, or pass such numbers in as "
            "tensors"
        )
    result = (
        f"eager does not repeat itself ({noise}); the planned step differs alike ({difference})"
    )
    warnings.warn(
        f"{result}, so the two cannot be compared; the cause may be an operator that is not "
        "deterministic (torch.use_deterministic_algorithms(True) tells)",
        stacklevel=2,
    )
    return result


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Buffers and generators are as before, and for autograd as if nobody had written to buffers:
    the check may run in the middle of a backward pass."""
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    before = [(b, b.detach().clone()) for b in module.buffers()]
    versioned = tuple(b for b, _ in before if not b.is_inference())
    with torch.random.fork_rng(devices), _unsafe_preserve_version_counter(versioned):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, content in before:
                    buffer.copy_(content)


@contextlib.contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Hooks on parameters (`Tensor.register_hook`) are set aside."""
    before = [(p, p._backward_hooks) for p in module.parameters() if p._backward_hooks]
    try:
        for parameter, _ in before:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, hooks in before:
            parameter._backward_hooks = hooks


def _detached(call: Any) -> Any:
    """`call` with leaves of their own, over the same memory, for tensors that require a gradient:
    what made them, and hooks on them, are the caller's."""
    leaves, structure = pytree.tree_flatten(call)
    own = {
        id(leaf): leaf.detach().requires_grad_()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    return pytree.tree_unflatten([own.get(id(leaf), leaf) for leaf in leaves], structure)


def _run(
    module: nn.Module,
    forward: Callable[..., Any],
    starts: Mapping[int, tuple[int, ...]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Step:
    leaves = pytree.tree_leaves((args, kwargs))
    targets: dict[str, torch.Tensor] = {
        n: p for n, p in module.named_parameters() if p.requires_grad
    }
    targets |= {
        f"input {i}": leaf
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    with torch.enable_grad():
        outputs = pytree.tree_leaves(forward(*args, **kwargs))
    roots = [outputs[i] for i in starts]
    tangents = [_ones(o, s) for o, s in zip(roots, starts.values(), strict=True)]
    kinds = {t.device.type for t in (*roots, *targets.values())}
    with contextlib.ExitStack() as without_autocast:  # in which the caller may call the module
        for kind in kinds:
            without_autocast.enter_context(torch.autocast(kind, enabled=False))
        gradients = torch.autograd.grad(roots, list(targets.values()), tangents, allow_unused=True)
    tensors = [(f"output {i}", o) for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)]
    buffers = [(f"buffer {n}", b.detach().clone()) for n, b in module.named_buffers()]
    named = [
        *((n, t.detach()) for n, t in tensors),
        *((f"gradient of {n}", g) for n, g in zip(targets, gradients, strict=True)),
        *buffers,
        ("generator state", torch.get_rng_state()),
    ]
    return _Step(tuple(named))


def _ones(like: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Ones in the shape of `like`; strides may be zero (an expanded gradient)."""
    reach = sum((n - 1) * s for n, s in zip(like.shape, strides, strict=True) if n)
    ones = torch.ones(reach + 1, dtype=like.dtype, device=like.device)
    return ones.as_strided(like.shape, strides)


def _first_difference(found: _Step, expected: _Step) -> str | None:
    for (name, a), (_, b) in zip(found.tensors, expected.tensors, strict=True):
        if a is None or b is None:
            if a is not b:
                return f"{name} exists in one of them only"
        elif not _same(a, b):
            largest = (a.double() - b.double()).abs().max().item() if a.is_floating_point() else ""
            return f"{name} by up to {largest}"
    return None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits up to the payload of NaNs."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
