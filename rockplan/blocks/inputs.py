"""Inputs: the arguments of blocks, found by one run of the sample.

takes: a model, its blocks, a sample. returns: the call of each block, and the tensors that the run
wrote to. guarantees: all is left as it was (`untouched`); nothing that autograd would save for a
backward pass through a block stays alive.

The run is a real one, under autograd, since values of integers (positions, masks, routes) and
`requires_grad` decide what a block does; tensors that autograd saves in a block are freed at once,
so that it needs little memory. Blocks that are called alike share the arguments of the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from rockplan.errors import InvalidInput, StalePlan
from rockplan.graph_builder.tracing import eager_paths, patches
from rockplan.python_state import trees
from rockplan.python_state.autocast import Autocast, autocast_state, leaf_like
from rockplan.python_state.distributed import with_collectives_done
from rockplan.python_state.sharding import reshard
from rockplan.python_state.walk import Root, Walk
from rockplan.runtime.call_checks import refuse_transforms
from rockplan.runtime.planned_module import kind_of_call
from rockplan.runtime.planned_state import original_forward
from rockplan.solving.loss import Loss
from rockplan.solving.untouched import untouched


@dataclass(frozen=True, slots=True)
class SampleCall:
    """The call of a block. kind: the key of its programs; autocast: state during the call; held:
    its arguments with their contents, to which a model may add later (the features of dense
    connections)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: Any
    autocast: Autocast
    held: Walk

    @contextlib.contextmanager
    def as_called(self) -> Iterator[None]:
        """While active, lists and objects among the arguments have the contents that they had in
        the call; afterwards those from before."""
        with self.held.again().restored():
            self.held.restore()
            yield


@dataclass(slots=True)
class SampleRun:
    """The result of a sample run. calls: of each block by its path, in the order of the calls;
    missing: paths of blocks that are not called; repeated: of blocks that are called several times;
    called: identities of all modules that are called; written: tensors that the run wrote to."""

    calls: dict[str, SampleCall] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    repeated: set[str] = field(default_factory=set)
    called: set[int] = field(default_factory=set)
    written: tuple[torch.Tensor, ...] = ()


def sample_run(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None = None,
) -> SampleRun:
    """Run the sample once, with the loss if there is one; return what that shows: the call of each
    of `blocks` (path -> block), and tensors that are written to. Raises InvalidInput for a block
    under a transform of torch.func, or through which the forward runs a backward pass."""
    run = SampleRun()
    shared: dict[Any, SampleCall] = {}

    def noted(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def note(*given: Any, **named_given: Any) -> Any:
            """Calls of one kind have one SampleCall. Raises InvalidInput under torch.func."""
            own, named = with_collectives_done((given, named_given))
            try:
                refuse_transforms()
            except StalePlan as error:
                raise InvalidInput(f"block '{path}': {error}") from None
            if path in run.calls:
                run.repeated.add(path)
            kind = kind_of_call(own, named)
            if kind not in shared:
                held = Walk([Root("the arguments", (own, named), is_callers=True)])
                shared[kind] = SampleCall(own, named, kind, autocast_state(), held)
            run.calls.setdefault(path, shared[kind])
            with _saving_nothing(path):
                return forward(*own, **named)

        return note

    with contextlib.ExitStack() as stack:
        for path, block in blocks.items():
            noting = noted(path, original_forward(block))
            stack.enter_context(patches.exchanged(block, "forward", noting))
        found = stack.enter_context(untouched(model, args, kwargs, loss))
        stack.callback(register_module_forward_pre_hook(lambda m, _: run.called.add(id(m))).remove)
        stack.callback(reshard, model)
        stack.enter_context(torch.enable_grad())
        result = model(*args, **kwargs)
        if loss is not None:
            with contextlib.suppress(_BackwardThroughBlock):  # a loss may run one, in a real step
                loss(result)
        del result
    run.missing = tuple(path for path in blocks if path not in run.calls)
    run.written = found.written
    return run


def without_history(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) with computed tensors replaced by leaves that require a gradient, at
    which a backward pass ends; such a leaf shares the tensor's memory."""
    leaves, spec = trees.tree_flatten((args, kwargs))
    made = [isinstance(leaf, torch.Tensor) and not leaf.is_leaf for leaf in leaves]
    detached: tuple[tuple[Any, ...], dict[str, Any]] = trees.tree_unflatten(
        [leaf_like(x, x) if is_made else x for x, is_made in zip(leaves, made, strict=True)], spec
    )
    return detached


@contextlib.contextmanager
def _saving_nothing(path: str) -> Iterator[None]:
    """A backward pass through what autograd should have saved raises _BackwardThroughBlock."""

    def refuse(saved: None) -> torch.Tensor:
        raise _BackwardThroughBlock(
            f"the forward of the model runs a backward pass of its own through block '{path}', "
            "which a planned block has none for; plan the whole (rockplan.solve)"
        )

    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, refuse),
        patches.patched([eager_paths.TRANSFORMS_UNDER_HOOKS]),
    ):
        yield


class _BackwardThroughBlock(InvalidInput):
    """A backward pass needs what a block saved, which was dropped."""
