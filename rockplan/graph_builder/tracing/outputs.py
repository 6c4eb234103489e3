"""Outputs: the leaves of the result, and those that the backward pass starts from.

takes: the result of a recorded forward. returns: OutputLeaf for each leaf; positions and strides
that a backward pass most likely starts from. guarantees: leaves that no plan can return are
refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from rockplan.errors import InvalidInput, UnsupportedModel
from rockplan.graph_builder.tracing.recorder import Recorder, node_name, why_not_planned
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.python_state import distributed, trees
from rockplan.python_state.given import GivenContainer, WithContents
from rockplan.python_state.memory import is_wrapper
from rockplan.values import interface as interfaces

_RETURNED = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size),
    *(interfaces.GivenLeaf, GivenContainer),
)
"""Classes of leaves of a result beside tensors."""


def known_output(recorder: Recorder, position: int, leaf: Any) -> Any:
    """Return the leaf of the result at `position` as a fake tensor, or itself if it is plain data.
    A real tensor that no call has read (a cached table) becomes a constant. Raises CaptureError for
    a leaf that a plan cannot return."""
    if not isinstance(leaf, torch.Tensor):
        if not isinstance(leaf, _RETURNED):
            raise NAMED["opaque result"].error(position=position, kind=type(leaf).__qualname__)
        return leaf
    is_foreign = leaf.requires_grad and not distributed.is_fake(leaf)
    if is_foreign or is_wrapper(leaf):
        reason = why_not_planned(leaf, f"leaf {position} of the module's result")
        if reason is not None:
            raise UnsupportedModel(reason)
    if is_foreign:
        raise foreign_gradient(leaf)
    try:
        _ = leaf.grad_fn
    except RuntimeError as error:
        raise NAMED["result without a gradient"].error(position=position, error=error) from error
    return recorder.known_tensor(leaf)


def refuse_unwritten(recorder: Recorder, outputs: Sequence[Any]) -> None:
    """Raise if a leaf of the result is memory that nothing has written."""
    for position, output in enumerate(outputs):
        if isinstance(output, torch.Tensor):
            reader = f"leaf {position} of the module's result is"
            recorder.refuse_unwritten([recorder.value(output)], reader)


def given_apart(
    recorder: Recorder, outputs: Sequence[Any], inputs: Iterable[tuple[int, int]]
) -> list[Any]:
    """Return `outputs` with a `GivenLeaf` for each that is an argument which requires a gradient:
    its gradient does not go through the plan. inputs: (position of an argument's leaf, value)."""
    leaf_of = {value: interfaces.GivenLeaf(position) for position, value in inputs}
    return [
        leaf_of.get(recorder.value(output), output)
        if isinstance(output, torch.Tensor) and output.requires_grad
        else output
        for output in outputs
    ]


def backward_starts(
    outputs: Sequence[Any],
    spec: trees.TreeSpec,
    incoming: interfaces.Incoming | interfaces.Precedent | None,
    only_loss: bool = False,
) -> dict[int, interfaces.Strides]:
    """Return position of each leaf of the result that the backward pass starts from -> strides of
    its gradient. incoming: the same, as asked for, or of an earlier call (Precedent), where None
    means the strides of the leaf; None: the likely ones; only_loss: the caller uses only a loss.
    Raises InvalidInput if `incoming` names a leaf that requires no gradient."""
    candidates = _differentiable(outputs)
    if not candidates:
        raise NAMED["nothing to differentiate"].error()
    if isinstance(incoming, interfaces.Precedent):
        incoming = _as_before(incoming, outputs, candidates, _position_of_loss(outputs, spec))
    if incoming is None:
        likely = _loss(outputs, spec, candidates) if only_loss else likely_starts(outputs, spec)
        incoming = dict.fromkeys(likely)
    chosen = incoming
    if not chosen or not set(chosen) <= set(candidates):
        raise InvalidInput(
            f"differentiated is {tuple(chosen)}, but the leaves of the result that require a "
            f"gradient are {tuple(candidates)}"
        )
    firsts = first_places(outputs)
    return {firsts[i]: chosen[i] or distributed.strides_of(outputs[i]) for i in sorted(chosen)}


def _as_before(
    precedent: interfaces.Precedent,
    outputs: Sequence[Any],
    candidates: Sequence[int],
    named: int | None,
) -> interfaces.Incoming | None:
    """None if the starts of the earlier call do not fit, or if they reach less than all
    `candidates` reach, are not the loss (at `named`) alone, and occurred only once (a plan serves
    backward passes that reach less than planned, but none that reach more)."""
    before = precedent.incoming
    if not set(before) <= set(candidates):
        return None
    plain = {
        i: s
        for i, s in before.items()
        if s is not None and not isinstance(s, interfaces.PlacedStrides)
    }
    if any(len(s) != outputs[i].ndim for i, s in plain.items()):
        return None
    reached = leaves_reached(outputs[i] for i in before)
    whole = leaves_reached(outputs[i] for i in candidates)
    if not (whole <= reached or precedent.is_repeated or [*before] == [named]):
        return None
    shapes = precedent.shapes
    return {
        i: _like(plain[i], outputs[i].shape, shapes.get(i)) if i in plain else None for i in before
    }


def _like(
    example: tuple[int, ...], shape: Sequence[int], known: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the strides `example` of a tensor of the shape `known`. For another shape, those of a
    tensor without gaps whose dimensions are ordered so; 0 where `example` has 0."""
    if known == tuple(n if type(n) is int else None for n in shape):  # no questions to symbols
        return example
    strides = [0] * len(shape)
    step = 1
    for dimension in sorted(range(len(shape)), key=lambda d: (example[d], -d)):
        if example[dimension]:
            strides[dimension] = step
            step *= max(shape[dimension], 1)
    return tuple(strides)


def likely_starts(outputs: Sequence[Any], spec: trees.TreeSpec) -> tuple[int, ...]:
    """Return positions of the outputs that a step probably starts from, among those that require a
    gradient.

    The one that is named `loss`, as trainers expect, if it reaches all that any output reaches.
    Otherwise, if there are scalars, all outputs that no scalar is computed from: for a loss with
    logits, or with losses that it sums up, the loss; for an energy with forces both, since a loss
    may be computed from both. Without scalars, all.
    """
    candidates = _differentiable(outputs)
    named = _position_of_loss(outputs, spec)
    whole = leaves_reached(outputs[i] for i in candidates)
    is_scalar = named in candidates and outputs[named].ndim == 0
    if named is not None and is_scalar and whole <= leaves_reached([outputs[named]]):
        return (named,)
    return _no_parts_of_scalars(outputs, candidates)


def _differentiable(outputs: Sequence[Any]) -> list[int]:
    return [i for i, o in enumerate(outputs) if isinstance(o, torch.Tensor) and o.requires_grad]


def _no_parts_of_scalars(outputs: Sequence[Any], candidates: Sequence[int]) -> tuple[int, ...]:
    sources, firsts = sources_of(outputs), first_places(outputs)
    parts = {part for i in candidates if outputs[i].ndim == 0 for part in sources[i]}
    return tuple(i for i in candidates if firsts[i] not in parts)


def _loss(outputs: Sequence[Any], spec: trees.TreeSpec, candidates: Sequence[int]) -> Sequence[int]:
    """Return [position of the loss] among `candidates`: the leaf named `loss`, or the only scalar
    from which no other scalar is computed. Raises InvalidInput for none, or several."""
    named = _position_of_loss(outputs, spec)
    if named is not None and named in candidates:
        return [named]
    losses = [i for i in _no_parts_of_scalars(outputs, candidates) if outputs[i].ndim == 0]
    if len(losses) == 1:
        return losses
    if losses:
        raise InvalidInput(
            f"the leaves {tuple(losses)} of the result are scalars that require a gradient, and "
            "none is called `loss`; with only_loss say which one is: "
            f"Options(only_loss=True, differentiated=({losses[0]},))"
        )
    raise InvalidInput(
        "with only_loss the result of a step in training has a loss, a scalar that requires a "
        "gradient, and there is none in this one. Pass what it is computed from (`labels`), or "
        "plan without only_loss"
    )


def without_unread(
    recorder: Recorder, outputs: Sequence[Any], spec: trees.TreeSpec, starts: Collection[int]
) -> list[Any]:
    """Return `outputs` with `Unmade` for leaves that the caller does not use: those that are no
    scalars, not among `starts` (of backward), and have memory of their own."""
    callers = recorder.leaf_storages | {recorder.values[v].storage for v, _ in recorder.constants}
    names = [name for name, _ in trees.named_leaves(trees.tree_unflatten(outputs, spec))]

    def known(position: int, output: Any) -> Any:
        is_scalar = not isinstance(output, torch.Tensor) or output.ndim == 0
        if is_scalar or position in starts:
            return output
        value = recorder.values[recorder.value(output)]
        is_given = value.storage in callers
        return output if is_given else interfaces.Unmade(names[position], value.spec)

    return [known(position, output) for position, output in enumerate(outputs)]


def _position_of_loss(outputs: Sequence[Any], spec: trees.TreeSpec) -> int | None:
    """None if neither the result nor a container of the caller's calls a leaf `loss`."""
    result = trees.tree_unflatten(outputs, spec)
    if isinstance(result, WithContents):
        named = [_loss_of(r) for r in (result.result, *result.contents.values())]
    else:
        named = [_loss_of(result)]
    return next(
        (i for i, o in enumerate(outputs) if any(o is n for n in named if n is not None)), None
    )


def _loss_of(result: Any) -> Any:
    return result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)


def first_places(outputs: Sequence[Any]) -> tuple[int, ...]:
    """Return for each leaf of the result the position of the first leaf that is the same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(output), i) for i, output in enumerate(outputs))


def sources_of(outputs: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return for each leaf of the result the positions of other leaves that its backward pass goes
    through, ascending; () without a backward pass."""
    tensors = {
        i: outputs[i]
        for i in dict.fromkeys(first_places(outputs))
        if isinstance(outputs[i], torch.Tensor) and outputs[i].grad_fn is not None
    }
    at = {(t.grad_fn, t.output_nr): frozenset({i}) for i, t in tensors.items()}
    beyond: dict[Node, frozenset[int]] = {}
    waiting = [t.grad_fn for t in tensors.values()]
    while waiting:
        node = waiting[-1]
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        new = [n for n, _ in edges if n not in beyond]
        if not new:
            waiting.pop()
            passed = (beyond[n] | at.get((n, number), frozenset()) for n, number in edges)
            beyond[node] = frozenset().union(*passed)
        waiting += new
    nodes = [o.grad_fn if isinstance(o, torch.Tensor) else None for o in outputs]
    return tuple(() if n is None else tuple(sorted(beyond[n])) for n in nodes)


def output_leaves(
    recorder: Recorder,
    outputs: list[Any],
    sources: Sequence[tuple[int, ...]],
    tangents: Mapping[int, torch.Tensor],
) -> tuple[interfaces.OutputLeaf, ...]:
    """sources: as `sources_of`; tangents: position of a leaf -> its incoming gradient. Raises
    CaptureError for leaves that a plan cannot return."""
    leaves: list[interfaces.OutputLeaf] = []
    for position, (output, first) in enumerate(zip(outputs, first_places(outputs), strict=True)):
        if isinstance(output, torch.Tensor):
            value, tangent = recorder.value(output), tangents.get(position)
            if output.requires_grad and recorder.values[value].storage in recorder.leaf_storages:
                raise NAMED["result that is an argument"].error(position=position)
            # One with a gradient of its own the caller would find in `.grad`.
            if output.requires_grad and (output.is_leaf or output.retains_grad):
                raise NAMED["result with a gradient of its own"].error(position=position)
            incoming = None if tangent is None else recorder.value(tangent)
            leaf = (value, None, first, sources[position], incoming, output.requires_grad)
            specs = distributed.spec_of(output), distributed.spec_of(tangent)
            leaves.append(interfaces.OutputLeaf(*leaf, *specs))
        else:
            leaves.append(interfaces.OutputLeaf(None, output, first, (), None, False))
    return tuple(leaves)


def leaves_reached(outputs: Iterable[torch.Tensor]) -> set[torch.Tensor]:
    """Return the leaf tensors that a backward pass from `outputs` reaches."""
    roots = list(outputs)
    leaves = {leaf for _, leaf in accumulating(backward_nodes(roots))}
    return leaves | {t for t in roots if t.grad_fn is None}


def accumulating(nodes: Iterable[Node | None]) -> Iterator[tuple[Node, torch.Tensor]]:
    """Yield (node, leaf) of autograd nodes at which gradients of leaf tensors arrive."""
    for node in nodes:
        if node is not None and node_name(node) == "torch::autograd::AccumulateGrad":
            yield node, node.variable  # type: ignore[attr-defined]


def backward_nodes(roots: Sequence[torch.Tensor]) -> Iterator[Node]:
    """Yield the autograd nodes that a backward pass from `roots` runs, each once."""
    waiting = list(dict.fromkeys(t.grad_fn for t in roots if t.grad_fn is not None))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        followers = dict.fromkeys(n for n, _ in node.next_functions if n is not None)
        waiting += [n for n in followers if n not in seen]
        seen |= set(followers)


def foreign_gradient(tensor: torch.Tensor) -> Any:
    """Return the error for a tensor with gradient that is not the module's or the caller's."""
    if getattr(tensor, "_is_flat_param", False):
        return NAMED["flat parameters"].error()
    return NAMED["foreign parameter"].error(shape=tuple(tensor.shape))
