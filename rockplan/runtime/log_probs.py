"""Log-probabilities of tokens without their logits, for losses of one's own (DPO, KTO, GRPO).

takes: hidden states, the weight of the head. guarantees: logits exist for one block of the
vocabulary at a time, in forward and in backward, where each block is made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rockplan.errors import InvalidInput
from rockplan.graph_builder.foreign.opaque import opaque
from rockplan.python_state.distributed import is_distributed

BLOCKS = 256
"""Blocks of a large vocabulary: one in 16 bits takes three times its part of the logits."""

LEAST = 512
"""Least tokens of the vocabulary in a block."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Any:
    """Return the log-probability of each token of `ids` under the logits
    `(hidden @ weight.T + bias) / temperature`; with `entropy`, also the entropy of each
    distribution: a pair.

    hidden: (..., width), of the positions that predict `ids`; weight: (vocabulary, width), such as
    `model.lm_head.weight`, a frozen one also as a DTensor; ids: (...), integers; bias:
    (vocabulary,). Where ids are `ignore_index`, results are 0, without a gradient. Results have the
    shape of `ids`, in float32 (float64 for float64). As for a linear layer, autocast decides in
    which dtype products are. Raises InvalidInput; PyTorch raises for ids beyond the vocabulary.
    """
    if is_distributed(weight):
        if weight.requires_grad:
            raise InvalidInput(
                "token_log_probs got a sharded weight that is trained, whose gradients nobody "
                "would reduce: call it inside of the forward of the module that fully_shard was "
                "called on, where its parameters are gathered"
            )
        weight = weight.full_tensor()  # type: ignore[attr-defined]
    if ids.shape != hidden.shape[:-1] or hidden.shape[-1:] != weight.shape[1:] or weight.dim() != 2:
        raise InvalidInput(
            f"token_log_probs got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and "
            f"ids {tuple(ids.shape)}; pass (..., width), (vocabulary, width) and (...)"
        )
    if ids.is_floating_point() or not temperature > 0:
        raise InvalidInput(
            f"token_log_probs got ids of {ids.dtype} and a temperature of {temperature!r}; pass "
            "integers, and a number above 0"
        )
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])
    is_read = ids != ignore_index
    targets = ids.masked_fill(~is_read, 0).reshape(-1).long()
    apply: Any = _TokenLogProbs.apply
    found, spread = apply(rows, weight, bias, targets, temperature, entropy)
    log_probs = found.view(ids.shape).masked_fill(~is_read, 0)
    if not entropy:
        return log_probs
    return log_probs, spread.view(ids.shape).masked_fill(~is_read, 0)


@opaque
class _TokenLogProbs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        weight[:, 0].index_select(0, targets)  # raises for ids beyond the vocabulary
        wide = torch.promote_types(hidden.dtype, torch.float32)
        target = hidden.new_zeros(len(hidden), dtype=wide)
        most = torch.full_like(target, -torch.inf)
        # Of the exponentials of logits less the most: their sum, and that of them times the logits.
        total, weighted = torch.zeros_like(target), torch.zeros_like(target)
        for block, logits in _blocks(hidden, weight, bias, temperature):
            is_here, place = _places(targets, block)
            target += logits.gather(1, place).squeeze(1) * is_here
            before, most = most, torch.maximum(most, logits.amax(1))
            scale = (before - most).exp()
            exponentials = (logits.clone() if entropy else logits).sub_(most[:, None]).exp_()
            total = total * scale + exponentials.sum(1)
            if entropy:
                weighted = weighted * scale + exponentials.mul_(logits).sum(1)
        normalizer = most + total.log()
        spread = normalizer - weighted / total if entropy else torch.zeros_like(normalizer)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, spread)
        ctx.temperature, ctx.entropy = temperature, entropy
        return target - normalizer, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_found: Tensor, of_spread: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, spread = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        to_hidden = torch.zeros_like(hidden, dtype=normalizer.dtype) if needs_hidden else None
        to_weight = torch.empty_like(weight) if needs_weight else None
        to_bias = None if bias is None or not needs_bias else torch.empty_like(bias)
        for block, logits in _blocks(hidden, weight, bias, ctx.temperature):
            own = logits.clone() if ctx.entropy else logits
            probabilities = own.sub_(normalizer[:, None]).exp_()
            if ctx.entropy:
                mean = (normalizer - spread)[:, None]
                factors = logits.sub_(mean).mul_(-of_spread[:, None]).sub_(of_found[:, None])
            else:
                factors = -of_found[:, None]
            to_logits = probabilities.mul_(factors)
            is_here, place = _places(targets, block)
            to_logits.scatter_add_(1, place, (of_found * is_here)[:, None])
            to_logits = to_logits.div_(ctx.temperature).to(hidden.dtype)
            if to_hidden is not None:
                to_hidden += to_logits @ weight[block]
            if to_weight is not None:
                to_weight[block] = to_logits.T @ hidden
            if to_bias is not None:
                to_bias[block] = to_logits.sum(0)
        to_hidden = None if to_hidden is None else to_hidden.to(hidden.dtype)
        return to_hidden, to_weight, to_bias, None, None, None


def _blocks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield each block of the vocabulary and its logits over the temperature, (rows, block), in the
    dtype in which they are summed."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    size = max(-(-len(weight) // BLOCKS), LEAST)
    for start in range(0, len(weight), size):
        block = slice(start, start + size)
        own = None if bias is None else bias[block]
        logits = torch.nn.functional.linear(hidden, weight[block], own).to(wide)
        yield block, logits if temperature == 1 else logits.div_(temperature)


def _places(targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Return which targets are in the block, and where, (rows, 1): 0 for others."""
    is_here = (targets >= block.start) & (targets < block.stop)
    return is_here, (targets - block.start).masked_fill(~is_here, 0)[:, None]
