"""Inputs: what blocks are called with, found by one run of the sample.

takes: a model, its blocks, a sample. returns: the call of each block. guarantees: what the model
holds in Python, its buffers and the generators are as they were; nothing that autograd would save
for a backward pass stays.

The run is a real one, under autograd, since values of integers (positions, masks, routes) and
`requires_grad` decide what a block does; what autograd saves goes at once, so that it needs little
memory. Blocks that are called alike share the arguments of the first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rockplan.blocks.sharded import sharded_modules
from rockplan.codegen.guards import Autocast, autocast_state
from rockplan.codegen.hooks import hooks_aside
from rockplan.codegen.planned_module import kind_of_call, original_forward
from rockplan.codegen.rng_replay import cuda_devices
from rockplan.errors import InvalidInput
from rockplan.graph_builder.tracing import host_random
from rockplan.python_state import trees
from rockplan.python_state.gradients import gradients_aside
from rockplan.python_state.reach import Reached
from rockplan.python_state.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class SampleCall:
    """How a block is called. kind: by which programs are found; autocast: as it was."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: Any
    autocast: Autocast


def sample_calls(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, SampleCall]:
    """The call of each block, in the order of the calls.

    Raises InvalidInput for a block that is not called, and for one that is called several times."""
    calls: dict[str, SampleCall] = {}
    shared: dict[Any, SampleCall] = {}

    def noted(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def note(*own: Any, **named: Any) -> Any:
            if path in calls:
                raise InvalidInput(
                    f"block '{path}' is called several times in one forward, and would be planned "
                    "for one call; leave it out of `blocks`, or plan the module that calls it"
                )
            kind = kind_of_call(own, named)
            calls[path] = shared.setdefault(kind, SampleCall(own, named, kind, autocast_state()))
            return forward(*own, **named)

        return note

    with contextlib.ExitStack() as stack:
        for path, block in blocks.items():
            stack.enter_context(_with_forward(block, noted(path, original_forward(block))))
        stack.enter_context(untouched(model, args, kwargs))
        stack.callback(_reshard, model)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_nothing_saved())
        model(*args, **kwargs)
    missing = [path for path in blocks if path not in calls]
    if missing:
        several = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise InvalidInput(
            f"block '{missing[0]}'{several} is not called by this sample; pass a sample that "
            "reaches it, or leave it out of `blocks`. (LayerDrop leaves layers out by chance: set "
            "its probability to 0 while this plans)"
        )
    return calls


def without_history(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with leaves in place of what was computed from other tensors: a backward pass
    from here ends there."""
    leaves, spec = trees.tree_flatten((args, kwargs))
    detached: tuple[tuple[Any, ...], dict[str, Any]] = trees.tree_unflatten(
        [_without_history(leaf) for leaf in leaves], spec
    )
    return detached


def _without_history(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.is_leaf:
        return leaf
    return leaf.detach().requires_grad_()


def _reshard(model: nn.Module) -> None:
    """No backward pass comes, after which `fully_shard` would."""
    for module in sharded_modules(model):
        module.reshard()


@contextlib.contextmanager
def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module has another forward meanwhile, inside of its hooks."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def _nothing_saved() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _refuse_backward)


def _refuse_backward(saved: None) -> torch.Tensor:
    raise InvalidInput(
        "the forward of the model runs a backward pass of its own, for which the run that finds "
        "the inputs of blocks keeps nothing; plan the whole (rockplan.solve)"
    )


@contextlib.contextmanager
def untouched(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: object = None
) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """What the model holds, its buffers, gradients and the generators are as they were on exit, and
    no hook of the caller's on a tensor sees a gradient. loss: a function, to which that applies as
    well. Gives a context that puts the generators back, for several steps that draw alike."""
    snapshot = Snapshot.of(model, model.forward, (*args, loss), kwargs)
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    reached = (value for _, value in snapshot.reached.objects if isinstance(value, torch.Tensor))
    tensors = (*model.parameters(), *trees.tree_leaves((args, kwargs)), *reached)
    draws_restored = functools.partial(_draws_restored, cuda_devices(tensors), snapshot.reached)
    with (
        snapshot.restored(),
        draws_restored(),
        gradients_aside(tensors),
        hooks_aside(tensors),
    ):
        try:
            yield draws_restored
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


@contextlib.contextmanager
def _draws_restored(devices: list[int], reached: Reached) -> Iterator[None]:
    """PyTorch's generators, and those of Python and numpy."""
    with torch.random.fork_rng(devices), host_random.restored(reached):
        yield
