"""Runtime: registers the functions of a plan as autograd nodes.

One `_Seam` for each backward slice or run of them, chained by tokens of zero elements, one
`_Outputs` for the results, and a `_Result` for each of several: the engine runs the slices in order
and hands their gradients on. Activations and inner gradients never travel through autograd: one
saved tensor of zero elements carries them (`SavedForBackward`), so several calls can be in flight,
and dropping the outputs frees everything. See docs/model.md, Runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from rockplan.codegen.executable import Executable
from rockplan.codegen.result_aliasing import Returned
from rockplan.errors import BackwardError
from rockplan.python_state.distributed import distributed, has_others
from rockplan.python_state.hooks import has_hooks
from rockplan.runtime.backward_pass import PlannedCall, Replan, SavedForBackward
from rockplan.runtime.call_checks import under_checkpoint


class _Seam(torch.autograd.Function):
    """The autograd node of a run of backward slices, which returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any, call: PlannedCall, run: range, token: torch.Tensor | None, *targets: torch.Tensor
    ) -> torch.Tensor:
        """Return a token for the next seam, or `_Outputs`; token: of the seam before, None for the
        first."""
        ctx.call = call
        ctx.run = run
        ctx.is_first = token is None
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=targets[0].device if token is None else token.device)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor | None) -> tuple[Any, ...]:
        """One gradient for each input of `forward` (None for those that are no tensors). Slices at
        the end whose gradients nobody asks for are left out."""
        asked = [_is_asked(node) for node, _ in ctx.next_functions]
        goes_on = not ctx.is_first and asked.pop(0)
        last = len(asked) if goes_on else max(itertools.compress(range(len(asked)), asked))
        ends = itertools.accumulate(len(ctx.call.executable.targets[n]) for n in ctx.run)
        gradients = ctx.call.gradients(ctx.run[: 1 + sum(end <= last for end in ends)])
        unasked = [None] * (len(asked) - len(gradients))
        return (None, None, None if ctx.is_first else token, *gradients, *unasked)


def _is_asked(node: Any) -> bool:
    """True if the backward pass that runs goes on at this node."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf of torch.autograd.grad
        return True


class _Result(torch.autograd.Function):
    """The autograd node of one of several results.

    It is a node of its own since autograd calls hooks on each result of a node that it runs, with
    None for results without a gradient. Its inputs include the results that it is computed from, so
    that autograd also runs it when only their gradients are asked for.
    """

    @staticmethod
    def forward(
        ctx: Any, call: PlannedCall, position: int, result: torch.Tensor, *inner: torch.Tensor
    ) -> torch.Tensor:
        """position: which result it is; inner: results that it is computed from."""
        ctx.call = call
        ctx.position = position
        ctx.set_materialize_grads(False)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:
        outputs, *inner = (node for node, _ in ctx.next_functions)
        will_run = torch._C._will_engine_execute_node
        ends_here = not will_run(outputs) and any(map(will_run, inner))
        ctx.call.returned.check_between(ctx.position, ends_here)
        return None, None, gradient, *(None for _ in inner)


class _Outputs(torch.autograd.Function):
    """The autograd node of all results. Its backward only takes in the incoming gradients, so that
    the first slice can free them as soon as it has used them."""

    @staticmethod
    def forward(
        ctx: Any,
        call: PlannedCall,
        kept: SavedForBackward,
        tensors: tuple[torch.Tensor, ...],
        token: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return all results as outputs of this node. kept: what backward needs; tensors: what the
        generated forward returned; token: what the last seam returned."""
        ctx.call = call
        ctx.device = token.device
        _save(ctx, kept)
        ctx.set_materialize_grads(False)
        leaves = call.executable.outputs
        outputs = tuple(
            t.detach() if o.spec is None else distributed(t.detach(), o.spec)
            for t, o in zip(tensors, leaves, strict=True)
        )
        constant = [t for t, o in zip(outputs, leaves, strict=True) if not o.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """None where there is no gradient; the slices, which run next, compute with them. Raises
        BackwardError for second derivatives, batches of gradients and another autocast."""
        saved = ctx.saved_tensors  # raises eager's error if the graph was not retained
        if torch.is_grad_enabled():
            raise BackwardError(
                "a planned module cannot be differentiated twice (create_graph=True). Plan one "
                "whose forward takes the first derivatives itself, by torch.autograd.grad(..., "
                "create_graph=True), and returns them or the loss: the whole is planned, its "
                "second derivatives too. Or use the original module"
            )
        if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients):
            raise BackwardError(
                "a planned module takes one incoming gradient at a time, not a batch of them "
                "(is_grads_batched=True, jacobian(vectorize=True)); call backward for each, or use "
                "the original module"
            )
        call: PlannedCall = ctx.call
        executable = call.executable
        under_autocast = any(map(torch.is_autocast_enabled, executable.device_types))
        if under_autocast and not executable.backward_ignores_autocast:
            raise BackwardError(
                "backward of this module runs other operations under autocast than without, and "
                "was planned without, as PyTorch recommends: call backward() after the autocast "
                "block"
            )
        call.returned.check_memory(gradients)
        call.begin_backward(ctx.kept or saved[0].kept, gradients)
        return None, None, None, torch.empty(0, device=ctx.device)


def _save(ctx: Any, kept: SavedForBackward) -> None:
    """Have autograd save `kept`, as an attribute of a saved tensor of zero elements.

    Hooks on saved tensors may replace this tensor and lose the attribute: under hooks, `kept`
    becomes an attribute of the autograd node. The hooks of `torch.utils.checkpoint` return what is
    saved when they run the forward again, and must get the tensor, unless backward needs nothing:
    then nothing is saved, and no forward runs again.
    """
    is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    ctx.kept = None
    if is_hooked and not (under_checkpoint() and kept.is_needed):
        ctx.kept = kept
    else:
        carrier: Any = torch.empty(0)
        carrier.kept = kept
        ctx.save_for_backward(carrier)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call `function.apply` without its support of torch.func, under which no planned module runs
    (5 us in place of 8)."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def call(
    executable: Executable,
    residents: tuple[torch.Tensor, ...],
    wrappers: Mapping[int, torch.Tensor],
    replan: Replan,
) -> tuple[torch.Tensor, ...]:
    """Run the forward phase; return its results as outputs of autograd nodes that run the backward
    slices. residents: tensors that the code takes; wrappers: position among them -> the frozen
    wrapper that one is inside of; replan: plans other incoming gradients."""
    planned_call = PlannedCall(executable)
    kept = SavedForBackward(executable, residents, wrappers, replan)
    outputs = kept.forward()
    token: torch.Tensor | None = None
    targets = [[residents[i] for i in slice_] for slice_ in executable.targets]
    # Hooks, and processes that exchange gradients, begin as soon as there is one.
    are_awaited = has_others() or any(map(has_hooks, itertools.chain(*targets)))
    singly = [range(number, number + 1) for number in range(len(targets))]
    for run in reversed(singly if are_awaited else executable.code.groups):
        of_run = itertools.chain(*targets[run.start : run.stop])
        token = _apply(_Seam, planned_call, run, token, *of_run)
    relations = executable.relations
    tensors = _apply(_Outputs, planned_call, kept, outputs, token)
    results = dict(zip(relations.results, tensors, strict=True))
    for position, inner in relations.apart:
        results[position] = _apply(
            _Result, planned_call, position, results[position], *[results[i] for i in inner]
        )
    planned_call.returned = Returned(relations, results)
    return tuple(results.values())


def ends_of_backward(result: torch.Tensor) -> tuple[Any, Any] | None:
    """Return (first, last) autograd node of the planned backward phase that `result` belongs to;
    None if no plan returned `result`."""
    node: Any = result.grad_fn
    if _is_of(node, _Result):
        node = node.next_functions[0][0]
    if not _is_of(node, _Outputs):
        return None
    last = node
    while seams := [n for n, _ in last.next_functions if _is_of(n, _Seam)]:
        last = seams[0]
    return node, last


def _is_of(node: Any, function: type[torch.autograd.Function]) -> bool:
    return getattr(type(node), "_forward_cls", None) is function
